"""Builds an executable: the runner of each partition, and the values passed between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import port_name
from opgraph.partition.partition import NATIVE, Partition
from opgraph.runtime.compiled_partition import runner
from opgraph.runtime.constant_folding import ONNXRUNTIME
from opgraph.runtime.cpu_placement import Wiring, wired
from opgraph.runtime.engine import Engine
from opgraph.runtime.exchange_protocol import Exchange
from opgraph.runtime.executor import Chain, Step
from opgraph.runtime.parallel import at_once
from opgraph.runtime.runner import KernelRunner, PreparedRunner, Runner


def assembled(
    graph: Graph, partitions: Sequence[Partition], engine: Engine, rounding: str, *, regroup: bool, waits: bool = False
) -> tuple[Wiring, list[Runner]]:
    """Returns the partitions as they run on an engine, and their runners; compiles kernels for dense arrays.

    Args:
        regroup: whether partitions between two regions of onnxruntime may be regrouped, on a CPU.
        waits: whether a lone kernel is compiled at its first call, when the layouts of its arrays are known.

    Raises:
        Unimplemented: a partition is not supported.
        DeviceError: a kernel does not compile, a library is missing or refuses its partition.
    """
    if engine.kind == "cuda":
        from opgraph.runtime.gpu_placement import told, wired_on_gpu  # rarely needed

        placed = wired_on_gpu(graph, partitions)
        runs = _runners(placed, engine, rounding, waits)
        return told(placed, runs), runs
    plain = Wiring(partitions=tuple(partitions), first=0, reasons={})
    if regroup:
        wiring = wired(graph, partitions)
        runs = _runners(wiring, engine, rounding, waits)
        if all(p.provider != ONNXRUNTIME or run.runs_in == ONNXRUNTIME for p, run in zip(wiring.partitions, runs)):
            return wiring, runs
    # If onnxruntime refuses one node, a slow evaluator runs the whole region: small regions are better then.
    return plain, _runners(plain, engine, rounding, waits)


def _runners(wiring: Wiring, engine: Engine, rounding: str, waits: bool) -> list[Runner]:
    lone = sum(p.provider == ONNXRUNTIME for p in wiring.partitions[wiring.first :]) == 1
    runs: list[Runner] = []
    for place, part in enumerate(wiring.partitions):
        if lone and place >= wiring.first and part.provider == ONNXRUNTIME and engine.kind == "cpu":
            from opgraph.runtime.providers.onnxruntime import OnnxRuntimeRegion  # needs onnxruntime

            runs.append(OnnxRuntimeRegion(part, lone=True))
        else:
            runs.append(runner(part, engine, rounding=rounding, sizes=wiring.sizes or ()))
    if len(runs) > 1 or not waits:
        _prepare(runs, wiring.partitions)
    return runs


def chained(
    graph: Graph,
    wiring: Wiring,
    runs: Sequence[Runner],
    donate: Mapping[int, int],
    exchange: Exchange,
    *,
    plans: bool,
) -> Chain:
    """The steps of an executable.

    Args:
        donate: results by the input that they overwrite, both by id.
        exchange: imports and exports arrays.
        plans: whether memory may be planned.
    """
    partitions = wiring.partitions
    last_use = {t.id: index for index, part in enumerate(partitions) for t in part.input_ports}
    kept = {t.id for t in (*graph.inputs, *graph.outputs, *graph.constants)}
    over = {result: given for given, result in donate.items()}
    steps = []
    for index, (part, run) in enumerate(zip(partitions, runs, strict=True)):
        steps.append(
            Step(
                run=run,
                reads=_reads(part, wiring, graph),
                makes=tuple(t.id for t in part.output_ports),
                frees=_freed(part, index, last_use, kept),
                donated=tuple(over.get(t.id) for t in part.output_ports),
            )
        )
    return Chain(
        steps,
        wiring.first,
        inputs=[t.id for t in graph.inputs],
        outputs=[t.id for t in graph.outputs],
        names={t.id: t.label for part in partitions for t in part.output_ports},
        constants={t.id: t.data for t in graph.outputs if t.is_constant},
        donated=[(place, port_name(t), donate[t.id]) for place, t in enumerate(graph.inputs) if t.id in donate],
        exchange=exchange,
        plans=plans,
    )


def _reads(part: Partition, wiring: Wiring, graph: Graph) -> tuple[int, ...]:
    """Ids that a partition reads. If they are all sizes, an input of the graph is added to determine the stream."""
    reads = tuple(t.id for t in part.input_ports)
    if wiring.sizes is not None and part.provider == NATIVE and wiring.sizes.issuperset(reads):
        return (*reads, *[t.id for t in graph.inputs[:1]])
    return reads


def _freed(part: Partition, index: int, last_use: Mapping[int, int], kept: Collection[int]) -> tuple[int, ...]:
    return tuple(t.id for t in part.input_ports if last_use[t.id] == index and t.id not in kept)


def _prepare(runs: Sequence[Runner], partitions: Sequence[Partition]) -> None:
    """Compiles the kernels that dense arrays will need."""
    at_once(
        [
            partial(run.prepare, [t.dims for t in part.input_ports])
            for run, part in zip(runs, partitions)
            if isinstance(run, PreparedRunner)
        ]
    )


def may_lie_over(graph: Graph, steps: Sequence[Step]) -> list[frozenset[int]]:
    """For each output, the inputs whose memory it may reuse: those that the kernel has read by then, and itself."""
    (step,) = steps
    assert isinstance(step.run, KernelRunner)
    passed = {t.id for t in graph.outputs}
    reads, makes = {id: i for i, id in enumerate(step.reads)}, {id: i for i, id in enumerate(step.makes)}
    found = []
    for out in graph.outputs:
        result = makes.get(out.id)
        places = [
            place
            for place, tensor in enumerate(graph.inputs)
            if tensor.id == out.id
            or (result is not None and tensor.id not in passed
                and (tensor.id not in reads or step.run.operands.lies_over(reads[tensor.id], result)))
        ]  # fmt: skip
        found.append(frozenset(places))
    return found


def defaults_on(graph: Graph, engine: Engine, exchange: Exchange) -> Mapping[str, Any]:
    """The defaults of inputs, on the engine's device."""
    if not graph.defaults or engine.kind == "cpu":
        return graph.defaults
    from opgraph.runtime import cuda  # needs CuPy

    with cuda.OnDevice(engine.index):
        there = {n: cuda.CUPY.from_host(a, engine.index) for n, a in graph.defaults.items()}
    cuda.wait(engine.index, None)  # other streams do not wait for these copies
    found: Mapping[str, Any] = exchange.imported(there, {})[0]
    return found
