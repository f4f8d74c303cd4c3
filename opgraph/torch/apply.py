"""Calls of custom autograd functions, seen under whatever name their `apply` was bound.

`apply` is written in Python or, from torch 2.14 on, in C. Either looks up in the function's class what it calls next:
`setup_context` before it takes the arguments, then `forward`. While somebody follows, that lookup tells of both.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.autograd.function import FunctionMeta, _SingleLevelFunction


class Follower(Protocol):
    """Who is told of the functions that a thread calls."""

    def before(self) -> None:
        """A function is about to take its arguments."""

    def inside(self) -> AbstractContextManager[None]:
        """What holds while a part of a function runs."""


#: The follower of the calling thread, if it has one.
Current = Callable[[], Follower | None]

_lock = threading.Lock()
_followers: list[Current] = []
_NO_CONTEXT = _SingleLevelFunction.setup_context


class _Nobody:
    def before(self) -> None:
        pass

    def inside(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def functions_on_stack() -> Iterator[None]:
    """While this lasts, the frames of this thread tell which functions run; see `RUN`."""
    thread, nobody = threading.get_ident(), _Nobody()
    with followed_functions(lambda: nobody if threading.get_ident() == thread else None):
        yield


@contextlib.contextmanager
def followed_functions(current: Current) -> Iterator[None]:
    """While this lasts, the followers that `current` gives are told of calls."""
    with _lock:
        _followers.append(current)
        if len(_followers) == 1:
            FunctionMeta.__getattribute__ = _looked_up  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _lock:
            _followers.remove(current)
            if not _followers:
                del FunctionMeta.__getattribute__


def _looked_up(function: FunctionMeta, name: str) -> Any:
    part = type.__getattribute__(function, name)
    if name not in ("setup_context", "forward"):
        return part
    told = [follower for current in dict.fromkeys(_followers) if (follower := current()) is not None]
    if not told:
        return part
    if name == "setup_context":
        for follower in told:
            follower.before()
        if part is _NO_CONTEXT:  # torch asks whether it is this one
            return part

    @functools.wraps(part)  # torch asks for its signature
    def run(*args: Any, **kwargs: Any) -> Any:
        given = args
        if name == "setup_context":
            given = args[1]
        elif type.__getattribute__(function, "setup_context") is _NO_CONTEXT:
            given = args[1:]
        return _run(function, given, told, functools.partial(part, *args, **kwargs))

    return run


def _run(function: type, given: tuple[Any, ...], told: list[Follower], part: Callable[[], Any]) -> Any:
    """A part of a function. Whoever looks at the frames that lead somewhere finds this one, and what it is given."""
    with contextlib.ExitStack() as stack:
        for follower in told:
            stack.enter_context(follower.inside())
        return part()


#: The code of the frames in which parts of functions run: with `function`, and `given` to its `apply`.
RUN = _run.__code__
