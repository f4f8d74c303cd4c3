"""Proxy: the placeholder of a data tensor in a trace. It holds no data and forwards every call to a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opgraph.runtime.providers.torch_internals import make_subclass
from opgraph.torch.broadcast import broadcast_shapes
from opgraph.torch.tracing import trace_errors

if TYPE_CHECKING:
    from opgraph.torch.tracing.session import Session


#: torch's argument parsers require a tensor under every Proxy; on the meta device nothing is computed by mistake.
_NOTHING = torch.empty(0, device="meta")


class Ref:
    """The name of a value of a trace. It compares by identity, which makes a cheap key."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


class Proxy(torch.Tensor):
    """A data tensor in a trace.

    `isinstance(x, torch.Tensor)`, shape, dtype, device and the like return the same as for the real tensor.

    Attributes:
        session: the run that it belongs to.
        ref: the value that it represents; in-place arithmetic replaces it.
        actual: the tensor itself if this is an argument of the function or a view of one; otherwise None.
        origin: the operands that it was computed from; they determine its shape and requires_grad.
        sizes: its shape, once it was read.
        detached: True if no gradient goes through it.
        shared: True if another value has the same memory, by detach() or expand(): nothing is written into it.
        torch_dtype: its dtype.
    """

    __slots__ = ("actual", "detached", "origin", "ref", "session", "shared", "sizes", "torch_dtype")
    session: Session
    ref: Ref
    actual: torch.Tensor | None
    origin: tuple[Any, ...]
    sizes: torch.Size | None
    torch_dtype: torch.dtype
    detached: bool
    shared: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Receives every torch function and method that is called with a Proxy."""
        first = args[0] if args and type(args[0]) is Proxy else next(proxies((*args, *(kwargs or {}).values())))
        return first.session.call(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<traced {str(self.dtype).removeprefix('torch.')}{list(self.shape)}>"

    def __hash__(self) -> int:
        return id(self if self.actual is None else self.actual)  # as torch's

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'Tensor' object has no attribute {name!r} ({trace_errors.place()})")

    def __rtruediv__(self, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return self.session.call(torch.Tensor.div, (other, self), {})
        return self.reciprocal() * other  # as torch does

    def __len__(self) -> int:
        return int(self.shape[0])

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """As torch's."""
        self.session.asked()
        if self.sizes is None:
            self.sizes = broadcast_shapes([t.shape for t in _tensors(self.origin)])
        return self.sizes

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """As torch's."""
        return self.torch_dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """As torch's."""
        return self.session.device

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """As torch's: True if anything that this was computed from requires a gradient."""
        self.session.asked()
        if not self.torch_dtype.is_floating_point or (self.actual is None and not self.session.with_gradients):
            return False
        return any(t.requires_grad for t in self.sources(connected=True))

    @property
    def _is_param(self) -> bool:  # type: ignore[override]
        """Read by `isinstance(x, nn.Parameter)`."""
        return isinstance(self.actual, torch.nn.Parameter)

    def sources(self, *, connected: bool = False) -> Iterator[torch.Tensor]:
        """The real tensors that it was computed from, or is; if `connected`, only those that gradients may reach."""
        return sources_of((self,), connected=connected)

    def change(self, ref: Ref, others: tuple[Any, ...]) -> None:
        """Replaces its value by one that is computed from the old value and other arguments."""
        if self.detached:
            before = proxy(self.session, self.ref, self.torch_dtype, None, self.origin)
            before.detached, self.detached, self.origin = True, False, (before,)
        self.ref = ref
        self.origin += others

    def dim(self) -> int:
        """As torch's."""
        return len(self.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """As torch's."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """As torch's."""
        return self.shape if dim is None else self.shape[dim]


def proxy(session: Session, ref: Ref, dtype: torch.dtype, real: torch.Tensor | None, origin: tuple[Any, ...]) -> Proxy:
    """A new Proxy; `real` for arguments and their views, `origin` for the rest."""
    made: Proxy = make_subclass(Proxy, _NOTHING)
    made.session = session
    made.ref = ref
    made.torch_dtype = dtype
    made.actual = real
    made.origin = origin
    made.detached = made.shared = False
    made.sizes = None if real is None else real.shape
    return made


def proxies(values: Any) -> Iterator[Proxy]:
    """The proxies among arguments, in lists and tuples too."""
    return (t for t in _tensors(values) if type(t) is Proxy)


def sources_of(values: Any, *, connected: bool = False) -> Iterator[torch.Tensor]:
    """The real tensors among arguments, and those that proxies among them were computed from; see `Proxy.sources`."""
    waiting = _tensors(values)
    seen: set[int] = set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if type(tensor) is not Proxy:
            yield tensor
        elif connected and (tensor.detached or not tensor.torch_dtype.is_floating_point):
            continue
        elif tensor.actual is not None:
            yield tensor.actual
        else:
            waiting += _tensors(tensor.origin)


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    waiting = list(values)
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            waiting += value
    return found


#: Python's operators and the functions they mean; a leading r swaps the operands.
OPERATORS: dict[str, Any] = {
    "__add__": torch.Tensor.add,
    "__sub__": torch.Tensor.sub,
    "__mul__": torch.Tensor.mul,
    "__truediv__": torch.Tensor.div,
    "__floordiv__": torch.floor_divide,
    "__mod__": torch.remainder,
    "__pow__": torch.pow,
    "__and__": torch.bitwise_and,
    "__or__": torch.bitwise_or,
    "__xor__": torch.bitwise_xor,
    "__lshift__": torch.bitwise_left_shift,
    "__rshift__": torch.bitwise_right_shift,
    "__eq__": torch.eq,
    "__ne__": torch.ne,
    "__lt__": torch.lt,
    "__le__": torch.le,
    "__gt__": torch.gt,
    "__ge__": torch.ge,
}
_UNARY: dict[str, Any] = {
    "__neg__": torch.neg,
    "__pos__": torch.positive,
    "__abs__": torch.abs,
    "__invert__": torch.bitwise_not,
}
_SWAPPED = {
    "__radd__": torch.Tensor.add,
    "__rmul__": torch.Tensor.mul,
    "__rsub__": torch.rsub,
    "__rand__": torch.bitwise_and,
    "__ror__": torch.bitwise_or,
    "__rxor__": torch.bitwise_xor,
}
_REFLECTED = {f"__r{name}__": OPERATORS[f"__{name}__"] for name in ("pow", "floordiv", "mod", "lshift", "rshift")}
#: `__iadd__` and the like: every operator that has a function with an underscore, except comparisons.
_INPLACE = {
    f"__i{name[2:]}": getattr(torch.Tensor, f"{func.__name__}_")
    for name, func in OPERATORS.items()
    if name not in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
}


_OPERANDS = (torch.Tensor, int, float, complex, np.generic, np.ndarray)
#: Python would repeat these, and read the count from the data.
_SEQUENCES = (list, tuple, str, bytes)


def _no_operand(func: Callable[..., Any], other: Any) -> Any:
    """The result for an operand that tensors do not support; Python's `==` and `!=` then compare objects."""
    if isinstance(other, _SEQUENCES) and func not in (torch.Tensor.__eq__, torch.Tensor.__ne__, torch.eq, torch.ne):
        raise trace_errors.sequence(type(other).__name__)
    return NotImplemented


def _operator(func: Callable[..., Any]) -> Callable[[Proxy, Any], Any]:
    def operator(self: Proxy, other: Any) -> Any:
        return self.session.call(func, (self, other), {}) if isinstance(other, _OPERANDS) else _no_operand(func, other)

    return operator


def _reflected(func: Callable[..., Any]) -> Callable[[Proxy, Any], Any]:
    def operator(self: Proxy, other: Any) -> Any:
        return self.session.call(func, (other, self), {}) if isinstance(other, _OPERANDS) else _no_operand(func, other)

    return operator


def _unary(func: Callable[..., Any]) -> Callable[[Proxy], Any]:
    return lambda self: self.session.call(func, (self,), {})


# An operator that is defined here reaches the session in 0.1 us; through torch's own it takes 1 us.
for _name, _func in {**OPERATORS, **_SWAPPED, **_INPLACE}.items():
    setattr(Proxy, _name, _operator(_func))
for _name, _func in _REFLECTED.items():
    setattr(Proxy, _name, _reflected(_func))
for _name, _func in _UNARY.items():
    setattr(Proxy, _name, _unary(_func))


_ANSWERS: dict[str, Callable[..., Any]] = {
    "is_floating_point": lambda x: x.dtype.is_floating_point,
    "is_complex": lambda x: False,
    "is_tensor": lambda x: True,
    "numel": lambda x: x.shape.numel(),
    "nelement": lambda x: x.shape.numel(),
    "ndimension": lambda x: x.dim(),
    "dim": lambda x: x.dim(),
    "size": lambda x, *dim, **named: x.size(*dim, **named),
    "element_size": lambda x: x.dtype.itemsize,
    "itemsize": lambda x: x.dtype.itemsize,
    "nbytes": lambda x: x.shape.numel() * x.dtype.itemsize,
    "is_signed": lambda x: x.dtype.is_signed,
    "is_cuda": lambda x: x.device.type == "cuda",
    "is_cpu": lambda x: x.device.type == "cpu",
    "is_mps": lambda x: x.device.type == "mps",
    "is_xpu": lambda x: x.device.type == "xpu",
    "is_meta": lambda x: x.device.type == "meta",
    "is_sparse": lambda x: False,
    "is_sparse_csr": lambda x: False,
    "is_quantized": lambda x: False,
    "is_nested": lambda x: False,
    "is_mkldnn": lambda x: False,
    "get_device": lambda x: x.device.index if x.device.index is not None else -1,
    "layout": lambda x: torch.strided,
    "is_same_size": lambda x, other: x.shape == other.shape,
    "result_type": lambda *both: torch.result_type(*(_empty(a) for a in both)),
    "_is_param": lambda x: False,
}
#: Queries of a real tensor that need no values; Proxy defines the first few itself.
QUESTIONS = frozenset(("shape", "dtype", "device", "ndim", "requires_grad", "__len__", *_ANSWERS))
#: Queries of a tensor's memory layout.
LAYOUT = ("is_contiguous", "stride", "storage_offset")


def answer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(True, the result) if a call only queries a tensor's metadata; otherwise the first entry is False."""
    x = args[0] if args else None
    if not isinstance(x, Proxy):
        return False, None
    if name in LAYOUT:
        return _layout(name, x, args[1:], kwargs)
    known = _ANSWERS.get(name)
    return (False, None) if known is None else (True, known(*args, **kwargs))


def _layout(name: str, x: Proxy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Answers queries of the memory layout; for a computed value, only that it is contiguous if all its sources are.

    They are recorded as calls that return a value to Python, because no plan compares layouts.
    """
    asked = getattr(torch.Tensor, name)
    if x.actual is not None:
        return True, x.session.eager(asked, (x.actual, *args), kwargs)
    found = name == "is_contiguous" and all(x.session.eager(asked, (t, *args), kwargs) for t in x.sources())
    return found, found


def _empty(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value
