"""In place: a fused function writes its result into its argument, and a copy is kept where backward needs one.

What `x.relu_()` means to torch holds in every case: x has the result afterwards, whoever holds it sees it, and autograd
knows. Three ways lead there.
- Without gradients the kernel writes into x. Nothing is allocated.
- With gradients, where the backward pass does with the result (ReLU, LeakyReLU, Elu, Tanh, Sigmoid ...): the same, and
  the result is what is kept.
- With gradients that need x itself (Swish and most others): a copy of x is kept, as by torch's silu(inplace=True).
"""

from __future__ import annotations

from typing import Any

import torch

from opgraph.errors import InvalidArguments
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime.compile_graph import compile
from opgraph.torch.fused.op import FusedOp
from opgraph.torch.fused.training import Training
from opgraph.torch.tracing.results import Output


def overwrite(fused: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Gives x the values of `fused(x, *others)`; returns x.

    Args:
        fused: a function made by `fuse`; its result has the shape and dtype of x.

    Raises:
        InvalidArguments: x is a parameter (or another leaf that requires a gradient), while gradients are recorded.
        RuntimeError: torch does not allow to write into x: it shares memory with itself, its shape or dtype differ.
    """
    grad = torch.is_grad_enabled()
    if grad and x.requires_grad and x.is_leaf:
        raise InvalidArguments(
            "a leaf that requires a gradient cannot be overwritten",
            where="inplace=True",
            fix="use inplace=False, or call it under torch.no_grad()",
        )
    needs = grad and any(t.requires_grad for t in (x, *others))
    if not needs or not x._is_view():
        run = fused.tracer((x, *others), {})
        place = next((i for i, t in enumerate(run.tensors) if t is x), None)
        if place is not None and _fits(run.traced, place, x):
            op = FusedOp(run.traced.graph, layout=run.traced.layout) if run.traced.op is None else run.traced.op
            run.traced.op = op
            if not needs:
                _written(op, op.graph, run.tensors, place)
                return x
            training = op.training(tuple([t.requires_grad for t in run.tensors]))
            if place not in training.kept and len(training.forward.outputs) == 1:
                made: torch.Tensor = _Overwriting.apply(op, training, place, *run.tensors)  # type: ignore[no-untyped-call]
                return made
    return x.copy_(fused(x.clone(), *others))


def _fits(traced: Any, place: int, x: torch.Tensor) -> bool:
    """Whether the one result is like x, and x is memory without gaps or overlaps."""
    if type(traced.outputs) is not Output or len(traced.graph.outputs) != 1:
        return False
    out, own = traced.graph.outputs[0], traced.graph.inputs[place]
    dense = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    return dense and (own.dims, own.dtype) == (out.dims, out.dtype)


def _written(op: FusedOp, graph: Any, tensors: tuple[torch.Tensor, ...], place: int) -> None:
    device = tensors[place].device
    run = op.cached(("overwrite", id(graph), device), lambda: compile(graph, device=str(device)))
    target = tensors[place].detach()
    given = [target if t is tensors[place] else t.detach() for t in tensors]
    run(dict(zip(map(port_name, graph.inputs), given, strict=True)), out=target)


class _Overwriting(torch.autograd.Function):
    """The node of a call that wrote into one of its inputs; what it keeps are other inputs, and the result."""

    @staticmethod
    def forward(ctx: Any, op: FusedOp, training: Training, place: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Runs it, in place."""
        _written(op, training.forward, tensors, place)
        x = tensors[place]
        ctx.mark_dirty(x)
        ctx.training = training
        ctx.shapes = [tensors[i].shape for i in training.shapes]
        everything = (*tensors, x)
        ctx.save_for_backward(*[everything[i] for i in training.kept])
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """The gradients of the inputs."""
        training = ctx.training
        wanted, _ = training.wanted(ctx)
        return None, None, None, *training.gradients(wanted, ctx.saved_tensors, ctx.shapes, grads)
