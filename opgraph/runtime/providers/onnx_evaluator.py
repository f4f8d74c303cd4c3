"""Single ONNX nodes, computed by onnx's own evaluator in float64: the ground truth for ops without a formula."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from opgraph.errors import DeviceError, OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.runtime.providers.onnx_region import RegionModel, region_model
from opgraph.runtime.providers.onnx_session import one_line, onnxruntime_module, run_session, session_of


def reference_foreign(op: Op, arrays: Sequence[Any], dtype: np.dtype[Any] | type = np.float64) -> tuple[Any, ...]:
    """Computes one Wildcard with onnx's own evaluator in a wide float type.

    Args:
        arrays: one for each input of the op; floats of any width.
        dtype: the dtype in which floats are computed and returned.

    Returns: one array for each output. If the evaluator only accepts the op's own types, the op is computed in those
        and the results are widened. If it lacks the op (the contributed domains), or its results differ from
        onnxruntime's (BatchNormalization of opset 9, an LSTM with lengths: onnx 1.23), onnxruntime computes it.

    Raises:
        DeviceError: neither library can compute it.
    """
    declared = [_narrowed(a, t) for a, t in zip(arrays, op.inputs, strict=True)]
    wide = [_widened(a, dtype) for a in arrays]
    model = region_model([op], _distinct(op.inputs), op.outputs, typed=False)
    errors: list[Exception] = []
    exact: list[Any] | None = None
    for given in (wide, declared):
        try:
            exact = _evaluated(model, op, given)
        except Exception as error:  # the evaluator raises any error of NumPy
            errors.append(error)
        else:
            break
    try:
        theirs = _by_onnxruntime(model, op, declared)
    except Exception as error:
        if exact is None and isinstance(error, OpGraphError):
            raise
        if exact is None:
            raise DeviceError(
                f"nobody computes it: onnx's evaluator: {one_line(errors[0])}; onnxruntime: {one_line(error)}",
                where=op.label,
                fix="replace the node in the model",
            ) from error
    else:
        if exact is None or not (_agree(exact, theirs, op) or _same_on_same_types(model, op, declared, theirs)):
            exact = theirs
    return tuple(_widened(_own_integers(r, t), dtype) for r, t in zip(exact, op.outputs, strict=True))


def _by_onnxruntime(model: RegionModel, op: Op, arrays: Sequence[Any]) -> list[Any]:
    inputs = _distinct(op.inputs)
    session = session_of(onnxruntime_module(), region_model([op], inputs, op.outputs))
    return run_session(session, model, list(_feeds(model, op, arrays).values()), inputs, op.outputs)


def _same_on_same_types(model: RegionModel, op: Op, declared: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """True if the evaluator agrees on the op's own types: a jump may lie between a wide float and its rounded value."""
    try:
        return _agree(_evaluated(model, op, declared), theirs, op)
    except Exception:  # it only supports wide types
        return True


def _agree(ours: Sequence[Any], theirs: Sequence[Any], op: Op) -> bool:
    """True if results differ by rounding at most: two thirds of the digits of the op's narrowest float are the same."""
    floats = {t.dtype for t in (*op.inputs, *op.outputs)} & set(dtypes.FLOATS)
    eps = max((float(ml_dtypes.finfo(dtypes.BY_NAME[name].numpy).eps) for name in floats), default=0.0)  # type: ignore[no-untyped-call]
    return len(ours) == len(theirs) and all(_near(a, b, eps ** (2 / 3)) for a, b in zip(ours, theirs, strict=True))


def _near(ours: Any, theirs: Any, share: float) -> bool:
    """True if two results differ by at most a share of the largest element; integers and text must be equal."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(_near(a, b, share) for a, b in zip(ours, theirs, strict=True))
    if ours is None or theirs is None or np.shape(ours) != np.shape(theirs):
        return ours is None and theirs is None
    if not _is_float(np.asarray(ours)):
        return bool(np.array_equal(ours, theirs))
    a, b = np.asarray(ours).astype(np.float64), np.asarray(theirs).astype(np.float64)
    there = np.isfinite(b)  # a value that overflows their type may fit a wider one
    a, b = a[there], b[there]
    return bool(np.isfinite(a).all()) and bool(np.abs(a - b).max(initial=0.0) <= share * np.abs(a).max(initial=0.0))


def _evaluated(model: RegionModel, op: Op, arrays: Sequence[Any]) -> list[Any]:
    from opgraph.runtime.providers.onnx_loop import evaluator

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(evaluator(model.with_data()).run(None, _feeds(model, op, arrays)))


def _feeds(model: RegionModel, op: Op, arrays: Sequence[Any]) -> dict[str, Any]:
    by_id = {t.id: a for t, a in zip(op.inputs, arrays, strict=True)}
    return dict(zip(model.inputs, [by_id[t.id] for t in _distinct(op.inputs)], strict=True))


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


def _own_integers(result: Any, tensor: LogicalTensor) -> Any:
    """Converts integers to the declared dtype: the evaluator (1.23) returns s64 for sums of narrower integers."""
    return as_declared(result, tensor) if tensor.dtype in dtypes.INTS else result


def as_declared(result: Any, tensor: LogicalTensor) -> Any:
    """Converts to the declared dtype: the evaluator computes some ops in a wider type than it should return."""
    if tensor.dtype == dtypes.UNDEF or not isinstance(result, (np.ndarray, np.generic)):
        return result
    return np.asarray(result).astype(dtypes.BY_NAME[tensor.dtype].numpy, copy=False)
