"""Makes a plan from a run: writes the lines of its check, and names the values that they compare with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch

from opgraph.runtime.bounded_dict import Bounded
from opgraph.runtime.providers.torch_internals import function_modes, has_only_default_devices, tensors_in
from opgraph.runtime.providers.torch_prepared import IS_PLAIN, IS_PLAIN_VALUES
from opgraph.torch.tracing.calls import table
from opgraph.torch.tracing.guard_discovery import NotKnown, OddArgument, Place, reads_of
from opgraph.torch.tracing.guarded_plan import (
    Conditions,
    Miss,
    Plan,
    Ready,
    can_repeat,
    is_condition,
    is_same,
    waits,
)
from opgraph.torch.tracing.session import memory_key
from opgraph.torch.tracing.tensor_calls import EagerCall, Watch
from opgraph.torch.tracing.trace import MOST_SHAPES, Output, Run, Traced, filled

#: The number of pairs of tensors up to which each pair is compared.
_MOST_PAIRS = 10
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, type(...))


def make_plan(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, watch: Watch) -> Plan:
    """Makes a plan from a run.

    Args:
        fn: the function.
        args, kwargs: its arguments in the run.
        run: the traced run.
        watch: the calls on real tensors during the run.

    Raises:
        OddArgument: this call has no plan.
        NotKnown: the function has to be run at each call; the message gives the reason.
    """
    if run.traced is None or run.leaf is None:
        raise NotKnown("it computes nothing from data")
    modes = function_modes()
    if not has_only_default_devices():
        raise OddArgument("a TorchFunctionMode is active")
    if watch.has_drawn():  # a plan that draws, and then does not apply, would leave the next call other numbers
        raise NotKnown("it draws random numbers")
    # A function that reads a shape may use it in any way. The shapes of the graph's inputs are looked up anyway.
    writer = _Writer({id(t) for t in run.tensors}, run.asks)
    given = [(f"args[{i}]", a) for i, a in enumerate(args)] + [(f"kwargs[{k!r}]", v) for k, v in kwargs.items()]
    writer.line(f"if len(args) != {len(args)} or len(kwargs) != {len(kwargs)}: return None")
    if len(kwargs) > 1:  # the function may depend on their order
        writer.line(f"if tuple(kwargs) != {tuple(kwargs)!r}: return None")
    writer.defaults(modes)
    objects: dict[str, Any] = {}
    for text, value in given:
        name = writer.let(text)
        if isinstance(value, torch.Tensor):
            writer.argument(name, value)
        elif type(value) in _PLAIN:
            writer.same(name, value)
        elif isinstance(value, torch.nn.Module):
            objects[name] = value
        else:
            raise OddArgument(f"an argument is a {type(value).__name__}")
    writer.environment(fn, objects)
    writer.eager(watch.calls, list(run.tensors), [k for k in run.kept if isinstance(k, torch.Tensor)])
    return writer.finish(run)


class _Writer:
    """Collects the lines of a plan and the values that they name.

    Args:
        inputs: ids of the tensors that the graph reads.
        asks: True if the function read the shape or the requires_grad of a tensor.

    Attributes:
        arguments: the names of tensor arguments, one for each tensor.
    """

    def __init__(self, inputs: set[int], asks: bool) -> None:
        self._inputs = inputs
        self._asks = asks
        self.lines: list[str] = []
        self.signature: list[str] = []
        self._compared: list[str] = []
        self._named: set[int] = set()
        self._folded: set[int] = set()
        self.names: dict[str, Any] = {"Tensor": torch.Tensor, "Parameter": torch.nn.Parameter, "same": is_same}
        self.sources: dict[int, str] = {}
        self.arguments: list[str] = []
        self._count = 0
        if asks:  # under no_grad nothing that is computed requires a gradient
            self.names["grad_mode"] = torch.is_grad_enabled
            self.line(f"if grad_mode() is not {torch.is_grad_enabled()}: return None")

    def line(self, text: str) -> None:
        self.lines.append(text)

    def of_signature(self, condition: str) -> None:
        """Adds a condition that every known signature of the plan implies: it is checked for new ones only."""
        self.signature.append(f"if {condition}: return None")

    def constant(self, value: Any) -> str:
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def let(self, text: str) -> str:
        name = f"v{self._count}"
        self._count += 1
        self.line(f"{name} = {text}")
        return name

    def argument(self, name: str, tensor: torch.Tensor) -> None:
        """Checks a tensor argument: a plain tensor of the same dtype and device, 0-d or not as before."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise OddArgument(f"an argument is a {type(tensor).__name__}")
        if not tensor.dim() and tensor.__dict__:
            raise OddArgument("an argument has attributes of its own")
        self.of_signature(f"type({name}) is not {type(tensor).__name__}")
        if id(tensor) not in self.sources:
            for other in self.arguments:
                self.of_signature(f"{name} is {other}")
            self.arguments.append(name)
        self.tensor(name, tensor)
        if id(tensor) not in self._inputs and not self._asks:
            self.of_signature(f"{'' if tensor.dim() else 'not '}not {name}.shape")

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Checks that a tensor is unchanged, as far as the trace depends on it.

        A tensor that was passed twice has one source, which is right only for calls that pass it twice again. Likewise,
        two tensors must stay two: the function may test whether they are the same.
        """
        source = self.sources.setdefault(id(tensor), name)
        self._named.add(id(tensor))
        if source != name:
            self.line(f"if {name} is not {source}: return None")
            return
        self._compared.append(name)
        self.of_signature(f"{name}.dtype is not {self.constant(tensor.dtype)}")
        self.of_signature(f"{name}.device != {self.constant(tensor.device)}")
        self.of_signature(f"{name}.layout is not {self.constant(tensor.layout)}")
        if self._asks:
            self.of_signature(f"{name}.requires_grad is not {tensor.requires_grad}")
            if id(tensor) not in self._inputs:
                self.of_signature(f"{name}.shape != {self.constant(tensor.shape)}")

    def defaults(self, modes: int) -> None:
        """Checks that torch's default dtype and device are unchanged, and that no TorchFunctionMode is active.

        Args:
            modes: the number of active ones that set a default device.
        """
        self.names |= {"default": torch.get_default_dtype, "modes_of_functions": function_modes}
        self.line(f"if default() is not {self.constant(torch.get_default_dtype())}: return None")
        changed = f"modes_of_functions() != {modes}" if modes else "modes_of_functions()"
        if modes:
            self.names |= {"only_devices": has_only_default_devices, "default_device": torch.get_default_device}
            changed += f" or not only_devices() or default_device() != {self.constant(torch.get_default_device())}"
        self.line(f"if {changed}: return None")

    def same(self, text: str, value: Any) -> None:
        """Checks that a value is the same object, or an equal number, string etc."""
        known = self.constant(value)
        if isinstance(value, (bool, type(None))):
            self.line(f"if {text} is not {known}: return None")
        else:
            self.line(f"if {text} is not {known} and not same({text}, {known}): return None")

    def environment(self, fn: Callable[..., Any], objects: dict[str, Any]) -> None:
        """Checks that globals, cells and attributes are unchanged; the tensors among them become sources."""
        reads = reads_of(fn, objects)
        for place in reads.conditions:
            self.line(f"if not ({self._text(place)}): return None")
        for place, value in reads.values:
            text = self._text(place)
            if type(value) in _PLAIN:
                self.same(text, value)
            else:
                self.line(f"if {text} is not {self.constant(value)}: return None")
        for place, value in reads.copies:
            text, kind = self._text(place), self.constant(type(value))
            known = self.constant(repr(value))  # 1 is not 1.0
            self.line(f"if type({text}) is not {kind} or repr({text}) != {known}: return None")
        for place, tensor in reads.tensors:
            name = self.let(self._text(place))
            self.of_signature(f"type({name}) is not {self.constant(type(tensor))}")
            self.tensor(name, tensor)
        self._stay_apart([name for name in self.sources.values() if name not in self.arguments])
        if reads.compares_identity:
            found = [(self._text(place), value) for place, value in (*reads.layers, *reads.lists)]
            for (name, value), (other, second) in combinations(found, 2):
                if name != other and type(value) is type(second):
                    self.line(f"if ({name} is {other}) is not {value is second}: return None")

    def _stay_apart(self, names: list[str]) -> None:
        """Checks that these tensors are still different ones, and none of them is an argument.

        The function may test whether two are the same, or use them as keys of a dict.
        """
        pairs = [*combinations(names, 2), *((name, other) for name in names for other in self.arguments)]
        if len(pairs) > _MOST_PAIRS:
            everything = [*names, *self.arguments]
            self.line(
                f"if len({{{', '.join(f'id({name})' for name in everything)}}}) != {len(everything)}: return None"
            )
        elif pairs:
            self.line(f"if {' or '.join(f'{name} is {other}' for name, other in pairs)}: return None")

    def _text(self, place: Place) -> str:
        self.names.update(place.roots)
        return place.text

    def eager(self, calls: list[EagerCall], wanted: list[torch.Tensor], kept: list[torch.Tensor]) -> None:
        """Repeats the calls on real tensors, and compares the values on which Python branched.

        Calls with unused results are repeated as well, because they may fail.

        Args:
            wanted: the tensors that the graph reads.
            kept: the tensors that the function returns unchanged.

        Raises:
            NotKnown: a call returned a value to Python in another way, changed a tensor, or is a custom op.
        """
        made: dict[int, EagerCall] = {}
        makers: list[EagerCall] = []
        conditions: list[EagerCall] = []
        for call in calls:
            if call.changes:
                raise NotKnown(f"{call.name} changes a tensor")
            if call.is_custom:
                raise NotKnown(f"it calls the custom op {call.func}")
            if call.is_question:
                continue
            if is_condition(call):
                conditions.append(call)
                continue
            parts = _parts(call)
            if not all(isinstance(part, torch.Tensor) for part in parts):
                raise NotKnown(f"Python reads the value of a tensor: {call.name}")
            makers.append(call)
            for part in parts:
                made.setdefault(id(part), call)
        for call in makers:
            self._fold(call, kept)
        conditions = [call for call in conditions if id(call.args[0]) not in self._folded]
        for call in self._needed(made, [call.args[0] for call in conditions]).values():
            if not can_repeat(call):
                raise NotKnown(f"Python reads the value of a tensor that comes from {call.name}")
        late = [call for call in conditions if waits(call.args[0])]
        early = {id(call): call for call in conditions if not waits(call.args[0])}
        own = self._needed(made, [call.args[0] for call in late])
        others = {id(call): call for call in makers if id(call) not in own and id(call.result) not in self._folded}
        given = [(call.args, *call.kwargs.values()) for call in (*early.values(), *others.values())]
        needed = others | self._needed(made, [*wanted, *kept, *given])
        for call in calls:
            if id(call) in needed:
                self._repeat(call)
            elif id(call) in early:
                self.line(f"if {'not ' if call.result else ''}{self._source(call.args[0])}: return None")
        if late:
            self._late(late, [call for call in makers if id(call) in own])

    def _fold(self, call: EagerCall, kept: list[torch.Tensor]) -> None:
        """Keeps the result of a call on numbers alone, if it is a 0-d tensor that the function does not return."""
        made = call.result
        if (
            isinstance(made, torch.Tensor)
            and not (
                made.dim() or made.requires_grad or made.is_inference() or memory_key(made) in map(memory_key, kept)
            )
            and can_repeat(call)
            and all(
                type(a) in _PLAIN or (isinstance(a, torch.Tensor) and id(a) in self._folded)
                for a in (*call.args, *call.kwargs.values())
            )
        ):
            self._folded.add(id(made))
            self.sources[id(made)] = self.constant(made)

    def _needed(self, made: dict[int, EagerCall], wanted: list[Any]) -> dict[int, EagerCall]:
        """The calls, by id, that make these tensors.

        Raises:
            NotKnown: the origin of a tensor is unknown.
        """
        needed: dict[int, EagerCall] = {}
        waiting = tensors_in(wanted)
        while waiting:
            tensor = waiting.pop()
            if id(tensor) not in self.sources:
                if id(tensor) not in made:
                    raise NotKnown("a tensor that is found under no name")
                call = made[id(tensor)]
                if id(call) not in needed:
                    needed[id(call)] = call
                    waiting += tensors_in((call.args, *call.kwargs.values()))
        return needed

    def _repeat(self, call: EagerCall) -> None:
        arguments = [self._argument(a) for a in call.args]
        arguments += [f"{k}={self._argument(v)}" for k, v in call.kwargs.items()]
        name = self.let(f"{self.constant(call.func)}({', '.join(arguments)})")
        several = isinstance(call.result, (tuple, list))
        if several:
            self.line(f"if len({name}) != {len(call.result)}: return None")
        for place, part in enumerate(_parts(call)):
            text = f"{name}[{place}]" if several else name
            source = self.sources.setdefault(id(part), text)
            if source != text:  # the call returned a tensor that has a source already
                self.line(f"if {text} is not {source}: return None")
                continue
            if call.func not in table():  # `x.contiguous()` may return x, and `w.grad` None
                given = [self.sources[id(t)] for t in tensors_in((call.args, *call.kwargs.values()))]
                same = "".join(f" or {text} is {other}" for other in dict.fromkeys(given))
                self.line(f"if not isinstance({text}, Tensor){same}: return None")
            if self._asks:
                for what in ("shape", "dtype", "layout", "device", "requires_grad"):
                    self.line(f"if {text}.{what} != {self.constant(getattr(part, what))}: return None")

    def _late(self, late: list[EagerCall], own: list[EagerCall]) -> None:
        """Compares values on a device: at the end, all of them at once, and only if they may have changed.

        Args:
            own: the calls that compute them. Those that nothing else needs are repeated only here.
        """
        given = tensors_in([(call.args, *call.kwargs.values()) for call in (*late, *own)])
        sources = dict.fromkeys(self._source(tensor) for tensor in given if id(tensor) in self._named)
        compared = self.constant(Conditions([call.result for call in late]))
        inner = len(self.lines)
        for call in own:
            if id(call.result) not in self.sources:
                self._repeat(call)
        values = "".join(f"{self._source(call.args[0])}, " for call in late)
        self.line(f"if not {compared}.read(({''.join(f'{s}, ' for s in sources)}), ({values})): return None")
        block = [f"    {line}" for line in self.lines[inner:]]
        self.lines[inner:] = [f"if not {compared}.hold({', '.join(sources)}):", *block]

    def _source(self, tensor: torch.Tensor) -> str:
        if id(tensor) not in self.sources:
            raise NotKnown("a tensor that is found under no name")
        return self.sources[id(tensor)]

    def _argument(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._source(value)
        if type(value) in (list, tuple):
            parts = "".join(self._argument(v) + ", " for v in value)
            return f"[{parts}]" if type(value) is list else f"({parts})"
        if isinstance(value, slice):
            return f"slice({', '.join(self._argument(v) for v in (value.start, value.stop, value.step))})"
        if type(value) in (*_PLAIN, torch.Size, torch.memory_format, torch.layout):
            return self.constant(value)
        raise NotKnown(f"torch is given a {type(value).__name__}")

    def finish(self, run: Run) -> Plan:
        """Returns the plan."""
        kept = []
        for value in run.kept:
            if isinstance(value, torch.Tensor):
                kept.append(self.sources[id(value)])
            elif type(value) in _PLAIN:
                kept.append(self.constant(value))
            else:
                raise NotKnown(f"it returns a {type(value).__name__}")
        tensors = [self.sources[id(t)] for t in run.tensors]
        assert run.leaf is not None and run.traced is not None
        graphs: Bounded[Any, Traced] = Bounded(MOST_SHAPES)
        graphs[tuple(t.shape for t in run.tensors)] = run.traced
        ready: tuple[list[Ready], list[Ready]] = ([], [])
        structure = run.leaf.structure
        values = dict(self.names)
        self.names |= {"graphs": graphs, "ready": ready, "records": torch.is_grad_enabled, "Miss": Miss}
        self.names |= {"filled": filled, "structure": structure, **IS_PLAIN_VALUES}
        compared = dict.fromkeys((*self._compared, *tensors))  # the tensors of a signature
        for name, tensor in zip(tensors, run.tensors, strict=True):  # autocast and 0-d tensors change it
            self.of_signature(f"{name}.dtype is not {self.constant(tensor.dtype)}")
        shapes, given = (f"({''.join(f'{t}{part}, ' for t in tensors)})" for part in (".shape", ""))
        kept_text, compared_text = (f"({''.join(f'{name}, ' for name in names)})" for names in (kept, compared))
        self.line(f"if {' or '.join(f'{name}.is_nested' for name in compared)}: return None")
        self.line("run = None")
        self.line(f"if {IS_PLAIN}:")
        self.line("    for check, run in ready[records()]:")
        self.line(f"        if check({', '.join(compared)}): break")
        self.line("    else: run = None")
        self.line("if run is None:")
        new = [*self.signature, f"return Miss(graphs.get({shapes}), {given}, {kept_text}, {compared_text})"]
        self.lines += [f"    {line}" for line in new]
        # An error in the plan occurs again when the function runs, then with the user's line in the message.
        body = "".join(f"        {line}\n" for line in self.lines)
        text = f"def plan(args, kwargs):\n    try:\n{body}    except Exception: return None\n"
        results = "results if type(results) is tuple else (results,)"
        if type(structure) is Output:
            text += f"    results = run({', '.join(tensors)})\n"
            text += f"    return results[{structure.index}] if type(results) is tuple else results\n"
        else:
            text += f"    results = run({', '.join(tensors)})\n    return filled(structure, {results}, {kept_text})\n"
        exec(compile(text, "<plan>", "exec"), self.names)
        return Plan(self.names["plan"], graphs, ready, run.leaf, run.asks, text, values)


def _parts(call: EagerCall) -> list[Any]:
    """The results of a call: one value, or several."""
    return list(call.result) if isinstance(call.result, (tuple, list)) else [call.result]
