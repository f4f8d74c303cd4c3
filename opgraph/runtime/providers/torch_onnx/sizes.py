"""Which values of a graph are sizes: they steer what follows, and stay on the host where all else is on a GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.runtime.providers.torch_onnx.nodes import form_for


def carries_sizes(
    reads: Sequence[int], made: Sequence[LogicalTensor], constants: Collection[int], sizes: Collection[int]
) -> bool:
    """Whether a call only carries sizes on: small integers, made of sizes and constants alone.

    Args:
        reads: ids of its operands.
        constants, sizes: ids of what is known to be one.
    """
    small = all(t.ndim in (0, 1) and t.dtype not in dtypes.FLOATS for t in made)
    varying = [i for i in reads if i not in constants]
    return small and bool(varying) and all(i in sizes for i in varying)


def sizes_of(calls: Iterable[Sequence[Op]], constants: Collection[int]) -> set[int]:
    """The ids of all sizes.

    Args:
        calls: ops that run together, producers first.
        constants: ids of the graph's.
    """
    found: set[int] = set()
    for ops in calls:
        inside = {t.id for op in ops for t in op.outputs}
        reads = [t.id for op in ops for t in op.inputs if t.id not in inside]
        form = form_for(ops[0]) if len(ops) == 1 else None
        if (form is not None and form.on_host) or carries_sizes(
            reads, [t for op in ops for t in op.outputs], constants, found
        ):
            found |= inside
    return found
