"""A model with other weights: everything else stays as it was."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import ModelProto

from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes
from opgraph.onnx.draft import Draft, Summary
from opgraph.onnx.origin import Origin
from opgraph.onnx.write import write
from opgraph.runtime.providers.onnx_region import tensor_proto


def save_with_weights(origin: Origin, weights: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> None:
    """Writes a model with other values for some of its initializers.

    Nodes, names, functions, metadata, opset imports, symbolic dimensions and the order of initializers stay. Tensors
    that lay in a data file lie in one again: the same if they did not change and `path` is in its folder, otherwise
    `<path>.data`.

    Args:
        origin: the model, as it was read.
        weights: initializer name -> new value, of its dtype and shape.
        path: the file; it may be the model's own.

    Raises:
        InvalidArguments: no such initializer, or another dtype or shape.
        ModelError: the file cannot be written. Then nothing has changed on the disk.
    """
    for name, array in weights.items():
        _check(origin, name, array)
    skeleton = ModelProto()
    skeleton.CopyFrom(origin.skeleton)
    for tensor in skeleton.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(tensor_proto(tensor.name, weights[tensor.name]))
    changed = replace(origin, skeleton=skeleton, replaced=dict(weights))
    draft = Draft(skeleton, list(origin.inputs), Summary("decomposed", ""), origin=changed, kept=list(origin.tensors))
    write(draft, Path(os.fsdecode(path)))


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
