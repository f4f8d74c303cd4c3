"""Plans: each repeats one run of a fused function, as long as everything that the run read is unchanged.

A plan is a Python function, generated once. It compares numbers, globals, cells and attributes with those of its run,
and repeats the run's calls on real tensors (views, arithmetic of parameters). torch then compares the properties of
tensors (a signature, see opgraph/runtime/providers/torch_prepared.py). For a known signature, the plan makes the
prepared call. For another one, it compares dtypes and looks up the graph by the shapes. If anything differs, the
function is run again; if that was only a shape, the shape is added to the plan. A function that reads shapes may use
them in any way: its run for another shape becomes a separate plan, unless both plans are the same.
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

#: A signature, and the prepared call for tensors of this signature.
Ready: TypeAlias = tuple[Check, Run]


@dataclass(frozen=True, slots=True)
class Miss:
    """A call to which the plan applies, but for which there is no prepared call.

    Attributes:
        traced: the graph; None if its shapes are new.
        tensors: the tensors that the graph reads.
        kept: the objects that the function returns unchanged.
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
        call: the generated function. It takes the arguments and keyword arguments of a call, and returns the result of
            the fused function, or a Miss, or None if the plan does not apply.
        graphs: shapes -> Traced, for the runs that this plan covers.
        ready: the signatures that have prepared calls, without and with gradient recording: torch's guards do not
            distinguish these.
        leaf: the path through the function that the plan covers.
        asks: True if the function read the shape or the requires_grad of a tensor.
        text, values: the source of `call`, and the values of the run behind its names.
    """

    call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    graphs: Bounded[Any, Traced]
    ready: tuple[list[Ready], list[Ready]]
    leaf: Leaf
    asks: bool
    text: str
    values: dict[str, Any]

    def run(self, traced: Traced, miss: Miss) -> Any:
        """The function's result for a new signature; adds a prepared call for the signature where torch allows one."""
        prepared = getattr(traced.op, "prepared", None)  # of a FusedOp
        found: Run | None = None if prepared is None else prepared(miss.tensors)
        if found is not None:
            ready = self.ready[torch.is_grad_enabled()]
            if len(ready) < MAX_READY and is_plain() and (check := check_of(miss.compared)) is not None:
                ready.append((check, found))
        results = (traced.op if found is None else found)(*miss.tensors)
        return traced.result(results if type(results) is tuple else (results,), miss.kept)

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: TracedRun) -> bool:
        """Adds the shapes of a run that read no shape and otherwise matches this plan; False if it does not match."""
        if run.leaf is not self.leaf or run.traced is None or run.asks or self.asks:
            return False
        miss = self.call(args, kwargs)
        if type(miss) is not Miss or miss.traced is not None:
            return False
        self.graphs[tuple([t.shape for t in miss.tensors])] = run.traced
        return True

    def takes_in(self, other: Plan) -> bool:
        """Adds the graphs of another plan that is the same except for shapes; False if it is not the same."""
        if self.leaf is not other.leaf or self.text != other.text or self.values.keys() != other.values.keys():
            return False
        if not all(is_same(value, other.values[name]) for name, value in self.values.items()):
            return False
        for shapes, traced in other.graphs.items():
            self.graphs[shapes] = traced
        return True


#: Types that are compared by value, not by identity.
_VALUES = (bool, int, float, str, torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout)


def is_same(a: Any, b: Any) -> bool:
    """True for equal numbers, strings etc., and for identical objects; 0.0 is not -0.0, 1 is not 1.0."""
    if a is b or type(a) is not type(b):
        return a is b
    if type(a) is float:
        return bool(a.hex() == b.hex())
    if type(a) is Conditions:
        return bool(a.outcomes == b.outcomes)
    return type(a) in _VALUES and bool(a == b)


#: Arithmetic without a record, views, and functions that make a tensor from numbers.
_MORE = frozenset(
    (
        "tensor", "as_tensor", "to", "float", "double", "detach", "__rsub__", "__rdiv__", "__rtruediv__", "__rpow__",
        "__getitem__", "reshape", "view", "squeeze", "sum", "mean", "all", "any",
    )
)  # fmt: skip


def is_condition(call: EagerCall) -> bool:
    """True if a call is a Python branch on the value of a tensor."""
    return call.name == "__bool__" and type(call.result) is bool


def can_repeat(call: EagerCall) -> bool:
    """True if a call returns the same each time. One that draws numbers does not: a repeat would branch on others."""
    return call.func in table() or call.name in _MORE


def waits(tensor: torch.Tensor) -> bool:
    """True if reading a value of a tensor waits for a device."""
    return tensor.device.type != "cpu"


class Conditions:
    """Values of tensors on a device, compared with those of a run.

    `if a > 0:` in a function reads one value. On the CPU a plan reads it again at each call. On a GPU every such read
    is a copy and a wait. There a plan reads all of them together, and none as long as no tensor that they depend on
    was written to.

    Args:
        outcomes: the values in the run.

    A write that torch does not track, such as `p.data.add_()`, is not detected; autograd does not detect it either.
    """

    def __init__(self, outcomes: Sequence[bool]) -> None:
        self.outcomes = list(outcomes)
        self._seen: list[tuple[weakref.ref[torch.Tensor], int, int]] = []

    def hold(self, *sources: torch.Tensor) -> bool:
        """True if the values are those of the last read, because everything that they depend on is unchanged."""
        if len(self._seen) != len(sources):
            return False
        for (known, version, address), source in zip(self._seen, sources):
            if known() is not source or source._version != version or source.data_ptr() != address:
                return False
        return True

    def read(self, sources: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
        """True if the values, computed from these sources, are those of the run: one copy and one wait for all."""
        seen = [(weakref.ref(s), s._version, s.data_ptr()) for s in sources]
        found = torch.stack([v.detach().reshape(()).bool() for v in values]).tolist() == self.outcomes
        self._seen = seen if found else []
        return found
