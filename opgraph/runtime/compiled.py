"""CompiledPartition: one partition, ready to run for given logical tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from opgraph.errors import InvalidArguments, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor, port_name
from opgraph.loops.lower import lower
from opgraph.partition.partition import NATIVE, Partition
from opgraph.runtime import exchange as exchange_module
from opgraph.runtime.engine import Engine, Stream
from opgraph.runtime.fallback import host_runner
from opgraph.runtime.matching import matched

if TYPE_CHECKING:
    from opgraph.codegen.kernel import KernelSource


class Runner(Protocol):
    """What runs a partition: arrays of its input ports in, arrays of its output ports out."""

    def __call__(self, arrays: Sequence[Any], outs: Sequence[Any] | None = None) -> list[Any]:
        """The results; `outs` where given and written to."""


@runtime_checkable
class PreparedRunner(Protocol):
    """A runner that can compile its kernel before the first call."""

    def prepare(self, dims: Sequence[Dims]) -> None:
        """Compiles what dense inputs of these dimensions will need."""


def runner(partition: Partition, engine: Engine, *, rounding: str = "store") -> Runner:
    """What runs a partition on an engine: a generated kernel, or a library's provider.

    Raises:
        Unimplemented: nothing runs it.
        DeviceError: the kernel cannot be compiled.
    """
    if partition.kind == "fused":
        lowered = lower(partition, rounding=rounding)
        if engine.kind == "cuda":
            from opgraph.runtime.cuda_kernel import CudaKernel  # needs CuPy

            return CudaKernel(lowered, partition.input_ports, engine)
        return host_runner(lowered, partition)
    if partition.provider == NATIVE:
        from opgraph.runtime.native import native_runner  # rarely needed

        return native_runner(partition, engine)
    if partition.kind == "library" and partition.provider == "onnxruntime":
        from opgraph.runtime.providers.onnxruntime import OnnxRuntimeRegion  # needs onnxruntime

        region = OnnxRuntimeRegion(partition, device=engine.kind)
        if engine.kind == "cuda":
            from opgraph.runtime.cuda_exchange import Hosted

            return Hosted(region, engine.index)
        return region
    raise Unimplemented(
        f"nothing runs partition {partition.id}",
        where=", ".join(op.label for op in partition.ops[:5]),
        fix="`graph.explain()` says why; replace the op, or import the graph from ONNX so that onnxruntime runs it",
    )


class CompiledPartition:
    """A partition compiled for an engine and for logical tensors; made by `Partition.compile`.

    Source: oneDNN Graph `compiled_partition`.
    """

    def __init__(
        self, partition: Partition, engine: Engine, inputs: dict[int, LogicalTensor], outputs: dict[int, LogicalTensor]
    ) -> None:
        self.partition = partition
        self.engine = engine
        self._inputs = inputs
        self._outputs = outputs
        self._run = runner(partition, engine)
        if isinstance(self._run, PreparedRunner):
            self._run.prepare([inputs[t.id].dims for t in partition.input_ports])

    def query_logical_tensor(self, id: int) -> LogicalTensor:
        """The input or output with this id, its dimensions inferred and its layout chosen.

        Raises:
            InvalidArguments: no port has this id.
        """
        found = self._inputs.get(id) or self._outputs.get(id)
        if found is None:
            ports = ", ".join(map(str, [*self._inputs, *self._outputs]))
            raise InvalidArguments(f"no port has id {id}", where="query_logical_tensor", fix=f"the ports are {ports}")
        return found

    def inplace_ports(self) -> list[tuple[int, int]]:
        """Pairs (input id, output id) that may share memory: same shape, strides and dtype, element by element."""
        if self.partition.kind != "fused":
            return []
        free = [t for t in self._inputs.values() if 0 not in t.get_strides() or t.ndim == 0]
        pairs = []
        for out in self._outputs.values():
            match = next((t for t in free if _memory(t) == _memory(out)), None)
            if match is not None:
                free.remove(match)
                pairs.append((match.id, out.id))
        return pairs

    @property
    def kernels(self) -> dict[str, str]:
        """The generated kernels so far: name -> source."""
        sources: Mapping[str, KernelSource] = getattr(self._run, "sources", {})
        return {name: source.code for name, source in sources.items()}

    def execute(self, stream: Stream, inputs: Mapping[int, Any], outputs: Mapping[int, Any]) -> None:
        """Runs the partition: reads `inputs`, writes `outputs`, both by tensor id.

        Args:
            stream: of the engine that the partition was compiled for.
            inputs, outputs: arrays of exactly the compiled dtypes and shapes, any strides; on the CPU NumPy arrays or
                torch tensors, on a GPU those of CuPy or torch. An output may be exactly the memory of an input (see
                `inplace_ports`), and may not overlap one otherwise.

        Raises:
            InvalidArguments: a stream of another engine, a missing or unknown id, an array that does not fit its
                logical tensor, an output that cannot be written. Nothing has run then.
        """
        if not isinstance(stream, Stream) or stream.engine != self.engine:
            got = f"a stream of {stream.engine}" if isinstance(stream, Stream) else repr(stream)
            raise InvalidArguments(
                f"{got} cannot run a partition compiled for {self.engine}",
                where="execute",
                fix=f'pass og.Stream(og.Engine("{self.engine.kind}", {self.engine.index}))',
            )
        exchange = self._exchange()
        ins = self._bound(inputs, self._inputs, "inputs")
        outs = self._bound(outputs, self._outputs, "outputs")
        for position, (tensor, array) in enumerate(zip(self._outputs.values(), outs, strict=True)):
            exchange.check_out(port_name(tensor), array, ins, single_step=self.partition.kind == "fused")
            exchange.check_out(port_name(tensor), array, outs[:position], single_step=False)
        # Runners of the cuda engine take the stream as well.
        results = self._run(ins, outs, *([stream] if self.engine.kind == "cuda" else []))
        for out, result in zip(outs, results, strict=True):
            exchange.assign(out, result)  # a library may have allocated its results itself

    def _exchange(self) -> Any:
        if self.engine.kind == "cuda":
            from opgraph.runtime.cuda_exchange import CudaExchange

            return CudaExchange(self.engine.index)
        return exchange_module

    def _bound(self, given: Mapping[int, Any], wanted: dict[int, LogicalTensor], what: str) -> list[Any]:
        if not isinstance(given, Mapping):
            raise InvalidArguments(
                f"got {type(given).__name__} where a dict is expected",
                where=f"execute {what}",
                fix="bind arrays by tensor id: {0: array}",
            )
        for id in given:
            if id not in wanted:
                raise InvalidArguments(
                    f"no port has id {id}", where=f"execute {what}", fix=f"bind {', '.join(map(str, wanted))}"
                )
        arrays = []
        for id, tensor in wanted.items():
            if id not in given:
                raise InvalidArguments(
                    f"tensor {id} is not bound",
                    where=f"execute {what}",
                    fix=f"give an array for id {id} ({tensor.type_text})",
                )
            if self.engine.kind == "cuda":
                from opgraph.runtime.cuda_arrays import seen

                array = seen(given[id], self.engine.index, f"{tensor.label} in {what}")
            else:
                array = _seen_on_host(given[id], tensor)
            arrays.append(_checked(array, tensor, what))
        return arrays


def _memory(tensor: LogicalTensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.get_strides()


def _seen_on_host(array: Any, tensor: LogicalTensor) -> Any:
    seen = exchange_module.imported({tensor.id: array}, {})[0]
    return array if seen is None else seen[tensor.id]


def _checked(array: Any, tensor: LogicalTensor, what: str) -> Any:
    dtype = dtypes.get(tensor.dtype).numpy
    is_array = hasattr(array, "dtype") and hasattr(array, "shape") and not isinstance(array, np.generic)
    if not is_array or array.dtype != dtype or not _has_shape(array.shape, tensor.dims):
        got = f"{array.dtype}{list(array.shape)}" if is_array else type(array).__name__
        raise InvalidArguments(
            f"got {got} for {tensor.type_text}",
            where=f"{tensor.label} in {what}",
            fix="give an array of this dtype and shape",
        )
    return array


def _has_shape(shape: Sequence[int], dims: Dims) -> bool:
    """Whether a shape is one of these dimensions; what only a library infers may be unknown until it has run."""
    if dims is None:
        return True
    return len(shape) == len(dims) and all(not isinstance(d, int) or d == s for s, d in zip(shape, dims, strict=True))


def compile_partition(
    partition: Partition, inputs: Sequence[LogicalTensor], outputs: Sequence[LogicalTensor], engine: Engine
) -> CompiledPartition:
    """What `Partition.compile` does.

    Args:
        inputs, outputs: logical tensors, matched to the ports by id, in any order; others are ignored. Inputs need
            known shapes; unknown dimensions of outputs are inferred.

    Raises:
        InvalidArguments: an unsupported partition, another engine kind than the graph's, a port without its logical
            tensor, an input of unknown shape or layout.
        InvalidShape: a given shape disagrees with the declared or the inferred one.
    """
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
    return CompiledPartition(partition, engine, *matched(partition, inputs, outputs, where))
