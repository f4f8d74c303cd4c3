"""Derivatives as ops: oneDNN's Backward kinds for piecewise functions and roots.

Each op multiplies the incoming gradient, diff_dst, by f'(src). Ops with the attribute use_dst can compute f' from
f(src) instead, which is cheaper, but less accurate where f saturates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from opgraph.ir.opdef import Attr, Attrs, OpDef, Port, Template
from opgraph.ops import derivative_references
from opgraph.ops.families import pointwise

_ALPHA = Attr(name="alpha", type="f32")
_BETA = Attr(name="beta", type="f32")
#: True if the first input is f(src).
USE_DST = Attr(name="use_dst", type="bool", default=True)
#: oneDNN's name of an input that is src or dst.
EITHER = "src/dst"
#: The product of d and diff_dst, a factor of second derivatives.
BOTH = "Multiply(d, diff_dst)"


def backward(
    kind: str,
    doc: str,
    *,
    src: str = "src",
    others: Sequence[Port] = (),
    attrs: Sequence[Attr] = (),
    reference: Callable[..., Any],
    expression: Template,
    torch: Callable[..., Any],
    decomposition: Template,
    second: Template,
    further: dict[str, Template] | None = None,
    cost: int,
    domain: tuple[tuple[float, float], ...] = ((-8, 8), (-4, 4)),
    source: str,
    check: Any = None,
    powers: bool = False,
) -> OpDef:
    """Registers an op f'(src) diff_dst. `second` is the gradient of src; `further` holds those of the other inputs."""

    def again(form: Attrs, given: Collection[str]) -> str:
        # The op is linear in diff_dst, so the gradient of diff_dst is the op itself.
        inputs = ["d" if name == "diff_dst" else name for name in (src, "diff_dst", *(p.name for p in others))]
        used = [n for n in inputs if n == "d" or n in given]
        return f"{kind}({', '.join([*used, *(f'{a.name}=${a.name}' for a in attrs if a.name in form)])})"

    return pointwise(
        kind,
        doc,
        inputs=(src, "diff_dst", *others),
        outputs=("diff_src",),
        attrs=attrs,
        reference=reference,
        expression=expression,
        torch=torch,
        onnx=(),
        decomposition=decomposition,
        cost=cost,
        domain=domain,
        source=source,
        check=check,
        powers=powers,
        gradient={src: second, "diff_dst": again, **(further or {})},
    )


def by_dst(of_dst: str, of_src: str) -> Template:
    """Returns a template that is `of_dst` where the attribute use_dst is true, and `of_src` where it is false."""
    return lambda attrs, given: of_dst if attrs["use_dst"] else of_src


ABS_BACKWARD = backward(
    "AbsBackward",
    "diff_src = diff_dst sign(src): 0 at 0, NaN at NaN.",
    reference=lambda x, d: np.where(x == 0, x.dtype.type(0), np.where(x < 0, -d, np.where(x > 0, d, x))),
    expression="og::abs_backward({src}, {diff_dst})",
    torch=lambda t, x, d: t.where(x == 0, 0.0, t.where(x < 0, -d, t.where(x > 0, d, x))),
    decomposition="Multiply(diff_dst, Sign(src))",
    second="0",
    cost=3,
    source="oneDNN Graph AbsBackward",
)

RELU_BACKWARD = backward(
    "ReLUBackward",
    "diff_src = 0 where src <= 0, else diff_dst (for NaN too, as in torch). dst = relu(src) gives the same, so use_dst "
    "makes no difference.",
    src=EITHER,
    attrs=(USE_DST,),
    reference=lambda x, d, use_dst: np.where(x <= 0, x.dtype.type(0), d),
    expression="og::relu_backward({src/dst}, {diff_dst})",
    torch=lambda t, x, d, use_dst: t.where(x <= 0, 0.0, d),
    decomposition="Select(LessOrEqual(src/dst, 0), 0, diff_dst)",
    second="0",
    cost=2,
    source="oneDNN Graph ReLUBackward",
)

CLAMP_BACKWARD = backward(
    "ClampBackward",
    "diff_src = diff_dst where min < src < max, else 0: at the bounds too, where the gradient of Clamp, as in torch, "
    "is diff_dst. dst = clamp(src) gives the same, so use_dst makes no difference.",
    src=EITHER,
    attrs=(Attr(name="min", type="f32"), Attr(name="max", type="f32"), USE_DST),
    reference=lambda x, d, min, max, use_dst: np.where((x > min) & (x < max), d, x.dtype.type(0)),
    expression="og::clamp_backward({src/dst}, {diff_dst}, {min}, {max})",
    torch=lambda t, x, d, min, max, use_dst: t.where((x > min) & (x < max), d, 0.0),
    decomposition="Select(And(Greater(src/dst, $min), Less(src/dst, $max)), diff_dst, 0)",
    second="0",
    cost=3,
    source="oneDNN Graph ClampBackward",
)


def _is_flat(x: Any, alpha: float, beta: float) -> Any:
    return (alpha * x + beta <= 0) | (alpha * x + (beta - 1) >= 0)


HARD_SIGMOID_BACKWARD = backward(
    "HardSigmoidBackward",
    "diff_src = alpha diff_dst where 0 < alpha src + beta < 1, else 0: at the borders too.",
    attrs=(_ALPHA, _BETA),
    reference=derivative_references.hard_sigmoid,
    expression="og::hard_sigmoid_backward({src}, {diff_dst}, {alpha}, {beta})",
    torch=lambda t, x, d, alpha, beta: t.where(
        _is_flat(x if x.itemsize > 2 else x.float(), alpha, beta), 0.0, alpha * d
    ),
    decomposition="Select(Or(LessOrEqual(Add(Multiply(src, $alpha), $beta), 0), "
    "GreaterEqual(Add(Multiply(src, $alpha), $beta), 1)), 0, Multiply(diff_dst, $alpha))",
    second="0",
    cost=6,
    source="oneDNN Graph HardSigmoidBackward",
)

HARD_SWISH_BACKWARD = backward(
    "HardSwishBackward",
    "diff_src = diff_dst (2 src + 3) / 6 where -3 < src < 3; 0 from -3 down, diff_dst from 3 up.",
    reference=lambda x, d: np.where(x <= -3, x.dtype.type(0), np.where(x >= 3, d, d * ((x + 1.5) / 3))),
    expression="og::hard_swish_backward({src}, {diff_dst})",
    torch=lambda t, x, d: t.where(x <= -3, 0.0, t.where(x >= 3, d, d * ((x + 1.5) / 3))),
    decomposition="Select(LessOrEqual(src, -3), 0, Select(GreaterEqual(src, 3), diff_dst, "
    "Multiply(diff_dst, Divide(Add(src, 1.5), 3))))",
    second=f"Select(And(Greater(src, -3), Less(src, 3)), Divide({BOTH}, 3), 0)",
    cost=8,
    domain=((-5, 5), (-4, 4)),
    source="oneDNN Graph HardSwishBackward",
)

ELU_BACKWARD = backward(
    "EluBackward",
    "diff_src = diff_dst where src > 0, else alpha e^src diff_dst; by dst = elu(src) it is (dst + alpha) diff_dst, "
    "for alpha >= 0.",
    src=EITHER,
    attrs=(_ALPHA, USE_DST),
    reference=lambda x, d, alpha, use_dst: (
        np.where(x > 0, d, d * (x + x.dtype.type(alpha))) if use_dst else derivative_references.elu(x, d, alpha)
    ),
    expression=lambda attrs, given: (
        f"og::elu_backward{'_dst' * attrs['use_dst']}({{src/dst}}, {{diff_dst}}, {{alpha}})"
    ),
    torch=lambda t, x, d, alpha, use_dst: t.where(x > 0, d, d * (x + alpha if use_dst else alpha * t.exp(x))),
    decomposition=by_dst(
        "Select(Greater(src/dst, 0), diff_dst, Multiply(diff_dst, Add(src/dst, $alpha)))",
        "Select(Greater(src/dst, 0), diff_dst, Multiply(diff_dst, Multiply(Exp(src/dst), $alpha)))",
    ),
    second=by_dst(f"Select(Greater(src/dst, 0), 0, {BOTH})", "Select(Greater(src/dst, 0), 0, Multiply(d, diff_src))"),
    cost=20,
    source="oneDNN Graph EluBackward",
)

SQRT_BACKWARD = backward(
    "SqrtBackward",
    "diff_src = diff_dst / (2 sqrt(src)), or diff_dst / (2 dst): infinite at 0, NaN for diff_dst = 0 there.",
    src=EITHER,
    attrs=(USE_DST,),
    reference=lambda x, d, use_dst: derivative_references.half_quotient(d, x if use_dst else np.sqrt(x)),
    expression=lambda attrs, given: f"og::sqrt_backward{'_dst' * attrs['use_dst']}({{src/dst}}, {{diff_dst}})",
    torch=lambda t, x, d, use_dst: d / (2 * (x if use_dst else t.sqrt(x))),
    decomposition=by_dst("Divide(diff_dst, Multiply(src/dst, 2))", "Divide(diff_dst, Multiply(Sqrt(src/dst), 2))"),
    second=by_dst(
        "Neg(Multiply(d, Divide(diff_src, src/dst)))", "Multiply(Multiply(d, -0.5), Divide(diff_src, src/dst))"
    ),
    cost=12,
    domain=((0.01, 4), (-4, 4)),
    source="oneDNN Graph SqrtBackward",
)
