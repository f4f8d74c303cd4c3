"""Runs a graph on torch tensors: as one kernel launched on their addresses, or as an executable if it needs more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opgraph.errors import InvalidArguments, InvalidDataType
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime import huge_pages, memory_pool
from opgraph.runtime.engine import Engine
from opgraph.runtime.executable import Executable
from opgraph.runtime.graph_arguments import check_shape, check_symbols, symbolic
from opgraph.runtime.providers.torch import torch_dtype
from opgraph.runtime.providers.torch_prepared import (
    Run,
    Statements,
    Tensors,
    kernel_statements,
    of_spare_memory,
    result_names,
    tensor_names,
)
from opgraph.runtime.runner import Runner
from opgraph.torch.fused.shapes import Layout, Results


class Program:
    """A graph compiled for one device.

    Args:
        graph: finalized.
        device: the CPU or a GPU.
        rounding: as `opgraph.compile` takes it.
        layout: see Results.

    Raises:
        OpGraphError: as `opgraph.compile`.
    """

    def __init__(self, graph: Graph, device: torch.device, rounding: str, layout: Layout | None = None) -> None:
        self.graph = graph
        self._device = device
        self.results = Results(graph, layout)
        self._names = [port_name(t) for t in graph.inputs]
        self._outputs = [port_name(t) for t in graph.outputs]
        engine = Engine("cuda", device.index) if device.type == "cuda" else Engine("cpu")
        # `statements` compiles for the actual tensors: gradients are often broadcast, as from sum().
        self._executable = Executable(graph, engine, donate=(), rounding=rounding, waits=True)

    def statements(self, tensors: Tensors, names: Sequence[str] = ()) -> Statements:
        """The statements that run it on tensors of the same layout; the check of the tensors is done here, once.

        Args:
            names: the names of the tensors there; by default "t0", "t1" ...

        Raises:
            InvalidDataType, InvalidShape: the tensors do not match the inputs of the graph.
            DeviceError: a kernel does not compile.
        """
        check(self.graph, tensors)
        names = names or tensor_names(len(tensors))
        alone = self._executable.alone() if self.results.known else None
        run: Callable[[Tensors], Sequence[torch.Tensor]]
        if alone is None:
            run = self._run_into if self.results.known else self._run
        else:
            outs = self.results.empty(tensors)
            run = self._run_into if self._device.type == "cpu" else self._on_device(*alone)
            found = kernel_statements(*alone, tensors, outs, names, run)
            if found is not None:
                return found
        results = result_names(len(self._outputs))
        line = f"{''.join(f'{r}, ' for r in results)} = run(({''.join(f'{n}, ' for n in names)}))"
        return Statements((line,), results, {"run": run})

    def plan(self, tensors: Tensors) -> Run:
        """The same as a function of the tensors; it returns a tensor if there is one result, else a tuple."""
        return self.statements(tensors).function(tensor_names(len(tensors)))

    def _on_device(
        self, runner: Runner, reads: Sequence[int], writes: Sequence[int]
    ) -> Callable[[Tensors], list[torch.Tensor]]:
        """Runs one partition on a GPU: its runner accepts torch's tensors, and uses the current stream of each call."""

        def run(tensors: Tensors) -> list[torch.Tensor]:
            made = self.results.empty(tensors)
            runner([tensors[i].detach() for i in reads], [made[i] for i in writes])
            return made

        return run

    def _run_into(self, tensors: Tensors) -> list[torch.Tensor]:
        """Runs several partitions, or runs without a compiler: torch allocates the results."""
        outs = self.results.empty(tensors)
        for i, out in enumerate(outs):
            size = out.untyped_storage().nbytes() if out.is_cpu else 0
            if memory_pool.is_kept(size):
                outs[i] = of_spare_memory(size, out.dtype, out.shape, out.stride())
            else:
                huge_pages.advise(out.data_ptr(), size)
        self._executable(self._fed(tensors), out=dict(zip(self._outputs, outs)))
        return outs

    def _run(self, tensors: Tensors) -> list[torch.Tensor]:
        """Runs partitions with library ops, whose result shapes are known only after the run."""
        made = self._executable(self._fed(tensors))
        return list(made.values()) if isinstance(made, dict) else [made]

    def _fed(self, tensors: Tensors) -> dict[str, Any]:
        return dict(zip(self._names, [t.detach() for t in tensors], strict=True))


def check(graph: Graph, tensors: Tensors) -> None:
    """Raises InvalidArguments, InvalidDataType or InvalidShape if tensors do not match the inputs of a graph."""
    check_count(graph, tensors)
    for tensor, declared in zip(tensors, graph.inputs):
        where = f'input "{port_name(declared)}" of a fused call'
        if tensor.layout is not torch.strided:
            raise InvalidArguments(
                f"got a tensor of layout {tensor.layout}", where=where, fix="pass plain tensors: x.to_dense()"
            )
        if tensor.dtype != torch_dtype(declared.dtype):
            raise InvalidDataType(
                f"got a tensor of {tensor.dtype} for {declared.type_text}", where=where, fix="convert it: x.to(dtype)"
            )
        if tensor.device != tensors[0].device:
            raise InvalidArguments(
                f"tensors on {tensors[0].device} and {tensor.device} meet", where=where, fix="move them to one device"
            )
        check_shape(tuple(tensor.shape), declared.dims, where)
    check_symbols(symbolic(graph.inputs), tensors, "inputs", " of a fused call")


def check_count(graph: Graph, tensors: Tensors) -> None:
    """Raises InvalidArguments if the number of tensors differs from the number of inputs."""
    if len(tensors) != len(graph.inputs):
        raise InvalidArguments(
            f"got {len(tensors)} tensors for {len(graph.inputs)} inputs",
            where="a fused call",
            fix=f"pass {', '.join(map(port_name, graph.inputs)) or 'none'}",
        )
