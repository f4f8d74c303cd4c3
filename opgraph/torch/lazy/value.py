"""Lazy: a tensor whose pointwise arithmetic has been noted down and not run yet.

A Lazy is a tensor to everybody who asks (`isinstance`, shape, dtype, device). When somebody needs its values, the
arithmetic runs and the very same Python object becomes the plain tensor with the result: class, data, gradient node and
all. So nothing lazy outlives the forward pass that made it, wherever it was kept.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from opgraph.errors import Unimplemented

if TYPE_CHECKING:
    from opgraph.torch.lazy.session import LazySession

_NOTHING = torch.empty(0, device="meta")
_make = torch.Tensor._make_subclass
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
        for operand in operands:
            if type(operand) is Node:
                operand.readers += 1

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
                if item.spec.dtype.is_floating_point:
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

    __hash__ = object.__hash__

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
