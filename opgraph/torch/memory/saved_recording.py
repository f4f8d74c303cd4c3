"""Records the tensors that autograd keeps: from saved-tensor hooks, the autograd graph, and attributes of its nodes.

The pack hook receives every tensor that an op saves, but not the op. The graph's nodes have names, and reading a node's
saved tensor calls the unpack hook with the object that the pack hook returned. Together they show the op of each kept
tensor. Tensors that a custom `autograd.Function` puts on its `ctx` pass no hook; they are read from the node.
"""

from __future__ import annotations

import ast
import bisect
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from opgraph.runtime.providers.torch_internals import current_node, next_number, recomputing_once, tree_iter
from opgraph.torch.fuse_module import is_compiled
from opgraph.torch.graph.node_origin import origin_of
from opgraph.torch.graph.program import Program
from opgraph.torch.inplace.source_position import head_of, user_stack
from opgraph.torch.memory.storage_trace import Watch, storage_of
from opgraph.torch.tracing.guard_discovery import Wrapper, written


class Packed:
    """The object that the hooks return to autograd for a saved tensor. While it lives, the tensor is kept."""

    def __init__(self, tensor: torch.Tensor, place: Place, line: tuple[str, str], op: str = "") -> None:
        # Detached: an op's own result would otherwise hold the node that holds this, and neither would ever be freed.
        self.tensor = tensor.detach()
        self.place = place
        self.line = line
        self.op = op
        self.slot = ""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A tensor on a node of a custom Function, kept without a hook."""

    tensor: torch.Tensor
    place: Place
    op: str
    slot: str
    line: tuple[str, str] = ("", "")


class Recorder:
    """Records the tensors that code inside `recording` keeps for backward.

    Args:
        model: a module, whose submodules are distinguished, or a function.
        label: the name of a function.
        until: the file that calls it; lines of source are searched in the frames that this call leads to.

    Attributes:
        attributes: tensors found on nodes by `name_ops`.
    """

    def __init__(self, model: object, label: str, until: str) -> None:
        modules = _run_by_python(model, "") if isinstance(model, torch.nn.Module) else {}
        self._hooked = modules
        self._modules = Modules(model)
        #: Sequence number of a captured graph's autograd node -> the result of `places_of` when the graph ran.
        self._places: dict[int, Mapping[str, Place]] = {}
        self._calls: Counter[int] = Counter()
        #: For each call on the stack: True if a captured graph may run in it. For a function this is unknown.
        self._captures = [True]
        self._stack = [Place("", type(model).__name__ if modules else label, 1)]
        self._marks: list[tuple[int, Place]] = [(-1, self._stack[0])]
        self._until = until
        self._head = head_of(written(model)) if isinstance(model, Wrapper) else ("", "")
        self._packed: list[weakref.ref[Packed]] = []
        self._unpacked: list[Packed] | None = None
        self.attributes: list[Attribute] = []

    @property
    def place(self) -> Place:
        """The module call that is running."""
        return self._stack[-1]

    def _line(self) -> tuple[str, str]:
        """The innermost line of the user's source that runs, as `file:line` and its text; if only a kernel runs, the
        line of the fused function itself."""
        stack = user_stack(self._until)
        return (stack[0].where, stack[0].code) if stack else self._head

    def place_now(self) -> Place:
        """The module whose forward is running, or whose ops are being differentiated."""
        node = current_node()
        if node is None:
            return self._innermost()
        # Nodes that accumulate gradients have the largest possible number; they belong to no module.
        number = node._sequence_nr()
        return self._places.get(number, {}).get("") or self.place_of_node(number)

    def places_of(self, program: Program) -> Mapping[str, Place]:
        """The modules of the nodes of a program that begins to run, by the names that Dynamo gave them."""
        node = current_node()
        found = None if node is None else self._places.get(node._sequence_nr())
        if found is None:
            sources = {origin_of(n).source for n in program.module.graph.nodes} - {""}
            found = {"": self._innermost(), **self._modules.places(sources)}
            if program.phase == "forward":  # in the forward of the autograd function whose node was made last
                self._places[next_number() - 1] = found
        return found

    def _innermost(self) -> Place:
        """The module that is running. Inside compiled modules no hook shows which one."""
        place = self._modules.running() if self._captures[-1] else None
        return self.place if place is None or place.module == self.place.module else place

    def place_of_node(self, sequence: int) -> Place:
        """The module call in which a node of the graph was made, by its sequence number."""
        return self._marks[bisect.bisect_right(self._marks, sequence, key=lambda mark: mark[0]) - 1][1]

    def kept(self) -> list[Packed]:
        """The tensors that passed the hooks and are still held, in the order of saving."""
        return [packed for ref in self._packed if (packed := ref()) is not None]

    @contextmanager
    def recording(self, watch: Watch) -> Iterator[None]:
        """Records everything inside; the watch has the origins of the values of captured graphs."""

        def pack(tensor: torch.Tensor) -> Packed:
            with watch.paused():
                origin = watch.origin_of(tensor) if self._captures[-1] else None
                if origin is None:
                    packed = Packed(tensor, self._innermost(), self._line())
                else:
                    place = Place(origin.module, origin.module_class or self.place.module_class, origin.module_call)
                    packed = Packed(tensor, place, (origin.line, origin.code), origin.call)
            self._packed.append(weakref.ref(packed))
            return packed

        def unpack(packed: Packed) -> torch.Tensor:
            if self._unpacked is not None:
                self._unpacked.append(packed)
            return packed.tensor

        with ExitStack() as stack:
            for module in self._hooked:
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            # The hooks are called in frames that Dynamo captures, too.
            apart: Any = torch.compiler.disable
            hooks = apart(pack), apart(unpack)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            yield

    def _enter(self, module: torch.nn.Module, _: object) -> None:
        self._calls[id(module)] += 1
        self._captures.append(is_compiled(module))
        self._stack.append(Place(self._hooked[module], type(module).__name__, self._calls[id(module)]))
        self._mark()

    def _leave(self, *_: object) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
            self._captures.pop()
            self._mark()

    def _mark(self) -> None:
        self._marks.append((next_number(), self.place))

    def name_ops(self, outputs: Any) -> list[torch.Tensor]:
        """Finds the op and the name of every kept tensor, by walking the graph of the outputs.

        Returns: the leaves of the graph, with respect to which gradients can be computed.
        """
        tensors = [value for value in tree_iter(outputs) if isinstance(value, torch.Tensor)]
        todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        seen = set(todo)
        leaves = [tensor for tensor in tensors if tensor.grad_fn is None and tensor.requires_grad]
        with recomputing_once():
            for node in todo:
                if hasattr(node, "variable"):
                    leaves.append(node.variable)
                self._name_saved(node)
                for following, _ in node.next_functions:
                    if following is not None and following not in seen:
                        seen.add(following)
                        todo.append(following)
        return leaves

    def _name_saved(self, node: Any) -> None:
        for raw in dir(node):
            if raw.startswith("_raw_saved_"):
                slot = raw.removeprefix("_raw_")
                unpacked: list[Packed] = []
                self._unpacked = unpacked
                try:
                    # A node written in C++ has `_saved_self` and the like, one in Python `saved_tensors`.
                    getattr(node, f"_{slot}" if hasattr(type(node), f"_{slot}") else slot)
                except (RuntimeError, AttributeError):
                    continue  # freed by a backward pass of the model's own, or changed in place since
                finally:
                    self._unpacked = None  # backward unpacks too, and must be able to free tensors
                many = len(unpacked) > 1
                for index, packed in enumerate(unpacked):
                    packed.op = packed.op or node.name()
                    packed.slot = slot.removeprefix("saved_") + (f"[{index}]" if many else "")
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            op, place = type(node).__name__, self.place_of_node(node._sequence_nr())
            for name, value in vars(node).items():
                for tensor in tree_iter(value):
                    if isinstance(tensor, torch.Tensor) and storage_of(tensor) is not None:
                        self.attributes.append(Attribute(tensor, place, op, f"ctx.{name}"))


def _run_by_python(module: torch.nn.Module, name: str) -> dict[torch.nn.Module, str]:
    """The modules that Python calls, and their names: none inside a compiled module.

    A hook inside would become part of the compiled code, and the model would be compiled anew.
    """
    found = {module: name}
    if is_compiled(module):
        return found
    for child_name, child in module.named_children():
        inside = _run_by_python(child, f"{name}.{child_name}" if name else child_name)
        found = {**inside, **found}
    return found


#: A local variable, and the path from it to a module.
_SOURCE = re.compile(r"L\['(?P<root>\w+)'\](?P<way>.*)")
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<key>'[^']*'|-?\d+)\]")


@dataclass(frozen=True, slots=True)
class Place:
    """A call of a module: its qualified name ("" for the whole), its class, and the number of the call."""

    module: str
    module_class: str
    call: int


class Modules:
    """The modules of a model, by the frames in which they run.

    Dynamo names a module by the path from the variables of a frame to it: `L['self'].layers.0`. After a graph break
    that frame may belong to any module of the model, and instances of one class share compiled code. While the graph
    runs, its frame is on the stack, and contains the instance.

    Args:
        model: a module, or a function, whose modules are unknown.
    """

    def __init__(self, model: object) -> None:
        named = model.named_modules() if isinstance(model, nn.Module) else ()
        self._names = {id(module): name for name, module in named}

    def running(self) -> Place | None:
        """The innermost module of the model with a running method."""
        return self._place(_local("self", "", self._names))

    def places(self, sources: Iterable[str]) -> dict[str, Place]:
        """The modules of the graph that runs now, by the names that Dynamo gave them, as far as they are found."""
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
    """The known module to which a local variable of a running function leads, innermost first; None without one."""
    for value in _locals(name):
        found = _followed(value, way)
        if id(found) in known:
            return found
    return None


def _locals(name: str) -> Iterator[Any]:
    """The values of a local variable of this name in the functions that run now, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars:
            found = frame.f_locals
            value = found.get(name)
            # Up to Python 3.12 a frame keeps this copy of its variables alive, and with it their tensors. The counted
            # references are the frame's, this function's and the argument of the call.
            if type(found) is dict and sys.getrefcount(found) <= 3:
                found.clear()
            yield value
        frame = frame.f_back


def _followed(value: Any, way: str) -> Any:
    """The value that attributes and keys lead to; None if there is none. Runs no code of the value's class."""
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
