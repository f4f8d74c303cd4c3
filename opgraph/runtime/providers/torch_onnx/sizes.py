"""Finds the values of a graph that are sizes: they control later ops, and stay on the host if the rest is on a GPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.runtime.providers.torch_onnx.nodes import form_for, numbers_of


def carries_sizes(
    reads: Sequence[int], made: Sequence[LogicalTensor], constants: Collection[int], sizes: Collection[int]
) -> bool:
    """True if a call only passes sizes on: small integers, computed from sizes and constants alone.

    Args:
        reads: ids of its operands.
        constants, sizes: ids of the known constants and sizes.
    """
    small = all(t.ndim in (0, 1) and t.dtype not in dtypes.FLOATS for t in made)
    varying = [i for i in reads if i not in constants]
    return small and bool(varying) and all(i in sizes for i in varying)


def sizes_of(calls: Sequence[Sequence[Op]], constants: Collection[int]) -> set[int]:
    """The ids of all sizes.

    A value that is made from numbers alone (Range) and read only as data (positions) is no size: it is made where it is
    read.

    Args:
        calls: ops that run together, producers first.
        constants: ids of the graph's.
    """
    found: set[int] = set()
    for ops in calls:
        made = [t for op in ops for t in op.outputs]
        if _is_on_host(ops) or carries_sizes(_reads(ops), made, constants, found):
            found |= {t.id for t in made}
    wanted: set[int] = set()  # ids read on the host
    for ops in reversed(calls):
        numbers = _read_as_numbers(ops)
        made_ids = {t.id for op in ops for t in op.outputs}
        of_numbers = bool(numbers) and numbers.issuperset(_reads(ops))
        if made_ids <= found and of_numbers and not made_ids & wanted:
            found -= made_ids
        wanted |= numbers
        if made_ids <= found and not _is_on_host(ops):
            wanted.update(_reads(ops))
    return found


def _is_on_host(ops: Sequence[Op]) -> bool:
    """True if it is one node that reads no data, and makes sizes."""
    form = form_for(ops[0]) if len(ops) == 1 else None
    return form is not None and form.on_host


def _reads(ops: Sequence[Op]) -> list[int]:
    inside = {t.id for op in ops for t in op.outputs}
    return [t.id for op in ops for t in op.inputs if t.id not in inside]


def _read_as_numbers(ops: Sequence[Op]) -> set[int]:
    """The ids of the values that a call reads as Python numbers."""
    form = form_for(ops[0]) if len(ops) == 1 else None
    if form is None:
        return set()
    return {t.id for t, is_number in zip(ops[0].inputs, numbers_of(ops[0], form)) if is_number}
