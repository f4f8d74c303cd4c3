"""Makes a plan from a run: writes the lines of its check, and gives names to the values that they compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgraph.runtime.bounded import Bounded
from opgraph.torch.tracing.plan import Plan
from opgraph.torch.tracing.proxy import Proxy
from opgraph.torch.tracing.reads import NotKnown, OddArgument, Place, reads_of
from opgraph.torch.tracing.trace import MOST_SHAPES, Run, Traced
from opgraph.torch.tracing.watch import EagerCall, Watch

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, type(...))
#: Whether this torch was built for anything but the CPU.
_HAS_DEVICES = any((torch.version.cuda, torch.version.hip, torch.backends.mps.is_built(), torch.xpu._is_compiled()))


def make_plan(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, watch: Watch) -> Plan:
    """A plan from a run.

    Args:
        fn: the function.
        args, kwargs: what it was called with.
        run: what came of it.
        watch: what it did on real tensors meanwhile.

    Raises:
        OddArgument: this call has no plan.
        NotKnown: the function has to be run at each call; the text says why.
    """
    if run.traced is None or run.leaf is None:
        raise NotKnown("it computes nothing from data")
    # Who asks for a shape may do anything with it. Those of the graph's inputs are looked up anyway.
    asks = run.asks or any(call.is_question for call in watch.calls)
    writer = _Writer({id(t) for t in run.tensors}, asks)
    given = [(f"args[{i}]", a) for i, a in enumerate(args)] + [(f"kwargs[{k!r}]", v) for k, v in kwargs.items()]
    writer.line(f"if len(args) != {len(args)} or len(kwargs) != {len(kwargs)}: return None")
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
    writer.eager(watch.calls, [*run.tensors, *(k for k in run.kept if isinstance(k, torch.Tensor))])
    return writer.finish(run)


class _Writer:
    """Collects the lines of a plan and the values that they name.

    Args:
        inputs: ids of the tensors that the graph reads.
        asks: whether the function asked for the shape of a tensor, or whether it requires a gradient.

    Attributes:
        arguments: the names of tensor arguments, each tensor's once.
    """

    def __init__(self, inputs: set[int], asks: bool) -> None:
        self._inputs = inputs
        self._asks = asks
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"Tensor": torch.Tensor, "Parameter": torch.nn.Parameter, "same": _same}
        self.sources: dict[int, str] = {}
        self.arguments: list[str] = []
        self._count = 0
        if asks:  # under no_grad nothing that is computed requires a gradient
            self.names["grad_mode"] = torch.is_grad_enabled
            self.line(f"if grad_mode() is not {torch.is_grad_enabled()}: return None")

    def line(self, text: str) -> None:
        self.lines.append(text)

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
        """A tensor argument: a plain one of the same dtype and device, and of no dimension or not as before."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise OddArgument(f"an argument is a {type(tensor).__name__}")
        if not tensor.dim() and tensor.__dict__:
            raise OddArgument("an argument has attributes of its own")
        self.line(f"if type({name}) is not {type(tensor).__name__}: return None")
        if id(tensor) not in self.sources:
            for other in self.arguments:
                self.line(f"if {name} is {other}: return None")
            self.arguments.append(name)
        self.tensor(name, tensor)
        if id(tensor) not in self._inputs and not self._asks:
            self.line(f"if {'' if tensor.dim() else 'not '}not {name}.shape: return None")

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """That a tensor is what it was, as far as the trace depends on it.

        One that was given twice has one source, which is right for calls that give it twice again, and for no others.
        So have two that were given: the function may ask whether they are one.
        """
        source = self.sources.setdefault(id(tensor), name)
        if source != name:
            self.line(f"if {name} is not {source}: return None")
            return
        self.line(f"if {name}.dtype is not {self.constant(tensor.dtype)}: return None")
        if not tensor.dtype.is_floating_point:  # what integers become
            self.default_dtype()
        if _HAS_DEVICES:
            self.line(f"if {name}.device != {self.constant(tensor.device)}: return None")
        if self._asks:
            self.line(f"if {name}.requires_grad is not {tensor.requires_grad}: return None")
            if id(tensor) not in self._inputs:
                self.line(f"if {name}.shape != {self.constant(tensor.shape)}: return None")

    def default_dtype(self) -> None:
        """That torch's default dtype is what it was."""
        if "default" not in self.names:
            self.names["default"] = torch.get_default_dtype
            self.line(f"if default() is not {self.constant(torch.get_default_dtype())}: return None")

    def same(self, text: str, value: Any) -> None:
        """That a value is the same object, or an equal number, word ..."""
        known = self.constant(value)
        if isinstance(value, (bool, type(None))):
            self.line(f"if {text} is not {known}: return None")
        else:
            self.line(f"if {text} is not {known} and not same({text}, {known}): return None")

    def environment(self, fn: Callable[..., Any], objects: dict[str, Any]) -> None:
        """That globals, cells and attributes are what they were; the tensors among them become sources."""
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
            self.line(f"if repr({self._text(place)}) != {self.constant(repr(value))}: return None")  # 1 is not 1.0
        for place, tensor in reads.tensors:
            name = self.let(self._text(place))
            self.line(f"if type({name}) is not {self.constant(type(tensor))}: return None")
            self.tensor(name, tensor)

    def _text(self, place: Place) -> str:
        self.names.update(place.roots)
        return place.text

    def eager(self, calls: list[EagerCall], wanted: list[torch.Tensor]) -> None:
        """Repeats the calls on real tensors, the unwanted as well: they may draw random numbers.

        Raises:
            NotKnown: a call told Python a value, or changed a tensor.
        """
        for call in calls:
            if call.changes:
                raise NotKnown(f"{call.name} changes a tensor")
            if call.is_question:
                continue
            several = isinstance(call.result, (tuple, list))
            parts = list(call.result) if several else [call.result]
            if not all(isinstance(part, torch.Tensor) for part in parts):
                raise NotKnown(f"Python reads the value of a tensor: {call.name}")
            self.default_dtype()  # what new tensors are made of
            arguments = [self._argument(a) for a in call.args]
            arguments += [f"{k}={self._argument(v)}" for k, v in call.kwargs.items()]
            name = self.let(f"{self.constant(call.func)}({', '.join(arguments)})")
            if several:
                self.line(f"if len({name}) != {len(parts)}: return None")
            for i, part in enumerate(parts):
                self.sources.setdefault(id(part), f"{name}[{i}]" if several else name)
        for tensor in wanted:
            self._source(tensor)

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
        """The plan itself."""
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
        self.names["graphs"] = graphs
        shapes, given = "".join(f"{t}.shape, " for t in tensors), "".join(f"{t}, " for t in tensors)
        self.line(f"shapes = ({shapes})")
        self.line("traced = graphs.get(shapes)")
        self.line(f"if traced is None: return None, ({given}), shapes")
        self.line(f"return traced, ({given}), ({''.join(f'{k}, ' for k in kept)})")
        # Whatever goes wrong on the way goes wrong again when the function runs, with the user's line in the message.
        body = "".join(f"        {line}\n" for line in self.lines)
        text = f"def plan(args, kwargs):\n    try:\n{body}    except Exception: return None\n"
        exec(compile(text, "<plan>", "exec"), self.names)
        return Plan(self.names["plan"], graphs, run.leaf)


def _same(a: Any, b: Any) -> bool:
    """Whether two numbers, words ... are alike; 0.0 is not -0.0, 1 is not 1.0."""
    if type(a) is not type(b) or type(a) is Proxy:
        return False
    return a.hex() == b.hex() if type(a) is float else bool(a == b)
