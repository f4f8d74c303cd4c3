"""A model to be written: its structure, its weights, and a summary of the changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx_ir as ir
from onnx import GraphProto, ModelProto, SparseTensorProto, TensorProto

from opgraph.errors import ModelError
from opgraph.onnx.checker import run_checker
from opgraph.onnx.library.ops import LibraryOp
from opgraph.onnx.origin import SMALL, Origin, add_stand_in, header
from opgraph.runtime.providers.onnx_region import tensor_proto


@dataclass(slots=True)
class Summary:
    """Summary of one export.

    Attributes:
        form, target: as requested.
        opset, ir_version: as written.
        nodes_before, nodes_after: of the main graph.
        units: the number of units written as one node, by name.
        notes: other changes, in sentences.
    """

    form: str
    target: str
    opset: int = 0
    ir_version: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    units: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Draft:
    """A model in separate parts, like an `Origin`.

    Attributes:
        skeleton: the model with its small initializers; inputs after the true ones stand for the large initializers.
        inputs: the names of the true inputs.
        arrays: initializers that the graph holds; by name, in order.
        origin: the source of the other initializers.
        kept: names of the origin's initializers that stay, in order.
        library: the ops of an onnxruntime library that the nodes call.
    """

    skeleton: ModelProto
    inputs: list[str]
    summary: Summary
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    origin: Origin | None = None
    kept: list[str] = field(default_factory=list)
    library: list[LibraryOp] = field(default_factory=list)

    def as_origin(self) -> Origin:
        """Returns this model as an Origin, as if it had been read."""
        skeleton = ModelProto()
        skeleton.CopyFrom(self.skeleton)
        tensors: dict[str, ir.TensorProtocol] = {}
        if self.origin is not None:
            tensors = {name: self.origin.tensors[name] for name in self.kept}
        tensors.update((name, ir.serde.deserialize_tensor(self.tensor(name))) for name in self.arrays)
        if self.origin is None:
            return Origin("the model", None, skeleton, tensors, list(self.inputs))
        replaced = {n: a for n, a in self.origin.replaced.items() if n in tensors}
        return replace(
            self.origin, skeleton=skeleton, tensors=tensors, inputs=list(self.inputs), replaced=replaced, folded=None
        )

    def add_array(self, name: str, data: np.ndarray) -> None:
        """Adds an initializer."""
        self.arrays[name] = data
        if data.nbytes <= SMALL:
            self.skeleton.graph.initializer.append(tensor_proto(name, data))
        else:
            proto = tensor_proto(name, data[:0] if data.ndim else data)
            add_stand_in(self.skeleton, name, proto.data_type, list(data.shape), self.inputs)

    def check(self) -> None:
        """Runs onnx's checker over the structure.

        Raises:
            ModelError: the checker refuses it, because opgraph wrote or kept something invalid.
        """
        try:
            run_checker(self.skeleton)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, TypeError) as error:
            raise ModelError(
                f"onnx's checker refuses the model to be written: {' '.join(str(error).split())[:400]}",
                where="opgraph.onnx.save",
                fix="save with another form; if that does not help, report the graph",
            ) from error

    def tensor(self, name: str) -> TensorProto:
        """An initializer with its data inside."""
        if name in self.arrays:
            return tensor_proto(name, self.arrays[name])
        assert self.origin is not None
        tensor = self.origin.tensors[name]
        if self.origin.extent(name) is None and name not in self.origin.replaced:
            # onnx_ir (1.1) writes metadata twice.
            return tensor.raw if isinstance(tensor, ir.serde.TensorProtoTensor) else ir.to_proto(tensor)
        result = header(name, tensor)
        result.raw_data = self.origin.raw(name).tobytes()
        return result

    def sparse(self, name: str) -> SparseTensorProto | None:
        """The source's sparse tensor of an initializer; None if it is not sparse or its values were replaced."""
        if self.origin is None or name in self.arrays or name in self.origin.replaced:
            return None
        return self.origin.sparse.get(name)

    def add_to(self, graph: GraphProto, name: str) -> None:
        """Adds an initializer with its data inside, as a sparse tensor if it was one."""
        stated = self.sparse(name)
        if stated is not None:
            graph.sparse_initializer.append(stated)
        else:
            graph.initializer.append(self.tensor(name))

    def structure(self) -> ModelProto:
        """The model without any initializer."""
        result = ModelProto()
        result.CopyFrom(self.skeleton)
        del result.graph.initializer[:]
        true = [value for value in result.graph.input if value.name in self.inputs]
        del result.graph.input[:]
        result.graph.input.extend(true)
        return result

    def proto(self) -> ModelProto:
        """The whole model in memory."""
        result = self.structure()
        for name in (*self.kept, *self.arrays):
            self.add_to(result.graph, name)
        return result

    def ir_model(self) -> ir.Model:
        """The whole model for onnx_ir; tensors in data files stay there."""
        model = ir.from_proto(self.skeleton)
        values = {v.name: v for v in model.graph.inputs}
        for name in (*self.kept, *self.arrays):
            if name in model.graph.initializers:
                continue
            value = values[name]
            if name not in self.inputs:  # a default of a true input stays a default
                model.graph.inputs.remove(value)
            value.const_value = self._ir_tensor(name)
            model.graph.register_initializer(value)
        return model

    def _ir_tensor(self, name: str) -> ir.TensorProtocol:
        if name in self.arrays or self.origin is None or name in self.origin.replaced:
            return ir.serde.deserialize_tensor(self.tensor(name))
        return self.origin.tensors[name]
