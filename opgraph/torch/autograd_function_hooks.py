"""Shows calls of custom autograd functions as frames of the Python stack, under any name of their `apply`.

`apply` is written in Python or, from torch 2.14 on, in C. Both look up in the function's class what they call next:
`setup_context` before they take the arguments, then `forward`. Inside `functions_on_stack`, that lookup returns a
wrapper, whose frame has the class and its arguments.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd import Function
from torch.autograd.function import FunctionMeta

_lock = threading.Lock()
#: The nesting depth of `functions_on_stack` in each thread, by the thread's number.
_threads: Counter[int] = Counter()
_NO_CONTEXT = Function.setup_context


@contextlib.contextmanager
def functions_on_stack() -> Iterator[None]:
    """Inside this context, each autograd function that this thread runs has its own frame, with the code `RUN`."""
    thread = threading.get_ident()
    with _lock:
        _threads[thread] += 1
        FunctionMeta.__getattribute__ = _looked_up  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _lock:
            _threads[thread] -= 1
            if not _threads[thread]:
                del _threads[thread]
            if not _threads:
                del FunctionMeta.__getattribute__


def _looked_up(function: FunctionMeta, name: str) -> Any:
    part = type.__getattribute__(function, name)
    if name not in ("setup_context", "forward") or threading.get_ident() not in _threads:
        return part
    if part is _NO_CONTEXT:  # torch compares it with this one
        return part

    @functools.wraps(part)  # torch reads its signature
    def run(*args: Any, **kwargs: Any) -> Any:
        given = args
        if name == "setup_context":
            given = args[1]
        elif type.__getattribute__(function, "setup_context") is _NO_CONTEXT:
            given = args[1:]
        return _run(function, given, functools.partial(part, *args, **kwargs))

    return run


def _run(function: type, given: tuple[Any, ...], part: Callable[[], Any]) -> Any:
    """Runs a part of a function; its frame has the function's class, and the arguments of its `apply`."""
    return part()


#: The code of the frames in which parts of functions run; their locals include `function`, and the arguments `given` to
#: its `apply`.
RUN = _run.__code__
