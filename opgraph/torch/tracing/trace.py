"""Tracing: converts a Python function of torch ops to og.Graphs, one for each path through the function.

`Tracer(fn)(args, kwargs)` runs the function once, on proxies instead of data tensors, and returns a `Run`: the graph
of the operations on data, the tensors that the graph reads, in the order of its inputs, and the structure of the
function's result, with the graph's results in it. Operations that do not involve data run in torch unchanged:
arithmetic of 0-d parameters, Python branches on them, views of arguments. Autograd records them.

Data are tensor arguments of one dimension or more (in lists, tuples and dicts too). 0-d tensors stay real, as
arguments too. Parameters, buffers and other tensors that are used together with data are captured: they become inputs
of the graph, in the order in which they are first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opgraph.errors import InvalidArguments
from opgraph.ir.graph import Graph
from opgraph.runtime.bounded_dict import Bounded
from opgraph.torch.autograd_function_hooks import functions_on_stack
from opgraph.torch.tracing import trace_errors
from opgraph.torch.tracing.build import build, needed, pattern
from opgraph.torch.tracing.emit import name_of
from opgraph.torch.tracing.guard_discovery import compares_classes, written
from opgraph.torch.tracing.proxy import Proxy, Ref
from opgraph.torch.tracing.result_layout import Layout
from opgraph.torch.tracing.session import Input, Node, Session, Step
from opgraph.torch.tracing.tensor_calls import Watch

#: The number of shapes that are stored for one path through a function.
MOST_SHAPES = 256


@dataclass(slots=True, eq=False)
class Traced:
    """One path through a function, for one pattern of shapes.

    Attributes:
        graph: finalized; its inputs are the tensors of a Run, its outputs the results that are computed.
        inputs: the names of its inputs: an argument's, an attribute's, or "captured_<n>".
        outputs: the function's result with Output and Kept in place of tensors: an Output, a Kept, or tuples, lists
            and dicts of these.
        layout: the memory layout that torch would give the results of the graph.
        op: the object that runs the graph; set by `fuse`.
    """

    graph: Graph
    inputs: tuple[str, ...]
    outputs: Any
    layout: Layout
    op: Any = None

    def result(self, results: Sequence[torch.Tensor], kept: Sequence[Any]) -> Any:
        """The function's result, from those of the graph, in the order of its outputs, and a Run's `kept`."""
        return filled(self.outputs, results, kept)


@dataclass(frozen=True, slots=True)
class Run:
    """One call of a function.

    Attributes:
        traced: None if no data were used; the result is then `kept[0]`.
        tensors: the inputs of the graph, in order.
        kept: the objects that the function returned unchanged.
        leaf: holds the graphs for other shapes.
        asks: True if the function read the shape or the requires_grad of a tensor.
    """

    traced: Traced | None
    tensors: tuple[torch.Tensor, ...]
    kept: tuple[Any, ...]
    leaf: Leaf | None = None
    asks: bool = False


@dataclass(slots=True)
class Leaf:
    """The end of one path through the function.

    Attributes:
        structure, outputs: the function's result, and the values in it with their names.
        steps: the ops that the outputs depend on.
        layout: torch's memory layout of the outputs.
        reads: the indices of the run's inputs that the steps read.
        by_shapes: the graphs, by the shapes of their tensors; by_pattern: fewer, by the pattern of shapes.
    """

    structure: Any
    outputs: tuple[tuple[Ref, str], ...]
    steps: list[Step]
    layout: Layout
    reads: tuple[int, ...]
    by_shapes: Bounded[Any, Traced] = field(default_factory=lambda: Bounded(MOST_SHAPES))
    by_pattern: dict[Any, Traced] = field(default_factory=dict)


class Tracer:
    """Traces a function, call by call.

    Args:
        fn: a function of torch ops, or any callable.
        names: the names of its positional parameters, for the graph's inputs.
        as_eager: for graphs that run with rounding="each": a number next to an f16 or bf16 operand is rounded where
            eager torch's kernels round it. Otherwise it is an f32.

    Each call runs `fn`; only calls that do something new build a graph.
    """

    def __init__(self, fn: Callable[..., Any], names: Sequence[str] = (), *, as_eager: bool = False) -> None:
        self.fn = fn
        self._names = tuple(names) or parameter_names(fn)
        self._compares = compares_classes(written(fn))
        self._as_eager = as_eager
        self._roots: dict[Any, Node] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch | None = None) -> Run:
        """Runs the function, and records its calls on real tensors in `watch`.

        Raises:
            OpGraphError: it does something that cannot be fused; the message names the line.
            Exception: any exception of the function itself.
        """
        if self._compares:
            raise trace_errors.compares_classes(self.fn)
        session = Session(Node(None, 0), torch.device("cpu"), watch, as_eager=self._as_eager)
        given = [self._given(session, a, self._name(i)) for i, a in enumerate(args)]
        named = {k: self._given(session, v, k) for k, v in kwargs.items()}
        session.arguments = {**{self._name(i): a for i, a in enumerate(args)}, **kwargs}
        if not session.inputs:
            return Run(None, (), (self.fn(*args, **kwargs),))
        session.device = session.inputs[0].tensor.device
        key = (torch.get_default_dtype(), *[i.tensor.dtype for i in session.inputs])
        session.node = self._roots.setdefault(key, Node(None, session.count))
        watch = watch or Watch()
        watch.before_write = session.keep_values
        with functions_on_stack(), watch:
            result = self.fn(*given, **named)
        session.asks |= any(call.is_question for call in watch.calls)
        return self._ended(session, result)

    def _name(self, index: int) -> str:
        return self._names[index] if index < len(self._names) else f"argument_{index}"

    def _given(self, session: Session, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_nested or value.is_quantized:
                raise InvalidArguments(
                    f"got a {'nested' if value.is_nested else 'quantized'} tensor",
                    where=f'argument "{name}" of a fused function',
                    fix=f"pass plain tensors: {'x.values()' if value.is_nested else 'x.dequantize()'}",
                )
            return session.argument(value, name) if value.dim() else value
        if type(value) in (list, tuple):
            return type(value)(self._given(session, v, f"{name}_{i}") for i, v in enumerate(value))
        if type(value) is dict:
            return {k: self._given(session, v, f"{name}_{k}") for k, v in value.items()}
        return value

    def _ended(self, session: Session, result: Any) -> Run:
        outputs: dict[Ref, int] = {}
        kept: list[Any] = []
        structure = structure_of(session, result, outputs, kept)
        session.finished = True
        if not outputs:
            return Run(None, (), (filled(structure, (), kept),))
        key = ("returns", *outputs, hashable(structure))
        node = session.node.after.get(key)
        if node is None:
            node = session.node.after[key] = Node(session.node, session.count)
            node.leaf = _leaf(node, structure, tuple(outputs), session.inputs)
        leaf: Leaf = node.leaf
        tensors = tuple([_on(session.inputs[i].tensor, session.device) for i in leaf.reads])
        shapes = tuple([t.shape for t in tensors])
        traced = leaf.by_shapes.get(shapes)
        if traced is None:
            traced = leaf.by_shapes[shapes] = self._traced(session, leaf)
        return Run(traced, tensors, tuple(kept), leaf, session.asks)

    def _traced(self, session: Session, leaf: Leaf) -> Traced:
        inputs = [session.inputs[i] for i in leaf.reads]
        dims = pattern(entry.tensor.shape for entry in inputs)
        found = leaf.by_pattern.get(dims)
        if found is None:
            known = tensor_names(self.fn, session.arguments)
            names = _unique(
                [
                    entry.name or known.get(id(entry.tensor)) or f"{'captured' if entry.captured else 'view'}_{i}"
                    for i, entry in enumerate(inputs)
                ],
                {name for _, name in leaf.outputs},
            )
            declared = [
                (entry.ref, name, name_of(entry.tensor.dtype, "an input"), d)
                for entry, name, d in zip(inputs, names, dims, strict=True)
            ]
            graph = build(leaf.steps, declared, leaf.outputs)
            found = leaf.by_pattern[dims] = Traced(graph, tuple(names), leaf.structure, leaf.layout)
        return found


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device: a captured 0-d tensor may be in host memory."""
    return tensor if tensor.device == device else tensor.to(device)


def _leaf(node: Node, structure: Any, outputs: tuple[Ref, ...], inputs: Sequence[Input]) -> Leaf:
    names = [f"out_{i}" for i in range(len(outputs))] if len(outputs) > 1 else ["out"]
    steps, wanted = needed(node.path(), outputs)
    reads = tuple(i for i, entry in enumerate(inputs) if entry.ref in wanted)
    layout = Layout(node.calls(), [inputs[i].ref for i in reads], outputs)
    return Leaf(structure, tuple(zip(outputs, names)), steps, layout, reads)


def _unique(names: Sequence[str], taken: set[str]) -> list[str]:
    result: list[str] = []
    for base in names:
        name, count = base, 2
        while name in taken:
            name, count = f"{base}_{count}", count + 1
        taken.add(name)
        result.append(name)
    return result


def trace(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Traced:
    """Traces one call.

    Args:
        fn: a function of torch ops.
        args, kwargs: its arguments; only dtypes and shapes of data count.

    Returns: its graph. Sizes are symbols in it, so that it is valid for all tensors of the same pattern: the same
        ranks, the same axes of size 1, the same axes equal.

    Raises:
        InvalidArguments: the result does not depend on data.
        OpGraphError: `fn` does something that cannot be fused.
    """
    run = Tracer(fn)(args, kwargs)
    if run.traced is None:
        raise InvalidArguments(
            "the function computes nothing from its tensor arguments",
            where=getattr(fn, "__qualname__", repr(fn)),
            fix="pass tensors of one dimension or more, and return what is computed from them",
        )
    return run.traced


def tensor_names(fn: Callable[..., Any], arguments: dict[str, Any]) -> dict[int, str]:
    """id of a tensor -> its name, for the tensors in reach of a function.

    Args:
        arguments: its arguments by name: tensors, modules and anything else.
    """
    found: dict[int, str] = {}
    for name, value in _in_reach(fn, arguments):
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), name)
        elif isinstance(value, torch.nn.Module):
            for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
                found.setdefault(id(tensor), inner)
            for inner, tensor in vars(value).items():
                if isinstance(tensor, torch.Tensor):
                    found.setdefault(id(tensor), inner)
    return found


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a callable's positional parameters; none if it has no Python code."""
    fn = _written(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return ()
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return names[1:] if getattr(fn, "__self__", None) is not None else names


def _written(fn: Callable[..., Any]) -> Any:
    """The original function under decorators; for a module, its forward."""
    return getattr(fn, "__wrapped__", fn.forward if isinstance(fn, torch.nn.Module) else fn)


def _in_reach(fn: Callable[..., Any], arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from arguments.items()
    fn = _written(fn)
    yield "self", getattr(fn, "__self__", fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, getattr(fn, "__closure__", None) or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for name in code.co_names:
        yield name, getattr(fn, "__globals__", {}).get(name)


@dataclass(frozen=True, slots=True)
class Output:
    """Stands in a result for the output of the graph with this index."""

    index: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Stands in a result for the `index`-th object that the function returned unchanged in a run."""

    index: int


def structure_of(session: Session, result: Any, outputs: dict[Ref, int], kept: list[Any]) -> Any:
    """A function's result with its leaves replaced by Output and Kept; fills `outputs` and `kept`.

    Raises:
        InvalidArguments: traced values in something that is no tuple, list or dict.
    """
    if type(result) is Proxy:
        if result.session is not session:
            raise trace_errors.leaked()
        if result.actual is None:
            return Output(outputs.setdefault(result.ref, len(outputs)))
        result = result.actual
    elif isinstance(result, dict) and type(result) is dict:
        return {k: structure_of(session, v, outputs, kept) for k, v in result.items()}
    elif type(result) in (list, tuple):
        return type(result)(structure_of(session, v, outputs, kept) for v in result)
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(structure_of(session, v, outputs, kept) for v in result))
    elif isinstance(result, (set, frozenset)) or hasattr(result, "__dict__"):
        _refuse_inside(result)
    kept.append(result)
    return Kept(len(kept) - 1)


def _refuse_inside(result: Any) -> None:
    values = result if isinstance(result, (set, frozenset)) else getattr(result, "__dict__", {}).values()
    if not isinstance(result, torch.Tensor) and any(type(v) is Proxy for v in values):
        raise InvalidArguments(
            f"a fused function returns its tensors in a {type(result).__name__}",
            where="the result of a fused function",
            fix="return a tensor, or a tuple, list or dict of tensors",
        )


def hashable(structure: Any) -> Any:
    """Converts a structure to a hashable key."""
    if isinstance(structure, dict):
        return (dict, *[(type(k), k, hashable(v)) for k, v in structure.items()])  # 1 is not True
    if isinstance(structure, (list, tuple)):
        return (type(structure), *map(hashable, structure))
    return structure


def filled(structure: Any, results: Sequence[Any], kept: Sequence[Any]) -> Any:
    """Builds the result from its structure."""
    if type(structure) is Output:
        return results[structure.index]
    if type(structure) is Kept:
        return kept[structure.index]
    if type(structure) is dict:
        return {k: filled(v, results, kept) for k, v in structure.items()}
    parts = [filled(v, results, kept) for v in structure]
    return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
