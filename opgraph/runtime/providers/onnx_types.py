"""ONNX types as text and as protobuf, including types that opgraph lacks."""

from __future__ import annotations

import re

import onnx
from onnx import TypeProto

from opgraph.errors import Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor

#: onnxruntime's name of each TensorProto.DataType.
ELEMENT_NAMES = {value: name.lower() for name, value in onnx.TensorProto.DataType.items()}
_BY_ELEMENT = {name: value for value, name in ELEMENT_NAMES.items()}
_WRAPPED = re.compile(r"(seq|optional|tensor|sparse_tensor)\((.*)\)|map\((\w+),(.*)\)")


def type_text(proto: TypeProto) -> str:
    """A type without its dimensions, as onnxruntime writes it: tensor(uint16), seq(map(int64,tensor(float))).

    "" if the model does not specify the type.
    """
    prefix, suffix = "", ""
    while True:
        case = proto.WhichOneof("value")
        if case == "tensor_type":
            return f"{prefix}tensor({ELEMENT_NAMES.get(proto.tensor_type.elem_type, 'undefined')}){suffix}"
        if case == "sparse_tensor_type":
            element = ELEMENT_NAMES.get(proto.sparse_tensor_type.elem_type, "undefined")
            return f"{prefix}sparse_tensor({element}){suffix}"
        if case == "sequence_type":
            word, proto = "seq(", proto.sequence_type.elem_type
        elif case == "optional_type":
            word, proto = "optional(", proto.optional_type.elem_type
        elif case == "map_type":
            word = f"map({ELEMENT_NAMES.get(proto.map_type.key_type, 'undefined')},"
            proto = proto.map_type.value_type
        else:
            return ""
        prefix, suffix = prefix + word, f"){suffix}"


def type_proto(tensor: LogicalTensor, text: str, where: str) -> TypeProto:
    """The ONNX type of a value.

    Args:
        text: the result of `type_text`; only used if the tensor has no dtype.

    Raises:
        Unimplemented: the type is not specified.
    """
    result = TypeProto()
    if tensor.dtype != dtypes.UNDEF:
        set_tensor_type(result, dtypes.get(tensor.dtype, where=where).onnx, tensor)
        return result
    at = result
    while match := _WRAPPED.fullmatch(text):
        word, text, key, inner = match.groups()
        if key in _BY_ELEMENT:
            at.map_type.key_type, text = _BY_ELEMENT[key], inner
            at = at.map_type.value_type
        elif word in ("seq", "optional"):
            at = at.sequence_type.elem_type if word == "seq" else at.optional_type.elem_type
        elif text in _BY_ELEMENT and word == "sparse_tensor":
            at.sparse_tensor_type.elem_type = _BY_ELEMENT[text]
            return result
        elif text in _BY_ELEMENT and word == "tensor":
            set_tensor_type(at, _BY_ELEMENT[text], tensor if at is result else None)
            return result
        else:
            break
    raise Unimplemented(
        f"the type of {tensor.label} is not known",
        where=where,
        fix="add its type to the model's value_info, for example with onnx.shape_inference",
    )


def set_tensor_type(proto: TypeProto, element: int, tensor: LogicalTensor | None) -> None:
    """Fills in a tensor type, with the sizes and symbols of the tensor, or without a shape if it has none."""
    proto.tensor_type.elem_type = element
    if tensor is None or tensor.dims is None:
        return
    proto.tensor_type.shape.SetInParent()
    for size in tensor.dims:
        dim = proto.tensor_type.shape.dim.add()
        if isinstance(size, int):
            dim.dim_value = size
        elif size is not None:
            dim.dim_param = size
