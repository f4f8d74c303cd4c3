"""Runs a loop op by op in an array library: NumPy, to distinguish a wrong kernel from a wrong loop, or torch
(`opgraph.runtime.providers.torch`) if there is no compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from opgraph.ir import dtypes, opdef
from opgraph.loops.axis_splits import has_cuts, run_cut, spread
from opgraph.loops.loop import Load, Loop, Statement, Store
from opgraph.loops.space import Shape, row_shape, space_of, summed_axes, summed_to
from opgraph.ops.conversion import cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The functions of one array library that run the steps of a loop.

    Attributes:
        taken, given: convert from and to a NumPy array.
        count: returns 0, 1, ... n - 1.
        number: returns a literal in a dtype.
        convert: converts an array to a dtype by the library's rules.
        cast: converts an array to a dtype by the rules of TypeCast.
        broadcast: broadcasts an array to a shape.
        meaning: returns the library's implementation of an op.
    """

    taken: Callable[[np.ndarray], Any]
    given: Callable[[Any], np.ndarray]
    count: Callable[[int], Any]
    number: Callable[[Any, str], Any]
    convert: Callable[[Any, str], Any]
    cast: Callable[[Any, str], Any]
    broadcast: Callable[[Any, Shape], Any]
    meaning: Callable[[opdef.OpDef], Callable[..., Any] | None]


NUMPY = Library(
    taken=lambda array: array,
    given=lambda array: array,
    count=np.arange,
    number=lambda value, dtype: np.asarray(value, dtypes.get(dtype).numpy),
    convert=lambda array, dtype: np.asarray(array).astype(dtypes.get(dtype).numpy),
    cast=cast,
    broadcast=np.broadcast_to,
    meaning=lambda record: record.reference,
)


def interpret(loop: Loop, arrays: Sequence[np.ndarray | None], library: Library = NUMPY) -> list[np.ndarray]:
    """Runs a loop and returns its results.

    Args:
        arrays: one for each load, in its dtype; None for an index or a position.

    Returns: one array for each store, in its dtype. f16 and bf16 are computed in f32 and rounded where the loop rounds.
    """
    if has_cuts(loop):
        return run_cut(loop, arrays, partial(interpret, library=library))
    shapes = [(1,) if a is None else a.shape for a in arrays]
    space = space_of(loop, shapes)
    values: dict[str, Any] = {}
    types = loop.dtype_of()
    with np.errstate(all="ignore"):
        for load, array in zip(loop.loads, arrays, strict=True):
            values[load.name] = library.convert(_loaded(load, array, space, library), _compute(load.dtype))
        for s in loop.statements:
            result = _result(s, values, types, (space, loop.row_axes), library)
            result = library.cast(result, s.dtype) if s.rounds else result
            values[s.result] = library.convert(result, _compute(s.dtype))
        return [_stored(loop, s, values[s.value], (space, shapes), library) for s in loop.stores]


def _compute(dtype: str) -> str:
    """The compute dtype of values of a dtype."""
    return "f32" if dtype in ("f16", "bf16") else dtype


def _loaded(load: Load, array: np.ndarray | None, space: Shape, library: Library) -> Any:
    """An operand with as many axes as the space, or fewer."""
    if load.is_position:
        return library.count(prod(space)).reshape(space)
    if array is not None and load.broadcasts(array.shape):
        return library.taken(array).reshape(spread(load, array.shape))
    axis = min(1, len(space) - 1) if load.align == "channel" else load.axis % len(space)
    own = library.count(space[axis]) if array is None else library.taken(array)
    return own.reshape([-1 if i == axis else 1 for i in range(len(space))])


def _result(
    s: Statement,
    values: Mapping[str, Any],
    types: Mapping[str, str],
    rows: tuple[Shape, tuple[int, ...]],
    library: Library,
) -> Any:
    record = s.record
    meaning = library.meaning(record)
    assert meaning is not None
    args = [
        values[a] if isinstance(a, str) else library.number(a, _compute(s.literal_dtype(types, i)))
        for i, a in enumerate(s.args)
    ]
    if s.reduces:
        space, axes = rows
        wide = library.convert(
            library.broadcast(args[0], space), "f64"
        )  # added up and multiplied as the kernel does it
        return meaning(wide, axes=axes, keep_dims=True)
    if record.is_cast:
        # A cast from f64 to f16 or bf16 rounds once. From f32, the value is unchanged until something rounds it.
        return library.cast(args[0], s.dtype if types.get(str(s.args[0])) == "f64" else _compute(s.dtype))
    if record.index_of:
        return args[0]
    position = {"position": args.pop()} if record.by_position else {}
    attrs = dict(s.attrs)
    if record.channel_inputs:  # 1-d channel operands were reshaped to the loop's axes; others already have axes
        attrs["data_format"] = "NXC"
    return meaning(*args, **position, **attrs)


def _stored(loop: Loop, store: Store, value: Any, sizes: tuple[Shape, Sequence[Shape]], library: Library) -> np.ndarray:
    space, shapes = sizes
    if store.per_row:
        rows = tuple(a + len(space) for a in loop.row_axes)
        kept = tuple(1 if a in rows else d for a, d in enumerate(space))
        value = library.broadcast(value, kept).reshape(row_shape(store, space, rows))
    else:
        value = library.broadcast(value, space)
    if store.to is not None:
        shape, like = summed_to(loop, store.to, shapes)
        axes = summed_axes(like, shape, space)
        value = library.convert(value, "f64").sum(axes) if axes else value  # in f64, as the kernel does it
        value = value.reshape(shape)
    return library.given(library.cast(value, store.dtype))
