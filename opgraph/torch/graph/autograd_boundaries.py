"""Cuts a captured graph after results from which others are computed, so that an autograd node ends at each of them.

AOTAutograd makes one autograd node of a graph, so no result has a gradient with respect to another one. If a model
returns `feat` and `out = f(feat)`, `autograd.grad(out, feat)` would find nothing and `feat.retain_grad()` would keep
None. Such a graph is cut into parts that run one after the other, each with its own node. Calls that depend on `feat`
are in a later part than `feat` itself. The order of calls does not change, so random numbers and writes keep their
order. A graph without such results, or without gradients, is not cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module

from opgraph.runtime.providers.torch_internals import HigherOrderOperator
from opgraph.torch.graph.graph_modes import records_gradients, with_modes_restored
from opgraph.torch.graph.parameter_branches import written_arguments
from opgraph.torch.graph.size_expressions import SYMBOLIC
from opgraph.torch.graph.torch_internals import SET_GRAD_ENABLED, compile_part, memory_of, with_number

#: The backend for one part. It receives the part's graph and its inputs without data.
Compile = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def compile_parts(graph: GraphModule, example_inputs: Sequence[Any], compile: Compile) -> Callable[..., Any]:
    """Compiles a graph of Dynamo into one function; `compile` receives the graph, or its parts in order."""
    parts = parts_of(graph.graph) if records_gradients(graph.graph) else {}
    if not parts:
        return compile(graph, example_inputs)
    _write_numbers(graph)
    whole = split_module(graph, graph, parts.__getitem__, keep_original_order=True)
    _mark_written_later(whole)
    values: dict[Node, Any] = {}
    functions: dict[str, Callable[..., Any]] = {}
    #: For each part, the places of its results that are views made while no gradients were recorded; `detached` has the
    #: nodes of these results. AOTAutograd returns them as if they were made later.
    without_gradients: dict[Node, set[int]] = {}
    detached: set[Node] = set()
    lines = []
    for node in whole.graph.nodes:
        if node.op == "placeholder":
            values[node] = with_number(node.meta["example_value"])
        elif node.op == "get_attr":
            values[node] = functions[node.name] = operator.attrgetter(str(node.target))(whole)
        elif node.op == "call_module":
            part = whole.get_submodule(str(node.target))
            assert isinstance(part, GraphModule)
            single = _as_tuple(part)
            args = _each_once(part, node.args, values)
            inputs = [values[n].detach() if n in detached else values[n] for n in args]
            given = ", ".join(f"{n}.detach()" if n in detached else str(n) for n in args)
            functions[f"call_{node}"], results = compile_part(compile, part, graph, inputs)
            values[node] = results[0] if single else results
            lines.append(f"{node} = call_{node}({given}){'[0]' if single else ''}")
            without_gradients[node] = _views_of_no_grad(part.graph)
            detached |= {node} if single and 0 in without_gradients[node] else set()
        elif node.op == "call_function":
            source, place = node.args
            values[node] = values[source][place]
            lines.append(f"{node} = {source}[{place}]")
            detached |= {node} if place in without_gradients[source] else set()
        dead = [str(n) for n in node.all_input_nodes if node.op != "output" and next(reversed(n.users)) is node]
        lines += [f"del {', '.join(dead)}"] if dead else []
    run = _function(whole.graph, lines, functions)
    return run if torch.is_grad_enabled() else with_modes_restored(run)


#: The key in the meta of a part's input that a later part writes to.
_WRITTEN_LATER = "opgraph_written_later"


def _mark_written_later(whole: GraphModule) -> None:
    """Marks the inputs of the parts of a graph that later parts write to."""
    written: set[int | None] = set()
    for node in whole.graph.find_nodes(op="call_module")[::-1]:
        part: Any = whole.get_submodule(str(node.target))
        for place in part.graph.find_nodes(op="placeholder"):
            place.meta[_WRITTEN_LATER] = memory_of(place) in written
        written |= {memory_of(n) for call in part.graph.nodes for n in written_arguments(call)} - {None}


def written_later(part: GraphModule) -> set[int]:
    """The places of the inputs to which a later part of the same graph writes."""
    places = part.graph.find_nodes(op="placeholder")
    return {i for i, place in enumerate(places) if place.meta.get(_WRITTEN_LATER)}


def _write_numbers(graph: GraphModule) -> None:
    """Replaces calls by the numbers that they return, if these follow from numbers alone, such as attributes of modules
    that each call changes, or are sizes that guards fix to one number. AOTAutograd fails on a part that returns one."""
    numbers: dict[Node, Any] = {}

    def known(node: Node) -> Any:
        return numbers.get(node, node)

    for node in list(graph.graph.nodes):
        value = node.meta.get("example_value")
        if not isinstance(value, SYMBOLIC) or node.op != "call_function":
            continue
        number = value.node.maybe_as_int() if isinstance(value, torch.SymInt) else None
        if number is None:
            number = value if node.all_input_nodes else node.target(*node.args, **node.kwargs)
        if isinstance(number, SYMBOLIC):
            continue
        numbers[node] = number
        for user in list(node.users):
            user.args, user.kwargs = map_arg((user.args, user.kwargs), known)
        graph.graph.erase_node(node)


def _views_of_no_grad(graph: Graph) -> set[int]:
    """The places of a part's results that are views made while no gradients were recorded, and that were not written
    into afterwards."""
    found, memory, enabled = set[Node](), set[int | None](), torch.is_grad_enabled()
    for node in graph.nodes:
        own = memory_of(node)
        if node.target is SET_GRAD_ENABLED:
            enabled = bool(node.args[0])
        elif not enabled and own in memory:
            found.add(node)
        elif enabled and (written := {memory_of(n) for n in written_arguments(node)} - {None}):
            found = {n for n in found if memory_of(n) not in written}
        memory |= {own} - {None}
    output: Any = graph.output_node()
    return {place for place, node in enumerate(output.args[0]) if node in found}


def with_views_of_no_grad(graph: GraphModule, compile: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Compiles a graph of Dynamo, and detaches its results that are views made while no gradients were recorded:
    AOTAutograd makes these again, and records that. Their `requires_grad` is that of eager torch."""
    output: Any = graph.graph.output_node()
    places = _views_of_no_grad(graph.graph)
    seen: set[int] = set()
    views: set[Node] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            views |= {node} if id(value) not in seen else set()  # an in-place call returns its argument
            seen.add(id(value))
    asks = {p: n.meta["example_value"].requires_grad for p in places if (n := output.args[0][p]) in views}
    compiled = compile()
    if not any(asks.values()):
        return compiled

    def run(*args: Any) -> Any:
        results = list(compiled(*args))
        for place, has_gradient in asks.items():
            results[place] = results[place].detach().requires_grad_(has_gradient)
        return tuple(results)

    return run


def _function(graph: Graph, lines: Sequence[str], values: dict[str, Any]) -> Callable[..., Any]:
    """Builds the function with these lines, which takes a graph's inputs and returns its results."""
    places = graph.find_nodes(op="placeholder")
    output: Any = graph.output_node()
    results = "".join(f"{n}, " for n in output.args[0])
    body = "\n    ".join([*lines, f"return ({results})"])
    exec(compile(f"def run({', '.join(map(str, places))}):\n    {body}\n", "<opgraph>", "exec"), values)
    made: Callable[..., Any] = values["run"]
    return made


def _each_once(part: GraphModule, args: Sequence[Any], values: dict[Node, Any]) -> list[Node]:
    """Removes repeated arguments of a part, and returns the others: an in-place call returns its argument."""
    first: dict[int, Node] = {}
    once = []
    for place, arg in zip(part.graph.find_nodes(op="placeholder"), args, strict=True):
        value = values[arg]
        known = first.setdefault(id(value), place) if isinstance(value, torch.Tensor) else place
        if known is place:
            once.append(arg)
        else:
            place.replace_all_uses_with(known)
            part.graph.erase_node(place)
    part.recompile()
    return once


def _as_tuple(part: GraphModule) -> bool:
    """Makes a part return a tuple, as AOTAutograd expects; returns True if it returned a single value before."""
    output: Any = part.graph.output_node()
    if isinstance(output.args[0], (tuple, list)):
        return False
    output.args = ((output.args[0],),)
    part.recompile()
    return True


def parts_of(graph: Graph) -> dict[Node, int]:
    """The part of each call of a graph, in the order of calls; empty if the graph is not cut."""
    calls = _Calls(graph)
    boundaries = calls.boundaries()
    return calls.parts(boundaries) if boundaries else {}


class _Calls:
    """The calls of Dynamo's graph, and the gradients that flow through them."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = [n for n in graph.nodes if n.op != "output"]
        output: Any = graph.output_node()
        #: Calls between which a graph cannot be cut, by the first of them.
        self.regions = _regions(self.nodes)
        self._inside = {node for region in self.regions.values() for node in region}
        #: Memory -> the last call that wrote into it with a gradient; from then on it holds that call's result.
        self._last_write: dict[int, Node] = {}
        #: Such a call -> the arguments that it writes into.
        self.writes: dict[Node, list[Node]] = {}
        self._unrecorded: set[Node] = set()
        enabled = torch.is_grad_enabled()
        for node in self.nodes:
            if node.target is SET_GRAD_ENABLED:
                enabled = bool(node.args[0])
            if not enabled:
                self._unrecorded.add(node)
            if not enabled or isinstance(node.target, HigherOrderOperator):
                continue
            written = [n for n in written_arguments(node) if _has_gradient(n)]
            if written:
                self.writes[node] = written
                self._last_write.update((m, node) for n in written if (m := memory_of(n)) is not None)
        #: The values that the caller sees afterwards: results, and inputs that were written to.
        self.results = [
            n for n in self.nodes
            if _has_gradient(n) and (n in output.all_input_nodes or (n.op == "placeholder" and self.last_write(n)))
        ]  # fmt: skip

    def passes_gradients(self, node: Node) -> bool:
        """True if gradients may flow through a call; under a transform of torch.func, tensors do not show that."""
        return node in self._inside or (node not in self._unrecorded and (_has_gradient(node) or node in self.writes))

    def last_write(self, node: Node) -> Node | None:
        """The last call that wrote, with a gradient, into the memory of a value."""
        memory = memory_of(node)
        return None if memory is None else self._last_write.get(memory)

    def _ready(self) -> dict[Node, list[Node]]:
        """The results, by the call after which they have the values that the caller sees."""
        found: dict[Node, list[Node]] = {}
        order = {node: i for i, node in enumerate(self.nodes)}
        for node in self.results:
            last = self.last_write(node)
            if last is None and node.op == "placeholder":
                continue
            found.setdefault(node if last is None or order[last] < order[node] else last, []).append(node)
        return found

    def boundaries(self) -> dict[Node, list[Node]]:
        """The results from which other results are computed, by the call after which they are ready."""
        ready = self._ready()
        reached = _Reached(self, _union)
        bits: dict[Node, int] = {}
        for node in self.nodes:
            reached.visit(node)
            for result in ready.get(node, ()):
                bits[result] = 1 << len(bits)
                reached.start(result, bits[result])
        needed = 0
        for other in self.results:
            found = reached.of(other)
            for result, bit in bits.items():
                if result is not other and found & bit and not _is_regenerated(other, result):
                    needed |= bit
        return {at: kept for at, found in ready.items() if (kept := [n for n in found if bits[n] & needed])}

    def parts(self, boundaries: dict[Node, list[Node]]) -> dict[Node, int]:
        """The part of each call. A call that depends on a boundary is in a later part than the boundary."""
        reached = _Reached(self, lambda found: max(found, default=0))
        part = 0
        parts: dict[Node, int] = {}
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                continue  # they belong to every part that reads them
            part = max([part, *map(reached.of_inputs, self.regions.get(node, [node]))])
            reached.visit(node)
            parts[node] = part
            for result in boundaries.get(node, ()):
                reached.start(result, part + 1)
        self._keep_together(parts)
        self._detach_where_read(parts)
        return parts

    def _keep_together(self, parts: dict[Node, int]) -> None:
        """Moves the selection of a tuple's elements into the part that makes the tuple: only tensors leave a part."""
        for node in self.nodes:
            if isinstance(node.meta.get("example_value"), (tuple, list)):
                last = node
                for user in list(node.users):
                    if user.target is operator.getitem and user in parts:
                        last.append(user)
                        last = user
                        parts[user] = parts[node]

    def _detach_where_read(self, parts: dict[Node, int]) -> None:
        """Repeats a view without a gradient, such as that of `detach()`, in each part that reads it. AOTAutograd fails
        if a part returns both the view and its source, and the source is a view itself."""
        for node in reversed(self.nodes):
            if node not in parts or node in self._inside or not _is_detached(node):
                continue
            later: dict[int, list[Node]] = {}
            for user in node.users:
                if parts.get(user, 0) > parts[node]:
                    later.setdefault(parts[user], []).append(user)
            order = {n: i for i, n in enumerate(node.graph.nodes)}
            for part, users in later.items():
                with node.graph.inserting_before(min(users, key=order.__getitem__)):
                    copy = node.graph.node_copy(node)
                parts[copy] = part
                for user in users:
                    user.replace_input_with(node, copy)
            if later and not node.users:
                del parts[node]
                node.graph.erase_node(node)


class _Reached:
    """Propagates marks from results along calls with gradients, through edges and through memory that is written to.

    Args:
        join: combines the marks that flow into one value.
    """

    def __init__(self, calls: _Calls, join: Callable[[Iterable[int]], int]) -> None:
        self._calls, self._join = calls, join
        self._nodes: dict[Node, int] = {}
        self._memory: dict[int, int] = {}

    def of(self, node: Node) -> int:
        """The marks that have reached a value so far."""
        memory = memory_of(node)
        return self._join((self._nodes.get(node, 0), 0 if memory is None else self._memory.get(memory, 0)))

    def of_inputs(self, node: Node) -> int:
        """The marks that flow through a call into its result."""
        if not self._calls.passes_gradients(node):
            return 0
        return self._join([self.of(n) for n in node.all_input_nodes])

    def visit(self, node: Node) -> None:
        """Propagates marks through a call; calls are visited in order."""
        found = self.of_inputs(node)
        if found:
            self._nodes[node] = found
            for written in self._calls.writes.get(node, ()):
                self._reach_memory(written, found)

    def start(self, result: Node, value: int) -> None:
        """Adds a mark to a result; calls visited from here on propagate it."""
        self._nodes[result] = self._join((self._nodes.get(result, 0), value))
        if self._calls.last_write(result) is not None:
            self._reach_memory(result, value)

    def _reach_memory(self, node: Node, value: int) -> None:
        memory = memory_of(node)
        if memory is not None:
            self._memory[memory] = self._join((self._memory.get(memory, 0), value))


def _union(found: Iterable[int]) -> int:
    joined = 0
    for bits in found:
        joined |= bits
    return joined


def _has_gradient(node: Node) -> bool:
    """True if a value, or an element of a tuple, requires a gradient."""
    value = node.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def _is_detached(node: Node) -> bool:
    """True if a call returns its argument's memory as a value without a gradient."""
    if len(node.all_input_nodes) != 1 or _has_gradient(node) or written_arguments(node):
        return False
    memory = memory_of(node)
    return memory is not None and memory == memory_of(node.all_input_nodes[0])


def _is_regenerated(view: Node, base: Node) -> bool:
    """True if AOTAutograd returns one result as a view of the other."""
    value = base.meta["example_value"]
    return memory_of(view) == memory_of(base) and not value._is_view()


def _regions(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Calls between which a graph cannot be cut, by the first of them: the calls inside a transform of torch.func."""
    found: dict[Node, list[Node]] = {}
    depth, first = 0, None
    for node in nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name.endswith(("increment_nesting", "enter_dual_level")):
            depth += 1
            first = first or node
            found.setdefault(first, [])
        if first is not None:
            found[first].append(node)
        if name.endswith(("decrement_nesting", "exit_dual_level")):
            depth -= 1
            first = first if depth else None
    return found
