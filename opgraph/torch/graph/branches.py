"""Python branches on parameters inside a captured graph.

A Python `if` on a tensor ends Dynamo's graph. Where the tensor is computed from parameters and buffers alone, the way
that the branch takes changes only when one of them does. So Dynamo follows the way that their present values take, and
a guard of the compiled code compares all branches with the ways they took. The guard recomputes them in one small graph
and reads one truth value, and only where a parameter has another version than at the last comparison. A branch that
turns another way fails the guard: Dynamo compiles once for each way through the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from opgraph.torch.graph import torch_internals as internals
from opgraph.torch.graph.program import Program

#: Elements of parameters that the branches of a model may read together: the check runs after each optimizer step.
MOST_ELEMENTS = 4096


def fold_branches(is_ours: Callable[[Any], bool]) -> None:
    """From now on, Dynamo follows branches on parameters where a backend of opgraph compiles; called once.

    Args:
        is_ours: whether a backend is opgraph's.
    """

    def outcome(translator: Any, node: Node) -> bool | None:
        output = internals.output_graph(translator)
        if not is_ours(internals.backend_of(output)):
            return None
        branches: Branches | None = getattr(output, "opgraph_branches", None)
        if branches is None:
            branches = output.opgraph_branches = Branches()
        new = not branches.nodes
        taken = branches.follow(node)
        if new and branches.nodes:
            internals.add_guard(translator, branches.guard)
        return taken

    internals.before_jumps(outcome)


class Branches:
    """The branches that one captured graph follows.

    Attributes:
        nodes: the conditions, as Dynamo's graph has them.
        taken: which way each went.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.taken: list[bool] = []
        self._values: dict[Node, Any] = {}
        self._sources: dict[Node, str] = {}

    def follow(self, condition: Node) -> bool | None:
        """The way that a branch takes; None where it does not depend on parameters alone."""
        known = condition in self._values
        value = self._value(condition)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            return None
        taken = bool(value)
        if not known and self._reads(condition):
            self.nodes.append(condition)
            self.taken.append(taken)
        return taken

    def _value(self, condition: Node) -> Any:
        """The value of a node for the present parameters; None where it is not computed from those alone."""
        waiting = [condition]
        while waiting:
            node = waiting[-1]
            if node in self._values:
                waiting.pop()
                continue
            missing = [n for n in node.all_input_nodes if n not in self._values]
            if missing:
                waiting += missing
                continue
            self._values[node] = self._compute(node)
            waiting.pop()
        return self._values[condition]

    def _compute(self, node: Node) -> Any:
        if node.op == "placeholder":
            found = internals.parameter_of(node)
            if found is None:
                return None
            tensor, self._sources[node] = found
            small = sum(self._values[n].numel() for n in self._sources if n is not node) + tensor.numel()
            return tensor if small <= MOST_ELEMENTS else None
        if any(self._values[n] is None for n in node.all_input_nodes) or node.op not in ("call_function", "call_method"):
            return None
        if internals.draws_random_numbers(node):
            return None
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: self._values[n])
        with internals.without_modes(), torch.no_grad():
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _reads(self, condition: Node) -> list[Node]:
        """The parameters that a condition depends on."""
        found, waiting = dict.fromkeys((condition,)), [condition]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                if source not in found:
                    found[source] = None
                    waiting.append(source)
        return [n for n in found if n.op == "placeholder"]

    def guard(self) -> tuple[list[str], Callable[[Sequence[torch.Tensor]], bool]]:
        """The parameters as Python expressions, and whether all branches go the same way for their values."""
        places = list(dict.fromkeys(p for c in self.nodes for p in self._reads(c)))
        check = _Check(self._conditions(places), [self._values[p] for p in places])
        names = [self._sources[p] for p in places]
        self._values.clear()
        return names, check

    def _conditions(self, places: Sequence[Node]) -> GraphModule:
        """A module of the parameters that says whether all branches go the ways that they went."""
        graph = Graph()
        copied = {place: graph.placeholder(f"p{i}") for i, place in enumerate(places)}
        agree: Node | None = None
        for condition, taken in zip(self.nodes, self.taken, strict=True):
            waiting = [condition]
            while waiting:
                missing = [n for n in waiting[-1].all_input_nodes if n not in copied]
                if missing:
                    waiting += missing
                else:
                    node = waiting.pop()
                    if node not in copied:
                        copied[node] = graph.node_copy(node, lambda n: copied[n])
            flat = graph.call_method("reshape", (copied[condition], ()))
            same = graph.call_function(torch.ne if taken else torch.eq, (flat, 0))
            agree = same if agree is None else graph.call_function(torch.logical_and, (agree, same))
        graph.output((agree,))
        return GraphModule(torch.nn.Module(), graph)


class _Check:
    """Whether the branches of a graph go the ways that they went when it was captured."""

    def __init__(self, conditions: GraphModule, parameters: Sequence[torch.Tensor]) -> None:
        self._conditions = conditions
        self._program: Program | None = None
        self._seen = _state(parameters)
        self._answer = True

    def __call__(self, parameters: Sequence[torch.Tensor]) -> bool:
        """For these parameters; they are read only where one of them has changed since the last call."""
        state = _state(parameters)
        if state != self._seen:
            with torch.no_grad():
                self._answer = self._compare(parameters)
            self._seen = state
        return self._answer

    def _compare(self, parameters: Sequence[torch.Tensor]) -> bool:
        from torch.fx.experimental.proxy_tensor import make_fx

        plain = [p.detach() for p in parameters]
        if self._program is None:
            with internals.without_modes():
                traced = make_fx(self._conditions, tracing_mode="fake")(*plain)
                self._program = Program(traced)
        return bool(self._program.run(plain)[0])


def _state(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """What differs where a parameter's values may differ: it is another tensor, was written to, or lies elsewhere."""
    return [(id(p), p._version, p.data_ptr()) for p in parameters]
