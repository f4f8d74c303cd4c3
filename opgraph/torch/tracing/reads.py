"""What a function reads besides its arguments: globals, closure cells and attributes, found in its code.

A function whose every such read is known does not have to run again to know what it does: comparing what it read is
enough. The finding is an over-approximation: of every object in reach, each attribute that any of the code names counts
as read. Where anything is not understood, the function is run again at each call; nothing depends on this module but
time.
"""

from __future__ import annotations

import builtins
import dis
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from opgraph.torch.tracing import trusted
from opgraph.torch.tracing.proxy import Proxy
from opgraph.torch.tracing.trusted import BUILTINS, PRIMITIVES, is_constant, is_trusted


class NotKnown(Exception):  # noqa: N818 - no error: the function is run again at each call
    """Something that the function reads is not understood; the text says what."""


class OddArgument(NotKnown):
    """An argument of this call has no plan; other calls may have one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is found, as a Python expression: `text` over names bound to `roots`."""

    text: str
    roots: tuple[tuple[str, Any], ...]

    def then(self, suffix: str) -> Place:
        """The same place, one step on."""
        return Place(self.text + suffix, self.roots)


@dataclass(slots=True)
class Reads:
    """What a function reads.

    Attributes:
        tensors: real tensors, with their places.
        values: everything else that must stay the very same object (or an equal number): place and value.
        copies: lists and dicts of numbers and words: place and a copy to compare with.
        conditions: Python expressions that must stay true.
    """

    tensors: list[tuple[Place, torch.Tensor]] = field(default_factory=list)
    values: list[tuple[Place, Any]] = field(default_factory=list)
    copies: list[tuple[Place, Any]] = field(default_factory=list)
    conditions: list[Place] = field(default_factory=list)


def reads_of(fn: Callable[..., Any], arguments: dict[str, Any]) -> Reads:
    """What a call of a function reads besides the values of its tensor and number arguments.

    Args:
        arguments: those that are neither tensors nor numbers nor words (a module as `self` ...), by the expression
            that they are found by.

    Raises:
        NotKnown: it cannot be told.
    """
    names: frozenset[str] = frozenset()
    while True:  # what is reached adds names, and names what is reached
        walk = _Walk(names)
        walk.function(fn, Place("fn", (("fn", fn),)))
        for text, value in arguments.items():
            walk.value(value, Place(text, ()))
        if walk.names == names:
            return walk.reads
        names = frozenset(walk.names)


class _Walk:
    def __init__(self, names: frozenset[str]) -> None:
        self.given = names
        self.names: set[str] = set(names)
        self.reads = Reads()
        self._seen: set[tuple[int, str]] = set()
        self._codes: set[CodeType] = set()
        self._count = 0

    def _root(self, value: Any) -> Place:
        self._count += 1
        name = f"root_{self._count}"
        return Place(name, ((name, value),))

    def function(self, fn: Any, place: Place) -> None:
        """A Python function: its code, the globals and cells that it names, its defaults."""
        fn = getattr(fn, "__wrapped__", fn)
        if isinstance(fn, MethodType):
            self.value(fn.__self__, self._root(fn.__self__))
            fn = fn.__func__
        if not isinstance(fn, FunctionType):
            raise NotKnown(f"{fn!r} is no Python function")
        if fn.__code__ in self._codes:
            return
        self._codes.add(fn.__code__)
        own = self._root(fn)
        self.reads.values.append((own.then(".__code__"), fn.__code__))
        for default in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            if not (isinstance(default, PRIMITIVES) or is_constant(default)):
                raise NotKnown(f"{fn.__qualname__} has a default that may change")
        self.reads.values.append((own.then(".__defaults__"), fn.__defaults__))
        module_globals = self._root(fn.__globals__)
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        for code in _codes_in(fn.__code__):
            free = set(cells) & set(code.co_freevars)
            for instruction in dis.get_instructions(code):
                op, name = instruction.opname, instruction.argval
                if op in trusted.FORBIDDEN or (op == "STORE_DEREF" and name in free):
                    raise NotKnown(f"{fn.__qualname__}: {op} {name}")
                if op == "LOAD_GLOBAL":
                    self._global(fn, module_globals, name)
                elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in free:
                    self._cell(cells[name])
                elif op in ("LOAD_ATTR", "LOAD_METHOD"):
                    if name in trusted.STATE:
                        raise NotKnown(f"{fn.__qualname__} uses {name}")
                    self.names.add(name)

    def _global(self, fn: FunctionType, module_globals: Place, name: str) -> None:
        if name in fn.__globals__:
            self.value(fn.__globals__[name], module_globals.then(f"[{name!r}]"))
        elif getattr(builtins, name, None) not in BUILTINS:
            raise NotKnown(f"{fn.__qualname__} uses {name}")
        else:
            self.reads.conditions.append(Place(f"{name!r} not in {module_globals.text}", module_globals.roots))

    def _cell(self, cell: Any) -> None:
        try:
            self.value(cell.cell_contents, self._root(cell).then(".cell_contents"))
        except ValueError:
            raise NotKnown("an empty closure cell") from None

    def value(self, value: Any, place: Place) -> None:
        """Something that is read, at its place."""
        if (id(value), place.text) in self._seen:
            return
        self._seen.add((id(value), place.text))
        if type(value) is Proxy:
            raise NotKnown("a traced value in a variable outside the function")
        if isinstance(value, torch.Tensor):
            self.reads.tensors.append((place, value))
        elif isinstance(value, (*PRIMITIVES, enum.Enum)) or is_constant(value):
            self.reads.values.append((place, value))
        elif isinstance(value, (list, dict)):
            entries = value.values() if isinstance(value, dict) else value
            if not all(isinstance(v, PRIMITIVES) for v in entries):
                raise NotKnown(f"a {type(value).__name__} of objects")
            self.reads.copies.append((place, value.copy()))
        elif is_trusted(value):
            self.reads.values.append((place, value))
        elif isinstance(value, (FunctionType, MethodType)):
            self.reads.values.append((place, value))
            self.function(value, place)
        elif isinstance(value, (type, BuiltinFunctionType)) or (callable(value) and not _has_attributes(value)):
            raise NotKnown(f"it uses {value!r}")
        else:
            self._object(value, place)

    def _object(self, value: Any, place: Place) -> None:
        if not _has_attributes(value):
            raise NotKnown(f"a {type(value).__name__}")
        if not isinstance(value, ModuleType):
            self.reads.values.append((Place(f"type({place.text})", place.roots), type(value)))
            self._operators(value, place)
        is_layer = isinstance(value, torch.nn.Module)
        if is_layer:
            self._layer(value, place)
        elif callable(value) or "__getattr__" in dir(type(value)):
            raise NotKnown(f"a {type(value).__name__}, which computes its attributes")
        for name in sorted(self.given):
            self._attribute(value, name, place, is_layer)

    def _operators(self, value: Any, place: Place) -> None:
        """The methods that Python calls by no name: what they read counts as read, whether or not they are called."""
        for cls in type(value).__mro__:
            if cls in trusted.PLAIN_CLASSES:
                continue
            for name, found in cls.__dict__.items():
                if name.startswith("__") and name not in trusted.HARMLESS and isinstance(found, FunctionType):
                    self._class_attribute(value, cls, name, place)

    def _attribute(self, value: Any, name: str, place: Place, is_layer: bool) -> None:
        tables = [("__dict__", value.__dict__)]
        if is_layer:
            tables += [(t, value.__dict__[t]) for t in ("_parameters", "_buffers", "_modules")]
        for cls in () if isinstance(value, ModuleType) else type(value).__mro__:
            if name in cls.__dict__ and cls is not object:
                if cls is not torch.nn.Module:  # whose methods have the names of tensors' methods
                    self._class_attribute(value, cls, name, place)
                return
        for table, entries in tables:
            if name in entries:
                self.value(entries[name], place.then(f".{table}[{name!r}]"))
                return

    def _class_attribute(self, value: Any, cls: type, name: str, place: Place) -> None:
        found = cls.__dict__[name]
        where = self._root(cls).then(f".__dict__[{name!r}]")
        if isinstance(found, FunctionType):
            self.reads.values.append((where, found))
            self.function(found, where)
        elif isinstance(found, PRIMITIVES) and name not in value.__dict__:
            self.reads.values.append((where, found))
            self.reads.conditions.append(Place(f"{name!r} not in {place.text}.__dict__", place.roots))
        else:
            raise NotKnown(f"{cls.__name__}.{name}")

    def _layer(self, value: torch.nn.Module, place: Place) -> None:
        """A module that may be called: its forward, and that it has no hooks."""
        forward = type(value).forward
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if (
            any(getattr(value, name) for name in hooks)
            or any(trusted.GLOBAL_HOOKS.values())
            or "forward" in value.__dict__
        ):
            raise NotKnown(f"{type(value).__name__} has hooks")
        none = [f"not {place.text}.{name}" for name in hooks] + [f"not {name}" for name in trusted.GLOBAL_HOOKS]
        text = " and ".join([*none, f"'forward' not in {place.text}.__dict__"])
        self.reads.conditions.append(Place(text, (*place.roots, *trusted.GLOBAL_HOOKS.items())))
        self.function(forward, place)
        if isinstance(value, torch.nn.Sequential):  # goes through its modules by no name
            self.reads.copies.append((Place(f"list({place.text}._modules)", place.roots), list(value._modules)))
            for name, module in value._modules.items():
                self.value(module, place.then(f"._modules[{name!r}]"))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    waiting = [code]
    while waiting:
        current = waiting.pop()
        yield current
        waiting += [c for c in current.co_consts if isinstance(c, CodeType)]


def _has_attributes(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) and not hasattr(type(value), "__slots__")
