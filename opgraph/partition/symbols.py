"""Symbolic shapes, which can prove that two shapes are equal: every unknown dimension gets a unique name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import Dim, Dims, LogicalTensor, dims_text
from opgraph.ir.op import Op
from opgraph.ir.shapes import ShapeMismatch, unify
from opgraph.ops.families import broadcast_rule

#: Sizes, the graph's symbols and private names; a single private name if the rank is unknown.
Shape: TypeAlias = tuple[int | str, ...] | str

_PRIVATE = "\0"  # symbols that users write do not start with it


def symbolic_shapes(graph: Graph) -> dict[int, Shape]:
    """The shape of every tensor of a finalized graph, by id; equal values mean equal shapes at run time.

    The shapes of two inputs declared [?,8] are not known to be equal; those of a ReLU and its input are. A broadcast of
    two different unknowns gives a new unknown.
    """
    return shapes_of(graph.ops)


def shapes_of(ops: Iterable[Op]) -> dict[int, Shape]:
    """Like `symbolic_shapes`, for ops in topological order."""
    namer = _Namer()
    shapes: dict[int, Shape] = {}
    for op in ops:
        for tensor in op.inputs:
            if tensor.id not in shapes:  # an input or a constant
                shapes[tensor.id] = namer.named(tensor.dims)
        shapes.update(zip((t.id for t in op.outputs), _output_shapes(op, shapes, namer), strict=True))
    return shapes


def _output_shapes(op: Op, shapes: dict[int, Shape], namer: _Namer) -> list[Shape]:
    record = opdef.of(op)
    if record.family == "sum":  # the shape of the second operand, known or not
        return [namer.unified(op.outputs[0], shapes[op.inputs[1].id])]
    if record.family in ("reduction", "shape") and not any(isinstance(shapes[t.id], str) for t in op.inputs):
        return [
            namer.unified(t, s)
            for t, s in zip(op.outputs, _by_rule(op, record, [shapes[t.id] for t in op.inputs]), strict=True)
        ]
    if not record.is_pointwise or all(t.dims is not None and None not in t.dims for t in op.outputs):
        return [namer.named(t.dims) for t in op.outputs]
    inputs = [shapes[t.id] for t in op.inputs]
    wide = list(dict.fromkeys(s for s in inputs if s != ())) or [()]
    if len(wide) == 1 and record.infer is broadcast_rule:
        inferred: list[Shape | Dims] = [wide[0]] * len(op.outputs)
    elif any(isinstance(s, str) for s in inputs):
        inferred = [None] * len(op.outputs)
    else:
        inferred = list(_by_rule(op, record, inputs))
    return [namer.unified(t, s) for t, s in zip(op.outputs, inferred, strict=True)]


def _by_rule(op: Op, record: opdef.OpDef, inputs: list[Shape]) -> tuple[Dims, ...]:
    named = tuple(t.with_(dims=s, strides=None) for t, s in zip(op.inputs, inputs, strict=True))
    try:
        return record.infer(named, op.attrs)[:1] * len(op.outputs)
    except ShapeMismatch:  # a rule that requires equal dimensions: with unique names they look different
        return tuple(t.dims for t in op.outputs)


class _Namer:
    def __init__(self) -> None:
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"{_PRIVATE}{self.count}"

    def named(self, dims: Dims) -> Shape:
        return self.fresh() if dims is None else tuple(self.fresh() if d is None else d for d in dims)

    def unified(self, tensor: LogicalTensor, inferred: Shape | Dims) -> Shape:
        if isinstance(inferred, str):
            return inferred if tensor.dims is None else self.named(tensor.dims)
        return self.named(unify(tensor.dims, inferred, tensor.label))


def is_private(dim: Dim) -> bool:
    """True if a dimension is unknown and has a private name."""
    return isinstance(dim, str) and dim.startswith(_PRIVATE)


def is_scalar_shape(shape: Shape) -> bool:
    """True if every dimension is 1."""
    return not isinstance(shape, str) and all(d == 1 for d in shape)


def size_ratio(small: Shape, big: Shape) -> float:
    """The number of elements of `big` that share one of `small`, as far as known; infinite if unknown.

    Only broadcast axes count: those missing or 1 in `small`. Two unknown sizes of one axis, and a shape of unknown
    rank, are assumed to be equal, since they nearly always are.
    """
    if isinstance(small, str) or isinstance(big, str):
        return 1.0
    padded: tuple[Dim, ...] = (1,) * (len(big) - len(small)) + small
    ratio = 1.0
    for a, b in zip(padded, big, strict=False):
        if a == 1 and b != 1:
            ratio *= b if isinstance(b, int) else float("inf")
    return ratio


def row_share(small: Shape, big: Shape) -> int:
    """The number of neighbours along the last axis of `big` that share one element of `small`; large if unknown."""
    if isinstance(small, str) or isinstance(big, str) or not big:
        return 1
    last = big[-1]
    if (small[-1] if small else 1) != 1 or last in (0, 1):  # an empty tensor has no neighbours
        return 1
    return last if isinstance(last, int) else 1 << 30


def shape_text(shape: Shape) -> str:
    """The shape in the graph's text form; private names print as unknown."""
    if isinstance(shape, str):
        return dims_text(None)
    return dims_text(tuple(None if is_private(d) else d for d in shape))
