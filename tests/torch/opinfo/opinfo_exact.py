"""Ops whose exact results are not those of torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Ops that return uninitialized memory.
UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
#: Ops whose torch kernels read memory beyond an input that has an expanded axis.
READ_BEYOND_SPREAD = ("median", "nanmedian", "masked.median")
#: Ops that grow the memory of an expanded input. The additional memory is uninitialized.
GROWN_FROM_SPREAD = ("resize_", "resize_as_")
#: Ops that draw random numbers, which differ between dtypes. Eager's results are the truth.
DRAWN = (
    "cauchy", "exponential", "geometric", "log_normal", "normal", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "uniform",
)  # fmt: skip


def is_undefined(op: str, source: str) -> bool:
    """True if values that eager torch returns come from uninitialized memory.

    Args:
        source: the source of the call.
    """
    return op in UNDEFINED or (op in READ_BEYOND_SPREAD + GROWN_FROM_SPREAD and source.startswith("spread"))


def _trigamma(x: torch.Tensor) -> torch.Tensor:
    """trigamma in float64: its series at x + 20, and the recurrence down from there."""
    steps = sum((1 / (x + i) ** 2 for i in range(20)), torch.zeros_like(x))
    inverse = 1 / (x + 20)
    factors = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730)
    return steps + inverse + inverse**2 / 2 + sum(f * inverse ** (2 * k + 3) for k, f in enumerate(factors))


class _Exact(torch.autograd.Function):
    """A torch function with a more accurate derivative than torch's; called as apply(x, function, derivative)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any, derivative: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.derivative = derivative
        made: torch.Tensor = function(x)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.derivative(*ctx.saved_tensors), None, None


def _digamma(x: torch.Tensor) -> Any:
    return _Exact.apply(x, torch.digamma, _trigamma)


def _lgamma(x: torch.Tensor) -> Any:
    return _Exact.apply(x, torch.lgamma, _digamma)


def _polygamma(x: torch.Tensor, n: int, **kwargs: Any) -> torch.Tensor:
    return _trigamma(x.double()) if n == 1 else torch.polygamma(n, x)


#: Exact results of ops in float64, where torch's own are not accurate enough.
EXACT: dict[str, Callable[..., Any]] = {
    # In torch its gradient is 1/6 rounded to float32.
    "nn.functional.hardsigmoid": lambda x, inplace=False: torch.nn.functional.relu6(x + 3) / 6,
    # torch's 1 + erf(x) loses the tail.
    "special.ndtr": lambda x: torch.erfc(x * -(0.5**0.5)) / 2,
    # torch rounds float64 to float32 first, and then to 16 bits.
    "half": lambda x, **kwargs: x,
    "bfloat16": lambda x, **kwargs: x,
    # torch's trigamma has an error of 4e-11 in float64, and is the derivative of digamma.
    "digamma": _digamma,
    "lgamma": _lgamma,
    "polygamma": _polygamma,
    "special.polygamma": _polygamma,
}


def exact(op: str, form: str) -> Callable[..., Any] | None:
    """The exact float64 version of an op in one of its forms; None where torch's own is accurate enough."""
    found = EXACT.get(op)
    if found is None:
        return None

    def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        target = args[0] if form.startswith("in place") else out
        result = found(args[0].clone(), *args[1:], **kwargs)  # a copy: backward may need the argument
        return result if target is None else target.copy_(result)

    return call
