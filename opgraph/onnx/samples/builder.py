"""Builds a model like an exporter: one node per call, named values, initializers, value_info."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

OPSET, IR_VERSION = 20, 10  # those of torch.onnx.export(dynamo=True)

Dim = int | str
_EXTERNAL_BYTES = 1024


class Builder:
    """Collects the nodes of one model.

    Args:
        name: of the graph.
        seed: of the weights.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.generator = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self._named: dict[str, int] = {}
        self._shared: dict[bytes, str] = {}

    def input(self, name: str, element: int, shape: Sequence[Dim]) -> str:
        """Declares an input of the model."""
        self.inputs.append(helper.make_tensor_value_info(name, element, shape))
        return name

    def weight(self, name: str, shape: Sequence[int], scale: float = 1.0, shift: float = 0.0) -> str:
        """An initializer drawn from N(shift, scale)."""
        return self._initializer(name, self.generator.normal(shift, scale, shape).astype(np.float32))

    def value(self, number: Any, dtype: Any = np.float32) -> str:
        """A small initializer; equal ones are shared, as in exported models."""
        array = np.asarray(number, dtype)
        key = repr((array.dtype.str, array.shape)).encode() + array.tobytes()
        if key not in self._shared:
            self._shared[key] = self._initializer(f"val_{len(self._shared)}", array)
        return self._shared[key]

    def _initializer(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def __call__(self, op_type: str, *inputs: str, outputs: int = 1, name: str = "", **attributes: Any) -> Any:
        """Adds a node; returns the name of its output, or a list of names."""
        stem = name or op_type.lower()
        count = self._named[stem] = self._named.get(stem, -1) + 1
        base = stem if count == 0 else f"{stem}_{count}"
        made = [base] if outputs == 1 else [f"{base}_split_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, list(inputs), made, name=f"node_{base}", **attributes))
        return made[0] if outputs == 1 else made

    def model(self, output: str, element: int, shape: Sequence[Dim]) -> ModelProto:
        """The finished model with one output; shapes of all values are inferred and stored."""
        graph = helper.make_graph(
            self.nodes,
            self.name,
            self.inputs,
            [helper.make_tensor_value_info(output, element, shape)],
            self.initializers,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="opgraph demo"
        )
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        for value in inferred.graph.value_info:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param.startswith("unk__"):  # names made up by inference
                    dim.ClearField("dim_param")
        onnx.checker.check_model(inferred, full_check=True)
        return inferred


def write(model: ModelProto, path: str | os.PathLike[str]) -> None:
    """Writes a model, with its larger weights next to it in `<name>.data`, like exporters."""
    target = Path(path)
    data = target.with_name(f"{target.name}.data")
    data.unlink(missing_ok=True)  # onnx appends to it
    copy = ModelProto()
    copy.CopyFrom(model)
    onnx.save(copy, str(target), save_as_external_data=True, location=data.name, size_threshold=_EXTERNAL_BYTES)
    if data.exists():
        data.chmod(target.stat().st_mode & 0o777)  # onnx makes it readable by its owner only
