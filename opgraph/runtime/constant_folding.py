"""Finds the ops that depend on the input shapes alone: they run once for each set of shapes, not in every call."""

from __future__ import annotations

from collections.abc import Sequence

from opgraph.ir.graph import Graph
from opgraph.ir.op import Op
from opgraph.partition.partition import FUSED, Partition

ONNXRUNTIME = "onnxruntime"


def static_ops(graph: Graph, partitions: Sequence[Partition]) -> set[int]:
    """Ids of the ops whose results depend only on the shapes of the graph's inputs. A fused partition counts as one."""
    from opgraph.runtime.providers.onnx_native import is_deterministic, reads_shape_alone  # needs onnx

    shapes = {t.id for t in graph.inputs}  # tensors whose shape is known from the call's shapes
    constants = {t.id for t in graph.constants}  # those, and all values computed from them alone
    values = set(constants)
    pieces: list[tuple[tuple[Op, ...], bool]] = []
    for part in partitions:
        for ops in [part.ops] if part.provider != ONNXRUNTIME else [(op,) for op in part.ops]:
            reads = {t.id for op in ops for t in op.inputs} - {t.id for op in ops for t in op.outputs}
            folds = False
            if part.provider == ONNXRUNTIME:
                follows = is_deterministic(ops[0]) and (
                    reads <= values or (reads_shape_alone(ops[0]) and reads <= shapes | values)
                )
                folds = follows and reads <= constants
            else:
                follows = part.kind == FUSED and bool(reads) and reads <= values
            if follows:
                made = {t.id for op in ops for t in op.outputs}
                values |= made
                constants |= made if reads <= constants else set()
                pieces.append((ops, folds))
    return _without_foldable(pieces)


def _without_foldable(pieces: Sequence[tuple[tuple[Op, ...], bool]]) -> set[int]:
    """Ids of the pieces' ops, except ops of constants alone that only the rest of the graph reads.

    onnxruntime folds those, or has a reason not to: it makes dequantized weights part of an integer matrix product.

    Args:
        pieces: ops in order, and whether onnxruntime may fold them.
    """
    found: set[int] = set()
    read: set[int] = set()
    for ops, folds in reversed(pieces):
        if not folds or any(t.id in read for op in ops for t in op.outputs):
            found.update(op.id for op in ops)
            read.update(t.id for op in ops for t in op.inputs)
    return found
