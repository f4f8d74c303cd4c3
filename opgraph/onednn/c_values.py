"""Logical tensors and ops of opgraph in the form of oneDNN's C API."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from opgraph.errors import Unimplemented
from opgraph.ir import opdef
from opgraph.ir.logical_tensor import LogicalTensor, row_major
from opgraph.ir.op import Op
from opgraph.onednn import capi
from opgraph.onednn.capi import CLogicalTensor

if TYPE_CHECKING:
    from opgraph.onednn.library import Library


def c_op(lib: Library, op: Op) -> ctypes.c_void_p:
    """A library op with the tensors and attributes of an op of opgraph; the caller destroys it.

    Raises:
        Unimplemented: a kind, attribute or dtype that this version of the library does not have.
    """
    record, number = opdef.of(op), capi.KIND.get(op.kind.lower())
    if number is None:
        raise Unimplemented(
            f"oneDNN {lib.version} has no kind {op.kind}", where=op.label, fix="write it in ops that it has"
        )
    made = lib.created("graph_op_create", op.id, number, op.name.encode())
    try:
        for tensor in op.inputs:
            lib.call("graph_op_add_input", made, c_tensor(tensor))
        for tensor in op.outputs:
            lib.call("graph_op_add_output", made, c_tensor(tensor))
        for name, value in op.attrs.items():
            attr = record.attr(name)
            if attr is None:
                raise Unimplemented("oneDNN's Wildcard takes no attributes", where=op.label, fix="leave them out")
            # Defaults are omitted: the library rejects attributes that only opgraph's record has.
            if value != attr.default:
                _set_attr(lib, made, op, name, attr.type, value)
    except BaseException:
        lib.call("graph_op_destroy", made)
        raise
    return made


def c_tensor(tensor: LogicalTensor) -> CLogicalTensor:
    """The library's form of a logical tensor of known shape.

    Raises:
        Unimplemented: a dtype that this version of the library does not have.
        InvalidArguments: an unknown dimension, or more dimensions than the library takes.
    """
    number = capi.DTYPE.get(tensor.dtype)
    if number is None or len(tensor.shape) > capi.MAX_DIMS:
        raise Unimplemented(
            f"oneDNN's library takes no {tensor.type_text}", where=tensor.label, fix=f"use {', '.join(capi.DTYPE)}"
        )
    strides = tensor.odd_strides or row_major(tensor.shape)
    return CLogicalTensor(
        id=tensor.id,
        ndims=len(tensor.shape),
        dims=capi.Dims(*tensor.shape),
        data_type=number,
        property=capi.PROPERTY.get(tensor.property, 1),
        layout_type=capi.STRIDED,
        strides=capi.Dims(*strides),
    )


def _set_attr(lib: Library, made: ctypes.c_void_p, op: Op, name: str, type_: str, value: Any) -> None:
    number = capi.ATTR.get(name)
    if number is None:
        raise Unimplemented(f"oneDNN {lib.version} has no attribute {name}", where=op.label, fix="leave it out")
    scalar = type_.removesuffix("[]")
    if scalar == "string":
        lib.call("graph_op_set_attr_str", made, number, value.encode(), len(value.encode()), where=op.label)
        return
    ctype: Any = {"f32": ctypes.c_float, "s64": ctypes.c_int64, "bool": ctypes.c_uint8}[scalar]
    values = list(value) if type_.endswith("[]") else [value]
    data = (ctype * len(values))(*values)
    # A length of 0 means one number, not a list of one. There are no lists of bools.
    length = len(values) if type_.endswith("[]") or scalar == "bool" else 0
    lib.call(f"graph_op_set_attr_{scalar}", made, number, data, length, where=f"{op.label}, attribute {name}")
