"""Sparse tensors: the format lists some values and their indices; all other elements are zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import SparseTensorProto

from opgraph.errors import ModelError, Unimplemented
from opgraph.ir import dtypes
from opgraph.onnx.tensor_check import check_tensor

#: The limit on the elements of all sparse tensors of a model together, zeros included: a base number, plus a number for
#: each stored value. Without a limit, a file of a kilobyte could allocate any amount of memory.
_FREE, _FOR_EACH = 1 << 24, 64


@dataclass(slots=True)
class Room:
    """The number of elements that a model's sparse tensors may still expand to."""

    left: int = _FREE

    def takes(self, tensor: SparseTensorProto) -> bool:
        """True if a tensor is small enough to be stored with its zeros; its elements are then subtracted."""
        left: int = self.left + _FOR_EACH * math.prod(tensor.values.dims) - math.prod(tensor.dims)
        if left >= 0:
            self.left = left
        return left >= 0


def dense(tensor: SparseTensorProto, room: Room) -> np.ndarray | None:
    """Expands a checked sparse tensor, zeros included; None if opgraph lacks its dtype, or if it would be huge.

    Indices must be in order and in range: one index, or one row of indices, for each value.
    """
    import onnx_ir as ir

    shape = tuple(tensor.dims)
    if tensor.values.data_type not in dtypes.BY_ONNX or not room.takes(tensor):
        return None
    values = np.asarray(ir.serde.deserialize_tensor(tensor.values).numpy())
    result = np.zeros(math.prod(shape), values.dtype)
    if values.size:
        places = np.asarray(ir.serde.deserialize_tensor(tensor.indices).numpy())
        result[places if places.ndim == 1 else np.ravel_multi_index(tuple(places.T), shape)] = values
    return result.reshape(shape)


def checked_dense(tensor: SparseTensorProto, where: str, room: Room) -> np.ndarray:
    """Expands a sparse initializer, zeros included.

    Raises:
        ModelError: it is malformed: indices out of order or range, data and shape disagree.
        Unimplemented: opgraph lacks its dtype, or it would be huge.
    """
    for part in (tensor.values, *([tensor.indices] if tensor.HasField("indices") else [])):
        check_tensor(part, where, external=False)
    try:
        onnx.checker.check_sparse_tensor(tensor)
    except onnx.checker.ValidationError as error:
        text = " ".join(str(error).split())[:300]
        raise ModelError(f"onnx's checker refuses it: {text}", where=where, fix="export the model again") from None
    result = dense(tensor, room)
    if result is None:
        raise Unimplemented(
            f"it would have {math.prod(tensor.dims):,} elements of type {tensor.values.data_type} with its zeros",
            where=where,
            fix="store it as a dense tensor, in a data file",
        )
    return result


def refuse_in_subgraph(found: Sequence[SparseTensorProto], place: str) -> None:
    """Refuses sparse initializers of a subgraph.

    Raises:
        Unimplemented: there are some. onnx's shape inference does not support them.
    """
    if found:
        names = ", ".join(str(s.values.name)[:50] for s in found[:3])
        raise Unimplemented(
            f"a subgraph has sparse initializers: {names}", where=place, fix="store them as dense tensors"
        )
