"""A region of Wildcards as one ONNX model: the nodes that they carry, connected as in the graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from opgraph.errors import Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.runtime.providers.onnx_node import defined_inside, is_onnx_node, node_of, opset_of
from opgraph.runtime.providers.onnx_pooling import pool_means
from opgraph.runtime.providers.onnx_types import type_proto

#: Constants above this many bytes are not copied into the model.
SHARED_ABOVE = 1024
#: Readable by every onnxruntime since 1.19, whatever the opset.
_IR_VERSION = 10
#: The number in a name inside a subgraph, in the place where names of a region's values may have one.
_TAKEN = re.compile(r"^og(\d{1,9})_t", re.ASCII)
#: A region does not declare an older opset than this, unless its model does.
_OLDEST_STAMP = 20


@dataclass(frozen=True, slots=True)
class RegionModel:
    """A region, ready for a runtime.

    Attributes:
        proto: the model; constants in `shared` are declared external and have no data in it.
        inputs, outputs: value names, in port order.
        shared: the large constants, by value name.
    """

    proto: ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shared: Mapping[str, np.ndarray]

    def with_data(self) -> ModelProto:
        """The model with all its constants inside."""
        result = ModelProto()
        result.CopyFrom(self.proto)
        if all(entry.domain for entry in result.opset_import):  # bodies of ops of other domains are made of ai.onnx ops
            result.opset_import.append(onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version()))
        del result.graph.initializer[:]
        for tensor in self.proto.graph.initializer:
            data = self.shared.get(tensor.name)
            result.graph.initializer.append(tensor if data is None else tensor_proto(tensor.name, data))
        return result


def region_model(
    ops: Sequence[Op],
    inputs: Sequence[LogicalTensor],
    outputs: Sequence[LogicalTensor],
    *,
    typed: bool = True,
    symbols: bool = False,
) -> RegionModel:
    """The model of some ops.

    Args:
        ops: Wildcards with an ONNX node, and native ops that have a form in ONNX's ops; producers first.
        inputs, outputs: the values that cross the border of the region.
        typed: whether to declare types; without them, an evaluator that reads none accepts values of any type.
        symbols: whether to declare equal sizes of inputs, by their symbols. A runtime relies on these.

    Raises:
        Unimplemented: ops have two versions of one domain, or a type is not specified.
        ModelError: an op's attributes do not describe a node.
    """
    given = {t.id for t in inputs}
    graph, names, shared = _named(ops, [t for op in ops for t in (*op.inputs, *op.outputs)] + [*inputs, *outputs])
    done: set[int] = set()
    for op in ops:
        for tensor in op.inputs:
            if tensor.data is not None and tensor.id not in given and tensor.id not in done:
                done.add(tensor.id)
                graph.initializer.append(_constant(names[tensor.id], tensor.data, shared))
    drop_last_gaps(graph.node)
    texts = type_texts(ops) if typed else {}
    for tensor in inputs:
        graph.input.append(_value(names[tensor.id], tensor, texts, shape=True, symbols=symbols, typed=typed))
    for tensor in outputs:
        graph.output.append(_value(names[tensor.id], tensor, texts, shape=False, symbols=False, typed=typed))
    proto = ModelProto(ir_version=_IR_VERSION, graph=graph, producer_name="opgraph")
    for domain, version in _opsets(ops, graph.node).items():
        proto.opset_import.append(onnx.helper.make_opsetid(domain, version))
    if typed:
        pool_means(proto)
    return RegionModel(proto, tuple(names[t.id] for t in inputs), tuple(names[t.id] for t in outputs), shared)


def _named(
    ops: Sequence[Op], tensors: Iterable[LogicalTensor]
) -> tuple[GraphProto, dict[int, str], dict[str, np.ndarray]]:
    """The nodes of the ops, the names of their values by id, and the large constants that the nodes need.

    No name may be defined in a subgraph of a node: the subgraph would use its own value instead of the outer one.
    """
    ids, inside = {t.id for t in tensors}, set[str]()
    while True:
        used = {int(number) for name in inside for number in _TAKEN.findall(name)}
        tag = next(number for number in count() if number not in used) if inside else ""
        names = {id: f"og{tag}_t{id}" for id in ids}
        graph, shared = GraphProto(name="region"), dict[str, np.ndarray]()
        _write_nodes(graph, ops, names, shared, inside)
        _name_gaps(graph.node)
        inside = defined_inside(graph.node)
        taken = {
            *names.values(),
            *(t.name for t in graph.initializer),
            *(n for node in graph.node for n in node.output),
        }
        if inside.isdisjoint(taken):
            return graph, names, shared


def _write_nodes(
    graph: GraphProto, ops: Sequence[Op], names: Mapping[int, str], shared: dict[str, np.ndarray], taken: set[str]
) -> None:
    """Adds the nodes of the ops, and the constants that those of native ops need.

    Args:
        taken: names that no value between the nodes may have.

    Raises:
        Unimplemented: a native op has no form in ONNX's ops.
    """
    if all(is_onnx_node(op) for op in ops):
        graph.node.extend(node_of(op, names) for op in ops)
        return
    from opgraph.runtime.providers.onnx_native import NodeWriter, opset_of_region  # few regions need it

    writer = NodeWriter(opset_of_region(ops), names, taken)
    for op in ops:
        made = writer.nodes(op)
        if made is None:
            raise Unimplemented(
                "onnxruntime cannot take it into a region: it has no form in ONNX's ops",
                where=op.label,
                fix="leave it to a kernel",
            )
        graph.node.extend(made)
    graph.initializer.extend(_constant(name, data, shared) for name, data in writer.scalars.items())


def drop_last_gaps(nodes: Iterable[NodeProto]) -> None:
    """Removes the last inputs of nodes if they are "": they are omitted either way.

    onnxruntime 1.31 crashes on a LayerNormalization with such an input when it fuses it.
    """
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        while node.input and not node.input[-1]:
            node.input.pop()
        waiting += [inner for a in node.attribute for g in (a.g, *a.graphs) for inner in g.node]


def _name_gaps(nodes: Iterable[NodeProto]) -> None:
    """Names the omitted results of ops with any number of results: onnxruntime 1.31 crashes on some of these."""
    for node in nodes:
        if not all(node.output) and _has_any_number_of_results(node.op_type, node.domain):
            first = next(name for name in node.output if name)
            node.output[:] = [name or f"{first}_{place}" for place, name in enumerate(node.output)]


@cache
def _has_any_number_of_results(op_type: str, domain: str) -> bool:
    try:
        outputs = onnx.defs.get_schema(op_type, domain).outputs
    except onnx.defs.SchemaError:
        return False
    return bool(outputs) and outputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic


def _opsets(ops: Iterable[Op], nodes: Iterable[NodeProto]) -> dict[str, int]:
    found: dict[str, int] = {}
    for op in ops:
        if not is_onnx_node(op):
            continue
        domain, version = opset_of(op)
        if found.setdefault(domain, version) != version:
            raise Unimplemented(
                f"ONNX nodes of opsets {found[domain]} and {version} of domain {domain!r} meet in one region",
                where=op.label,
                fix="convert the models to one opset before joining their graphs",
            )
    if "" in found:
        found[""] = _oldest_of_the_same_meaning(nodes, found[""])
    return found or {"": 20}


def _oldest_of_the_same_meaning(nodes: Iterable[NodeProto], opset: int) -> int:
    """The oldest opset with the same definitions of all nodes, so that runtimes older than the model run them."""
    oldest, waiting = 1, list(nodes)
    while waiting:
        node = waiting.pop()
        if node.domain in ("", "ai.onnx"):
            oldest = max(oldest, _since(node.op_type, opset))
        waiting += [inner for a in node.attribute for g in (a.g, *a.graphs) for inner in g.node]
    return max(oldest, min(opset, _OLDEST_STAMP))


@cache
def _since(op_type: str, opset: int) -> int:
    try:
        return int(onnx.defs.get_schema(op_type, opset, "").since_version)
    except onnx.defs.SchemaError:
        return opset


def type_texts(ops: Iterable[Op]) -> dict[int, str]:
    """The texts of types that opgraph lacks, as stored in the nodes, by tensor id."""
    result: dict[int, str] = {}
    for op in ops:
        for tensors, key in ((op.inputs, "onnx_input_types"), (op.outputs, "onnx_output_types")):
            texts = op.attrs.get(key, ())
            if isinstance(texts, tuple):
                result.update((t.id, text) for t, text in zip(tensors, texts) if isinstance(text, str) and text)
    return result


def _value(
    name: str, tensor: LogicalTensor, texts: Mapping[int, str], *, shape: bool, symbols: bool, typed: bool
) -> ValueInfoProto:
    value = ValueInfoProto(name=name)
    if typed:
        sizes = (
            None if tensor.dims is None else tuple(d if symbols or isinstance(d, int) else None for d in tensor.dims)
        )
        plain = tensor.with_(dims=sizes if shape else None, strides=None)
        value.type.CopyFrom(type_proto(plain, texts.get(tensor.id, ""), tensor.label))
    return value


def _constant(name: str, data: np.ndarray, shared: dict[str, np.ndarray]) -> TensorProto:
    if data.nbytes <= SHARED_ABOVE or dtypes.of_array(data.dtype, where=name).name in ("s4", "u4"):
        return tensor_proto(name, data)
    shared[name] = data
    tensor = TensorProto(name=name, dims=data.shape, data_type=dtypes.of_array(data.dtype, where=name).onnx)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="memory")
    return tensor


def tensor_proto(name: str, data: np.ndarray) -> TensorProto:
    """An array as a TensorProto with raw data (little-endian, 4-bit types packed)."""
    dtype = dtypes.of_array(data.dtype, where=name)
    tensor = TensorProto(name=name, dims=data.shape, data_type=dtype.onnx)
    if dtype.name in ("s4", "u4"):
        nibbles = data.reshape(-1).astype(np.int8).view(np.uint8) & 15
        nibbles = np.append(nibbles, np.zeros(nibbles.size % 2, np.uint8))
        tensor.raw_data = (nibbles[::2] | (nibbles[1::2] << 4)).tobytes()
    else:
        tensor.raw_data = data.tobytes()
    return tensor
