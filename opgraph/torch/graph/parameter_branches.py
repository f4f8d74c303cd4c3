"""Python branches on parameters inside a captured graph.

A Python `if` on a tensor ends Dynamo's graph. If the tensor is computed from parameters and buffers alone, the
direction of the branch changes only when one of them does. So Dynamo follows the direction that their current values
give, and a guard of the compiled code compares all branches with their recorded directions. The guard recomputes them
in one small graph and reads one truth value, and only if a parameter has changed since the last comparison. A branch in
another direction fails the guard: Dynamo compiles once for each path through the model.

A branch on a buffer that the forward itself has written to (a counter, running statistics) is left to Dynamo: its
direction depends on the computation of the graph.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from ctypes import string_at
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from opgraph.runtime.providers.torch_internals import HigherOrderOperator, dispatch_modes, without_modes
from opgraph.torch.graph import torch_internals as internals
from opgraph.torch.graph.program import Program
from opgraph.torch.graph.program_text import unwatched, watchers
from opgraph.torch.tracing.tensor_calls import WRITERS, draws

#: The most elements of parameters that the branches of a model may read: the check runs after each optimizer step.
MOST_ELEMENTS = 4096


def fold_branches(is_ours: Callable[[Any], bool]) -> None:
    """Makes Dynamo follow branches on parameters if a backend of opgraph compiles; called once.

    Args:
        is_ours: returns True for opgraph's backends.
    """

    def outcome(translator: Any, node: Node) -> bool | None:
        output = translator.output
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
        nodes: the conditions, in Dynamo's graph.
        taken: the direction of each.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.taken: list[bool] = []
        #: The conditions, computed from parameters; a copy, because Dynamo may remove nodes from its own graph.
        self._graph = Graph()
        self._copied: dict[Node, Node] = {}
        self._values: dict[Node, Any] = {}
        #: For each input of the graph that a condition reads: the parameter, and its Python expression.
        self._parameters: dict[Node, tuple[torch.Tensor, str] | None] = {}
        self._writes = _Writes()

    def follow(self, condition: Node) -> bool | None:
        """The direction of a branch; None if it does not depend on parameters alone."""
        needed = _ancestors(condition)
        if not self._are_parameters([n for n in needed if n.op == "placeholder"]):
            return None
        if not all(map(_repeats, needed)) or _under_autocast(needed) or self._writes.reach(needed):
            return None
        try:
            for node in needed:
                if node not in self._values:
                    self._values[node] = self._compute(node)
            value = self._values[condition]
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                return None
            taken = bool(value)
        except Exception:  # an error of the program, which Dynamo raises at the program's line
            return None
        if condition not in self.nodes and any(n.op == "placeholder" for n in needed):
            self.nodes.append(condition)
            self.taken.append(taken)
            for node in needed:
                if node not in self._copied:
                    self._copied[node] = self._graph.node_copy(node, lambda n: self._copied[n])
        return taken

    def _are_parameters(self, places: Sequence[Node]) -> bool:
        """True if inputs of the graph are parameters, few enough to be read after each step."""
        for place in places:
            if place not in self._parameters:
                self._parameters[place] = internals.parameter_of(place)
        found = [self._parameters[p] for p in places]
        return sum(MOST_ELEMENTS + 1 if p is None else p[0].numel() for p in found) <= MOST_ELEMENTS

    def _compute(self, node: Node) -> Any:
        if node.op == "placeholder":
            found = self._parameters[node]
            assert found is not None
            return found[0]
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: self._values[n])
        with without_modes(), torch.no_grad():
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def guard(self) -> tuple[list[str], Callable[[Sequence[torch.Tensor]], bool]]:
        """The parameters as Python expressions, and a check that their values keep the directions of all branches."""
        places = [n for n in self._copied if n.op == "placeholder"]
        known = [found for p in places if (found := self._parameters[p]) is not None]
        check = BranchCheck(self._conditions(), [tensor for tensor, _ in known])
        self._values.clear()
        return [source for _, source in known], check

    def _conditions(self) -> GraphModule:
        """A module of the parameters that returns True if all branches keep their directions."""
        graph, copied = Graph(), dict[Node, Node]()
        graph.graph_copy(self._graph, copied)
        agree: Node | None = None
        for condition, taken in zip(self.nodes, self.taken, strict=True):
            flat = graph.call_method("reshape", (copied[self._copied[condition]], ()))
            same = graph.call_function(torch.ne if taken else torch.eq, (flat, 0))
            agree = same if agree is None else graph.call_function(torch.logical_and, (agree, same))
        graph.output((agree,))
        return GraphModule(torch.nn.Module(), graph)


def _ancestors(node: Node) -> list[Node]:
    """The nodes from which a node is computed, and the node itself, in topological order."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting = [(node, False)]
    while waiting:
        found, ready = waiting.pop()
        if ready:
            order.append(found)
        elif found not in seen:
            seen.add(found)
            waiting.append((found, True))
            waiting += [(source, False) for source in found.all_input_nodes]
    return order


#: Calls on the tensors of a transform of torch.func, which exist only within the transform.
_OF_TRANSFORMS = frozenset(
    ("_wrap_for_grad", "_unwrap_for_grad", "_add_batch_dim", "_remove_batch_dim", "_make_dual", "_unpack_dual")
)


def _repeats(node: Node) -> bool:
    """True if a node is an input, or a torch call that returns the same each time it is repeated."""
    if node.op == "placeholder":
        return True
    if node.op not in ("call_function", "call_method") or draws_random_numbers(node):
        return False
    is_custom = hasattr(node.target, "_schema") and str(node.target).split(".")[0] not in ("aten", "prims")
    return not is_custom and getattr(node.target, "__name__", "") not in _OF_TRANSFORMS


def _under_autocast(nodes: Sequence[Node]) -> bool:
    """True if one of these calls is inside an autocast context that the function itself enters."""
    calls, depth = set(nodes), 0
    for node in nodes[-1].graph.nodes:
        name = getattr(node.target, "__name__", "")
        depth += (name == "_enter_autocast") - (name == "_exit_autocast")
        if depth and node in calls and node.op != "placeholder":
            return True
    return False


class _Writes:
    """The memory that the calls of a graph write to, while the graph grows."""

    def __init__(self) -> None:
        self._last: Node | None = None
        self._written: set[int] = set()

    def reach(self, nodes: Sequence[Node]) -> bool:
        """True if a call so far has written to the memory of one of these nodes."""
        self._look(nodes[-1].graph)
        return any(internals.memory_of(node) in self._written for node in nodes)

    def _look(self, graph: Graph) -> None:
        """Adds the writes of the calls that were added to the graph since the last time."""
        last = self._last
        if last is None or last.graph is not graph or last._erased:
            self._written, last = set(), next(iter(graph.nodes))
        for node in reversed(list(_until(last, graph))):
            found = [internals.memory_of(n) for n in written_arguments(node)]
            self._written.update(m for m in found if m is not None)
            self._last = node


def _until(last: Node, graph: Graph) -> Iterator[Node]:
    """The nodes of a graph from its end back to `last`."""
    for node in reversed(graph.nodes):
        yield node
        if node is last:
            return


#: Functions whose arguments decide if they draw: the names, places and defaults of these arguments.
_DRAWING_BY = {
    "multi_head_attention_forward": (("dropout_p", 10, 0.0), ("training", 13, True)),
    "rrelu": (("training", 3, False),),
    "scaled_dot_product_attention": (("dropout_p", 4, 0.0),),
}


def draws_random_numbers(node: torch.fx.Node) -> bool:
    """True if a call in Dynamo's graph, of a torch function or method, returns another result each time."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.partition(".")[0]  # of an overload
    if name in _DRAWING_BY:
        given = ((node.args[p] if p < len(node.args) else node.kwargs.get(n, d)) for n, p, d in _DRAWING_BY[name])
        return all(isinstance(argument, Node) or bool(argument) for argument in given)
    return draws(name)


def written_arguments(node: Node) -> list[Node]:
    """The arguments to which a torch call, as Dynamo captures it, may write."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if isinstance(node.target, HigherOrderOperator) or node.op == "call_module":
        return node.all_input_nodes
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return node.all_input_nodes if schema.is_mutable else []
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    given = _arguments(node)
    written: list[Any] = [given.get("out"), given.get("running_mean"), given.get("running_var")]
    if given.get("max_norm") is not None:
        written.append(given.get("weight"))
    if name in ("batch_norm", "instance_norm", "native_batch_norm"):  # torch's own functions
        written += () if hasattr(node.target, "__code__") else node.args[3:5]
    elif name in WRITERS and not name.startswith("__"):
        written += node.all_input_nodes
    # `operator.and_` and `or_` do not write: the underscore distinguishes them from Python's keywords.
    named_so = name.endswith("_") and not name.endswith("__") and node.target not in (operator.and_, operator.or_)
    of_numpy = getattr(node.target, "op", None) or getattr(node.target, "method", None)
    in_place = named_so or name in _IN_PLACE or given.get("inplace") or of_numpy in _IN_PLACE_OF_NUMPY
    if in_place or node.target in _OPERATORS_IN_PLACE:
        first = node.args[0] if node.args else node.kwargs.get("input")
        written += node.all_input_nodes if isinstance(first, (list, tuple)) else [first]
    found: list[Node] = []
    map_arg(written, found.append)
    return found


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name; for functions not written in Python, only keyword arguments."""
    parameters = _signature(node.target) if hasattr(node.target, "__code__") else None
    if parameters is None:
        return dict(node.kwargs)
    return dict(zip(parameters, node.args, strict=False)) | node.kwargs


@lru_cache(maxsize=1024)
def _signature(function: Any) -> tuple[str, ...] | None:
    try:
        return tuple(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        return None


def written_inputs(graph: Graph) -> list[bool]:
    """For each input of Dynamo's graph: True if it has a gradient and the graph may write into its memory."""
    written = {internals.memory_of(argument) for node in graph.nodes for argument in written_arguments(node)} - {None}
    return [
        internals.memory_of(node) in written and node.meta["example_value"].requires_grad
        for node in graph.find_nodes(op="placeholder")
    ]


#: Python's in-place operators, as functions and as methods of a tensor.
_OPERATORS_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in (
        "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub",
        "itruediv", "ixor", "setitem",
    )
)  # fmt: skip
_IN_PLACE = frozenset(f"__{f.__name__}__" for f in _OPERATORS_IN_PLACE)
#: Dynamo's calls on NumPy arrays that write in place: operators, and methods by name.
_IN_PLACE_OF_NUMPY = _OPERATORS_IN_PLACE | _IN_PLACE | {"fill", "itemset", "partition", "put", "resize", "sort"}


#: Calls on elements, which kernels compute as torch does, or to a unit in the last place.
_ELEMENTWISE = frozenset(
    (
        "abs", "add", "and_", "bool", "ceil", "clamp", "clone", "cos", "detach", "double", "eq", "exp", "float",
        "floor", "ge", "getitem", "gt", "invert", "isfinite", "isinf", "isnan", "le", "log", "logical_and",
        "logical_not", "logical_or", "lt", "maximum", "minimum", "mul", "ne", "neg", "not_", "or_", "pow", "relu",
        "reshape", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "sub", "tanh", "truediv", "trunc",
        "view", "where",
    )
)  # fmt: skip


def _is_elementwise(conditions: GraphModule, parameters: Sequence[torch.Tensor]) -> bool:
    """True if a kernel computes conditions as torch does. A sum in another order, and an f16 that is rounded later, may
    change the direction of a branch."""
    names = (
        n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        for n in conditions.graph.nodes if n.op.startswith("call")
    )  # fmt: skip
    return not any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters) and _ELEMENTWISE.issuperset(names)


class BranchCheck:
    """Checks that the branches of a graph keep the directions that they had when it was captured."""

    def __init__(self, conditions: GraphModule, parameters: Sequence[torch.Tensor]) -> None:
        self._conditions = conditions
        #: True if a kernel computes the conditions; else torch's own ops do.
        self._is_compiled = _is_elementwise(conditions, parameters)
        self._program: Program | None = None
        #: One value, so that threads never combine the state of one comparison with the answer of another.
        self._last = (_state(parameters), True)
        self._on_host = all(p.device.type == "cpu" for p in parameters)

    def __call__(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Checks the branches for these parameters. Those in host memory are compared at each call, because not every
        write increments a version (`p.data.mul_`, NumPy). A read of GPU memory must wait for the GPU: branches are
        computed only if a parameter has changed since the last call; torch counts no changes through `p.data`."""
        if self._on_host:
            return self._compare(parameters)
        state = _state(parameters)
        seen, answer = self._last
        if state != seen:
            answer = self._compare(parameters)
            self._last = state, answer
        return answer

    def _compare(self, parameters: Sequence[torch.Tensor]) -> bool:
        program = self._program
        if program is not None and not program.library_calls and not watchers and not dispatch_modes():
            (agree,) = program.run(list(parameters))  # kernels, which are invisible to autograd and modes
            return string_at(agree.data_ptr(), 1) != b"\0" if self._on_host else bool(agree)
        with torch.no_grad(), without_modes(), unwatched():
            if program is None and self._is_compiled:
                program = self._compile(parameters)
            if program is not None:
                return bool(program.run(list(parameters))[0])
            return bool(self._conditions.forward(*(p.detach() for p in parameters))[0])

    def _compile(self, parameters: Sequence[torch.Tensor]) -> Program | None:
        from torch.fx.experimental.proxy_tensor import make_fx

        given = [p.detach() for p in parameters]
        try:
            traced = make_fx(self._conditions, tracing_mode="fake")(*given)
        except RuntimeError:  # an index that is a value: fake tensors have no values
            self._is_compiled = False
            return None
        made = Program(traced)
        # The first comparison is with the values that the branches followed.
        if bool(made.run(list(parameters))[0]) != bool(self._conditions.forward(*given)[0]):
            self._is_compiled = False
            return None
        self._program = made
        return made


def _state(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """A state that differs if a parameter's values differ.

    In host memory it is the parameter's bytes, because not every write increments its version (`p.data.mul_`, NumPy).
    On a device it changes if the parameter is another tensor, was written to, or has another address.
    """
    # An address of 0: the memory was freed, as that of sharded parameters is.
    return [
        string_at(address, p.nbytes) if p.is_cpu and p.is_contiguous() and (address := p.data_ptr()) else _version(p)
        for p in parameters
    ]


def _version(parameter: torch.Tensor) -> tuple[Any, ...]:
    version = object() if parameter.is_inference() else parameter._version
    return id(parameter), version, parameter.data_ptr()
