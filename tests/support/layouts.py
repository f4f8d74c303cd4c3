"""Layouts of operands in memory: cases that every engine must get right, for arrays of any library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Two operands of y = x sigmoid(a x) + a.

    Attributes:
        x, a: shapes of the arrays that are made.
        views: the arguments made from them: slices, transposes. The same notation works for NumPy, CuPy and torch.
        variant: kinds of x, a and y of the kernel that must serve the case, so that it tests what it says.
    """

    name: str
    x: Shape
    a: Shape
    variant: str
    views: Callable[[Any, Any], tuple[Any, Any]] = lambda x, a: (x, a)

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("a whole tile", (8192,), (8192,), "ccc"),
    Case("one element less", (8191,), (8191,), "ccc"),
    Case("one element more", (8193,), (8193,), "ccc"),
    Case("less than a pack", (3,), (3,), "ccc"),
    Case("one element", (1,), (1,), "uuu"),
    Case("no axes", (), (), "uuu"),
    Case("no elements", (4, 0, 3), (4, 0, 3), ""),
    Case("scalar operand", (5, 1111), (), "cuc"),
    Case("one-element operand", (5, 1111), (1, 1), "cuc"),
    Case("bias along the last axis", (37, 96), (96,), "ccc"),
    Case("odd rows", (37, 97), (97,), "ccc"),
    Case("channel", (3, 5, 7, 8), (5, 1, 1), "crc"),
    Case("channel, odd planes", (3, 5, 7, 7), (5, 1, 1), "crc"),
    Case("one per row", (130, 64), (130, 1), "crc"),
    Case("outer product", (64, 1), (1, 48), "rcc"),
    Case("middle axis", (3, 1, 40), (3, 9, 1), "crc"),
    Case("four axes that do not merge", (2, 1, 3, 16), (1, 5, 3, 1), "crc"),
    Case("halves of rows", (33, 128), (33, 128), "ccc", lambda x, a: (x[:, :64], a[:, 64:])),
    Case("every second row", (66, 64), (33, 64), "ccc", lambda x, a: (x[::2], a)),
    Case("every second element", (2000,), (1000,), "scc", lambda x, a: (x[::2], a)),
    Case("every third element, two operands", (3000,), (3000,), "ssc", lambda x, a: (x[::3], a[::3])),
    Case("columns", (40, 66), (40, 33), "scc", lambda x, a: (x[:, ::2], a)),
    Case("transposed", (48, 65), (65, 48), "scc", lambda x, a: (x.T, a)),
    Case("unaligned", (4097,), (4096,), "ccc", lambda x, a: (x[1:], a)),
    Case("unaligned rows", (20, 67), (20, 64), "ccc", lambda x, a: (x[:, 3:], a)),
)
