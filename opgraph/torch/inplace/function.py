"""Whether a custom autograd.Function that writes into its arguments still has the right gradient."""

from __future__ import annotations

from typing import Any

import torch

from opgraph.torch.inplace.record import FunctionCall

#: Step of the central difference and the relative error allowed, by dtype: about eps**(1/3) and its square, with room.
_STEPS = {torch.float64: (1e-6, 1e-5), torch.float32: (5e-3, 2e-2)}


def overwrites_its_own_input(call: FunctionCall) -> bool:
    """Whether the gradient is wrong as it is, and would be right if the overwritten arguments had been kept.

    The truth is a central difference in a random direction, in float64 (float32 where the Function takes nothing
    else). A Function whose gradient is not its derivative on purpose (a straight-through estimator) has it with neither
    value, so it is not blamed.
    """
    for dtype in (torch.float64, torch.float32):
        try:
            as_is, as_kept, truth = _derivatives(call, dtype)
        except Exception:  # whatever a user's Function raises on this dtype
            continue
        allowed = _STEPS[dtype][1] * max(abs(truth), 1e-3)
        return abs(as_is - truth) > allowed and abs(as_kept - truth) <= allowed
    return False


def forgets_mark_dirty(call: FunctionCall) -> bool:
    """Whether an argument with a gradient is overwritten and autograd is not told."""
    args, _ = _inputs(call, None)
    history = {id(a): a.grad_fn for a in args if isinstance(a, torch.Tensor) and a.requires_grad}
    before = {id(a): a.detach().clone() for a in args if id(a) in history}
    try:
        call.cls.apply(*args)  # type: ignore[attr-defined]  # an autograd.Function
    except Exception:
        return False
    changed = [a for a in args if id(a) in before and not torch.equal(before[id(a)], a.detach())]
    return any(a.grad_fn is history[id(a)] for a in changed)


def _inputs(call: FunctionCall, dtype: torch.dtype | None) -> tuple[list[Any], list[torch.Tensor]]:
    """Fresh arguments (of another float dtype), and the leaves that the differentiable ones are copies of."""
    args: list[Any] = []
    leaves: list[torch.Tensor] = []
    for value in call.args:
        if isinstance(value, torch.Tensor):
            wide = value.detach().to(dtype) if dtype is not None and value.is_floating_point() else value.detach()
            leaf = wide.clone().requires_grad_(value.requires_grad)
            if value.requires_grad:
                leaves.append(leaf)
            args.append(leaf.clone() if value.requires_grad else leaf)
        else:
            args.append(value)
    return args, leaves


def _derivatives(call: FunctionCall, dtype: torch.dtype) -> tuple[float, float, float]:
    """Derivatives in a random direction: by backward as it is, with arguments restored, by difference."""
    random = torch.Generator().manual_seed(0)

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=random, dtype=torch.float64).to(tensor)

    _, leaves = _inputs(call, dtype)
    directions = [like(leaf) for leaf in leaves]
    weights: list[torch.Tensor] = []

    def outputs(args: list[Any]) -> list[torch.Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            result = call.cls.apply(*args)  # type: ignore[attr-defined]  # an autograd.Function
        made = result if isinstance(result, (tuple, list)) else [result]
        return [t for t in made if isinstance(t, torch.Tensor) and t.is_floating_point()]

    def backward(restore: bool) -> float:
        args, leaves = _inputs(call, dtype)
        copies = [a.detach().clone() if isinstance(a, torch.Tensor) else None for a in args]
        made = [t for t in outputs(args) if t.requires_grad]
        if not weights:
            weights.extend(like(t) for t in made)
        if restore:
            for arg, copy in zip(args, copies):
                if copy is not None:
                    arg.data.copy_(copy)
        found = torch.autograd.grad(made, leaves, weights, allow_unused=True)
        return sum(float((g * v).sum()) for g, v in zip(found, directions) if g is not None)

    def value(step: float) -> float:
        args, _ = _inputs(call, dtype)
        moving = iter(directions)
        with torch.no_grad():
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.requires_grad:
                    arg += step * next(moving)
            return sum(float((t * w).sum()) for t, w in zip(outputs(args), weights))

    as_is, as_kept = backward(False), backward(True)
    step = _STEPS[dtype][0]
    return as_is, as_kept, (value(step) - value(-step)) / (2 * step)
