"""The sweep's ways of capture, through the public API only, and the programs that they capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from opinfo_calls import mapped
from torch import nn

import opgraph.torch as ogt

_COUNTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Program(nn.Module):
    """An op, alone or amid arithmetic: arithmetic around a call is fused even where the call is not.

    Args:
        op: the function that is called.
        amid: True to add arithmetic before and after the call. It is exact, and no number in it depends on dtypes.
    """

    def __init__(self, op: Callable[..., Any], amid: bool) -> None:
        super().__init__()
        self.op = op
        self.amid = amid

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The op's result; amid arithmetic minus twice the result, or its negation where it is a truth value."""
        if not self.amid:
            return self.op(*args, **kwargs)
        out = kwargs.pop("out", None)
        args, kwargs = mapped(before, args), mapped(before, kwargs)
        if out is not None:
            kwargs["out"] = out
        return mapped(behind, self.op(*args, **kwargs))


def before(x: torch.Tensor) -> torch.Tensor:
    """The same values, computed by ops. (A kernel needs at least two ops.)"""
    if x.layout is not torch.strided:
        return x
    if x.dtype == torch.bool:
        return x.logical_not().logical_not()
    return (x * 1).neg().neg() if x.dtype.is_floating_point or x.dtype in _COUNTS else x


def behind(y: torch.Tensor) -> torch.Tensor:
    """Minus twice the values, or their negation."""
    if y.layout is not torch.strided:
        return y
    if y.dtype == torch.bool:
        return y.logical_not()
    return -(y + y) if y.dtype.is_floating_point or y.dtype in _COUNTS else y


class Programs(nn.Module):
    """Several programs as one, which is captured once.

    Its forward takes (args, kwargs) of each program, and returns a list of their results.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        super().__init__()
        self.programs = nn.ModuleList(programs)

    def forward(self, calls: list[Any]) -> list[Any]:
        """The results of the programs."""
        results = []
        for program, (args, kwargs) in zip(self.programs, calls):
            results.append(program.forward(*args, **kwargs))
        return results


def _function(program: nn.Module) -> Callable[..., Any]:
    return ogt.fuse(lambda *args, **kwargs: program.forward(*args, **kwargs))


def _module(program: nn.Module) -> Callable[..., Any]:
    return ogt.fuse(program)


def _compile(program: nn.Module) -> Callable[..., Any]:
    return torch.compile(lambda *args, **kwargs: program.forward(*args, **kwargs), backend="opgraph")


def _sizes(program: nn.Module) -> Callable[..., Any]:
    return torch.compile(lambda *args, **kwargs: program.forward(*args, **kwargs), backend="opgraph", dynamic=True)


#: Ways of capture: functions from a program to its captured version.
WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "function": _function,
    "module": _module,
    "compile": _compile,
    "sizes": _sizes,
}

#: The ways that capture whole programs. Capture takes long, so many calls are captured at once. In the other ways one
#: captured function serves all calls of an op, one after the other.
TOGETHER = frozenset({"module", "compile", "sizes"})


def by_torch(way: str, program: nn.Module) -> Callable[..., Any]:
    """A program compiled by torch.compile with its backend "aot_eager", with dynamic sizes if the way has them."""
    return torch.compile(program, backend="aot_eager", dynamic=True if way == "sizes" else None)


def forget() -> None:
    """Drops all of Dynamo's captures; it keeps every capture until then.

    Where there are so many that it would leave a call to eager torch, it raises instead.
    """
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 100_000
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def nothing_compiled() -> AbstractContextManager[Any]:
    """A context in which a call raises if it would need a new compilation."""
    return torch.compiler.set_stance("fail_on_recompile")  # type: ignore[no-any-return]
