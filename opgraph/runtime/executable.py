"""A whole graph with compiled and connected partitions: the result of `opgraph.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from opgraph.errors import InvalidArguments
from opgraph.ir.graph import Graph
from opgraph.loops.lower import ROUNDINGS
from opgraph.partition.partition import FUSED, Partition, needed_for
from opgraph.partition.partitioner import partition
from opgraph.runtime.array_exchange import Watched
from opgraph.runtime.donation import donations
from opgraph.runtime.engine import Engine
from opgraph.runtime.exchange_protocol import exchange_of
from opgraph.runtime.executable_builder import assembled, chained, defaults_on, may_lie_over
from opgraph.runtime.graph_arguments import Ports
from opgraph.runtime.memory_plan import MemoryPlan
from opgraph.runtime.runner import Runner
from opgraph.runtime.session_fast_path import whole_graph
from opgraph.runtime.shape_rules import ShapesAhead

if TYPE_CHECKING:
    from opgraph.partition.report import Report
    from opgraph.runtime.providers.torch_calls import TorchCalls


class _NotTrainableError(InvalidArguments, AttributeError):
    """Access to an attribute of a `TrainableExecutable` on another executable; `hasattr` returns False."""


class Executable:
    """A compiled graph.

    Call it with arrays by keyword, or in a dict whose names need not be identifiers. NumPy arrays, torch tensors, CuPy
    arrays and other DLPack objects are accepted; results have the same kind. One output is returned as an array,
    several as a dict by name. dtypes and shapes must be those declared: nothing is converted or broadcast silently.
    """

    def __init__(
        self,
        graph: Graph,
        engine: Engine,
        *,
        donate: tuple[str, ...],
        rounding: str,
        regroup: bool = True,
        waits: bool = False,
    ) -> None:
        if rounding not in ROUNDINGS:
            raise InvalidArguments(
                f"unknown rounding {rounding!r}", where="compile", fix=f"use one of {', '.join(ROUNDINGS)}"
            )
        self.graph = graph
        self.engine = engine
        self._recipe: tuple[Callable[..., Executable], Graph] = (
            partial(Executable, engine=engine, donate=donate, rounding=rounding, regroup=regroup, waits=waits),
            graph,
        )
        self._exchange = exchange_of(engine)
        self._ins = Ports(graph.inputs, "input", defaults_on(graph, engine, self._exchange))
        self._outs = Ports(graph.outputs, "output")
        self._partitioning = partition(graph)
        found = needed_for(self._partitioning.partitions, {t.id for t in graph.outputs})
        self._wiring, runs = assembled(graph, found, engine, rounding, regroup=regroup, waits=waits)
        self._donated = donations(graph, self.partitions, runs, donate)
        self._is_kernel = len(self.partitions) == 1 and self.partitions[0].kind == FUSED
        plans = engine.kind == "cpu" and not self._is_kernel
        self._chain = chained(graph, self._wiring, runs, self._donated, self._exchange, plans=plans)
        self._steps = self._chain.steps
        # One kernel whose operands are the graph's inputs and outputs, in the same order: it takes arrays directly.
        self._direct = (
            len(self._steps) == 1
            and self._steps[0].reads == tuple(t.id for t in graph.inputs)
            and self._steps[0].makes == tuple(t.id for t in graph.outputs)
            and not donate
        )
        self._single = len(self._outs.names) == 1
        self._torch_calls: TorchCalls | None = None
        self._over = may_lie_over(graph, self._steps) if self._is_kernel else [frozenset() for _ in graph.outputs]
        self._ahead = None if self._is_kernel else ShapesAhead(graph)
        self._whole = whole_graph(self._steps, graph.inputs, graph.outputs) if engine.kind == "cpu" else None

    def __reduce__(self) -> tuple[Callable[..., Executable], tuple[Graph]]:
        """Copies and unpickled executables are compiled again, from the kernels in the disk cache."""
        make, graph = self._recipe
        return make, (graph,)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("vjp", "saved_tensors", "backward_graph"):
                raise _NotTrainableError(
                    f"this executable has no {name}: it was compiled without wrt",
                    where=f"Executable.{name}",
                    fix=f'name the inputs to differentiate by: compile(graph, wrt=("{self._ins.names[0]}",))'
                    if self._ins.names
                    else "the graph has no input to differentiate by",
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions that run, in order. With onnxruntime they may differ from the graph's own: see `explain`."""
        return self._wiring.partitions

    def explain(self) -> Report:
        """The reasons for the ops' placement on this device: `Graph.explain` after regrouping; prints as a table."""
        from opgraph.partition.report import make_report  # rarely needed

        found = self._partitioning
        return make_report(self.graph, self.partitions, found.refusals, found.policy, self._wiring.reasons)

    def memory_plan(self, feeds: Mapping[Any, Any] | None = None, /, **named: Any) -> MemoryPlan:
        """Memory plan of the values between the partitions, for arrays of these shapes; may run the graph once.

        The plan has no buffers if nothing is planned: one partition, a GPU, a library that allocates its results, or
        shapes that depend on data. Arguments and errors are those of a call.
        """
        feeds, named, _ = self._exchange.imported(feeds, named)
        known = self._chain.shape_set(self._ins.bind(feeds, named))
        return MemoryPlan((), 0) if known is None or known.plan is None else known.plan

    @property
    def kernels(self) -> dict[str, str]:
        """The generated kernels compiled so far: name -> source. Another layout of the inputs may add one."""
        found: dict[str, str] = {}
        for step in self._steps:
            found.update((name, source.code) for name, source in step.run.sources.items())
        return found

    @property
    def engines(self) -> tuple[str, ...]:
        """The engine of each of `partitions`: "opgraph" (a generated kernel), or the name of a library.

        onnxruntime may refuse a region as late as its first run, so this is final after the first call.
        """
        return tuple(step.run.runs_in for step in self._steps)

    @property
    def spins(self) -> bool:
        """True if idle threads of onnxruntime spin between calls: those of a lone region do, as in any session.

        A measurement that compares it with another session should make that session do the same.
        """
        return any(step.run.spins for step in self._steps)

    def alone(self) -> tuple[Runner, tuple[int, ...], tuple[int, ...]] | None:
        """The runner of the only partition, and the positions of the inputs that it reads and outputs that it makes.

        None if there are several partitions, or if it reads other values. Positions are in the runner's order.
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
            out: target of the results: an array for one output, a dict by name for several. Must not overlap an input,
                but may be one if the graph is a single kernel. Writes to torch tensors increase their version counters.
            named: arrays by name.

        Returns: the output, or a dict of them in declaration order; `out` where given.

        Raises:
            InvalidArguments, InvalidDataType, InvalidShape: arrays that do not fit the declarations.
        """
        if self._whole is not None and out is None:
            found = self._whole(feeds if not named else named if feeds is None else None)
            if found is not None:
                return found[0] if self._single else dict(zip(self._outs.names, found))
        given = feeds if not named else named if feeds is None else None
        if self._torch_calls is not None and out is None:
            found = self._torch_calls(given)
            if found is not None:
                return found
        written = () if out is None and not self._donated else self._written(out, feeds, named)
        feeds, named, kind = self._exchange.imported(feeds, named)
        arrays = self._ins.bind(feeds, named)
        outs = None if out is None else self._out_arrays(out, arrays)
        results = self._results(arrays, outs)
        if written:
            self._exchange.written(written)
        if self._whole is not None:
            self._whole.learn(arrays, results)
        if outs is not None:
            for target, result in zip(outs, results):
                self._exchange.assign(target, result)
            return out
        if kind is not None:
            results = [self._exchange.exported(r, kind) for r in results]
            if self._direct and outs is None and given is not None and "torch" in (kind, getattr(kind, "name", "")):
                self._learn(given, results)
        return results[0] if self._single else dict(zip(self._outs.names, results))

    def _learn(self, given: Mapping[Any, Any], results: Sequence[Any]) -> None:
        """Prepares further calls on torch tensors like these."""
        if self._torch_calls is None:
            from opgraph.runtime.providers.torch_calls import TorchCalls  # imports torch, which the caller has done

            alone = self.alone()
            if alone is None:
                return
            self._torch_calls = TorchCalls(*alone, self._ins.names, self._outs.names)
        self._torch_calls.learn(given, results)

    def bind(self, feeds: Mapping[Any, Any] | None = None, /, *, out: Any, **named: Any) -> Callable[[], Any]:
        """Checks a call once, and returns a function without arguments that repeats the call on the same arrays.

        For hot loops and CUDA graphs. Arguments and errors are those of a call; `out` is required.
        """
        written = self._written(out, None, {})
        given = [*(feeds.items() if isinstance(feeds, Mapping) else ()), *named.items()]
        given += out.items() if isinstance(out, Mapping) else [("out", out)]
        feeds, named, _ = self._exchange.imported(feeds, named)
        arrays = self._ins.bind(feeds, named)
        outs = self._out_arrays(out, arrays)
        watched = Watched((str(name), array) for name, array in given)
        if self._ahead is not None:
            self._ahead.check(arrays, outs)
        prepared = self._chain.bound(arrays, outs)
        launch = partial(self._again, arrays, outs) if prepared is None else prepared[0]

        def call(keep: Any = (arrays, outs, prepared)) -> Any:  # a launch holds addresses only
            launch()
            if written:
                self._exchange.written(written)
            return out

        def checked() -> Any:
            watched.check_addresses("a function that `bind` made")
            return call()

        return checked if watched.is_any else call

    def _again(self, arrays: Sequence[Any], outs: Sequence[Any]) -> None:
        for target, result in zip(outs, self._chain(arrays, outs)):
            self._exchange.assign(target, result)

    def _out_arrays(self, out: Any, arrays: Sequence[Any]) -> list[Any]:
        if isinstance(out, Mapping):
            bound = self._outs.bind(self._exchange.imported(out, {})[0], {})
        elif self._single:
            bound = self._outs.bind(None, self._exchange.imported(None, {self._outs.names[0]: out})[1])
        else:
            raise InvalidArguments(
                "the graph has several outputs", where="out", fix=f"pass a dict with {', '.join(self._outs.names)}"
            )
        for place, (name, array) in enumerate(zip(self._outs.names, bound)):
            self._exchange.check_out(name, array, arrays, bound[:place], over=self._over[place])
        return bound

    def _written(self, out: Any, feeds: Mapping[Any, Any] | None, named: Mapping[str, Any]) -> list[Any]:
        """The tensors that a call with these arguments writes to, as passed by the caller."""
        arrays = [] if out is None else list(out.values()) if isinstance(out, Mapping) else [out]
        if self._donated:
            names = {
                *self._donated,
                *(self._ins.names[p] for p, t in enumerate(self._ins.tensors) if t.id in self._donated),
            }
            arrays += [a for some in (feeds, named) if isinstance(some, Mapping) for n, a in some.items() if n in names]
        written: list[Any] = self._exchange.counted(arrays, "donate" if out is None else "out")
        return written

    def _results(self, arrays: Sequence[Any], outs: Sequence[Any] | None = None) -> list[Any]:
        """The outputs for checked arrays, both in declaration order."""
        if self._ahead is not None and (outs is not None or self._donated):
            self._ahead.check(arrays, outs)
        return self._steps[0].run(arrays, outs) if self._direct and self._is_kernel else self._chain(arrays, outs)

    def __repr__(self) -> str:
        return f"<Executable on {self.engine}: {len(self._steps)} partitions>"
