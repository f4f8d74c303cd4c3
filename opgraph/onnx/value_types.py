"""The types of a model's values, and their names in opgraph."""

from __future__ import annotations

import onnx
from onnx import ModelProto, TypeProto

from opgraph.errors import ModelError
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims
from opgraph.onnx.origin import DEFAULTS_SINCE
from opgraph.onnx.spellings import same_type
from opgraph.runtime.providers.onnx_types import set_tensor_type

#: Prefix of the symbols that onnx's inference makes up.
_MADE_UP = "unk__"


def value_types(model: ModelProto, label: str = "the model") -> dict[str, TypeProto]:
    """The type of each value of the main graph: the declared one, else the one that onnx infers."""
    model = _without_stale_sizes(model)
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
    for value in _inferred(_inferable(model)):
        if value.name not in stated and _says_something(value.type):
            stated[value.name] = _without_made_up_symbols(value.type)
    return stated


def _inferred(model: ModelProto) -> list[onnx.ValueInfoProto]:
    """The types that onnx infers for the values that nodes make, together with the declared ones."""
    # data_prop stays off: it keeps an entry for each element of a 1-d tensor, and a file may declare any size.
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except (ValueError, RuntimeError):  # some defects that the checker accepts stop it (an element type 0 inside)
        return []
    return [*graph.value_info, *graph.output]


def _without_stale_sizes(model: ModelProto) -> ModelProto:
    """Replaces numbers in the declared sizes of values by the symbols of the inputs that determine these sizes.

    Tools that make the sizes of inputs symbolic leave the old numbers at later values; onnxruntime only warns.
    """
    graph = model.graph
    named = any(d.dim_param for value in graph.input for d in value.type.tensor_type.shape.dim)
    numbers = any(d.dim_value for v in (*graph.value_info, *graph.output) for d in v.type.tensor_type.shape.dim)
    if not (named and numbers):
        return model
    bare = ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    found = {value.name: value.type.tensor_type.shape.dim for value in _inferred(_inferable(bare))}
    result = ModelProto()
    result.CopyFrom(model)
    for value in (*result.graph.value_info, *result.graph.output):
        for stated, dim in zip(value.type.tensor_type.shape.dim, found.get(value.name, ()), strict=False):
            if stated.HasField("dim_value") and dim.dim_param and not dim.dim_param.startswith(_MADE_UP):
                stated.dim_param = dim.dim_param
    return result


def _inferable(model: ModelProto) -> ModelProto:
    """The model in the form that is passed to onnx's inference.

    Contributed ops, whose types onnx does not infer, are replaced by plain ops with results of the same types. An
    initializer that is also an input has no value: it is a default, and a caller may give another shape or other axes.
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
    if plain and all(entry.domain for entry in result.opset_import):
        result.opset_import.append(onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version()))
    del result.graph.initializer[:]
    result.graph.initializer.extend(constants)
    return result


def _says_something(proto: TypeProto) -> bool:
    """True if a type is declared; a tensor of element type 0 is not a type."""
    return proto.ByteSize() > 0 and (not proto.HasField("tensor_type") or proto.tensor_type.elem_type != 0)


def _check_same(where: str, first: TypeProto, second: TypeProto) -> None:
    """Raises ModelError if two declarations of a value's type contradict each other."""
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
        if dim.dim_param.startswith(_MADE_UP):
            dim.ClearField("dim_param")
    return proto


def element_only(element: int) -> TypeProto:
    """A tensor type without a shape."""
    result = TypeProto()
    set_tensor_type(result, element, None)
    return result


def dtype_and_dims(proto: TypeProto | None) -> tuple[str, Dims]:
    """dtype and dimensions of a value; the dtype is "undef" if opgraph lacks it."""
    if proto is None or not proto.HasField("tensor_type"):
        return dtypes.UNDEF, None
    known = dtypes.BY_ONNX.get(proto.tensor_type.elem_type)
    name = known.name if known is not None else dtypes.UNDEF
    if not proto.tensor_type.HasField("shape"):
        return name, None
    return name, tuple(
        int(d.dim_value) if d.HasField("dim_value") else (d.dim_param or None) for d in proto.tensor_type.shape.dim
    )
