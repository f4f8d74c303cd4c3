"""Writes ops that opgraph has kernels for as ONNX nodes, so that they can join a region of onnxruntime."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto

from opgraph.errors import OpGraphError
from opgraph.ir import opdef
from opgraph.ir.op import Op
from opgraph.runtime.providers.onnx_node import is_onnx_node, node_of, opset_of

#: ONNX ops that read only the shape of their input.
_SHAPE_READERS = ("Shape", "Size")

#: dtypes with pointwise kernels in onnxruntime on the CPU; it refuses a whole model if it lacks one kernel.
RUNS = frozenset(("f64", "f32", "f16", "s64", "s32", "boolean"))

#: Named units that onnxruntime's optimizer fuses to one kernel, in f32.
FUSED_THERE = frozenset(("swish", "gelu"))


class NodeWriter:
    """Writes ops as nodes of one model, native ones in ONNX's own ops.

    Args:
        opset: the opset of ai.onnx.
        names: the names of all values.
        taken: names that no other value may have.

    Attributes:
        scalars: constants that the nodes read in addition to their operands, by name.
    """

    def __init__(self, opset: int, names: Mapping[int, str], taken: Collection[str] = ()) -> None:
        self._names = names
        self._emitter = _emitter(opset, {*names.values(), *taken})

    @property
    def scalars(self) -> dict[str, np.ndarray]:
        """See the class."""
        found: dict[str, np.ndarray] = self._emitter.arrays
        return found

    def nodes(self, op: Op) -> list[NodeProto] | None:
        """Returns the nodes of an op; None if ai.onnx has no equivalent ops.

        Raises:
            ModelError: the attributes of a Wildcard describe no node.
        """
        if is_onnx_node(op):
            return [node_of(op, self._names)]
        inputs = [(t, self._names[t.id]) for t in op.inputs]
        output = (op.outputs[0], self._names[op.outputs[0].id])
        try:
            made: list[NodeProto] = self._emitter.nodes(
                opdef.get(op.kind, where=op.label), op.attrs, inputs, output, op
            )
        except OpGraphError:
            return None
        return None if self._emitter.functions.functions or self._emitter.domains else made


def _emitter(opset: int, taken: set[str]) -> Any:
    # The writer of ONNX files has every form; models that onnxruntime reads at once are written like files.
    from opgraph.onnx.emit import Emitter  # imported late: a later stage
    from opgraph.onnx.function_table import FunctionTable
    from opgraph.onnx.target import target_of

    return Emitter(opset, "decomposed", target_of("onnxruntime"), taken, FunctionTable(opset))


def is_writable(op: Op, opset: int) -> bool:
    """True if a native op has a form in ai.onnx ops of that opset that onnxruntime has kernels for."""
    tensors = (*op.inputs, *op.outputs)
    if not all(t.dtype in RUNS for t in tensors):
        return False
    return NodeWriter(opset, {t.id: f"t{t.id}" for t in tensors}).nodes(op) is not None


def opset_of_region(ops: Iterable[Op]) -> int:
    """The ai.onnx opset of the nodes that some ops carry; 20 if there are none."""
    return next((opset_of(op)[1] for op in ops if is_onnx_node(op) and opset_of(op)[0] == ""), 20)


def reads_shape_alone(op: Op) -> bool:
    """True if a carried node needs no data of its inputs."""
    return op.attrs.get("onnx_op") in _SHAPE_READERS and opset_of(op)[0] == ""


def is_deterministic(op: Op) -> bool:
    """True if equal operands give equal results; False also for nodes without a schema in onnx."""
    domain, version = opset_of(op)
    return _deterministic(str(op.attrs["onnx_op"]), version, domain)


@cache
def _deterministic(op_type: str, version: int, domain: str) -> bool:
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return False
    said = getattr(schema, "node_determinism", None)  # newer than the oldest onnx that works
    return bool(said == onnx.defs.OpSchema.NodeDeterminism.Deterministic) if said is not None else False
