"""Whether a custom autograd.Function that writes into its arguments still has the right gradient."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from opgraph.runtime.providers.torch_internals import tree_iter
from opgraph.torch.inplace.observed_run import FunctionCall

#: Step of the central difference and the error allowed, by dtype: about eps**(1/3) and its square, with room.
_STEPS = {torch.float64: (1e-6, 1e-5), torch.float32: (5e-3, 2e-2)}


def overwrites_its_own_input(call: FunctionCall) -> bool:
    """Whether the gradient is wrong as it is, and would be right if the overwritten arguments had been kept.

    The truth is a central difference in a random direction, in float64 (float32 where the Function takes nothing
    else). A Function whose gradient is not its derivative on purpose (a straight-through estimator) has it with neither
    value, so it is not blamed.
    """
    for dtype in _STEPS:
        try:
            return not _is_derivative(call, dtype, restore=False) and _is_derivative(call, dtype, restore=True)
        except Exception:  # whatever a user's Function raises on this dtype
            continue
    return False


def forgets_mark_dirty(call: FunctionCall) -> bool:
    """Whether an argument with a gradient is overwritten and autograd is not told."""
    args = _given(call, [a.detach().clone().requires_grad_() for a in _differentiable(call)])
    history = {id(a): a.grad_fn for a in args if isinstance(a, torch.Tensor) and a.requires_grad}
    before = {id(a): a.detach().clone() for a in args if id(a) in history}
    try:
        call.cls.apply(*args)  # type: ignore[attr-defined]  # an autograd.Function
    except Exception:
        return False
    changed = [a for a in args if id(a) in before and not torch.equal(before[id(a)], a.detach())]
    return any(a.grad_fn is history[id(a)] for a in changed)


def _differentiable(call: FunctionCall) -> list[torch.Tensor]:
    return [a for a in call.args if isinstance(a, torch.Tensor) and a.requires_grad]


def _given(call: FunctionCall, leaves: Any, dtype: torch.dtype | None = None) -> list[Any]:
    """Fresh arguments: copies of leaves for the differentiable ones, of another float dtype for other tensors."""
    waiting = iter(leaves)
    args: list[Any] = []
    for value in call.args:
        if not isinstance(value, torch.Tensor):
            args.append(value)
        elif value.requires_grad:
            args.append(next(waiting).clone())
        else:
            wide = value.dtype if dtype is None or not value.is_floating_point() else dtype
            args.append(value.to(wide, copy=True))
    return args


def _is_derivative(call: FunctionCall, dtype: torch.dtype, *, restore: bool) -> bool:
    """Whether the gradient is the derivative, where arguments that forward overwrote are put back before backward."""

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args = _given(call, leaves, dtype)
        copies = [a.detach().clone() if isinstance(a, torch.Tensor) else None for a in args]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            result = call.cls.apply(*args)  # type: ignore[attr-defined]  # an autograd.Function
        made = tuple([t.clone() for t in tree_iter(result) if isinstance(t, torch.Tensor) and t.is_floating_point()])
        for arg, copy in zip(args, copies):
            if restore and copy is not None:
                arg.data.copy_(copy)
        return made

    leaves = [a.detach().to(dtype, copy=True).requires_grad_() for a in _differentiable(call)]
    step, allowed = _STEPS[dtype]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of float32, for which the step and the error allowed are
        return torch.autograd.gradcheck(
            function, leaves, eps=step, atol=allowed, rtol=allowed, nondet_tol=math.inf,
            raise_exception=False, check_undefined_grad=False, fast_mode=True,
        )  # fmt: skip
