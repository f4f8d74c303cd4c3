"""Inspects a model file without running opgraph on it: lists its inner values, and makes them outputs."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from google.protobuf.message import DecodeError

from opgraph.errors import ModelError
from opgraph.ir import dtypes
from opgraph.runtime.providers.onnx_types import ELEMENT_NAMES

#: Maps onnxruntime's type names to opgraph's dtypes: "tensor(float)" -> "f32".
DTYPE_OF_TYPE = {f"tensor({ELEMENT_NAMES[t.onnx]})": t.name for t in dtypes.BY_NAME.values()}


def _structure(path: str) -> onnx.ModelProto:
    try:
        return onnx.load_model(path, load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise ModelError(f"no ONNX model: {error}", where=path, fix="export it again") from None


def value_names(path: str) -> list[str]:
    """The values that nodes of the main graph make, in order."""
    return [name for node in _structure(path).graph.node for name in node.output if name]


def with_outputs(path: str, names: Iterable[str]) -> bytes:
    """The model with these values as its only outputs; its external data stay where they are.

    The result is for onnxruntime, which infers the types of outputs that are declared without one.
    """
    model = _structure(path)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return bytes(model.SerializeToString())
