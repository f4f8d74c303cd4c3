"""A graph of ATen ops as one Python function: allocations, library calls and kernel launches, one line each.

The function is text that `Program.source` prints. Sizes and strides stand in it as numbers, so a call does nothing but
allocate, take addresses and launch; views are folded into the address or into one reinterpretation of memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from opgraph.errors import OpGraphError
from opgraph.ir.dtypes import get as dtype_of
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import row_major
from opgraph.partition.partitioner import partition
from opgraph.runtime.at_once import at_once
from opgraph.runtime.compiled import runner
from opgraph.runtime.engine import engine_of
from opgraph.runtime.fused import HostKernel
from opgraph.runtime.kernel_sequence import KernelLaunch, KernelSequence
from opgraph.runtime.providers.torch_dtypes import NAMES, TORCH_DTYPES
from opgraph.torch.graph.aten import NodeEmitter, is_reduction, keeps_axes, reduced_axes, value_of
from opgraph.torch.graph.axis_splits import AxisSplit, split_of
from opgraph.torch.graph.constants import fold_constants
from opgraph.torch.graph.groups import Group, base_of, schedule
from opgraph.torch.graph.torch_internals import empty_strided_cpu, reinterpret_tensor, saved_outputs

aten = torch.ops.aten

#: Functions of torch that reach an op in less host time than its overload does.
_FAST: dict[Any, Callable[..., Any]] = {
    aten.mm.default: torch.mm, aten.addmm.default: torch.addmm, aten.bmm.default: torch.bmm,
    aten.baddbmm.default: torch.baddbmm, aten.convolution.default: torch.convolution, aten.cat.default: torch.cat,
}  # fmt: skip


#: Bytes of a graph's values up to which kernels are gathered: host time counts there, and memory hardly.
_GATHERED = 2**25


@dataclass(slots=True)
class Launch:
    """One kernel call of a program.

    Attributes:
        kernel: the compiled loop.
        graph: what it computes, with the other partitions of its group.
        nodes: the nodes of its group.
        units: the named units found in it.
        reads, writes: where the tensors of the partition's ports lie, in order.
        plan: the prepared call.
    """

    kernel: HostKernel
    graph: Graph
    nodes: tuple[Node, ...]
    units: tuple[str, ...]
    reads: tuple[_Place, ...]
    writes: tuple[_Place, ...]
    plan: Any = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: a variable of the function, elements after its beginning, sizes and strides; `split`: the
    axis that a kernel sees as two."""

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    split: AxisSplit | None = None

    @property
    def skipped(self) -> int:
        """Bytes from the beginning of the variable's tensor."""
        return self.offset * self.dtype.itemsize

    def stand_in(self) -> np.ndarray:
        """An array of this layout, of no memory to speak of: planning reads no element."""
        own = np.empty(1, dtype_of(NAMES[self.dtype]).numpy)
        strides = self.stride if self.split is None else self.split.strides(self.size, self.stride)
        return np.lib.stride_tricks.as_strided(own, self.kernel_size, tuple(s * own.itemsize for s in strides))

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """The sizes that a kernel sees."""
        return self.size if self.split is None else self.split.shape(self.size)


@dataclass(slots=True)
class _Step:
    """Lines of the function, with the variables that they make and read."""

    lines: list[str]
    makes: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)


class Program:
    """A compiled graph.

    Args:
        module: an FX graph of ATen ops with fake values in each node's meta, of sizes that are known.

    Attributes:
        source: the text of the function.
        launches: the kernels, in order.
        library_calls: the nodes that torch computes, in order.
    """

    def __init__(self, module: GraphModule, rounding: str = "store") -> None:
        self.module = module
        self._rounding = rounding
        self.launches: list[Launch] = []
        self.library_calls: list[Node] = []
        self._sequences: list[KernelSequence] = []
        self._env: dict[str, Any] = {
            "empty": empty_strided_cpu, "reinterpret": reinterpret_tensor, "inf": math.inf, "nan": math.nan,
        }  # fmt: skip
        self._returned = _flat_outputs(module)
        fold_constants(module)
        steps = self._steps()
        self.source = self._text(steps)
        exec(compile(self.source, "<opgraph>", "exec"), self._env)
        self.run: Callable[[list[Any]], Any] = self._env["run"]
        self.run._boxed_call = True

    @property
    def saved(self) -> list[Node]:
        """Of a forward graph, what it returns for backward."""
        (output,) = [n for n in self.module.graph.nodes if n.op == "output"]
        return [n for n, is_saved in zip(self._returned, saved_outputs(output)) if is_saved and isinstance(n, Node)]

    # -- planning ---------------------------------------------------------------------------------------------------

    def _steps(self) -> list[_Step]:
        graph = self.module.graph
        refused: set[Node] = set()
        while True:  # a group that opgraph refuses is left to torch, which may let others grow
            planned = schedule(graph, refused=refused, gather_kernels=_stored_bytes(graph) <= _GATHERED)
            kernels: dict[int, list[Launch]] = {}
            try:
                for unit in planned.steps:
                    if isinstance(unit, Group):
                        kernels[id(unit)] = _launches(unit, f"k{len(kernels)}", self._rounding)
            except _RefusedError as found:
                refused |= set(found.nodes)
                continue
            break
        self.launches = [launch for unit in planned.steps for launch in kernels.get(id(unit), ())]
        at_once([partial(_plan, launch) for launch in self.launches])
        steps: list[_Step] = []
        waiting: list[Launch] = []
        for unit in planned.steps:
            if isinstance(unit, Group):
                waiting += kernels[id(unit)]
                continue
            if waiting:
                steps.append(self._kernel_step(waiting))
                waiting = []
            steps.append(self._library_step(unit))
        return [*steps, self._kernel_step(waiting)] if waiting else steps

    def _kernel_step(self, launches: Sequence[Launch]) -> _Step:
        """Kernels that follow each other: one native call."""
        step = _Step([])
        names: dict[str, int] = {}
        prepared = []
        for launch in launches:
            for place in launch.writes:
                step.lines.append(f"{place.name} = empty({place.size}, {place.stride}, {self._constant(place.dtype)})")
                step.makes.append(place.name)
            operands = [*(launch.reads[i] for i in launch.kernel.reads), *launch.writes]
            step.reads += [p.name for p in operands if p.name]
            # Of an operand without a name only the shape counts: any address does.
            given = [(names.setdefault(p.name, len(names)), p.skipped) for p in operands if p.name]
            places = iter(given)
            prepared.append(KernelLaunch(launch.plan, tuple(next(places) if p.name else (0, 0) for p in operands)))
        sequence = KernelSequence(prepared, len(names))
        name = f"kernels_{len(self._sequences)}"
        self._sequences.append(sequence)
        self._env[f"own_{name}"] = sequence  # the function may outlive this object; a launch holds addresses only
        addresses = ", ".join(f"{n}.data_ptr()" for n in names)
        if sequence.direct is None:
            self._env[name] = sequence
            step.lines.append(f"{name}({addresses})")
        else:
            self._env[name], self._env[f"pack_{name}"] = sequence.direct
            step.lines.append(f"{name}(pack_{name}({addresses}))")
        return step

    def _library_step(self, node: Node) -> _Step:
        reads = [base_of(n).name for n in node.all_input_nodes]
        if node.target is operator.getitem:
            return _Step([f"{node.name} = {self._ref(node.args[0])}[{node.args[1]}]"], [node.name], reads)
        self.library_calls.append(node)
        function = self._library_function(node)
        arguments = [self._ref(a) for a in node.args] + [f"{k}={self._ref(v)}" for k, v in node.kwargs.items()]
        return _Step([f"{node.name} = {function}({', '.join(arguments)})"], [node.name], reads)

    def _library_function(self, node: Node) -> str:
        name = f"{str(node.target).replace('.', '_').replace('::', '_')}"
        name = name if name.isidentifier() else f"call_{node.name}"
        called: Any = _FAST.get(node.target, node.target)
        value = value_of(node)
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(v, torch.Tensor) and v.layout is torch.strided for v in values) and called is not None:
            name = f"{name}_{node.name}"
            self._env[name] = _Checked(self._env, name, called, values)
        else:
            self._env[name] = called
        return name

    # -- text -------------------------------------------------------------------------------------------------------

    def _text(self, steps: Sequence[_Step]) -> str:
        inputs = [n.name for n in self.module.graph.nodes if n.op == "placeholder"]
        fixed = {n.name for n in self.module.graph.nodes if n.op == "get_attr"}
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                self._env[node.name] = operator.attrgetter(str(node.target))(self.module)
        returned = {base_of(n).name for n in self._returned if isinstance(n, Node)}
        last: dict[str, int] = {}
        for place, step in enumerate(steps):
            for name in (*step.makes, *step.reads):
                last[name] = place
        lines = ["def run(args):"]
        if inputs:
            lines.append(f"    {', '.join(inputs)}{',' if len(inputs) == 1 else ''} = args")
        lines.append("    args.clear()")
        unread = [n for n in inputs if n not in last and n not in returned]
        if unread:
            lines.append(f"    del {', '.join(unread)}")
        for place, step in enumerate(steps):
            lines += [f"    {line}" for line in step.lines]
            dead = [n for n, at in last.items() if at == place and n not in returned and n not in fixed]
            if dead:
                lines.append(f"    del {', '.join(dead)}")
        lines.append(f"    return ({''.join(self._ref(n) + ', ' for n in self._returned)})")
        return "\n".join(lines) + "\n"

    def _ref(self, value: Any) -> str:
        """The Python expression of an argument of a call."""
        if isinstance(value, Node):
            base = base_of(value)
            if base is value:
                return value.name
            place = place_of(value)
            own = place_of(base)
            if value_of(value).dtype != value_of(base).dtype:
                raise AssertionError(f"{value.name} reads {base.name} as another dtype")
            if (place.size, place.stride, place.offset) == (own.size, own.stride, 0):
                return base.name
            return f"reinterpret({base.name}, {place.size}, {place.stride}, {place.offset})"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._ref, value))}]"
        if isinstance(value, slice):
            return f"slice({self._ref(value.start)}, {self._ref(value.stop)}, {self._ref(value.step)})"
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """A name for a dtype, device or other object."""
        name = "c_" + "".join(c if c.isalnum() else "_" for c in str(value))
        while self._env.setdefault(name, value) is not value and self._env[name] != value:
            name += "_"
        return name


def _plan(launch: Launch) -> None:
    launch.plan = launch.kernel.plan([p.stand_in() for p in launch.reads], [p.stand_in() for p in launch.writes])


def _stored_bytes(graph: FxGraph) -> int:
    """Bytes of all values of a graph, stored or not."""
    values = [value_of(n) for n in graph.nodes if n.op == "call_function"]
    return sum(v.numel() * v.dtype.itemsize for v in values if isinstance(v, torch.Tensor))


class _RefusedError(Exception):
    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = tuple(nodes)


class _Checked:
    """A library call until its first results are seen: kernels rely on the strides that fake tensors promised."""

    def __init__(self, env: dict[str, Any], name: str, call: Callable[..., Any], promised: Sequence[Any]) -> None:
        self._env, self._name, self._call = env, name, call
        self._strides = [v.stride() if isinstance(v, torch.Tensor) else None for v in promised]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results, copied where they lie in another way than promised."""
        result = self._call(*args, **kwargs)
        results = result if isinstance(result, (list, tuple)) else [result]
        fits = [
            s is None or not isinstance(r, torch.Tensor) or r.numel() == 0 or _same_strides(r, s)
            for r, s in zip(results, self._strides)
        ]
        if all(fits):
            self._env[self._name] = self._call
            return result
        moved = [r if ok else _restrided(r, s) for r, s, ok in zip(results, self._strides, fits)]
        return type(result)(moved) if isinstance(result, (list, tuple)) else moved[0]


def _same_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    return all(size == 1 or own == other for size, own, other in zip(tensor.shape, tensor.stride(), strides))


def _restrided(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    assert strides is not None
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def place_of(node: Node, split: AxisSplit | None = None) -> _Place:
    """Where the value of a node lies."""
    base, value = base_of(node), value_of(node)
    offset = int(value.storage_offset()) - int(value_of(base).storage_offset()) if base is not node else 0
    return _Place(base.name, offset, tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype, split)


def _flat_outputs(module: GraphModule) -> list[Any]:
    (output,) = [n for n in module.graph.nodes if n.op == "output"]
    returned = output.args[0]
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def _launches(group: Group, prefix: str, rounding: str) -> list[Launch]:
    """The kernels of a group.

    Raises:
        _RefusedError: opgraph has no kernel for a part of it.
    """
    graph, members = Graph(), set(group.nodes)
    reductions = [(value_of(n.args[0]).dim(), reduced_axes(n), keeps_axes(n)) for n in group.nodes if is_reduction(n)]  # type: ignore[arg-type]
    split, unfit = split_of(group.nodes, reductions)
    if unfit:
        raise _RefusedError(unfit)
    values: dict[Node, Any] = {}
    emitter = NodeEmitter(graph, values, as_eager=rounding == "each", split=split)
    places: dict[int, _Place] = {}
    try:
        for node in group.nodes:
            for source in node.all_input_nodes:
                if source in values:
                    continue
                if base_of(source) in members:  # a view of a value of the group: it broadcasts at most
                    values[source] = emitter.broadcast(values[base_of(source)], source)
                else:
                    place = place_of(source, split)
                    made = values[source] = graph.input(f"in{len(places)}", NAMES[place.dtype], place.kernel_size)
                    places[made.id] = place
            emitter.add(node)
        for node in group.outputs:
            made = emitter.result(node)
            if made.id in places:  # a second name of one value
                made = graph.add_op("Identity", made)
            places[made.id] = place_of(node, split)
            values[node] = made
    except OpGraphError as error:
        raise _RefusedError(group.nodes) from error
    graph.set_outputs([values[n] for n in group.outputs])
    graph.finalize()
    for like in emitter.shapes:
        size = tuple(int(d) for d in like.dims or ())  # type: ignore[arg-type]
        places[like.id] = _Place("", 0, size, (0,) * len(size), torch.bool)
    launches = []
    for part in partition(graph).partitions:
        if part.kind != "fused":
            raise _RefusedError(group.nodes)
        kernel = runner(part, engine_of("cpu"), rounding=rounding)
        if not isinstance(kernel, HostKernel):
            raise _RefusedError(group.nodes)
        for port in part.output_ports:
            if port.id not in places:
                size = tuple(int(d) for d in port.dims or ())  # type: ignore[arg-type]
                name = f"{prefix}_{port.id}"
                places[port.id] = _Place(name, 0, size, row_major(size), TORCH_DTYPES[port.dtype])
        reads = tuple(places[t.id] for t in part.input_ports)
        writes = tuple(places[t.id] for t in part.output_ports)
        launches.append(Launch(kernel, graph, group.nodes, part.units, reads, writes))
    return launches
