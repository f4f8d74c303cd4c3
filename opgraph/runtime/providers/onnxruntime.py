"""onnxruntime runs what an ONNX model brought along: one session for each region of Wildcards."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opgraph.errors import DeviceError, OpGraphError, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.runtime.providers.onnx_region import RegionModel, region_model

if TYPE_CHECKING:
    from opgraph.partition.partition import Partition

#: NumPy types that onnxruntime's Python interface does not know; their bits pass as unsigned integers.
_BITS = {"bf16": np.dtype(np.uint16), "f8_e4m3": np.dtype(np.uint8), "f8_e5m2": np.dtype(np.uint8)}


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


class OnnxRuntimeRegion:
    """One region, compiled.

    Args:
        partition: a library partition whose ops all carry an ONNX node.
        threads: how many threads one run may use; None: onnxruntime decides.
        device: "cpu" or "cuda", as onnxruntime is asked for it.

    Raises:
        DeviceError: onnxruntime is not installed, or neither it nor onnx's evaluator takes the region.

    Where onnxruntime has no kernel for a node (most ops in bf16), onnx's own evaluator, written in NumPy, runs the
    region instead; a RuntimeWarning says so once.
    """

    def __init__(self, partition: Partition, threads: int | None = None, device: str = "cpu") -> None:
        self._inputs = tuple(partition.input_ports)
        self._outputs = tuple(partition.output_ports)
        self._where = f"region of {len(partition.ops)} ONNX nodes, first {partition.ops[0].label}"
        self._model = region_model(partition.ops, self._inputs, self._outputs)
        self._evaluator: Any = None
        self._session: Any = None
        ort = onnxruntime_module()
        try:
            self._session = _session(ort, self._model, threads, device)
        except Exception as error:  # onnxruntime's classes share no base of their own
            self._fall_back(error)

    @property
    def runs_in(self) -> str:
        """ "onnxruntime", or "onnx" where its evaluator stepped in."""
        return "onnx" if self._session is None else "onnxruntime"

    def __call__(self, arrays: Sequence[Any], outs: Sequence[Any] | None = None) -> list[Any]:
        """Runs the region, into given arrays where there are some."""
        results = self.run(arrays)
        if outs is None:
            return results
        for out, result in zip(outs, results, strict=True):
            out[...] = result
        return list(outs)

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Runs the region.

        Args:
            arrays: one array for each input port, in that order.

        Returns: one new array for each output port.

        Raises:
            DeviceError: a node failed; the message is the runtime's.
        """
        if self._session is not None:
            try:
                return self._run_session(arrays)
            except Exception as error:  # as above
                self._fall_back(error)
        names = self._model.inputs
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # overflows are values, not news
                results = self._evaluator.run(None, dict(zip(names, arrays, strict=True)))
        except Exception as error:  # the evaluator raises whatever NumPy raises
            raise DeviceError(
                f"onnx's evaluator failed: {_one_line(error)}", where=self._where, fix="check the model and its inputs"
            ) from error
        return [_as_declared(r, t) for r, t in zip(results, self._outputs, strict=True)]

    def _run_session(self, arrays: Sequence[Any]) -> list[Any]:
        model = self._model
        if not any(t.dtype in _BITS for t in (*self._inputs, *self._outputs)):
            feeds = {n: _contiguous(a) for n, a in zip(model.inputs, arrays, strict=True)}
            return list(self._session.run(list(model.outputs), feeds))
        ort = onnxruntime_module()
        kept = [_contiguous(a) for a in arrays]  # the OrtValues below do not own their memory
        values = {n: ort_value(ort, a, t) for n, a, t in zip(model.inputs, kept, self._inputs, strict=True)}
        results = self._session.run_with_ort_values(list(model.outputs), values)
        return [array_of(r, t) for r, t in zip(results, self._outputs, strict=True)]

    def _fall_back(self, error: Exception) -> None:
        import onnx.reference

        self._session = None
        try:
            self._evaluator = onnx.reference.ReferenceEvaluator(self._model.with_data())
        except Exception as second:  # the evaluator refuses with several classes
            raise DeviceError(
                f"onnxruntime refuses it: {_one_line(error)}; onnx's evaluator too: {_one_line(second)}",
                where=self._where,
                fix="replace the node that the message names",
            ) from error
        warnings.warn(
            f"onnxruntime cannot run a {self._where}; onnx's NumPy evaluator runs it, slowly. "
            f"onnxruntime says: {_one_line(error)}",
            RuntimeWarning,
            stacklevel=3,
        )


def _session(ort: Any, model: RegionModel, threads: int | None = None, device: str = "cpu") -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors arrive as exceptions
    if threads is not None:
        options.intra_op_num_threads = threads
    if model.shared:
        tensors = {t.name: t for t in model.proto.graph.initializer}
        values = [ort_value(ort, _contiguous(a), onnx_type=tensors[n].data_type) for n, a in model.shared.items()]
        options.add_external_initializers(list(model.shared), values)
    providers = ["CPUExecutionProvider"]
    if device == "cuda" and "CUDAExecutionProvider" in ort.get_available_providers():
        providers.insert(0, "CUDAExecutionProvider")
    return ort.InferenceSession(model.proto.SerializeToString(), options, providers=providers)


def _contiguous(array: Any) -> Any:
    # np.ascontiguousarray would make a 0-d array 1-d.
    return np.require(array, requirements="C") if isinstance(array, np.ndarray) else array


def ort_value(ort: Any, array: Any, tensor: LogicalTensor | None = None, onnx_type: int | None = None) -> Any:
    """An OrtValue on the memory of an array, which the caller keeps alive; bf16 and f8 pass as their bits."""
    dtype = dtypes.BY_ONNX[onnx_type].name if onnx_type is not None else tensor.dtype if tensor is not None else ""
    if dtype in _BITS:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(_BITS[dtype]), dtypes.BY_NAME[dtype].onnx)
    if isinstance(array, list):
        raise Unimplemented("sequences beside bf16 or f8", where="provider onnxruntime", fix="keep them apart")
    return ort.OrtValue.ortvalue_from_numpy(array)


def array_of(value: Any, tensor: LogicalTensor) -> Any:
    """A NumPy array of an OrtValue, of the tensor's dtype."""
    if tensor.dtype not in _BITS:
        return value.numpy()
    shape, target = tuple(value.shape()), dtypes.BY_NAME[tensor.dtype].numpy
    size = int(np.prod(shape, dtype=np.int64)) * target.itemsize
    raw = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(bytearray(raw), target).reshape(shape)


def _as_declared(result: Any, tensor: LogicalTensor) -> Any:
    """The evaluator computes some ops in a wider type than it should return."""
    if tensor.dtype == dtypes.UNDEF or not isinstance(result, (np.ndarray, np.generic)):
        return result
    return np.asarray(result).astype(dtypes.BY_NAME[tensor.dtype].numpy, copy=False)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def reference_foreign(op: Op, arrays: Sequence[Any], dtype: np.dtype[Any] | type = np.float64) -> tuple[Any, ...]:
    """One Wildcard, computed by onnx's own evaluator in a wide float type.

    Args:
        arrays: one for each input of the op; floats of any width.
        dtype: what floats are computed in and returned as.

    Returns: one array for each output. Where the evaluator insists on the op's own types, or has no such op (the
        contributed domains), the op is computed in those (by onnxruntime) and only widened.

    Raises:
        DeviceError: nobody can compute it.
    """
    declared = [_narrowed(a, t) for a, t in zip(arrays, op.inputs, strict=True)]
    wide = [_widened(a, dtype) for a in arrays]
    model = region_model([op], _distinct(op.inputs), op.outputs, typed=False)
    errors: list[Exception] = []
    for given in (wide, declared):
        try:
            results = _evaluated(model, op, given)
        except Exception as error:  # the evaluator raises whatever NumPy raises
            errors.append(error)
        else:
            return tuple(_widened(r, dtype) for r in results)
    try:
        session = _session(onnxruntime_module(), region_model([op], _distinct(op.inputs), op.outputs))
        by_id = {t.id: a for t, a in zip(op.inputs, declared, strict=True)}
        feeds = dict(zip(model.inputs, [by_id[t.id] for t in _distinct(op.inputs)], strict=True))
        return tuple(_widened(r, dtype) for r in session.run(None, feeds))
    except OpGraphError:
        raise
    except Exception as error:
        raise DeviceError(
            f"nobody computes it: onnx's evaluator: {_one_line(errors[0])}; onnxruntime: {_one_line(error)}",
            where=op.label,
            fix="replace the node in the model",
        ) from error


def _evaluated(model: RegionModel, op: Op, arrays: Sequence[Any]) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    by_id = {t.id: a for t, a in zip(op.inputs, arrays, strict=True)}
    feeds = dict(zip(model.inputs, [by_id[t.id] for t in _distinct(op.inputs)], strict=True))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(ReferenceEvaluator(model.proto).run(None, feeds))


def _distinct(tensors: Sequence[LogicalTensor]) -> list[LogicalTensor]:
    return list({t.id: t for t in tensors}.values())


def _is_float(array: Any) -> bool:
    return isinstance(array, (np.ndarray, np.generic)) and any(
        array.dtype == dtypes.BY_NAME[name].numpy for name in dtypes.FLOATS
    )


def _widened(array: Any, dtype: np.dtype[Any] | type) -> Any:
    return np.asarray(array).astype(dtype) if _is_float(array) else array


def _narrowed(array: Any, tensor: LogicalTensor) -> Any:
    if tensor.dtype not in dtypes.FLOATS or not _is_float(array):
        return array
    return np.asarray(array).astype(dtypes.BY_NAME[tensor.dtype].numpy)
