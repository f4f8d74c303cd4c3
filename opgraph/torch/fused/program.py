"""A graph on torch tensors: one kernel launched on their addresses, or an executable where it takes more than one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from opgraph.errors import InvalidArguments, InvalidDataType
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime import pages, spare
from opgraph.runtime.arguments import check_shape, check_symbols, symbolic
from opgraph.runtime.engine import Engine
from opgraph.runtime.executable import Executable
from opgraph.runtime.fused import HostKernel
from opgraph.runtime.kernel_sequence import KernelLaunch, KernelSequence
from opgraph.runtime.providers.torch import to_numpy, torch_dtype
from opgraph.runtime.runner import Runner
from opgraph.torch.fused.prepared import Run, Statements, Tensors, empty_cpu
from opgraph.torch.fused.shapes import Results


class Program:
    """A graph compiled for one device.

    Args:
        graph: finalized.
        device: the CPU or a GPU.
        rounding: as `opgraph.compile` takes it.

    Raises:
        OpGraphError: what `opgraph.compile` raises.
    """

    def __init__(self, graph: Graph, device: torch.device, rounding: str) -> None:
        self.graph = graph
        self._device = device
        self.results = Results(graph)
        self._names = [port_name(t) for t in graph.inputs]
        self._outputs = [port_name(t) for t in graph.outputs]
        engine = Engine("cuda", device.index) if device.type == "cuda" else Engine("cpu")
        # `statements` compiles what the tensors need: gradients often come broadcast, as from sum().
        self._executable = Executable(graph, engine, donate=(), rounding=rounding, waits=True)

    def statements(self, tensors: Tensors, names: Sequence[str] = ()) -> Statements:
        """What runs it on tensors laid out like these; checks them once for all.

        Args:
            names: what the tensors are called there; "t0", "t1" ... without it.

        Raises:
            InvalidDataType, InvalidShape: they are not what the graph declares.
            DeviceError: a kernel that does not compile.
        """
        check(self.graph, tensors)
        names = names or tensor_names(len(tensors))
        alone = self._executable.alone() if self.results.known else None
        if alone is not None and isinstance(alone[0], HostKernel):
            return self._launched(alone[0], alone[1], alone[2], tensors, names)
        run: Callable[[Tensors], Sequence[torch.Tensor]]
        results = result_names(len(self._outputs))
        if alone is not None and self._device.type == "cuda":
            run = self._on_device(*alone)
            found = self._launched_on_device(*alone, tensors, names, results, run)
            if found is not None:
                return found
        else:
            run = self._run_into if self.results.known else self._run
        line = f"{''.join(f'{r}, ' for r in results)} = run(({''.join(f'{n}, ' for n in names)}))"
        return Statements((line,), results, {"run": run})

    def plan(self, tensors: Tensors) -> Run:
        """The same as a function of the tensors; gives a tensor where there is one result, else a tuple."""
        return self.statements(tensors).function(tensor_names(len(tensors)))

    def _on_device(
        self, runner: Runner, reads: Sequence[int], writes: Sequence[int]
    ) -> Callable[[Tensors], list[torch.Tensor]]:
        """One partition on a GPU: its runner takes torch's tensors as they are, and the stream current at each call."""

        def run(tensors: Tensors) -> list[torch.Tensor]:
            made = self.results.empty(tensors)
            runner([tensors[i].detach() for i in reads], [made[i] for i in writes])
            return made

        return run

    def _launched_on_device(
        self,
        runner: Runner,
        reads: Sequence[int],
        writes: Sequence[int],
        tensors: Tensors,
        names: Sequence[str],
        results: Sequence[str],
        otherwise: Callable[[Tensors], Sequence[torch.Tensor]],
    ) -> Statements | None:
        from opgraph.runtime.cuda_kernel import CudaKernel  # needs CuPy
        from opgraph.torch.fused.cuda_program import launched

        if not isinstance(runner, CudaKernel):
            return None
        return launched(runner, reads, writes, tensors, self.results.empty(tensors), names, results, otherwise)

    def _launched(
        self, kernel: HostKernel, reads: Sequence[int], writes: Sequence[int], tensors: Tensors, names: Sequence[str]
    ) -> Statements:
        """One kernel on the CPU, by address."""
        outs = self.results.empty(tensors)
        plan = kernel.plan([to_numpy(tensors[i]) for i in reads], [to_numpy(outs[i]) for i in writes])
        results = result_names(len(outs))
        lines: list[str] = []
        values: dict[str, Any] = {}
        for result, out in zip(results, outs, strict=True):
            line, more = _allocation(result, out)
            lines.append(line)
            values |= more
        if plan.size == 0:
            lines += [f"{result}.zero_()" for result in results]
            return Statements(tuple(lines), results, values)
        operands = [names[reads[i]] for i in kernel.reads] + [results[i] for i in writes]
        launch = KernelLaunch(plan, tuple((place, 0) for place in range(len(operands))))
        sequence = KernelSequence([launch], len(operands))
        addresses = ", ".join(f"{name}.data_ptr()" for name in operands)
        if sequence.direct is not None:
            values["entry"], values["pack"] = sequence.direct
            values["keep"] = sequence
            lines.append(f"entry(pack({addresses}))")
        else:
            values["launch"] = sequence
            lines.append(f"launch({addresses})")
        return Statements(tuple(lines), results, values)

    def _run_into(self, tensors: Tensors) -> list[torch.Tensor]:
        """Several partitions, or no compiler: torch allocates the results."""
        outs = self.results.empty(tensors)
        for i, out in enumerate(outs):
            size = out.untyped_storage().nbytes() if out.is_cpu else 0
            if spare.is_kept(size):
                outs[i] = _of_spare_memory(size, out.dtype, out.shape, out.stride())
            else:
                pages.advise(out.data_ptr(), size)
        self._executable(self._fed(tensors), out=dict(zip(self._outputs, outs)))
        return outs

    def _run(self, tensors: Tensors) -> list[torch.Tensor]:
        """Library ops among them, whose results have shapes that only running tells."""
        made = self._executable(self._fed(tensors))
        return list(made.values()) if isinstance(made, dict) else [made]

    def _fed(self, tensors: Tensors) -> dict[str, Any]:
        return dict(zip(self._names, [t.detach() for t in tensors], strict=True))


def tensor_names(count: int) -> tuple[str, ...]:
    """What the tensors of a call are called in generated functions."""
    return tuple(f"t{i}" for i in range(count))


def result_names(count: int) -> tuple[str, ...]:
    """What the results are called there."""
    return tuple(f"r{i}" for i in range(count))


def _allocation(name: str, out: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """The statement that allocates a result on the CPU like this one, and the values that it names."""
    size, whole = out.nbytes, out.untyped_storage().nbytes()
    shape, strides, dtype = tuple(out.shape), out.stride(), out.dtype
    if size < pages.LARGE:
        values = {"empty": empty_cpu, f"{name}_dtype": dtype}
        return f"{name} = empty({shape}, {strides}, {name}_dtype)", values
    if spare.is_kept(size):
        return f"{name} = {name}_made()", {f"{name}_made": partial(_of_spare_memory, whole, dtype, shape, strides)}

    def make_large() -> torch.Tensor:
        made = empty_cpu(shape, strides, dtype)
        pages.advise(made.data_ptr(), size)
        return made

    return f"{name} = {name}_made()", {f"{name}_made": make_large}


def _of_spare_memory(size: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A large result on the CPU, not yet written. Its storage, of that many bytes, cannot be resized."""
    try:
        memory = spare.array(size)
    except OSError:  # no memory: torch says so in its words, or finds what was given back
        spare.empty_cache()
        return torch.empty_strided(shape, strides, dtype=dtype)
    storage = torch.from_numpy(memory).untyped_storage()
    # Set, not viewed: a result that is a view of something must not be written in place.
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)


def check(graph: Graph, tensors: Tensors) -> None:
    """Raises InvalidArguments, InvalidDataType or InvalidShape where tensors are not what a graph declares."""
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
    """Raises InvalidArguments where there are not as many tensors as inputs."""
    if len(tensors) != len(graph.inputs):
        raise InvalidArguments(
            f"got {len(tensors)} tensors for {len(graph.inputs)} inputs",
            where="a fused call",
            fix=f"pass {', '.join(map(port_name, graph.inputs)) or 'none'}",
        )
