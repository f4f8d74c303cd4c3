"""oneDNN's pointwise kinds."""

from __future__ import annotations

import numpy as np

from opgraph.ir.opdef import Attr, Onnx, Port
from opgraph.ops.families import AUTO_BROADCAST, NUMERIC, pointwise

SIGMOID = pointwise(
    "Sigmoid",
    "y = 1 / (1 + exp(-alpha x)). alpha is the factor of oneDNN's Swish RFC, first extension route; oneDNN has no such attribute.",
    attrs=(Attr(name="alpha", type="f32", default=1.0),),
    reference=lambda src, alpha: 0.5 * (1 + np.tanh(0.5 * (alpha * src))),
    expression=lambda a: "og::sigmoid({src})" if a["alpha"] == 1 else "og::sigmoid(og::mul({alpha}, {src}))",
    torch=lambda t, src, alpha: t.sigmoid(alpha * src if alpha != 1 else src),
    onnx=(Onnx(op_type="Sigmoid", since=13, fixed={"alpha": 1.0}),),
    decomposition="Sigmoid(Multiply(src, $alpha))",
    cost=20,
    domain=((-8, 8),),
    source="oneDNN Graph Sigmoid",
)

MULTIPLY = pointwise(
    "Multiply",
    "y = a b.",
    inputs=(Port(name="src_0", type="T1"), Port(name="src_1", type="T2")),
    outputs=(Port(name="dst", type="T3"),),
    types={"T1": NUMERIC, "T2": NUMERIC, "T3": NUMERIC},
    attrs=(AUTO_BROADCAST,),
    reference=lambda src_0, src_1, auto_broadcast: src_0 * src_1,
    expression="og::mul({src_0}, {src_1})",
    torch=lambda t, src_0, src_1, auto_broadcast: src_0 * src_1,
    onnx=(Onnx(op_type="Mul", since=13),),
    commutative=True,
    source="oneDNN Graph Multiply",
)
