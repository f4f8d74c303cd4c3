"""Running a loop in NumPy, so that a wrong kernel can be told from a wrong loop; and where there is no compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgraph.ir import dtypes, opdef
from opgraph.loops.layout import iteration_shape
from opgraph.loops.loop import Load, Loop, Statement


def interpret(loop: Loop, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """The results of a loop.

    Args:
        arrays: one for each load, in its dtype; None for an index.

    Returns: one array for each store, in its dtype. f16 and bf16 are computed in f32 and rounded where the loop says.
    """
    shapes = [(1,) if a is None else a.shape for a in arrays]
    space = iteration_shape(loop.loads, shapes)
    values: dict[str, np.ndarray] = {}
    for load, array in zip(loop.loads, arrays, strict=True):
        values[load.name] = _loaded(load, array, space)
    types = loop.dtype_of()
    for s in loop.statements:
        values[s.result] = _result(s, values, types)
    return [np.broadcast_to(values[s.value], space).astype(dtypes.get(s.dtype).numpy) for s in loop.stores]


def compute_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype that values of `dtype` are computed in."""
    return np.dtype(np.float32) if dtype in ("f16", "bf16") else dtypes.get(dtype).numpy


def _loaded(load: Load, array: np.ndarray | None, space: tuple[int, ...]) -> np.ndarray:
    rank = len(space)
    if array is None:
        axis = load.axis % rank
        array = np.arange(space[axis])
    elif load.align == "channel":
        axis = 1
    else:
        return array.astype(compute_dtype(load.dtype))
    return array.reshape([-1 if i == axis else 1 for i in range(rank)]).astype(compute_dtype(load.dtype))


def _result(s: Statement, values: dict[str, np.ndarray], types: dict[str, str]) -> np.ndarray:
    record = opdef.get(s.kind, where="a loop")
    assert record.reference is not None
    given = [types[a] for a in s.args if isinstance(a, str) and types[a] != "boolean"]
    literal_type = compute_dtype(given[0] if given else s.dtype)
    args = [values[a] if isinstance(a, str) else np.asarray(a, literal_type) for a in s.args]
    target = compute_dtype(s.dtype)
    with np.errstate(all="ignore"):
        if s.kind == "TypeCast":
            result = cast(args[0], s.dtype)
        elif record.index_of:
            result = args[0]
        else:
            result = np.asarray(record.reference(*args, **dict(s.attrs)))
        if s.rounds:
            result = result.astype(dtypes.get(s.dtype).numpy)
        return result.astype(target)


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """A TypeCast: to integers it truncates and saturates, NaN becomes 0; f16 and bf16 stay unrounded in f32."""
    target = dtypes.get(dtype)
    if target.category == "int" and array.dtype.kind == "f":
        info = np.iinfo(target.numpy)
        whole = np.trunc(np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf))
        low, high = float(info.min), float(info.max)
        inside = np.where((whole >= low) & (whole < high), whole, 0).astype(target.numpy)
        return np.where(whole >= high, info.max, np.where(whole <= low, info.min, inside)).astype(target.numpy)
    if target.name in ("f16", "bf16") and array.dtype == np.float64:
        return array.astype(target.numpy).astype(np.float32)
    return array.astype(compute_dtype(dtype))
