"""benchdnn's rule for correct results: a threshold for the op that made a result, given once, by op family.

Source: oneDNN tests/benchdnn, setup_cmp of each driver (eltwise, binary, softmax, reduction, lnorm, bnorm, prelu, pool,
resampling, matmul, conv, reorder), utils/compare.cpp, graph/ref_primitive.cpp.

The truth is rounded to the output's dtype before the comparison. A value of at most 1e-5 is compared by its absolute
error, others by the relative one. If any op of the partition is elementwise, more is allowed. If at most one value in
1024 fails, the relative error of the whole tensor by the L2 norm decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.opdef import find

EPSILON = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7, "f8_e5m2": 0.25, "f8_e4m3": 0.125, "f64": 2.0**-52}
#: Significand bits, as bnorm and lnorm scale their thresholds.
DIGITS = {"f32": 24, "f16": 11, "bf16": 8}
#: Elementwise kinds that are approximated there: their threshold is ten times as large.
_HARD = ("GELU", "Elu", "Tanh", "SoftPlus", "Mish", "Log", "Swish", "Sigmoid")
L2 = 3e-3


@dataclass(frozen=True)
class Threshold:
    """The allowed error of a kind, in f32, and for other dtypes as a multiple of the dtype's epsilon."""

    f32: float
    other: float = 1.0

    def of(self, dtype: str) -> float:
        return self.f32 if dtype == "f32" else self.other * EPSILON.get(dtype, 0.0)


_E = EPSILON["f32"]
#: By family: a prefix of the kind. The first match counts.
TABLE: tuple[tuple[str, Threshold], ...] = (
    ("SoftMaxBackward", Threshold(40 * _E, 4)),
    ("LogSoftmaxBackward", Threshold(200 * _E, 20)),
    ("LogSoftmax", Threshold(50 * _E, 5)),
    ("SoftMax", Threshold(10 * _E)),
    ("ReduceL", Threshold(5 * _E, 5)),
    ("Reduce", Threshold(_E)),
    ("LayerNorm", Threshold(5e-7, 5e-7 / 2**-24)),
    ("RMSNorm", Threshold(5e-7, 5e-7 / 2**-24)),
    ("GroupNorm", Threshold(6e-7, 6e-7 / 2**-24)),
    ("BatchNorm", Threshold(6e-7, 6e-7 / 2**-24)),
    ("PReLU", Threshold(2 * _E, 2)),
    ("Interpolate", Threshold(7 * _E, 7)),
    ("AvgPool", Threshold(3 * _E, 3)),
    ("MatMul", Threshold(0.0, 0.0)),
    ("Conv", Threshold(0.0, 0.0)),
)
_BINARY = Threshold(_E)
_ELTWISE = Threshold(4e-6)
_ELTWISE_HARD = Threshold(4e-5)
_COPY = Threshold(0.0, 0.0)


def is_eltwise(op: og.Op) -> bool:
    """True for ops of benchdnn's eltwise driver: one tensor in (with its gradient, in backward)."""
    record = find(op.kind)
    return record is not None and record.is_pointwise and not record.is_cast and len(op.inputs) <= (
        2 if op.kind.endswith("Backward") else 1
    )  # fmt: skip


def threshold(op: og.Op, dtype: str, index: int = 0) -> float:
    """The allowed relative error of the result of an op.

    Args:
        dtype: of this output.
        index: of the output; gradients of norms' parameters have another threshold.
    """
    if op.kind in ("LayerNormBackward", "BatchNormTrainingBackward") and index > 0:
        return max(5e-6, EPSILON.get(dtype, 0.0) if dtype != "f32" else 0.0)
    for prefix, found in TABLE:
        if op.kind.startswith(prefix):
            return found.of(dtype)
    if is_eltwise(op):
        return (_ELTWISE_HARD if op.kind.startswith(_HARD) else _ELTWISE).of(dtype)
    record = find(op.kind)
    is_binary = record is not None and record.is_pointwise and not record.is_cast and len(op.inputs) > 1
    return (_BINARY if is_binary else _COPY).of(dtype)


def wrong(
    got: np.ndarray,
    exact: np.ndarray,
    op: og.Op,
    index: int,
    ops: Sequence[og.Op],
    before: Sequence[og.Op] = (),
    slack: np.ndarray | None = None,
) -> str:
    """The reason why a result is wrong by the rule; "" if it is right.

    Args:
        got: the device's result.
        exact: the result in float64.
        op, index: the op, and the index of this output.
        ops: the ops of its partition.
        before: the ops whose results it uses within a kernel: each may be off by its own threshold, as in the f32
            reference that benchdnn compares with.
        slack: the allowed error of a sum in f32, by value: benchdnn compares sums of irregular numbers with another f32
            sum. None: no error, the summands are exact.
    """
    dtype = op.outputs[index].dtype
    if got.shape != exact.shape:
        return f"shape {got.shape} instead of {exact.shape}"
    if dtype not in EPSILON:
        return _wrong_integers(got, exact, any(is_eltwise(o) for o in ops))
    with np.errstate(over="ignore"):  # infinite in the dtype
        rounded = exact.astype(got.dtype).astype(np.float64)
    value = got.astype(np.float64)
    with np.errstate(all="ignore"):
        off = np.abs(value - rounded)
        size = np.abs(rounded)
        relative = off / np.where(size > np.finfo(np.float32).tiny, size, 1.0)
        limit = max([threshold(op, dtype, index), *[threshold(o, dtype) for o in before]])
        right = (value == rounded) | ((size <= 1e-5) & (off < EPSILON["f32"]))
        right |= np.where(size > 1e-5, relative, off) <= limit
        right |= np.isnan(value) & np.isnan(rounded)
        if slack is not None:  # the stored value is the rounding of a number that near to the truth
            half_a_step = 0.5 * EPSILON[dtype] * 2.0 ** np.floor(np.log2(np.maximum(np.abs(exact), 1e-300)))
            right |= np.abs(value - exact) <= (slack + half_a_step) * (1 + 1e-6)
        if op.kind == "Divide":
            right |= off < EPSILON[dtype]
        if any(is_eltwise(o) for o in ops):
            right |= (off <= max(EPSILON[dtype], 2e-5)) | (relative <= max(EPSILON[dtype], 8e-6))
    bad = int((~right).sum())
    if bad == 0:
        return ""
    finite = np.isfinite(rounded) & np.isfinite(value)
    scale = np.linalg.norm(rounded[finite])
    norm = np.linalg.norm(value[finite] - rounded[finite]) / (scale if scale else 1.0)
    if bad <= got.size // 1024 and norm <= L2 and (finite | right).all():
        return ""
    worst = np.unravel_index(np.argmax(np.where(right, -1, np.nan_to_num(relative, nan=np.inf))), got.shape)
    return (
        f"{bad} of {got.size} values are off, at {tuple(map(int, worst))} {value[worst]} instead of {rounded[worst]} "
        f"(relative {relative[worst]:.3g}, allowed {limit:.3g}; L2 {norm:.3g})"
    )


def _wrong_integers(got: np.ndarray, exact: np.ndarray, has_eltwise: bool) -> str:
    """Compares integers: they are equal, except for a truth next to x.5, or after an approximated op."""
    info = dtypes.BY_NUMPY[got.dtype]
    value, truth = got.astype(np.float64), exact.astype(np.float64)
    rounded = np.rint(truth)
    if info.category == "int" and info.name in ("s8", "u8"):
        low, high = (-128, 127) if info.name == "s8" else (0, 255)
        rounded = np.clip(rounded, low, high)
    near_half = np.abs(np.floor(truth) + 0.5 - truth) < 9e-6
    right = (value == rounded) | ((np.abs(value - rounded) == 1) & (near_half | has_eltwise))
    bad = int((~right).sum())
    if bad == 0:
        return ""
    worst = tuple(int(i) for i in np.argwhere(~right)[0])
    return f"{bad} of {got.size} integers differ, at {worst} {value[worst]} instead of {truth[worst]}"
