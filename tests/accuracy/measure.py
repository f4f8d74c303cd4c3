"""What is measured: every form of every op in every float dtype, through the public API, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from accuracy import points, real
from accuracy.ulp import errors

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.opdef import OpDef, Port, all_ops
from opgraph.ops import samples

NARROW, WIDE = ("bf16", "f16"), ("f32", "f64")
FLOATS = (*NARROW, *WIDE)

#: What a result may be off, in ulp, by dtype. f16 and bf16 round an f32 once; f64 as far as nobody asks for more.
BOUNDS = {"bf16": 0.51, "f16": 0.51, "f32": 3.0, "f64": 8.0}
#: A gated unit is two ops: the bound of the activation, and half an ulp for the product.
GATED = {"bf16": 0.51, "f16": 0.51, "f32": 3.5}
#: f64 points checked against mpmath for one form.
REAL_POINTS = 2000


@dataclass(frozen=True, slots=True)
class Case:
    """One form of an op in one dtype: which inputs are given, and attributes."""

    record: OpDef
    dtype: str
    ports: tuple[Port, ...]
    attrs: dict[str, Any]

    @property
    def label(self) -> str:
        """The op with what distinguishes the form."""
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
    def is_condition_scaled(self) -> bool:
        return self.dtype == "f64" and self.record.kind in real.SLOPE

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
    """The worst of one case."""

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
    """Ops with a float result that is computed: casts and indices are exact, and tested so."""
    return (
        record.is_pointwise
        and not record.is_cast
        and record.index_of is None
        and record.outputs[0].type in record.types
        and bool(set(FLOATS) & set(samples.dtypes_of(record)))
    )


def measured_ops() -> list[OpDef]:
    return [r for r in all_ops() if is_measured(r)]


def cases(record: OpDef, dtype: str) -> Iterator[Case]:
    """The forms of an op that compute differently: attributes that only say where operands lie are left out."""
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
    dtype = dtypes.get(case.dtype).numpy
    if len(case.ports) > 1:
        count = REAL_POINTS // 2 if case.dtype == "f64" else points.RANDOM
        columns = points.grid(case.record, case.ports, case.dtype, count)
        if case.dtype == "f64":  # mpmath is slow: not all specials against all
            keep = np.random.default_rng(4).permutation(len(columns[0]) - count)[: REAL_POINTS // 2]
            keep = np.concatenate([keep, np.arange(len(columns[0]) - count // 3 * 3, len(columns[0]))])
            columns = [c[keep] for c in columns]
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
    found = errors_in_f64(case, columns, got, truth) if case.dtype == "f64" else errors(got, truth)
    at = int(np.argmax(found))
    return Measured(case, len(got), float(found[at]), tuple(c[at] for c in columns), got[at], float(truth[at]))


def errors_in_f64(case: Case, columns: list[np.ndarray], got: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Errors of float64 results against mpmath; against the reference where mpmath has no answer."""
    finite = np.flatnonzero(np.all([np.isfinite(c.astype(np.float64)) for c in columns], axis=0))
    high, low, scale = real.truth(case.record.kind, [c[finite] for c in columns], case.attrs)
    known = scale >= 0
    finite, high, low, scale = finite[known], high[known], low[known], scale[known]
    found = errors(got, reference)
    high = np.where(high == 0, np.copysign(high, reference[finite]), high)  # mpmath has one zero
    found[finite] = errors(got[finite], high, low, scale)
    return found
