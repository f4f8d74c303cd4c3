"""Shape checks and shape inference of ops, for sizes that are first known in a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from opgraph.errors import InvalidShape
from opgraph.ir import dtypes, opdef
from opgraph.ir.copy_graph import needed_ops
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.schema import inferred_dims
from opgraph.ops.families import broadcast_rule
from opgraph.ops.shape import RESHAPES
from opgraph.partition.partition import Partition


class ShapeRules:
    """The shape rules of a fused partition.

    A kernel broadcasts all shapes that fit: it would accept a bias of one element where the op requires one for each
    channel. Shapes that were known when the graph was finalized were checked then. Declared shapes of intermediate
    values are ignored: models declare sizes there that hold for one batch only. So are ops that no result needs.
    """

    def __init__(self, partition: Partition) -> None:
        ops, _ = needed_ops(partition.ops, (t.id for t in partition.output_ports))
        open_ = [
            place
            for place, op in enumerate(ops, start=1)
            if _asks_more(op) and not all(t.has_known_shape for t in op.inputs)
        ]
        self._ops = tuple(ops[: open_[-1]]) if open_ else ()
        self._needed = tuple(ops)
        self._takes_elements_for_granted = bool(partition.rows.axes) or any(op.kind in RESHAPES for op in ops)
        self._ports, self._results = partition.input_ports, partition.output_ports
        self._accepted: Sequence[tuple[int, ...]] | None = None

    def check(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raises InvalidShape, with the op, if arrays of these shapes, one for each port, break a rule."""
        if self._ops and shapes != self._accepted:
            inferred(self._ops, _of_shapes(self._ports, shapes))
            self._accepted = shapes

    def may_differ(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """True if the ops and a kernel may give different results, because a shape has no elements.

        A reshape makes any empty shape: [0,3,5] becomes [0,3], where a kernel that takes the 5 for a 1 makes [0,15]. A
        kernel with rows next to such a reshape, whose axes it has, does the same. And a sum over empty rows is 0, even
        where a kernel takes a NaN factor out of it.
        """
        return any(0 in shape for shape in shapes) and self._takes_elements_for_granted

    def results(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """The result shapes of the ops for these input shapes. Raises InvalidShape if an op does not accept them."""
        known = inferred(self._needed, _of_shapes(self._ports, shapes))
        return tuple(known[t.id].shape for t in self._results)

    def by_definition(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results of the ops for these arrays, computed op by op."""
        from opgraph.runtime.reference import results_of  # rarely needed

        return results_of(self._needed, self._results, dict(zip((t.id for t in self._ports), arrays, strict=True)))


def _asks_more(op: Op) -> bool:
    """True if the shape rule of an op is stricter than broadcasting."""
    return opdef.of(op).infer is not broadcast_rule or op.attrs.get("auto_broadcast") == "none"


class ShapesAhead:
    """Checks the shapes of a whole graph before its first step writes to arrays of the caller."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ops, _ = needed_ops(graph.ops, (t.id for t in graph.outputs))
        self._said = {t.id for op in self._ops for t in opdef.of(op).inputs_that_say_shapes(op)}
        self._accepted: object = None

    def check(self, arrays: Sequence[Any], outs: Sequence[Any] | None) -> None:
        """Raises InvalidShape if an op does not accept these inputs, or an output's shape differs from its result's."""
        shapes = [getattr(a, "shape", None) for a in arrays]  # an ONNX sequence has none
        given = [] if outs is None else [a.shape for a in outs]
        inputs = self._graph.inputs
        numbers = [a.tolist() if t.id in self._said else None for t, a in zip(inputs, arrays, strict=True)]
        if (shapes, given, numbers) == self._accepted:
            return
        ports = _of_shapes(inputs, shapes)
        for tensor, found in zip(inputs, numbers, strict=True):
            if found is not None:
                ports[tensor.id] = ports[tensor.id].with_(data=np.array(found, dtypes.get(tensor.dtype).numpy))
        known = inferred(self._ops, ports)
        for tensor, shape in zip(self._graph.outputs, given):
            dims = known.get(tensor.id, tensor).dims
            if dims is not None and all(isinstance(d, int) for d in dims):
                check_out_shape(shape, dims)  # type: ignore[arg-type]  # they are sizes
        self._accepted = (shapes, given, numbers)


def _of_shapes(ports: Sequence[LogicalTensor], shapes: Sequence[tuple[int, ...] | None]) -> dict[int, LogicalTensor]:
    return {p.id: p.with_(dims=s, strides=None) for p, s in zip(ports, shapes, strict=True)}


def _as_inferred(op: Op, tensor: LogicalTensor, dims: Dims) -> LogicalTensor:
    return tensor.with_(dims=dims, strides=None)


def inferred(
    ops: Iterable[Op],
    inputs: Mapping[int, LogicalTensor],
    settled: Callable[[Op, LogicalTensor, Dims], LogicalTensor] = _as_inferred,
) -> dict[int, LogicalTensor]:
    """Returns every tensor that ops read or make, by id, with the dimensions inferred from these inputs.

    Args:
        ops: in topological order.
        inputs: by id.
        settled: returns an op's result tensor, given its inferred dims. The default ignores the declared dims.

    Raises:
        InvalidShape: the inputs do not fit an op.
    """
    known = dict(inputs)
    for op in ops:
        dims = inferred_dims(opdef.of(op), tuple(known.get(t.id, t) for t in op.inputs), op.attrs, op)
        for index, tensor in enumerate(op.outputs):
            known[tensor.id] = settled(op, tensor, dims[index] if index < len(dims) else None)
    return known


def check_out_shape(out: tuple[int, ...], result: tuple[int, ...]) -> None:
    """Raises InvalidShape if an output array does not have the result's shape."""
    if tuple(out) != tuple(result):
        raise InvalidShape(
            f"an output array has shape {tuple(out)}, the result {tuple(result)}",
            where="out",
            fix="give an array of the result's shape",
        )
