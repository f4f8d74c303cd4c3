"""Running a loop in NumPy, so that a wrong kernel can be told from a wrong loop; and where there is no compiler."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from opgraph.ir import dtypes, opdef
from opgraph.loops.cuts import has_cuts, run_cut, spread
from opgraph.loops.loop import Load, Loop, Statement
from opgraph.loops.space import Shape, broadcasts, row_shape, space_of, summed_axes, summed_to
from opgraph.ops.conversion import cast


def interpret(loop: Loop, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """The results of a loop.

    Args:
        arrays: one for each load, in its dtype; None for an index or a position.

    Returns: one array for each store, in its dtype. f16 and bf16 are computed in f32 and rounded where the loop says.
    """
    if has_cuts(loop):
        return run_cut(loop, arrays, interpret)
    shapes = [(1,) if a is None else a.shape for a in arrays]
    space = space_of(loop, shapes)
    values: dict[str, np.ndarray] = {}
    for load, array in zip(loop.loads, arrays, strict=True):
        values[load.name] = _loaded(load, array, space)
    types = loop.dtype_of()
    for s in loop.statements:
        if s.reduces:
            values[s.result] = _reduced(s, values, space, loop.row_axes)
        else:
            values[s.result] = _result(s, values, types)
    results = []
    for store in loop.stores:
        if store.per_row:
            rows = tuple(a + len(space) for a in loop.row_axes)
            kept = tuple(1 if a in rows else d for a, d in enumerate(space))
            value = np.broadcast_to(values[store.value], kept).reshape(row_shape(store, space, rows))
            results.append(cast(value, store.dtype))
            continue
        value = np.broadcast_to(values[store.value], space)
        results.append(cast(value if store.to is None else _summed(loop, store.to, value, shapes), store.dtype))
    return results


def compute_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype that values of `dtype` are computed in."""
    return dtypes.get(_compute_name(dtype)).numpy


def _loaded(load: Load, array: np.ndarray | None, space: tuple[int, ...]) -> np.ndarray:
    rank = len(space)
    if load.is_position:
        return np.arange(prod(space)).reshape(space)
    if array is None:
        axis = load.axis % rank
        array = np.arange(space[axis])
    elif broadcasts(load, array.shape):
        return array.reshape(spread(load, array.shape)).astype(compute_dtype(load.dtype))
    else:
        axis = min(1, rank - 1)
    return array.reshape([-1 if i == axis else 1 for i in range(rank)]).astype(compute_dtype(load.dtype))


def _summed(loop: Loop, to: Sequence[str], value: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """A sum to the shape of loads, in f64 as the kernel does it."""
    shape, like = summed_to(loop, to, shapes)
    axes = summed_axes(like, shape, value.shape)
    with np.errstate(all="ignore"):
        return np.asarray(value.sum(axis=axes, dtype=np.float64)).reshape(shape)


def _reduced(s: Statement, values: dict[str, np.ndarray], space: Shape, axes: tuple[int, ...]) -> np.ndarray:
    """One value for each row; added up and multiplied in f64, as the kernel does it."""
    record = opdef.get(s.kind, where="a loop")
    assert record.reference is not None
    arg = values[s.args[0]] if isinstance(s.args[0], str) else np.asarray(s.args[0])
    wide = np.broadcast_to(arg, space).astype(np.float64)
    result = np.asarray(record.reference(wide, axes=axes, keep_dims=True))
    with np.errstate(all="ignore"):
        result = result.astype(compute_dtype(s.dtype))
    return cast(result, s.dtype).astype(result.dtype) if s.rounds else result


def _result(s: Statement, values: dict[str, np.ndarray], types: dict[str, str]) -> np.ndarray:
    record = opdef.get(s.kind, where="a loop")
    assert record.reference is not None
    args = [
        values[a] if isinstance(a, str) else np.asarray(a, compute_dtype(s.literal_dtype(types, i)))
        for i, a in enumerate(s.args)
    ]
    with np.errstate(all="ignore"):
        if record.is_cast:
            # f64 to f16 or bf16 is one rounding; from f32, the value stays as it is until something rounds it.
            narrow = s.dtype in ("f16", "bf16") and args[0].dtype == np.float64
            result = cast(args[0], s.dtype if narrow else _compute_name(s.dtype))
        elif record.index_of:
            result = args[0]
        elif record.by_position:
            result = np.asarray(record.reference(*args[:-1], position=args[-1], **dict(s.attrs)))
        else:
            result = np.asarray(record.reference(*args, **dict(s.attrs)))
        if s.rounds:
            result = cast(result, s.dtype)
        return result.astype(compute_dtype(s.dtype))


def _compute_name(dtype: str) -> str:
    return "f32" if dtype in ("f16", "bf16") else dtype
