"""Ops that stand for no computation of their own: End and Wildcard."""

from __future__ import annotations

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.opdef import Attrs, OpDef, Port, register

_ANY = {"T": (*dtypes.BY_NAME, dtypes.UNDEF)}


def _nothing_known(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    return ()


END = register(
    OpDef(
        kind="End",
        doc="Keeps its input as an output of the graph. It is in no partition.",
        family="structural",
        inputs=(Port(name="src"),),
        outputs=(),
        types=_ANY,
        infer=_nothing_known,
        onnx="none: an ONNX graph lists its outputs",
        source="oneDNN Graph End",
    )
)

WILDCARD = register(
    OpDef(
        kind="Wildcard",
        doc=(
            "An op that opgraph does not know: any inputs, outputs and attributes, kept exactly. One that an ONNX "
            "model brought along carries its node in the attributes and runs in onnxruntime."
        ),
        family="structural",
        inputs=(Port(name="src", variadic=True),),
        outputs=(Port(name="dst", variadic=True),),
        types=_ANY,
        infer=_nothing_known,
        onnx="the node that it was imported from",
        source="oneDNN Graph Wildcard",
    )
)
