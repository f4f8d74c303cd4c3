"""Calls without arithmetic of their own: casts, fills, views, calls that expand to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opgraph.runtime.providers.torch_internals import device_and_dtype
from opgraph.torch.tracing import trace_errors
from opgraph.torch.tracing.emit import Emitter, outcome
from opgraph.torch.tracing.proxy import Proxy, Ref
from opgraph.torch.tracing.session import Input, Session, Step

#: Conversion methods of a tensor, and their target dtypes.
CONVERSIONS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "bool": torch.bool,
    "char": torch.int8,
    "byte": torch.uint8,
}
_VIEWS = frozenset(
    (
        "__getitem__", "chunk", "split", "split_with_sizes", "tensor_split", "narrow", "select", "unbind", "transpose",
        "permute", "t", "T", "mT", "swapaxes", "swapdims", "movedim", "reshape", "view", "flatten", "unflatten",
        "unsqueeze", "squeeze", "expand", "broadcast_to", "detach", "data", "ravel", "diagonal", "flip", "fliplr",
        "flipud", "roll", "rot90",
    )
)  # fmt: skip
#: Functions that fill a tensor like another with one number, and the number; None if it is an argument.
FILLS = {"zeros_like": 0, "ones_like": 1, "full_like": None}


def is_view(name: str) -> bool:
    """True if a function returns the same elements in another order or shape."""
    return name in _VIEWS


def is_spread(name: str, args: tuple[Any, ...]) -> bool:
    """True if a call broadcasts a computed value to a larger shape."""
    computed = bool(args) and isinstance(args[0], Proxy) and args[0].actual is None
    return computed and name in ("expand", "expand_as", "broadcast_to")


def spread_like(session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A tensor of the result shape of `expand`, `expand_as` or `broadcast_to`; its one element is never read.

    Raises:
        RuntimeError: torch's own, if the value does not expand to the shape.
    """
    session.asks = True
    sizes = args[1:] or tuple(kwargs.values())
    if isinstance(sizes[0], torch.Tensor):
        sizes = tuple(sizes[0].shape)
    one = session.eager(torch.empty, ((),), {"dtype": args[0].dtype, "device": args[0].device})
    own = session.eager(torch.Tensor.expand, (one, tuple(args[0].shape)), {})
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    spread: torch.Tensor = session.eager(torch.Tensor.expand, (own, sizes), {})
    return spread


def spread_over(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The call in a trace that broadcasts a value to the shape of a tensor."""
    return value.expand_as(like)


def cast_target(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype to which a call converts its argument; None if it is no conversion."""
    x = args[0] if args else None
    if not isinstance(x, Proxy):
        return None
    if name in CONVERSIONS:
        return CONVERSIONS[name]
    if name in ("cpu", "cuda"):
        _same_device(x, torch.device(name))
        return x.dtype
    if name == "type" and (len(args) > 1 or kwargs):
        dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
        if isinstance(dtype, torch.dtype):
            return dtype
        raise trace_errors.unknown("type", f"{dtype!r} is no dtype", "give a torch.dtype")
    if name == "type_as":
        _same_device(x, args[1].device)
        return args[1].dtype  # type: ignore[no-any-return]
    if name != "to":
        return None
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        device, dtype = args[1].device, args[1].dtype
    else:
        named = {k: v for k, v in kwargs.items() if k not in ("copy", "memory_format")}
        given = args[1:] if type(args[-1]) is not bool else args[1:3] if type(args[2]) is not bool else args[1:2]
        device, dtype, *_ = device_and_dtype(*given, **named)
    if device is not None:
        _same_device(x, device)
    return dtype or x.dtype


def _same_device(x: Proxy, device: torch.device) -> None:
    if device.type != x.device.type or device.index not in (None, x.device.index):
        raise trace_errors.unknown("to", f"it moves data from {x.device} to {device}", "move tensors outside of it")


def fill_value(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, torch.dtype] | None:
    """The number and dtype of a call such as ones_like(x); None for other calls."""
    if name not in FILLS or not isinstance(args[0], Proxy):
        return None
    value = FILLS[name]
    if value is None:
        value = args[1] if len(args) > 1 else kwargs.get("fill_value")
    if not isinstance(value, (bool, int, float)):
        raise trace_errors.unknown(name, "its value is no Python number", "multiply ones_like(x) by it")
    if kwargs.get("requires_grad"):
        raise trace_errors.unknown(name, "inside, no tensor is a leaf", "make it outside of the fused function")
    if kwargs.get("device") is not None:
        _same_device(args[0], torch.device(kwargs["device"]))
    dtype = kwargs.get("dtype") or args[0].dtype
    torch.full((2,), value, dtype=dtype)  # torch raises if the dtype lacks the number; for one element not always
    return value, dtype


def _contiguous(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The computed value itself, if all tensors that it comes from have the requested layout."""
    x = args[0]
    layout = args[1] if len(args) > 1 else kwargs.get("memory_format", torch.contiguous_format)
    for tensor in x.sources():
        if not session.eager(torch.Tensor.is_contiguous, (tensor,), {"memory_format": layout}):
            raise trace_errors.unknown("contiguous", "its result has a layout in memory of its own", "call it outside")
    return x


def _first(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _glu(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    x = args[0] if args else kwargs["input"]
    if x.shape[dim] % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {dim} is size {x.shape[dim]}")
    a, b = x.chunk(2, dim)
    return a * b.sigmoid()


def _prelu(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, weight = args if len(args) == 2 else (args[0], kwargs["weight"])
    session.asks = True
    if not torch.is_autocast_enabled(session.device.type):
        outcome(torch.nn.functional.prelu, (x, weight))  # raises where the slopes do not fit
    if weight.dim() == 1 and x.dim() != 1:
        # One slope per channel, along axis 1.
        weight = session.eager(torch.Tensor.view, (weight, (-1, *[1] * (x.dim() - 2)) if x.dim() else ()), {})
    return torch.where(x > 0, x, weight * x)


def _dropout(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the input: dropout has no effect outside of training."""
    name = func.__name__
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", "alpha" not in name))
    if training:
        raise trace_errors.random(name)
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    torch.nn.functional.dropout(torch.empty(0), p, training=False)  # torch raises if it is no probability
    return args[0] if args else kwargs["input"]


def _rrelu(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Outside of training, leaky_relu with the mean of both slopes."""
    names = ("input", "lower", "upper", "training", "inplace")
    given = {"lower": 1 / 8, "upper": 1 / 3, "training": False, "inplace": False, **dict(zip(names, args)), **kwargs}
    if given["training"]:
        raise trace_errors.random("rrelu")
    if given["lower"] > given["upper"]:
        raise RuntimeError(f"Lower bound should be less than or equal to the upper bound ({trace_errors.place()})")
    slope = (given["lower"] + given["upper"]) / 2
    return torch.nn.functional.leaky_relu(given["input"], slope, given["inplace"])


def _like_real(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`parameter.expand_as(x)`, `parameter.to(x)`: only the metadata of x is needed."""
    name, t, x = func.__name__, args[0], args[1]
    session.asks = session.asks or name not in ("to", "type_as")
    if isinstance(t, Proxy):
        if name in ("view_as", "reshape_as", "expand_as"):
            return getattr(t, name.removesuffix("_as"))(x.shape)
        raise trace_errors.unknown(name, "it moves data", "call it outside")
    if name in ("to", "type_as"):
        return session.eager(torch.Tensor.to, (t, x.device, x.dtype), {})
    return session.eager(getattr(torch.Tensor, name.removesuffix("_as")), (t, x.shape), {})


def _new(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.new_tensor(...)` and similar calls: a real tensor of the dtype and device of x."""
    of = session.eager(torch.empty, (0,), {"dtype": args[0].dtype, "device": args[0].device})
    return session.eager(func, (of, *args[1:]), kwargs)


#: The axes of functions without an axes argument.
_AXES = {"fliplr": (1,), "flipud": (0,)}


def turned(session: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies flip, fliplr, flipud, roll or rot90 to a computed value: repeats its arithmetic on turned tensors,
    because the value has no memory that could be turned.

    Raises:
        Exception: torch's own, for axes and shifts that do not fit.
        Unimplemented: rot90 by a quarter turn, which moves elements from one axis to another.
    """
    session.asks = True
    x, *rest = args or (kwargs["input"],)
    named = {name: value for name, value in kwargs.items() if name != "input"}
    func(torch.empty((1,) * x.dim()), *rest, **named)  # torch raises if they do not fit
    if func.__name__ == "roll":
        shifts = _numbers(rest[:1] or named["shifts"])
        axes = _numbers(rest[1:] or named.get("dims", ()))
    elif func.__name__ == "rot90":
        turns = {"k": 1, "dims": (0, 1), **dict(zip(("k", "dims"), rest)), **named}
        if turns["k"] % 2:
            raise trace_errors.view("rot90")
        shifts, axes = (), _numbers(turns["dims"]) if turns["k"] % 4 else ()
    else:
        shifts = ()
        axes = _AXES.get(func.__name__) or _numbers(rest or named["dims"])
    _, read = _arithmetic(session, x.ref)
    made = [_turned_input(session, entry, x.shape, shifts, axes) for entry in read]
    return session.call(same_arithmetic, (x, *made), {})


def same_arithmetic(value: Proxy, *tensors: torch.Tensor) -> None:
    """Represents, in a trace, the arithmetic of a value, applied to other tensors than those that it read."""


def repeat_arithmetic(emitter: Emitter, args: tuple[Any, ...]) -> Ref:
    """Adds the steps of a call of `same_arithmetic`; returns the ref of the result."""
    value, *tensors = args
    steps, read = _arithmetic(emitter.session, value.ref)
    names: dict[Any, Any] = {
        entry.ref: t.ref if isinstance(t, Proxy) else emitter.session.capture(t)
        for entry, t in zip(read, tensors, strict=True)
    }
    for step in steps:
        operands = tuple([names.get(o, o) if isinstance(o, Ref) else o for o in step.operands])
        names[step.result] = emitter.step(step.kind, operands, step.dtype, dict(step.attrs))
    result: Ref = names[value.ref]
    return result


def _arithmetic(session: Session, ref: Ref) -> tuple[list[Step], list[Input]]:
    """The steps that compute a value, and the tensors whose data they read."""
    wanted, steps = {ref}, []
    for step in reversed(session.node.path()):
        if step.result in wanted:
            steps.append(step)
            data = step.operands[:1] if step.kind == "BroadcastTo" else step.operands
            wanted.update(o for o in data if isinstance(o, Ref))
    return steps[::-1], [entry for entry in session.inputs if entry.ref in wanted]


def _turned_input(
    session: Session, entry: Input, shape: Sequence[int], shifts: Sequence[int], axes: Sequence[int]
) -> Any:
    """Turns a tensor that broadcasts to a shape in the same way as the shape.

    Args:
        shifts: the shifts of a roll; empty for a flip.
        axes: axes of the shape; empty if its elements are rolled in memory order.
    """
    tensor: Any = entry.tensor if entry.captured else session.given[id(entry.tensor)]
    run: Callable[..., Any] = session.eager if entry.captured else session.call
    own, rank = entry.tensor.shape, len(shape)
    if not own or (shifts and not axes and all(size == 1 for size in own)):
        return tensor
    if shifts and not axes:
        whole = tensor if tuple(own) == tuple(shape) else run(torch.Tensor.expand, (tensor, tuple(shape)), {})
        return run(torch.roll, (whole, tuple(shifts)), {})
    last = [axis % rank - rank for axis in axes]
    kept = [i for i, axis in enumerate(last) if -axis <= len(own) and own[axis] != 1]
    if not kept:  # the tensor broadcasts along these axes
        return tensor
    taken = tuple(last[i] for i in kept)
    if shifts:
        return run(torch.roll, (tensor, tuple(shifts[i] for i in kept), taken), {})
    return run(torch.flip, (tensor, taken), {})


def _numbers(value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(n for v in value for n in _numbers(v))
    return (int(value),)


#: Calls that expand to other calls, or to real tensors: they add no node of their own.
EXPANSIONS: dict[str, Callable[[Session, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    "contiguous": _contiguous,
    "positive": _first,
    "glu": _glu,
    "prelu": _prelu,
    "rrelu": _rrelu,
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"), _dropout),
    "expand_as": _like_real,
    "view_as": _like_real,
    "reshape_as": _like_real,
    **dict.fromkeys(("flip", "fliplr", "flipud", "roll", "rot90"), turned),
    "new_tensor": _new,
    "new_full": _new,
    "new_zeros": _new,
    "new_ones": _new,
}
