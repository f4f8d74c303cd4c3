"""How a fused model enters Dynamo: torch.compile of a function, with guards and errors of opgraph's own; its breaks.

Texts for logs that nobody reads are left out: Dynamo tokenizes each source file of a model to name the functions that
it traces, and AOTAutograd prints its graphs, whether or not a log is on. In a first step of a Llama of four layers this
takes 0.2 s.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from opgraph.errors import OpGraphError
from opgraph.ir.pause_gc import no_collector
from opgraph.torch.graph.torch_internals import (
    compile_lock,
    graph_break_reasons,
    has_code,
    log_writers,
    optimized,
    reached_limit,
    run_frame,
    with_all_guards,
)


class CompiledMeanwhileError(Exception):
    """Another thread has compiled the function since this call looked for what it could run: the call begins again."""


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

    Raises, when it is called:
        CompiledMeanwhileError: it is to be called again.
    """
    written: Any = call if isinstance(call, FunctionType) else lambda *args, **kwargs: call(*args, **kwargs)
    code = written.__code__.replace(co_filename=f"{__file__}#{next(_numbers)}")
    function = FunctionType(code, written.__globals__, "forward", written.__defaults__, written.__closure__)
    with no_collector():  # torch imports its compilers here, 400 modules
        return optimized(function, backend, lambda callback: _with_all_guards(callback, code, failed, limited))


_numbers = itertools.count()


def _with_all_guards(
    callback: Callable[..., Any],
    code: CodeType,
    failed: Callable[[BaseException], bool],
    limited: Callable[[str], None],
) -> Callable[..., Any]:
    """What Dynamo calls for a frame that it has no code for, with the guards that it would leave out.

    Threads that call the function for the first time, or with sizes that are new to it, all come here. One compiles and
    the others begin again; Dynamo would compile for each of them, up to its limit.

    Args:
        code: of the function. Frames of other functions, in which something may have run, do not begin again.
    """
    times = 0

    @functools.wraps(callback)  # with the attributes by which Dynamo finds the backend
    def compile(*args: Any, **kwargs: Any) -> Any:
        nonlocal times
        is_own, before = args[0].f_code is code, times
        with compile_lock():
            if is_own and times != before:
                raise CompiledMeanwhileError
            try:
                with no_collector(), with_all_guards(), _without_unread_logs():
                    found = callback(*args, **kwargs)
            except Exception as error:  # guards that Dynamo cannot write end in an AssertionError, for example
                if isinstance(error, OpGraphError):
                    raise
                result = run_frame(error)
                if result is None or not failed(error):
                    raise
                return result
            times += is_own and has_code(found)
        limit = reached_limit(found)
        if limit:
            limited(f"{_name(args[0].f_code)} {limit}")
        return found

    return compile


_leaves_out: ContextVar[bool] = ContextVar("leaves_out", default=False)


@contextmanager
def _without_unread_logs() -> Iterator[None]:
    """Within, texts for logs that are off are not written; other backends in other threads write theirs."""
    _wrap_log_writers()
    token = _leaves_out.set(True)
    try:
        yield
    finally:
        _leaves_out.reset(token)


@functools.cache
def _wrap_log_writers() -> None:
    for module, name, instead, logs in log_writers():
        setattr(module, name, _where_read(getattr(module, name), instead, logs))


def _where_read(write: Callable[..., Any], instead: Any, logs: Sequence[logging.Logger]) -> Callable[..., Any]:
    """A function that writes for logs; it returns `instead` where none of them has a reader."""
    structured = logging.getLogger("torch.__trace")  # torch's trace for tools, which has a handler where it is on

    @functools.wraps(write)
    def writes(*args: Any, **kwargs: Any) -> Any:
        is_unread = not structured.handlers and not any(log.isEnabledFor(logging.INFO) for log in logs)
        return instead if _leaves_out.get() and is_unread else write(*args, **kwargs)

    return writes


def _name(code: CodeType) -> str:
    """A function and its place: that of what torch.compile captures is the forward of a model."""
    own = code.co_filename.startswith(__file__)
    return "its forward was" if own else f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) was"


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line where Dynamo ended a graph: what stands on both sides of it cannot fuse.

    Attributes:
        line: `file:line` and its code.
        reason: Dynamo's.
        hints: what Dynamo advises for this kind of line.
    """

    line: str
    reason: str
    hints: tuple[str, ...] = ()

    def __str__(self) -> str:
        hints = (f"\n    hint: {hint}" for hint in self.hints)
        return f"  {self.line}\n    {self.reason}{''.join(hints)}"


@contextmanager
def graph_breaks() -> Iterator[list[GraphBreak]]:
    """While this lasts, Dynamo notes its graph breaks: afterwards the list has each line once."""
    reasons = graph_break_reasons()
    before = len(reasons)
    found: list[GraphBreak] = []
    try:
        yield found
    finally:
        by_line: dict[str, GraphBreak] = {}
        for reason in reasons[before:]:
            if reason.user_stack and getattr(reason, "graph_break", True):
                frame = reason.user_stack[-1]
                where, text = f"{frame.filename}:{frame.lineno}: {frame.line}", str(reason.reason)
                if text.startswith(_JUMP):  # of a branch Dynamo notes this as well, or alone
                    by_line.setdefault(where, GraphBreak(where, *_BRANCH))
                else:
                    by_line[where] = GraphBreak(where, text.splitlines()[0], tuple(_hints(text)))
        found += by_line.values()


#: The instruction that a branch on the value of a tensor ends at, and Dynamo's words for it elsewhere.
_JUMP, _BRANCH = "generic_jump", ("Data-dependent branching", ("Use `torch.cond` to express dynamic control flow.",))
#: How hints begin that Dynamo gives for many kinds of lines alike.
_GENERAL_HINTS = ("This graph break", "This is likely", "It may be possible", "Please report", "Your code may")


def _hints(text: str) -> Iterator[str]:
    for line in text.splitlines():
        found, _, hint = line.partition("  Hint: ")
        if not found and hint and not hint.startswith(_GENERAL_HINTS):
            yield hint
