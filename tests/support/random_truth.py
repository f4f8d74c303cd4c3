"""The allowed results of a graph: the truth in f64, and the distance by which rounding may move each element.

The reference runs several times with every rounded value moved by random parts of its rounding error (Monte Carlo
arithmetic: Parker, 1997; Denis, de Oliveira Castro and Petit, Verificarlo, 2016). Elements whose results scatter, as at
the step of a Floor or after a cancellation, may differ by that scatter; the others by a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch

import opgraph as og
from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attrs, OpDef
from opgraph.partition.spelled import spelled_ops
from opgraph.runtime.providers.torch_dtypes import TORCH_DTYPES
from opgraph.runtime.reference import by_reference, evaluate
from opgraph.transforms.units import named

T = TypeVar("T")

#: Ops whose results are elements of an operand; below, with their derivatives, the ops that find the largest ones.
_CHOOSE = ("ReduceMax", "ReduceMin", "MaxPool", "MaxPoolTake")
_LARGEST = (*_CHOOSE, "MaxPoolBackward")

#: The number of errors drawn for the perturbed reference, which runs with each and with its opposite, so that both
#: sides of a step occur; and the factor by which a result may be further off than these runs.
RUNS, SLACK = 3, 40.0
#: The number of further errors for a result that seems wrong. An f64 moved by its rounding error moves by whole last
#: places, because the reference has no more digits, and the errors of several ops cancel in all of a few runs for one
#: element in some thousands, in f32 too. For other dtypes they are drawn until nothing is wrong, at most so many
#: times: a few runs reach the step of a comparison or a cast near a value for most elements, not for all of many.
MORE_RUNS, MOST_TURNS, TURNS_OF_WIDE = 24, 10, {"f64": 1, "f32": 1}
#: In addition, epsilons of the larger of 1 and the value: 0 except for torch's ops, which lose digits near 0 and have
#: rules of their own at infinities. Functions of so many instructions lose digits, sums and products do not.
COARSE, _COSTLY = 0.0, 8


@dataclass
class Truth:
    """One output: its value in f64, and for each element the allowed distance of a result; NaN if anything is allowed.

    `signed` marks zeros of a known sign. `unit` computes the same for the graph with its named units as single ops,
    which have a value where the spelled ones give NaN: x sigmoid(x) at -inf. Either result is allowed there, and so are
    its effects: a cast, or the branch of a comparison. None if no value of the graph is NaN.
    """

    name: str
    dtype: str
    value: np.ndarray
    bound: np.ndarray
    signed: np.ndarray
    unit: Callable[[], Truth | None] | None = None
    further: Callable[[int], np.ndarray] | None = None


def listed(results: Any) -> list[np.ndarray]:
    """Results as a list, whether there is one output or several."""
    return [np.asarray(r) for r in (results.values() if isinstance(results, dict) else [results])]


def truths(graph: og.Graph, feeds: Mapping[str, np.ndarray], seed: int = 0) -> list[Truth]:
    """The truth of every output, with bounds; computed once for a graph and values of its inputs."""
    told = tuple((str(t.name), feeds[str(t.name)].shape, feeds[str(t.name)].tobytes()) for t in graph.inputs)
    known = kept_with(graph, "truths", dict)
    if (told, seed) not in known:
        known[told, seed] = _of_either_form(graph, feeds, seed)
    return [replace(truth) for truth in known[told, seed]]


def kept_with(graph: og.Graph, name: str, make: Callable[[], T]) -> T:
    """The result of `make`, called once for a finalized graph and kept as long as the graph."""
    kept: dict[str, Any] = vars(graph).setdefault("kept_by_tests", {})
    if name not in kept:
        kept[name] = make()
    found: T = kept[name]
    return found


def _of_either_form(graph: og.Graph, feeds: Mapping[str, np.ndarray], seed: int) -> list[Truth]:
    copies = {name: array.copy() for name, array in feeds.items()}

    @cache
    def of_units() -> list[Truth]:
        nan: list[bool] = []
        evaluate(graph, copies, watch=lambda tensor, array: nan.append(bool((array != array).any())))
        units = named(graph)
        return _truths(units, copies, seed) if any(nan) and units != graph else []

    found = _truths(graph, feeds, seed)
    for place, truth in enumerate(found):
        truth.unit = lambda place=place: next(iter(of_units()[place:]), None)
    return found


def _truths(graph: og.Graph, feeds: Mapping[str, np.ndarray], seed: int) -> list[Truth]:
    exact = listed(evaluate(graph, feeds))
    others = [listed(evaluate(graph, feeds, dtype=None))]
    others += [perturbed(graph, feeds, Errors(seed, run, sign)) for run in range(RUNS) for sign in (1.0, -1.0)]
    names = [str(t.name) if t.name else f"t{t.id}" for t in graph.outputs]
    more = cache(partial(_further_bounds, graph, {name: array.copy() for name, array in feeds.items()}, seed, exact))
    # Sums begin with a zero of their own; torch's ops and libraries have rules of theirs.
    signs = not COARSE and all(opdef.get(op.kind, where="").is_pointwise for op in graph.ops)
    found = []
    for place, tensor in enumerate(graph.outputs):
        value, near = exact[place], [o[place] for o in others]
        signed = _signed(value, near) if signs and tensor.dtype in dtypes.FLOATS else np.zeros(value.shape, bool)
        bound = _bound(value, near, tensor.dtype)
        found.append(Truth(names[place], tensor.dtype, value, bound, signed))
        found[place].further = lambda turn, place=place: more(turn)[place]
    return found


def _further_bounds(
    graph: og.Graph, feeds: Mapping[str, np.ndarray], seed: int, exact: list[np.ndarray], turn: int
) -> list[np.ndarray]:
    """The bounds of every output with further errors, others in each turn."""
    first = RUNS + turn * MORE_RUNS
    bounds = [np.zeros(value.shape) for value in exact]
    for run in range(first, first + MORE_RUNS):
        made = perturbed(graph, feeds, Errors(seed, run, 1.0, further=True))
        for place, tensor in enumerate(graph.outputs):
            bounds[place] = np.maximum(bounds[place], _bound(exact[place], [made[place]], tensor.dtype))
    return bounds


def _signed(value: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    """Marks zeros that have one sign, however intermediate values are rounded."""
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
    """The epsilon of the arithmetic that results in a dtype."""
    return {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}[dtype]


def _least(info: np.dtype[Any]) -> float:
    return float(np.finfo(info).tiny) if info.itemsize > 2 else 1e-7 if info == np.float16 else 1e-38


def _greatest(info: np.dtype[Any]) -> float:
    return float(np.finfo(info).max) if info.kind == "f" else 3.3e38


class Errors:
    """Rounding errors, drawn at random: the same for one seed and run, or their opposites.

    Args:
        further: the run is one of those for a result that seems wrong. Then some f16 values are stored: those below its
            normal numbers become a multiple of the smallest one, or 0, for all elements alike. And an f64 may stay
            unchanged: the mean of equal numbers is that number, or one next to it.

    Attributes:
        apart: each reader of a value in 16 bits has it with its own rounding error; in half of the further runs all
            readers have the stored value, so that a value that passes a Clamp equals its operand.
        may_overflow: sums near the largest f32 are NaN, which no comparison distinguishes from a number; in half of the
            further runs they are the f64 result.
    """

    def __init__(self, seed: int, run: int, sign: float, *, further: bool = False) -> None:
        self._draw, self._sign, self._further = np.random.default_rng([seed, run]), sign, further
        self.apart = not further or bool(self._draw.random() < 0.5)
        self.may_overflow = not further or bool(self._draw.random() < 0.5)

    def moved(self, value: np.ndarray, dtype: str, least: float = 0.0) -> np.ndarray:
        """A value moved by half an epsilon to one: with less, some of many elements would seem exact in all runs.

        Args:
            least: an error that does not shrink near 0.
        """
        by = self._draw.uniform(-0.5, 0.5, value.shape)
        by = self._sign * (2 * by if self._further and dtype == "f64" else by + np.copysign(0.5, by))
        moved = value * (1 + epsilon(dtype) * by)
        if self._further and dtype == "f16" and self._draw.random() < 0.25:
            moved = np.where(np.abs(value) < np.finfo(np.float16).smallest_normal, value.astype(np.float16), moved)
        return np.asarray(moved + least * by if least else moved)


def perturbed(graph: og.Graph, feeds: Mapping[str, np.ndarray], errors: Errors) -> list[np.ndarray]:
    """The outputs in f64, with every value moved by up to an epsilon of its dtype, relatively.

    Norms and similar ops are computed as the smaller ops of their spelled form, as in kernels. Operands of ops that add
    elements up are moved once more, for the effect of the order of a sum. Ops that only move or choose elements make no
    errors, nor do sums of few integers. A value computed in 16 bits is moved for each reader, including ops that choose
    among such values: a reader in the same kernel has it as it was before rounding. A TypeCast is rounded for all.
    """
    loose: set[int] = set()
    values = {t.id: np.asarray(feeds[str(t.name)]) for t in graph.inputs}
    values.update((t.id, opdef.array_of(t)) for t in graph.constants)
    steps = kept_with(graph, "steps", lambda: _steps(graph))
    with np.errstate(all="ignore"):
        for id, value in values.items():
            values[id] = _wide(value)
        for step in steps:
            part, own = step.op, step.record
            values.update((id, value) for id, value in step.numbers if id not in values)
            read = [errors.moved(values[t.id], t.dtype) if t.id in loose else values[t.id] for t in part.inputs]
            counts = part.kind in ("ReduceSum", "SumTo") and _adds_few_integers(read[0], part.outputs[0].dtype)
            moved = [None] * len(read) if counts else step.moved
            given = [v if by is None else errors.moved(v, by) for by, v in zip(moved, read, strict=True)]
            made = by_reference(part, own, given, step.working)
            made = _bounded(part, own, given, step.working, made, may_overflow=errors.may_overflow)
            made = _by_torchs_convolution(part, own, given, made)
            made = _by_torchs_rules(part, own, given, made) if COARSE else made
            for tensor, result in zip(part.outputs, made, strict=True):
                chosen = (
                    own.family == "shape"
                    or own.kind in _CHOOSE
                    or tensor.dtype not in dtypes.FLOATS
                    or counts
                    or _chosen(result, given, part.attrs)
                )
                exact = chosen and not step.narrows
                values[tensor.id] = result if exact else errors.moved(result, tensor.dtype, _least_error(own, tensor))
                if errors.apart and tensor.dtype in ("f16", "bf16") and not step.narrows:
                    loose |= {tensor.id} if not exact or any(t.id in loose for t in own.read_inputs(part)) else set()
    return [values[t.id] for t in graph.outputs]


@dataclass(frozen=True)
class _Step:
    """One of the ops of a graph's spelled form.

    Attributes:
        numbers: ids and values of its operands that are numbers.
        moved: for each operand, the dtype whose error moves it once more, or None.
        working: the dtypes in which its results are computed.
        narrows: it casts to a float of fewer digits.
    """

    op: Op
    record: OpDef
    numbers: list[tuple[int, np.ndarray]]
    moved: list[str | None]
    working: list[str]
    narrows: bool


def _steps(graph: og.Graph) -> list[_Step]:
    found = []
    for op in (inner for whole in graph.ops for inner in spelled_ops(whole) or (whole,)):
        for part in opdef.of(op).parts(op):
            own = opdef.of(part)
            moved = [
                ("f32" if t.dtype in ("f16", "bf16") else t.dtype)
                if t.dtype in dtypes.FLOATS and _is_moved(own, t.dtype, own.inputs[min(i, len(own.inputs) - 1)].name)
                else None
                for i, t in enumerate(part.inputs)
            ]
            numbers = [(t.id, _wide(opdef.array_of(t))) for t in part.inputs if t.is_constant]
            working = ["f64" if t.dtype in dtypes.FLOATS else t.dtype for t in part.outputs]
            found.append(_Step(part, own, numbers, moved, working, _narrows(part)))
    return found


def _bounded(
    part: Op,
    record: OpDef,
    given: list[np.ndarray],
    working: list[str],
    results: list[np.ndarray],
    *,
    may_overflow: bool,
) -> list[np.ndarray]:
    """Results of an op, infinite where f32 cannot hold them; NaN where it may be unable to hold the sums.

    A kernel takes factors out of a sum: the sum of d (x - m) r is r times the sum of d (x - m), as in eager torch. So
    sums within three digits of the largest f32 may overflow.
    """
    limit = float(np.finfo(np.float32).max)
    near = limit / 1024
    if part.kind == "ReduceProd":
        results = [_in_any_order(part, record, given, working, results[0])]
    found = [
        np.where(np.abs(r) > limit, np.copysign(np.inf, r), r) if t.dtype in ("f32", "bf16", "f16") else r
        for t, r in zip(part.outputs, results, strict=True)
    ]
    adds = may_overflow and record.family in ("reduction", "sum", "linear", "convolution") and len(found) == 1
    largest = max((float(np.abs(g[~np.isnan(g)]).max(initial=0)) for g in given if g.dtype == np.float64), default=0.0)
    if adds and part.outputs[0].dtype in ("f32", "bf16", "f16") and largest * max(g.size for g in given) ** 2 > near:
        sums = by_reference(part, record, [np.abs(g) if g.dtype == np.float64 else g for g in given], working)[0]
        count = given[0].size // max(found[0].size, 1) if part.kind == "ReduceMean" else 1
        found[0] = np.where(np.abs(sums) * count > near, np.nan, found[0])
    return found


def _in_any_order(part: Op, record: OpDef, given: list[np.ndarray], working: list[str], made: np.ndarray) -> np.ndarray:
    """Products that depend on the order, because one part of them may overflow, vanish, or lose digits on the way.

    Both NaN and a number are possible where one part overflows, or is infinite, and another vanishes. There a number is
    returned for NaN and NaN for a number.
    """
    sum_of: Any = opdef.get("ReduceSum", where="").reference
    limits = np.finfo(np.float64)

    def total(x: np.ndarray) -> np.ndarray:
        return np.asarray(sum_of(x, *given[1:], **part.attrs))

    logs = np.log(np.abs(given[0]))
    smallest, largest = total(np.minimum(logs, 0)), total(np.maximum(logs, 0))
    overflows = largest > np.log(limits.max)
    meet = overflows & (smallest < np.log(limits.smallest_subnormal))
    (signs,) = by_reference(part, record, [np.sign(given[0]), *given[1:]], working)
    is_zero = (signs == 0) & (total(np.isinf(given[0]).astype(np.float64)) == 0)
    whole = np.where(is_zero, 0.0, signs * np.exp(total(logs)))
    on_the_way = np.isfinite(whole) & (overflows | (whole != 0) & (smallest < np.log(limits.smallest_normal)))
    either = meet | on_the_way
    return np.where(either & np.isnan(made), whole, np.where(either, np.nan, made))


def _by_torchs_convolution(
    part: Op, record: OpDef, given: list[np.ndarray], results: list[np.ndarray]
) -> list[np.ndarray]:
    """Results of a convolution; for bf16 operands with an infinity, NaN where torch's own are NaN.

    oneDNN multiplies an infinity next to a window by zeros. Other convolutions, including those without elements, are
    not computed in torch: their form there is opgraph's.
    """
    infinite = any(g.dtype == np.float64 and np.isinf(g).any() for g in given)
    if not infinite or part.kind != "Convolution" or part.outputs[0].dtype != "bf16" or not all(g.size for g in given):
        return results
    assert record.torch is not None
    arrays = [torch.from_numpy(np.array(g)).to(TORCH_DTYPES[t.dtype]) for g, t in zip(given, part.inputs, strict=True)]
    made = record.torch(torch, *arrays, **part.attrs)
    return [np.where(np.isnan(made.double().numpy()), np.nan, r) for r in results]


def _by_torchs_rules(part: Op, record: OpDef, given: list[np.ndarray], results: list[np.ndarray]) -> list[np.ndarray]:
    """Results of an op, NaN where torch's op makes NaN of an infinity: HardSwish of -inf is -inf times 0."""
    infinite = any(g.dtype == np.float64 and np.isinf(g).any() for g in given)
    if not infinite or not record.is_pointwise or record.torch is None or record.by_dtype or record.by_position:
        return results
    made = record.torch(torch, *(torch.from_numpy(np.array(g)) for g in given), **part.attrs)
    theirs = [np.isnan(t.numpy()) for t in (made if record.returns_several else (made,))]
    return [np.where(nan, np.nan, r) if r.dtype == np.float64 else r for r, nan in zip(results, theirs, strict=False)]


def _wide(value: np.ndarray) -> np.ndarray:
    is_float = any(value.dtype == dtypes.get(f).numpy for f in dtypes.FLOATS)
    return value.astype(np.float64) if is_float else value


def _is_moved(record: OpDef, dtype: str, name: str) -> bool:
    """True if the last bit of the operand of that name may be worth more than the result: for ops that add up, and
    where specs/accuracy.md states it. No order of a walk changes which element is the largest."""
    if record.kind in _LARGEST:
        return name == "diff_dst"
    if record.family not in ("pointwise", "shape", "structural"):
        return True
    is_derivative = any(p.name == "diff_dst" for p in record.inputs)
    return record.is_pointwise and (is_derivative or (dtype == "f64" and record.kind in ("Digamma", "Lgamma")))


def _least_error(record: OpDef, tensor: LogicalTensor) -> float:
    """The error of a result, however small the result is: torch's GELU of -6 is 0, because it subtracts from 1."""
    if not COARSE or not record.is_pointwise or record.cost < _COSTLY:
        return 0.0
    return epsilon("f64" if tensor.dtype == "f64" else "f32")


def _narrows(op: Op) -> bool:
    """True if an op casts to a float of fewer digits."""
    dtype, made = op.inputs[0].dtype if op.inputs else "", op.outputs[0].dtype
    is_cast = op.kind == "TypeCast" and dtype in dtypes.FLOATS and made in dtypes.FLOATS
    return is_cast and epsilon(made) > epsilon(dtype)


def _adds_few_integers(addends: np.ndarray, dtype: str) -> bool:
    """True if the sums of these numbers are exact in a dtype, in any order."""
    if dtype not in dtypes.FLOATS:
        return False
    whole = np.abs(addends)
    return bool(np.all(whole == np.floor(whole)) and whole.sum() <= 1 / epsilon(dtype))


def _chosen(result: np.ndarray, given: list[np.ndarray], attrs: Attrs) -> bool:
    """True if every element is one of an operand's or a bound, with either sign, as after a Select or a Clamp.

    A moved Clamp would differ from its operand, and its gradient would be 0 in every run.
    """
    equal = result == 0.0
    for number in attrs.values():
        if isinstance(number, float):
            equal = equal | (result == number)
    for array in given:
        if array.dtype != np.float64:
            continue
        try:
            wide = np.broadcast_to(array, result.shape)
        except ValueError:
            continue
        equal = equal | (result == wide) | (result == -wide) | (result != result)
    return bool(np.all(equal))


def problem(got: np.ndarray, want: Truth) -> str:
    """The error of a result, in one line; empty if there is none."""
    target = dtypes.get(want.dtype).numpy
    if got.dtype != target or got.shape != want.value.shape:
        return f"{want.name}: {got.dtype}{list(got.shape)} instead of {target}{list(want.value.shape)}"
    off = _off(got, want)
    for turn in range(TURNS_OF_WIDE.get(want.dtype, MOST_TURNS)):
        if want.further is None or not off.any():
            break
        want.bound = np.maximum(want.bound, want.further(turn))
        off = _off(got, want)
    unit = want.unit() if want.unit is not None and off.any() else None
    if unit is not None:
        off &= _off(got, unit)
    if not off.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(off)[0])
    return (
        f"{want.name}: {int(off.sum())} of {off.size} elements are wrong, the first at {list(place)}: "
        f"{got[place]!r} instead of {want.value[place]!r} (within {float(want.bound[place]):.3g})"
    )


def _off(got: np.ndarray, want: Truth) -> np.ndarray:
    """Marks the wrong elements of a result."""
    known = ~np.isnan(want.bound)
    if want.dtype not in dtypes.FLOATS:
        off = known & (got.astype(np.float64) != want.value.astype(np.float64)) & ~(got != got)
        return np.asarray(off | known & ((got != got) != (want.value != want.value)))
    wide = got.astype(np.float64)
    with np.errstate(all="ignore"):
        near = np.abs(wide - want.value) <= want.bound
    off = known & ~(near | (wide == want.value) | (np.isnan(wide) & np.isnan(want.value)))
    return np.asarray(off | want.signed & (wide == 0) & (np.signbit(wide) != np.signbit(want.value)))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """True if two arrays agree bit for bit, except for the payload of a NaN."""
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
