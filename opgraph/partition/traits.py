"""Properties that determine where an op may run, from its record and the shapes around it."""

from __future__ import annotations

from opgraph.ir import opdef
from opgraph.ir.op import Op
from opgraph.partition.partition import FUSED, LIBRARY, NATIVE, UNSUPPORTED
from opgraph.partition.symbols import Shape, is_scalar_shape

#: The family of ops whose result is complete only when the loop over their input has ended.
SUM = "sum"

#: The provider of fused partitions.
OPGRAPH = "opgraph"


def kind_and_provider(op: Op) -> tuple[str, str]:
    """The kind of partition of an op, and the provider that runs it; from its record, or from its ONNX node."""
    record = opdef.of(op)
    if record.is_pointwise or record.family == SUM:
        return FUSED, OPGRAPH
    if record.foreign and "onnx_op" in op.attrs:
        return LIBRARY, record.foreign
    if record.reference is not None:
        return LIBRARY, NATIVE
    return UNSUPPORTED, ""


def described(op: Op) -> str:
    """The text for an op in reports; a foreign op has its ONNX kind."""
    attrs = op.attrs
    return f'{attrs["onnx_op"]} "{op.name}"' if "onnx_op" in attrs else op.label


def cost_of(op: Op) -> int:
    """Rough instructions per element."""
    return opdef.of(op).cost


def values_read(op: Op, shapes: dict[int, Shape], shape: Shape) -> list[int]:
    """Ids of the operands of this shape whose data an op reads; empty for shapes of one element, which cost nothing."""
    record = opdef.of(op)
    if is_scalar_shape(shape) or record.index_of is not None:
        return []
    ports = record.with_optional(len(op.inputs))
    read = [t.id for t, port in zip(op.inputs, ports, strict=True) if not port.shape_only and shapes[t.id] == shape]
    return list(dict.fromkeys(read))


def bound_to_its_shape(op: Op, shapes: dict[int, Shape]) -> str:
    """The reason why an op cannot be computed in a loop over a larger shape than its own; "" if it can."""
    record = opdef.of(op)
    if record.index_of is not None or record.by_position:
        return "its value depends on the place in its own shape"
    if record.family == SUM:
        return "its sum runs over its own shape"
    return "its channel axis is one of its own shape" if aligned_operands(op, shapes) else ""


def aligned_operands(op: Op, shapes: dict[int, Shape]) -> list[int]:
    """Ids of operands that do not, or may not, broadcast as in NumPy: they are read with separate strides."""
    record = opdef.of(op)
    if not record.channel_inputs:
        return []
    ranks = [None if isinstance(shapes[t.id], str) else len(shapes[t.id]) for t in op.inputs]
    return [op.inputs[i].id for i in record.channel_inputs if record.lies_along_channel(i, ranks, op.attrs)]
