"""The backend of torch.compile: AOTAutograd's graphs become programs of kernels and library calls.

`torch.compile(model, backend="opgraph")` finds it by name through the entry point `torch_dynamo_backends`, and
`ogt.fuse(model)` uses it in the same way.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import set_checkpoint_debug_enabled

from opgraph.errors import InvalidArguments, OpGraphError
from opgraph.ir.collector import no_collector
from opgraph.loops.lower import ROUNDINGS
from opgraph.runtime.providers.torch_internals import HigherOrderOperator, is_forward_mode, without_modes
from opgraph.torch.graph.boundaries import compile_parts
from opgraph.torch.graph.branches import draws_random_numbers, fold_branches, written_arguments
from opgraph.torch.graph.common_subexpressions import share_common_subexpressions
from opgraph.torch.graph.decompositions import decompositions
from opgraph.torch.graph.given import Hooks, backward_of
from opgraph.torch.graph.known_faults import (
    copy_overlapping_results,
    fault_of_frame,
    lost_write,
    remove_idle_dropout,
    with_inputs_returned,
)
from opgraph.torch.graph.layouts import channels_last
from opgraph.torch.graph.norms import shows_statistics
from opgraph.torch.graph.origin import mark_recomputed
from opgraph.torch.graph.program import Program
from opgraph.torch.graph.saved import Memory, check_memory, partitioner
from opgraph.torch.graph.second_derivatives import with_second_derivatives
from opgraph.torch.graph.sizes import SizedPrograms, has_symbols
from opgraph.torch.graph.torch_internals import (
    aot_backend,
    capture_errors,
    checkpoints_that_draw,
    guard_methods,
    keep_saved_tensors,
    memory_of,
    run_as_written,
)
from opgraph.torch.graph.undefined_gradients import dependencies, with_undefined_gradients
from opgraph.torch.tracing.places import users_level

_WHERE = 'torch.compile(backend="opgraph")'


@dataclass(slots=True)
class Captured:
    """One graph that Dynamo captured, compiled; or one of its parts, where results are computed from other results.

    Attributes:
        graph: of torch functions, as Dynamo gave it.
        part: which part; 0 for the first or only one.
        inference: the program of a call without gradients.
        forward, backward: those of a call with gradients; backward is compiled with forward.
    """

    graph: GraphModule
    part: int = 0
    inference: Program | SizedPrograms | None = None
    forward: Program | SizedPrograms | None = None
    backward: Program | SizedPrograms | None = None


#: Called when a graph of any backend begins to run; an empty list costs a call 30 ns.
on_run: list[Callable[[], None]] = []
_observers: ContextVar[tuple[Callable[[Captured], None], ...]] = ContextVar("observers", default=())


@contextmanager
def observed(observer: Callable[[Captured], None]) -> Iterator[None]:
    """While this lasts, the observer receives each graph, or each part of one, when its compilation begins."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def backend(
    graph: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles a graph that torch.compile captured, for training and for inference.

    Args:
        graph: of torch functions.
        example_inputs: fake or real tensors, and sizes.
        options: `memory` and `rounding`, as `ogt.fuse` takes them.

    Raises:
        InvalidArguments: another option, or a value that it does not have.
    """
    known = {"memory": "least", "rounding": "store"}
    unknown = [name for name in options or () if name not in known]
    if unknown:
        raise InvalidArguments(
            f"there is no option {unknown[0]!r}", where=_WHERE, fix=f"the options are {', '.join(known)}"
        )
    made: Callable[..., Any] = compiler(**{**known, **(options or {})})(graph, example_inputs)
    return made


def new_compiler(memory: Memory = "least", rounding: str = "store") -> Callable[..., Any]:
    """The backend for one choice of what to keep and how to round.

    Dynamo gives what it compiled with one backend to no other one, so this compiles everything anew.

    Raises:
        InvalidArguments: there is no such choice.
    """
    check_memory(memory)
    check_rounding(rounding)
    prepare_dynamo()

    @no_collector()
    def compile(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if _has_streams(graph):  # kernels of a program are all on one stream
            warnings.warn(
                "a function that enters streams of a device runs as it was written; what it calls is fused",
                stacklevel=users_level(),
            )
            raise run_as_written("it enters streams")
        fault = fault_of_frame(graph)
        if fault:
            warnings.warn(f"a function that {fault}", stacklevel=users_level())
            raise run_as_written(fault)
        remove_idle_dropout(graph)
        lost = lost_write(graph)
        if lost:
            warnings.warn(
                f"a graph that writes into {lost} runs unfused: torch.compile gets the write wrong",
                stacklevel=users_level(),
            )
            return _unfused(graph)
        number = count()
        with set_checkpoint_debug_enabled(False):  # AOTAutograd raises an error where a region has debug=True
            return with_inputs_returned(
                graph,
                lambda: _with_unread_draws(
                    graph,
                    lambda: _as_written_with_tangents(
                        graph,
                        compile_parts(graph, example_inputs, lambda part, args: compile_one(part, args, next(number))),
                    ),
                ),
            )

    def compile_one(graph: GraphModule, example_inputs: Sequence[Any], number: int) -> Callable[..., Any]:
        copy_overlapping_results(graph)
        captured = Captured(graph, number)
        hooks = Hooks()
        computed: set[str] = set()
        for observer in _observers.get():
            observer(captured)

        def part(name: str) -> Callable[..., Any]:
            @no_collector()  # backward is compiled by its first call
            def build(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                def make(sized: GraphModule, **how: Any) -> Program:
                    with without_modes():
                        return Program(sized, rounding, phase=name, **how)

                if name == "forward":
                    computed.update(n.name for n in module.graph.nodes if n.op == "call_function")
                elif name == "backward":
                    mark_recomputed(module.graph, computed)
                if name == "inference":
                    share_common_subexpressions(module.graph)
                    channels_last(module)
                program = SizedPrograms(module, make) if has_symbols(module) else make(module)
                setattr(captured, name, program)
                if name == "inference":
                    return program.run
                keep_saved_tensors()  # kernels and library calls write over none
                return hooks.noted(program.run) if name == "forward" else backward_of(program, hooks)

            return build

        depends = dependencies(graph, example_inputs)
        try:
            with checkpoints_that_draw() if _has_checkpoint_that_draws(graph) else nullcontext():
                made: Callable[..., Any] = aot_backend(
                    fw_compiler=part("forward"),
                    bw_compiler=part("backward"),
                    inference_compiler=part("inference"),
                    partition_fn=partitioner(memory),
                    decompositions=decompositions(shows_statistics=shows_statistics(graph)),
                    keep_inference_input_mutations=True,
                )(graph, example_inputs)
        except Exception as error:  # this graph alone, for those before it in the same call have run
            if isinstance(error, (OpGraphError, *capture_errors())):
                raise
            said = str(error).splitlines() or [type(error).__name__]
            warnings.warn(
                f"a graph of {len(graph.graph.nodes)} calls runs unfused: {said[0]}", stacklevel=users_level()
            )
            return _unfused(graph)
        call = with_second_derivatives(graph, made, any(map(_draws, graph.graph.nodes)))
        return with_undefined_gradients(call, depends)

    compile.is_opgraph = True  # type: ignore[attr-defined]
    return compile


#: The same, one for each choice: instances of one class share what Dynamo compiled of their methods, and its limit of
#: eight compilations of each.
compiler = lru_cache(maxsize=None, typed=True)(new_compiler)


def _unfused(graph: GraphModule) -> Callable[..., Any]:
    """What runs a graph of Dynamo as it is.

    Raises:
        SkipFrame, for Dynamo: a checkpoint in the graph draws, and the graph does not bring the generator back when it
            runs again in backward. The function runs as it was written.
    """
    if _has_checkpoint_that_draws(graph):
        raise run_as_written("a checkpoint in it draws random numbers")
    return graph.forward


def _has_checkpoint_that_draws(graph: GraphModule) -> bool:
    return any(isinstance(n.target, HigherOrderOperator) and _draws(n) for n in graph.graph.nodes)


def _has_streams(graph: GraphModule) -> bool:
    """Whether a graph of Dynamo's enters streams of a device, or waits for them: they are marks on its nodes."""

    def is_marked(node: Node) -> bool:
        marks = node.meta.get("custom") or {}
        value = node.meta.get("example_value")
        return (
            "stream" in marks
            or isinstance(value, (torch.Stream, torch.Event))
            or getattr(node.target, "namespace", "") == "streams"
        )

    return any(map(is_marked, graph.graph.nodes))


def _as_written_with_tangents(graph: GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What was compiled of a graph of Dynamo, after a call of `on_run`; in forward-mode differentiation, which programs
    lose, the graph runs."""

    def run(*args: Any) -> Any:
        for observer in on_run:
            observer()
        return graph.forward(*args) if is_forward_mode() else compiled(*args)

    return run


def _with_unread_draws(graph: GraphModule, compile: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What `compile` makes of a graph of Dynamo, which draws what the graph draws, read or not.

    AOTAutograd leaves out what no result is computed from. Eager torch draws the numbers, and every later one depends
    on how many were drawn before. So such calls become results of the graph, which the caller does not see.

    Args:
        graph: gets more results, which what is returned here leaves out.
        compile: called afterwards.
    """
    nodes = list(graph.graph.nodes)
    (output,) = graph.graph.find_nodes(op="output")
    draws = [n for n in nodes if _draws(n)]
    read = _read(nodes, output) if draws else set()
    unread = [n for n in draws if n not in read]
    if not unread:
        return compile()
    number = len(output.args[0])
    with graph.graph.inserting_before(output):
        made = [part for n in unread for part in _tensors(n)]
        output.args = ((*output.args[0], *(graph.graph.call_method("detach", (n,)) for n in made)),)
    graph.recompile()
    call = compile()
    return lambda *args: tuple(call(*args)[:number])


def _draws(node: Node) -> bool:
    """Whether a node is a call that draws random numbers, itself or in a function that it runs, as checkpoints do."""
    if node.op not in ("call_function", "call_method"):
        return False
    arguments = [n for n in node.all_input_nodes if n.op == "get_attr"]
    bodies = [getattr(node.graph.owning_module, str(n.target), None) for n in arguments]
    return draws_random_numbers(node) or any(
        _draws(n) for body in bodies if isinstance(body, GraphModule) for n in body.graph.nodes
    )


def _tensors(node: Node) -> list[Node]:
    """The tensors that a call gives back, alone or in a tuple."""
    values = node.meta.get("example_value")
    if not isinstance(values, tuple):
        return [node]
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
    return [node.graph.call_function(operator.getitem, (node, place)) for place in places]


def _read(nodes: Sequence[Node], output: Node) -> set[Node]:
    """The nodes that a graph's results, or the memory of its inputs, are computed from; checkpoints may write, too."""
    memory = {memory_of(n) for n in nodes if n.op in ("placeholder", "get_attr")}
    calls = [n for n in nodes if not isinstance(n.target, HigherOrderOperator)]
    writes = [(n, found) for n in calls if (found := {memory_of(w) for w in written_arguments(n)})]
    read: set[Node] = set()
    waiting: Iterable[Node] = [output]
    while waiting:
        new = list(waiting)
        while new:
            node = new.pop()
            if node not in read:
                read.add(node)
                memory.add(memory_of(node))
                new += _read_by(node)
        memory.discard(None)
        waiting = [n for n, found in writes if n not in read and found & memory]
    return read


#: Calls that read of their first tensor, or of their second one, nothing but shape, dtype and device.
_READ_NO_FIRST = frozenset(
    (
        "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like",
        "randint_like", "randn_like", "zeros_like",
    )
)  # fmt: skip
_READ_NO_SECOND = frozenset(("expand_as", "reshape_as", "to", "type_as", "view_as"))


def _read_by(node: Node) -> list[Node]:
    """The arguments of a call that its result depends on, where AOTAutograd leaves others out."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in _READ_NO_FIRST or name in _READ_NO_SECOND:
        unread = node.args[:1] if name in _READ_NO_FIRST else node.args[1:2]
        return [n for n in node.all_input_nodes if n not in unread or node.args.count(n) > 1]
    if node.target is operator.getitem:
        parts, place = node.args
        if isinstance(parts, Node) and parts.target is torch.broadcast_tensors:
            given: Any = parts.args
            return [given[place]]
    return node.all_input_nodes


@cache
def prepare_dynamo() -> None:
    """From now on, Dynamo follows branches on parameters and guards on methods for this backend.

    It must be called before Dynamo traces.
    """
    fold_branches(_is_ours)
    guard_methods(_is_ours)


def _is_ours(backend: Any) -> bool:
    return getattr(backend, "is_opgraph", False)


backend.is_opgraph = True  # type: ignore[attr-defined]


def check_rounding(rounding: object) -> None:
    """Raises InvalidArguments where there is no such rounding."""
    if rounding not in ROUNDINGS:
        raise InvalidArguments(f"unknown rounding {rounding!r}", where="fuse", fix=f"use one of {', '.join(ROUNDINGS)}")
