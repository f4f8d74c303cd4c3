"""One fused partition of hundreds of ops, with many operands and results, with which compile time grows."""

from __future__ import annotations

import random

import opgraph as og
from opgraph.ir.logical_tensor import LogicalTensor

#: A mix as in a search for activations; half of the kinds are costly.
KINDS = ("Add", "Multiply", "Tanh", "Sigmoid", "SoftPlus", "Maximum", "Subtract", "GELU")
_OF_TWO = ("Add", "Multiply", "Maximum", "Subtract")
#: The number of latest values from which an op reads a value that others have already read.
_REACH = 40


def large(
    count: int, *, inputs: int = 40, outputs: int = 20, dtype: str = "f32", kinds: tuple[str, ...] = KINDS
) -> og.Graph:
    """A finalized graph of `count` ops on [n, 256], the same at every call: inputs x0, x1, ..., all of them read."""
    draw, g = random.Random(1), og.Graph()
    unread = [g.input(f"x{i}", dtype, ("n", 256)) for i in range(inputs)]
    read: list[LogicalTensor] = []

    def take() -> LogicalTensor:
        read.append(unread.pop(draw.randrange(len(unread))))
        return read[-1]

    for left in range(count, 0, -1):
        kind = draw.choice(kinds)
        if len(unread) - left >= outputs - 1:  # all remaining ops are needed to join unread values
            kind = draw.choice(_OF_TWO)
        first = take()
        if kind in _OF_TWO:
            unread.append(g.add_op(kind, first, take() if len(unread) >= outputs else draw.choice(read[-_REACH:])))
        else:
            unread.append(g.add_op(kind, first))
    for value in unread:
        g.output(value)
    return g.finalize()
