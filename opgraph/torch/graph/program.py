"""A graph of ATen ops as one Python function: allocations, library calls and kernel launches, one line each.

The text of the function is `Program.source`. It contains sizes and strides as numbers, so a call does nothing but
allocate, take addresses and launch; views are folded into the address or into one reinterpretation of memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from opgraph.runtime.kernel_sequence import KernelLaunch
from opgraph.runtime.parallel import at_once
from opgraph.runtime.providers.torch_internals import foreach_add_, foreach_copy_, reinterpret_tensor, tree_leaves
from opgraph.torch.graph.aten import bytes_of, value_of
from opgraph.torch.graph.bernoulli import bernoulli
from opgraph.torch.graph.constant_folding import fold_constants, move_fills
from opgraph.torch.graph.convolutions import Call, ChannelsLast, as_products, library_calls
from opgraph.torch.graph.device_targets import Lines, Target, target_of
from opgraph.torch.graph.input_mutations import join_writes
from opgraph.torch.graph.kernel_groups import Group, schedule
from opgraph.torch.graph.launches import Launch, Lowering, RefusedError
from opgraph.torch.graph.memory_reuse import overwritable, own_values, reuse_memory
from opgraph.torch.graph.peak_recomputation import with_lower_peak
from opgraph.torch.graph.program_text import Allocation, Checked, Function, Step, watched, watchers, with_strides
from opgraph.torch.graph.tensor_locations import Beginnings, place_of
from opgraph.torch.graph.torch_internals import saved_outputs
from opgraph.torch.graph.views import base_of, is_view

aten = torch.ops.aten

#: Functions that compute the same as an op in less time: they call it with less host time, or draw numbers faster.
_FAST: dict[Any, Callable[..., Any]] = {
    aten.mm.default: torch.mm, aten.addmm.default: torch.addmm, aten.bmm.default: torch.bmm,
    aten.baddbmm.default: torch.baddbmm, aten.convolution.default: torch.convolution, aten.cat.default: torch.cat,
    aten._foreach_copy_.default: foreach_copy_, aten._foreach_add_.Scalar: foreach_add_, aten.bernoulli.p: bernoulli,
}  # fmt: skip


#: Kernels are gathered if a graph's values have at most this many bytes: host time matters then, and memory hardly.
_GATHERED = 2**25


class Program:
    """A compiled graph.

    Args:
        module: an FX graph of ATen ops with fake values of known sizes in each node's meta.
        rounding: as `ogt.fuse` takes it.
        most_constants: see `fold_constants`.
        phase: "forward", "backward", or "inference" of a call without gradients.
        like: the program of the same graph for other sizes, whose choices by bytes this one repeats.
        symbolic: True if it is made for a `SymbolicProgram`: kernels are not planned, and no line depends on a plan.

    Attributes:
        gathers: True if consecutive kernels are one call.
        source: the text of the function.
        env: name in the text -> its value.
        launches: the kernels, in order.
        kernel_steps: name of a call -> the kernels that it launches.
        library_calls: the nodes that torch computes, in order.
        checked: their calls whose results are checked once.
        beginnings: the alignment of tensors.
        folded: see `fold_constants`.
    """

    def __init__(
        self,
        module: GraphModule,
        rounding: str = "store",
        most_constants: int | None = None,
        phase: str = "inference",
        like: Program | None = None,
        symbolic: bool = False,
    ) -> None:
        self.module = module
        self.phase = phase
        self._rounding = rounding
        self._symbolic = symbolic
        self.launches: list[Launch] = []
        self.kernel_steps: dict[str, Sequence[Launch]] = {}
        self.library_calls: list[Node] = []
        self._targets: dict[torch.device, Target] = {}
        self.checked: list[tuple[Node, Checked]] = []
        self.env: dict[str, Any] = {
            "reinterpret": reinterpret_tensor, "inf": math.inf, "nan": math.nan, "watchers": watchers,
            "with_strides": with_strides,
        }  # fmt: skip
        self.folded: dict[str, str] = fold_constants(
            module, most_constants, None if like is None else like.folded.values()
        )
        as_products(module.graph)
        self.gathers: bool = _stored_bytes(module.graph) <= _GATHERED if like is None else like.gathers
        move_fills(module.graph)
        join_writes(module.graph)
        self.beginnings = Beginnings(module)
        steps = self._steps()
        self._returned = _flat_outputs(module)
        function = self._function(steps)
        self.source = function.text()
        self.env["watched"] = partial(watched, self, function, self.env)
        exec(compile(self.source, "<opgraph>", "exec"), self.env)
        self.run: Callable[[list[Any]], Any] = self.env["run"]
        self.run._boxed_call = True

    @property
    def saved(self) -> list[Node]:
        """The values that a forward graph returns for backward."""
        output = self.module.graph.output_node()
        return [n for n, is_saved in zip(self._returned, saved_outputs(output)) if is_saved and isinstance(n, Node)]

    @property
    def input_strides(self) -> list[tuple[int, ...] | None]:
        """The strides that each argument of `run` must have; None for an argument that is no tensor."""
        values = map(value_of, self.module.graph.find_nodes(op="placeholder"))
        return [tuple(v.stride()) if isinstance(v, torch.Tensor) else None for v in values]

    # -- planning ---------------------------------------------------------------------------------------------------

    def _steps(self) -> list[Step]:
        graph = self.module.graph
        refused: set[Node] = set()
        lowering = Lowering(self._rounding)
        gathers = self.gathers
        while True:  # a group that opgraph refuses is left to torch, so that others may grow
            planned = schedule(graph, refused=refused, gather_kernels=gathers)
            if not gathers and not refused:
                planned = with_lower_peak(graph, planned)
            kernels: dict[int, list[Launch]] = {}
            try:
                for unit in planned:
                    if isinstance(unit, Group):
                        kernels[id(unit)] = lowering.launches(unit, f"k{len(kernels)}", self._target(unit))
            except RefusedError as found:
                refused |= set(found.nodes)
                continue
            break
        self.launches = [launch for unit in planned for launch in kernels.get(id(unit), ())]
        if not self._symbolic:
            plan_launches(self.launches, self.beginnings)
        steps: list[Step] = []
        waiting: list[Launch] = []
        for unit in planned:
            if isinstance(unit, Node) and unit.target is operator.getitem:
                continue  # the step of the call takes the tuple apart
            launches = kernels[id(unit)] if isinstance(unit, Group) else []
            if waiting and not (launches and launches[0].target is waiting[0].target):
                steps.append(self._kernel_step(f"kernels_{len(steps)}", waiting))
                waiting = []
            waiting += launches
            if isinstance(unit, Node):
                steps += self._library_steps(unit, apart=not gathers)
            elif not gathers:  # one call each: a value that one kernel makes and the next reads dies between two calls
                first = len(steps)
                steps += [self._kernel_step(f"kernels_{first + i}", [one]) for i, one in enumerate(waiting)]
                waiting = []
        return [*steps, self._kernel_step(f"kernels_{len(steps)}", waiting)] if waiting else steps

    def _target(self, group: Group) -> Target:
        """The device of a group.

        Raises:
            RefusedError: it is another GPU than the first that the program uses.
        """
        device = value_of(group.nodes[0]).device
        if device not in self._targets:
            if device.type == "cuda" and any(d.type == "cuda" for d in self._targets):
                raise RefusedError(group.nodes)
            self._targets[device] = target_of(device)
            self.env.update(self._targets[device].values)
        return self._targets[device]

    def _kernel_step(self, name: str, launches: Sequence[Launch]) -> Step:
        """One native call for consecutive kernels on one device."""
        target = launches[0].target
        made: list[Allocation] = []
        by_name = {n.name: n for launch in launches for n in launch.nodes}
        for launch in launches:
            # If one call has several kernels, later ones may read memory that an earlier one would overwrite.
            over = overwritable(launch.kernel, launch.reads, launch.writes) if len(launches) == 1 else {}
            for place in launch.writes:
                dtype = self._constant(place.dtype)
                line = f"{place.name} = {target.allocate}({place.size}, {place.stride}, {dtype})"
                node = by_name.get(place.name, launch.nodes[-1])
                made.append(Allocation(place.name, line, node, place, over.get(place.name, ())))
        call = sequence_of(name, launches, symbolic=self._symbolic)
        self.env.update(call.values)
        self.kernel_steps[name] = launches
        reads = [p.name for launch in launches for p in launch.operands if p.name]
        return Step("\n".join(call.lines), None, made, [*reads, *call.makes])

    def _library_steps(self, node: Node, apart: bool) -> list[Step]:
        """A call of torch. If it returns several values, they are taken apart at once: each has its own lifetime.

        Args:
            apart: True if the gradients of a convolution are two calls, if they are large.
        """
        self.library_calls.append(node)
        reads = [base_of(n).name for n in node.all_input_nodes]
        found: list[Step] = []
        for call in library_calls(node) if apart else (Call(node.name, node.args),):
            function = self._library_function(node, call)
            given = [self._ref(a) for a in call.arguments] + [f"{k}={self._ref(v)}" for k, v in node.kwargs.items()]
            found.append(Step(f"{call.name} = {function}({', '.join(given)})", node, reads=[*reads, call.name]))
            for part in _elements(node):
                if call.results is None or part.args[1] in call.results:
                    whole = part.all_input_nodes[0]
                    source = call.name if whole is node else whole.name
                    value = f"{source}[{part.args[1]}]"
                    if call.is_restrided:
                        value = f"with_strides({value}, {tuple(value_of(part).stride())})"
                    found.append(Step(f"{part.name} = {value}", part, reads=[source]))
        return found

    def _library_function(self, node: Node, call: Call) -> str:
        name = f"call_{str(node.target).replace('.', '_').replace('::', '_')}"  # no node has such a name
        name = name if name.isidentifier() else f"call_{node.name}"
        called: Any = _FAST.get(node.target, node.target)
        values = tree_leaves(value_of(node))
        if (
            not call.is_restrided
            and any(isinstance(v, torch.Tensor) and v.layout is torch.strided for v in values)
            and called is not None
        ):
            name = f"{name}_{call.name}"
            strides = [v.stride() if isinstance(v, torch.Tensor) else None for v in values]
            checked = self.env[name] = Checked(self.env, name, called, strides, self._alignment(node, values))
            self.checked.append((node, checked))
        else:
            self.env[name] = called
        return name

    def _alignment(self, node: Node, values: Sequence[Any]) -> int:
        """The alignment in bytes that kernels expect of the results of a library call."""
        devices = {v.device for v in values if isinstance(v, torch.Tensor)}
        found = [self._targets[d].alignment for d in devices if d in self._targets]
        return max(found, default=1) if self.beginnings.is_known(node.name) else 1

    # -- text -------------------------------------------------------------------------------------------------------

    def _function(self, steps: Sequence[Step]) -> Function:
        places = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        fixed = [n for n in self.module.graph.nodes if n.op == "get_attr"]
        for node in fixed:
            self.env[node.name] = operator.attrgetter(str(node.target))(self.module)
        returned = [base_of(n) for n in self._returned if isinstance(n, Node)]
        result = f"({''.join(f'{text}, ' for text in self._results())})"
        lasting = frozenset(n.name for n in (*fixed, *returned))
        self._reuse(steps, lasting)
        keeps = self._symbolic or any(getattr(launch.plan, "keep", ()) for launch in self.launches)
        has_constants = bool(fixed) or keeps
        first: list[str] = []
        aligned: list[str] = []
        for target in self._targets.values():
            first += target.first(has_constants)
            packed = self._packed(target)
            found = target.aligned([n.name for n in places if n.name in packed])
            self.env.update(found.values)
            aligned += found.lines
        return Function(places, steps, lasting, result, first, aligned)

    def _results(self) -> Iterator[str]:
        """The expressions of the returned values; two values with one variable and layout are two tensors."""
        shown: dict[str, Any] = {}
        for value in self._returned:
            text = self._ref(value)
            if isinstance(value, Node) and shown.setdefault(text, value) is not value:
                place = place_of(value)
                text = f"reinterpret({base_of(value).name}, {place.size}, {place.stride}, {place.offset})"
            yield text

    def _reuse(self, steps: Sequence[Step], lasting: Collection[str]) -> None:
        """Stores results in the memory of values that die in the step that makes the results."""
        made = {a.name: a.place for step in steps for a in step.allocations}
        taken = reuse_memory(steps, own_values(self.module.graph, made, self.beginnings.is_known), lasting)
        for node, call in self.checked:
            call.overwritten = not taken.isdisjoint((node.name, *(part.name for part in _elements(node))))

    def _packed(self, target: Target) -> set[str]:
        """The inputs that kernels read in packs."""
        found = set()
        for launch in self.launches:
            if launch.target is target:
                packed = repeat(target.packs) if self._symbolic else target.packed(launch.plan)
                found |= {p.name for p, packs in zip(launch.operands, packed) if packs}
        return found & self.beginnings.copied

    def _ref(self, value: Any) -> str:
        """The Python expression of an argument of a call."""
        if isinstance(value, ChannelsLast):
            place = place_of(value.node)
            _, channels, height, width = place.size
            stride = (channels * height * width, 1, width * channels, channels)
            return f"reinterpret({place.name}, {place.size}, {stride}, {place.offset})"
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
        if isinstance(value, tuple):  # higher-order ops join tuples
            return f"({''.join(self._ref(v) + ', ' for v in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._ref, value))}]"
        if isinstance(value, slice):
            return f"slice({self._ref(value.start)}, {self._ref(value.stop)}, {self._ref(value.step)})"
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """A name for a dtype, device or other object."""
        name = "c_" + "".join(c if c.isalnum() else "_" for c in str(value))
        while self.env.setdefault(name, value) is not value and self.env[name] != value:
            name += "_"
        return name


def plan_launches(launches: Iterable[Launch], beginnings: Beginnings) -> None:
    """Prepares calls; calls of one kernel on tensors of equal layout are prepared once. Kernels that must be compiled
    for that are compiled in parallel; threads for all calls would take several times as long as the other plans."""
    alike: dict[Any, list[Launch]] = {}
    for launch in launches:
        places = (*launch.reads, *launch.writes)
        looks = tuple((p.size, p.stride, p.split, p.dtype, beginnings.of(p)) for p in places)
        alike.setdefault((id(launch.kernel), looks), []).append(launch)

    def is_planned(equal: Sequence[Launch], *, quickly: bool) -> bool:
        first = equal[0]
        made = first.target.plan(first.kernel, first.reads, first.writes, beginnings, compiles=not quickly)
        for launch in equal:
            launch.plan = made
        return made is not None

    def length(equal: Sequence[Launch]) -> int:
        loop = equal[0].kernel.lowered.loop
        return len(loop.statements) * (1 + max(loop.depths().values(), default=0))

    waiting = [equal for equal in alike.values() if not is_planned(equal, quickly=True)]
    waiting.sort(key=length, reverse=True)  # the last compilers then end at about the same time
    at_once([partial(is_planned, equal, quickly=False) for equal in waiting])


def sequence_of(name: str, launches: Sequence[Launch], *, symbolic: bool = False) -> Lines:
    """The lines that launch consecutive kernels on one device, and the values of their names.

    Args:
        symbolic: True if the lines are for all sizes; launches without plans have only lines.
    """
    names: dict[str, int] = {}
    prepared = []
    for launch in launches:
        operands = launch.operands
        # An operand without a name only provides a shape: any address may be passed.
        given = [(names.setdefault(p.name, len(names)), p.skipped) if p.name else (0, 0) for p in operands]
        prepared.append(KernelLaunch(launch.plan, tuple(given)))
    addresses = [f"{n}.data_ptr()" for n in names]
    if symbolic:
        return launches[0].target.symbolic_sequence(name, prepared, addresses)
    return launches[0].target.sequence(name, prepared, addresses)


def _stored_bytes(graph: FxGraph) -> int:
    """Bytes of all values of a graph, stored or not."""
    return sum(bytes_of(n) for n in graph.nodes if n.op == "call_function")


def _elements(node: Node) -> list[Node]:
    """The nodes that take a call's results apart, in order; an element may be a tuple, too."""
    found: list[Node] = []
    for user in node.users:
        if user.target is operator.getitem and user.args[0] is node and not is_view(user):
            found += [user, *_elements(user)]
    return found


def _flat_outputs(module: GraphModule) -> list[Any]:
    output = module.graph.output_node()
    returned = output.args[0]
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]
