"""Selects the partitions that reduce rows for a library: those where its kernels are faster than onnxruntime's.

Measured against onnxruntime 1.31 on one thread of an EPYC with 400,000 elements of f32: sums, norms and the ops around
them take 0.4 to 0.9 times onnxruntime's time in rows of 256 elements and more, and 0.8 to 1.4 times in rows of 64. A
softmax takes 1.2 to 1.7 times as long, because onnxruntime's own is vectorised by hand.
"""

from __future__ import annotations

import math

from opgraph.ir import opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.loops.loop import Statement
from opgraph.loops.lower import lower
from opgraph.partition.partition import FUSED, Partition

_SHORTEST = 256


def has_rows(part: Partition) -> bool:
    """True if a fused partition reduces rows."""
    return part.kind == FUSED and not all(opdef.get(op.kind, where=op.label).is_pointwise for op in part.ops)


def rows_pay(part: Partition) -> bool:
    """True if a partition reduces rows and a library's kernel for it is worthwhile."""
    if not has_rows(part):
        return False
    loop = lower(part).loop
    reducing = [op for op in part.ops if not opdef.get(op.kind, where=op.label).is_pointwise]
    if any(_how(s) == "largest" for s in loop.statements) and all(op.inputs[0].dtype == "f32" for op in reducing):
        return False  # a softmax
    sizes = [_row_size(op.inputs[0], len(loop.row_axes)) for op in reducing]
    return max(_SHORTEST if size is None else size for size in sizes) >= _SHORTEST


def _row_size(tensor: LogicalTensor, rank: int) -> int | None:
    """The number of elements in a row of a tensor, if known."""
    sizes = [d for d in (tensor.dims or ())[-rank:] if isinstance(d, int)]
    return math.prod(sizes) if len(sizes) == rank else None


def _how(statement: Statement) -> str:
    row = opdef.get(statement.kind, where="library").row
    return "" if row is None else row.how
