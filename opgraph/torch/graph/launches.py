"""The kernel calls of a group. Equal groups, such as those of equal layers, are lowered once.

The kernel calls of groups that compute the same on values of the same layout differ only in names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from opgraph.errors import OpGraphError
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor, row_major
from opgraph.partition.partitioner import partition
from opgraph.runtime.providers.torch_dtypes import NAMES, TORCH_DTYPES
from opgraph.torch.graph.aten import FROM_SIZES, NodeEmitter, is_reduction, keeps_axes, reduced_axes, value_of
from opgraph.torch.graph.axis_splits import split_of
from opgraph.torch.graph.common_subexpressions import key_of
from opgraph.torch.graph.device_targets import Target
from opgraph.torch.graph.kernel_groups import Group, columns_of
from opgraph.torch.graph.tensor_locations import Place, place_of
from opgraph.torch.graph.views import base_of


@dataclass(slots=True)
class Launch:
    """One kernel call of a program.

    Attributes:
        target: the device that runs it.
        kernel: the compiled loop.
        graph: the graph of its group, with the partition that it computes and the others.
        nodes: the nodes of its group.
        units: the named units found in it.
        reads, writes: the places of the tensors of the partition's ports, in order.
        numbers: the numbers that the kernel reads as operands, by load, before they were rounded; in a symbolic program
            names for those that follow from sizes.
        plan: the prepared call.
    """

    target: Target
    kernel: Any
    graph: Graph
    nodes: tuple[Node, ...]
    units: tuple[str, ...]
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    numbers: Mapping[int, Any] = field(default_factory=dict)
    plan: Any = None

    @property
    def operands(self) -> list[Place]:
        """The places that the kernel reads, one for each read, then those that it writes."""
        return [*(self.reads[i] for i in self.kernel.reads), *self.writes]

    def sized(self, values: Mapping[str, Any]) -> Launch:
        """The call with names replaced by their values; this call, with its plan, if it has no names."""
        scalars = {load: values[name] for load, name in self.numbers.items() if isinstance(name, str)}
        reads, writes = (tuple([place.sized(values) for place in places]) for places in (self.reads, self.writes))
        if not scalars and all(a is b for a, b in zip((*reads, *writes), (*self.reads, *self.writes))):
            return self
        kernel = self.kernel.with_scalars(scalars) if scalars else self.kernel
        return Launch(self.target, kernel, self.graph, self.nodes, self.units, reads, writes, self.numbers)


class RefusedError(Exception):
    """opgraph has no kernel for a part of a group; these nodes are left to torch."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = tuple(nodes)


class Lowering:
    """The groups of a program that have been lowered.

    Args:
        rounding: as `ogt.fuse` takes it.
    """

    def __init__(self, rounding: str) -> None:
        self._rounding = rounding
        #: By device and structure: the first group's variables, prefix and kernel calls.
        self._known: dict[Any, tuple[tuple[str, ...], str, list[Launch]]] = {}

    def launches(self, group: Group, prefix: str, target: Target) -> list[Launch]:
        """The kernel calls of a group, not yet planned.

        Args:
            prefix: the prefix of variables between two of its kernels.

        Raises:
            RefusedError: opgraph has no kernel for a part of it.
        """
        structure, own = structure_of(group)
        key = target.engine, structure
        if key not in self._known:
            self._known[key] = own, prefix, _launches(group, prefix, target, self._rounding)
        first, its_prefix, launches = self._known[key]
        if first is own:
            return launches
        names = dict(zip(first, own, strict=True))

        def renamed(places: Iterable[Place]) -> tuple[Place, ...]:
            return tuple(
                replace(p, name=names.get(p.name, prefix + p.name.removeprefix(its_prefix))) if p.name else p
                for p in places
            )

        return [
            replace(one, nodes=group.nodes, reads=renamed(one.reads), writes=renamed(one.writes), plan=None)
            for one in launches
        ]


def structure_of(group: Group) -> tuple[Any, tuple[str, ...]]:
    """The structure of a group of known sizes, and the variables that it reads and makes. The structure has no node
    names: it is equal for groups that compute the same. In equal groups, variables at one place have the same role."""
    own = {node: number for number, node in enumerate(group.nodes)}
    read: dict[Node, int] = {}

    def looks(node: Node) -> Any:
        """The base of a node, as a number, and the node's layout in it."""
        base, place = base_of(node), place_of(node)
        where = own[base] if base in own else -1 - read.setdefault(base, len(read))
        return where, place.offset, place.size, place.stride, place.dtype, value_of(node).device

    ops = [
        (n.target, key_of(n.args, looks), key_of(n.kwargs, looks), key_of(n.meta.get(FROM_SIZES, ()), looks), looks(n))
        for n in group.nodes
    ]
    outputs = [own[n] for n in group.outputs]
    return (*ops, tuple(outputs)), tuple(n.name for n in (*group.nodes, *read))


def _launches(group: Group, prefix: str, target: Target, rounding: str) -> list[Launch]:
    """The kernels of a group.

    Raises:
        RefusedError: opgraph has no kernel for a part of it.
    """
    graph, members = Graph(engine=target.engine.kind), set(group.nodes)
    reduced = [n for n in group.nodes if is_reduction(n)]
    reductions = [(value_of(n.all_input_nodes[0]).dim(), reduced_axes(n), keeps_axes(n)) for n in reduced]
    split, unfit = split_of(group.nodes, reductions)
    if unfit:
        raise RefusedError(unfit)
    values: dict[Node, Any] = {}
    emitter = NodeEmitter(graph, values, as_eager=rounding == "each", split=split, columns=columns_of(group))
    places: dict[int, Place] = {}
    try:
        for node in group.nodes:
            for source in node.all_input_nodes:
                if source in values:
                    continue
                if base_of(source) in members:  # a view that at most broadcasts, as its readers do
                    values[source] = values[base_of(source)]
                else:
                    place = place_of(source, split)
                    made = values[source] = graph.input(f"in{len(places)}", NAMES[place.dtype], place.kernel_size)
                    places[made.id] = place
            emitter.add(node)
        for node in group.outputs:
            made = emitter.result(node)
            if made.id in places:  # a second name of one value
                made = graph.add_op("Identity", made)
            places[made.id] = place_of(node, split)
            values[node] = made
    except OpGraphError as error:
        raise RefusedError(group.nodes) from error
    graph.set_outputs([values[n] for n in group.outputs])
    graph.finalize()
    for like in emitter.shapes:
        size = _sizes(like)
        places[like.id] = Place("", 0, size, (0,) * len(size), torch.bool)
    launches = []
    for part in partition(graph, side_by_side=True).partitions:
        if part.kind != "fused":
            raise RefusedError(group.nodes)
        kernel = target.kernel(part, rounding, emitter.arguments)
        if kernel is None:
            raise RefusedError(group.nodes)
        for port in part.output_ports:
            if port.id not in places:
                size = _sizes(port)
                name = f"{prefix}_{port.id}"
                places[port.id] = Place(name, 0, size, row_major(size), TORCH_DTYPES[port.dtype])
        reads = tuple(places[t.id] for t in part.input_ports)
        writes = tuple(places[t.id] for t in part.output_ports)
        loads = enumerate(kernel.lowered.loads)
        numbers = {i: emitter.arguments[t.id] for i, t in loads if t is not None and t.id in emitter.arguments}
        launches.append(Launch(target, kernel, graph, group.nodes, part.units, reads, writes, numbers))
    return launches


def _sizes(tensor: LogicalTensor) -> tuple[int, ...]:
    """The sizes of a tensor of a group; all are known."""
    return tuple(int(d) for d in tensor.dims or ())  # type: ignore[arg-type]
