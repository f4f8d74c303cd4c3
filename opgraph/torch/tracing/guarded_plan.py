"""Plans: a function that does what a fused function did in one run, where what that run read is what it was.

A plan is a Python function, generated once: it compares numbers, globals, cells and attributes with those of the run
that it was made from and repeats what the run did on real tensors (views, arithmetic of parameters). What tensors are
like is then compared by torch (a signature, see opgraph/runtime/providers/torch_prepared.py); for a signature that was
seen before it makes the prepared call. For another one, dtypes are compared and the graph is looked up by the shapes.
Where anything differs the function is run again; where that was only a shape, the plan learns it. A function that asks
for shapes may do anything with them: what it did for another shape is a plan of its own, unless the two are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from opgraph.runtime.bounded_dict import Bounded
from opgraph.runtime.providers.torch_prepared import MAX_READY, Check, Run, check_of, is_plain
from opgraph.torch.tracing.calls import table
from opgraph.torch.tracing.tensor_calls import EagerCall
from opgraph.torch.tracing.trace import Leaf, Traced
from opgraph.torch.tracing.trace import Run as TracedRun

#: A signature, and what is run on tensors of it.
Ready: TypeAlias = tuple[Check, Run]


@dataclass(frozen=True, slots=True)
class Miss:
    """A call that the plan applies to, without a prepared call at hand.

    Attributes:
        traced: the graph; None where its shapes are new.
        tensors: the tensors that the graph reads.
        kept: what the function returns as it was.
        compared: the tensors whose signature is new.
    """

    traced: Traced | None
    tensors: tuple[torch.Tensor, ...]
    kept: tuple[Any, ...]
    compared: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan.

    Attributes:
        call: the generated function, of the arguments and keyword arguments of a call: what the fused function
            returns, or a Miss, or None where the plan does not apply.
        graphs: shapes -> Traced, of runs that did what this plan says.
        ready: the signatures for which there are prepared calls, outside and inside of what records gradients: torch's
            guards do not tell these apart.
        leaf: the way through the function that it stands for.
        asks: whether the function asked for a shape, or whether a tensor requires a gradient.
        text, values: the text of `call`, and the values of the run that its names mean.
    """

    call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    graphs: Bounded[Any, Traced]
    ready: tuple[list[Ready], list[Ready]]
    leaf: Leaf
    asks: bool
    text: str
    values: dict[str, Any]

    def run(self, traced: Traced, miss: Miss) -> Any:
        """The function's result of a new signature, which from now on has a prepared call where torch allows one."""
        prepared = getattr(traced.op, "prepared", None)  # of a FusedOp
        found: Run | None = None if prepared is None else prepared(miss.tensors)
        if found is not None:
            ready = self.ready[torch.is_grad_enabled()]
            if len(ready) < MAX_READY and is_plain() and (check := check_of(miss.compared)) is not None:
                ready.append((check, found))
        results = (traced.op if found is None else found)(*miss.tensors)
        return traced.result(results if type(results) is tuple else (results,), miss.kept)

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: TracedRun) -> bool:
        """Whether a run that asked for no shape was one of this plan's but for its shapes; the plan learns these."""
        if run.leaf is not self.leaf or run.traced is None or run.asks or self.asks:
            return False
        miss = self.call(args, kwargs)
        if type(miss) is not Miss or miss.traced is not None:
            return False
        self.graphs[tuple([t.shape for t in miss.tensors])] = run.traced
        return True

    def takes_in(self, other: Plan) -> bool:
        """Whether another plan says the same of other shapes, which this one learns."""
        if self.leaf is not other.leaf or self.text != other.text or self.values.keys() != other.values.keys():
            return False
        if not all(is_same(value, other.values[name]) for name, value in self.values.items()):
            return False
        for shapes, traced in other.graphs.items():
            self.graphs[shapes] = traced
        return True


#: What is compared by value, not by identity.
_VALUES = (bool, int, float, str, torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout)


def is_same(a: Any, b: Any) -> bool:
    """Whether two numbers, words ... are alike, or two things one; 0.0 is not -0.0, 1 is not 1.0."""
    if a is b or type(a) is not type(b):
        return a is b
    if type(a) is float:
        return bool(a.hex() == b.hex())
    if type(a) is Conditions:
        return bool(a.outcomes == b.outcomes)
    return type(a) in _VALUES and bool(a == b)


#: Arithmetic that is in no record, views, and what makes a tensor of numbers.
_MORE = frozenset(
    (
        "tensor", "as_tensor", "to", "float", "double", "detach", "__rsub__", "__rdiv__", "__rtruediv__", "__rpow__",
        "__getitem__", "reshape", "view", "squeeze", "sum", "mean", "all", "any",
    )
)  # fmt: skip


def is_condition(call: EagerCall) -> bool:
    """Whether a call is a branch of Python on the value of a tensor."""
    return call.name == "__bool__" and type(call.result) is bool


def can_repeat(call: EagerCall) -> bool:
    """Whether a call gives the same each time. One that draws numbers does not: a second try would branch on others."""
    return call.func in table() or call.name in _MORE


def waits(tensor: torch.Tensor) -> bool:
    """Whether reading a value of a tensor waits for a device."""
    return tensor.device.type != "cpu"


class Conditions:
    """Values of tensors of a device, compared with those of a run.

    `if a > 0:` in a function reads one value. On the CPU a plan reads it again at each call. On a GPU every such read
    is a copy and a wait; there a plan reads all of them together, and none while nothing that they follow from was
    written to.

    Args:
        outcomes: of the run.

    Writing to a tensor's memory without torch's knowledge, as by `p.data.add_()`, goes unseen, as it does by autograd.
    """

    def __init__(self, outcomes: Sequence[bool]) -> None:
        self.outcomes = list(outcomes)
        self._seen: list[tuple[weakref.ref[torch.Tensor], int, int]] = []

    def hold(self, *sources: torch.Tensor) -> bool:
        """Whether they are as when they were read last, since all that they follow from is."""
        if len(self._seen) != len(sources):
            return False
        for (known, version, address), source in zip(self._seen, sources):
            if known() is not source or source._version != version or source.data_ptr() != address:
                return False
        return True

    def read(self, sources: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
        """Whether values that follow from these sources are those of the run: one copy and one wait for all of them."""
        seen = [(weakref.ref(s), s._version, s.data_ptr()) for s in sources]
        found = torch.stack([v.detach().reshape(()).bool() for v in values]).tolist() == self.outcomes
        self._seen = seen if found else []
        return found
