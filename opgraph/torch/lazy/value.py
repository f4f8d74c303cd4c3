"""Lazy: a tensor whose pointwise arithmetic has been noted down and not run yet.

A Lazy is a tensor to everybody who asks (`isinstance`, shape, dtype, device). When somebody needs its values, the
arithmetic runs and the very same Python object becomes the plain tensor with the result: class, data, gradient node and
all. So nothing lazy outlives the forward pass that made it, wherever it was kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from opgraph.errors import Unimplemented
from opgraph.torch.lazy.node import Node

if TYPE_CHECKING:
    from opgraph.torch.lazy.session import LazySession

_NOTHING = torch.empty(0, device="meta")
_make = torch.Tensor._make_subclass


class Lazy(torch.Tensor):
    """A tensor that stands for a Node; made by `lazy`."""

    node: Node

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Where torch functions end up that nobody notes down: the values are needed."""
        compute(args, kwargs)
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compiled code took a Lazy without asking torch's functions; autograd has not seen the real tensor."""
        if any(t.node.requires_grad() for t in lazies((args, kwargs))) and torch.is_grad_enabled():
            raise Unimplemented(
                f"compiled code calls {func} on a value that has not been computed yet",
                where="a fused model",
                fix="take the module that does so out: ogt.unfuse(module)",
            )
        compute(args, kwargs)
        return func(*args, **(kwargs or {}))

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        compute((self,), None)
        return repr(self)

    __hash__ = torch.Tensor.__hash__  # the same before and after it is computed

    def __len__(self) -> int:
        return self.node.shape[0]

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """As torch's; so are the others."""
        return self.node.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """As torch's."""
        return self.node.spec.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """As torch's."""
        return self.node.device

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """As torch's."""
        return len(self.node.shape)

    @property
    def requires_grad(self) -> bool:
        """As torch's."""
        return self.node.requires_grad()

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        compute((self,), None)
        self.requires_grad = value  # of a plain tensor by now

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """As torch's."""
        return self.node.device.type == "cuda"

    def dim(self) -> int:
        """As torch's."""
        return len(self.node.shape)

    def numel(self) -> int:
        """As torch's."""
        return self.node.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        """As torch's."""
        return self.node.shape if dim is None else self.node.shape[dim]

    def is_floating_point(self) -> bool:
        """As torch's."""
        return self.node.spec.dtype.is_floating_point


def lazy(node: Node) -> Lazy:
    """The tensor that stands for a node."""
    made: Lazy = _make(Lazy, _NOTHING, False)
    made.__dict__["node"] = node
    node.handle = weakref.ref(made)
    return made


def given_up(tensor: torch.Tensor) -> torch.Tensor:
    """Moves a tensor's data and gradient node into a tensor of their own; it is a Lazy without a node then."""
    old: torch.Tensor = _make(Lazy, _NOTHING, False)
    torch._C._swap_tensor_impl(tensor, old)
    old.__class__ = torch.Tensor
    tensor.__class__ = Lazy
    return old


def lazies(values: Any) -> Iterator[Lazy]:
    """The Lazy tensors among arguments, in lists, tuples and dicts too."""
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if type(value) is Lazy:
            yield value
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()


def compute(args: Any, kwargs: Any) -> None:
    """Gives the Lazy tensors among arguments their values: they are plain tensors afterwards."""
    by_session: dict[LazySession, list[Node]] = {}
    for tensor in lazies((args, kwargs)):
        by_session.setdefault(tensor.node.session, []).append(tensor.node)
    for session, nodes in by_session.items():
        session.compute(nodes)
