"""How a fused model enters Dynamo: torch.compile of a function, with guards and errors of opgraph's own; its breaks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from opgraph.ir.collector import no_collector
from opgraph.torch.graph.torch_internals import (
    capture_errors,
    graph_break_reasons,
    optimized,
    reached_limit,
    run_frame,
    with_all_guards,
)
from opgraph.torch.graph.unread_logs import without_unread_logs


def compiled(
    call: Callable[..., Any],
    backend: Callable[..., Any],
    failed: Callable[[BaseException], bool] = lambda error: False,
    limited: Callable[[str], None] = lambda what: None,
) -> Callable[..., Any]:
    """torch.compile of a function, apart from whatever else was compiled of the same source.

    Dynamo keeps what it compiled, how often, and which sizes differed, by the code object and its place in a file. So
    what runs is a copy of the function's code that has a place of its own. Its guards see hooks that are added
    to a submodule later, parameters that become one, and parameters that are frozen.

    Args:
        call: the function.
        backend: for its graphs.
        failed: called with what Dynamo raises where it cannot capture a frame. True: the frame runs as it was written,
            and no graph that ran before it in the same call runs again; False: the error is raised.
        limited: called with a function's name, its place and what differs, where Dynamo compiles it no more, because
            it has done so `torch._dynamo.config.recompile_limit` times.
    """
    written: Any = call if isinstance(call, FunctionType) else lambda *args, **kwargs: call(*args, **kwargs)
    code = written.__code__.replace(co_filename=f"{__file__}#{next(_numbers)}")
    function = FunctionType(code, written.__globals__, "forward", written.__defaults__, written.__closure__)
    with no_collector():  # torch imports its compilers here, 400 modules
        return optimized(function, backend, lambda callback: _with_all_guards(callback, failed, limited))


_numbers = itertools.count()


def _with_all_guards(
    callback: Callable[..., Any], failed: Callable[[BaseException], bool], limited: Callable[[str], None]
) -> Callable[..., Any]:
    """What Dynamo calls for a frame that it has no code for, with the guards that it would leave out."""

    @functools.wraps(callback)  # with the attributes by which Dynamo finds the backend
    def compile(*args: Any, **kwargs: Any) -> Any:
        try:
            with no_collector(), with_all_guards(), without_unread_logs():
                found = callback(*args, **kwargs)
        except capture_errors() as error:
            result = run_frame(error)
            if result is None or not failed(error):
                raise
            return result
        limit = reached_limit(found)
        if limit:
            limited(f"{_name(args[0].f_code)} {limit}")
        return found

    return compile


def _name(code: CodeType) -> str:
    """A function and its place: that of what torch.compile captures is the forward of a model."""
    own = code.co_filename.startswith(__file__)
    return "its forward was" if own else f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) was"


@contextmanager
def graph_breaks() -> Iterator[list[tuple[str, str]]]:
    """While this lasts, Dynamo notes its graph breaks: afterwards the list has each line once, with the reason."""
    reasons = graph_break_reasons()
    before = len(reasons)
    found: list[tuple[str, str]] = []
    try:
        yield found
    finally:
        for reason in reasons[before:]:
            if reason.user_stack and getattr(reason, "graph_break", True):
                frame = reason.user_stack[-1]
                where = f"{frame.filename}:{frame.lineno}: {frame.line}"
                if where not in (line for line, _ in found):  # Dynamo notes a branch twice, in other words
                    found.append((where, str(reason.reason).splitlines()[0]))
