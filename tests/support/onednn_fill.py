"""Inputs for oneDNN's graph files, as in benchdnn: values with exact sums, within the domain of each op.

If products are summed, values are small integers, and scales of quantization are powers of two, so that the result in
f32 is exact in any order. Divisors, variances and arguments of roots and logarithms are positive.
Source: tests/benchdnn/graph/input_displacer.cpp and the fill functions of its drivers.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from onednn_rule import is_eltwise

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.opdef import find

_POSITIVE = {"Log", "Sqrt", "SqrtBackward", "Reciprocal", "Pow"}
_RANGES = {"u8": (0, 255), "s8": (-128, 127), "u4": (0, 15), "s4": (-8, 7)}
#: With more elements, some exponential of products is likely to overflow after softmax's statistic is subtracted.
MANY = 100_000
_NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm")


def with_scales_of_two(content: Any) -> Any:
    """A document whose quantization scales are powers of two, as benchdnn rounds them."""
    copy = json.loads(json.dumps(content))
    for op in copy["graph"]:
        scales = op.get("attrs", {}).get("scales")
        if scales is not None and "qtype" in op["attrs"]:  # Interpolate has another kind of scales
            scales["value"] = [2.0 ** round(math.log2(s)) if s > 0 else s for s in scales["value"]]
    return copy


def feeds_of(graph: og.Graph, seed: int = 0) -> dict[int, np.ndarray]:
    """An array for each input, by tensor id; laid out as declared."""
    generator = np.random.default_rng(seed)
    # Only in a graph of elementwise functions of one value, nothing cancels.
    irregular = all(is_eltwise(op) for op in graph.ops)
    return {t.id: _laid_out(_values(graph, t, generator, irregular), t) for t in graph.inputs}


def _values(graph: og.Graph, tensor: og.LogicalTensor, generator: np.random.Generator, irregular: bool) -> np.ndarray:
    uses = [(op, index) for op in graph.consumers(tensor.id) for index, t in enumerate(op.inputs) if t.id == tensor.id]
    shape, numpy = tensor.shape, dtypes.get(tensor.dtype).numpy
    names = {_port(op, index) for op, index in uses}
    kinds = {op.kind for op, _ in uses}
    in_norm = any(op.kind.startswith(_NORMS) for op, _ in uses)
    backward = any(op.kind.endswith("Backward") for op, _ in uses)

    def whole(low: int, high: int) -> np.ndarray:
        return np.asarray(generator.integers(low, high + 1, shape))

    if tensor.dtype == "boolean":
        made = generator.random(shape) < 0.5
    elif names & {"seed", "offset"}:
        made = whole(1, 100)
    elif "probability" in names:
        made = np.full(shape, 0.5)
    elif "axes" in names:
        made = np.arange(math.prod(shape)).reshape(shape)
    elif names & {"scales", "scale"}:
        made = 2.0 ** whole(-3, 0)
    elif any(op.kind == "Divide" and index == 1 for op, index in uses):
        made = 2.0 ** whole(0, 2)
    elif any(_is_softmax_statistic(graph, op, index) for op, index in uses):
        made = whole(30, 50)  # the exponentials of the differences stay in range
    elif tensor.dtype in ("u8", "u4", "s8", "s4"):
        zero = max([op.attrs["zps"][0] for op, _ in uses if op.attrs.get("zps")], default=0)  # type: ignore[index]
        made = np.clip(zero + whole(-4, 4), *_RANGES[tensor.dtype])
    elif tensor.dtype in ("s32", "s64"):
        made = whole(-4, 4)
    elif in_norm and backward and names & {"variance", "var"}:
        made = 4.0 ** whole(1, 2)
    elif in_norm and backward and "mean" in names:
        made = whole(-1, 1)
    elif kinds & _POSITIVE or (in_norm and names & {"variance", "var"}):
        made = generator.uniform(0.5, 4.0, shape)
    elif in_norm and "beta" in names:
        made = whole(24, 32) * np.where(generator.random(shape) < 0.5, -1, 1)  # far from the numbers it is added to
    elif in_norm and "gamma" in names:
        made = 2.0 ** (whole(0, 1) if backward else whole(-2, 1))
    elif in_norm and "src" in names:
        made = _around_whole_means(whole(1, 2))
    elif "diff_dst" in names and in_norm:
        # Far from its mean and from its part along x, which are subtracted; its products with x do not sum to 0.
        made = whole(16, 24) * _signs(shape) * np.where(generator.random(shape) < 0.6, 1, -1)
    elif "LogSoftmaxBackward" in kinds and "dst" in names:
        made = whole(-9, -6)
    elif irregular:
        made = generator.normal(0, 2, shape)
    elif kinds == {"Multiply"}:  # a long product must not be 0 everywhere
        made = whole(1, 2) * np.where(generator.random(shape) < 0.5, -1, 1)
    elif math.prod(shape) > MANY and any(_has_softmax_statistic(graph, op) for op in graph.ops):
        made = whole(-1, 1)
    else:
        made = whole(-2, 2)
    return np.asarray(made).astype(numpy)


def _is_softmax_statistic(graph: og.Graph, op: og.Op, index: int) -> bool:
    """True if an input is subtracted before an exponential: softmax's maximum and the logarithm of its sum."""
    return op.kind == "Subtract" and index == 1 and any(o.kind == "Exp" for o in graph.consumers(op.outputs[0].id))


def _has_softmax_statistic(graph: og.Graph, op: og.Op) -> bool:
    inputs = {t.id for t in graph.inputs}
    return any(t.id in inputs and _is_softmax_statistic(graph, op, index) for index, t in enumerate(op.inputs))


def _around_whole_means(sizes: np.ndarray) -> np.ndarray:
    """Values whose mean along every axis of even length is 0: neighbours along it have opposite signs."""
    signs = _signs(sizes.shape)
    for axis, size in enumerate(sizes.shape):
        pairs = [slice(None)] * sizes.ndim
        odd = [slice(None)] * sizes.ndim
        pairs[axis], odd[axis] = slice(0, size - size % 2, 2), slice(1, None, 2)
        sizes = sizes.copy()
        sizes[tuple(odd)] = sizes[tuple(pairs)]
    return np.asarray(signs * sizes)


def _signs(shape: tuple[int, ...]) -> np.ndarray:
    """1 and -1, alternating along every axis."""
    return np.asarray(1.0 - 2.0 * (np.indices(shape).sum(axis=0) % 2))


def _port(op: og.Op, index: int) -> str:
    record = find(op.kind)
    assert record is not None
    return record.with_optional(len(op.inputs))[index].name


def _laid_out(values: np.ndarray, tensor: og.LogicalTensor) -> np.ndarray:
    """The same values with the declared strides."""
    strides = tensor.odd_strides
    if strides is None or not values.size:
        return np.ascontiguousarray(values).reshape(values.shape)
    span = 1 + sum((d - 1) * s for d, s in zip(tensor.shape, strides, strict=True))
    memory = np.zeros(span, values.dtype)
    view = np.lib.stride_tricks.as_strided(memory, values.shape, [s * values.itemsize for s in strides])
    view[...] = values
    return view
