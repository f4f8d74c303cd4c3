"""What a graph's results may be: the truth in f64, and how far rounding on the way may move each element.

The reference runs several times with every rounded value moved by random parts of its rounding error (Monte Carlo
arithmetic: Parker, 1997; Denis, de Oliveira Castro and Petit, Verificarlo, 2016). Elements whose results scatter, as at
the step of a Floor or after a cancellation, are held to that scatter; the others to a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import opgraph as og
from opgraph.ir import dtypes, opdef
from opgraph.runtime.reference import by_reference, evaluate

#: How often the perturbed reference runs, and how much further off than its results a result may be.
RUNS, SLACK = 3, 40.0
#: Besides, how many epsilons of the larger of 1 and the value: 0 but for torch's ops, which lose digits near 0;
#: at infinities these have rules of their own.
COARSE = 0.0


@dataclass
class Truth:
    """One output: its value in f64, and for each element how far a result may be; NaN where anything may come out.

    `signed` says where it is a zero of a known sign.
    """

    name: str
    dtype: str
    value: np.ndarray
    bound: np.ndarray
    signed: np.ndarray


def listed(results: Any) -> list[np.ndarray]:
    """Results as a list, whether there is one output or several."""
    return [np.asarray(r) for r in (results.values() if isinstance(results, dict) else [results])]


def truths(graph: og.Graph, feeds: Mapping[str, np.ndarray], seed: int = 0) -> list[Truth]:
    """The truth of every output, with bounds."""
    exact = listed(evaluate(graph, feeds))
    others = [listed(evaluate(graph, feeds, dtype=None))]
    others += [perturbed(graph, feeds, np.random.default_rng([seed, run])) for run in range(RUNS)]
    names = [str(t.name) if t.name else f"t{t.id}" for t in graph.outputs]
    # Sums begin with a zero of their own; torch's ops and libraries have rules of theirs.
    signs = not COARSE and all(opdef.get(op.kind, where="").is_pointwise for op in graph.ops)
    found = []
    for place, tensor in enumerate(graph.outputs):
        value, near = exact[place], [o[place] for o in others]
        signed = _signed(value, near) if signs and tensor.dtype in dtypes.FLOATS else np.zeros(value.shape, bool)
        found.append(Truth(names[place], tensor.dtype, value, _bound(value, near, tensor.dtype), signed))
    return found


def _signed(value: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    """Where a value is a zero of one sign, however the way there is rounded."""
    alike = [(o == 0) & (np.signbit(o) == np.signbit(value)) for o in others]
    return np.asarray((value == 0) & np.logical_and.reduce(alike))


def _bound(value: np.ndarray, others: list[np.ndarray], dtype: str) -> np.ndarray:
    if dtype not in dtypes.FLOATS:
        wide = value.astype(np.float64)  # f8 keeps its NaN
        same = [(o.astype(np.float64) == wide) | (np.isnan(wide) & np.isnan(o.astype(np.float64))) for o in others]
        return np.where(np.logical_and.reduce(same), 0.0, np.nan)
    with np.errstate(all="ignore"):
        spread = np.zeros(value.shape)
        for other in others:
            other = other.astype(np.float64)
            same = (other == value) | (np.isnan(other) & np.isnan(value))
            spread = np.maximum(spread, np.where(same, 0.0, np.abs(other - value)))  # NaN stays
        info = dtypes.get(dtype).numpy
        bound = SLACK * spread + 8 * epsilon(dtype) * np.abs(value) + 64 * _least(info)
        bound = bound + COARSE * epsilon(dtype) * np.maximum(np.abs(value), 1)
        unsure = (
            np.isnan(spread)
            | (np.isinf(spread))
            | ((COARSE > 0) & ~np.isfinite(value))
            | (np.abs(value) + bound > _greatest(info)) & np.isfinite(value)
        )
        return np.where(unsure, np.nan, np.where(np.isfinite(value), bound, 0.0))


def epsilon(dtype: str) -> float:
    """Of the arithmetic that results in a dtype."""
    return {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}[dtype]


def _least(info: np.dtype[Any]) -> float:
    return float(np.finfo(info).tiny) if info.itemsize > 2 else 1e-7 if info == np.float16 else 1e-38


def _greatest(info: np.dtype[Any]) -> float:
    return float(np.finfo(info).max) if info.kind == "f" else 3.3e38


def perturbed(graph: og.Graph, feeds: Mapping[str, np.ndarray], draw: np.random.Generator) -> list[np.ndarray]:
    """The outputs in f64, with every value moved by up to an epsilon of its dtype, relatively.

    Operands of what adds elements up are moved once more: that is what the order of a sum does. Ops that only move or
    choose elements make no errors. What is computed in 16 bits is moved for each reader: one in the same kernel has it
    as it was before it was rounded.
    """
    rounded: set[int] = set()
    values = {t.id: np.asarray(feeds[str(t.name)]) for t in graph.inputs}
    values.update((t.id, opdef.array_of(t)) for t in graph.constants)
    with np.errstate(all="ignore"):
        for id, value in values.items():
            if any(value.dtype == dtypes.get(f).numpy for f in dtypes.FLOATS):
                values[id] = value.astype(np.float64)
        for op in graph.ops:
            record = opdef.get(op.kind, where=op.label)
            for part in record.parts(op):
                own = opdef.get(part.kind, where=op.label)
                inner = own.family not in ("pointwise", "shape", "structural")
                read = [_moved(values[t.id], t.dtype, draw) if t.id in rounded else values[t.id] for t in part.inputs]
                given = [
                    _moved(v, "f32" if t.dtype in ("f16", "bf16") else t.dtype, draw)
                    if inner and t.dtype in dtypes.FLOATS
                    else v
                    for t, v in zip(part.inputs, read, strict=True)
                ]
                working = ["f64" if t.dtype in dtypes.FLOATS else t.dtype for t in part.outputs]
                for tensor, result in zip(part.outputs, by_reference(part, own, given, working), strict=True):
                    exact = own.family == "shape" or tensor.dtype not in dtypes.FLOATS or _chosen(result, given)
                    values[tensor.id] = result if exact else _moved(result, tensor.dtype, draw)
                    rounded |= {tensor.id} if not exact and tensor.dtype in ("f16", "bf16") else set()
    return [values[t.id] for t in graph.outputs]


def _moved(value: np.ndarray, dtype: str, draw: np.random.Generator) -> np.ndarray:
    return np.asarray(value * (1 + epsilon(dtype) * draw.uniform(-1, 1, value.shape)))


def _chosen(result: np.ndarray, given: list[np.ndarray]) -> bool:
    """Whether every element is one of an operand's, or of two signs, as after a Select or a Maximum."""
    equal = np.zeros(result.shape, bool)
    for array in given:
        if array.dtype != np.float64:
            continue
        try:
            wide = np.broadcast_to(array, result.shape)
        except ValueError:
            continue
        equal |= (result == wide) | (result == -wide) | (result != result)
    return bool(equal.all())


def problem(got: np.ndarray, want: Truth) -> str:
    """What is wrong with a result, in a line; empty where nothing is."""
    target = dtypes.get(want.dtype).numpy
    if got.dtype != target or got.shape != want.value.shape:
        return f"{want.name}: {got.dtype}{list(got.shape)} instead of {target}{list(want.value.shape)}"
    known = ~np.isnan(want.bound)
    if want.dtype not in dtypes.FLOATS:
        off = known & (got.astype(np.float64) != want.value.astype(np.float64)) & ~(got != got)
        off |= known & ((got != got) != (want.value != want.value))
    else:
        wide = got.astype(np.float64)
        with np.errstate(all="ignore"):
            near = np.abs(wide - want.value) <= want.bound
        off = known & ~(near | (wide == want.value) | (np.isnan(wide) & np.isnan(want.value)))
        off |= want.signed & (wide == 0) & (np.signbit(wide) != np.signbit(want.value))
    if not off.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(off)[0])
    return (
        f"{want.name}: {int(off.sum())} of {off.size} elements are wrong, the first at {list(place)}: "
        f"{got[place]!r} instead of {want.value[place]!r} (within {float(want.bound[place]):.3g})"
    )


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays agree bit for bit, but for what a NaN carries."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind in "biu":
        return bool(np.array_equal(a, b))
    whole = np.dtype(f"u{a.dtype.itemsize}")
    x, y = (
        np.ascontiguousarray(v).reshape(v.shape).view(whole) if v.ndim else np.asarray(v).reshape(1).view(whole)
        for v in (a, b)
    )
    nan = (a != a) & (b != b)
    return bool(((x == y).reshape(a.shape) | nan).all())
