"""Where torch takes tensors without calling a torch function, so that no mode is told: their values are computed first.

There are two such places, both entered through a Python function that everybody looks up when it is called. While
sessions run, those two are replaced; for threads without a session they do the same as ever.
- `autograd.Function.apply`, under whatever name it was bound: autograd would connect the Lazy, not what it becomes.
  Inside of the function nothing waits, for autograd also connects what it returns.
- `torch.utils.checkpoint`, which puts arguments away for the recomputation.
Compiled extensions that are called in any other way get an error from `Lazy.__torch_dispatch__`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from opgraph.torch.lazy.session import LazySession
from opgraph.torch.lazy.value import compute

Current = Callable[[], LazySession | None]


class _Arguments(tuple[Any, ...]):
    """The arguments of a custom autograd function: `apply` holds them as long as it runs."""

    session: LazySession

    def __del__(self) -> None:
        self.session.suspended -= 1


def _function(original: Callable[..., Any], current: Current) -> Callable[..., Any]:
    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> Any:
        session = current()
        if session is None:
            return original(args)
        compute(args, None)
        session.before_writing(args)
        made = _Arguments(original(args))
        made.session = session
        session.suspended += 1
        return made

    return unwrap_dead_wrappers


def _checkpoint(original: Callable[..., Any], current: Current) -> Callable[..., Any]:
    def save_inputs(self: Any, *args: Any) -> Any:
        compute(args, None)
        return original(self, *args)

    return save_inputs


#: Owner, name, and what makes the replacement. An older torch may lack the second, and saves by an autograd function.
_DOORS = (
    (torch._functorch.utils, "unwrap_dead_wrappers", _function),
    (getattr(torch.utils.checkpoint, "_CheckpointFrame", None), "save_inputs", _checkpoint),
)
_lock = threading.Lock()
_originals: list[tuple[Any, str, Any]] = []
_sessions = 0


@contextlib.contextmanager
def watched_doors(current: Current) -> Iterator[None]:
    """While this lasts, tensors that pass through the doors are computed.

    Args:
        current: gives the session of the calling thread.
    """
    global _sessions
    with _lock:
        _sessions += 1
        if _sessions == 1:
            for owner, name, replacement in _DOORS:
                original = getattr(owner, name, None)
                if original is not None:
                    _originals.append((owner, name, original))
                    setattr(owner, name, replacement(original, current))
    try:
        yield
    finally:
        with _lock:
            _sessions -= 1
            if _sessions == 0:
                for owner, name, original in _originals:
                    setattr(owner, name, original)
                _originals.clear()
