"""Where torch takes tensors without calling a torch function, so that no mode is told: their values are computed first.

There are two such places.
- Custom autograd functions (`opgraph.torch.apply`): autograd would connect the Lazy, not what it becomes. Which tensors
  are taken is not told, so nothing waits any more; inside of the function nothing does either, for autograd also
  connects what it returns.
- `torch.utils.checkpoint`, which puts arguments away for the recomputation: entered through a Python function that
  everybody looks up when it is called. While sessions run, that one is replaced; for threads without a session it does
  the same as ever.
Compiled extensions that are called in any other way get an error from `Lazy.__torch_dispatch__`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from opgraph.torch.apply import followed_functions
from opgraph.torch.lazy.session import LazySession
from opgraph.torch.lazy.value import compute

_Frame: Any = torch.utils.checkpoint._CheckpointFrame
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
            _Frame.save_inputs = _computing(_Frame.save_inputs)
    try:
        with followed_functions(_follower(current)):
            yield
    finally:
        with _lock:
            _sessions -= 1
            if _sessions == 0:
                _Frame.save_inputs = _Frame.save_inputs.__wrapped__


def _computing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_inputs(self: Any, *args: Any) -> Any:
        compute(args, None)
        return original(self, *args)

    return save_inputs


@functools.cache
def _follower(current: Callable[[], LazySession | None]) -> Callable[[], _Door | None]:
    def follower() -> _Door | None:
        session = current()
        return None if session is None or session.computing else _Door(session)

    return follower


class _Door:
    """Custom autograd functions of one session."""

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
