"""What rules of records build with, and the types of the rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import Op

Attrs: TypeAlias = Mapping[str, Any]
ShapeRule: TypeAlias = Callable[[tuple[LogicalTensor, ...], Attrs], tuple[Dims, ...]]

#: A text, or a function of the attributes and of the names of the inputs that are given, where these choose it. The
#: names may come as a mapping: to the number of dimensions of each, None where it is not known.
Template: TypeAlias = str | Callable[[Attrs, Collection[str]], str]


class Builder(Protocol):
    """What a gradient rule builds with: `Graph.add_op`, short way."""

    def __call__(self, kind: str, /, *inputs: LogicalTensor | float, **attrs: Any) -> Any:
        """Adds an op; returns its output, or a tuple of them."""

    def wants(self, tensor: LogicalTensor) -> bool:
        """Whether the gradient of a tensor is asked for."""

    def like(
        self, kind: str, inputs: Sequence[LogicalTensor], outputs: Sequence[LogicalTensor], name: str, attrs: Attrs
    ) -> tuple[LogicalTensor, ...]:
        """Adds an op with outputs of the dtypes and shapes of some tensors; returns them."""


#: `spell(build, op)`: the outputs that `op` has, made of smaller ops on its inputs; see `OpDef.spelled`.
Speller: TypeAlias = Callable[[Builder, Op], Sequence[LogicalTensor]]

#: `rule(build, op, d)`: gradients of the inputs of `op` (None: zero), given those of its outputs (None: not used).
GradientRule: TypeAlias = Callable[[Builder, Op, Sequence[LogicalTensor | None]], Sequence[LogicalTensor | None]]
