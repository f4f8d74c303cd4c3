"""Plans: what a function did in one run, as a check of what it read and the tensors to give to the graph.

A plan is a Python function, generated once: it compares numbers, globals, cells and attributes with those of the run
that it was made from and repeats what the run did on real tensors (views, arithmetic of parameters). What tensors are
like is then compared by torch (a signature, see opgraph/runtime/providers/torch_prepared.py); for a signature that was
seen before the prepared call is at hand. For another one, dtypes are compared and the graph is looked up by the shapes.
Where anything differs the function is run again; where that was only a shape, the plan learns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from opgraph.runtime.bounded import Bounded
from opgraph.runtime.providers.torch_prepared import MAX_READY, Check, Run, check_of, is_plain
from opgraph.torch.tracing.trace import Leaf, Traced
from opgraph.torch.tracing.trace import Run as TracedRun

#: A signature, and what is run on tensors of it.
Ready: TypeAlias = tuple[Check, Traced, Run]
#: What `plan(args, kwargs)` returns: the Traced, its tensors, what the function returns as it was, and what runs the
#: Traced; in place of that a tuple of the tensors whose signature is new. Where only the shapes are new: None, the
#: tensors, the shapes and None. Or None.
Answer: TypeAlias = tuple[Any, tuple[torch.Tensor, ...], tuple[Any, ...], Any] | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan.

    Attributes:
        check: the generated function.
        graphs: shapes -> Traced, of runs that did what this plan says.
        ready: the signatures for which there are prepared calls, outside and inside of what records gradients: torch's
            guards do not tell these apart.
        leaf: the way through the function that it stands for.
    """

    check: Callable[[tuple[Any, ...], dict[str, Any]], Answer]
    graphs: Bounded[Any, Traced]
    ready: tuple[list[Ready], list[Ready]]
    leaf: Leaf

    def run_of(self, traced: Traced, tensors: tuple[torch.Tensor, ...], compared: tuple[torch.Tensor, ...]) -> Run:
        """What runs a graph on tensors of a new signature, from now on at hand for it where it is a prepared call."""
        prepared = getattr(traced.op, "prepared", None)  # of a FusedOp
        found: Run | None = None if prepared is None else prepared(tensors)
        if found is None:
            run: Run = traced.op
            return run
        ready = self.ready[torch.is_grad_enabled()]
        if len(ready) < MAX_READY and is_plain() and (check := check_of(compared)) is not None:
            ready.append((check, traced, found))
        return found

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: TracedRun) -> bool:
        """Whether a run was one of this plan's but for its shapes, which the plan knows from now on."""
        answer = self.check(args, kwargs)
        if answer is None or answer[0] is not None or run.leaf is not self.leaf or run.traced is None:
            return False
        self.graphs[answer[2]] = run.traced
        return True
