"""The calls of torch that compute a library op: one for most ops, several where that takes less memory.

oneDNN reads and writes images in layouts of its own, and torch copies what it is given and what it gives. The gradients
of a convolution are asked for so that few of these copies lie beside each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from opgraph.torch.graph.aten import bytes_of, value_of
from opgraph.torch.graph.peak_recomputation import SMALLEST

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Call:
    """A call that computes a library op, or some of its results.

    Attributes:
        name: the variable of what it returns.
        arguments: of the function that the node calls.
        results: which results of the node it computes; None: all of them.
        is_restrided: whether a result lies in another way than the graph says, and is copied.
    """

    name: str
    arguments: Sequence[Any]
    results: Collection[int] | None = None
    is_restrided: bool = False


@dataclass(frozen=True, slots=True)
class ChannelsLast:
    """An argument that is given as channels last without being moved: its sizes and layout count, its values do not."""

    node: Node


def library_calls(node: Node) -> Sequence[Call]:
    """The calls that compute a library op in little memory, in order.

    The gradients of a convolution by its weights come before that by its input. oneDNN copies what it reads and makes
    into layouts of its own, for each of the two alone: in one call, which begins with the input's, that gradient would
    lie beside the copies for the other.
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
    """Whether oneDNN computes the gradient of a convolution by its input channels last, whatever it is asked for.

    It does with strides. Torch then holds the result, a copy of it and a contiguous copy of that at once. Where the
    input is channels last, it holds the result alone, and the same bits are copied once. (Of depthwise convolutions
    it holds two either way; those with dilation get other bits.)
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
