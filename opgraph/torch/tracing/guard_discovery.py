"""Finds the reads of a function besides its arguments in its code: globals, closure cells and attributes.

If every such read is known, the function does not have to run again: comparing the values that it read is enough. The
result is an over-approximation: for every Python module and `torch.nn.Module` in reach, each attribute that any of the
code names counts as read. Numbers, strings, tensors, lists and dicts of constants, functions and modules are supported;
with anything else, the function is run again at each call.
"""

from __future__ import annotations

import builtins
import dis
import enum
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from opgraph.torch.tracing import guard_allowlist
from opgraph.torch.tracing.guard_allowlist import BUILTINS, is_constant, is_trusted, reads_state
from opgraph.torch.tracing.proxy import Proxy


class NotKnown(Exception):  # noqa: N818 - no error: the function is run again at each call
    """The function reads something that is not supported; the message names it."""


class OddArgument(NotKnown):
    """An argument of this call has no plan; other calls may have one."""


class Wrapper:
    """A callable that is equivalent to its `__wrapped__` and has no other effect, such as a fused function."""


def written(fn: Any) -> Any:
    """The original function of a fused function; anything else unchanged, with its decorators."""
    return inspect.unwrap(fn, stop=lambda found: not isinstance(found, Wrapper))


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a value, as a Python expression: `text`, with names bound to `roots`."""

    text: str
    roots: tuple[tuple[str, Any], ...]

    def then(self, suffix: str) -> Place:
        """The place that `suffix` reaches from this one."""
        return Place(self.text + suffix, self.roots)


@dataclass(slots=True)
class Reads:
    """The reads of a function.

    Attributes:
        tensors: real tensors, with their places.
        values: everything else that must stay the same object (or an equal number): place and value.
        copies: lists and dicts of numbers and strings: place and a copy to compare with.
        conditions: Python expressions that must stay true.
        layers, lists: modules, and lists and dicts, with their places.
        compares_identity: True if the function may test whether two of these, or of its arguments, are the same object.
    """

    tensors: list[tuple[Place, torch.Tensor]] = field(default_factory=list)
    values: list[tuple[Place, Any]] = field(default_factory=list)
    copies: list[tuple[Place, Any]] = field(default_factory=list)
    conditions: list[Place] = field(default_factory=list)
    layers: list[tuple[Place, torch.nn.Module]] = field(default_factory=list)
    lists: list[tuple[Place, Any]] = field(default_factory=list)
    compares_identity: bool = False


def reads_of(fn: Callable[..., Any], arguments: dict[str, Any]) -> Reads:
    """The reads of one call of a function, without the values of its tensor and number arguments.

    Args:
        arguments: the arguments that are neither tensors nor numbers nor strings (a module as `self` ...), by the
            expressions that reach them.

    Raises:
        NotKnown: the reads cannot be determined.
    """
    names: frozenset[str] = frozenset()
    while True:  # code in reach adds names, and names add code in reach
        walk = _Walk(names)
        walk.function(fn)
        walk.methods()
        for text, value in arguments.items():
            walk.value(value, Place(text, ()))
        if walk.names == names:
            return walk.reads
        names = frozenset(walk.names)


#: `is`, `in` and `==`. After a constant they compare with that constant, unless they end a conditional expression.
_OPERATORS = frozenset(("IS_OP", "CONTAINS_OP", "COMPARE_OP"))
#: Instructions that may compare modules and lists: these, and those that make keys of a dict or a set.
_COMPARING = _OPERATORS | {"BUILD_MAP", "BUILD_SET", "MAP_ADD", "SET_ADD", "STORE_SUBSCR"}
#: Names of methods and functions that do so.
_COMPARING_NAMES = frozenset(("count", "index", "remove", "add", "setdefault", "update", "union", "fromkeys"))


class _Walk:
    def __init__(self, names: frozenset[str]) -> None:
        self.given = names
        self.names: set[str] = set(names)
        self.reads = Reads()
        self._seen: set[tuple[int, str]] = set()
        self._functions: dict[int, FunctionType] = {}
        self._methods: set[tuple[int, int]] = set()
        self._spaces: dict[int, ModuleType] = {}
        self._count = 0

    def _root(self, value: Any) -> Place:
        self._count += 1
        name = f"root_{self._count}"
        return Place(name, ((name, value),))

    def function(self, fn: Any) -> None:
        """Adds a Python function: its code, the globals and cells that it names, its defaults."""
        fn = written(fn)
        if isinstance(fn, MethodType):
            if (method := (id(fn.__self__), id(fn.__func__))) in self._methods:
                return  # `m.forward = fuse(m.forward)`: the module has its own method as an attribute
            self._methods.add(method)
            self.value(fn.__self__, self._root(fn.__self__))
            fn = fn.__func__
        if not isinstance(fn, FunctionType):
            raise NotKnown(f"{fn!r} is no Python function")
        if id(fn) in self._functions:
            return
        self._functions[id(fn)] = fn
        if self.given & (fn.__dict__.keys() | {"__name__", "__qualname__", "__doc__", "__module__"}):
            raise NotKnown(f"an attribute of {fn.__qualname__}")
        own = self._root(fn)
        self.reads.values.append((own.then(".__code__"), fn.__code__))
        named = fn.__kwdefaults__ or {}
        if not all(is_constant(default) for default in (*(fn.__defaults__ or ()), *named.values())):
            raise NotKnown(f"{fn.__qualname__} has a default that may change")
        self.reads.values.append((own.then(".__defaults__"), fn.__defaults__))
        by_name = own.then(".__kwdefaults__")
        if fn.__kwdefaults__ is None:
            self.reads.values.append((by_name, None))
        else:
            self.reads.copies.append((by_name, dict(named)))
        module_globals = self._root(fn.__globals__)
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        for code in _codes_in(fn.__code__):
            free = set(cells) & set(code.co_freevars)
            before = ""
            for instruction in dis.get_instructions(code):
                op, name = instruction.opname, instruction.argval
                if op in guard_allowlist.FORBIDDEN or (op in ("STORE_DEREF", "DELETE_DEREF") and name in free):
                    raise NotKnown(f"{fn.__qualname__}: {op} {name}")
                if op == "LOAD_GLOBAL":
                    self._global(fn, module_globals, name)
                elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in free:
                    self._cell(cells[name])
                elif op in ("LOAD_ATTR", "LOAD_METHOD"):
                    if guard_allowlist.tells_state(name):
                        raise NotKnown(f"{fn.__qualname__} uses {name}")
                    self.names.add(name)
                    self.reads.compares_identity |= name in _COMPARING_NAMES
                elif op == "BINARY_OP" and instruction.argrepr.endswith("="):
                    self.names.add("__iadd__")
                elif op in _COMPARING:
                    is_with_constant = before == "LOAD_CONST" and not instruction.is_jump_target
                    self.reads.compares_identity |= op not in _OPERATORS or not is_with_constant
                before = op

    def _global(self, fn: FunctionType, module_globals: Place, name: str) -> None:
        self.reads.compares_identity |= name == "dict"  # its keys
        if name in fn.__globals__:
            self.value(fn.__globals__[name], module_globals.then(f"[{name!r}]"))
        elif getattr(builtins, name, None) not in BUILTINS:
            raise NotKnown(f"{fn.__qualname__} uses {name}")
        else:
            self.reads.conditions.append(Place(f"{name!r} not in {module_globals.text}", module_globals.roots))
            self.reads.values.append((self._root(builtins).then(f".{name}"), getattr(builtins, name)))

    def _cell(self, cell: Any) -> None:
        try:
            self.value(cell.cell_contents, self._root(cell).then(".cell_contents"))
        except ValueError:
            raise NotKnown("an empty closure cell") from None

    def methods(self) -> None:
        """Adds the values of the names on a tensor: torch's own methods, or their replacements by a user."""
        tensor = self._root(torch.Tensor)
        for name in sorted(self.given):
            if hasattr(torch.Tensor, name):
                self._meaning(getattr(torch.Tensor, name), tensor.then(f".{name}"))

    def _meaning(self, value: Any, place: Place) -> None:
        """Adds the value of a name in torch: torch's own, or its replacement by a user."""
        if isinstance(value, (ModuleType, FunctionType, MethodType, Wrapper)):
            self.value(value, place)
        elif is_trusted(value) or is_constant(value) or type(value).__module__.startswith("torch"):
            self._module_class(value)
            self.reads.values.append((place, value))
        else:
            raise NotKnown(f"it uses a {type(value).__name__}")

    def _module_class(self, value: Any) -> None:
        """Adds what a call of a module's class depends on."""
        if value is torch.nn.Buffer:
            raise NotKnown("it uses Buffer")  # a test reads an attribute of the tensor
        if isinstance(value, type) and issubclass(value, torch.nn.Module):
            self._no_hooks_on_all()

    def value(self, value: Any, place: Place) -> None:
        """Adds a value that is read, with its place."""
        if (id(value), place.text) in self._seen:
            return
        self._seen.add((id(value), place.text))
        if type(value) is Proxy:
            raise NotKnown("a traced value in a variable outside the function")
        if isinstance(value, torch.Tensor):
            classes = takewhile(lambda cls: cls is not torch.Tensor, type(value).__mro__)
            if any(self.given & space.keys() for space in (value.__dict__, *map(vars, classes))):
                raise NotKnown("an attribute that somebody gave a tensor")
            self.reads.tensors.append((place, value))
        elif is_constant(value):
            self.reads.values.append((place, value))
        elif isinstance(value, enum.Enum) and is_constant(value._value_):
            self._member(value)
            self.reads.values.append((place, value))
        elif type(value) in (list, dict):
            self._container(value, place)
        elif is_trusted(value):
            if reads_state(value):
                raise NotKnown(f"it uses {getattr(value, '__name__', value)}")
            self._module_class(value)
            self.reads.values.append((place, value))
            if isinstance(value, ModuleType):
                self._space(value)
        elif isinstance(value, (FunctionType, MethodType, Wrapper)):
            if isinstance(value, Wrapper) and self.given & vars(value).keys() - vars(written(value)).keys():
                raise NotKnown("an attribute of a fused function")
            self.reads.values.append((place, value))
            self.function(value)
        elif isinstance(value, torch.nn.Module):
            self._layer(value, place)
        elif isinstance(value, ModuleType):
            self.reads.values.append((place, value))
            self._space(value)
        else:
            raise NotKnown(f"it uses a {type(value).__name__}")

    def _container(self, value: Any, place: Place) -> None:
        entries = (*value, *value.values()) if type(value) is dict else value
        if not all(map(is_constant, entries)):
            raise NotKnown(f"a {type(value).__name__} of objects")
        if self.given & guard_allowlist.CHANGING:
            raise NotKnown(f"a {type(value).__name__} that it may change")
        self.reads.copies.append((place, value.copy()))
        self.reads.lists.append((place, value))

    def _member(self, value: enum.Enum) -> None:
        """Checks a member of an enumeration. Methods, properties and operators of its class may read anything."""
        kind = type(value).__name__
        if self.given & vars(value).keys():
            raise NotKnown(f"an attribute of {value}")
        for cls in type(value).__mro__:
            for name, found in () if cls.__module__ in ("enum", "builtins") else vars(cls).items():
                is_own = callable(found) and getattr(found, "__module__", None) not in (None, "enum", "builtins")
                is_operator = name.startswith("__") and name not in guard_allowlist.HARMLESS
                if name in self.given or (is_own and is_operator):
                    raise NotKnown(f"{kind} has {name}")

    def _space(self, module: ModuleType) -> None:
        """Adds a Python module: the values of the names in it."""
        if id(module) in self._spaces:
            return
        self._spaces[id(module)] = module
        own = is_trusted(module)
        is_plain = type(module) is ModuleType or module.__name__.startswith("torch.ops")
        if not is_plain or ("__getattr__" in module.__dict__ and not own):
            raise NotKnown(f"{module.__name__} computes its attributes")
        place = self._root(module)
        for name in sorted(self.given):
            if name in module.__dict__:
                where = place.then(f".__dict__[{name!r}]")
                (self._meaning if own else self.value)(module.__dict__[name], where)

    def _layer(self, value: torch.nn.Module, place: Place) -> None:
        """Adds an nn.Module: its class, the values of the names in it, its forward, and the absence of hooks."""
        kind = Place(f"type({place.text})", place.roots)
        self.reads.values.append((kind, type(value)))
        self.reads.layers.append((place, value))
        for cls in type(value).__mro__:
            for name, found in () if cls in guard_allowlist.PLAIN_CLASSES else cls.__dict__.items():
                if name.startswith("__") and name not in guard_allowlist.HARMLESS and callable(found):
                    raise NotKnown(f"{cls.__name__} has {name}")
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(getattr(value, name) for name in hooks):
            raise NotKnown(f"{type(value).__name__} has hooks")
        none = " and ".join(f"not {place.text}.{name}" for name in hooks)
        self.reads.conditions.append(Place(none, place.roots))
        self._no_hooks_on_all()
        for name in sorted(self.given | {"forward"}):
            self._attribute(value, name, place, kind)
        if isinstance(value, torch.nn.Sequential):  # iterates over its modules without naming them
            self.reads.copies.append((Place(f"list({place.text}._modules)", place.roots), list(value._modules)))
            for name, module in value._modules.items():
                self.value(module, place.then(f"._modules[{name!r}]"))

    def _no_hooks_on_all(self) -> None:
        """Adds the absence of hooks on all modules."""
        hooks = guard_allowlist.GLOBAL_HOOKS
        if any(hooks.values()):
            raise NotKnown("there are hooks on all modules")
        none = Place(" and ".join(f"not {name}" for name in hooks), tuple(hooks.items()))
        if none not in self.reads.conditions:
            self.reads.conditions.append(none)

    def _attribute(self, value: torch.nn.Module, name: str, place: Place, kind: Place) -> None:
        found = next((c.__dict__[name] for c in type(value).__mro__ if name in c.__dict__ and c is not object), None)
        alone = Place(f"not hasattr({kind.text}, {name!r})", kind.roots)
        if name in value.__dict__:
            if hasattr(type(found), "__set__"):
                raise NotKnown(f"{type(value).__name__}.{name}")
            self.reads.conditions += [alone] if found is None else []
            self.value(value.__dict__[name], place.then(f".__dict__[{name!r}]"))
            return
        none = Place(f"{name!r} not in {place.text}.__dict__", place.roots)
        if found is not None and found is torch.nn.Module.__dict__.get(name):
            if callable(found) and name != "forward" and not hasattr(torch.Tensor, name):
                raise NotKnown(f"it uses {name} of a module")
        elif found is not None:
            if not (isinstance(found, (FunctionType, Wrapper)) or is_constant(found)):
                raise NotKnown(f"{type(value).__name__}.{name}")
            self.reads.conditions.append(none)
            self.reads.values.append((kind.then(f".{name}"), found))
            if not is_constant(found):
                self.function(found)  # for torch's layers as well: its code shows the attributes that are read
        else:
            for table in ("_parameters", "_buffers", "_modules"):
                if name in value.__dict__[table]:
                    self.reads.conditions += [none, alone]
                    self.value(value.__dict__[table][name], place.then(f".{table}[{name!r}]"))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    waiting = [code]
    while waiting:
        current = waiting.pop()
        yield current
        waiting += [c for c in current.co_consts if isinstance(c, CodeType)]


#: Functions that test the class of a value, and the names of tensor classes that they cannot test here.
_QUESTIONS = {
    "type": frozenset(("Tensor", "Parameter")),
    "isinstance": frozenset(
        f"{kind}Tensor"
        for kind in ("Float", "Double", "Half", "BFloat16", "Bool", "Byte", "Char", "Short", "Int", "Long")
    ),
}


def compares_classes(fn: Callable[..., Any]) -> bool:
    """True if a function, or one of the same file that it calls, may test a tensor's exact class: it uses `type` or
    `isinstance`, and names such a class.

    During tracing, the placeholder of a tensor has another class. `isinstance(x, torch.Tensor)` returns the same as for
    the tensor itself; `type(x) is torch.Tensor` and `isinstance(x, torch.FloatTensor)` cannot.
    """
    fn = getattr(fn, "__func__", fn)
    return isinstance(fn, FunctionType) and _compares(fn)


@lru_cache(maxsize=4096)
def _compares(fn: FunctionType) -> bool:
    waiting, seen = [fn], {fn}
    while waiting:
        current = waiting.pop()
        for code in _codes_in(current.__code__):
            if _is_comparison(code):
                return True
            called = [current.__globals__.get(name) for name in code.co_names]
            for found in (*called, getattr(current, "__wrapped__", None)):
                if isinstance(found, FunctionType) and found not in seen and found.__module__ == fn.__module__:
                    seen.add(found)
                    waiting.append(found)
    return False


def _is_comparison(code: CodeType) -> bool:
    asked = [
        name for name, classes in _QUESTIONS.items() if name in code.co_names and classes.intersection(code.co_names)
    ]
    return bool(asked) and any(i.opname == "LOAD_GLOBAL" and i.argval in asked for i in dis.get_instructions(code))
