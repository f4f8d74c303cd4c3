"""Texts that torch's compilers write for logs, left out while nobody reads these logs.

Dynamo tokenizes each source file of a model to name the functions that it traces, and AOTAutograd prints the joint, the
forward and the backward graph, whether or not a log is on. In a first step of a Llama of four layers this takes 0.2 s.
A torch that lacks one of these private functions writes its texts as before.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_leaves_out: ContextVar[bool] = ContextVar("leaves_out", default=False)


@contextmanager
def without_unread_logs() -> Iterator[None]:
    """Within, texts for logs that are off are not written; other backends in other threads write theirs."""
    _wrap_writers()
    token = _leaves_out.set(True)
    try:
        yield
    finally:
        _leaves_out.reset(token)


@functools.cache
def _wrap_writers() -> None:
    from torch._dynamo import output_graph, symbolic_convert
    from torch._functorch._aot_autograd import graph_compile

    calls = [getattr(m, "trace_call_log", None) for m in (output_graph, symbolic_convert)]
    _wrap(symbolic_convert, "get_funcname", None, (*calls, getattr(symbolic_convert, "trace_source_log", None)))
    _wrap(graph_compile, "_log_joint_graph", None, (getattr(graph_compile, "aot_joint_log", None),))
    _wrap(graph_compile, "_log_fw_bw_graphs", (None, None), (getattr(graph_compile, "aot_graphs_log", None),))


def _wrap(module: Any, name: str, instead: Any, logs: Sequence[logging.Logger | None]) -> None:
    """Puts a function in the place of a module's that returns `instead` where no log has a reader.

    Args:
        logs: for which the function writes; None where torch does not have that log: the function stays.
    """
    write: Callable[..., Any] | None = getattr(module, name, None)
    known = [log for log in logs if log is not None]
    if write is None or len(known) < len(logs):
        return
    structured = logging.getLogger("torch.__trace")  # torch's trace for tools, which has a handler where it is on

    @functools.wraps(write)
    def writes(*args: Any, **kwargs: Any) -> Any:
        is_unread = not structured.handlers and not any(log.isEnabledFor(logging.INFO) for log in known)
        return instead if _leaves_out.get() and is_unread else write(*args, **kwargs)

    setattr(module, name, writes)
