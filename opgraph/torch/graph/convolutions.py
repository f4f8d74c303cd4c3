"""Convolutions on the CPU: those with 1x1 weights as matrix products, and gradients of others in little memory.

A convolution of f32 channels-last images with 1x1 weights is a matrix product: such an image is a matrix with one row
for each pixel, and 1x1 weights are a matrix too. The matrix product reads and writes both in their layout. oneDNN's
convolution first copies the weights into its own layout at each call, which takes longer than the product if images
are small.

oneDNN reads and writes images in its own layouts, and torch copies operands and results. The gradients of other
convolutions are computed so that few of these copies exist at the same time.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from opgraph.torch.graph.aten import bytes_of, value_of
from opgraph.torch.graph.peak_recomputation import SMALLEST

aten = torch.ops.aten

#: The gradient of the weights is one product for at most this many pixels of all images: its sums have one term for
#: each, and few threads share them. For one channel it would be a product with a vector, which MKL adds up with larger
#: rounding errors.
_MOST_PIXELS, _LEAST_CHANNELS = 4096, 2


def as_products(graph: Graph) -> None:
    """Replaces convolutions with 1x1 weights, and their gradients, by matrix products.

    Args:
        graph: a graph of ATen ops of known sizes with `val` in each node's meta; it is changed.
    """
    for node in list(graph.nodes):
        if node.target is aten.convolution.default:
            _forward(graph, node)
        elif node.target is aten.convolution_backward.default:
            _backward(graph, node)


def _forward(graph: Graph, node: Node) -> None:
    arguments: Any = node.args
    image, weight, bias, *window = arguments
    if not _is_product(window, weight, image, node):
        return
    new = _New(graph, node)
    operands = new.rows(image), new.of(aten.t.default, new.matrix(weight))
    new.replace(node, new.images(new.product(*operands, bias=bias), value_of(node)))


def _backward(graph: Graph, node: Node) -> None:
    arguments: Any = node.args
    gradient, image, weight, _, *window, _ = arguments
    parts: dict[Any, Node] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    by_image, by_weight, by_bias = map(parts.get, range(3))
    made = [part for part in (by_image,) if part is not None]
    if len(parts) != len(node.users) or not _is_product(window, weight, gradient, image, *made):
        return
    new = _New(graph, node)
    rows = new.rows(gradient)
    if by_image is not None:
        new.replace(by_image, new.images(new.product(rows, new.matrix(weight)), value_of(by_image)))
    is_small = value_of(rows).shape[0] <= _MOST_PIXELS and min(value_of(weight).shape[:2]) >= _LEAST_CHANNELS
    if by_weight is not None and is_small:
        product = new.product(new.of(aten.t.default, rows), new.rows(image))
        new.replace(by_weight, new.of(aten.view.default, product, list(value_of(by_weight).shape)))
    if by_bias is not None:
        new.replace(by_bias, new.of(aten.sum.dim_IntList, gradient, [0, 2, 3]))
    if node.users:
        node.args = (*node.args[:-1], [False, True, False])
    else:
        graph.erase_node(node)


def _is_product(window: Sequence[Any], weight: Any, *images: Any) -> bool:
    """True if a convolution computes each pixel from one pixel, and all its images are channels last."""
    if list(window) != [[1, 1], [0, 0], [1, 1], False, [0, 0], 1] or value_of(weight).shape[2:] != (1, 1):
        return False
    values = [value_of(image) for image in images]
    return value_of(weight).is_contiguous() and all(
        v.dim() == 4
        and v.numel() > 0
        and v.device.type == "cpu"
        and v.dtype is torch.float32
        and v.is_contiguous(memory_format=torch.channels_last)
        for v in values
    )


class _New:
    """Builds the nodes that replace another one."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph = graph
        self._before = before

    def of(self, target: Any, source: Any, *others: Any) -> Node:
        """A call that reads one tensor."""
        return self._call(target, (source, *others), target(value_of(source), *others))

    def product(self, left: Node, right: Node, bias: Any = None) -> Node:
        """(M, K), (K, N), (N) -> (M, N)."""
        # Values of known sizes may belong to several modes of fake tensors, which torch does not mix.
        value = value_of(left).new_empty(value_of(left).shape[0], value_of(right).shape[1])
        operands = (left, right) if bias is None else (bias, left, right)
        return self._call(aten.mm.default if bias is None else aten.addmm.default, operands, value)

    def _call(self, target: Any, args: tuple[Any, ...], value: torch.Tensor) -> Node:
        with self._graph.inserting_before(self._before):
            made = self._graph.call_function(target, args)
        made.meta = {**self._before.meta, "val": value}
        return made

    def rows(self, image: Any) -> Node:
        """Images as a matrix with one row for each pixel."""
        pixels = self.of(aten.permute.default, image, [0, 2, 3, 1])
        return self.of(aten.view.default, pixels, [-1, value_of(image).shape[1]])

    def matrix(self, weight: Any) -> Node:
        """(O, I, 1, 1) -> (O, I)."""
        return self.of(aten.view.default, weight, list(value_of(weight).shape[:2]))

    def images(self, rows: Node, like: torch.Tensor) -> Node:
        """A matrix with one row for each pixel, as images with the sizes and strides of `like`."""
        count, channels, height, width = like.shape
        pixels = self.of(aten.view.default, rows, [count, height, width, channels])
        made = self.of(aten.permute.default, pixels, [0, 3, 1, 2])
        made.meta["val"] = made.meta["val"].as_strided(like.shape, like.stride())
        return made

    def replace(self, node: Node, made: Node) -> None:
        """Replaces a node by another one, and erases it."""
        node.replace_all_uses_with(made)
        self._graph.erase_node(node)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that computes a library op, or some of its results.

    Attributes:
        name: the variable of the returned value.
        arguments: the arguments of the function that the node calls.
        results: the places of the node's results that it computes; None for all of them.
        is_restrided: True if a result has other strides than in the graph, and is copied.
    """

    name: str
    arguments: Sequence[Any]
    results: Collection[int] | None = None
    is_restrided: bool = False


@dataclass(frozen=True, slots=True)
class ChannelsLast:
    """An argument that is passed as channels last without a copy: only its sizes and layout matter, not its values."""

    node: Node


def library_calls(node: Node) -> Sequence[Call]:
    """The calls that compute a library op in little memory, in order.

    The gradients of a convolution by its weights come before that by its input. oneDNN copies operands and results into
    its own layouts, separately for each of the two. In one call, which begins with the gradient by the input, that
    gradient would be alive at the same time as the copies for the other.
    """
    given: Any = node.args
    if node.target is aten.convolution_backward.default and value_of(given[1]).device.type == "cpu":
        *arguments, mask = given
        by_input, *others = mask
        if by_input and bytes_of(given[1]) >= SMALLEST:
            calls = []
            if any(others):
                calls.append(Call(f"{node.name}_weights", (*arguments, [False, *others]), (1, 2)))
            if _is_computed_channels_last(node):
                gradient, image, *more = arguments
                last = (gradient, ChannelsLast(image), *more, [True, False, False])
                return (*calls, Call(node.name, last, (0,), is_restrided=True))
            return (*calls, Call(node.name, (*arguments, [True, False, False]), (0,)))
    return (Call(node.name, node.args),)


def _is_computed_channels_last(node: Node) -> bool:
    """True if oneDNN computes the gradient of a convolution by its input as channels last, whatever layout it gets.

    It does so for strided convolutions. Torch then holds the result, a copy of it and a contiguous copy of that at
    once. If the input is channels last, it holds the result alone, and the same bits are copied once. (For depthwise
    convolutions it holds two either way; those with dilation get other bits.)
    """
    given: Any = node.args
    _, image, weights, _, stride, _, dilation, is_transposed, _, groups, _ = given
    tensor = value_of(image)
    return bool(
        tensor.dim() == 4
        and tensor.dtype == torch.float32
        and any(step > 1 for step in stride)
        and all(step == 1 for step in dilation)
        and not is_transposed
        and groups == 1
        and tensor.is_contiguous()
        and not tensor.is_contiguous(memory_format=torch.channels_last)
        and value_of(weights).is_contiguous()
    )
