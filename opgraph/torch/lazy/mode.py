"""The torch function mode under which a fused module's forward runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from opgraph.torch.lazy.doors import watched_doors
from opgraph.torch.lazy.hooks import saved_tensor_hooks
from opgraph.torch.lazy.observer import Observer
from opgraph.torch.lazy.session import LazySession

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
    session = _session()
    usable = session is not None and not session.suspended and session.hooks == saved_tensor_hooks()
    return session if usable else None


def run_lazily(call: Callable[[], Any], observer: Observer | None = None, rounding: str = "store") -> Any:
    """What `call()` returns; pointwise arithmetic waits meanwhile, and nothing waits any more at the end."""
    outer = _session()
    session = LazySession(observer, rounding, outer)
    _thread.session = session
    try:
        with watched_doors(_session), _Mode(session):
            result = call()
    finally:
        _thread.session = outer
    session.compute_all()
    return result


@contextlib.contextmanager
def unseen(session: LazySession) -> Iterator[None]:
    """Nothing waits, and torch sees no mode of the session's: what asks for either is answered as in eager."""
    top: Any = torch.overrides._get_current_function_mode()  # type: ignore[no-untyped-call]
    own = isinstance(top, _Mode)
    with session.nothing_waits(), torch.overrides._pop_mode_temporarily() if own else contextlib.nullcontext():
        yield


def _session() -> LazySession | None:
    return getattr(_thread, "session", None)


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
