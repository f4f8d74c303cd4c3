"""The check before timing: a call is compared with the entry's formula, evaluated in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import opgraph as og
from opgraph.bench.case import Case, as_numpy
from opgraph.ir import dtypes

#: Up to this number of elements, all of them and sums over all of them are checked; beyond it, rows at both ends.
WHOLE = 1 << 20
#: Rows at each end; for one-dimensional spaces, elements.
ROWS, ELEMENTS = 4, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The error of a call's results.

    Attributes:
        off: the largest difference, in units in the last place at the output's largest true value.
        wrong: what is wrong with it. Empty if half of the dtype's digits are right everywhere: the same function
            reaches that, another one does not. Where ops cancel, it is also empty if as many digits are right as when
            the formula is evaluated op by op in the dtype, give or take one bit.
    """

    off: float
    wrong: str = ""


class Truth:
    """The true outputs of a case, or of rows at both ends of it, computed before anything overwrites an input."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._rounded: dict[str, np.ndarray] | None = None
        rows = case.space[0]
        ends = ELEMENTS if len(case.space) == 1 else ROWS
        whole = case.elements <= WHOLE or rows <= 2 * ends
        self._rows = None if whole else np.r_[0:ends, rows - ends : rows]
        shared = [o.name for o in case.entry.operands if not o.has_rows()]
        feeds = {name: _taken(a, None if name in shared else self._rows) for name, a in case.feeds.items()}
        space = case.space if self._rows is None else (len(self._rows), *case.space[1:])
        self._graph = case.graph if self._rows is None else case.entry.graph(space, case.dtype, case.direction)
        if not {t.name for t in self._graph.inputs} <= feeds.keys():  # training of so few rows would save other values
            self._graph = case.entry.gradient(space, case.dtype)
        # Copies: an in-place entry overwrites its input.
        self._feeds = {name: a.copy() for name, a in feeds.items()} if case.entry.in_place else feeds
        outputs = self._evaluated("f64")
        sums = {f"d_{name}" for name in shared}
        # The rows at both ends cannot check sums over all rows.
        self._true = {n: a for n, a in outputs.items() if self._rows is None or n not in sums}
        # An in-place entry starts from the same values for all peers.
        self._before = as_numpy(case.inputs[0]).copy() if case.entry.in_place else None

    def restore(self) -> None:
        """Restores the inputs, and fills all results with NaN."""
        for out in self._case.outs.values():
            out[...] = math.nan
        if self._before is not None:
            target = self._case.inputs[0]
            target[...] = self._before if isinstance(target, np.ndarray) else _like(self._before, target)

    def _evaluated(self, dtype: str | None) -> dict[str, np.ndarray]:
        found = og.evaluate(self._graph, self._feeds, dtype=dtype)
        return found if isinstance(found, dict) else {next(iter(self._case.outs)): found}

    def _rounded_apart(self, name: str) -> float:
        """The error of the formula if every op's result is rounded to the dtype."""
        if self._rounded is None:
            self._rounded = self._evaluated(None)
        return _apart(self._rounded[name].astype(np.float64), self._true[name], self._case.dtype)

    def check(self, results: Mapping[str, Any]) -> Checked:
        """Compares the results of one call, by name."""
        off, wrong = 0.0, ""
        for name, true in self._true.items():
            got = _taken(results[name], self._rows).astype(np.float64)
            if got.shape != true.shape:
                return Checked(off=math.inf, wrong=f"{name} has shape {list(got.shape)}, not {list(true.shape)}")
            apart = _apart(got, true, self._case.dtype)
            if not apart <= half_the_digits(self._case.dtype) and not apart <= 2 * self._rounded_apart(name):
                wrong = wrong or f"{name} is {apart:.3g} ulp of its largest value away from the truth"
            off = max(off, apart)
        return Checked(off=off, wrong=wrong)


def _taken(array: Any, rows: np.ndarray | None) -> np.ndarray:
    if rows is None:
        return as_numpy(array)
    half = len(rows) // 2  # slices, so that only these are copied from an array on a GPU
    return np.concatenate([as_numpy(array[:half]), as_numpy(array[-half:])])


def _apart(got: np.ndarray, true: np.ndarray, dtype: str) -> float:
    """The largest difference in units in the last place at the largest true number; inf if a difference is not finite,
    unless result and truth are the same there (a norm of a negative variance, drawn at random)."""
    largest = float(np.abs(true[np.isfinite(true)]).max(initial=0.0))
    unit = largest * float(ml_dtypes.finfo(dtypes.get(dtype).numpy).eps)  # type: ignore[no-untyped-call]
    same = (got == true) | (np.isnan(got) & np.isnan(true))
    with np.errstate(invalid="ignore"):
        apart = float(np.where(same, 0.0, np.abs(got - true)).max(initial=0.0))
    return (apart / unit if unit else apart) if math.isfinite(apart) else math.inf


def half_the_digits(dtype: str) -> float:
    """The error if half of a dtype's digits are right, in units in the last place."""
    return float(2.0 ** (ml_dtypes.finfo(dtypes.get(dtype).numpy).nmant / 2))  # type: ignore[no-untyped-call]


def _like(array: np.ndarray, target: Any) -> Any:
    from opgraph.runtime.providers.torch import from_numpy

    return from_numpy(array).to(target.device)


def far_off(
    results: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray], types: Mapping[str, str]
) -> tuple[float, str]:
    """The error of a model's outputs, in units in the last place of the largest, and what is wrong."""
    off, wrong = 0.0, ""
    for name, true in truth.items():
        if types[name] not in dtypes.FLOATS:
            wrong = wrong or ("" if np.array_equal(results[name], true) else f"{name} differs")
            continue
        apart = _apart(np.asarray(results[name]).astype(np.float64), true, types[name])
        if not apart <= half_the_digits(types[name]):
            wrong = wrong or f"{name} is {apart:.3g} ulp of its largest value away from the truth"
        off = max(off, apart)
    return off, wrong
