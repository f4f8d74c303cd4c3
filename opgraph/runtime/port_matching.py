"""Matches the logical tensors of a compilation to the ports of a partition, and infers the shapes that they omit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opgraph.errors import InvalidArguments, InvalidShape
from opgraph.ir.logical_tensor import Dims, LogicalTensor, dims_text
from opgraph.ir.op import Op
from opgraph.ir.shapes import ShapeMismatch, unify
from opgraph.partition.partition import Partition
from opgraph.runtime.shape_rules import inferred


def matched(
    partition: Partition, inputs: Sequence[LogicalTensor], outputs: Sequence[LogicalTensor], where: str
) -> tuple[dict[int, LogicalTensor], dict[int, LogicalTensor]]:
    """Returns inputs and outputs by id, in the order of the ports, with the shapes that the ops determine.

    Raises:
        InvalidArguments: a port has no logical tensor, or two that differ; a dtype, shape or layout is unknown, or
            not that of the port.
        InvalidShape: a given shape disagrees with the declared or the inferred one.
    """
    given_in, given_out = _by_id(inputs, where), _by_id(outputs, where)
    ins: dict[int, LogicalTensor] = {}
    for port in partition.input_ports:
        tensor = given_in.get(port.id)
        if tensor is None or not tensor.has_known_shape or not _fits(tensor, port):
            raise InvalidArguments(
                f"input {port.id} needs a logical tensor of dtype {port.dtype}, known shape and layout"
                + ("" if tensor is None else f", got {tensor.type_text} {tensor.layout}"),
                where=where,
                fix="pass one, with int dims, under the port's id",
            )
        _agreed(port.dims, tensor.dims, port.label, where, "is given as")
        ins[port.id] = tensor.with_(layout="strided")
    _check_symbols(partition.input_ports, ins, where)
    made = inferred(partition.ops, ins, _as_declared)
    outs: dict[int, LogicalTensor] = {}
    for port in partition.output_ports:
        tensor = given_out.get(port.id)
        if tensor is None or not _fits(tensor, port):
            raise InvalidArguments(
                f"output {port.id} needs a logical tensor of dtype {port.dtype} and known layout"
                + ("" if tensor is None else f", got {tensor.type_text} {tensor.layout}"),
                where=where,
                fix="pass one under the port's id; its dims may be None",
            )
        dims = _agreed(tensor.dims, made[port.id].dims, tensor.label, where)
        outs[port.id] = tensor.with_(dims=dims, layout="strided")
    return ins, outs


def _by_id(tensors: Iterable[LogicalTensor], where: str) -> dict[int, LogicalTensor]:
    found: dict[int, LogicalTensor] = {}
    for tensor in tensors:
        if not isinstance(tensor, LogicalTensor):
            raise InvalidArguments(
                f"got {type(tensor).__name__} where a LogicalTensor is expected",
                where=where,
                fix="pass lists of LogicalTensors",
            )
        if not found.setdefault(tensor.id, tensor).is_equal(tensor):
            raise InvalidArguments(
                f"tensor {tensor.id} is given twice, as {found[tensor.id].type_text} and {tensor.type_text}",
                where=where,
                fix="give one logical tensor for each id",
            )
    return found


def _fits(tensor: LogicalTensor, port: LogicalTensor) -> bool:
    return tensor.dtype == port.dtype and tensor.layout in ("strided", "any")


def _agreed(declared: Dims, found: Dims, label: str, where: str, source: str = "the ops make") -> Dims:
    try:
        return unify(declared, found, label)
    except ShapeMismatch:
        raise InvalidShape(
            f"{label} is declared {dims_text(declared)}, but {source} {dims_text(found)}",
            where=where,
            fix="declare the shape that it has, or leave it unknown (None)",
        ) from None


def _check_symbols(ports: Iterable[LogicalTensor], given: dict[int, LogicalTensor], where: str) -> None:
    sizes: dict[str, int] = {}
    for port in ports:
        for dim, size in zip(port.dims or (), given[port.id].shape, strict=False):
            if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                raise InvalidShape(
                    f'dimension "{dim}" is {sizes[dim]} and {size}', where=where, fix="equal symbols must be equal"
                )


def _as_declared(op: Op, tensor: LogicalTensor, dims: Dims) -> LogicalTensor:
    return tensor.with_(dims=_agreed(tensor.dims, dims, tensor.label, op.where))
