"""The backend of torch.compile: AOTAutograd's graphs become programs of kernels and library calls.

`torch.compile(model, backend="opgraph")` finds it by name through the entry point `torch_dynamo_backends`, and
`ogt.fuse(model)` uses it in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.checkpoint import set_checkpoint_debug_enabled

from opgraph.errors import InvalidArguments, OpGraphError
from opgraph.ir.pause_gc import no_collector
from opgraph.loops.lower import ROUNDINGS
from opgraph.runtime.providers.torch_internals import (
    HigherOrderOperator,
    is_batched,
    is_forward_mode,
    without_autocast,
    without_modes,
)
from opgraph.runtime.providers.torch_prepared import MAX_READY, Check, check_of
from opgraph.torch.graph.aten import is_random, value_of
from opgraph.torch.graph.autograd_boundaries import compile_parts, with_views_of_no_grad, written_later
from opgraph.torch.graph.common_subexpressions import share_common_subexpressions
from opgraph.torch.graph.decompositions import decompositions
from opgraph.torch.graph.dynamic_shapes import SizedPrograms, has_symbols
from opgraph.torch.graph.eager_gradients import dependencies, with_gradients_of_eager
from opgraph.torch.graph.graph_modes import as_written
from opgraph.torch.graph.known_faults import (
    copy_overlapping_results,
    correct_native_dropout,
    draws_numbers,
    fault_of_frame,
    fault_of_graph,
    overlap_check,
    remove_idle_dropout,
    with_own_results,
    with_random_numbers,
)
from opgraph.torch.graph.layouts import channels_last
from opgraph.torch.graph.min_cut import Memory, check_memory, partitioner
from opgraph.torch.graph.node_origin import mark_recomputed
from opgraph.torch.graph.norm_decompositions import shows_statistics
from opgraph.torch.graph.parameter_branches import fold_branches
from opgraph.torch.graph.program import Program
from opgraph.torch.graph.program_text import restrided, same_strides
from opgraph.torch.graph.symbolic_program import SizedProgram
from opgraph.torch.graph.torch_internals import (
    aot_backend,
    capture_errors,
    checkpoints_that_draw,
    guard_methods,
    keep_saved_tensors,
    run_as_written,
)
from opgraph.torch.graph.undefined_gradients import gradients_of_results, is_undefined, without_gradients
from opgraph.torch.tracing.trace_errors import users_level

_WHERE = 'torch.compile(backend="opgraph")'


@dataclass(slots=True)
class Captured:
    """One compiled graph that Dynamo captured; or one of its parts, if results are computed from other results.

    Attributes:
        graph: Dynamo's graph of torch functions.
        part: the number of the part; 0 for the first or only one.
        inference: the program of a call without gradients.
        forward, backward: the programs of a call with gradients. The first backward pass compiles its program, and so
            does a pass in which other results have no gradient; `backward` is the latest one.
    """

    graph: GraphModule
    part: int = 0
    inference: Program | SizedPrograms | None = None
    forward: Program | SizedPrograms | None = None
    backward: Program | SizedPrograms | None = None


#: Functions to call when a graph of any backend begins to run; an empty list costs a call 30 ns.
on_run: list[Callable[[GraphModule], None]] = []
_observers: ContextVar[tuple[Callable[[Captured], None], ...]] = ContextVar("observers", default=())


@contextmanager
def observed(observer: Callable[[Captured], None]) -> Iterator[None]:
    """Within this context, the observer receives each graph, or each part of one, when its compilation begins."""
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
        graph: a graph of torch functions.
        example_inputs: fake or real tensors, and sizes.
        options: `memory` and `rounding`, as `ogt.fuse` takes them.

    Raises:
        InvalidArguments: an unknown option, or an unknown value of one.
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
    """A new backend for one choice of saved tensors and rounding.

    Dynamo does not share compiled code between backends, so a new backend compiles everything again.

    Raises:
        InvalidArguments: there is no such choice.
    """
    check_memory(memory)
    check_rounding(rounding)
    prepare_dynamo()

    @no_collector()
    def compile(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if _has_streams(graph):  # all kernels of a program run on one stream
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
        correct_native_dropout(graph)
        fault = fault_of_graph(graph)
        if fault:
            warnings.warn(f"a graph that {fault}", stacklevel=users_level())
            return _unfused(graph)
        inputs = with_random_numbers(graph, example_inputs)
        if inputs is None:
            warnings.warn(
                "a graph of f64 tensors and of numbers of Python's `random` runs unfused: torch.compile rounds them",
                stacklevel=users_level(),
            )
            return _unfused(graph)
        number = count()
        with set_checkpoint_debug_enabled(False):  # AOTAutograd raises an error if a region has debug=True
            return with_views_of_no_grad(
                graph,
                lambda: with_own_results(
                    graph,
                    lambda: _as_written_with_tangents(
                        graph,
                        compile_parts(graph, inputs, lambda part, args: compile_one(part, args, next(number))),
                    ),
                ),
            )

    def compile_one(graph: GraphModule, example_inputs: Sequence[Any], number: int) -> Callable[..., Any]:
        copy_overlapping_results(graph)
        captured = Captured(graph, number)
        default_dtype = torch.get_default_dtype()
        computed: set[str] = set()
        for observer in _observers.get():
            observer(captured)

        def part(name: str) -> Callable[..., Any]:
            @no_collector()  # the first call of backward compiles it
            def build(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                def make_sized(sized: GraphModule, **how: Any) -> Program:
                    with without_modes():
                        return Program(sized, rounding, phase=name, **how)

                def make(module: GraphModule) -> Program | SizedPrograms:
                    return SizedPrograms(module, make_sized) if has_symbols(module) else make_sized(module)

                if name == "forward":
                    computed.update(n.name for n in module.graph.nodes if n.op == "call_function")
                    program = captured.forward = make(module)
                    keep_saved_tensors()  # kernels and library calls overwrite none of them
                    return program.run
                if name == "backward":
                    mark_recomputed(module.graph, computed)
                    keep_saved_tensors()
                    return _backward_of(module, make, captured, default_dtype)
                share_common_subexpressions(module.graph)
                channels_last(module)
                program = captured.inference = make(module)
                return program.run

            return build

        depends = dependencies(graph, example_inputs)
        try:
            with checkpoints_that_draw() if _has_checkpoint_that_draws(graph) else nullcontext():
                made: Callable[..., Any] = aot_backend(
                    fw_compiler=part("forward"),
                    bw_compiler=part("backward"),
                    inference_compiler=part("inference"),
                    partition_fn=partitioner(memory, written_later(graph)),
                    decompositions=decompositions(shows_statistics=shows_statistics(graph)),
                    keep_inference_input_mutations=True,
                )(graph, example_inputs)
        except Exception as error:  # only this graph runs unfused: those before it in the same call have run
            if isinstance(error, (OpGraphError, *capture_errors())):
                raise
            said = str(error).splitlines() or [type(error).__name__]
            warnings.warn(
                f"a graph of {len(graph.graph.nodes)} calls runs unfused: {said[0]}", stacklevel=users_level()
            )
            return _unfused(graph)
        draws = any(map(draws_numbers, graph.graph.nodes))
        return with_gradients_of_eager(graph, made, draws, depends, lambda: _gradients_may_depend_on_inputs(captured))

    compile.is_opgraph = True  # type: ignore[attr-defined]
    return compile


#: As `new_compiler`, but with one backend for each choice: instances of one class share the code that Dynamo compiled
#: for their methods, and its limit of eight compilations of each method.
compiler = lru_cache(maxsize=None, typed=True)(new_compiler)


def _unfused(graph: GraphModule) -> Callable[..., Any]:
    """The function that runs a graph of Dynamo unchanged.

    Raises:
        SkipFrame, for Dynamo: a checkpoint in the graph draws random numbers, and the graph does not restore the
            generator when it runs again in backward. The function runs as it was written.
    """
    if _has_checkpoint_that_draws(graph):
        raise run_as_written("a checkpoint in it draws random numbers")
    return as_written(graph)


def _has_checkpoint_that_draws(graph: GraphModule) -> bool:
    return any(isinstance(n.target, HigherOrderOperator) and draws_numbers(n) for n in graph.graph.nodes)


def _has_streams(graph: GraphModule) -> bool:
    """True if a graph of Dynamo enters streams of a device, or waits for them; marks on its nodes show that."""

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
    """Calls `on_run`, then the compiled graph. Dynamo's graph runs instead in forward-mode differentiation, for which
    programs have no tangents, and if an argument that it writes into overlaps with another one."""
    overlaps, written = overlap_check(graph), as_written(graph)

    def run(*args: Any) -> Any:
        for observer in on_run:
            observer(graph)
        if is_forward_mode() or (overlaps is not None and overlaps(args)):
            return written(*args)
        return compiled(*args)

    return run


@cache
def prepare_dynamo() -> None:
    """Makes Dynamo follow branches on parameters, and guard on methods, for this backend from now on.

    It must be called before Dynamo traces.
    """
    fold_branches(_is_ours)
    guard_methods(_is_ours)


def _is_ours(backend: Any) -> bool:
    return getattr(backend, "is_opgraph", False)


backend.is_opgraph = True  # type: ignore[attr-defined]


def check_rounding(rounding: object) -> None:
    """Raises InvalidArguments if there is no such rounding."""
    if rounding not in ROUNDINGS:
        raise InvalidArguments(f"unknown rounding {rounding!r}", where="fuse", fix=f"use one of {', '.join(ROUNDINGS)}")


def _gradients_may_depend_on_inputs(captured: Captured) -> bool:
    """True if a graph's backward reads floats that forward saved, and that are computed from the graph's inputs."""
    assert captured.forward is not None and captured.backward is not None
    follows: set[str] = set()
    for node in captured.forward.module.graph.nodes:
        if node.op == "placeholder" or (not is_random(node) and any(n.name in follows for n in node.all_input_nodes)):
            follows.add(node.name)
    read = [n for n in captured.backward.module.graph.nodes if n.op == "placeholder" and n.users and n.name in follows]
    values = [n.meta.get("val") for n in read]
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def _backward_of(
    module: GraphModule,
    make: Callable[[GraphModule], Program | SizedPrograms],
    captured: Captured,
    default_dtype: torch.dtype,
) -> Callable[[list[Any]], Any]:
    """Returns a backward function that accepts all arguments that autograd may pass. It compiles one program for each
    set of undefined gradients.

    A program takes addresses, and contains strides as numbers. Under a transform of torch.func, and in
    `autograd.grad(is_grads_batched=True)`, a tensor may represent a batch and have no address, and under
    `forward_ad.dual_level` it may have a tangent: the graph is then run op by op. A saved tensor may have other strides
    than it was saved with, after saved-tensor hooks or a change of a parameter's `.data`. It is copied into the strides
    that the program was made for. Masks, which eager torch may not save, may come back from hooks as numbers.

    Args:
        default_dtype: torch's default dtype in forward. Ops without a dtype, as `arange`, depend on it.
    """
    examples = [value_of(n) for n in module.graph.find_nodes(op="placeholder")]
    given_gradients = gradients_of_results(module)
    programs: dict[tuple[int, ...], Program | SizedPrograms] = {}
    places = [place for place, example in enumerate(examples) if isinstance(example, torch.Tensor)]
    #: By the undefined gradients: checks of torch, each true of arguments like those of one of the last calls.
    checks: dict[tuple[int, ...], tuple[Check, ...]] = {}

    def backward(args: list[Any]) -> Any:
        present = torch.get_default_dtype()
        if present is default_dtype:
            return run(args)
        torch.set_default_dtype(default_dtype)
        try:
            return run(args)
        finally:
            torch.set_default_dtype(present)

    def run(args: list[Any]) -> Any:
        with without_autocast():  # AOTAutograd traced it without autocast, which the caller may have entered since
            missing = tuple([place for place in given_gradients if is_undefined(args[place])])
            program = programs.get(missing)
            if program is None:
                program = programs[missing] = make(without_gradients(module, missing) if missing else module)
                captured.backward = program
            if is_batched() or is_forward_mode():
                given = args[:]
                args.clear()
                return Interpreter(program.module).run(*given)
            tensors = tuple([args[place] for place in places])
            known = checks.get(missing, ())
            if not any(check(*tensors) for check in known):
                _fit(args, examples)
                _restride(program.sized(args) if isinstance(program, SizedPrograms) else program, args)
                is_same = all(args[place] is tensor for place, tensor in zip(places, tensors, strict=True))
                if is_same and not any(t.is_nested for t in tensors) and (check := check_of(tensors)) is not None:
                    checks[missing] = (*known[1 - MAX_READY :], check)
            del tensors  # the program frees each after its last use
            return program.run(args)

    backward._boxed_call = True  # type: ignore[attr-defined]
    return backward


def _fit(args: list[Any], examples: Sequence[Any]) -> None:
    """Converts masks back to bool if saved-tensor hooks changed their dtype, and negated views to what they show.

    Raises:
        InvalidArguments: a saved tensor has another dtype, device or shape than it had in forward.
    """
    for place, (given, example) in enumerate(zip(args, examples, strict=True)):
        if not isinstance(given, torch.Tensor):
            continue
        if example.dtype is torch.bool and given.dtype is not torch.bool:
            args[place] = given = given != 0
        if given.is_neg() and not example.is_neg():
            args[place] = given = given.resolve_neg()
        sizes = [size if isinstance(size, int) else own for size, own in zip(example.shape, given.shape, strict=False)]
        if given.dtype is example.dtype and given.device == example.device and list(given.shape) == sizes:
            continue
        raise InvalidArguments(
            f"{given.dtype} of shape {list(given.shape)} on {given.device} is there for {example.dtype} of shape "
            f"{list(example.shape)} on {example.device}",
            where="a tensor that a captured graph kept for backward",
            fix="let unpack_hook return what pack_hook was given, of its dtype, and change a parameter's or an input's "
            "`.data` (`model.to(...)`) after backward",
        )


def _restride(program: Program | SizedProgram, args: list[Any]) -> None:
    """Copies the arguments whose strides differ from those that the program was made for."""
    for place, strides in enumerate(program.input_strides):
        given = args[place]
        if strides is not None and isinstance(given, torch.Tensor) and not same_strides(given, strides):
            args[place] = restrided(given, strides)
