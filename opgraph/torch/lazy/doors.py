"""Where torch takes tensors without calling a torch function, so that no mode is told: their values are computed first.

- Custom autograd functions (`opgraph.torch.apply`): autograd would connect the Lazy, not what it becomes. Which tensors
  are taken is not told, so nothing waits any more; inside of the function nothing does either, for autograd also
  connects what it returns.
- `torch.utils.checkpoint`, which puts arguments away for the recomputation, and TorchScript.
- Transforms of `torch.func` (grad, vmap, jvp): what they take, and what their function reads from outside, goes into
  wrappers that no mode sees. `torch.utils.swap_tensors` changes what others read. Nothing waits any more then.

All but the first are entered through functions that everybody looks up when they are called. While sessions run, these
are replaced; for threads without a session they do the same as ever. Compiled extensions that are called in any other
way get an error from `Lazy.__torch_dispatch__`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.utils.checkpoint

from opgraph.torch.apply import followed_functions
from opgraph.torch.lazy.session import LazySession
from opgraph.torch.lazy.value import compute

#: Functions that take what their arguments tell, and such that may take anything: (owner, name).
_TAKE_ARGUMENTS: tuple[tuple[Any, str], ...] = (
    # torch 2.11 puts arguments away by a custom autograd function instead.
    *(((frame, "save_inputs"),) if hasattr(frame := torch.utils.checkpoint._CheckpointFrame, "save_inputs") else ()),
    (torch._C.ScriptFunction, "__call__"),
    (torch._C.ScriptMethod, "__call__"),
)
_TAKE_ANYTHING: tuple[tuple[Any, str], ...] = (
    (torch.utils, "swap_tensors"),
    (torch._functorch.vmap, "_vmap_increment_nesting"),
    (torch._functorch.eager_transforms, "_grad_increment_nesting"),
    (torch._functorch.eager_transforms, "_jvp_increment_nesting"),
)
_lock = threading.Lock()
_sessions = 0


@contextlib.contextmanager
def watched_doors(current: Callable[[], LazySession | None]) -> Iterator[None]:
    """While this lasts, tensors that pass through the doors are computed.

    Args:
        current: gives the session of the calling thread; the same function every time.
    """
    global _sessions
    with _lock:
        _sessions += 1
        if _sessions == 1:
            for owner, name in _TAKE_ARGUMENTS:
                setattr(owner, name, _computing(vars(owner)[name]))
            for owner, name in _TAKE_ANYTHING:
                setattr(owner, name, _computing_all(vars(owner)[name], _follower(current)))
    try:
        with followed_functions(_follower(current)):
            yield
    finally:
        with _lock:
            _sessions -= 1
            if _sessions == 0:
                for owner, name in (*_TAKE_ARGUMENTS, *_TAKE_ANYTHING):
                    setattr(owner, name, vars(owner)[name].__wrapped__)


def _computing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def take(*args: Any, **kwargs: Any) -> Any:
        compute(args, kwargs)
        return original(*args, **kwargs)

    return take


def _computing_all(original: Callable[..., Any], follower: Callable[[], _Door | None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def begin(*args: Any) -> Any:
        door = follower()
        if door is not None:
            door.before()
        return original(*args)

    return begin


@functools.cache
def _follower(current: Callable[[], LazySession | None]) -> Callable[[], _Door | None]:
    def follower() -> _Door | None:
        session = current()
        return None if session is None or session.computing else _Door(session)

    return follower


class _Door:
    """Custom autograd functions and transforms of one session."""

    def __init__(self, session: LazySession) -> None:
        self._session = session

    def before(self) -> None:
        session: LazySession | None = self._session
        while session is not None:  # what it takes may wait in any of them
            session.compute_all()
            session = session.outer

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self._session.suspended += 1
        try:
            yield
        finally:
            self._session.suspended -= 1
