"""Branches of Python on values of tensors: which ones a plan may compare, and how those of a GPU are read.

`if a > 0:` in a function reads one value. On the CPU a plan reads it again at each call. On a GPU every such read is a
copy and a wait; there a plan reads all of them together, and none while nothing that they follow from was written to.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from opgraph.torch.tracing.calls import table
from opgraph.torch.tracing.tensor_calls import EagerCall

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

    Args:
        outcomes: of the run.

    Writing to a tensor's memory without torch's knowledge, as by `p.data.add_()`, goes unseen, as it does by autograd.
    """

    def __init__(self, outcomes: Sequence[bool]) -> None:
        self._outcomes = list(outcomes)
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
        found = torch.stack([v.detach().reshape(()).bool() for v in values]).tolist() == self._outcomes
        self._seen = seen if found else []
        return found
