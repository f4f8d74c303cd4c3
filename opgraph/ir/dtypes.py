"""The data types, one record each.

Names are oneDNN's, plus f64. A record holds everything that other stages need, so that no second table of type names
exists: the NumPy dtype, the C++ storage and compute types, and the ONNX element type.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from opgraph.errors import InvalidDataType


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One data type.

    Attributes:
        name: oneDNN's name, or f64.
        numpy: the NumPy dtype of its arrays (from ml_dtypes for the types that NumPy lacks).
        category: "float", "int", "bool", or "storage": quantized storage without arithmetic.
        storage: C++ type of one element in memory; "" for storage-only types.
        compute: C++ type in which one element is computed; f16 and bf16 compute in float.
        onnx: ONNX TensorProto.DataType value.
    """

    name: str
    numpy: np.dtype[np.generic]
    category: str
    storage: str = ""
    compute: str = ""
    onnx: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory (ml_dtypes keeps s4 and u4 one per byte)."""
        return self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        """True if the type has floating-point arithmetic."""
        return self.category == "float"

    def __str__(self) -> str:
        return self.name


_ALL = (
    DType(name="f64", numpy=np.dtype(np.float64), category="float", storage="double", compute="double", onnx=11),
    DType(name="f32", numpy=np.dtype(np.float32), category="float", storage="float", compute="float", onnx=1),
    DType(
        name="bf16", numpy=np.dtype(ml_dtypes.bfloat16), category="float", storage="og::bf16", compute="float", onnx=16
    ),
    DType(name="f16", numpy=np.dtype(np.float16), category="float", storage="og::f16", compute="float", onnx=10),
    DType(name="s64", numpy=np.dtype(np.int64), category="int", storage="og::i64", compute="og::i64", onnx=7),
    DType(name="s32", numpy=np.dtype(np.int32), category="int", storage="og::i32", compute="og::i32", onnx=6),
    DType(name="s8", numpy=np.dtype(np.int8), category="int", storage="og::i8", compute="og::i8", onnx=3),
    DType(name="u8", numpy=np.dtype(np.uint8), category="int", storage="og::u8", compute="og::u8", onnx=2),
    DType(name="boolean", numpy=np.dtype(np.bool_), category="bool", storage="og::b8", compute="bool", onnx=9),
    DType(name="f8_e4m3", numpy=np.dtype(ml_dtypes.float8_e4m3fn), category="storage", onnx=17),
    DType(name="f8_e5m2", numpy=np.dtype(ml_dtypes.float8_e5m2), category="storage", onnx=19),
    DType(name="s4", numpy=np.dtype(ml_dtypes.int4), category="storage", onnx=22),
    DType(name="u4", numpy=np.dtype(ml_dtypes.uint4), category="storage", onnx=21),
)

BY_NAME: dict[str, DType] = {t.name: t for t in _ALL}
BY_ONNX: dict[int, DType] = {t.onnx: t for t in _ALL}
BY_NUMPY: dict[np.dtype[np.generic], DType] = {t.numpy: t for t in _ALL}

FLOATS: tuple[str, ...] = tuple(t.name for t in _ALL if t.category == "float")
INTS: tuple[str, ...] = tuple(t.name for t in _ALL if t.category == "int")
#: Types with arithmetic; pointwise ops may take them.
ARITHMETIC: tuple[str, ...] = (*FLOATS, *INTS, "boolean")

#: The dtype of a scalar constant before an op combines it with a tensor, and of an opaque value of undeclared type.
UNDEF = "undef"


def get(name: str, *, where: str = "dtype") -> DType:
    """The record named `name`.

    Raises:
        InvalidDataType: there is no such dtype, or it is "undef".
    """
    try:
        return BY_NAME[name]
    except (KeyError, TypeError):
        if name == UNDEF:
            raise InvalidDataType("the dtype is not known", where=where, fix="declare the dtype") from None
        raise InvalidDataType(f"unknown dtype {name!r}", where=where, fix=f"use one of {', '.join(BY_NAME)}") from None


def of_array(dtype: np.dtype[np.generic], *, where: str) -> DType:
    """The record for a NumPy dtype.

    Raises:
        InvalidDataType: opgraph has no such dtype (complex, strings, unsigned 16 to 64 bits, big-endian ...).
    """
    found = BY_NUMPY.get(dtype)
    if found is None:
        raise InvalidDataType(
            f"arrays of dtype {dtype} have no counterpart in opgraph",
            where=where,
            fix=f"convert the array to one of {', '.join(str(t.numpy) for t in _ALL)}",
        )
    return found
