"""An onnxruntime region on a GPU: bound to the memory of the arrays, without a copy to the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from opgraph.errors import DeviceError
from opgraph.ir import dtypes
from opgraph.partition.partition import Partition
from opgraph.runtime import cuda
from opgraph.runtime.cuda_arrays import library_of, raw_stream, seen
from opgraph.runtime.cuda_exchange import CudaExchange, Hosted
from opgraph.runtime.device_array import Adopted, Library
from opgraph.runtime.engine import Engine, Stream
from opgraph.runtime.foreign_nodes import check_onnx
from opgraph.runtime.library_partition import native_runner, torch_on_gpu
from opgraph.runtime.providers.onnx_session import one_line
from opgraph.runtime.providers.onnxruntime import OnnxRuntimeRegion
from opgraph.runtime.runner import NO_SOURCES, Runner
from opgraph.runtime.shape_rules import check_out_shape

#: onnxruntime's name for the memory of a GPU.
MEMORY = "cuda"


def region_on_gpu(partition: Partition, engine: Engine) -> Runner:
    """Returns the runner of an ONNX region on a GPU: torch if it has all nodes, else onnxruntime there or on the host.

    Raises:
        NotInstalled: neither library is installed.
        DeviceError: neither onnxruntime nor onnx's evaluator accepts the region.
    """
    if torch_on_gpu():
        from opgraph.runtime.providers.torch_onnx.nodes import runs_node  # needs torch and onnx

        if all(runs_node(op) for op in partition.ops):
            return native_runner(partition, engine)
    check_onnx(partition.ops[0])
    region = OnnxRuntimeRegion(partition, gpu=engine.index)
    plain = all(t.dtype in dtypes.BY_NAME for t in (*partition.input_ports, *partition.output_ports))
    if region.is_on_gpu and plain:
        return DeviceRegion(region, partition, engine)
    return Hosted(region, engine.index, len(partition.input_ports))


class DeviceRegion:
    """One region on one GPU. A call waits for the GPU: onnxruntime has its own stream."""

    runs_in = "onnxruntime"
    sources = NO_SOURCES
    spins = False

    def __init__(self, region: OnnxRuntimeRegion, partition: Partition, engine: Engine) -> None:
        self._region = region
        self._device = engine.index
        self._dtypes = [dtypes.get(t.dtype).numpy for t in partition.output_ports]
        self._where = f"region of {len(partition.ops)} ONNX nodes, first {partition.ops[0].label}"

    def repeated(self, arrays: Sequence[Any], outs: Sequence[Any]) -> None:
        """See Runner; None, since every call allocates."""

    def __call__(
        self, arrays: Sequence[Any], outs: Sequence[Any] | None = None, stream: Stream | None = None
    ) -> list[Any]:
        """Waits for the inputs, and runs the region; arguments as for CudaKernel.

        Raises:
            DeviceError: a node failed; the message is onnxruntime's.
        """
        device = self._device
        views = [seen(a, device, "an input") for a in arrays]
        library = library_of(views)
        given = None if stream is None else raw_stream(stream)
        self._region.check_sizes(views)
        bound = self._region.bound_to(MEMORY, device)
        with cuda.OnDevice(device), nullcontext() if given is None else library.using(given, device):
            dense = [v.library.view(v.library.dense(v.owner)) for v in views]
            for index, view in enumerate(dense):
                bound.read_at(index, view.shape, view.pointer)
            for index in range(len(self._dtypes)):
                bound.leave(index)
            cuda.wait(device, library.stream(device))
            try:
                bound.launch()
            except Exception as error:  # onnxruntime's error classes share no base
                raise DeviceError(
                    f"onnxruntime failed: {one_line(error)}", where=self._where, fix="check the model and its inputs"
                ) from error
            targets = [None] * len(self._dtypes) if outs is None else outs
            results = zip(bound.made(), self._dtypes, targets, strict=True)
            return [self._given(v, bound, dtype, target, library) for v, dtype, target in results]

    def _given(self, value: Any, bound: Any, dtype: np.dtype[Any], target: Any, library: Library) -> Any:
        """Converts a value of onnxruntime to an array of a library, or copies it to its target."""
        shape = tuple(value.shape())
        made = library.adopted(Adopted(value.data_ptr(), shape, dtype, (value, bound)), dtype, self._device)
        if target is None:
            return made
        view = seen(target, self._device, "an output")
        check_out_shape(view.shape, shape)
        CudaExchange(self._device).assign(view, made)
        return view.owner
