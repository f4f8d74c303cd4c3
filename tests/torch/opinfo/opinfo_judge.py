"""Whether an outcome is eager torch's, within the slack rule.

The truth is the same program in float64. A result may be at most twice as far from it as eager is, or within the bound
of a single op (`specs/accuracy.md`). What the last bit of an argument is worth is aside: the truth is computed again
with every argument moved by up to its rounding error, and an element may be off by as much as that moves it. How far
eager is off is chance where sums cancel: it is measured at such arguments as well.

Of a result in float64 eager's own is the truth, and how far off it is itself is measured one dtype below: as many ulp
as the same program in float32 is off, on arguments that float32 holds and that lie nearby.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opinfo_calls import Call
from opinfo_run import Outcome, run

#: The bound of a single op, in ulp.
BOUNDS = {torch.float16: 0.51, torch.bfloat16: 0.51, torch.float32: 3.0, torch.float64: 8.0}
#: How often arguments are moved.
RUNS = 4
#: How near arguments are, relatively, at which float32 is measured for float64: many of float32 lie between.
NEARBY = 2.0**-6
#: What rounding in float64 is worth of that in float32.
EPS_BELOW = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


class Judge:
    """Compares outcomes of one call with eager torch's.

    Args:
        program: as eager torch runs it.
        call: the arguments.
        derivative: see `run`.
        exact: the program that float64 knows the truth by, where torch's own is not near enough.
        drawn: the program draws numbers, others in float64: eager's are the truth.
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
        self._gradient_strides = True
        self._truth: Outcome | None = None
        self._moved: list[Outcome] = []
        self._nearby: dict[torch.dtype, list[tuple[Outcome, Outcome]]] = {}

    def problem(self, got: Outcome, *, gradient_strides: bool = True) -> str:
        """What is wrong with an outcome, in a line; empty where nothing is.

        Args:
            gradient_strides: whether gradients lie in memory as eager's do; AOTAutograd lays them out by itself.
        """
        self._gradient_strides = gradient_strides
        if type(got.result) is not type(self.eager.result):
            return f"type: the result is a {type(got.result).__name__}, in torch a {type(self.eager.result).__name__}"
        mine, eager = _first(got.values), _first(self.eager.values)
        if list(mine) != list(eager):
            return f"results: {list(mine)}, in torch {list(eager)}"
        for name, value in got.values.items():
            told = self._differs(name, value, self.eager.values.get(name))
            if told:
                return told
        return ""

    def _differs(self, name: str, got: Any, eager: Any) -> str:
        if name.startswith("second derivative") and (got is None or eager is None):
            # A sum has none, or zeros: that depends on how its derivative is written.
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
        elif eager.numel() and _strides(got) != _strides(eager) and (self._gradient_strides or "gradient" not in name):
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
        """Which elements of those that are off are off by more than rounding explains."""
        truth = self._value(self._true(), name, got)
        if truth is None:
            return off
        off = off & ~same(got, truth.to(got.dtype))
        unit = spacing(truth, got.dtype)
        mine, other = (got.double() - truth).abs(), (eager.double() - truth).abs()
        finite = truth.isfinite() & eager.isfinite()
        allowed = BOUNDS[got.dtype]
        if self._drawn:
            return off & ~(mine <= allowed * unit)
        if finite.any():
            allowed = max(allowed, 2 * float((other / unit)[finite].max()))
        if got.dtype == torch.float64:
            allowed = max(allowed, 3 * self._ulps_below(name, got))
        # What overflows on the way in torch may be finite here, and the other way round where both are lost.
        lost = truth.isfinite() & ~eager.isfinite() & ~got.isfinite()
        off = off & ~lost & ~(mine <= allowed * unit)
        if not off.any():
            return off
        spread = torch.zeros_like(truth)
        for moved in self._moves(got.dtype):
            value = self._value(moved, name, got)
            if value is None:
                return off
            by = (value - truth).abs()
            spread = torch.maximum(spread, torch.where(same(value, truth), torch.zeros_like(by), by))
        off = off & ~(mine <= allowed * unit + 2 * spread) & ~spread.isnan()
        return off & ~(mine <= 2 * self._noise(name, got)) if off.any() else off

    def _noise(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """How far eager is off at arguments that differ by their rounding: where sums cancel, that is chance."""
        noise = torch.zeros(like.shape, dtype=torch.float64)
        for narrow, wide in self._measured(like.dtype):
            a, b = self._value(narrow, name, like), self._value(wide, name, like)
            if a is not None and b is not None:
                noise = torch.maximum(noise, (a - b).abs().nan_to_num(0.0, 0.0, 0.0))
        return noise * (EPS_BELOW if like.dtype == torch.float64 else 1)

    def _measured(self, dtype: torch.dtype) -> list[tuple[Outcome, Outcome]]:
        """Eager in a dtype (of float64, in float32) and in float64, at the same arguments nearby."""
        if dtype not in self._nearby:
            is_wide = dtype == torch.float64
            truth = self._program if is_wide else self._exact
            near = NEARBY if is_wide else torch.finfo(dtype).eps
            self._nearby[dtype] = [
                (
                    run(self._program, self._call, self._derivative, rounded(mover(seed, near))),
                    run(truth, self._call, self._derivative, rounded(mover(seed, near), and_widened=True), wide_dtype),
                )
                for seed in range(2 * RUNS)
            ]
        return self._nearby[dtype]

    def _true(self) -> Outcome:
        if self._truth is None:
            self._truth = (
                self.eager if self._drawn else run(self._exact, self._call, self._derivative, widened, wide_dtype)
            )
        return self._truth

    def _ulps_below(self, name: str, like: torch.Tensor) -> float:
        """How far eager is off in float32, where float64 knows the truth."""
        ulps = 0.0
        for narrow, wide in self._measured(torch.float64):
            a, b = self._value(narrow, name, like), self._value(wide, name, like)
            if a is not None and b is not None:
                off = ((a - b).abs() / spacing(b, torch.float32))[a.isfinite() & b.isfinite()]
                ulps = max(ulps, float(off.max()) if off.numel() else 0.0)
        return ulps

    def _moves(self, dtype: torch.dtype) -> list[Outcome]:
        if not self._moved:
            for seed in range(RUNS):
                change = mover(seed, torch.finfo(dtype).eps)
                self._moved.append(run(self._program, self._call, self._derivative, change, wide_dtype))
        return self._moved

    def _value(self, outcome: Outcome, name: str, like: torch.Tensor) -> torch.Tensor | None:
        value = outcome.values.get(name)
        if not isinstance(value, torch.Tensor) or value.shape != like.shape or value.dtype.is_complex:
            return None
        return (value.detach() if value.layout is torch.strided else value.detach().to_dense()).double()


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors hold the same number, or both none."""
    return (a == b) | ((a != a) & (b != b))


def spacing(truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One ulp of a dtype at float64 numbers."""
    info = torch.finfo(dtype)
    magnitude = truth.abs().nan_to_num(1.0, 1.0).clamp(info.tiny, info.max)
    return torch.ldexp(torch.full_like(truth, info.eps), torch.frexp(magnitude)[1] - 1)


def widened(x: torch.Tensor) -> torch.Tensor:
    """A tensor of floats in float64, others as they are."""
    return x.double() if x.dtype.is_floating_point else x.to(torch.complex128) if x.dtype.is_complex else x


def rounded(
    moved: Callable[[torch.Tensor], torch.Tensor], *, and_widened: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that moves a tensor of floats and rounds it to its dtype, float64 to float32.

    Args:
        and_widened: the numbers are given in float64 again.
    """

    def changed(x: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if x.dtype == torch.float64 else x.dtype
        made = moved(x).to(dtype) if x.dtype.is_floating_point else moved(x)
        return widened(made) if and_widened else made

    return changed


def mover(seed: int, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that moves numbers by up to eps, relatively, and makes them float64."""
    generator = torch.Generator().manual_seed(seed)

    def moved(x: torch.Tensor) -> torch.Tensor:
        if not x.dtype.is_floating_point or x.layout is not torch.strided:
            return widened(x)
        draw = 2 * torch.rand(x.shape, dtype=torch.float64, generator=generator) - 1
        return x.double() * (1 + eps * draw)

    return moved


def wide_dtype(value: Any) -> Any:
    """A dtype of floats as float64, other arguments as they are."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _first(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.startswith("second derivative")}


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}{list(value.shape)}"
    return repr(value)[:80]
