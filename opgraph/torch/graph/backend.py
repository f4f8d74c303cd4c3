"""The backend of torch.compile: AOTAutograd's graphs become programs of kernels and library calls.

`torch.compile(model, backend="opgraph")` finds it by name through the entry point `torch_dynamo_backends`, and
`ogt.fuse(model)` uses it in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

from torch.fx import GraphModule

from opgraph.errors import InvalidArguments, OpGraphError, Unimplemented
from opgraph.loops.lower import ROUNDINGS
from opgraph.torch.graph.boundaries import compile_parts
from opgraph.torch.graph.branches import fold_branches
from opgraph.torch.graph.decompositions import decompositions
from opgraph.torch.graph.given import Hooks, backward_of
from opgraph.torch.graph.program import Program
from opgraph.torch.graph.saved import Memory, check_memory, partitioner
from opgraph.torch.graph.sizes import SizedPrograms, has_symbols
from opgraph.torch.graph.torch_internals import (
    CAPTURE_ERRORS,
    aot_backend,
    has_streams,
    keep_saved_tensors,
    run_as_written,
    with_second_derivatives_refused,
    without_modes,
)
from opgraph.torch.graph.undefined_gradients import dependencies, with_undefined_gradients
from opgraph.torch.graph.unread_draws import with_unread_draws

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


def compiler(memory: Memory = "least", rounding: str = "store") -> Callable[..., Any]:
    """The backend for one choice of what to keep and how to round.

    Raises:
        InvalidArguments: there is no such choice.
    """
    check_memory(memory)
    check_rounding(rounding)
    follow_branches()

    def compile(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if has_streams(graph.graph):  # kernels of a program are all on one stream
            warnings.warn(
                "a function that enters streams of a device runs as it was written; what it calls is fused",
                stacklevel=2,
            )
            raise run_as_written("it enters streams")
        number = count()
        return with_unread_draws(
            graph,
            lambda: compile_parts(graph, example_inputs, lambda part, inputs: compile_one(part, inputs, next(number))),
        )

    def compile_one(graph: GraphModule, example_inputs: Sequence[Any], number: int) -> Callable[..., Any]:
        captured = Captured(graph, number)
        hooks = Hooks()
        for observer in _observers.get():
            observer(captured)

        def part(name: str) -> Callable[..., Any]:
            def build(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                def make(sized: GraphModule) -> Program:
                    with without_modes():
                        return Program(sized, rounding)

                program = SizedPrograms(module, make) if has_symbols(module) else make(module)
                setattr(captured, name, program)
                if name == "inference":
                    return program.run
                keep_saved_tensors()  # kernels and library calls write over none
                return hooks.noted(program.run) if name == "forward" else backward_of(program, hooks)

            return build

        depends = dependencies(graph, example_inputs)
        try:
            made: Callable[..., Any] = aot_backend(
                fw_compiler=part("forward"),
                bw_compiler=part("backward"),
                inference_compiler=part("inference"),
                partition_fn=partitioner(memory),
                decompositions=decompositions(),
                keep_inference_input_mutations=True,
            )(graph, example_inputs)
        except Exception as error:  # this graph alone, for those before it in the same call have run
            if isinstance(error, (OpGraphError, *CAPTURE_ERRORS)):
                raise
            said = str(error).splitlines() or [type(error).__name__]
            warnings.warn(f"a graph of {len(graph.graph.nodes)} calls runs unfused: {said[0]}", stacklevel=2)
            return graph.forward
        return with_undefined_gradients(with_second_derivatives_refused(made, _no_second_derivative), depends)

    compile.is_opgraph = True  # type: ignore[attr-defined]
    return compile


def _no_second_derivative() -> Unimplemented:
    return Unimplemented(
        "a fused model has first derivatives alone",
        where="the gradient of a gradient that backward made with create_graph=True",
        fix="ogt.unfuse(model), or fuse functions (`@ogt.fuse`, `ogt.Activation`), which have all derivatives",
    )


@cache
def follow_branches() -> None:
    """From now on, Dynamo follows branches on parameters for this backend; it must be said before Dynamo traces."""
    fold_branches(lambda backend: getattr(backend, "is_opgraph", False))


backend.is_opgraph = True  # type: ignore[attr-defined]


def check_rounding(rounding: object) -> None:
    """Raises InvalidArguments where there is no such rounding."""
    if rounding not in ROUNDINGS:
        raise InvalidArguments(f"unknown rounding {rounding!r}", where="fuse", fix=f"use one of {', '.join(ROUNDINGS)}")
