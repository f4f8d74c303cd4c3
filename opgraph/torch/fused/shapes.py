"""Properties of a graph's results before it runs: shapes, dtypes, and the strides that torch would give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch

from opgraph.errors import InvalidShape
from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.runtime.bounded_dict import Bounded
from opgraph.runtime.providers.torch import torch_dtype
from opgraph.runtime.providers.torch_internals import FakeTensor
from opgraph.torch.broadcast import broadcast_shapes
from opgraph.torch.fused.composite import composite

#: The number of combinations of inputs in different axis orders whose results are cached.
MOST_MIXED = 64
#: Sizes; ints, or torch's symbols for them while it traces.
Shape: TypeAlias = tuple[Any, ...]
#: An input by its position, or the shape of a constant; and True if it lies along the channel axis.
_Leaf: TypeAlias = tuple[int | Shape, bool]


class Layout(Protocol):
    """The memory layout that torch would give the first results of a graph."""

    def orders(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[int]] | None:
        """Their axes, the outermost first, for such inputs; None if that is unknown."""


class Results:
    """The results of a graph of pointwise ops and sums, for inputs of any shapes.

    Args:
        graph: finalized.
        layout: takes precedence over the layout that the graph's ops would give in torch, one after the other.

    Attributes:
        known: True if every result is one of those; the shapes of results of library ops are known only after a run.
        dtypes: the dtype of each result.
    """

    def __init__(self, graph: Graph, layout: Layout | None = None) -> None:
        self.dtypes = tuple(torch_dtype(t.dtype) for t in graph.outputs)
        self._graph = graph
        self._layout = layout
        self._mixed: Bounded[Any, list[tuple[int, ...]]] = Bounded(MOST_MIXED)
        names = {t.name: i for i, t in enumerate(graph.inputs)}
        order = range(len(names))
        # A gradient has the layout of the input that it belongs to, as in torch.
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

        If inputs have different axis orders, or none that the results could have, it has the strides that torch would
        give it.

        Raises:
            InvalidShape: the inputs do not broadcast.
        """
        shapes = self.shapes([t.shape for t in inputs])
        if not self._lie_as_inputs(inputs, shapes):
            strides = self._as_torch(inputs, shapes)
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

    def _lie_as_inputs(self, inputs: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> bool:
        """True if each result has the layout of the first input of its shape, or C order if there is no such input."""
        if self._is_gradient or all(map(_is_ordered, inputs)):
            return True
        return self._layout is None and _lie_alike(inputs, shapes)

    def _as_torch(self, inputs: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> list[tuple[int, ...]]:
        """The strides of the results of torch's calls, or of the graph's ops, one by one, on tensors without data."""
        if isinstance(inputs[0], FakeTensor):
            return [t.stride() for t in composite(self._graph, inputs, "store")]
        key = tuple([(t.shape, t.stride(), t.dtype) for t in inputs])
        if key not in self._mixed:
            orders = None if self._layout is None else self._layout.orders(inputs)
            if orders is not None:
                # Further results, which are saved for backward, have the order of a first result of their shape.
                known = dict(zip(reversed(shapes[: len(orders)]), reversed(orders)))
                orders += [known.get(shape, range(len(shape))) for shape in shapes[len(orders) :]]
                self._mixed[key] = [
                    torch.empty_permuted(shape, tuple(order), device="meta").stride()
                    for shape, order in zip(shapes, orders, strict=True)
                ]
            else:
                given = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in inputs]
                with torch.no_grad():
                    self._mixed[key] = [t.stride() for t in composite(self._graph, given, "store")]
        return self._mixed[key]

    @staticmethod
    def like(shape: Shape, shapes: Sequence[Shape], strides: Sequence[Shape], order: Sequence[int]) -> int | None:
        """The first input of this shape that is not itself expanded from a smaller tensor."""
        for i in order:
            if shapes[i] == shape and not any(s == 0 and d != 1 for s, d in zip(strides[i], shapes[i])):
                return i
        return None


def _lie_alike(inputs: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> bool:
    """True if all inputs have one layout, and all results have the same.

    Args:
        shapes: the shapes of the results.
    """
    # An input that is broadcast along all axes but one determines no order.
    data = [t for t in inputs if _extended(t) > 1 or not _is_ordered(t)]
    first, strides = data[0], data[0].stride()
    alike = all(t.shape == first.shape and t.stride() == strides for t in data)
    return alike and all(shape == first.shape for shape in shapes) and 0 not in strides


def _is_ordered(tensor: torch.Tensor) -> bool:
    """True if its axes are in C order, without those that are expanded."""
    strides = [stride for stride in tensor.stride() if stride]
    return strides == sorted(strides, reverse=True)


def _extended(tensor: torch.Tensor) -> int:
    """The number of axes along which it has elements of its own."""
    return sum(size != 1 and stride != 0 for size, stride in zip(tensor.shape, tensor.stride()))


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
    """The inputs and constants that determine the shape of each value; None if there is a library op."""
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
