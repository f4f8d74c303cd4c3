"""The builder interface for the rules of op records, and the types of these rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import Op

Attrs: TypeAlias = Mapping[str, Any]
ShapeRule: TypeAlias = Callable[[tuple[LogicalTensor, ...], Attrs], tuple[Dims, ...]]

#: A text, or, where the text depends on them, a function of the attributes and the names of the given inputs. The names
#: may be a mapping from each name to the input's number of dimensions, None if unknown.
Template: TypeAlias = str | Callable[[Attrs, Collection[str]], str]


class Builder(Protocol):
    """The interface through which gradient rules add ops: the short form of `Graph.add_op`."""

    def __call__(self, kind: str, /, *inputs: LogicalTensor | float, **attrs: Any) -> Any:
        """Adds an op; returns its output, or a tuple of them."""

    def wants(self, tensor: LogicalTensor) -> bool:
        """True if the gradient of a tensor is requested."""

    def like(
        self, kind: str, inputs: Sequence[LogicalTensor], outputs: Sequence[LogicalTensor], name: str, attrs: Attrs
    ) -> tuple[LogicalTensor, ...]:
        """Adds an op with outputs of the dtypes and shapes of some tensors; returns them."""


#: `spell(build, op)`: the outputs of `op`, built from smaller ops on its inputs; see `OpDef.spelled`.
Speller: TypeAlias = Callable[[Builder, Op], Sequence[LogicalTensor]]

#: `rule(build, op, d)`: gradients of the inputs of `op` (None: zero), from those of its outputs (None: not used).
GradientRule: TypeAlias = Callable[[Builder, Op, Sequence[LogicalTensor | None]], Sequence[LogicalTensor | None]]
