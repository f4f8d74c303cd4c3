"""The torch function mode under which a fused module's forward runs, and where custom autograd functions meet it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from opgraph.torch.lazy import compute
from opgraph.torch.lazy_session import LazySession, Observer, saved_tensor_hooks

_thread = threading.local()


class _Mode(TorchFunctionMode):
    def __init__(self, session: LazySession) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._session.call(func, types, args, kwargs or {})


def current() -> LazySession | None:
    """The session that the calling code runs in, if it may go on in it; see `LazySession.hooks`."""
    session: LazySession | None = getattr(_thread, "session", None)
    return session if session is not None and session.hooks == saved_tensor_hooks() else None


def run_lazily(call: Callable[[], Any], observer: Observer | None = None, rounding: str = "store") -> Any:
    """What `call()` returns; pointwise arithmetic waits meanwhile, and nothing waits any more at the end."""
    session = LazySession(observer, rounding)
    outer = getattr(_thread, "session", None)
    _thread.session = session
    try:
        with _watched_functions(), _Mode(session):
            result = call()
    finally:
        _thread.session = outer
    session.compute_all()
    return result


class _Functions:
    """While sessions run, `autograd.Function.apply` gives Lazy arguments their values.

    It is no torch function: no mode is told of it, and autograd would connect the Lazy, not what it stands for. What
    every `apply` (bound to a name long before, too) calls first is replaced while sessions run; it does the same for
    everybody else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._original: Any = None

    def enter(self) -> None:
        with self._lock:
            self._running += 1
            if self._running == 1:
                self._original = original = torch._functorch.utils.unwrap_dead_wrappers

                def unwrapped(args: tuple[Any, ...]) -> tuple[Any, ...]:
                    session = getattr(_thread, "session", None)
                    if session is not None:
                        compute([t for t in args if isinstance(t, torch.Tensor)], None)
                        session.before_writing(args)
                    return original(args)

                torch._functorch.utils.unwrap_dead_wrappers = unwrapped

    def leave(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0:
                torch._functorch.utils.unwrap_dead_wrappers = self._original


_functions = _Functions()


@contextlib.contextmanager
def _watched_functions() -> Iterator[None]:
    _functions.enter()
    try:
        yield
    finally:
        _functions.leave()


def plain_forward() -> bool:
    """Whether something looks on that must see the module's own forward: compilers, exporters, tracers, transforms."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None
        or torch.fx._symbolic_trace.is_fx_symbolic_tracing()
    )
