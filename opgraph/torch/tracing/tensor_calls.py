"""Records a function's torch calls besides those on data: the calls on real tensors, in order."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from opgraph.runtime.providers.torch_internals import OpOverload, OpOverloadPacket, tensors_in
from opgraph.torch.tracing.proxy import QUESTIONS, Proxy, proxies

#: Functions without a trailing underscore that write into arguments: running statistics, observers, attributes.
WRITERS = frozenset(
    (
        "batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats",
        "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "instance_norm",
        "fused_moving_avg_obs_fake_quant", "module_load", "backward", "__set__", "__delete__",
        "__setitem__", "__setstate__",
    )
)  # fmt: skip
#: Functions whose names begin like in-place operators, but that only read.
_READERS = frozenset(("__invert__", "__index__", "__int__", "__iter__"))


def writes(func: Callable[..., Any]) -> bool:
    """True if a torch function writes into a tensor for all arguments.

    For a function of `torch.ops` its schema decides; one mutable overload is enough. For others the name decides.
    """
    if hasattr(func, "overloads"):  # torch.ops.library.name
        return any(getattr(func, overload)._schema.is_mutable for overload in func.overloads())
    if hasattr(func, "_schema"):
        return bool(func._schema.is_mutable)
    name = getattr(func, "__name__", "")
    if name.startswith("__i"):
        return name not in _READERS
    return name in WRITERS or (name.endswith("_") and not name.endswith("__"))


#: Parts of the names of torch functions and methods that draw random numbers.
_DRAWING = (
    "bernoulli", "binomial", "cauchy", "dirichlet", "dropout", "exponential", "fractional_max_pool", "geometric",
    "gumbel", "lobpcg", "lowrank", "multinomial", "normal", "poisson", "rand", "rrelu", "scaled_dot_product",
    "standard_gamma", "uniform",
)  # fmt: skip
#: Names with such parts whose functions draw none.
_NOT_DRAWING = frozenset(
    ("__rand__", "native_dropout_backward", "normalize", "poisson_nll_loss", "rrelu_with_noise_backward")
)  # fmt: skip


def draws(name: str) -> bool:
    """True if a torch function or method of this name draws random numbers, at least for some arguments."""
    return name not in _NOT_DRAWING and any(part in name for part in _DRAWING)


def told_to_write(kwargs: Mapping[str, Any]) -> bool:
    """True if an argument makes a call write: `out=`, `inplace=True`, `max_norm=` of an embedding.

    torch.nn.functional passes its arguments on by name, even if the user passed them by position.
    """
    return bool(kwargs.get("inplace")) or kwargs.get("out") is not None or kwargs.get("max_norm") is not None


def function_name(func: Callable[..., Any]) -> str:
    """The name of a torch function in messages; for a getter, the attribute's name; "" if it has none."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


@dataclass(frozen=True, slots=True, eq=False)
class EagerCall:
    """One call of torch on real tensors, and its result."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """The function's name; for a getter, the attribute's."""
        return function_name(self.func)

    @property
    def is_question(self) -> bool:
        """True if it queries what is known of a tensor without its data."""
        return self.name in QUESTIONS

    @property
    def is_custom(self) -> bool:
        """True if it is an op of another library than torch, which may do something else each time."""
        is_op = isinstance(self.func, (OpOverload, OpOverloadPacket))
        return is_op and str(self.func).split(".")[0] not in ("aten", "prims")

    @property
    def changes(self) -> bool:
        """True if it changes a tensor."""
        return writes(self.func) or told_to_write(self.kwargs)


#: They accept any data. They do not dispatch on a traced tensor, and would convert it to a tensor without data.
_CONVERSIONS = (torch.as_tensor, torch.asarray, torch.tensor)
with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():  # torch warns about a change
    warnings.simplefilter("ignore")
    #: True if `asarray` keeps the gradient by default.
    _ASARRAY_HAS_GRADIENT = torch.asarray(torch.empty(0, requires_grad=True)).requires_grad


def _converted(
    func: Callable[..., Any],
    data: Proxy,
    /,
    dtype: torch.dtype | None = None,
    device: Any = None,
    *,
    copy: bool | None = None,
    requires_grad: bool | None = None,
    pin_memory: bool = False,
) -> Any:
    """The result of a conversion of a traced tensor."""
    if requires_grad or pin_memory:
        given = {"requires_grad": requires_grad} if requires_grad else {"pin_memory": pin_memory}
        return data.session.call(func, (data,), given)  # which refuses it
    made: torch.Tensor = data
    is_detached = requires_grad is False or (requires_grad is None and not _ASARRAY_HAS_GRADIENT)
    if func is torch.tensor or (func is torch.asarray and is_detached):
        made = made.detach()
    if func is torch.tensor or copy:
        made = made.clone()
    return made if dtype is None and device is None else made.to(device=device, dtype=dtype or data.dtype)


def _generator_states() -> list[bytes] | None:
    """The states of torch's own random number generators; None while a CUDA graph is captured, which hides them."""
    states, cuda = [torch.get_rng_state()], cast(Any, torch.cuda)
    if cuda.is_initialized():
        if cuda.is_current_stream_capturing():
            return None
        states += cuda.get_rng_state_all()
    return [ctypes.string_at(s.data_ptr(), s.nbytes) for s in states]  # in a mode, ops may not accept real tensors


def _copied(value: Any) -> Any:
    """Arguments with copies of their lists and dicts, which the function may change afterwards."""
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {name: _copied(part) for name, part in value.items()}
    return value


class Watch(TorchFunctionMode):
    """Records the calls on real tensors while it is entered.

    Attributes:
        before_write: called with the arguments of a call that writes into a real tensor, before it does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before_write: Callable[[Sequence[torch.Tensor]], None] = lambda tensors: None
        self.calls: list[EagerCall] = []
        self.paused = False
        self._before = _generator_states()

    def has_drawn(self) -> bool:
        """True if random numbers were drawn, or may have been drawn, since this was made."""
        after = _generator_states()
        return after is None or after != self._before

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handles one call of torch."""
        given = kwargs or {}
        if func in _CONVERSIONS and args and isinstance(args[0], Proxy):
            return _converted(func, *args, **given)
        if func is torch.Tensor.new_tensor and len(args) == 2 and isinstance(args[1], Proxy):
            return _converted(torch.tensor, args[1], **{"dtype": args[0].dtype, "device": args[0].device, **given})
        is_noted = not self.paused and next(proxies((*args, *given.values())), None) is None
        if is_noted and (writes(func) or told_to_write(given)):
            self.before_write(tensors_in((args, given)))
        noted = _copied(args), _copied(given)
        result = func(*args, **given)
        if is_noted:
            self.calls.append(EagerCall(func, *noted, result))
        return result

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pauses recording: calls that opgraph itself makes are not the function's."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Records a call that a session made on its arguments."""
        self.calls.append(EagerCall(func, args, kwargs, result))
