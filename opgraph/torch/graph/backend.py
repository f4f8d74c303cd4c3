"""The backend of torch.compile: what AOTAutograd captured becomes programs of kernels and library calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from opgraph.errors import InvalidArguments
from opgraph.torch.graph.decompositions import decompositions
from opgraph.torch.graph.program import Program
from opgraph.torch.graph.saved import partitioner
from opgraph.torch.graph.torch_internals import aot_backend, without_modes


def backend(
    graph: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """What runs a graph that torch.compile captured, in training and in inference."""
    given = dict(options or {})
    memory = given.pop("memory", "least")
    if given:
        raise InvalidArguments(
            f"there is no option {next(iter(given))!r}", where='torch.compile(backend="opgraph")', fix="use memory="
        )
    compiler = aot_backend(
        fw_compiler=_compiler("forward"),
        bw_compiler=_compiler("backward"),
        inference_compiler=_compiler("inference"),
        partition_fn=partitioner(memory),
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )
    made: Callable[..., Any] = compiler(graph, example_inputs)
    return made


PROGRAMS = {}

def _compiler(role: str) -> Callable[..., Any]:
    def compile(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with without_modes():
            program = Program(module)
        PROGRAMS[role] = program
        run = program.run
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile
