"""Compares an outcome with eager torch's, by the slack rule.

The truth is the same program in float64. An element of a result may differ from it by

- the bound of a single op (`specs/accuracy.md`),
- or twice eager's own error, here or at nearby arguments. Where sums cancel, eager's error is a matter of chance, so it
  is measured at several arguments;
- and, in addition, twice the effect of the last bit of the arguments: the truth is computed again with every argument
  moved by up to its rounding error.

An error of a neighboring element excuses nothing. For a float64 result the truth is eager's own, and eager's error is
measured one dtype below: as the error of the same program in float32, at arguments that float32 holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opinfo_calls import SPREAD, TURNED, Call
from opinfo_run import Outcome, run

#: The bound of a single op, in ulp.
BOUNDS = {torch.float16: 0.51, torch.bfloat16: 0.51, torch.float32: 3.0, torch.float64: 8.0}
#: The number of times that arguments are moved to measure the effect of their last bits.
MOVES = 4
#: The number of arguments at which eager is measured; the second one where an element is still off after the first.
MEASURED = (8, 64)
#: The relative distance of nearby arguments. Within it intermediate values are rounded in other ways (the last bit of
#: tanh(4) changes with the 11th bit of 4), and as many float32 numbers lie between for float64.
NEARBY = 2.0**-6
#: The ratio of float64's rounding error to float32's.
EPS_BELOW = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


class Judge:
    """Compares outcomes of one call with eager torch's.

    Args:
        program: the program as eager torch runs it.
        call: the arguments.
        derivative: see `run`.
        exact: the program that gives the truth in float64, where torch's own is not accurate enough.
        drawn: the program draws numbers that differ in float64: eager's results are the truth.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        call: Call,
        derivative: int = 0,
        exact: Callable[..., Any] | None = None,
        *,
        drawn: bool = False,
    ) -> None:
        self._drawn = drawn
        self._exact = exact or program
        self._program = program
        self._call = call
        self._derivative = derivative
        self.eager = run(program, call, derivative)
        self._truth: Outcome | None = None
        self._moved: dict[torch.dtype, list[Outcome]] = {}
        self._nearby: dict[torch.dtype, list[tuple[Outcome, Outcome]]] = {}

    def problem(self, got: Outcome, *, gradient_strides: bool = True) -> str:
        """A one-line description of an outcome's problem; empty if there is none.

        Args:
            gradient_strides: True if gradients must have eager's strides; AOTAutograd chooses its own. Those of turned,
                expanded or channels-last inputs never must: they have the inputs' strides, eager's the cotangents'.
        """
        gradient_strides &= not self._call.source.startswith((*TURNED, *SPREAD))
        if type(got.result) is not type(self.eager.result):
            return f"type: the result is a {type(got.result).__name__}, in torch a {type(self.eager.result).__name__}"
        mine, eager = _first(got.values), _first(self.eager.values)
        if list(mine) != list(eager):
            return f"results: {list(mine)}, in torch {list(eager)}"
        for name, value in got.values.items():
            told = self._differs(name, value, self.eager.values.get(name), gradient_strides or "gradient" not in name)
            if told:
                return told
        return ""

    def _differs(self, name: str, got: Any, eager: Any, strides: bool) -> str:
        if name.startswith("second derivative") and (got is None or eager is None):
            # The second derivative of a sum is None or zeros, depending on how its derivative is written.
            known = got if eager is None else eager
            return "" if known is None or not known.any() else f"{name}: {_short(got)}, in torch {_short(eager)}"
        if not isinstance(got, torch.Tensor) or not isinstance(eager, torch.Tensor):
            alike = type(got) is type(eager) and (got is eager or got == eager or got != got)
            return "" if alike else f"{name}: {_short(got)}, in torch {_short(eager)}"
        for what in ("dtype", "shape", "layout", "requires_grad"):
            mine, other = getattr(got, what), getattr(eager, what)
            if mine != other and not (what == "requires_grad" and "result" not in name):
                return f"{what} of {name}: {mine}, in torch {other}"
        if got.layout is not torch.strided:
            got, eager = got.to_dense(), eager.to_dense()
        elif strides and eager.numel() and _strides(got) != _strides(eager):
            return f"strides of {name}: {got.stride()} for shape {tuple(got.shape)}, in torch {eager.stride()}"
        got, eager = got.detach(), eager.detach()
        off = ~same(got, eager)
        if not off.any():
            return ""
        if got.dtype.is_floating_point and got.dtype in BOUNDS:
            off = self._beyond(name, got, eager, off)
        if not off.any():
            return ""
        place = tuple(int(i) for i in off.nonzero()[0])
        truth = self._value(self._true(), name, got)
        exact = "" if truth is None else f", truth {float(truth[place])!r}"
        return (
            f"value of {name}: {int(off.sum())} of {off.numel()} elements, the first at {list(place)}: "
            f"{got[place].item()!r}, in torch {eager[place].item()!r}{exact}"
        )

    def _beyond(self, name: str, got: torch.Tensor, eager: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
        """The elements of `off` whose error is larger than rounding explains."""
        truth = self._value(self._true(), name, got)
        if truth is None:
            return off
        off = off & ~same(got, truth.to(got.dtype))
        mine, allowed = (got.double() - truth).abs(), BOUNDS[got.dtype] * spacing(truth, got.dtype)
        off = off & ~(mine <= allowed)
        if self._drawn or not off.any():
            return off
        # A value that overflows inside torch may be finite here, and vice versa where both are lost.
        off = off & ~(truth.isfinite() & ~eager.isfinite() & ~got.isfinite())
        allowed = torch.maximum(allowed, 2 * finite(eager.double() - truth))
        off = off & ~(mine <= allowed)
        spread = torch.zeros_like(truth)
        for moved in self._moves(got.dtype) if off.any() else ():
            value = self._value(moved, name, got)
            if value is not None:
                spread = torch.maximum(spread, finite(value - truth))
                # At the edge of the domain the result may be the one beyond the edge.
                off = off & ~(same(got, value.to(got.dtype)) & ~truth.isfinite())
        for count in (0, *MEASURED):
            if off.any():
                allowed = torch.maximum(allowed, 2 * self._noise(name, got, count))
                off = off & ~(mine <= allowed + 2 * spread)
        return off

    def _noise(self, name: str, like: torch.Tensor, count: int) -> torch.Tensor:
        """Eager's largest error at `count` nearby arguments (for float64, derived from float32's)."""
        noise = torch.zeros(like.shape, dtype=torch.float64)
        for narrow, wide in self._measured(like.dtype, count)[:count]:
            a, b = self._value(narrow, name, like), self._value(wide, name, like)
            if a is None or b is None:
                continue
            by = finite(a - b)
            if like.dtype == torch.float64:  # float32 gives no information about numbers that it has no digits for
                by = torch.where(b.abs() < torch.finfo(torch.float32).tiny, 0.0, by * EPS_BELOW)
            noise = torch.maximum(noise, by)
        return noise

    def _measured(self, dtype: torch.dtype, count: int) -> list[tuple[Outcome, Outcome]]:
        """Eager's outcomes in a dtype (float32 for float64) and in float64, at the same nearby arguments."""
        is_wide = dtype == torch.float64
        truth = self._program if is_wide else self._exact
        found = self._nearby.setdefault(dtype, [])
        for seed in range(len(found), count):
            change, convert = rounded(mover(seed, NEARBY)), narrow_dtype if is_wide else None
            narrow = run(self._program, self._call, self._derivative, change, convert)
            change = rounded(mover(seed, NEARBY), and_widened=True)
            found.append((narrow, self._wide(truth, change)))
        return found

    def _true(self) -> Outcome:
        if self._truth is None:
            self._truth = self.eager if self._drawn else self._wide(self._exact, widened)
        return self._truth

    def _moves(self, dtype: torch.dtype) -> list[Outcome]:
        if dtype not in self._moved:
            changes = [mover(seed, torch.finfo(dtype).eps) for seed in range(MOVES)]
            self._moved[dtype] = [self._wide(self._exact, change) for change in changes]
        return self._moved[dtype]

    def _wide(self, program: Callable[..., Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Outcome:
        """A program's outcome in float64, which is also the default dtype, into which it converts integers."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return run(program, self._call, self._derivative, change, wide_dtype)
        finally:
            torch.set_default_dtype(before)

    def _value(self, outcome: Outcome, name: str, like: torch.Tensor) -> torch.Tensor | None:
        value = outcome.values.get(name)
        if not isinstance(value, torch.Tensor) or value.shape != like.shape or value.dtype.is_complex:
            return None
        return (value.detach() if value.layout is torch.strided else value.detach().to_dense()).double()


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """True where two tensors hold the same number, or both NaN."""
    return (a == b) | ((a != a) & (b != b))


def finite(difference: torch.Tensor) -> torch.Tensor:
    """The absolute value of a difference; 0 where it is NaN or infinite."""
    return difference.abs().nan_to_num(0.0, 0.0, 0.0)


def spacing(truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One ulp of a dtype at float64 numbers."""
    info = torch.finfo(dtype)
    magnitude = truth.abs().nan_to_num(1.0, 1.0).clamp(info.tiny, info.max)
    return torch.ldexp(torch.full_like(truth, info.eps), torch.frexp(magnitude)[1] - 1)


def widened(x: torch.Tensor) -> torch.Tensor:
    """A floating-point tensor in float64; complex ones in complex128, others unchanged."""
    return x.double() if x.dtype.is_floating_point else x.to(torch.complex128) if x.dtype.is_complex else x


def rounded(
    moved: Callable[[torch.Tensor], torch.Tensor], *, and_widened: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that moves a floating-point tensor and rounds it to its dtype, float64 to float32.

    Args:
        and_widened: the function converts the rounded numbers back to float64.
    """

    def changed(x: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if x.dtype == torch.float64 else x.dtype
        made = moved(x).to(dtype) if x.dtype.is_floating_point else moved(x)
        return widened(made) if and_widened else made

    return changed


def mover(seed: int, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that moves numbers by a relative amount of up to eps, and converts them to float64."""
    generator = torch.Generator().manual_seed(seed)

    def moved(x: torch.Tensor) -> torch.Tensor:
        if not x.dtype.is_floating_point or x.layout is not torch.strided:
            return widened(x)
        draw = 2 * torch.rand(x.shape, dtype=torch.float64, generator=generator) - 1
        return x.double() * (1 + eps * draw)

    return moved


def wide_dtype(value: Any) -> Any:
    """float64 for a floating-point dtype; other arguments unchanged."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def narrow_dtype(value: Any) -> Any:
    """float32 for float64; other arguments unchanged."""
    return torch.float32 if value is torch.float64 else value


def _first(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.startswith("second derivative")}


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}{list(value.shape)}"
    return repr(value)[:80]
