"""A model's training_info: kept unchanged, or refused with an error that names it.

Its graphs refer to the model's graph by name, so they stay valid only if that graph stays unchanged.
"""

from __future__ import annotations

from onnx import GraphProto, ModelProto, TensorProto

from opgraph.errors import Unimplemented
from opgraph.onnx.nodes import subgraphs


def check_training(model: ModelProto, where: str) -> None:
    """Raises Unimplemented if training_info refers to data files: opgraph does not manage these."""
    waiting = [graph for info in model.training_info for graph in (info.initialization, info.algorithm)]
    while waiting:
        graph = waiting.pop()
        if any(tensor.data_location == TensorProto.EXTERNAL for tensor in _tensors(graph)):
            raise Unimplemented(
                "its training_info has tensors in a data file", where=where, fix="export the model for inference"
            )
        waiting += [inner for node in graph.node for inner in subgraphs(node)]


def _tensors(graph: GraphProto) -> list[TensorProto]:
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    sparse = [*graph.sparse_initializer, *(a.sparse_tensor for a in attributes if a.HasField("sparse_tensor"))]
    sparse += [s for a in attributes for s in a.sparse_tensors]
    tensors = [*graph.initializer, *(a.t for a in attributes if a.HasField("t"))]
    tensors += [t for a in attributes for t in a.tensors]
    return tensors + [t for s in sparse for t in (s.values, s.indices)]


def refuse_changes(model: ModelProto) -> None:
    """Raises Unimplemented if a model to be changed has training_info, which would no longer fit."""
    if model.training_info:
        raise Unimplemented(
            "it has training_info, which speaks of the nodes as they are, and some would be others",
            where="opgraph.onnx.save",
            fix='use form="decomposed" without functions, library or opset, or export the model for inference',
        )
