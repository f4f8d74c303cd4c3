"""Plans: what a function did in one run, as a check of what it read and the tensors to give to the graph.

A plan is a Python function, generated once: it compares dtypes, numbers, globals, cells and attributes with those of
the run that it was made from, repeats what the run did on real tensors (views, arithmetic of parameters), and looks
up the graph by the shapes. Where anything differs the function is run again; where that was only a shape, the plan
learns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opgraph.runtime.bounded import Bounded
from opgraph.torch.tracing.trace import Leaf, Run, Traced

#: What `plan(args, kwargs)` returns: the Traced, its tensors and what the function returns as it was; or, where only
#: the shapes are new, None, the tensors and the shapes; or None.
Answer = tuple[Any, tuple[torch.Tensor, ...], tuple[Any, ...]] | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan.

    Attributes:
        check: the generated function.
        graphs: shapes -> Traced, of runs that did what this plan says.
        leaf: the way through the function that it stands for.
    """

    check: Callable[[tuple[Any, ...], dict[str, Any]], Answer]
    graphs: Bounded[Any, Traced]
    leaf: Leaf

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> bool:
        """Whether a run was one of this plan's but for its shapes, which the plan knows from now on."""
        answer = self.check(args, kwargs)
        if answer is None or answer[0] is not None or run.leaf is not self.leaf or run.traced is None:
            return False
        self.graphs[answer[2]] = run.traced
        return True
