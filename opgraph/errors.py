"""The errors of opgraph: one base class, one subclass per oneDNN status.

Every error has three lines (the problem, its place, the fix)::

    shapes (2,) and (3,) do not broadcast
      where: Add "residual" (inputs: x f32[2], skip f32[3])
      fix:   insert a Reshape, or make each axis equal or 1
"""

# ruff: noqa: N818 - the names are those of oneDNN's statuses
from __future__ import annotations

import re

#: Characters that end a line, control a terminal, change text direction or cannot be printed. Names come from files.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class OpGraphError(Exception):
    """Base class of all errors of opgraph.

    Args:
        what: the problem, in one sentence.
        where: the op, tensor, file or argument concerned.
        fix: how the user can solve it.

    Each subclass also derives from the built-in exception that fits, so that ``except ValueError`` works.
    """

    def __init__(self, what: str, *, where: str, fix: str) -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        return f"{self._first()}\n  where: {_plain(self.where)}\n  fix:   {_plain(self.fix)}"

    def _first(self) -> str:
        return _plain(self.what)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _plain(text: str) -> str:
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def _rebuild(cls: type[OpGraphError], what: str, where: str, fix: str) -> OpGraphError:
    return cls(what, where=where, fix=fix)


class InvalidGraph(OpGraphError, ValueError):
    """The graph as a whole is invalid (cycle, two producers), or is used at the wrong point of its life cycle."""


class InvalidGraphOp(OpGraphError, ValueError):
    """An op does not fit its schema: unknown kind, arity, missing, unknown or ill-typed attribute."""


class InvalidShape(OpGraphError, ValueError):
    """Shapes do not broadcast, or a given shape disagrees with the inferred one."""


class InvalidDataType(OpGraphError, TypeError):
    """A dtype is unknown, or the op does not take it."""


class InvalidArguments(OpGraphError, ValueError):
    """A call got the wrong arguments: a missing tensor, an array of the wrong kind, an unknown id."""


class Unimplemented(OpGraphError, NotImplementedError):
    """The request is well-formed, but opgraph does not support it (yet); the message names the exact feature."""


class ModelError(OpGraphError, ValueError):
    """A file that cannot be read, or must not be trusted."""


class DeviceError(OpGraphError, RuntimeError):
    """No such device, no compiler, or a kernel that did not compile (the compiler's log follows the first line)."""

    def _first(self) -> str:
        return "\n".join(_plain(line) for line in self.what.split("\n"))
