"""Formulas that are written once for all peers: recorded as a list of steps, or called with a library's functions.

A formula is a function of a vocabulary and arrays: `lambda m, x: x * m.Sigmoid(x)`. For libraries that compute eagerly
(torch, NumPy, CuPy), the vocabulary is a module with these functions. Peers that write text or build a graph read the
recorded steps, which are named by opgraph's kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Formula: TypeAlias = Callable[..., Any]


class Vocabulary(Protocol):
    """The functions that a formula may use besides + - * / < <= > and the minus sign.

    `Clamp` takes bounds by keyword (min, max); `SoftMax`, `LayerNorm` and `RMSNorm` work along the last axis.
    """

    Sigmoid: Callable[[Any], Any]
    Tanh: Callable[[Any], Any]
    Exp: Callable[[Any], Any]
    Erf: Callable[[Any], Any]
    SoftPlus: Callable[[Any], Any]
    Sqrt: Callable[[Any], Any]
    Abs: Callable[[Any], Any]
    Pow: Callable[[Any, Any], Any]
    Select: Callable[[Any, Any, Any], Any]
    Clamp: Callable[..., Any]
    SoftMax: Callable[[Any], Any]
    LayerNorm: Callable[[Any, Any, Any], Any]
    RMSNorm: Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One op: its kind, its operands (names or numbers), the name of its result, and its attributes."""

    kind: str
    args: tuple[str | float, ...]
    result: str
    attrs: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class Recorder:
    """A vocabulary that records the calls of its functions."""

    steps: list[Step] = field(default_factory=list)

    def record(self, kind: str, *args: Any, **attrs: float) -> Term:
        """Adds a step."""
        result = f"t{len(self.steps)}"
        given = tuple(a.name if isinstance(a, Term) else float(a) for a in args)
        self.steps.append(Step(kind, given, result, tuple(attrs.items())))
        return Term(self, result)

    def __getattr__(self, kind: str) -> Callable[..., Term]:
        if not kind[:1].isupper():
            raise AttributeError(kind)
        return lambda *args, **attrs: self.record(kind, *args, **attrs)


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A value of a formula that is being recorded."""

    recorder: Recorder
    name: str

    def __add__(self, other: Any) -> Term:
        return self.recorder.record("Add", self, other)

    def __radd__(self, other: Any) -> Term:
        return self.recorder.record("Add", other, self)

    def __sub__(self, other: Any) -> Term:
        return self.recorder.record("Subtract", self, other)

    def __rsub__(self, other: Any) -> Term:
        return self.recorder.record("Subtract", other, self)

    def __mul__(self, other: Any) -> Term:
        return self.recorder.record("Multiply", self, other)

    def __rmul__(self, other: Any) -> Term:
        return self.recorder.record("Multiply", other, self)

    def __truediv__(self, other: Any) -> Term:
        return self.recorder.record("Divide", self, other)

    def __rtruediv__(self, other: Any) -> Term:
        return self.recorder.record("Divide", other, self)

    def __neg__(self) -> Term:
        return self.recorder.record("Neg", self)

    def __gt__(self, other: Any) -> Term:
        return self.recorder.record("Greater", self, other)

    def __lt__(self, other: Any) -> Term:
        return self.recorder.record("Less", self, other)

    def __le__(self, other: Any) -> Term:
        return self.recorder.record("LessOrEqual", self, other)


def recorded(formula: Formula, names: Sequence[str]) -> tuple[Step, ...]:
    """The steps of a formula with inputs of these names; the result of the last step is the formula's."""
    recorder = Recorder()
    formula(recorder, *(Term(recorder, name) for name in names))
    return tuple(recorder.steps)
