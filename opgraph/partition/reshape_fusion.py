"""Reshapes inside a loop: axes are cut so that shapes have the same pieces, over which one loop can run.

GroupNorm reshapes x[N,C,H,W] to [N,G,L], reduces L, and reshapes back. Both shapes are [N,G,C/G,H,W] once C and L are
cut, so one loop over that shape computes all of it and reads each operand with some of its axes split into several.
This module rewrites ops from axes to pieces. Shapes then consist of pieces, and a reshape between them is a no-op.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from opgraph.ir import opdef
from opgraph.ir.op import Op
from opgraph.ops.reduction_gradients import static_axes
from opgraph.ops.shape import UNIT_AXES
from opgraph.partition.axis_factors import Frame, Pieces, flat
from opgraph.partition.reshapes import cuttable, is_fusible, wanted
from opgraph.partition.symbols import Shape, is_scalar_shape


@dataclass(frozen=True, slots=True)
class Viewed:
    """A list of ops with its shapes, after reshapes are taken into account.

    Attributes:
        ops: the ops, rewritten for pieces if possible; a reshape between equal pieces has become a BroadcastTo.
        shapes: of every tensor, in pieces if it has them.
        axes: the uncut shape of every tensor.
        pieces: of each tensor whose pieces are not its axes.
        plain: places of ops that read or make such tensors but are not rewritten for pieces.
        apart: for places of ops, the operands that are made with other pieces than they are read with.
        conflicts: pairs of places of ops that read one tensor with different axes; one loop reads it with one set.
        said: places of the ops that are rewritten for pieces.
        reshapes: places of the ops that were reshapes.
    """

    ops: tuple[Op, ...]
    shapes: dict[int, Shape]
    axes: dict[int, Shape]
    pieces: dict[int, Pieces]
    plain: frozenset[int]
    apart: dict[int, tuple[int, ...]]
    conflicts: tuple[tuple[int, int], ...]
    said: frozenset[int]
    reshapes: frozenset[int]

    def shapes_at(self, place: int) -> dict[int, Shape]:
        """The shapes for an op: uncut ones if it is not rewritten for pieces but its tensors have pieces."""
        return self.axes if place in self.plain else self.shapes


def viewed(ops: Sequence[Op], shapes: dict[int, Shape], inside: Collection[int]) -> Viewed:
    """Includes reshapes in loops if rows are reduced on one of their sides.

    Args:
        ops: in topological order.
        inside: places of ops that belong in one loop with others; their reshapes are included in any surroundings.
    """
    candidates = cuttable(ops, shapes)
    if not candidates:
        return Viewed(tuple(ops), shapes, shapes, {}, frozenset(), {}, (), frozenset(), frozenset())
    return _Views(ops, shapes, candidates, frozenset(inside)).viewed()


class _Views:
    def __init__(
        self,
        ops: Sequence[Op],
        shapes: dict[int, Shape],
        candidates: dict[int, tuple[Pieces, Pieces]],
        inside: frozenset[int],
    ) -> None:
        self.ops, self.shapes, self.inside = ops, shapes, inside
        self.candidates = candidates
        self.users: dict[int, list[int]] = {}  # tensor -> places of the ops that make or read it
        for place, op in enumerate(ops):
            for id in dict.fromkeys(t.id for t in (*op.inputs, *op.outputs)):
                self.users.setdefault(id, []).append(place)
        self.made = {t.id for op in ops for t in op.outputs}
        self.frames: dict[int, Frame] = {}
        self.pieces: dict[int, Pieces] = {}
        self.rewritten: dict[int, Op] = {}
        self.taken: set[int] = set()

    def viewed(self) -> Viewed:
        waiting: deque[int] = deque()
        for place in wanted(self.ops, self.shapes, self.users, self.candidates, self.inside):
            self._begin(place, waiting)
        queued = set(waiting)
        while waiting:
            place = waiting.popleft()
            queued.discard(place)
            for id in self._spread(place):
                for user in self.users[id]:
                    if user not in queued and user not in self.rewritten:
                        queued.add(user)
                        waiting.append(user)
        cut = {id for id, p in self.pieces.items() if flat(p) != self.shapes[id]}
        made = {t.id: place for place, op in enumerate(self.ops) for t in op.outputs}
        near = sorted({place for id in cut for place in self.users[id]})
        plain = frozenset(place for place in near if place not in self.rewritten)
        apart: dict[int, tuple[int, ...]] = {}
        for place in near:
            differ = [
                t.id
                for t in self.ops[place].inputs
                if t.id in cut and t.id in made and (made[t.id] in self.rewritten) != (place in self.rewritten)
            ]
            if differ:
                apart[place] = tuple(differ)
        conflicts = {
            (place, other)
            for id in cut
            for place in self._readers(id)
            for other in self._readers(id)
            if place in self.rewritten and other not in self.rewritten
        }
        return Viewed(
            tuple(self.rewritten.get(place, op) for place, op in enumerate(self.ops)),
            {**self.shapes, **{id: flat(p) for id, p in self.pieces.items()}},
            self.shapes,
            {id: self.pieces[id] for id in cut},
            plain,
            apart,
            tuple(sorted(conflicts)),
            frozenset(self.rewritten),
            frozenset(self.taken),
        )

    def _readers(self, id: int) -> list[int]:
        return [place for place in self.users[id] if any(t.id == id for t in self.ops[place].inputs)]

    # -- where pieces begin -------------------------------------------------------------------------------------

    def _begin(self, place: int, waiting: deque[int]) -> None:
        """Sets the pieces of both sides of a reshape, and of the operand that gives its shape."""
        op = self.ops[place]
        src, dst = op.inputs[0], op.outputs[0]
        own = self.candidates[place]
        tensors = [(src.id, own[0]), (dst.id, own[1]), *((t.id, own[1]) for t in op.inputs[1:])]
        if any(self.shapes[id] != self.shapes[dst.id] for id, _ in tensors[2:]):
            return
        if any(self.pieces.get(id, pieces) != pieces for id, pieces in tensors):
            return  # another reshape cuts it in another way
        for id, pieces in tensors:
            shape = self.shapes[id]
            assert not isinstance(shape, str)
            self.pieces[id], self.frames[id] = pieces, Frame(shape, pieces)
            waiting.extend(self.users[id])
        like = op.inputs[1] if len(op.inputs) > 1 else src
        attrs = opdef.get("BroadcastTo", where=op.label).default_attrs()
        self.rewritten[place] = Op.locked(op.id, "BroadcastTo", (src, like), (dst,), op.name, attrs)
        self.taken.add(place)

    # -- where they lead ----------------------------------------------------------------------------------------

    def _spread(self, place: int) -> Iterable[int]:
        """Rewrites an op for pieces, if possible; returns the tensors that get their pieces from it."""
        op = self.ops[place]
        record = opdef.of(op)
        if op.kind in UNIT_AXES:
            return self._without_axes(place, op)
        if place in self.rewritten or place in self.candidates or not is_fusible(op):
            return ()
        near = [self.frames[t.id] for t in (*op.inputs, *op.outputs) if t.id in self.frames]
        frames = list(dict.fromkeys(near))
        if len(frames) != 1 and record.row is None:
            return ()
        if record.row is not None:
            return self._reduction(place, op)
        (frame,) = frames
        tensors = [*op.inputs, *op.outputs]
        ranks = [_rank(self.shapes[t.id]) for t in op.inputs]
        rank = max(r or 0 for r in ranks)
        free = {t.id for t in op.inputs if self._is_one_element(t.id) and self.shapes[t.id] != frame.shape}
        most = max((r or 0 for t, r in zip(op.inputs, ranks, strict=True) if t.id not in free), default=0)
        found: dict[int, Pieces] = {}
        whole: dict[int, Pieces] = {}  # operands whose axes are not cut, even if those of others are
        aligned = False
        for index, tensor in enumerate(tensors):
            shape = self.shapes[tensor.id]
            is_input = index < len(op.inputs)
            like_channel = record.family == "sum" and not is_input and record.lies_along_channel(1, ranks, op.attrs)
            along = record.lies_along_channel(index, ranks, op.attrs) if is_input else like_channel
            aligned |= along
            if tensor.id in free and len(shape) <= most:
                # It broadcasts to any shape, and another operand determines the number of axes.
                whole[tensor.id] = own = tuple((d,) for d in shape)
                if self.pieces.get(tensor.id, own) != own:
                    return ()
                continue
            pieces = frame.along_channel(shape, rank) if along else frame.of(shape)
            if pieces is None or found.setdefault(tensor.id, pieces) != pieces:
                return ()
            if self.pieces.get(tensor.id, pieces) != pieces:
                return ()
        if aligned and "data_format" not in op.attrs:
            return ()
        attrs = {**op.attrs, "data_format": "NXC"} if aligned else op.attrs
        self.rewritten[place] = Op.locked(op.id, op.kind, op.inputs, op.outputs, op.name, attrs)
        self.pieces.update(whole)
        return self._enter(found, frame)

    def _is_one_element(self, id: int) -> bool:
        """True if no op makes the tensor, and it has one element."""
        return id not in self.made and is_scalar_shape(self.shapes[id])

    def _reduction(self, place: int, op: Op) -> Iterable[int]:
        src, dst = op.inputs[0], op.outputs[0]
        frame, axes = self.frames.get(src.id), static_axes(op.inputs, op.attrs)
        shape = self.shapes[src.id]
        if frame is None or not axes or isinstance(shape, str) or frame.shape != shape:
            return ()
        rows = {a % len(shape) for a in axes}
        begin = [sum(len(p) for p in frame.pieces[:axis]) for axis in range(len(shape) + 1)]
        gone = tuple(place - begin[-1] for axis in sorted(rows) for place in range(begin[axis], begin[axis + 1]))
        attrs = {**op.attrs, "axes": gone}
        if op.attrs["keep_dims"]:
            pieces: Pieces = tuple((1,) * len(p) if i in rows else p for i, p in enumerate(frame.pieces))
            made = frame
        else:
            pieces = tuple(p for i, p in enumerate(frame.pieces) if i not in rows)
            made = Frame(tuple(d for i, d in enumerate(shape) if i not in rows), pieces)
        if self.pieces.get(dst.id, pieces) != pieces:
            return ()
        self.rewritten[place] = Op.locked(op.id, op.kind, (src,), op.outputs, op.name, attrs)
        return self._enter_one(dst.id, pieces, made)

    def _without_axes(self, place: int, op: Op) -> Iterable[int]:
        """Rewrites an op that adds or removes axes of size 1: their pieces are added or removed as well."""
        one, other = op.inputs[0], op.outputs[0]
        ranks = [len(s) for s in (self.shapes[one.id], self.shapes[other.id]) if not isinstance(s, str)]
        wide, narrow = (one, other) if ranks == sorted(ranks, reverse=True) else (other, one)
        frame, shape = self.frames.get(wide.id), self.shapes[wide.id]
        axes = static_axes(op.inputs, op.attrs)
        if frame is None or isinstance(shape, str) or not axes or len(shape) != len(frame.shape):
            return ()
        gone = {a % len(shape) for a in axes}
        pieces = self.pieces[wide.id]
        left = tuple(p for i, p in enumerate(pieces) if i not in gone)
        if any(set(pieces[i]) != {1} for i in gone) or self.pieces.get(narrow.id, left) != left:
            return ()
        self.rewritten[place] = op
        made = Frame(tuple(d for i, d in enumerate(shape) if i not in gone), left)
        return self._enter_one(narrow.id, left, made)

    def _enter_one(self, id: int, pieces: Pieces, frame: Frame) -> Iterable[int]:
        """Enters pieces with their frame; if its axes are not cut, only records that the tensor's axes stay uncut."""
        if frame.is_plain:
            self.pieces[id] = pieces
            return ()
        return self._enter({id: pieces}, frame)

    def _enter(self, found: dict[int, Pieces], frame: Frame) -> list[int]:
        new = []
        for id, pieces in found.items():
            if id not in self.pieces and self.shapes[id] != ():
                self.pieces[id] = pieces
                self.frames.setdefault(id, frame)
                new.append(id)
        return new


def _rank(shape: Shape) -> int | None:
    return None if isinstance(shape, str) else len(shape)
