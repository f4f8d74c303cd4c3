"""The kinds of steps by which a random scenario grows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from library_calls import CALLS
from random_scenario import Growing

from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.opdef import OpDef, all_ops
from opgraph.ops import samples

_COMPARISONS = ("Less", "Greater", "LessOrEqual", "GreaterEqual", "Equal", "NotEqual")
#: Values of an attribute, in place of those in the samples of an op.
_NUMBERS = (-20.0, -2.5, -1.0, -0.3, -1e-3, 1e-3, 0.1, 0.5, 1.0, 3.0, 20.0)
_NORMS = ("SoftMax", "SoftMax", "LogSoftmax", "LayerNorm", "RMSNorm", "SoftMaxBackward", "LogSoftmaxBackward")


@functools.cache
def _pointwise() -> tuple[OpDef, ...]:
    return tuple(r for r in all_ops() if r.is_pointwise)


@functools.cache
def _reductions() -> tuple[str, ...]:
    return tuple(r.kind for r in all_ops() if r.family == "reduction")


def step(grown: Growing, kinds: Mapping[Callable[[Growing], None], int] | None = None) -> None:
    """One more op, or a few that belong together.

    Args:
        kinds: the kinds of steps, and how often each is taken; all kinds by default.
    """
    chosen = kinds or _STEPS
    grown.rng.choices(tuple(chosen), tuple(chosen.values()))[0](grown)


def _float(grown: Growing) -> str:
    return grown.dtype if grown.rng.random() < 0.9 else grown.rng.choice(dtypes.FLOATS)


def _any_pointwise(grown: Growing) -> None:
    rng = grown.rng
    record = rng.choice(_pointwise())
    bound = {}
    for symbol, allowed in record.types.items():
        usual = _float(grown) if rng.random() < 0.8 else rng.choice(allowed)
        bound[symbol] = usual if usual in allowed else rng.choice(allowed)
    if "T1" in bound and "T2" in bound and rng.random() < 0.9 and bound["T1"] in record.types["T2"]:
        bound["T2"] = bound["T1"]
    forms = samples.forms(record, bound.get(record.inputs[0].type, grown.dtype))
    if not forms:
        return
    ports, attrs = rng.choice(forms)
    if rng.random() < 0.3:
        moved = [name for name, value in attrs.items() if isinstance(value, float) and rng.random() < 0.7]
        attrs = {**attrs, **{name: rng.choice(_NUMBERS) for name in moved}}
    given: list[LogicalTensor] = []
    for index, port in enumerate(ports):
        low, high = record.domain[index] if len(record.domain) > 1 else record.domain[0]
        if record.kind.startswith("Dropout") and port.name in ("seed", "offset", "probability"):
            given.append(grown.input(port.type, (), low, high))
            continue
        dtype = bound.get(port.type, port.type)
        dtype = dtype if dtype != "undef" else grown.dtype
        like = grown.shape(given[0]) if given and rng.random() < 0.95 else None
        value = given[0] if given and given[0].dtype == dtype and rng.random() < 0.1 else grown.value(dtype, like)
        given.append(grown.within(value, low, high))
    if "axis" in attrs and given:
        attrs = {**attrs, "axis": rng.randint(-len(grown.shape(given[0])) - 1, len(grown.shape(given[0])))}
    dtype = rng.choice(tuple(bound.values())) if record.is_cast else None
    outputs = rng.randint(1, len(record.outputs))
    grown.add(record.kind, *given, dtype=dtype, outputs=outputs, **attrs)


def _arithmetic(grown: Growing) -> None:
    rng, dtype = grown.rng, _float(grown)
    a = grown.value(dtype)
    if rng.random() < 0.3:
        grown.add(rng.choice(("Tanh", "Sigmoid", "Abs", "Neg", "Square", "ReLU", "Sin", "GELU")), a)
        return
    b = grown.value(dtype, grown.shape(a))
    if grown.reuses and rng.random() < 0.5:  # along the last axes, besides other axes
        fewer = [t for t in grown.values if t.dtype == a.dtype and 0 < len(grown.shape(t)) < len(grown.shape(a))]
        b = rng.choice([t for t in fewer if grown.shape(a)[-len(grown.shape(t)) :] == grown.shape(t)] or [b])
    grown.add(rng.choice(("Add", "Subtract", "Multiply", "Maximum", "Minimum")), *rng.choice(((a, b), (b, a))))


def _axes(grown: Growing, rank: int) -> tuple[int, ...]:
    chosen = [axis for axis in range(rank) if grown.rng.random() < 0.5] or list(range(max(rank - 1, 0), rank))
    grown.rng.shuffle(chosen)
    return tuple(a - rank if grown.rng.random() < 0.5 else a for a in chosen)


def _reduce(grown: Growing) -> None:
    rng = grown.rng
    value = grown.value(_float(grown))
    axes = _axes(grown, len(grown.shape(value)))
    kind = rng.choice(_reductions()) if rng.random() < 0.5 else rng.choice(("ReduceSum", "ReduceMean", "ReduceMax"))
    keep = rng.random() < 0.6
    made = grown.add(kind, value, axes=axes, keep_dims=keep)
    if made and rng.random() < 0.6:  # used with its own operand
        back = made if keep else grown.add("Unsqueeze", made[0], axes=axes)
        if back:
            grown.add(rng.choice(("Add", "Subtract", "Multiply", "Maximum")), value, back[0])


def _norm(grown: Growing) -> None:
    rng = grown.rng
    kind = rng.choice(_NORMS)
    value = grown.value(_float(grown))
    rank = len(grown.shape(value))
    if kind in ("SoftMax", "LogSoftmax"):
        axis = rng.randint(-rank, max(rank - 1, 0))
        modes = {"mode": rng.choice(("none", "inf_as_zero"))} if kind == "SoftMax" else {}
        grown.add(kind, value, axis=axis, outputs=rng.choice((1, 1, 2)) if kind == "SoftMax" else 1, **modes)
    elif kind.endswith("Backward"):
        grown.add(kind, value, grown.value(value.dtype, grown.shape(value)), axis=rng.randint(-rank, max(rank - 1, 0)))
    elif rank:
        begin = rng.randrange(rank)
        dims = grown.graph_dims(value)[begin:] if rng.random() < 0.7 else None
        attrs: dict[str, Any] = {
            "begin_norm_axis": rng.choice((begin, begin - rank)),
            "epsilon": rng.choice((1e-5, 0.25)),
        }
        small = "f32" if value.dtype == "f16" and kind == "LayerNorm" else value.dtype
        affine = [grown.input(small, dims) for _ in range(2 if kind == "LayerNorm" else 1)] if dims is not None else []
        if kind == "LayerNorm":
            attrs.update(use_affine=bool(affine), keep_stats=rng.random() < 0.4)
        outputs = 3 if attrs.get("keep_stats") else 1
        grown.add(kind, value, *affine, outputs=outputs, **attrs)


def _select(grown: Growing) -> None:
    rng, dtype = grown.rng, _float(grown)
    a = grown.value(dtype)
    b = grown.value(dtype, grown.shape(a))
    if rng.random() < 0.4:
        condition = grown.value("boolean", grown.shape(a))
    else:
        c = grown.value(dtype, grown.shape(a))
        found = grown.add(rng.choice(_COMPARISONS), *rng.choice(((a, c), (c, b), (b, c))))
        if not found:
            return
        condition = found[0]
    if rng.random() < 0.2:
        turned = grown.add("Not", condition)
        condition = turned[0] if turned else condition
    grown.add("Select", condition, a, b)


def _cast(grown: Growing) -> None:
    value = grown.rng.choice(grown.values)
    via = grown.rng.choice(("f64", "f32", "bf16", "f16", "s64", "s32", "s8", "s8", "u8", "u8", "boolean"))
    if value.dtype in dtypes.FLOATS and via in dtypes.INTS and grown.rng.random() < 0.7:
        info = np.iinfo(dtypes.get(via).numpy)  # scaled to its limits
        made = grown.add("Multiply", value, grown.scalar(value.dtype, grown.rng.choice((0.3, 1.0, 3.0)) * info.max / 3))
        value = made[0] if made else value
    made = grown.add("TypeCast", value, dtype=via)
    if made and grown.rng.random() < 0.5:
        grown.add("TypeCast", made[0], dtype=grown.dtype)


def _sum(grown: Growing) -> None:
    value = grown.value(_float(grown))
    wide = grown.shape(value)
    fits = [t for t in grown.values if _is_part(grown.shape(t), wide)]
    if fits:
        grown.add("SumTo", value, grown.rng.choice(fits))


def _channel(grown: Growing) -> None:
    """An op with operands along the channel axis, the second or the last."""
    rng = grown.rng
    wide = [t for t in grown.values if t.dtype == grown.dtype and len(grown.shape(t)) > 1]
    if not wide:
        return
    value = rng.choice(wide)
    axis, layout = rng.choice(((1, "NCX"), (len(grown.shape(value)) - 1, "NXC")))
    dims, size = (grown.graph_dims(value)[axis],), grown.shape(value)[axis]
    kinds = ("BiasAdd", "BiasAddBackward", "PReLU", "BroadcastTo", "SumTo", "BatchNormInference", "GroupNorm")
    kind = rng.choice(kinds + 6 * kinds[-1:] if grown.reuses else kinds)
    if kind == "BiasAdd":
        grown.add(kind, value, grown.input(value.dtype, dims), data_format=layout)
    elif kind == "BiasAddBackward":
        grown.add(kind, value, data_format=layout)
    elif kind in ("PReLU", "SumTo"):
        grown.add(kind, value, grown.input(value.dtype, dims), data_format=layout, per_channel_broadcast=True)
    elif kind == "BroadcastTo":
        grown.add(kind, grown.input(value.dtype, dims), value, data_format=layout, per_channel_broadcast=True)
    elif value.dtype == "f16":
        return  # statistics are f32, bf16 or f64
    elif kind == "GroupNorm":
        groups = rng.choice([n for n in (1, 2, 3, 4, size) if n and size % n == 0] or [1])
        affine = [grown.input(value.dtype, dims) for _ in range(2)] if rng.random() < 0.6 else []
        outputs = rng.choice((1, 3))
        attrs = {"groups": groups, "use_affine": bool(affine), "keep_stats": outputs == 3, "data_format": layout}
        grown.add(kind, value, *affine, outputs=outputs, **attrs)
    else:
        parts = [grown.input(value.dtype, dims) for _ in range(3)]
        grown.add(kind, value, *parts, grown.input(value.dtype, dims, 0.5, 4.0), epsilon=0.001, data_format=layout)


def _channel_in_training(grown: Growing) -> None:
    """A norm over batches in training, and gradients of operands along the channel axis."""
    rng = grown.rng
    wide = [t for t in grown.values if t.dtype == grown.dtype != "f16" and len(grown.shape(t)) > 1]
    if not wide:
        return
    value = rng.choice(wide)
    axis, layout = rng.choice(((1, "NCX"), (len(grown.shape(value)) - 1, "NXC")))
    dims, whole = (grown.graph_dims(value)[axis],), grown.graph_dims(value)
    affine = [grown.input(value.dtype, dims) for _ in range(rng.choice((0, 2)))]
    how = rng.randrange(3)
    if how == 0:
        slope = grown.input(value.dtype, dims)
        grown.add("PReLUBackward", value, slope, grown.input(value.dtype, whole), outputs=2, data_format=layout)
        return
    attrs: dict[str, Any] = {"epsilon": 0.25, "data_format": layout}
    mean, variance = grown.input(value.dtype, dims), grown.input(value.dtype, dims, 0.5, 4.0)
    if how == 1:
        grown.add("BatchNormForwardTraining", value, mean, variance, *affine, outputs=5, momentum=0.5, **attrs)
    else:
        d, gamma = grown.input(value.dtype, whole), affine[:1]
        grown.add("BatchNormTrainingBackward", value, d, mean, variance, *gamma, outputs=1 + 2 * len(gamma), **attrs)


def _reshape(grown: Growing) -> None:
    """The same elements in other axes, ones among them."""
    rng = grown.rng
    value = rng.choice(grown.values)
    sizes = list(_reshaped(grown, grown.shape(value)))
    for _ in range(rng.choice((0, 0, 1, 2))):
        if 1 in sizes and rng.random() < 0.5:
            sizes.remove(1)
        else:
            sizes.insert(rng.randint(0, len(sizes)), 1)
    if len(sizes) < 6:
        grown.add("StaticReshape", value, shape=tuple(sizes), special_zero=False)


def _centered(grown: Growing) -> None:
    """Values minus the mean of their row, which loses its axes and gets them back."""
    value = grown.value(_float(grown))
    axes = _axes(grown, len(grown.shape(value)))
    means = grown.add("ReduceMean", value, axes=axes, keep_dims=False)
    back = grown.add("Unsqueeze", means[0], axes=axes) if means else []
    low = grown.add("Subtract", value, back[0]) if back else []
    squares = grown.add("Square", low[0]) if low else []
    if squares:
        grown.add("ReduceMean", squares[0], axes=axes, keep_dims=grown.rng.random() < 0.5)


def _is_part(shape: tuple[int, ...], wide: tuple[int, ...]) -> bool:
    padded = (1,) * (len(wide) - len(shape)) + shape
    return len(shape) <= len(wide) and all(a in (1, b) for a, b in zip(padded, wide, strict=True))


def _moved(grown: Growing) -> None:
    """The same elements in another shape or order, or along more axes."""
    rng = grown.rng
    value = rng.choice([t for t in grown.values if t.dtype in _MOVED] or grown.values)
    shape = grown.shape(value)
    rank = len(shape)
    how = rng.randrange(6)
    if how == 0:
        order = list(range(rank))
        rng.shuffle(order)
        grown.add("StaticTranspose", value, order=tuple(order))
    elif how == 1:
        grown.add("StaticReshape", value, shape=_reshaped(grown, shape), special_zero=rng.random() < 0.3)
    elif how == 2:
        grown.add("Unsqueeze", value, axes=tuple({rng.randint(-1, rank) for _ in range(rng.randint(1, 2))}))
    elif how == 3:
        ones = [a for a, size in enumerate(shape) if size == 1]
        grown.add("Squeeze", value, axes=tuple(rng.sample(ones, rng.randint(0, len(ones)))))
    else:
        like = rng.choice(grown.values)
        grown.add("BroadcastTo" if how == 4 else "ReshapeTo", value, like)


_MOVED = ("f64", "f32", "bf16", "f16", "s64", "s32", "s8", "u8", "boolean")


def _reshaped(grown: Growing, shape: tuple[int, ...]) -> tuple[int, ...]:
    rng, sizes = grown.rng, list(shape)
    for _ in range(2):
        if len(sizes) > 1 and rng.random() < 0.6:
            at = rng.randrange(len(sizes) - 1)
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        elif sizes:
            at = rng.randrange(len(sizes))
            by = next((n for n in (2, 3, 5, 7) if sizes[at] and sizes[at] % n == 0), 1)
            sizes[at : at + 1] = [by, sizes[at] // by]
    if sizes and math.prod(sizes) and rng.random() < 0.5:
        sizes[rng.randrange(len(sizes))] = -1
    return tuple(sizes)


def _cut(grown: Growing) -> None:
    """A slice, slices put together, or several values side by side."""
    rng = grown.rng
    value = rng.choice([t for t in grown.values if t.dtype in _MOVED] or grown.values)
    shape = grown.shape(value)
    rank = len(shape)
    if not rank:
        return
    axis = rng.randrange(rank)
    if rng.random() < 0.4:
        fits = [
            t
            for t in grown.values
            if t.dtype == value.dtype
            and _but(grown.shape(t), axis) == _but(shape, axis)
            and len(grown.shape(t)) == rank
        ]
        parts = [rng.choice(fits) for _ in range(rng.randint(1, 3))]
        if sum(math.prod(grown.shape(t)) for t in parts) < 100_000:
            grown.add("Concat", *parts, axis=rng.choice((axis, axis - rank)))
        return
    size = shape[axis]
    if rng.random() < 0.4 and size > 1:  # split in two, the halves used together
        at = rng.randint(1, size - 1)
        halves = [grown.add("Slice", value, starts=(s,), ends=(e,), axes=(axis,)) for s, e in ((0, at), (at, size))]
        if all(halves):
            if rng.random() < 0.5:
                turned = [h[0] for h in halves] if rng.random() < 0.5 else [halves[1][0], halves[0][0]]
                grown.add("Concat", *turned, axis=axis)
            else:
                grown.add("Multiply", *(h[0] for h in halves))
        return
    starts, ends = rng.randint(-size - 1, size), rng.randint(-size - 1, size + 2)
    steps = rng.choice((1, 1, 2, 3, -1, -2))
    made = grown.add("Slice", value, starts=(starts,), ends=(ends,), axes=(axis,), steps=(steps,))
    if made and rng.random() < 0.3:
        grown.add("SliceBackward", made[0], value, starts=(starts,), ends=(ends,), axes=(axis,), steps=(steps,))


def _but(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _library(grown: Growing) -> None:
    """One of the calls that tests make of library ops, on values that are reshaped to fit."""
    rng = grown.rng
    kind = rng.choice(sorted(CALLS)) if rng.random() < 0.6 else rng.choice(("MatMul", "Convolution", "GroupNorm"))
    record = opdef.get(kind, where="")
    call = rng.choice(CALLS[kind])
    given = []
    for index, (port, shape) in enumerate(zip(record.with_optional(len(call.shapes)), call.shapes, strict=True)):
        allowed = record.types.get(port.type, (port.type,))
        dtype = grown.dtype if grown.dtype in allowed else allowed[0]
        if index in call.given:
            given.append(grown.fixed(call.given[index]))
            continue
        low, high = record.domain[index] if len(record.domain) > 1 else record.domain[0]
        same = [t for t in grown.values if t.dtype == dtype and math.prod(grown.shape(t)) == math.prod(shape)]
        found = []
        if same and rng.random() < 0.6:
            chosen = rng.choice(same)
            found = [chosen] if grown.shape(chosen) == shape else grown.add(
                "StaticReshape", chosen, shape=tuple(shape), special_zero=False
            )  # fmt: skip
        given.append(grown.within(found[0], low, high) if found else grown.input(dtype, shape, low, high))
    grown.add(kind, *given, outputs=call.outputs, **call.attrs)


def _unit(grown: Growing) -> None:
    """A named unit, spelled in ops."""
    rng = grown.rng
    x = grown.value(_float(grown))
    rank = len(grown.shape(x))
    how = rng.randrange(4)
    if how == 0:  # a swish
        a = grown.value(x.dtype, grown.shape(x)) if rng.random() < 0.5 else x
        inner = grown.add("Multiply", x, a) if a is not x else [x]
        gate = grown.add("Sigmoid", inner[0]) if inner else []
        if gate:
            grown.add("Multiply", *rng.choice(((x, gate[0]), (gate[0], x))))
    elif how == 1 and rank:  # softmax, spelled
        axes = _axes(grown, rank)
        top = grown.add("ReduceMax", x, axes=axes, keep_dims=True)
        low = grown.add("Subtract", x, top[0]) if top else []
        e = grown.add("Exp", low[0]) if low else []
        total = grown.add("ReduceSum", e[0], axes=axes, keep_dims=True) if e else []
        if total:
            grown.add("Divide", e[0], total[0])
    elif how == 2 and rank:  # a norm, spelled
        axes = _axes(grown, rank)
        mean = grown.add("ReduceMean", x, axes=axes, keep_dims=True)
        low = grown.add("Subtract", x, mean[0]) if mean else []
        square = grown.add("Square", low[0]) if low else []
        variance = grown.add("ReduceMean", square[0], axes=axes, keep_dims=True) if square else []
        shifted = grown.add("Add", variance[0], grown.scalar(x.dtype, 0.01)) if variance else []
        scale = grown.add("Rsqrt", shifted[0]) if shifted else []
        if scale:
            grown.add("Multiply", low[0], scale[0])
    elif how == 3 and rank and grown.shape(x)[-1] % 2 == 0 and grown.shape(x)[-1]:  # a gated unit
        half = grown.shape(x)[-1] // 2
        a = grown.add("Slice", x, starts=(0,), ends=(half,), axes=(-1,))
        b = grown.add("Slice", x, starts=(half,), ends=(2 * half,), axes=(-1,))
        gate = grown.add(rng.choice(("Swish", "GELU", "Sigmoid")), a[0]) if a and b else []
        if gate:
            grown.add("Multiply", gate[0], b[0])


def _quantized(grown: Growing) -> None:
    """Quantizes to a narrow dtype and back."""
    rng = grown.rng
    x = grown.within(grown.value("f32"), -100.0, 100.0)
    if rng.random() < 0.4:
        scales, zps = grown.input("f32", (1,), 0.05, 1.0), grown.input(rng.choice(("s8", "u8", "s32")), (1,))
        chosen = (scales, zps) if rng.random() < 0.6 else (scales,)
        made = grown.add("DynamicQuantize", x, *chosen, dtype=rng.choice(("u8", "s8")), qtype="per_tensor")
        if made:
            grown.add("DynamicDequantize", made[0], *chosen, dtype="f32", qtype="per_tensor")
        return
    dtype = rng.choice(("u8", "s8", "f8_e4m3", "f8_e5m2"))
    scale = rng.choice((0.25, 1.0, 0.0625))
    zero = rng.choice((0, 3)) if dtype in ("u8", "s8") else 0
    zps = {"zps": (zero,)} if dtype in ("u8", "s8") else {}
    made = grown.add("Quantize", x, dtype=dtype, scales=(scale,), qtype="per_tensor", **zps)
    if made:
        grown.add("Dequantize", made[0], scales=(scale,), qtype="per_tensor", **zps)


#: The kinds of steps, and how often each is taken.
_STEPS = {
    _any_pointwise: 12, _arithmetic: 10, _reduce: 7, _norm: 4, _select: 4, _moved: 5, _cut: 4, _cast: 2, _library: 4,
    _unit: 4, _sum: 3, _channel: 3, _quantized: 1,
}  # fmt: skip
#: Those for large arrays: mostly reductions and sums.
LARGE_STEPS = {
    _any_pointwise: 3, _arithmetic: 8, _reduce: 12, _norm: 5, _sum: 9, _channel: 3, _unit: 3, _select: 2, _moved: 2,
    _cut: 1, _cast: 1,
}  # fmt: skip
#: Those for arrays whose axes have one size: operands along some axis, which could also be another.
SQUARE_STEPS = {
    _any_pointwise: 2, _arithmetic: 12, _reduce: 6, _norm: 7, _sum: 5, _channel: 14, _unit: 3, _select: 2, _moved: 5,
    _cut: 1, _cast: 1,
}  # fmt: skip
#: Those for arrays of few sizes and any number of axes.
AXES_STEPS = {
    _arithmetic: 12, _reduce: 7, _norm: 5, _channel: 8, _channel_in_training: 4, _sum: 6, _moved: 5, _reshape: 5,
    _centered: 3, _select: 2, _cut: 1, _cast: 1,
}  # fmt: skip
