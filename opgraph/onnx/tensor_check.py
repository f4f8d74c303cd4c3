"""Checks that the shape, type and data of one TensorProto agree, before memory is allocated for them."""

from __future__ import annotations

import math

import onnx
from onnx import TensorProto

from opgraph.errors import ModelError, Unimplemented

#: Bits of one element, by TensorProto.DataType; strings have none.
_BITS = {
    TensorProto.FLOAT: 32,
    TensorProto.UINT8: 8,
    TensorProto.INT8: 8,
    TensorProto.UINT16: 16,
    TensorProto.INT16: 16,
    TensorProto.INT32: 32,
    TensorProto.INT64: 64,
    TensorProto.BOOL: 8,
    TensorProto.FLOAT16: 16,
    TensorProto.DOUBLE: 64,
    TensorProto.UINT32: 32,
    TensorProto.UINT64: 64,
    TensorProto.COMPLEX64: 64,
    TensorProto.COMPLEX128: 128,
    TensorProto.BFLOAT16: 16,
    TensorProto.FLOAT8E4M3FN: 8,
    TensorProto.FLOAT8E4M3FNUZ: 8,
    TensorProto.FLOAT8E5M2: 8,
    TensorProto.FLOAT8E5M2FNUZ: 8,
    TensorProto.UINT4: 4,
    TensorProto.INT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    **{getattr(TensorProto, name): bits for name, bits in (("FLOAT8E8M0", 8), ("UINT2", 2), ("INT2", 2))
       if hasattr(TensorProto, name)},
}  # fmt: skip


#: The most dimensions of an array in NumPy 2.
MAX_RANK = 64


def check_tensor(tensor: TensorProto, where: str, *, external: bool) -> None:
    """Checks a tensor that came with a model.

    Args:
        external: True if its data may be in a file next to the model.

    Raises:
        ModelError: unknown type, negative or too large dimensions, less or more data than the shape requires.
        Unimplemented: segments; external data where not allowed; more dimensions than NumPy supports.
    """
    if any(d < 0 for d in tensor.dims):
        raise ModelError(f"its shape {list(tensor.dims)} is negative", where=where, fix="export the model again")
    if len(tensor.dims) > MAX_RANK:
        raise Unimplemented(
            f"it has {len(tensor.dims)} dimensions", where=where, fix=f"arrays of NumPy have at most {MAX_RANK}"
        )
    size = math.prod(tensor.dims)
    bits = _BITS.get(tensor.data_type)
    if bits is None and tensor.data_type != TensorProto.STRING:
        raise ModelError(f"its element type {tensor.data_type} is unknown", where=where, fix="export the model again")
    if tensor.HasField("segment"):
        raise Unimplemented("it is a segment of a tensor", where=where, fix="store the tensor whole")
    if tensor.data_location == TensorProto.EXTERNAL:
        if not external or bits is None:
            raise Unimplemented(
                "it lies in a data file, and only numeric initializers of the main graph may",
                where=where,
                fix="store it inside the model",
            )
        return
    if tensor.HasField("raw_data"):
        if bits is None:
            raise ModelError("strings cannot be raw data", where=where, fix="export the model again")
        found, wanted, what = len(tensor.raw_data), (size * bits + 7) // 8, "bytes"
    else:
        field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
        found, wanted, what = len(getattr(tensor, field)), _stored(size, tensor.data_type, bits or 8), "numbers"
    if found != wanted:
        raise ModelError(
            f"its shape {list(tensor.dims)} needs {wanted} {what}, it has {found}",
            where=where,
            fix="export the model again: shape and data disagree",
        )


def _stored(size: int, data_type: int, bits: int) -> int:
    """The number of entries in a tensor's typed field: complex numbers take two, sub-byte types share one."""
    if data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return 2 * size
    return (size * bits + 7) // 8 if bits < 8 else size
