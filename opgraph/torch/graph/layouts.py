"""Makes images between convolutions channels last, if torch's convolutions are faster then: on the CPU, in float32.

oneDNN copies a contiguous image into its own layout and the result back, at each call; it reads and writes
channels-last images directly. A convolution with 1x1 weights is a matrix product then (`convolutions`), and a depthwise
one, with its gradients, takes a third of the time. In training only these decide: convolutions of many channels with
larger weights gain little, and sums over channels-last images are slower.

The graph is functional here, so a value may have any layout that its readers expect: kernels write the strides of the
graph. Results of the graph, random numbers and all other values that depend on the order of elements in memory keep
their layout.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.node import Argument

from opgraph.runtime.providers.torch_internals import fake_mode_of, without_modes
from opgraph.torch.graph.aten import is_computed, is_elementwise, packet, value_of
from opgraph.torch.graph.torch_internals import hint
from opgraph.torch.graph.views import is_view

aten = torch.ops.aten

#: Library ops that compute the same elements of operands in any layout.
_FOLLOWING = frozenset(
    (
        aten._adaptive_avg_pool2d, aten.addmm, aten.avg_pool2d, aten.bmm, aten.cat, aten.max_pool2d_with_indices,
        aten.mm, aten.upsample_bilinear2d, aten.upsample_nearest2d,
    )
)  # fmt: skip


def channels_last(module: GraphModule, *, has_gradients: bool = False) -> None:
    """Makes the convolutions of a graph, and the ops between them, compute channels-last images.

    Args:
        module: a functional graph of ATen ops with fake values in each node's meta; it is changed.
        has_gradients: True if it is forward and backward in one.
    """
    graph = module.graph
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available() or not onednn.enabled:
        return
    convolutions = {n for n in graph.nodes if _is_convolution(n)}
    fakes = fake_mode_of([value_of(n) for n in convolutions])
    are_faster = _mostly_narrow if has_gradients or HAS_FAST_BLOCKS else _are_faster
    if fakes is None or not are_faster(convolutions):
        return
    with without_modes(), fakes:
        layouts = _Layouts(graph)
        moved = {n for n in convolutions if not (has_gradients and _stays(n))}
        pairs = {n.args[:2] for n in moved}
        for node in list(graph.nodes):
            if node in moved:
                image, *others = node.args
                node.args = (layouts.last(image, node), *others)
                layouts.compute(node)
            elif node.target is aten.convolution_backward.default and node.args[1:3] in pairs:
                gradient, image, *others = node.args
                node.args = (layouts.last(gradient, node), layouts.last(image, node), *others)
                layouts.compute(node)
            elif any(n in layouts.moved for n in node.all_input_nodes):
                layouts.follow(node)


def _is_convolution(node: Node) -> bool:
    """True if a node is a convolution of images that oneDNN computes, and not a transposed one."""
    if node.target is not aten.convolution.default:
        return False
    arguments: Any = node.args
    image, is_transposed = value_of(arguments[0]), arguments[6]
    return image.dim() == 4 and image.device.type == "cpu" and image.dtype is torch.float32 and not is_transposed


#: If the results of all convolutions have fewer elements than this fraction of the weights, most of the time goes into
#: the copies of weights into oneDNN's layout, which take longer for channels-last images. A mixture of both layouts was
#: slower than either.
_LEAST_PART = 0.2


def _are_faster(convolutions: Collection[Node]) -> bool:
    """True if convolutions are faster on channels-last images."""
    made = sum(_elements(value_of(node)) for node in convolutions)
    given: list[Any] = [node.args[1] for node in convolutions]
    weights = map(value_of, given)
    return made >= _LEAST_PART * sum(_elements(w) for w in weights if any(size != 1 for size in w.shape[2:]))


#: With AVX-512, oneDNN's own layout makes wide convolutions (`_is_wide`) so much faster that the copies there and back
#: are worth it: inference of a ResNet-18 takes 1.1 times as long channels last.
HAS_FAST_BLOCKS = torch.backends.cpu.get_cpu_capability() == "AVX512"


def _mostly_narrow(convolutions: Collection[Node]) -> bool:
    """True if most elements that convolutions compute come from those with 1x1 weights and from grouped ones."""
    made = {node: _elements(value_of(node)) for node in convolutions}
    return 2 * sum(size for node, size in made.items() if _is_wide(node)) < sum(made.values())


def _is_wide(convolution: Node) -> bool:
    """True if a convolution has weights larger than 1x1, and one group for all channels."""
    arguments: Any = convolution.args
    weight, groups = value_of(arguments[1]), arguments[8]
    return groups == 1 and any(size != 1 for size in weight.shape[2:])


#: If the weights of a wide convolution have at least this many times as many elements as its result, oneDNN takes less
#: time to copy contiguous images into its own layout than to copy the weights into the layout for channels-last images.
_LARGE_WEIGHTS = 4


def _stays(convolution: Node) -> bool:
    """True if a convolution with gradients keeps the layout of its images: if its weights are large, or if one side has
    one channel, because oneDNN adds up the gradient of such weights with larger rounding errors channels last."""
    arguments: Any = convolution.args
    weight, groups = value_of(arguments[1]), arguments[8]
    is_large = _is_wide(convolution) and _elements(weight) >= _LARGE_WEIGHTS * _elements(value_of(convolution))
    return is_large or (groups == 1 and min(weight.shape[:2]) == 1)


def _elements(value: torch.Tensor) -> int:
    return math.prod(hint(size) for size in value.shape)


class _Layouts:
    """The layouts of a graph's values.

    Attributes:
        moved: nodes whose values have another layout than in the original graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.moved: set[Node] = set()
        self._graph = graph
        self._before: dict[Node, Any] = {}  # the values in the original graph
        self._copies: dict[tuple[Node, bool], Node] = {}

    def last(self, node: Node, reader: Node) -> Node:
        """A node, or a copy of it, that is channels last."""
        if value_of(node).is_contiguous(memory_format=torch.channels_last):
            return node
        return self._copy(
            node, reader, lambda: torch.empty_like(value_of(node), memory_format=torch.channels_last), is_last=True
        )

    def follow(self, node: Node) -> None:
        """Computes the value of a node from operands in their new layout, or from copies in the original one."""
        is_loop = is_computed(node) and is_elementwise(node) and not node.kwargs.get("memory_format")
        if is_loop and any(n in self.moved and _has_its_elements(n, node) for n in node.all_input_nodes):
            self._put(node, torch.empty_like(value_of(node), memory_format=torch.channels_last))
        elif not _is_of_any_layout(node):
            self._restore(node)
        elif not self.compute(node):
            self._restore(node)
            self.compute(node)

    def compute(self, node: Node) -> bool:
        """Computes the value of a node again; False if torch cannot do that for operands of this layout."""
        args, kwargs = map_arg((node.args, node.kwargs), value_of)
        call: Any = node.target
        try:
            made = call(*args, **kwargs)
        except (RuntimeError, ValueError):  # a view of elements that are not contiguous
            return False
        self._put(node, made)
        return True

    def _put(self, node: Node, made: Any) -> None:
        before = value_of(node)
        if _strides(made) != _strides(before):
            self._before[node] = before
            node.meta = {**node.meta, "val": made}
            self.moved.add(node)

    def _restore(self, node: Node) -> None:
        """Makes a node read its operands in their original layout."""

        def restored(operand: Node) -> Argument:
            if operand not in self.moved:
                return operand
            before = self._before[operand]
            return self._copy(operand, node, lambda: before, is_last=False)

        node.args, node.kwargs = map_arg((node.args, node.kwargs), restored)

    def _copy(self, node: Node, reader: Node, like: Callable[[], torch.Tensor], is_last: bool) -> Node:
        key = node, is_last
        if key not in self._copies:
            with self._graph.inserting_before(reader):
                made = self._graph.call_function(aten.clone.default, (node,))
            made.meta = {**node.meta, "val": like()}
            self._copies[key] = made
        return self._copies[key]


def _is_of_any_layout(node: Node) -> bool:
    """True if a node has the same elements, whatever the layout of its operands."""
    if packet(node) is aten.as_strided:
        return False
    is_part = node.target is operator.getitem
    return is_part or is_view(node) or is_computed(node) or packet(node) in _FOLLOWING


def _has_its_elements(operand: Node, node: Node) -> bool:
    """True if an operand of an elementwise op has the sizes of the result, and is a channels-last image."""
    own, made = value_of(operand), value_of(node)
    return bool(own.dim() == 4 and own.shape == made.shape and own.is_contiguous(memory_format=torch.channels_last))


def _strides(value: Any) -> Any:
    """The strides of a value, or of each value of a tuple, without those of axes of one element."""
    if isinstance(value, (list, tuple)):
        return [_strides(v) for v in value]
    if not isinstance(value, torch.Tensor):
        return None
    return [stride for size, stride in zip(value.shape, value.stride()) if size != 1]
