"""The autograd node of a fused call. Its backward pass is a fused call again, so that it can be differentiated too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from opgraph.torch.fused.training import Training

Tensors = Sequence[torch.Tensor]


class Trained:
    """A forward call that needs gradients, ready to run.

    Attributes:
        training: what is kept, and the backward pass.
        run: makes the results of `training.forward`.
        count: how many of the results are the caller's.
    """

    __slots__ = ("count", "fixed", "is_plain", "kept", "run", "shapes", "single", "training")

    def __init__(self, training: Training, run: Callable[[Tensors], Sequence[torch.Tensor]], count: int) -> None:
        self.training = training
        self.run = run
        self.count = count
        self.kept = training.kept
        self.shapes = training.shapes
        self.fixed = training.fixed
        self.single = len(training.forward.outputs) == 1
        #: Every input is kept and nothing else, and there is one result.
        inputs = len(training.forward.inputs)
        self.is_plain = self.single and self.kept == tuple(range(inputs)) and not self.shapes and not self.fixed

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The caller's results, connected to the inputs."""
        results = record(self, *tensors)
        return (results,) if self.single else results[: self.count]


class Fused(_SingleLevelFunction):
    """One node for every fused call. It holds what `save_for_backward` got, shapes, and nothing else of the call's."""

    @staticmethod
    def forward(ctx: Any, trained: Trained, *tensors: torch.Tensor) -> Any:
        """Runs the call and keeps what the plan says."""
        results = trained.run(tensors)
        ctx.training = trained.training
        fixed = trained.fixed
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors)
            ctx.result_shapes = [t.shape for t in results]
            fixed = tuple(i for i, t in enumerate(results) if not t.is_floating_point())  # others may have tangents
        if trained.is_plain:
            ctx.save_for_backward(*tensors)
            return results[0]
        everything = (*tensors, *results)
        ctx.save_for_backward(*[everything[i] for i in trained.kept])
        ctx.shapes = [tensors[i].shape for i in trained.shapes]
        if fixed:
            ctx.mark_non_differentiable(*[results[i] for i in fixed])
        if trained.single:
            return results[0]
        ctx.set_materialize_grads(False)
        ctx.result_shapes = [t.shape for t in results]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """The gradients of the inputs; with `create_graph`, connected to what is kept and to the given ones."""
        return None, *ctx.training.gradients(ctx, grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> Any:
        """The tangents of the results."""
        return ctx.training.tangents(ctx.saved_tensors, tangents, ctx.result_shapes)


#: `Fused.apply(trained, *tensors)`, without what torch.func would need: that has its own way (library.py), so the class
#: is what torch calls one level's. A tensor where `trained.single`, else the results of `trained.training.forward`.
record: Callable[..., Any] = Fused.apply  # type: ignore[attr-defined]  # of C
