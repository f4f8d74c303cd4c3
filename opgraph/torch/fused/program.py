"""A graph on torch tensors: one kernel launched on their addresses, or an executable where it takes more than one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from opgraph.errors import InvalidArguments, InvalidDataType
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime import pages, spare
from opgraph.runtime.arguments import check_shape, check_symbols, symbolic
from opgraph.runtime.engine import Engine
from opgraph.runtime.executable import Executable
from opgraph.runtime.fused import HostKernel
from opgraph.runtime.providers.torch import to_numpy, torch_dtype
from opgraph.runtime.runner import Runner
from opgraph.torch.fused.shapes import Results

Tensors: TypeAlias = Sequence[torch.Tensor]
#: Runs a program on tensors laid out like those that it was planned for.
Run: TypeAlias = Callable[[Tensors], list[torch.Tensor]]


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
        self.results = Results(graph)
        self._names = [port_name(t) for t in graph.inputs]
        self._outputs = [port_name(t) for t in graph.outputs]
        engine = Engine("cuda", device.index) if device.type == "cuda" else Engine("cpu")
        # The first call compiles what its tensors need: gradients often come broadcast, as from sum().
        self._executable = Executable(graph, engine, donate=(), rounding=rounding, waits=True)

    def plan(self, tensors: Tensors) -> Run:
        """What runs it on tensors laid out like these; checks them once for all.

        Raises:
            InvalidDataType, InvalidShape: they are not what the graph declares.
            DeviceError: a kernel that does not compile.
        """
        check(self.graph, tensors)
        if not self.results.known:
            return self._run
        alone = self._executable.alone()
        if alone is not None and isinstance(alone[0], HostKernel):
            return self._launched(alone[0], alone[1], alone[2], tensors)
        if alone is not None and tensors[0].is_cuda:
            return self._on_device(*alone)
        return self._run_into

    def _on_device(self, runner: Runner, reads: Sequence[int], writes: Sequence[int]) -> Run:
        """One partition on a GPU: its runner takes torch's tensors as they are, and the stream current at each call."""

        def run(tensors: Tensors) -> list[torch.Tensor]:
            made = self.results.empty(tensors)
            runner([tensors[i].detach() for i in reads], [made[i] for i in writes])
            return made

        return run

    def _launched(self, kernel: HostKernel, reads: Sequence[int], writes: Sequence[int], tensors: Tensors) -> Run:
        """One kernel on the CPU, by address."""
        outs = self.results.empty(tensors)
        plan = kernel.plan([to_numpy(tensors[i]) for i in reads], [to_numpy(outs[i]) for i in writes])
        makers = [_maker(out, tensors) for out in outs]
        sources = [reads[i] for i in kernel.reads]
        if plan.size == 0:
            return lambda tensors: [make(tensors).zero_() for make in makers]
        launch = plan.launcher()
        if len(outs) == 1:
            make = makers[0]
            if len(sources) == 2:  # an input and a parameter: where the host's cost counts
                first, second = sources

                def run_two(tensors: Tensors) -> list[torch.Tensor]:
                    out = make(tensors)
                    launch(tensors[first].data_ptr(), tensors[second].data_ptr(), out.data_ptr())
                    return [out]

                return run_two

            def run_one(tensors: Tensors) -> list[torch.Tensor]:
                out = make(tensors)
                launch(*[tensors[i].data_ptr() for i in sources], out.data_ptr())
                return [out]

            return run_one

        def run(tensors: Tensors) -> list[torch.Tensor]:
            made = [make(tensors) for make in makers]
            launch(*[tensors[i].data_ptr() for i in sources], *[made[i].data_ptr() for i in writes])
            return made

        return run

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


def _maker(out: torch.Tensor, tensors: Tensors) -> Callable[[Tensors], torch.Tensor]:
    """What allocates a result on the CPU like this one."""
    make, size = _plain_maker(out, tensors), out.nbytes
    if size < pages.LARGE:
        return make
    if spare.is_kept(size):
        shape, strides, dtype = out.shape, out.stride(), out.dtype
        whole = out.untyped_storage().nbytes()
        return lambda tensors: _of_spare_memory(whole, dtype, shape, strides)

    def make_large(tensors: Tensors) -> torch.Tensor:
        made = make(tensors)
        pages.advise(made.data_ptr(), size)
        return made

    return make_large


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


def _plain_maker(out: torch.Tensor, tensors: Tensors) -> Callable[[Tensors], torch.Tensor]:
    """By an input that has its dtype, shape and strides where there is one."""
    shape, strides, dtype, device = out.shape, out.stride(), out.dtype, out.device
    empty_like, empty_strided = torch.empty_like, torch.empty_strided
    for i, tensor in enumerate(tensors):
        if tensor.dtype == dtype and tensor.shape == shape and torch.empty_like(tensor).stride() == strides:
            return lambda tensors: empty_like(tensors[i])
    return lambda tensors: empty_strided(shape, strides, dtype=dtype, device=device)


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
