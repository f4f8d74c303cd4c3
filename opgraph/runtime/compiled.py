"""CompiledPartition: one partition, ready to run for given logical tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from opgraph.errors import InvalidArguments, InvalidShape, Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.schema import inferred_dims
from opgraph.ir.shapes import ShapeMismatch, unify
from opgraph.loops.lower import lower
from opgraph.partition.partition import Partition
from opgraph.runtime.engine import Engine, Stream

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
        from opgraph.runtime.fallback import host_runner

        return host_runner(lowered, partition)
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
        """Pairs (input id, output id) that may share memory: same shape and dtype, element by element."""
        if self.partition.kind != "fused":
            return []
        free = list(self._inputs.values())
        pairs = []
        for out in self._outputs.values():
            match = next((t for t in free if (t.dtype, t.dims) == (out.dtype, out.dims)), None)
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

        Raises:
            InvalidArguments: a stream of another engine, a missing or unknown id, an array that does not fit its
                logical tensor, an output that cannot be written.
        """
        if stream.engine != self.engine:
            raise InvalidArguments(
                f"a stream of {stream.engine} cannot run a partition compiled for {self.engine}",
                where="execute",
                fix="use a stream of the same engine",
            )
        ins = self._bound(inputs, self._inputs, "inputs")
        outs = self._bound(outputs, self._outputs, "outputs")
        for id, array in zip(self._outputs, outs, strict=True):
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise InvalidArguments(
                    "an output is read-only", where=self._outputs[id].label, fix="give a writable array"
                )
        if self.engine.kind == "cuda":
            self._run(ins, outs, stream)  # type: ignore[call-arg]  # runners of this engine take the stream
        else:
            self._run(ins, outs)

    def _bound(self, given: Mapping[int, Any], wanted: dict[int, LogicalTensor], what: str) -> list[Any]:
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
            array = given[id]
            if self.engine.kind == "cuda":
                from opgraph.runtime.cuda_arrays import seen

                array = seen(array, self.engine.index, f"{tensor.label} in {what}")
            arrays.append(_checked(array, tensor, what))
        return arrays


def _checked(array: Any, tensor: LogicalTensor, what: str) -> Any:
    dtype = dtypes.get(tensor.dtype).numpy
    if getattr(array, "dtype", None) != dtype or tuple(array.shape) != tensor.dims:
        got = f"{getattr(array, 'dtype', type(array).__name__)}{list(getattr(array, 'shape', []))}"
        raise InvalidArguments(
            f"got {got} for {tensor.type_text}",
            where=f"{tensor.label} in {what}",
            fix="give an array of this dtype and shape",
        )
    return array


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
        InvalidShape: a given output shape disagrees with the inferred one.
    """
    where = f"partition {partition.id}"
    if not partition.supported:
        raise InvalidArguments("the partition is not supported", where=where, fix="`graph.explain()` says why")
    if engine.kind != partition.engine:
        raise InvalidArguments(
            f"the graph is for {partition.engine}, the engine is {engine.kind}",
            where=where,
            fix=f'build Graph(engine="{engine.kind}")',
        )
    given_in, given_out = {t.id: t for t in inputs}, {t.id: t for t in outputs}
    ins: dict[int, LogicalTensor] = {}
    for port in partition.input_ports:
        tensor = given_in.get(port.id)
        if (
            tensor is None
            or tensor.dtype != port.dtype
            or not tensor.has_known_shape
            or tensor.layout not in ("strided", "any")
        ):
            raise InvalidArguments(
                f"input {port.id} needs a logical tensor of dtype {port.dtype}, known shape and layout",
                where=where,
                fix="pass one, with int dims, under the port's id",
            )
        ins[port.id] = tensor
    made = _inferred(partition, ins, where)
    outs: dict[int, LogicalTensor] = {}
    for port in partition.output_ports:
        tensor = given_out.get(port.id)
        if tensor is None or tensor.dtype != port.dtype or tensor.layout not in ("strided", "any"):
            raise InvalidArguments(
                f"output {port.id} needs a logical tensor of dtype {port.dtype}",
                where=where,
                fix="pass one under the port's id; its dims may be None",
            )
        try:
            dims = unify(tensor.dims, made[port.id].dims, tensor.label)
        except ShapeMismatch as error:
            raise InvalidShape(error.what, where=where, fix=error.fix) from None
        outs[port.id] = tensor.with_(dims=dims, layout="strided")
    return CompiledPartition(partition, engine, ins, outs)


def _inferred(partition: Partition, inputs: dict[int, LogicalTensor], where: str) -> dict[int, LogicalTensor]:
    """Every tensor of the partition, with the dimensions that follow from these inputs."""
    known = dict(inputs)
    for op in partition.ops:
        ins = tuple(known.get(t.id, t) for t in op.inputs)
        dims = inferred_dims(opdef.get(op.kind, where=where), ins, op.attrs, op.where)
        for index, tensor in enumerate(op.outputs):
            try:
                agreed = unify(tensor.dims, dims[index] if index < len(dims) else None, tensor.label)
            except ShapeMismatch as error:
                raise InvalidShape(error.what, where=op.where, fix=error.fix) from None
            known[tensor.id] = tensor.with_(dims=agreed)
    return known
