"""onnxruntime sessions: their creation from regions, and arrays of the types that NumPy lacks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from opgraph.errors import DeviceError, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.runtime.providers.onnx_region import RegionModel

#: NumPy types that onnxruntime's Python interface does not support; their bits are passed as unsigned integers.
BITS = {"bf16": np.dtype(np.uint16), "f8_e4m3": np.dtype(np.uint8), "f8_e5m2": np.dtype(np.uint8)}

#: Two elements share a byte, but onnxruntime (1.32) returns an array of one byte each, with memory outside the result.
_NOT_GIVEN_OUT = onnx.TensorProto.FLOAT4E2M1

#: onnxruntime's name for its own GPU kernels.
CUDA = "CUDAExecutionProvider"


def onnxruntime_module() -> Any:
    """The onnxruntime package.

    Raises:
        DeviceError: it is not installed.
    """
    try:
        import onnxruntime

        onnxruntime.InferenceSession  # noqa: B018  # an uninstalled twin package leaves an empty module behind
    except (ImportError, AttributeError):
        raise DeviceError(
            "onnxruntime is not installed, and this graph has ONNX nodes that only it runs",
            where="provider onnxruntime",
            fix="pip install 'opgraph[ort]'  (or 'opgraph[ort-gpu]'; not both)",
        ) from None
    return onnxruntime


def session_of(
    ort: Any, model: RegionModel, threads: int | None = None, gpu: int | None = None, *, spins: bool = False
) -> Any:
    """Creates an onnxruntime session. Large constants bypass protobuf's 2 GiB limit; onnxruntime copies them once.

    Args:
        gpu: index of the GPU that should run it. If None, or if onnxruntime has no CUDA, the CPU runs it.

    Raises:
        Exception: onnxruntime refuses the model, or would return memory outside a result; its classes share no base.
    """
    if any(value.type.tensor_type.elem_type == _NOT_GIVEN_OUT for value in model.proto.graph.output):
        raise Unimplemented("onnxruntime gives out no float4", where="provider onnxruntime", fix="cast it to float")
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors arrive as exceptions
    # If a graph has many regions, each has its own threads. Waiting threads must not spin on the cores of the running
    # region (measured, 33 regions of an EfficientNet on 2 busy cores: 890 ms per run with spinning, 12 ms without).
    # Those of a lone region may (the same network as one region: 1.0 ms per run with spinning, 1.6 ms without).
    if not spins:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads is not None:
        options.intra_op_num_threads = threads
    if model.shared:
        tensors = {t.name: t for t in model.proto.graph.initializer}
        values = [ort_value(ort, contiguous(a), onnx_type=tensors[n].data_type) for n, a in model.shared.items()]
        options.add_external_initializers(list(model.shared), values)
    providers: list[Any] = ["CPUExecutionProvider"]
    if gpu is not None and CUDA in ort.get_available_providers():
        providers.insert(0, (CUDA, {"device_id": gpu}))
    return ort.InferenceSession(model.proto.SerializeToString(), options, providers=providers)


def run_session(
    session: Any,
    model: RegionModel,
    arrays: Sequence[Any],
    inputs: Sequence[LogicalTensor],
    outputs: Sequence[LogicalTensor],
) -> list[Any]:
    """Runs the session of a model on one array for each input; returns one array of the declared dtype for each output.

    Raises:
        Exception: any error of onnxruntime.
    """
    if not any(t.dtype in BITS for t in (*inputs, *outputs)):
        feeds = {n: contiguous(a) for n, a in zip(model.inputs, arrays, strict=True)}
        return list(session.run(list(model.outputs), feeds))
    ort = onnxruntime_module()
    kept = [contiguous(a) for a in arrays]  # the OrtValues below do not own their memory
    values = {n: ort_value(ort, a, t) for n, a, t in zip(model.inputs, kept, inputs, strict=True)}
    results = session.run_with_ort_values(list(model.outputs), values)
    return [array_of(r, t) for r, t in zip(results, outputs, strict=True)]


def contiguous(array: Any) -> Any:
    """Returns the array in row-major order, copied if necessary."""
    # np.ascontiguousarray would make a 0-d array 1-d.
    return np.require(array, requirements="C") if isinstance(array, (np.ndarray, np.generic)) else array


def ort_value(ort: Any, array: Any, tensor: LogicalTensor | None = None, onnx_type: int | None = None) -> Any:
    """An OrtValue on the memory of an array, which the caller keeps alive; bf16 and f8 are passed as bits."""
    dtype = dtypes.BY_ONNX[onnx_type].name if onnx_type is not None else tensor.dtype if tensor is not None else ""
    if dtype in BITS:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(BITS[dtype]), dtypes.BY_NAME[dtype].onnx)
    if isinstance(array, list):
        raise Unimplemented("sequences beside bf16 or f8", where="provider onnxruntime", fix="keep them apart")
    return ort.OrtValue.ortvalue_from_numpy(array)


def array_of(value: Any, tensor: LogicalTensor) -> Any:
    """Converts an OrtValue to a NumPy array of the tensor's dtype."""
    if tensor.dtype not in BITS:
        return value.numpy()
    shape, target = tuple(value.shape()), dtypes.BY_NAME[tensor.dtype].numpy
    size = int(np.prod(shape, dtype=np.int64)) * target.itemsize
    raw = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(bytearray(raw), target).reshape(shape)


def one_line(error: Exception) -> str:
    """A message without its line breaks, shortened."""
    return " ".join(str(error).split())[:300] or type(error).__name__
