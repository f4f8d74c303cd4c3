"""A whole graph, its partitions compiled and wired: what `opgraph.compile` returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opgraph.errors import InvalidArguments
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.loops.lower import ROUNDINGS
from opgraph.partition.partition import Partition, needed_for
from opgraph.partition.partitioner import partition
from opgraph.runtime import exchange
from opgraph.runtime.arguments import Ports
from opgraph.runtime.compiled import PreparedRunner, Runner, runner
from opgraph.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class _Step:
    """One partition: which values it reads and makes, and which nobody reads afterwards."""

    run: Runner
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: tuple[int, ...]
    donated: tuple[int | None, ...]


class Executable:
    """A compiled graph.

    Call it with arrays by keyword, or in a dict whose names need not be identifiers. NumPy arrays, torch tensors, CuPy
    arrays and other DLPack objects are taken and given back in the same kind. One output comes back as an array,
    several as a dict by name. dtypes and shapes must be those declared: nothing is converted or broadcast silently.
    """

    def __init__(self, graph: Graph, engine: Engine, *, donate: tuple[str, ...], rounding: str) -> None:
        if rounding not in ROUNDINGS:
            raise InvalidArguments(
                f"unknown rounding {rounding!r}", where="compile", fix=f"use one of {', '.join(ROUNDINGS)}"
            )
        self.graph = graph
        self.engine = engine
        self._exchange = _exchange(engine)
        self.partitions = needed_for(partition(graph).partitions, {t.id for t in graph.outputs})
        self._ins = Ports(graph.inputs, "input", _defaults(graph, engine, self._exchange))
        self._outs = Ports(graph.outputs, "output")
        unknown = [name for name in donate if name not in self._ins.names]
        if unknown:
            raise InvalidArguments(
                f"there is no input {unknown[0]!r} to donate",
                where="donate",
                fix=f"the inputs are {', '.join(self._ins.names)}",
            )
        self._steps = self._wired(set(donate), rounding)
        self._constants = {t.id: t.data for t in graph.outputs if t.is_constant}
        # One kernel whose operands are the graph's inputs and outputs, in the same order: arrays go straight to it.
        self._direct = (
            len(self._steps) == 1
            and self._steps[0].reads == tuple(t.id for t in graph.inputs)
            and self._steps[0].makes == tuple(t.id for t in graph.outputs)
            and not donate
        )
        self._single = len(self._outs.names) == 1

    def _wired(self, donate: set[str], rounding: str) -> list[_Step]:
        last_use: dict[int, int] = {}
        for index, part in enumerate(self.partitions):
            last_use.update((t.id, index) for t in part.input_ports)
        kept = {t.id for t in (*self.graph.inputs, *self.graph.outputs, *self.graph.constants)}
        donated = {t.id: t for t, name in zip(self._ins.tensors, self._ins.names) if name in donate}
        runs = [runner(part, self.engine, rounding=rounding) for part in self.partitions]
        _prepare(runs, self.partitions)
        steps = []
        for index, (part, run) in enumerate(zip(self.partitions, runs, strict=True)):
            usable = [donated[t.id] for t in part.input_ports if t.id in donated and last_use[t.id] == index]
            steps.append(
                _Step(
                    run=run,
                    reads=tuple(t.id for t in part.input_ports),
                    makes=tuple(t.id for t in part.output_ports),
                    frees=tuple(t.id for t in part.input_ports if last_use[t.id] == index and t.id not in kept),
                    donated=tuple(_reusable(t, usable) if part.kind == "fused" else None for t in part.output_ports),
                )
            )
        return steps

    @property
    def kernels(self) -> dict[str, str]:
        """The generated kernels compiled so far: name -> source. A further layout of the inputs may add one."""
        found: dict[str, str] = {}
        for step in self._steps:
            found.update((name, source.code) for name, source in getattr(step.run, "sources", {}).items())
        return found

    @property
    def engines(self) -> tuple[str, ...]:
        """What runs each of `partitions`: "opgraph" (a generated kernel), or the name of a library.

        onnxruntime may refuse a region only when it runs, so this is final after the first call.
        """
        return tuple(getattr(step.run, "runs_in", "opgraph") for step in self._steps)

    def alone(self) -> tuple[Runner, tuple[int, ...], tuple[int, ...]] | None:
        """The runner of the only partition, which inputs it reads and which outputs it makes, by position in its order.

        None where there are several, or where values come from elsewhere.
        """
        inputs = {t.id: i for i, t in enumerate(self._ins.tensors)}
        outputs = {t.id: i for i, t in enumerate(self._outs.tensors)}
        if len(self._steps) != 1 or set(self._steps[0].makes) != set(outputs):
            return None
        step = self._steps[0]
        if not all(i in inputs for i in step.reads):
            return None
        return step.run, tuple(inputs[i] for i in step.reads), tuple(outputs[i] for i in step.makes)

    def __call__(self, feeds: Mapping[Any, Any] | None = None, /, *, out: Any = None, **named: Any) -> Any:
        """Runs the graph.

        Args:
            feeds: arrays by name (or tensor id); an input called `out` goes here.
            out: where to write: an array for one output, a dict by name for several. Must not overlap an input, but
                may be one.
            named: arrays by name.

        Returns: the output, or a dict of them in declaration order; `out` where given.

        Raises:
            InvalidArguments, InvalidDataType, InvalidShape: arrays that do not fit the declarations.
        """
        feeds, named, kind = self._exchange.imported(feeds, named)
        arrays = self._ins.bind(feeds, named)
        outs = None if out is None else self._out_arrays(out, arrays)
        results = self._results(arrays, outs)
        if outs is not None:
            for target, result in zip(outs, results):
                self._exchange.assign(target, result)
            return out
        if kind is not None:
            results = [self._exchange.exported(r, kind) for r in results]
        return results[0] if self._single else dict(zip(self._outs.names, results))

    def bind(self, feeds: Mapping[Any, Any] | None = None, /, *, out: Any, **named: Any) -> Callable[[], Any]:
        """The same call, checked once: returns a function without arguments that runs it again on the same arrays.

        For hot loops and CUDA graphs. Arguments and errors are those of a call; `out` is required.
        """
        feeds, named, _ = self._exchange.imported(feeds, named)
        arrays = self._ins.bind(feeds, named)
        outs = self._out_arrays(out, arrays)
        bound = getattr(self._steps[0].run, "bound", None) if self._direct else None
        if bound is not None:
            launch = bound(arrays, outs)

            def call() -> Any:
                launch()
                return out

            return call

        def run() -> Any:
            for target, result in zip(outs, self._run(arrays, outs)):
                self._exchange.assign(target, result)
            return out

        return run

    def _out_arrays(self, out: Any, arrays: Sequence[Any]) -> list[Any]:
        if isinstance(out, Mapping):
            bound = self._outs.bind(self._exchange.imported(out, {})[0], {})
        elif self._single:
            bound = self._outs.bind(None, self._exchange.imported(None, {self._outs.names[0]: out})[1])
        else:
            raise InvalidArguments(
                "the graph has several outputs", where="out", fix=f"pass a dict with {', '.join(self._outs.names)}"
            )
        for name, array in zip(self._outs.names, bound):
            self._exchange.check_out(name, array, arrays, single_step=len(self._steps) == 1)
        return bound

    def _results(self, arrays: Sequence[Any], outs: Sequence[Any] | None = None) -> list[Any]:
        """The outputs for checked arrays, both in declaration order."""
        return self._steps[0].run(arrays, outs) if self._direct else self._run(arrays, outs)

    def _run(self, arrays: Sequence[Any], outs: Sequence[Any] | None) -> list[Any]:
        values: dict[int, Any] = dict(self._constants)
        values.update(zip((t.id for t in self._ins.tensors), arrays))
        targets = {} if outs is None else dict(zip((t.id for t in self._outs.tensors), outs))
        for step in self._steps:
            wanted = [targets.get(i) for i in step.makes]
            for j, source in enumerate(step.donated):
                if source is not None and wanted[j] is None:
                    wanted[j] = self._exchange.donation(values[source], [values[i] for i in step.reads if i != source])
            given = wanted if any(w is not None for w in wanted) else None
            made = step.run([values[i] for i in step.reads], given)
            values.update(zip(step.makes, made))
            for i in step.frees:
                del values[i]
        return [values[t.id] for t in self._outs.tensors]

    def __repr__(self) -> str:
        return f"<Executable on {self.engine}: {len(self._steps)} partitions>"


def _prepare(runs: Sequence[Runner], partitions: Sequence[Partition]) -> None:
    """Compiles the kernels that dense arrays will need, several at once: the compiler is a process of its own."""
    waiting = [
        (run, [t.dims for t in p.input_ports]) for run, p in zip(runs, partitions) if isinstance(run, PreparedRunner)
    ]
    if len(waiting) == 1:
        waiting[0][0].prepare(waiting[0][1])
    elif waiting:
        from concurrent.futures import ThreadPoolExecutor  # costs milliseconds of `import opgraph`

        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), len(waiting))) as pool:
            for done in [pool.submit(run.prepare, dims) for run, dims in waiting]:
                done.result()


def _exchange(engine: Engine) -> Any:
    """How arrays get in and out: the module for the CPU, an object with the same functions for a GPU."""
    if engine.kind == "cpu":
        return exchange
    from opgraph.runtime.cuda_exchange import CudaExchange  # needs CuPy

    return CudaExchange(engine.index)


def _defaults(graph: Graph, engine: Engine, exchange: Any) -> Mapping[str, Any]:
    """The defaults of inputs, where the engine works."""
    if not graph.defaults or engine.kind == "cpu":
        return graph.defaults
    from opgraph.runtime import cuda  # needs CuPy

    with cuda.OnDevice(engine.index):
        there = {n: cuda.CUPY.from_host(a, engine.index) for n, a in graph.defaults.items()}
    found: Mapping[str, Any] = exchange.imported(there, {})[0]
    return found


def _reusable(out: LogicalTensor, donated: list[LogicalTensor]) -> int | None:
    """The donated input whose memory fits an output, taken off the list."""
    for tensor in donated:
        if (tensor.dtype, tensor.dims) == (out.dtype, out.dims) and tensor.dims is not None and None not in tensor.dims:
            donated.remove(tensor)
            return tensor.id
    return None
