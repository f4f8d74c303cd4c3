"""The data of constants: conversion from numbers and arrays, exact or with one rounding, and comparison by bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from opgraph.errors import InvalidArguments, InvalidDataType
from opgraph.ir import dtypes

if TYPE_CHECKING:
    from opgraph.ir.logical_tensor import LogicalTensor

#: Numbers without a dtype. np.float64 is a subclass of float, so it is included; other NumPy scalars have a dtype.
NUMBERS = (bool, int, float)


def constant_data(value: Any, dtype: str | None, where: str) -> tuple[str, np.ndarray]:
    """The dtype name and the data of a constant; the dtype is "undef" for a number whose dtype is not determined yet.

    Raises:
        InvalidDataType: opgraph does not have the dtype; `dtype` does not hold a value.
        InvalidArguments: `value` cannot become an array, or is a masked array.
    """
    if dtype is None and isinstance(value, NUMBERS):
        return dtypes.UNDEF, np.asarray(value)
    check_unmasked(value, where)
    try:
        data = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArguments(
            f"no array can be made of a {type(value).__name__}: {error}", where=where, fix="pass a number or an array"
        ) from None
    if dtype is not None:
        return dtype, converted(data, dtypes.get(dtype, where=where), where)
    return dtypes.of_array(data.dtype, where=where).name, data


def check_unmasked(value: object, where: str) -> None:
    """Raises InvalidArguments for a masked array: masks are not supported, and masked values are arbitrary."""
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidArguments(
            "a masked array would lose its mask", where=where, fix="give array.filled(value), and its mask by itself"
        )


def converted(data: np.ndarray, dtype: dtypes.DType, where: str) -> np.ndarray:
    """`data` as another dtype: floats rounded once, everything else kept exactly.

    Raises:
        InvalidDataType: an integer or boolean dtype does not hold a value; the data are not numbers.
    """
    if data.dtype == dtype.numpy:
        return data
    if data.dtype == object:
        data = _of_objects(data, dtype, where)
    elif data.dtype not in dtypes.BY_NUMPY and data.dtype.kind not in "iuf":
        raise _is_none(data, dtype, where)
    if dtype.category == "float" or dtype.name.startswith("f8"):
        return narrowed(data, dtype)
    low, high = _bounds(dtype)
    exact = data if data.dtype.kind in "iub" else data.astype(np.float64)
    # high itself may not be a float64, high + 1 always is.
    fits = (exact >= low) & (exact < high + 1 if exact.dtype.kind == "f" else exact <= high)
    if exact.dtype.kind == "f":
        fits &= exact == np.floor(exact)
    if not fits.all():
        raise _is_none(exact[~fits].flat[0] if exact.ndim else exact, dtype, where)
    return data.astype(dtype.numpy)


def _of_objects(data: np.ndarray, dtype: dtypes.DType, where: str) -> np.ndarray:
    """Python numbers as an array that is exact enough for one rounding: int64, uint64 or float64."""
    values = data.reshape(-1).tolist()
    if not all(isinstance(v, NUMBERS) for v in values):
        raise _is_none(data, dtype, where)
    if all(isinstance(v, int) and -(2**63) <= v < 2**63 for v in values):
        return np.array(values, np.int64).reshape(data.shape)
    return np.array([_as_float(v) for v in values], np.float64).reshape(data.shape)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _bounds(dtype: dtypes.DType) -> tuple[int, int]:
    if dtype.category == "bool":
        return 0, 1
    info: Any = ml_dtypes.iinfo(dtype.numpy)  # type: ignore[no-untyped-call]
    return int(info.min), int(info.max)


def _is_none(value: object, dtype: dtypes.DType, where: str) -> InvalidDataType:
    range_ = "True or False" if dtype.category == "bool" else f"a number of {dtype.name}'s range"
    return InvalidDataType(
        f"the constant {value!s} is no {dtype.name}", where=where, fix=f"give {range_}, or insert a TypeCast"
    )


def narrowed(data: np.ndarray, dtype: dtypes.DType) -> np.ndarray:
    """`data` as a float dtype, rounded once, to nearest even; too large becomes infinite (nan in f8_e4m3)."""
    with np.errstate(all="ignore"):
        if dtype.numpy.kind == "f" or data.dtype.itemsize < 4 or data.dtype == np.float32:
            return data.astype(dtype.numpy)
        # ml_dtypes converts through float32. Rounding to odd there keeps the side of a tie for the second rounding.
        wide = _at_most_53_bits(data).astype(np.float64)
        single = wide.astype(np.float32)
        toward_zero = np.where(np.abs(single) > np.abs(wide), np.nextafter(single, np.float32(0)), single)
        odd = (toward_zero.view(np.uint32) | np.uint32(1)).view(np.float32)
        inexact = (toward_zero != wide) & ~np.isnan(wide)
        return np.where(inexact, odd, single).astype(dtype.numpy)


def _at_most_53_bits(data: np.ndarray) -> np.ndarray:
    """Integers beyond 2^53 with their last 11 bits replaced by one sticky bit, which keeps the rounding the same."""
    if data.dtype.kind not in "iu" or data.dtype.itemsize < 8:
        return data
    bits = np.where((data % 2048) != 0, (data // 2048) * 2048 + 1024, data)
    return np.where((data < -(2**53)) | (data > 2**53), bits, data)


def array_of(tensor: LogicalTensor) -> np.ndarray:
    """The data of a constant."""
    assert tensor.data is not None
    return tensor.data


def same_bits(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """True if two constants have the same dtype, shape and bits (nan equals nan, 0.0 is not -0.0)."""
    if a is None or b is None or a is b:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and canonical_bytes(a) == canonical_bytes(b)


def canonical_bytes(a: np.ndarray) -> bytes:
    """The bits of an array in row-major order, with one bit pattern for all nans."""
    if a.dtype.kind not in "iub" and a.dtype not in _WITHOUT_NAN:
        with np.errstate(invalid="ignore"):  # signalling nans
            missing = np.isnan(a)
        if missing.any():
            a = np.where(missing, a.dtype.type(math.nan), a)
    return np.ascontiguousarray(a).tobytes()


_WITHOUT_NAN = {np.dtype(object), np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)}
