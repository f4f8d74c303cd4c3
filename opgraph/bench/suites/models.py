"""Whole models: a graph with its arrays in opgraph, onnxruntime and oneDNN; a network's training step in torch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

import opgraph as og
from opgraph.bench.peers.peer import Absent
from opgraph.bench.peers.table import OURS, PEERS
from opgraph.bench.results import Cell, Row
from opgraph.bench.suites.timed import Say, answered, with_times
from opgraph.bench.timing import Call, HostClock, in_turns
from opgraph.bench.truth import far_off
from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor

#: A call that runs once, and the arrays that then hold its results.
Made = tuple[Call, Mapping[str, np.ndarray]]


def of_graph(
    name: str,
    graph: og.Graph,
    feeds: Mapping[str, np.ndarray],
    *,
    model: str | None = None,
    threads: int = 1,
    budget: float = 3.0,
    say: Say = lambda _: None,
) -> Row:
    """Runs one graph on the CPU in every available way, each into separate buffers.

    Args:
        graph: finalized.
        feeds: arrays by input name.
        model: the ONNX file from which it was read, which onnxruntime runs unchanged.
        budget: seconds of timing.

    The ways: opgraph; onnxruntime on the file and on the model that `opgraph fuse` makes of it, or, without a file, on
    the graph as ai.onnx ops; oneDNN's library, for graphs of its kinds.
    """
    say("opgraph: compiling")
    ours, ours_first = _timed(lambda: _ours(og.compile(graph), graph, feeds))
    spins = og.compile(graph).spins
    expected = ours[1]
    say("the truth")
    truth, types = _true(graph, feeds), _dtypes(graph)
    if truth and not any(np.size(array) for array in truth.values()):
        raise InvalidArguments(
            "there is nothing to compute: no output has an element", where=name, fix="give sizes above 0"
        )
    off, wrong = far_off(expected, truth, types)
    cells = {OURS.name: Cell(peer=OURS.name, off=off, first_ms=ours_first, failed=f"wrong: {wrong}" if wrong else "")}
    if wrong:
        return _row(name, graph, cells.values())
    calls: dict[str, Call] = {OURS.name: ours[0]}
    makers: dict[str, Callable[[], Made]] = {}
    if _is_here("onnxruntime"):
        if model is not None:
            fused = "onnxruntime, fused"
            makers["onnxruntime"] = lambda: _session(model, graph, feeds, expected, threads, spins)
            makers[fused] = lambda: _session(_written(graph, "auto"), graph, feeds, expected, threads, spins)
        else:
            makers["onnxruntime"] = lambda: _session(
                _written(graph, "decomposed"), graph, feeds, expected, threads, spins
            )
    if model is None and _is_here("oneDNN"):
        makers["oneDNN"] = lambda: _onednn(graph, feeds, expected, threads)
    for peer, maker in makers.items():
        say(peer)
        try:
            made, first = _timed(maker)
        except Exception as error:  # any exception is the result of this library
            cells[peer] = Cell(peer=peer, failed=answered(error))
            continue
        off, wrong = far_off(made[1], truth, types)
        cells[peer] = Cell(peer=peer, off=off, first_ms=first, failed=f"wrong: {wrong}" if wrong else "")
        if not wrong:
            calls[peer] = made[0]
    say("timing")
    times = in_turns(calls, HostClock(), budget)
    return _row(name, graph, [with_times(cell, times) for cell in cells.values()])


def _row(name: str, graph: og.Graph, cells: Iterable[Cell]) -> Row:
    dtype = graph.outputs[0].dtype if graph.outputs else ""
    return Row(suite="models", entry=name, dtype=dtype, cells=tuple(cells))


def _timed(make: Callable[[], Made]) -> tuple[Made, float]:
    """The made call after its first run, and the milliseconds of making and running it."""
    start = time.perf_counter()
    made = make()
    made[0]()
    return made, (time.perf_counter() - start) * 1e3


def _ours(f: og.Executable, graph: og.Graph, feeds: Mapping[str, np.ndarray]) -> Made:
    first = f(dict(feeds))
    results = first if isinstance(first, dict) else {_names(graph)[0]: first}
    # A separate array for each output: it may be an input, or an array that a library keeps.
    outs = {name: np.empty_like(np.asarray(a)) for name, a in results.items()}
    return f.bind(dict(feeds), out=outs if len(outs) > 1 else next(iter(outs.values()))), outs


def _names(graph: og.Graph) -> list[str]:
    return [t.name or f"t{t.id}" for t in graph.outputs]


def _dtypes(graph: og.Graph) -> dict[str, str]:
    return {name: t.dtype for name, t in zip(_names(graph), graph.outputs, strict=True)}


def _true(graph: og.Graph, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = og.evaluate(graph, dict(feeds))
    return found if isinstance(found, dict) else {_names(graph)[0]: found}


def _is_here(name: str) -> bool:
    try:
        next(p for p in PEERS if p.name == name).find("cpu")
    except Absent:
        return False
    return True


def _written(graph: og.Graph, form: str) -> bytes:
    from opgraph.onnx.save import to_model

    return bytes(to_model(graph, form=form).SerializeToString())


def _session(
    model: str | bytes,
    graph: og.Graph,
    feeds: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    threads: int,
    spins: bool,
) -> Made:
    """A session bound to the arrays and to its own buffers; its idle threads spin or sleep as opgraph's do."""
    import onnxruntime

    from opgraph.bench.peers.onnxruntime import session
    from opgraph.runtime.providers.onnx_session import ort_value

    made = session(model, threads, spins=spins)
    binding = made.io_binding()
    known = {t.name: t for t in graph.inputs}
    for port in made.get_inputs():
        binding.bind_ortvalue_input(port.name, ort_value(onnxruntime, feeds[port.name], known[port.name]))
    outs = {}
    for tensor, name in zip(graph.outputs, _names(graph), strict=True):
        outs[name] = np.zeros_like(expected[name])
        binding.bind_ortvalue_output(name, ort_value(onnxruntime, outs[name], tensor))

    def call(keep: Any = (feeds, outs)) -> None:  # the binding holds addresses only
        made.run_with_iobinding(binding)

    return call, outs


def _onednn(graph: og.Graph, feeds: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], threads: int) -> Made:
    from opgraph.onednn import library

    loaded = library.load()
    loaded.set_threads(threads)
    outs = {name: np.zeros_like(a) for name, a in expected.items()}
    real = loaded.build(graph)
    bound = real.bind(dict(feeds), outs)
    return (lambda real=real: bound()), outs


def drawn(tensor: LogicalTensor, sizes: Mapping[str, int]) -> np.ndarray:
    """A seeded array for an input: floats from N(0, 1); integers 0 or 1, valid both as indices and as tokens.

    Args:
        sizes: the sizes of symbolic dimensions.
    """
    rng = np.random.default_rng(0)
    shape = tuple(sizes[d] if isinstance(d, str) else d or 1 for d in tensor.dims or ())
    record = dtypes.get(tensor.dtype)
    values = rng.standard_normal(shape) if record.is_float else rng.integers(0, 2, shape)
    return np.asarray(values).astype(record.numpy)


# -- training steps in torch --


def of_networks(*, quick: bool, compiles: bool, budget: float, say: Say) -> list[Row]:
    """A forward and a backward pass of networks with the fractional activation, in several ways.

    Args:
        quick: only the small network.
        compiles: torch.compile is included: half a minute for the small network, minutes for ResNet-18.
        budget: seconds of timing for each network.
    """
    from opgraph.bench import side_by_side
    from opgraph.torch import naf1
    from opgraph.torch.zoo import MODELS

    ways = {n: w for n, w in side_by_side.WAYS.items() if compiles or n != side_by_side.COMPILED}
    ways = {side_by_side.FUSED: ways.pop(side_by_side.FUSED), **ways}  # ours first
    subjects: dict[str, Callable[[], tuple[Any, Any]]] = {
        "3 convolutions with NAF1": lambda: side_by_side.network(naf1.NAF1)
    }
    if not quick:
        subjects["ResNet-18 with NAF1, batch 16"] = lambda: (MODELS["resnet18"](naf1.NAF1, 10), _images())
    rows = []
    for name, make in subjects.items():
        model, x = make()
        calls, cells = {}, {}
        for way, change in ways.items():
            say(f"{name}: {way}")
            step = _step(change(copy.deepcopy(model), naf1.NAF1), x)
            start = time.perf_counter()
            step()
            cells[way] = Cell(peer=way, first_ms=(time.perf_counter() - start) * 1e3)
            calls[way] = step
        say(f"{name}: timing")
        times = in_turns(calls, HostClock(), budget)
        found = tuple(with_times(cell, times, ours=side_by_side.FUSED) for cell in cells.values())
        rows.append(Row(suite="models", entry=name, direction="training step", cells=found))
    return rows


def _step(model: Any, x: Any) -> Call:
    """A forward pass and the gradients of all parameters."""
    import torch

    wanted = list(model.parameters())

    def step() -> None:
        y = model(x)
        torch.autograd.grad(y, wanted, torch.ones_like(y))

    return step


def _images() -> Any:
    import torch

    return torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
