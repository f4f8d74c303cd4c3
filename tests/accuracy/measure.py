"""Measures every form of every op in every float dtype, through the public API, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import points
import real
from ulp import errors

import opgraph as og
from opgraph.ir import dtypes, opdef
from opgraph.ir.opdef import OpDef, Port, all_ops
from opgraph.ops import samples

NARROW, WIDE = ("bf16", "f16"), ("f32", "f64")
FLOATS = (*NARROW, *WIDE)

#: The largest allowed error in ulp, by dtype. f16 and bf16 round an f32 once; f64 needs no tighter bound.
BOUNDS = {"bf16": 0.51, "f16": 0.51, "f32": 3.0, "f64": 8.0}
#: A gated unit is two ops: the bound of the activation, plus half an ulp for the product.
GATED = {"bf16": 0.51, "f16": 0.51, "f32": 3.5}
#: The number of f64 points of one form that are checked against mpmath.
REAL_POINTS = 2000


@dataclass(frozen=True, slots=True)
class Case:
    """One form of an op in one dtype: the given inputs, and attributes."""

    record: OpDef
    dtype: str
    ports: tuple[Port, ...]
    attrs: dict[str, Any]

    @property
    def label(self) -> str:
        """The op, with the inputs and attributes that distinguish the form."""
        defaults = self.record.default_attrs()
        shown = {k: v for k, v in self.attrs.items() if k not in defaults or defaults[k] != v or self._required(k)}
        inputs = [p.name for p in self.ports if p.optional]
        text = ", ".join([*inputs, *(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())])
        return f"{self.record.kind}({text})" if text else self.record.kind

    def _required(self, name: str) -> bool:
        attr = self.record.attr(name)
        return attr is not None and attr.required

    @property
    def bound(self) -> float:
        return BOUNDS[self.dtype]

    @property
    def is_derivative(self) -> bool:
        """True if it is f'(x) d, whose ulp is one of max(|f'|, |x f''|) |d|."""
        return bool(real.moved_inputs(self.record.kind))

    def graph(self) -> og.Graph:
        g = og.Graph()
        shape = (1, None) if self.record.channel_inputs else (None,)
        names = [p.type if p.type not in self.record.types else self.dtype for p in self.ports]
        ins = [g.input(f"x{i}", n, shape if i == 0 else (None,)) for i, n in enumerate(names)]
        g.add_op(self.record.kind, *ins, name="y", **self.attrs)
        return g.finalize()

    def feeds(self, columns: list[np.ndarray]) -> dict[str, np.ndarray]:
        shaped = [columns[0][None] if self.record.channel_inputs else columns[0], *columns[1:]]
        return {f"x{i}": c for i, c in enumerate(shaped)}


@dataclass(frozen=True, slots=True)
class Measured:
    """The largest error of one case."""

    case: Case
    points: int
    ulp: float
    at: tuple[Any, ...]
    got: Any
    truth: float

    def __str__(self) -> str:
        args = ", ".join(repr(a.item() if isinstance(a, np.generic) else a) for a in map(_plain, self.at))
        return (
            f"{self.case.label} {self.case.dtype}: {self.ulp:.4g} ulp at ({args}): {self.got!r}, truth {self.truth!r}"
        )


def _plain(value: Any) -> Any:
    return float(value) if not isinstance(value, np.bool_) else bool(value)


def is_measured(record: OpDef) -> bool:
    """True for ops with a computed float result. Casts, indices and copies are exact, and are tested as exact.

    Ops that depend on positions are tested elsewhere, against a reference that rounds as often.
    """
    return (
        record.is_pointwise
        and not record.is_cast
        and record.index_of is None
        and not record.by_position
        and not any(p.shape_only for p in record.inputs)
        and record.outputs[0].type in record.types
        and bool(set(FLOATS) & set(samples.dtypes_of(record)))
    )


def measured_ops() -> list[OpDef]:
    return [r for r in all_ops() if is_measured(r)]


def cases(record: OpDef, dtype: str) -> Iterator[Case]:
    """The forms of an op that compute differently; attributes that only affect the layout of operands are left out."""
    seen = set()
    for ports, attrs in samples.forms(record, dtype) if dtype in samples.dtypes_of(record) else ():
        text = record.cxx({p.name: p.name for p in ports}, attrs, repr)
        if text not in seen:
            seen.add(text)
            yield Case(record, dtype, ports, attrs)
            optional = [a.name for a in record.attrs if a.name in attrs and a.type == "f32"]
            if len(ports) > 1 and any(p.optional for p in ports) and optional:  # an input and an attribute together
                yield Case(record, dtype, ports, {**attrs, optional[0]: 0.75})


def columns_of(case: Case) -> list[np.ndarray]:
    """The arguments at which a case is measured."""
    columns = _columns_of(case)
    if case.attrs.get("use_dst"):  # f'(x) computed from f(x): use the x values of other ops
        forward = opdef.get(case.record.kind.removesuffix("Backward"), where="accuracy")
        assert forward.reference is not None
        attrs = {name: value for name, value in case.attrs.items() if forward.attr(name)}
        columns[0] = forward.reference(columns[0], **attrs)
    return columns


def _columns_of(case: Case) -> list[np.ndarray]:
    dtype = dtypes.get(case.dtype).numpy
    if case.is_derivative and case.dtype != "f64":  # all values, or the comb, times 1 and times arbitrary d
        line = points.every_16_bit_value(dtype) if case.dtype in NARROW else points.f32_line(case.record, case.attrs)
        whole = samples.arrays(case.record, case.ports, case.dtype, [(len(line),)] * len(case.ports), seed=10)
        grid = points.grid(case.record, case.ports, case.dtype, points.RANDOM // 4)
        ones = [line, np.ones_like(line), *whole[2:]]
        columns = [np.concatenate(c) for c in zip(ones, [line, *whole[1:]], grid, strict=True)]
        # Infinity times a derivative that f32 cannot distinguish from 0 is infinite or NaN.
        at = _arriving(case)
        small = np.all([np.abs(c.astype(np.float64)) < 8 for i, c in enumerate(columns) if i != at], axis=0)
        kept = np.isfinite(columns[at]) | small
        return [c[kept] for c in columns]
    if len(case.ports) > 1:
        count = REAL_POINTS // 2 if case.dtype == "f64" else points.RANDOM
        columns = points.grid(case.record, case.ports, case.dtype, count)
        if case.dtype == "f64":  # mpmath is slow: not every pair of specials
            keep = np.random.default_rng(4).permutation(len(columns[0]) - count)[: REAL_POINTS // 2]
            keep = np.concatenate([keep, np.arange(len(columns[0]) - count // 3 * 3, len(columns[0]))])
            columns = [c[keep] for c in columns]
        if case.is_derivative:  # f64: the last bit is not tested for products of three factors near the ends
            ordinary = [(c == 0) | ~np.isfinite(c) | ((abs(c) > 1e-100) & (abs(c) < 1e100)) for c in columns[1:]]
            columns = [c[np.all(ordinary, axis=0)] for c in columns]
        return columns
    if case.dtype in NARROW:
        return [points.every_16_bit_value(dtype)]
    if case.dtype == "f32":
        return [points.f32_line(case.record, case.attrs)]
    return [points.f64_line(case.record, case.attrs, REAL_POINTS)]


def measure(case: Case) -> Measured:
    """The largest error of a case.

    f16, bf16, f32: against the float64 reference. f64: against mpmath where it has an answer, and against the reference
    at infinite and NaN arguments and at poles.
    """
    columns = columns_of(case)
    graph = case.graph()
    feeds = case.feeds(columns)
    got = og.compile(graph)(feeds).ravel()
    truth = og.evaluate(graph, feeds).ravel()
    if case.dtype == "f64":
        found = errors_in_f64(case, columns, got, truth)
    else:
        found = errors(got, truth, 0.0, condition(case, columns), factor_of(case, columns))
    at = int(np.argmax(found))
    return Measured(case, len(got), float(found[at]), tuple(c[at] for c in columns), got[at], float(truth[at]))


def factor_of(case: Case, columns: list[np.ndarray]) -> np.ndarray | None:
    """The d of a derivative f'(x) d that is computed in f32."""
    if not case.is_derivative or case.dtype == "f64":
        return None
    return columns[_arriving(case)].astype(np.float64)


def _arriving(case: Case) -> int:
    """The position of d in a derivative f'(x) d."""
    (at,) = set(range(len(case.ports))) - set(real.moved_inputs(case.record.kind))
    return at


def condition(case: Case, columns: list[np.ndarray]) -> np.ndarray | float:
    """|x f''(x) d| of a derivative f'(x) d, over all inputs but d, by differences of the float64 reference; else 0.

    x moves by 2^-22, two ulp of f32, so that the rounding of a x + b to one side of a kink does not matter.
    """
    reference, wide = case.record.reference, [c.astype(np.float64) for c in columns]
    assert reference is not None
    step, total = 2.0**-22, np.zeros(len(columns[0]))
    for i in (i for i in real.moved_inputs(case.record.kind) if i < len(wide)):
        up, down = (
            reference(*[w * (1 + s) if k == i else w for k, w in enumerate(wide)], **case.attrs) for s in (step, -step)
        )
        moved = np.abs(up - down) / (2 * step)
        total += np.where(np.isfinite(moved), moved, 0.0)
    return total


def errors_in_f64(case: Case, columns: list[np.ndarray], got: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Errors of float64 results against mpmath, or against the reference where mpmath has no answer."""
    finite = np.flatnonzero(np.all([np.isfinite(c.astype(np.float64)) for c in columns], axis=0))
    high, low, scale = real.truth(case.record.kind, [c[finite] for c in columns], case.attrs)
    known = scale >= 0
    finite, high, low, scale = finite[known], high[known], low[known], scale[known]
    found = errors(got, reference)
    high = np.where(high == 0, np.copysign(high, reference[finite]), high)  # mpmath has no signed zeros
    found[finite] = errors(got[finite], high, low, scale)
    return found
