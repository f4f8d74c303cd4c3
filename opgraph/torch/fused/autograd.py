"""The autograd nodes of fused calls. A backward pass is a fused call again, so that it can be differentiated too.

Calls under plain autograd have one node class for each signature, generated like the call itself (`recorder`): shapes,
places and the backward pass are fixed in it. `Fused` serves all other calls (library.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opgraph.runtime.providers.torch_internals import (
    SingleLevelFunction,
    dispatch_modes,
    enter_directly,
    forward_ad,
    keep,
)
from opgraph.runtime.providers.torch_prepared import (
    MAX_READY,
    Check,
    Run,
    Statements,
    Tensors,
    check_of,
    defined,
)
from opgraph.torch.fused.training import Training, runs_everything


@dataclass(frozen=True, slots=True)
class Trained:
    """A forward call that needs gradients, ready to run.

    Attributes:
        training: the tensors saved for backward, and the backward pass.
        run: computes the results of `training.forward`.
        count: the number of results for the caller.
        written: the input that the only result overwrites; None if it overwrites none.
    """

    training: Training
    run: Callable[..., Sequence[torch.Tensor]]
    count: int
    written: int | None = None

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The caller's results, connected to the inputs."""
        results = Fused.apply(self, *tensors)
        return (results,) if isinstance(results, torch.Tensor) else results[: self.count]


class Fused(SingleLevelFunction):  # type: ignore[misc]  # torch has no type for it
    """A node that holds the tensors of `save_for_backward` and shapes, and nothing else of the call.

    torch.func is handled elsewhere (library.py), so this is what torch calls a single-level function.
    """

    @staticmethod
    def forward(ctx: Any, trained: Trained, *tensors: torch.Tensor) -> Any:
        """Runs the call and saves the tensors that the plan lists."""
        training = trained.training
        results = trained.run(*tensors)
        if trained.written is not None:
            ctx.mark_dirty(tensors[trained.written])
        ctx.training = training
        ctx.shapes = [tensors[i].shape for i in training.shapes]
        ctx.result_shapes = [t.shape for t in results]
        fixed = training.fixed
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors)
            fixed = tuple(i for i, t in enumerate(results) if not t.is_floating_point())  # others may have tangents
        everything = (*tensors, *results)
        ctx.save_for_backward(*[everything[i] for i in training.kept])
        if fixed:
            ctx.mark_non_differentiable(*[results[i] for i in fixed])
        if len(results) == 1:
            return results[0]
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """The gradients of the inputs; with `create_graph`, connected to the saved tensors and the given gradients."""
        training = ctx.training
        wanted, _ = training.wanted(ctx)
        return None, *training.gradients(wanted, ctx.saved_tensors, ctx.shapes, grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> Any:
        """The tangents of the results."""
        return ctx.training.tangents(ctx.saved_tensors, tangents, ctx.result_shapes)


def recorder(training: Training, statements: Statements, names: Sequence[str], tensors: Tensors) -> Run:
    """Makes the function that runs a forward call on tensors of a signature and records its node.

    Args:
        statements: those of `training.forward`; `names` are the names of the tensors in them.
        tensors: an example.

    Returns: a function of the tensors. It returns a tensor if there is one result, else the results of
        `training.forward`.
    """
    results = statements.results
    everything = (*names, *results)
    lines = [*statements.lines, keep("ctx", [everything[i] for i in training.kept])]
    if training.fixed:
        lines.append(f"ctx.mark_non_differentiable({', '.join([results[i] for i in training.fixed])})")
    if len(results) > 1:
        lines.append("ctx.set_materialize_grads(False)")
    lines.append(f"return {', '.join(results)}")
    forward = defined("forward", ("ctx", *names), lines, statements.values)
    backward = _backward(training, [tensors[i].shape for i in training.shapes])
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": __name__}
    function: Any = type("Fused", (SingleLevelFunction,), members)
    enter_directly(function, backward)
    made: Run = function.apply
    return made


def _backward(training: Training, shapes: Sequence[Any]) -> Callable[..., Any]:
    """The backward pass of the nodes of one signature."""
    ready: list[tuple[Check, Run]] = []
    # To find out which gradients of leaves autograd.grad needs takes 15 us, because torch raises (see Training.wanted).
    # If a pass needed all of them, later passes compute all of them without the query.
    asks, may = training.asks, training.may

    def backward(ctx: Any, *grads: Any) -> Any:
        nonlocal asks
        saved = ctx.saved_tensors
        if not asks or runs_everything():
            wanted = may
        else:
            wanted, raised = training.wanted(ctx)
            asks = not (raised and wanted == may)
        if wanted == may and not _records() and forward_ad._current_level < 0 and not dispatch_modes():
            # None of these is a nested tensor: the results of the forward call are not, and torch compares gradients
            # with them.
            given = (*saved, *grads)
            for check, run in ready:
                if check(*given):
                    return run(*given)
            is_new = len(ready) < MAX_READY and not any(t is None for t in given)
            made = training.prepared(saved, shapes, grads) if is_new else None
            if made is not None:
                if (check_given := check_of(given)) is not None:
                    ready.append((check_given, made))
                return made(*given)
        return tuple(training.gradients(wanted, saved, shapes, grads))

    return backward


_records = torch.is_grad_enabled
