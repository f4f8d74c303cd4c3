"""The places of a program's tensors: the variable, the elements in it, and the distance from a multiple of 16 bytes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from opgraph.torch.graph.aten import value_of, writes
from opgraph.torch.graph.axis_splits import AxisSplit
from opgraph.torch.graph.views import base_of, is_alias, is_view

#: The alignment in bytes of tensors that a GPU's kernels read and write in packs.
PACK = 16


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor: a variable of the function, an offset in elements from its beginning, sizes and strides.

    In a symbolic program, names replace the numbers that follow from sizes.

    Attributes:
        name: the variable; "" if only the shape matters, and any address may be passed.
        split: the axis that a kernel treats as two axes.
    """

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    split: AxisSplit | None = None

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """The sizes in a kernel."""
        return self.size if self.split is None else self.split.shape(self.size)

    @property
    def kernel_stride(self) -> tuple[int, ...]:
        """The strides in a kernel."""
        return self.stride if self.split is None else self.split.strides(self.size, self.stride)

    @property
    def skipped(self) -> int:
        """Bytes from the beginning of the variable's tensor."""
        return self.offset * self.dtype.itemsize

    def sized(self, values: Mapping[Any, Any]) -> Place:
        """The place with names replaced by their values; this object if it has no names."""
        offset = values.get(self.offset, self.offset)
        size, stride, split = filled(self.size, values), filled(self.stride, values), self.split
        if split is not None:
            split = replace(split, size=values.get(split.size, split.size))
        if size == self.size and stride == self.stride and offset == self.offset and split == self.split:
            return self
        return Place(self.name, offset, size, stride, self.dtype, split)


def filled(numbers: Iterable[Any], values: Mapping[Any, Any]) -> tuple[int, ...]:
    """Numbers, with names replaced by their values."""
    return tuple([values.get(n, n) for n in numbers])


def place_of(node: Node, split: AxisSplit | None = None) -> Place:
    """The place of a node's value."""
    base, value = base_of(node), value_of(node)
    offset = int(value.storage_offset()) - int(value_of(base).storage_offset()) if base is not node else 0
    return Place(base.name, offset, tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype, split)


class Beginnings:
    """The distances of the tensors of a graph from a multiple of 16 bytes.

    Allocators align tensors to such multiples. The exceptions are tensors that the program does not own: inputs, which
    a program copies if they are not aligned; and tensors that a call writes to, or returns as an alias, which are not
    moved.

    Args:
        module: the graph before kernels are made of it.
    """

    def __init__(self, module: GraphModule) -> None:
        nodes = list(module.graph.nodes)
        calls = [n for n in nodes if n.op == "call_function" and not is_view(n)]
        moving = {base_of(source) for n in calls if writes(n) for source in n.all_input_nodes}
        moving |= {n for n in calls if is_alias(n)}
        self._anywhere = {n.name for n in moving if n.op != "get_attr"}
        fixed = {n.name: _constant(n) for n in nodes if n.op == "get_attr"}
        #: For tensors alone; DTensor's meshes and process groups are constants of a graph, too.
        self._fixed = {n: t.data_ptr() % PACK for n, t in fixed.items() if isinstance(t, torch.Tensor)}
        #: Inputs that may be copied to an aligned address.
        self.copied = {n.name for n in nodes if n.op == "placeholder"} - self._anywhere

    def is_known(self, name: str) -> bool:
        """True if the distance of a variable of the function is known."""
        return name not in self._anywhere

    def of(self, place: Place) -> int:
        """An address with the same alignment as that of a place."""
        if not self.is_known(place.name):
            return place.dtype.itemsize
        return (self._fixed.get(place.name, 0) + place.skipped) % PACK


def _constant(node: Node) -> Any:
    found: Any = operator.attrgetter(str(node.target))(node.graph.owning_module)
    return found
