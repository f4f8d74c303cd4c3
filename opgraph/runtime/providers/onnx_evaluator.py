"""Single ONNX nodes, computed by onnx's own evaluator in float64: the truth for what opgraph has no formula for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from opgraph.errors import DeviceError, OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.runtime.providers.onnx_region import RegionModel, region_model
from opgraph.runtime.providers.onnx_session import one_line, onnxruntime_module, session_of


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
        session = session_of(onnxruntime_module(), region_model([op], _distinct(op.inputs), op.outputs))
        by_id = {t.id: a for t, a in zip(op.inputs, declared, strict=True)}
        feeds = dict(zip(model.inputs, [by_id[t.id] for t in _distinct(op.inputs)], strict=True))
        return tuple(_widened(r, dtype) for r in session.run(None, feeds))
    except OpGraphError:
        raise
    except Exception as error:
        raise DeviceError(
            f"nobody computes it: onnx's evaluator: {one_line(errors[0])}; onnxruntime: {one_line(error)}",
            where=op.label,
            fix="replace the node in the model",
        ) from error


def _evaluated(model: RegionModel, op: Op, arrays: Sequence[Any]) -> list[Any]:
    from opgraph.runtime.providers.onnx_loop import evaluator

    by_id = {t.id: a for t, a in zip(op.inputs, arrays, strict=True)}
    feeds = dict(zip(model.inputs, [by_id[t.id] for t in _distinct(op.inputs)], strict=True))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(evaluator(model.with_data()).run(None, feeds))


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


def as_declared(result: Any, tensor: LogicalTensor) -> Any:
    """The evaluator computes some ops in a wider type than it should return."""
    if tensor.dtype == dtypes.UNDEF or not isinstance(result, (np.ndarray, np.generic)):
        return result
    return np.asarray(result).astype(dtypes.BY_NAME[tensor.dtype].numpy, copy=False)
