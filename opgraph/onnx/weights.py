"""Replaces weights of a model or a graph; everything else stays unchanged."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto

from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import port_name
from opgraph.onnx.atomic_write import file_path
from opgraph.onnx.draft import Draft, Summary
from opgraph.onnx.origin import Origin, with_data
from opgraph.onnx.source import Source
from opgraph.onnx.write import write
from opgraph.runtime import array_exchange
from opgraph.runtime.graph_arguments import Ports
from opgraph.runtime.providers.onnx_region import tensor_proto
from opgraph.transforms.units import with_constants


def save_with_weights(origin: Origin, weights: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> None:
    """Writes a model with other values for some of its initializers.

    Nodes, names, functions, metadata, opset imports, symbolic dimensions and the order of initializers stay. Tensors
    from a data file stay in a data file: the same one if they did not change and `path` is in its folder, otherwise
    `<path>.data`.

    Args:
        origin: the model, as it was read.
        weights: initializer name -> new value, of the same dtype and shape.
        path: the file; it may be the model's own.

    Raises:
        InvalidArguments: no such initializer, another dtype or shape, or `path` is not a path.
        ModelError: the file cannot be written. Then nothing has changed on the disk.
    """
    for name, array in weights.items():
        _check(origin, name, array)
    changed = _reweighted(origin, weights)
    summary = Summary("decomposed", "")
    draft = Draft(changed.skeleton, list(origin.inputs), summary, origin=changed, kept=list(origin.tensors))
    write(draft, file_path(path, "path"))


def _reweighted(origin: Origin, weights: Mapping[str, np.ndarray]) -> Origin:
    """The model with other values for initializers, and for results of Constant nodes."""
    initializers = {n: a for n, a in weights.items() if n in origin.tensors}
    skeleton, _ = _with_values(origin.skeleton, weights)
    folded = None
    if origin.folded is not None:
        folded, found = _with_values(origin.folded, weights)
        if not weights.keys() <= found | initializers.keys():  # one is a constant of a function
            folded = None
    return replace(origin, skeleton=skeleton, replaced={**origin.replaced, **initializers}, folded=folded)


def _with_values(model: ModelProto, weights: Mapping[str, np.ndarray]) -> tuple[ModelProto, set[str]]:
    """A copy of a model with other values for some constants of its main graph, and the names of these constants."""
    result, found = ModelProto(), set[str]()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(with_data(tensor, weights[tensor.name]))
            found.add(tensor.name)
    for node in result.graph.node:
        if node.op_type == "Constant" and node.domain == "" and node.output[0] in weights:
            _set_value(node.attribute[0], node.output[0], weights[node.output[0]])
            found.add(node.output[0])
    return result, found


def _set_value(attribute: AttributeProto, name: str, array: np.ndarray) -> None:
    """Sets the value of a Constant; a sparse one becomes dense."""
    if attribute.name == "value":
        attribute.t.CopyFrom(with_data(attribute.t, array))
        return
    remark = attribute.doc_string
    if attribute.name == "sparse_value":
        attribute.CopyFrom(onnx.helper.make_attribute("value", tensor_proto(name, array)))
    else:  # a number, or a list of numbers
        attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, array.tolist(), attr_type=attribute.type))
    if remark:
        attribute.doc_string = remark


def with_weights(graph: Graph, weights: Mapping[str, Any]) -> Graph:
    """Returns the graph with other values for some constants; the model that it was loaded from gets them too.

    Args:
        graph: finalized by this call if necessary.
        weights: constant name -> array (NumPy, torch, anything with DLPack) of the same dtype and shape.

    Raises:
        InvalidArguments: no such constant, or no array.
        InvalidDataType, InvalidShape: an array of another dtype or shape.
    """
    if not isinstance(weights, Mapping):
        raise InvalidArguments(
            f"weights are {type(weights).__name__}", where="save, weights", fix="give a dict: weights={name: array}"
        )
    graph.finalize()
    known = {port_name(t): t for t in graph.constants if t.name}
    for name in weights:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(str(name), known, n=3, cutoff=0) or ["none"])
            raise InvalidArguments(
                f"there is no constant {name!r} in the graph", where="save, weights", fix=f"the nearest names: {near}"
            )
    chosen = [known[name] for name in weights]
    given = array_exchange.imported(weights, {})[0]
    arrays = Ports(chosen, "weight").bind(given, {})
    result = with_constants(graph, {t.id: a for t, a in zip(chosen, arrays, strict=True)})
    result.source = graph.source
    if isinstance(graph.source, Source):
        names = [graph.source.value_of[t.id] for t in chosen]
        result.source = replace(graph.source, origin=_reweighted(graph.source.origin, dict(zip(names, arrays))))
    return result


def _check(origin: Origin, name: str, array: np.ndarray) -> None:
    where = f"the weights of {origin.label}"
    if name not in origin.tensors:
        raise InvalidArguments(f"there is no initializer {name!r}", where=where, fix="name one of the model")
    tensor = origin.tensors[name]
    shape = tuple(int(d) for d in tensor.shape.numpy())
    if array.shape != shape or dtypes.of_array(array.dtype, where=name).onnx != int(tensor.dtype):
        raise InvalidArguments(
            f"{name!r} is {tensor.dtype.name}{list(shape)}, not {array.dtype}{list(array.shape)}",
            where=where,
            fix="give a value of the same dtype and shape",
        )
