"""Converts the nodes of a validated model to the ops of a graph, one by one and in order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count

import onnx
from onnx import NodeProto, TensorProto

from opgraph.errors import InvalidDataType, InvalidGraphOp, InvalidShape, ModelError
from opgraph.ir import dtypes
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue
from opgraph.ir.op_validation import checked_op
from opgraph.onnx.forms import schema
from opgraph.onnx.functions import trusted_call
from opgraph.onnx.nodes import captures
from opgraph.onnx.origin import Origin
from opgraph.onnx.source import Source
from opgraph.onnx.sparse import Room
from opgraph.onnx.spellings import plain_nodes
from opgraph.onnx.to_ops import Native, constant_value, native_candidates, wildcard_attrs
from opgraph.onnx.validate import is_unchanged, opsets
from opgraph.onnx.value_types import dtype_and_dims, element_only, value_types
from opgraph.onnx.whole_shapes import whole_shapes
from opgraph.runtime.providers.onnx_types import type_text

_TAGS = re.compile(r"~(\d{1,9}) ", re.ASCII)


class Reader:
    """Reads nodes in order; holds the graph so far and its values by name."""

    def __init__(self, origin: Origin, library: bool = False) -> None:
        self.origin = origin
        self.library = library
        self.model = origin.skeleton
        self.graph = Graph()
        self.values: dict[str, LogicalTensor] = {}
        self.types = value_types(self.model, origin.label)
        self.opsets = opsets(self.model)
        self.source = Source(origin)
        self.room = Room()  # for sparse constants, zeros included
        self.not_nodes: set[int] = set()  # ops that stand for an initializer
        self.functions = {(f.domain, f.name, f.overload): f for f in self.model.functions}
        self.shapes = whole_shapes(self.model.graph, self.opsets.get("", 0), library)

    def read(self) -> Graph:
        """Returns the finalized graph, with the model as `Graph.source`."""
        for name in self.origin.inputs:
            dtype, dims = dtype_and_dims(self.types.get(name))
            self.values[name] = self.graph.input(name, dtype, dims)
            self.source.value_of[self.values[name].id] = name
            if name in self.origin.tensors:
                self.graph.defaults[name] = self.origin.array(name)
        for index, node in enumerate(self.model.graph.node):
            if self.shapes.keys().isdisjoint(node.output):  # the others are read when an op needs them
                self._read(index, node)
        names = [o.name for o in self.model.graph.output]
        self.graph.set_outputs([self.value(name, "the model's outputs") for name in names])
        if len(set(names)) < len(names):
            self.graph.notes.append("an output that the model lists twice is one output of the graph")
        self.graph.source = self.source
        self.graph.finalize()
        self._note_dropped()
        return self.graph

    def _read(self, index: int, node: NodeProto) -> None:
        first = self.graph._next_op
        self.node(node)
        for op_id in {*range(first, self.graph._next_op)} - self.not_nodes:
            self.source.node_of.setdefault(op_id, index)

    def _note_dropped(self) -> None:
        outputs = {t.id for t in self.graph.outputs}
        made = [t for op in self.graph.ops for t in op.outputs]
        dropped = [t.name or str(t.id) for t in made if t.id not in outputs and not self.graph.consumers(t.id)]
        if dropped:
            shown = ", ".join(dropped[:5]) + (" ..." if len(dropped) > 5 else "")
            self.graph.notes.append(f"{len(dropped)} values that nothing reads were dropped: {shown}")

    # -- values -------------------------------------------------------------------------------------------------

    def value(self, name: str, where: str) -> LogicalTensor:
        """The tensor of a value. Constants are added to the graph at their first use."""
        if name in self.shapes:
            self._read(*self.shapes.pop(name))
        found = self.values.get(name)
        if found is None:
            if name not in self.origin.tensors:
                raise ModelError(
                    f"value {name!r} is used, but nothing makes it", where=f"{where} of {self.origin.label}",
                    fix="repair or export the model again",
                )  # fmt: skip
            found = self._initializer(name)
            self.values[name] = found
            self.source.value_of[found.id] = name
        return found

    def _initializer(self, name: str) -> LogicalTensor:
        tensor = self.origin.tensors[name]
        if int(tensor.dtype) in dtypes.BY_ONNX:
            return self.graph.constant(name, self.origin.array(name))
        # opgraph has no such dtype: a Wildcard carries the value as a Constant node.
        proto = TensorProto(name=name, data_type=int(tensor.dtype), dims=[int(d) for d in tensor.shape.numpy()])
        if proto.data_type == TensorProto.STRING:
            proto.string_data.extend(tensor.string_data())  # type: ignore[attr-defined]
        else:
            proto.raw_data = self.origin.raw(name).tobytes()
        node = onnx.helper.make_node("Constant", [], [name], name=name)
        node.attribute.append(onnx.helper.make_attribute("value", proto))
        self.types[name] = onnx.helper.make_tensor_type_proto(proto.data_type, list(proto.dims))
        self.not_nodes.add(self.graph._next_op)
        self._wildcard(node)
        return self.values[name]

    def _made(self, name: str, *, typed: bool = True) -> LogicalTensor:
        """A new tensor for a value that an op makes."""
        dtype, dims = dtype_and_dims(self.types.get(name)) if typed else (dtypes.UNDEF, None)
        return LogicalTensor(self.graph._next_tensor, dtype, dims, name=name)

    def _enter(self, name: str, tensor: LogicalTensor) -> None:
        self.values[name] = tensor
        self.source.value_of[tensor.id] = name

    # -- nodes --------------------------------------------------------------------------------------------------

    def node(self, node: NodeProto) -> None:
        """Adds one node, as a native op if a record has it."""
        if node.domain == "" and not all(node.input):
            self._check_gaps(node)
        if node.domain == "" and node.op_type == "Constant":
            array = constant_value(node, self.room)
            if array is not None:
                self._enter(node.output[0], self.graph.constant(node.output[0], array))
                return
        if (node.domain, node.op_type, node.overload) in self.functions:
            self._call(node)
        elif not self._native(node, self.opsets.get("", 0)) and not self._in_disguise(node):
            self._wildcard(node)

    def _check_gaps(self, node: NodeProto) -> None:
        """Refuses variadic ops with an omitted operand; onnxruntime (1.31) crashes on them."""
        found = schema(node.op_type, self.opsets.get("", 0))
        variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
        if found is None or not found.inputs or found.inputs[-1].option != variadic:
            return
        if not all(node.input[len(found.inputs) - 1 :]):
            raise ModelError(
                "an operand is left out among any number of them",
                where=f'{node.op_type} "{node.name}" of {self.origin.label}',
                fix="repair or export the model again",
            )

    def _operands(self, node: NodeProto, others: Mapping[int, str] | None = None) -> list[LogicalTensor | None]:
        where = f'{node.op_type} "{node.name}"'
        names = [(others or {}).get(place, name) for place, name in enumerate(node.input)]
        return [self.value(name, where) if name else None for name in names]

    def _native(self, node: NodeProto, opset: int) -> bool:
        if node.domain != "" or len(node.output) != 1 or not is_unchanged(node.op_type, opset):
            return False
        shapes = {i: self.shapes[name][1].input[0] for i, name in enumerate(node.input) if name in self.shapes}
        candidates = native_candidates(node, opset, self._operands(node, shapes), self.library, shapes)
        return any(self._added(node, candidate) for candidate in candidates)

    def _added(self, node: NodeProto, native: Native) -> bool:
        kind, inputs, attrs = native
        output = self._made(node.output[0])
        given = (self.graph._next_op, kind, tuple(inputs), (output,), node.name, attrs)
        try:
            if self.library:  # ONNX broadcasts some norm parameters that opgraph's norms do not
                checked_op(self.graph._tables, *given, infer=True)
            op = self.graph._add(*given, short=output.dtype == dtypes.UNDEF)
        except (InvalidDataType, InvalidGraphOp, InvalidShape):
            return False
        self._enter(node.output[0], op.outputs[0])
        return True

    def _in_disguise(self, node: NodeProto) -> bool:
        elements = {n: self.types[n].tensor_type.elem_type for n in node.input if n in self.types}
        elements.update((n, dtypes.BY_NAME[self.values[n].dtype].onnx) for n in node.input
                        if n in self.values and self.values[n].dtype != dtypes.UNDEF)  # fmt: skip
        if any(t is not None and t.dtype == dtypes.UNDEF for t in self._operands(node)):
            return False  # a later part would fail after the first ones were added to the graph
        named = self._named_apart(node)
        plain = plain_nodes(named, elements, self.opsets.get("", 0))
        if plain == [named]:
            return False
        plain[-1].output[0] = node.output[0]
        for index, simple in enumerate(plain):
            if simple.op_type == "Constant":
                array = constant_value(simple)
                if array is None:
                    return False
                self.values[simple.output[0]] = self.graph.constant("", array)
                continue
            if simple.output[0] != node.output[0]:
                self.types[simple.output[0]] = self._between(simple)
            # The node's opset may be older than the ops that it stands for.
            if not self._native(simple, onnx.defs.onnx_opset_version()):
                if index:
                    raise ModelError(
                        f"its parts do not fit together at {simple.op_type}",
                        where=f'{node.op_type} "{node.name}" of {self.origin.label}',
                        fix="repair or export the model again",
                    )
                return False
        return True

    def _named_apart(self, node: NodeProto) -> NodeProto:
        """The node, with an output name such that no value of the model starts with it and a space."""
        if not self._tag:
            return node
        result = NodeProto()
        result.CopyFrom(node)
        result.output[0] += self._tag
        return result

    @cached_property
    def _tag(self) -> str:
        """A suffix that no value name of the model has before a space; empty if no name has a space."""
        made = {name for node in self.model.graph.node for name in node.output}
        spaced = [name for name in made.union(self.origin.inputs, self.origin.tensors) if " " in name]
        used = {int(number) for name in spaced for number in _TAGS.findall(name)}
        return f"~{next(number for number in count() if number not in used)}" if spaced else ""

    def _between(self, node: NodeProto) -> onnx.TypeProto:
        """The type of a value inside a rewritten node: a cast's target type, else that of the first operand."""
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to":
                return element_only(attribute.i)
        first = self.value(node.input[0], node.op_type)
        return element_only(0 if first.dtype == dtypes.UNDEF else dtypes.BY_NAME[first.dtype].onnx)

    def _call(self, node: NodeProto) -> None:
        operands = [t for t in self._operands(node) if t is not None]
        function = self.functions[(node.domain, node.op_type, node.overload)]
        output = dtype_and_dims(self.types.get(node.output[0]))[0]
        native = trusted_call(node, function, operands, output, self.opsets.get("", 1))
        if native is None or not self._added(node, native):
            raise ModelError(
                f'the function "{node.domain}::{node.op_type}" is not what opgraph writes under that name',
                where=f'node "{node.name}" of {self.origin.label}',
                fix="give the function another name or domain",
            )

    def _wildcard(self, node: NodeProto) -> None:
        where = f'{node.op_type} "{node.name}"'
        captured = captures(node)
        names = [*(n for n in node.input if n), *captured]
        inputs = [self.value(name, where) for name in names]
        made = [name for name in node.output if name]
        outputs = tuple(self._made(name).with_(id=id) for id, name in enumerate(made, self.graph._next_tensor))
        attrs: dict[str, AttrValue] = wildcard_attrs(
            node,
            self.opsets.get(node.domain, 1),
            self._type_texts(names, inputs),
            self._type_texts(made, outputs),
            captured,
        )
        op = self.graph._add(self.graph._next_op, "Wildcard", tuple(inputs), outputs, node.name, attrs)
        for name, tensor in zip(made, op.outputs, strict=True):
            self._enter(name, tensor)

    def _type_texts(self, names: Sequence[str], tensors: Sequence[LogicalTensor]) -> list[str]:
        return [
            type_text(self.types[name]) if tensor.dtype == dtypes.UNDEF and name in self.types else ""
            for name, tensor in zip(names, tensors, strict=True)
        ]
