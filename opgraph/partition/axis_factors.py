"""Pieces of axes: a common factorization of two shapes of one row-major tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opgraph.partition.symbols import Shape

#: A number, or the name of an unknown number.
Size: TypeAlias = int | str
#: For each axis, the sizes of its pieces; no pieces for an axis that an operand lacks, which then has size 1.
Pieces: TypeAlias = tuple[tuple[Size, ...], ...]


def common_pieces(a: Sequence[Size], b: Sequence[Size]) -> tuple[Pieces, Pieces] | None:
    """The fewest pieces into which both shapes of one row-major tensor can be cut; None if unknown sizes prevent it."""
    left = [_Side(a), _Side(b)]
    for from_end in (False, True):
        while left[0].rest and left[1].rest and _match(left[0], left[1], from_end=from_end):
            pass
    for one, other in (left, left[::-1]):
        if other.rest and len(one.rest) == 1 and isinstance(one.rest[0][1], str):
            # Only one unknown size is left, so it is the product of the sizes left on the other side. This does not
            # hold for a number: [0,3,h,w] has no elements and may become [0,6] for any h and w.
            (place, _), sizes = one.rest[0], [size for _, size in other.rest]
            one.middle[place] += sizes
            for own, size in other.rest:
                other.middle[own].append(size)
            one.rest.clear()
            other.rest.clear()
        elif other.middle and not other.rest and all(size == 1 or isinstance(size, str) for _, size in one.rest):
            # Images of one element in GroupNorm: their axes are pieces of size 1 of the adjacent axis. An unknown size
            # must be 1, or the sizes do not fit.
            for own, _ in one.rest:
                one.middle[own].append(1)
                other.middle[other.reached].append(1)
            one.rest.clear()
    if left[0].rest or left[1].rest:
        return None
    return left[0].pieces(), left[1].pieces()


class _Side:
    """One of two shapes, and its pieces that are matched so far from both ends."""

    def __init__(self, shape: Sequence[Size]) -> None:
        self.rest = deque(enumerate(shape))
        self.first: list[list[Size]] = [[] for _ in shape]
        self.middle: list[list[Size]] = [[] for _ in shape]
        self.last: list[list[Size]] = [[] for _ in shape]
        self.reached = 0  # the last axis from which a piece was taken at the front

    def take(self, size: Size, left: Size, from_end: bool) -> None:
        """Takes a piece off the axis at one end; `left` is the rest of that axis, 1 if nothing remains."""
        place, _ = self.rest.pop() if from_end else self.rest.popleft()
        (self.last if from_end else self.first)[place].append(size)
        self.reached = self.reached if from_end else place
        if left != 1:
            (self.rest.append if from_end else self.rest.appendleft)((place, left))

    def pieces(self) -> Pieces:
        return tuple(
            (*first, *middle, *reversed(last))
            for first, middle, last in zip(self.first, self.middle, self.last, strict=True)
        )


def _match(a: _Side, b: _Side, *, from_end: bool) -> bool:
    """Takes one piece off the same end of both; False if there is no common piece."""
    x, y = (side.rest[-1 if from_end else 0][1] for side in (a, b))
    if x == y:
        a.take(x, 1, from_end)
        b.take(y, 1, from_end)
        return True
    if not isinstance(x, int) or not isinstance(y, int) or 0 in (x, y):
        return False
    if x % y == 0:
        a.take(y, x // y, from_end)
        b.take(y, 1, from_end)
    elif y % x == 0:
        a.take(x, 1, from_end)
        b.take(x, y // x, from_end)
    else:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Frame:
    """A shape and the pieces of its axes. Shapes that broadcast to it have the same pieces."""

    shape: tuple[Size, ...]
    pieces: Pieces

    @property
    def is_plain(self) -> bool:
        """True if the pieces are the axes."""
        return flat(self.pieces) == self.shape

    def of(self, shape: Shape) -> Pieces | None:
        """The pieces of a shape that broadcasts to this one; None if it might not."""
        if isinstance(shape, str) or len(shape) > len(self.shape):
            return None
        found = []
        lead = len(self.shape) - len(shape)
        for own, size, cut in zip(shape, self.shape[lead:], self.pieces[lead:], strict=True):
            if own != size and own != 1:
                return None
            found.append(cut if own == size else (1,) * len(cut))
        return tuple(found)

    def along_channel(self, shape: Shape, rank: int) -> Pieces | None:
        """Like `of`, for a 1-d shape that lies along axis 1 of the last `rank` axes of the frame."""
        axis = len(self.shape) - rank + 1
        if len(shape) != 1 or not 0 < axis < len(self.shape) or shape[0] != self.shape[axis]:
            return None
        return (self.pieces[axis], *[()] * sum(len(p) for p in self.pieces[axis + 1 :]))


def flat(pieces: Pieces) -> tuple[Size, ...]:
    """The shape whose axes are the pieces."""
    return tuple(d for p in pieces for d in (p or (1,)))


def cuts_of(pieces: Mapping[int, Pieces], ids: Iterable[int]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """The cut of each of these tensors that is cut, with 0 for named sizes."""
    found = {}
    for id in ids:
        own = pieces.get(id)
        if own is not None and any(len(p) != 1 for p in own):
            found[id] = tuple(tuple(d if isinstance(d, int) else 0 for d in p) for p in own)
    return found
