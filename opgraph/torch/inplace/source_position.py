"""The position of a running op in the user's source: the frames that lead to it, and the expression of each."""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch

from opgraph.torch.tracing.trace_errors import LIBRARY

#: First and last line and column, as code objects give them; columns count bytes.
Span = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """One frame of a stack and the expression that it was at."""

    frame: FrameType
    span: Span

    @property
    def file(self) -> str:
        """The file's path, as in Python's code object."""
        return self.frame.f_code.co_filename

    @property
    def line(self) -> int:
        """The line where the expression starts."""
        return self.span[0]

    @property
    def code(self) -> str:
        """The text of that line; empty where there is no source."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.file}:{self.line}"


def user_stack(until: str) -> list[Position]:
    """The frames outside torch and opgraph that lead here, innermost first, up to the first one of the file `until`."""
    frame: FrameType | None = sys._getframe(1)
    result = []
    while frame is not None and frame.f_code.co_filename != until:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            result.append(Position(frame, _span(frame.f_code, frame.f_lasti)))
        frame = frame.f_back
    return result


def raised_at(error: BaseException) -> Position | None:
    """The innermost frame outside torch and opgraph that an exception passed; None if there is none."""
    found = None
    passed = error.__traceback__
    while passed is not None:
        code = passed.tb_frame.f_code
        if not code.co_filename.startswith(LIBRARY):
            found = Position(passed.tb_frame, _span(code, passed.tb_lasti))
        passed = passed.tb_next
    return found


def head_of(function: object) -> tuple[str, str]:
    """The line of a function's `def`, as `file:line` and its text; ("", "") for an object without code."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return "", ""
    line = code.co_firstlineno
    while linecache.getline(code.co_filename, line).lstrip().startswith("@"):  # decorators come first
        line += 1
    return f"{code.co_filename}:{line}", linecache.getline(code.co_filename, line).strip()


def frames_of(code: CodeType) -> Iterator[FrameType]:
    """The frames on this thread's stack that run some code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back


def _span(code: CodeType, lasti: int) -> Span:
    found = next(itertools.islice(code.co_positions(), max(lasti, 0) // 2, None), (None, None, None, None))
    line, end, column, end_column = found
    first = line or code.co_firstlineno
    return (first, end or first, -1 if column is None else column, 1 << 20 if end_column is None else end_column)


def inside(inner: Span, outer: Span) -> bool:
    """True if one span lies in another, or is the same."""
    return (outer[0], outer[2]) <= (inner[0], inner[2]) and (inner[1], inner[3]) <= (outer[1], outer[3])


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another operand of an expression.

    Attributes:
        whole: the span of the expression.
        span: the span of the operand.
        later: True if the operand is evaluated after its sibling.
    """

    whole: Span
    span: Span
    later: bool


@lru_cache(maxsize=64)
def _parents(file: str, text: str) -> dict[ast.AST, ast.AST]:
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a notebook's magics, a template
        return {}
    return {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}


def node_at(position: Position) -> tuple[ast.AST | None, dict[ast.AST, ast.AST]]:
    """The smallest node of the source that contains the position, and every node's parent."""
    parents = _parents(position.file, "".join(linecache.getlines(position.file, position.frame.f_globals)))
    best: ast.expr | ast.stmt | None = None
    for node in parents:
        if not isinstance(node, (ast.expr, ast.stmt)) or not inside(position.span, span_of(node)):
            continue
        if best is None or inside(span_of(node), span_of(best)):
            best = node
    return best, parents


def span_of(node: ast.expr | ast.stmt) -> Span:
    """The span of a node of the source."""
    end = node.end_lineno if node.end_lineno is not None else node.lineno
    return (node.lineno, end, node.col_offset, node.end_col_offset or 1 << 20)


def siblings(position: Position, is_value: Callable[[Any], bool]) -> list[Sibling]:
    """The other operands, of the expressions around a position, in which a certain value is read by name.

    A tuple or list that is a statement's whole value is no such expression: its elements are not combined.

    Args:
        is_value: returns True if the object behind a name is that value.
    """
    node, parents = node_at(position)
    result: list[Sibling] = []
    beside: list[tuple[ast.expr | ast.keyword, bool]] = []
    while node is not None and not isinstance(node, (ast.stmt, ast.Lambda)):
        parent = parents.get(node)
        if parent is None or (isinstance(parent, ast.stmt) and not isinstance(parent, ast.AugAssign)):
            break
        own = span_of(node) if isinstance(node, ast.expr) else None
        for other in ast.iter_child_nodes(parent):
            if other is node or not isinstance(other, (ast.expr, ast.keyword)):
                continue
            later = own is not None and (other.lineno, other.col_offset) > (own[0], own[2])
            beside.append((other, later))
        if isinstance(parent, (ast.BinOp, ast.Call, ast.Compare, ast.AugAssign)):
            found = [(c, later) for c, later in beside if _reads(c, position.frame, is_value)]
            result += [Sibling(span_of(parent), span_of(_expression(c)), later) for c, later in found]
            beside = []
        node = parent
    return result


def _expression(node: ast.expr | ast.keyword) -> ast.expr:
    return node.value if isinstance(node, ast.keyword) else node


def _reads(node: ast.AST, frame: FrameType, is_value: Callable[[Any], bool]) -> bool:
    return any(is_value(value_of(n, frame)) for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute)))


def value_of(node: ast.AST, frame: FrameType) -> Any:
    """The value of a name, or of a plain attribute of one, in a frame; no property or `__getattr__` is run."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = value_of(node.value, frame)
        return getattr(owner, "__dict__", {}).get(node.attr) if not isinstance(owner, torch.Tensor) else None
    return None


def operand_names(position: Position) -> list[str]:
    """The operands of the expression at a position that are bare names."""
    node, _ = node_at(position)
    if isinstance(node, ast.BinOp):
        parts: list[ast.expr] = [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        parts = [node.target, node.value]
    elif isinstance(node, ast.Call):
        parts = [*node.args, *(k.value for k in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            parts.insert(0, node.func.value)
    else:
        parts = []
    return [p.id for p in parts if isinstance(p, ast.Name)]


def assigned_names(position: Position) -> set[str]:
    """The names that the statement at a position binds to the value of the expression there."""
    node, parents = node_at(position)
    statement = parents.get(node) if node is not None else None
    if isinstance(statement, ast.Assign) and statement.value is node:
        return {t.id for t in statement.targets if isinstance(t, ast.Name)}
    return set()
