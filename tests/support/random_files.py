"""Random graphs through ONNX files: a saved graph computes the same, here and in onnxruntime."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from model_checks import by_evaluator, by_onnxruntime
from random_scenario import Scenario
from random_truth import Truth, epsilon, listed, problem, truths

import opgraph as og
from opgraph.errors import OpGraphError
from opgraph.ir import dtypes
from opgraph.runtime.reference import evaluate

#: A runtime rounds each op's result, f16 and bf16 in sums too; some of its f64 ops compute in f32.
_WIDER = 64.0


def files(found: Scenario, rng: random.Random) -> Iterator[str]:
    """Problems of saving the graph of a scenario to ONNX, reading it again, and running it in onnxruntime."""
    graph, feeds = found.graph, found.feeds[0]
    try:
        want = truths(graph, feeds)
    except OpGraphError:
        return
    form = rng.choice(("auto", "auto", "decomposed", "function", "contrib"))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "m.onnx"
        try:
            og.onnx.save(graph, path, form=form)
        except OpGraphError as error:
            assert len(str(error).splitlines()) == 3, str(error)
            if path.exists():
                yield f"{form}: refused, but a file was written"
            return
        again = og.onnx.load(path)
        model = onnx.load(path)
    names = [str(t.name) for t in again.inputs]
    if len(names) != len(graph.inputs):
        yield f"{form}: {len(names)} inputs instead of {len(graph.inputs)}"
        return
    given = {n: feeds[str(t.name)] for n, t in zip(names, graph.inputs, strict=True)}
    for what, read in ((form, again), (f"{form}, library ops as native ones", None)):
        try:
            read = og.onnx.load(model, library=True) if read is None else read
            results = listed(evaluate(read, given))
        except OpGraphError as error:
            yield f"{what}: what was written is refused: {error}"
            continue
        yield from (f"{what}, read again: {p}" for p in _problems(results, want))
    results = by_onnxruntime(model, {n: np.array(a, order="C") for n, a in given.items()})
    coarse = [_by_others(truth, graph) for truth in want]
    found_there = [] if results is None or _is_left_open(graph, want) else list(_problems(results, coarse))
    if found_there:  # casts and bounds of NaN and of large numbers differ between runtimes
        other = by_evaluator(model, given)
        if other is not None and any(np.isinf(a).any() for a in given.values() if a.dtype.kind == "f"):
            # The ops of a decomposed unit, such as SwishBackward, may make NaN of an infinity: inf times 0.
            coarse = [replace(t, bound=np.where(np.isnan(o), np.nan, t.bound)) for t, o in zip(coarse, other)]
            found_there = list(_problems(results, coarse))
        if other is not None and any(_problems(other, coarse)):
            yield from (f"{form}, onnxruntime: {p}" for p in found_there)


def _by_others(truth: Truth, graph: og.Graph) -> Truth:
    """The same for results of another runtime: ONNX leaves the sign of a zero undefined, and its GELUs are 1 + erf
    and 1 + tanh, which cancel in f32 where x is far below zero."""
    truth = replace(truth, signed=np.zeros_like(truth.signed))
    if truth.dtype == "f64":
        return replace(truth, bound=truth.bound + 1e-4 * (np.abs(truth.value) + 1))
    if truth.dtype in dtypes.FLOATS and any(op.kind in ("GELU", "GELUBackward") for op in graph.ops):
        return replace(truth, bound=truth.bound + 4 * epsilon("f32") / _WIDER * np.maximum(np.abs(truth.value), 1))
    return truth


def _is_left_open(graph: og.Graph, want: list[Truth]) -> bool:
    """True if ONNX leaves results open: a cast to an integer may not fit, or ThresholdedRelu makes 0 of NaN."""
    casts = any(
        op.kind == "TypeCast" and op.inputs[0].dtype in dtypes.FLOATS and op.outputs[0].dtype in dtypes.INTS
        for op in graph.ops
    )
    nan = any(np.isnan(t.value).any() for t in want if t.dtype in dtypes.FLOATS)
    return casts or (nan and any(op.kind == "ThresholdedRelu" for op in graph.ops))


def _problems(results: list[np.ndarray], want: list[Truth]) -> Iterator[str]:
    if len(results) != len(want):
        yield f"{len(results)} results instead of {len(want)}"
        return
    for result, truth in zip(results, want, strict=True):
        truth.bound = truth.bound * _WIDER
        if truth.dtype in dtypes.FLOATS and result.dtype == np.float64:
            with np.errstate(all="ignore"):
                result = result.astype(dtypes.get(truth.dtype).numpy)
        found = problem(result, truth)
        truth.bound = truth.bound / _WIDER
        if found:
            yield found
