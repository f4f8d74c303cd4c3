"""CompiledPartition: one partition, ready to run for given logical tensors."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opgraph.errors import InvalidArguments, Unimplemented
from opgraph.ir.logical_tensor import LogicalTensor, port_name
from opgraph.loops.lower import lower
from opgraph.partition.partition import NATIVE, Partition
from opgraph.runtime.engine import Engine, Stream
from opgraph.runtime.exchange_protocol import exchange_of
from opgraph.runtime.fallback import host_runner
from opgraph.runtime.foreign_nodes import check_onnx
from opgraph.runtime.partition_arguments import bound
from opgraph.runtime.partition_cache import CACHE, key_of
from opgraph.runtime.port_matching import matched
from opgraph.runtime.runner import KernelRunner, PreparedRunner, Runner


def runner(
    partition: Partition,
    engine: Engine,
    *,
    rounding: str = "store",
    sizes: Collection[int] = frozenset(),
    arguments: Collection[int] = (),
) -> Runner:
    """Returns the runner of a partition on an engine: a generated kernel, or a library's provider.

    Args:
        sizes: ids of the values that stay on the host where the engine is a GPU; see `opgraph.runtime.gpu_placement`.
        arguments: see `lower`.

    Raises:
        Unimplemented: the partition is not supported.
        DeviceError: the kernel cannot be compiled.
    """
    if partition.kind == "fused":
        lowered = lower(partition, rounding=rounding, arguments=arguments)
        if engine.kind == "cuda":
            from opgraph.runtime.cuda_kernel import CudaKernel  # needs CuPy

            return CudaKernel(lowered, partition, engine)
        return host_runner(lowered, partition)
    if partition.provider == NATIVE:
        from opgraph.runtime.library_partition import native_runner  # rarely needed

        return native_runner(partition, engine, sizes)
    if partition.kind == "library" and partition.provider == "onnxruntime":
        if engine.kind == "cuda":
            from opgraph.runtime.providers.onnx_device import region_on_gpu  # needs CuPy

            return region_on_gpu(partition, engine)
        check_onnx(partition.ops[0])
        from opgraph.runtime.providers.onnxruntime import OnnxRuntimeRegion

        return OnnxRuntimeRegion(partition)
    raise nobody_runs(partition)


def nobody_runs(partition: Partition) -> Unimplemented:
    """The error for a partition that is not supported."""
    return Unimplemented(
        f"nothing runs partition {partition.id}",
        where=", ".join(op.label for op in partition.ops[:5]),
        fix="`graph.explain()` says why; replace the op, or import the graph from ONNX so that onnxruntime runs it",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The result of a compilation, independent of ids: the runner, and logical tensors in the order of the ports.

    Attributes:
        over: for each output, the positions of the inputs that it may coincide with exactly in memory.
    """

    run: Runner
    inputs: tuple[LogicalTensor, ...]
    outputs: tuple[LogicalTensor, ...]
    over: tuple[frozenset[int], ...]


class CompiledPartition:
    """A partition compiled for an engine and for logical tensors; made by `Partition.compile`.

    Source: oneDNN Graph `compiled_partition`.
    """

    __slots__ = ("_compiled", "_ports", "engine", "partition")

    def __init__(self, partition: Partition, engine: Engine, compiled: Compiled) -> None:
        self.partition = partition
        self.engine = engine
        self._compiled = compiled
        self._ports: tuple[dict[int, LogicalTensor], dict[int, LogicalTensor]] | None = None

    def _tensors(self) -> tuple[dict[int, LogicalTensor], dict[int, LogicalTensor]]:
        """Inputs and outputs by id, named like the partition's ports; created at the first use."""
        if self._ports is None:
            part, made = self.partition, self._compiled
            ins = {p.id: _as_port(t, p) for p, t in zip(part.input_ports, made.inputs, strict=True)}
            self._ports = ins, {p.id: _as_port(t, p) for p, t in zip(part.output_ports, made.outputs, strict=True)}
        return self._ports

    def query_logical_tensor(self, id: int) -> LogicalTensor:
        """Returns the input or output with this id, with its inferred dimensions and chosen layout.

        Raises:
            InvalidArguments: no port has this id.
        """
        inputs, outputs = self._tensors()
        found = (inputs.get(id) or outputs.get(id)) if isinstance(id, Hashable) else None
        if found is None:
            ports = ", ".join(map(str, [*inputs, *outputs]))
            raise InvalidArguments(f"no port has id {id}", where="query_logical_tensor", fix=f"the ports are {ports}")
        return found

    def inplace_ports(self) -> list[tuple[int, int]]:
        """Pairs (input id, output id) that may share memory: same shape, strides and dtype, element by element."""
        if self.partition.kind != "fused":
            return []
        inputs, outputs = self._tensors()
        free = [t for t in inputs.values() if 0 not in t.get_strides() or t.ndim == 0]
        places = {id: place for place, id in enumerate(inputs)}
        pairs = []
        for out, over in zip(outputs.values(), self._compiled.over, strict=True):
            match = next((t for t in free if _memory(t) == _memory(out) and places[t.id] in over), None)
            if match is not None:
                free.remove(match)
                pairs.append((match.id, out.id))
        return pairs

    @property
    def kernels(self) -> dict[str, str]:
        """The kernels generated so far: name -> source."""
        return {name: source.code for name, source in self._compiled.run.sources.items()}

    def execute(self, stream: Stream, inputs: Mapping[int, Any], outputs: Mapping[int, Any]) -> None:
        """Runs the partition: reads `inputs`, writes `outputs`, both by tensor id.

        Args:
            stream: a stream of the engine that the partition was compiled for.
            inputs, outputs: arrays with exactly the compiled dtypes and shapes, and any strides: NumPy arrays or torch
                tensors on the CPU, CuPy arrays or torch tensors on a GPU. An output may be exactly the memory of an
                input (see `inplace_ports`), and must not overlap an input otherwise.

        Raises:
            InvalidArguments: a stream of another engine, a missing or unknown id, an array that does not fit its
                logical tensor, or an output that cannot be written. The partition has not run in these cases.
        """
        if not isinstance(stream, Stream) or stream.engine != self.engine:
            got = f"a stream of {stream.engine}" if isinstance(stream, Stream) else repr(stream)
            raise InvalidArguments(
                f"{got} cannot run a partition compiled for {self.engine}",
                where="execute",
                fix=f'pass og.Stream(og.Engine("{self.engine.kind}", {self.engine.index}))',
            )
        exchange = exchange_of(self.engine)
        wanted_in, wanted_out = self._tensors()
        ins = bound(inputs, wanted_in, "inputs", self.engine)
        outs = bound(outputs, wanted_out, "outputs", self.engine)
        for position, (tensor, array) in enumerate(zip(wanted_out.values(), outs, strict=True)):
            over = self._compiled.over[position]
            exchange.check_out(port_name(tensor), array, ins, outs[:position], over=over)
        tensors = exchange.counted(outputs.values(), "execute")
        # Runners of the cuda engine take the stream as well.
        results = self._compiled.run(ins, outs, *([stream] if self.engine.kind == "cuda" else []))
        for out, result in zip(outs, results, strict=True):
            exchange.assign(out, result)  # a library may have allocated its results itself
        exchange.written(tensors)


def _as_port(tensor: LogicalTensor, port: LogicalTensor) -> LogicalTensor:
    return tensor if (tensor.id, tensor.name) == (port.id, port.name) else tensor.with_(id=port.id, name=port.name)


def _memory(tensor: LogicalTensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.get_strides()


def compile_partition(
    partition: Partition, inputs: Sequence[LogicalTensor], outputs: Sequence[LogicalTensor], engine: Engine
) -> CompiledPartition:
    """Implements `Partition.compile`. A partition compiled before, under any ids and names, comes from the cache.

    Args:
        inputs, outputs: logical tensors, matched to the ports by id, in any order; others are ignored. Inputs need
            known shapes; unknown dimensions of outputs are inferred.

    Raises:
        InvalidArguments: an unsupported partition, another engine kind than the graph's, a port without its logical
            tensor, an input of unknown shape or layout.
        InvalidShape: a given shape disagrees with the declared or the inferred one.
    """
    inputs, outputs = _listed(inputs, partition), _listed(outputs, partition)
    key = key_of(partition, inputs, outputs, engine) if CACHE.capacity else None
    compiled = CACHE.find(key) if key is not None else None
    if compiled is None:
        compiled = _compiled(partition, inputs, outputs, engine)
        if key is not None:
            CACHE.store(key, compiled)
    return CompiledPartition(partition, engine, compiled)


def _listed(tensors: Iterable[LogicalTensor], partition: Partition) -> Sequence[LogicalTensor]:
    """Returns a sequence, because it is iterated twice: for the key and for the ports."""
    if type(tensors) is tuple or type(tensors) is list:
        return tensors
    if isinstance(tensors, Iterable):
        return tuple(tensors)
    raise InvalidArguments(
        f"got {type(tensors).__name__} where logical tensors are expected",
        where=f"partition {partition.id}",
        fix="pass lists of LogicalTensors",
    )


def _compiled(
    partition: Partition, inputs: Sequence[LogicalTensor], outputs: Sequence[LogicalTensor], engine: Engine
) -> Compiled:
    where = f"partition {partition.id}"
    if not partition.supported:
        raise InvalidArguments("the partition is not supported", where=where, fix="`graph.explain()` says why")
    if not isinstance(engine, Engine):
        raise InvalidArguments(f"{engine!r} is no Engine", where=where, fix='pass og.Engine("cpu")')
    if engine.kind != partition.engine:
        raise InvalidArguments(
            f"the graph is for {partition.engine}, the engine is {engine.kind}",
            where=where,
            fix=f'build Graph(engine="{engine.kind}")',
        )
    ins, outs = matched(partition, inputs, outputs, where)
    run = runner(partition, engine)
    if engine.kind == "cuda":
        from opgraph.runtime.gpu_placement import warn_of_hosted  # rarely needed

        warn_of_hosted([(partition, run)])
    if isinstance(run, PreparedRunner):
        run.prepare([ins[t.id].dims for t in partition.input_ports])
    operands = run.operands if isinstance(run, KernelRunner) else None
    over = [[i for i in range(len(ins)) if operands and operands.lies_over(i, k)] for k in range(len(outs))]
    return Compiled(run, tuple(ins.values()), tuple(outs.values()), tuple(map(frozenset, over)))
