"""Node: a call of a torch function that has been noted down and not run yet."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from opgraph.torch.lazy.session import LazySession
    from opgraph.torch.lazy.value import Lazy

_count = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """A call of a torch function without its tensors; compared by identity.

    Attributes:
        name: the function's, for people.
        func: the function, out of place.
        places: for each argument (True, None) where a tensor goes, or (False, the argument).
        named: the same for keyword arguments, with their names.
        dtype: of the result.
        cast: the dtype to which autocast converts floating operands first; None: it leaves them.
    """

    name: str
    func: Callable[..., Any]
    places: tuple[tuple[bool, Any], ...]
    named: tuple[tuple[str, bool, Any], ...]
    dtype: torch.dtype
    cast: torch.dtype | None

    def __call__(self, tensors: list[Any]) -> Any:
        """Runs it on tensors (or proxies), in the order of the places."""
        if self.cast is not None:
            tensors = [self._cast(t) for t in tensors]
        rest = iter(tensors)
        args = [next(rest) if is_tensor else value for is_tensor, value in self.places]
        return self.func(*args, **{n: next(rest) if is_tensor else value for n, is_tensor, value in self.named})

    def _cast(self, tensor: Any) -> Any:
        convert = tensor.dtype.is_floating_point and tensor.dtype not in (torch.float64, self.cast)
        return tensor.to(self.cast) if convert else tensor


class Node:
    """One call that has been noted down.

    Attributes:
        spec: which call.
        operands: its tensors: nodes, and real tensors.
        shape, state: of the result; and how torch was set when it was noted down.
        value: the result, once it has run; the operands are let go then.
        readers: how many nodes that have not run read it.
        handle: the Lazy that stands for it, weakly.
        overwrites: the call in place, where its first operand is a tensor that nobody else has.
        site: where in the model it was noted down, if somebody wants to know.
    shared: whether another node stands for the same memory: it is detached from this one, or this one from it.
    """

    __slots__ = (
        "device",
        "handle",
        "index",
        "operands",
        "overwrites",
        "readers",
        "session",
        "shape",
        "shared",
        "site",
        "spec",
        "state",
        "value",
    )

    def __init__(
        self,
        session: LazySession,
        spec: Spec,
        operands: tuple[Node | torch.Tensor, ...],
        shape: torch.Size,
        device: torch.device,
        state: Any,
    ) -> None:
        self.session = session
        self.spec = spec
        self.operands = operands
        self.shape = shape
        self.device = device
        self.state = state
        self.value: torch.Tensor | None = None
        self.readers = 0
        self.handle: weakref.ref[Lazy] | None = None
        self.index = next(_count)
        self.overwrites: Spec | None = None
        self.site: Any = None
        self.shared = spec.name == "detach"
        if self.shared and type(operands[0]) is Node:
            operands[0].shared = True
        for operand in operands:
            if type(operand) is Node:
                operand.readers += 1

    @property
    def is_detached(self) -> bool:
        """Whether its result is its operand's memory."""
        return self.spec.name == "detach"

    @property
    def nbytes(self) -> int:
        """What the result takes."""
        return self.shape.numel() * self.spec.dtype.itemsize

    def is_alive(self) -> bool:
        """Whether somebody still holds the Lazy."""
        lazy = self.handle() if self.handle is not None else None
        return lazy is not None and lazy.__dict__.get("node") is self

    def requires_grad(self) -> bool:
        """Whether the result will."""
        if not self.state[0] or not self.spec.dtype.is_floating_point:
            return False
        waiting: list[Node | torch.Tensor] = [self]
        while waiting:
            item = waiting.pop()
            if type(item) is Node and item.value is None:
                if item.spec.dtype.is_floating_point and not item.is_detached:
                    waiting += item.operands
            elif (item.value if type(item) is Node else item).requires_grad:  # type: ignore[union-attr]
                return True
        return False

    def settle(self, value: torch.Tensor) -> None:
        """Takes the result: the Lazy becomes it."""
        lazy = self.handle() if self.handle is not None else None
        if lazy is not None and lazy.__dict__.get("node") is self:
            torch._C._swap_tensor_impl(lazy, value)
            del lazy.__dict__["node"]
            lazy.__dict__.update(value.__dict__)  # of a FakeTensor, what makes it one
            lazy.__class__ = type(value)  # type: ignore[assignment]
            value = lazy
        self.value = value
        for operand in self.operands:
            if type(operand) is Node:
                operand.readers -= 1
        self.operands = ()
