"""Which module of a model a captured graph runs for.

Dynamo names a module by how the code of a frame reaches it: `L['self'].layers.0`. After a graph break that frame may
belong to any module of the model, and instances of one class share what was compiled of their code. While the graph
runs its frame is on the stack, and has the instance.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

#: A local variable, and the way from it to a module.
_SOURCE = re.compile(r"L\['(?P<root>\w+)'\](?P<way>.*)")
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<key>'[^']*'|-?\d+)\]")


@dataclass(frozen=True, slots=True)
class Place:
    """A call of a module: its qualified name ("" for the whole), its class, and the how-manieth call it is."""

    module: str
    module_class: str
    call: int


class Modules:
    """The modules of a model, by the frames in which they run.

    Args:
        model: a module, or a function, of whose modules nothing is known.
    """

    def __init__(self, model: object) -> None:
        named = model.named_modules() if isinstance(model, nn.Module) else ()
        self._names = {id(module): name for name, module in named}

    def running(self) -> Place | None:
        """The innermost module of the model that a method runs of."""
        return self._place(_local("self", "", self._names))

    def places(self, sources: Iterable[str]) -> dict[str, Place]:
        """Of the graph that runs now: its modules by the names that Dynamo gave them, as far as they are found."""
        found = {}
        for source in sources:
            parts = _SOURCE.fullmatch(source)
            place = None if parts is None else self._place(_local(parts["root"], parts["way"], self._names))
            if place is not None:
                found[source] = place
        return found

    def _place(self, module: Any) -> Place | None:
        return None if module is None else Place(self._names[id(module)], type(module).__name__, 1)


def _local(name: str, way: str, known: Mapping[int, str]) -> Any:
    """The known module that a local variable of a running function leads to, the innermost first; None without one."""
    for value in _locals(name):
        found = _followed(value, way)
        if id(found) in known:
            return found
    return None


def _locals(name: str) -> Iterator[Any]:
    """What a local variable of this name is in the functions that run now, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars:
            found = frame.f_locals
            value = found.get(name)
            # Up to Python 3.12 a frame holds on to this copy of its variables, and with it to their tensors. The
            # counted references are the frame's, this function's and the argument of the call.
            if type(found) is dict and sys.getrefcount(found) <= 3:
                found.clear()
            yield value
        frame = frame.f_back


def _followed(value: Any, way: str) -> Any:
    """What attributes and keys lead to; None where they lead nowhere. Runs no code of the value's class."""
    for step in _STEP.finditer(way):
        name = step["name"]
        if name is not None:
            modules = value._modules if isinstance(value, nn.Module) else {}
            value = modules.get(name, getattr(value, "__dict__", {}).get(name))
        else:
            key = ast.literal_eval(step["key"])
            if isinstance(value, nn.Module):
                value = value._modules.get(str(key))
            elif isinstance(value, dict):
                value = value.get(key)
            else:
                value = value[key] if type(value) in (list, tuple) and -len(value) <= key < len(value) else None
    return value
