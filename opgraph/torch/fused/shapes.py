"""What the results of a graph look like before it runs: shapes, dtypes, and the strides that torch would give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

from opgraph.errors import InvalidShape
from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.runtime.bounded import Bounded
from opgraph.runtime.providers.torch import torch_dtype
from opgraph.torch.broadcast import broadcast_shapes
from opgraph.torch.fused.composite import composite

#: Combinations of inputs in different orders whose results are remembered.
MOST_MIXED = 64
#: Sizes; ints, or torch's symbols for them while it traces.
Shape: TypeAlias = tuple[Any, ...]
#: An input by its position, or the shape of a constant; and whether it lies along the channel axis.
_Leaf: TypeAlias = tuple[int | Shape, bool]


class Results:
    """The results of a graph of pointwise ops and sums, for inputs of any shapes.

    Args:
        graph: finalized.

    Attributes:
        known: whether every result is one of those; of the results of library ops only running them tells the shape.
        dtypes: of each result.
    """

    def __init__(self, graph: Graph) -> None:
        self.dtypes = tuple(torch_dtype(t.dtype) for t in graph.outputs)
        self._graph = graph
        self._mixed: Bounded[Any, list[tuple[int, ...]]] = Bounded(MOST_MIXED)
        names = {t.name: i for i, t in enumerate(graph.inputs)}
        order = range(len(names))
        # A gradient is laid out as what it is the gradient of, as torch has it.
        firsts = [names.get((t.name or "").removeprefix("d_")) for t in graph.outputs]
        self._preferred = [order if f is None else (f, *(i for i in order if i != f)) for f in firsts]
        self._is_gradient = any(f is not None for f in firsts)
        found = _leaves(graph)
        self.known = found is not None
        self._leaves = [] if found is None else [found[t.id] for t in graph.outputs]

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        """The shape of each result.

        Raises:
            InvalidShape: the inputs do not broadcast.
        """
        cache: dict[tuple[_Leaf, ...], Shape] = {}
        for leaves in self._leaves:
            if leaves not in cache:
                cache[leaves] = _broadcast(leaves, inputs)
        return [cache[leaves] for leaves in self._leaves]

    def empty(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A new tensor for each result, with the strides of the first input that has its shape.

        Where inputs lie in different orders, with those that torch's own ops would give.

        Raises:
            InvalidShape: the inputs do not broadcast.
        """
        shapes = self.shapes([t.shape for t in inputs])
        if not self._is_gradient and _are_mixed(inputs):
            strides = self._as_torch(inputs)
            return [
                torch.empty_strided(shape, own, dtype=dtype, device=inputs[0].device)
                for shape, own, dtype in zip(shapes, strides, self.dtypes, strict=True)
            ]
        made = []
        for shape, dtype, preferred in zip(shapes, self.dtypes, self._preferred, strict=True):
            like = self.like(shape, [t.shape for t in inputs], [t.stride() for t in inputs], preferred)
            if like is None:
                made.append(torch.empty(shape, dtype=dtype, device=inputs[0].device))
            else:
                made.append(torch.empty_like(inputs[like], dtype=dtype))
        return made

    def _as_torch(self, inputs: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        """The strides of the results of torch's ops, one by one, on tensors without data."""
        if isinstance(inputs[0], FakeTensor):
            return [t.stride() for t in composite(self._graph, inputs, "store")]
        key = tuple([(t.shape, t.stride(), t.dtype) for t in inputs])
        if key not in self._mixed:
            given = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in inputs]
            with torch.no_grad():
                self._mixed[key] = [t.stride() for t in composite(self._graph, given, "store")]
        return self._mixed[key]

    @staticmethod
    def like(shape: Shape, shapes: Sequence[Shape], strides: Sequence[Shape], order: Sequence[int]) -> int | None:
        """The first input of this shape that is not itself spread out from something smaller."""
        for i in order:
            if shapes[i] == shape and not any(s == 0 and d != 1 for s, d in zip(strides[i], shapes[i])):
                return i
        return None


def _are_mixed(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether inputs lie in several orders, or in one that is not C's where they are spread out."""
    if all(t.is_contiguous() for t in inputs):
        return False
    orders = {_order(t) for t in inputs}
    shapes = [t.shape for t in inputs if _order(t)]
    return any(order != tuple(sorted(order)) for order in orders) and (
        len(orders - {()}) > 1 or any(shape != shapes[0] for shape in shapes) or any(0 in t.stride() for t in inputs)
    )


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes, the outermost in memory first; () where at most one has an extent of its own."""
    strides: Sequence[int] = tensor.stride()
    axes = [i for i, (size, stride) in enumerate(zip(tensor.shape, strides)) if size != 1 and stride != 0]
    axes.sort(key=lambda i: -strides[i])
    return tuple(axes) if len(axes) > 1 else ()


def _broadcast(leaves: tuple[_Leaf, ...], inputs: Sequence[Shape]) -> Shape:
    shapes = [(inputs[source] if isinstance(source, int) else source, along) for source, along in leaves]
    rank = max((len(s) for s, along in shapes if not along or len(s) != 1), default=1)
    aligned = [(*s, *[1] * max(rank - 2, 0)) if along and len(s) == 1 else s for s, along in shapes]
    try:
        return tuple(broadcast_shapes(aligned))
    except RuntimeError:
        raise InvalidShape(
            f"shapes {' and '.join(str(tuple(s)) for s, _ in shapes)} do not broadcast",
            where="tensors of one fused call",
            fix="make each axis equal or 1",
        ) from None


def _leaves(graph: Graph) -> dict[int, tuple[_Leaf, ...]] | None:
    """From which inputs and constants the shape of each value follows; None where a library op is among them."""
    found: dict[int, tuple[_Leaf, ...]] = {t.id: ((i, False),) for i, t in enumerate(graph.inputs)}
    unions: dict[tuple[tuple[_Leaf, ...], ...], tuple[_Leaf, ...]] = {}
    for op in graph.ops:
        record = opdef.get(op.kind, where=op.label)
        if op.kind == "End":
            continue
        if record.family == "sum":
            found[op.outputs[0].id] = _of(found, op, 1, record)
            continue
        if not record.is_pointwise:
            return None
        key = tuple(_of(found, op, port, record) for port in range(len(op.inputs)))
        if key not in unions:
            unions[key] = tuple(dict.fromkeys(leaf for leaves in key for leaf in leaves))
        found.update((t.id, unions[key]) for t in op.outputs)
    return found


def _of(found: dict[int, tuple[_Leaf, ...]], op: Op, port: int, record: opdef.OpDef) -> tuple[_Leaf, ...]:
    tensor: LogicalTensor = op.inputs[port]
    leaves = found.get(tensor.id)
    if leaves is None:
        data = opdef.array_of(tensor)
        leaves = ((data.shape, False),) if data.ndim else ()
    if record.family != "sum" and record.lies_along_channel(port, [t.ndim for t in op.inputs], op.attrs):
        return tuple((source, True) for source, _ in leaves)
    return leaves
