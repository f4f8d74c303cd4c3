"""The types of a model's values, and what they are called in opgraph."""

from __future__ import annotations

import onnx
from onnx import ModelProto, TypeProto

from opgraph.errors import ModelError
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims
from opgraph.onnx.origin import DEFAULTS_SINCE
from opgraph.onnx.spellings import same_type
from opgraph.runtime.providers.onnx_types import set_tensor_type


def value_types(model: ModelProto, label: str = "the model") -> dict[str, TypeProto]:
    """The type of each value of the main graph: as the model states it, else as onnx infers it."""
    graph = model.graph
    stated: dict[str, TypeProto] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if _says_something(value.type):
            _check_same(f'value "{value.name}" of {label}', stated.setdefault(value.name, value.type), value.type)
            stated[value.name] = value.type
    for tensor in graph.initializer:
        stated.setdefault(tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
    if all(name in stated for node in graph.node for name in node.output if name):
        return stated
    # Not with data_prop: it keeps an entry for each element of a 1-d tensor, and a file states sizes as it likes.
    try:
        inferred = onnx.shape_inference.infer_shapes(_inferable(model)).graph
    except (ValueError, RuntimeError):  # some damage stops it that the checker lets through (an element type 0 inside)
        return stated
    for value in (*inferred.value_info, *inferred.output):
        if value.name not in stated and _says_something(value.type):
            stated[value.name] = _without_made_up_symbols(value.type)
    return stated


def _inferable(model: ModelProto) -> ModelProto:
    """The model as onnx may infer from it.

    Contributed ops, of which onnx knows no types, are plain ones whose results have the same types. An initializer that
    is an input as well has no value: it is a default, and a caller may give another shape or other axes.
    """
    plain = {index: made for index, node in enumerate(model.graph.node) if (made := same_type(node)) is not None}
    listed = {value.name for value in model.graph.input} if model.ir_version >= DEFAULTS_SINCE else set()
    constants = [tensor for tensor in model.graph.initializer if tensor.name not in listed]
    if not plain and len(constants) == len(model.graph.initializer):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    for index, made in plain.items():
        result.graph.node[index].CopyFrom(made)
    del result.graph.initializer[:]
    result.graph.initializer.extend(constants)
    return result


def _says_something(proto: TypeProto) -> bool:
    """Whether a type is stated; a tensor of element type 0 is none."""
    return proto.ByteSize() > 0 and (not proto.HasField("tensor_type") or proto.tensor_type.elem_type != 0)


def _check_same(where: str, first: TypeProto, second: TypeProto) -> None:
    """Raises ModelError where two statements of a value's type contradict each other."""
    if first is second or not (first.HasField("tensor_type") and second.HasField("tensor_type")):
        return
    dims = [t.tensor_type.shape.dim if t.tensor_type.HasField("shape") else None for t in (first, second)]
    same = first.tensor_type.elem_type == second.tensor_type.elem_type
    if dims[0] is not None and dims[1] is not None:
        same &= len(dims[0]) == len(dims[1])
        pairs = [
            (a.dim_value, b.dim_value) for a, b in zip(*dims) if a.HasField("dim_value") and b.HasField("dim_value")
        ]
        same &= all(a == b for a, b in pairs)
    if not same:
        raise ModelError(
            "its type is stated twice, and differently", where=where, fix="repair or export the model again"
        )


def _without_made_up_symbols(proto: TypeProto) -> TypeProto:
    for dim in proto.tensor_type.shape.dim if proto.HasField("tensor_type") else ():
        if dim.dim_param.startswith("unk__"):
            dim.ClearField("dim_param")
    return proto


def element_only(element: int) -> TypeProto:
    """A tensor type that says nothing of the shape."""
    result = TypeProto()
    set_tensor_type(result, element, None)
    return result


def dtype_and_dims(proto: TypeProto | None) -> tuple[str, Dims]:
    """dtype and dimensions of a value; "undef" where opgraph has no word for it."""
    if proto is None or not proto.HasField("tensor_type"):
        return dtypes.UNDEF, None
    known = dtypes.BY_ONNX.get(proto.tensor_type.elem_type)
    name = known.name if known is not None else dtypes.UNDEF
    if not proto.tensor_type.HasField("shape"):
        return name, None
    return name, tuple(
        int(d.dim_value) if d.HasField("dim_value") else (d.dim_param or None) for d in proto.tensor_type.shape.dim
    )
