"""Fused partitions as functions: one node in the model where opgraph would launch one kernel."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from onnx import FunctionProto, NodeProto, helper

from opgraph.ir import dtypes
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.onnx.draft import Summary
from opgraph.onnx.emit import CHOSEN, Emitter
from opgraph.onnx.function_table import free_name
from opgraph.onnx.functions import canonical
from opgraph.onnx.library.gpu import serves_gpu
from opgraph.onnx.library.ops import LibraryOp, fused_op, swish_ops
from opgraph.onnx.library.rows import has_rows, rows_pay
from opgraph.onnx.nodes import reads
from opgraph.onnx.request import FUSED_UNIT, ROWS_UNIT
from opgraph.onnx.signature import DOMAIN
from opgraph.onnx.source import Source
from opgraph.onnx.to_ops import constant_value
from opgraph.onnx.wide_bodies import widened
from opgraph.partition.partition import FUSED, Partition
from opgraph.partition.rules import Unit
from opgraph.runtime.providers.onnx_region import tensor_proto

#: The fewest nodes of a function; a function of one node is pointless.
_FEWEST = 2
#: The most entries in the axes of a node.
_MOST_AXES = 32

#: Nodes, each with its own original index or that of the node it replaces.
Numbered = list[tuple[int, NodeProto]]


@dataclass(slots=True)
class Folding:
    """Replaces the fused partitions of a model by function calls.

    Attributes:
        library: True if an onnxruntime library runs the functions; a partition that it cannot run then stays unchanged.
        rows: True if partitions that reduce rows are included.
        on_gpu: True if the library also serves onnxruntime's CUDA provider; it then holds the ops that both can run.
        ops: the ops of that library.
    """

    library: bool
    rows: bool = True
    on_gpu: bool = False
    ops: list[LibraryOp] = field(default_factory=list)

    def fold(
        self,
        graph: Graph,
        source: Source,
        nodes: Numbered,
        outputs: Collection[str],
        emitter: Emitter,
        summary: Summary,
    ) -> Numbered:
        """Returns the nodes, with each fused partition of several nodes replaced by a function call.

        Equal bodies share one function, named after the units inside and a hash of the body.

        Args:
            outputs: the names of the model's outputs.
        """
        by_index: dict[int, list[NodeProto]] = {}
        for index, node in nodes:
            by_index.setdefault(index, []).append(node)
        ops_of_node = Counter(source.node_of.values())
        dtype_of = {source.value_of.get(t.id): t.dtype for t in _tensors(graph.ops)}
        parts: list[tuple[Partition, list[int]]] = []
        for part in graph.get_partitions():
            indices = _whole_nodes(part, source, ops_of_node, by_index)
            if self._is_worth_it(part, [node for index in indices for node in by_index[index]]):
                parts.append((part, indices))
                by_index.update((i, [_with_dtype_stated(node, dtype_of) for node in by_index[i]]) for i in indices)
        uses = Counter(name for group in by_index.values() for node in group for name in reads(node))
        numbers = _Numbers(source, emitter)
        calls: dict[int, NodeProto] = {}
        folded: set[int] = set()
        for part, indices in parts:
            if folded & set(indices):
                continue
            inside = [node for index in indices for node in by_index[index]]
            call = self._call(part, source, inside, numbers, uses, outputs, emitter)
            if call is None:
                continue
            calls[indices[-1]] = call
            folded |= set(indices)
            name = ROWS_UNIT if has_rows(part) else FUSED_UNIT
            summary.units[name] = summary.units.get(name, 0) + 1
        if self.library and any(n.domain == DOMAIN and n.op_type == CHOSEN for _, n in nodes):
            # A registered op takes precedence over a function of its name, so it must support every dtype of it.
            # GPU kernels take seconds to build, so only those that a node here calls are built.
            left = [node for index, node in nodes if index not in folded and node.op_type == CHOSEN]
            called = {dtype_of.get(node.input[0]) for node in left} if self.on_gpu else set()
            self.ops.extend(replace(op, on_gpu=op.inputs[0] in called) for op in swish_ops())
        # Calls are named after a result, which has a name after each load; nodes of an unfolded body have no names.
        taken = {node.name for index, node in nodes if index not in folded}
        for call in calls.values():
            call.name = free_name(call.output[0], taken)
            taken.add(call.name)
        return [
            (index, node)
            for index, group in by_index.items()
            for node in ([calls[index]] if index in calls else [] if index in folded else group)
        ]

    def _is_worth_it(self, part: Partition, inside: list[NodeProto]) -> bool:
        if part.kind != FUSED or not inside:
            return False
        if not self.library:
            return len(inside) >= _FEWEST
        # Partitions of only integers and booleans are shapes and masks, which onnxruntime folds where it can.
        ports = (*part.input_ports, *part.output_ports)
        unit = part.unit_matches[-1] if part.unit_matches else None
        if unit is not None and len(unit.ops) == len(part.ops) and is_onnxruntimes_own(unit):
            return False
        if has_rows(part) and (not self.rows or len(inside) < _FEWEST or not rows_pay(part)):
            return False
        alone = len(inside) == 1 and (inside[0].domain != DOMAIN or inside[0].op_type == CHOSEN)
        return not alone and bool(part.input_ports) and any(t.dtype in dtypes.FLOATS for t in ports)

    def _call(
        self,
        part: Partition,
        source: Source,
        inside: list[NodeProto],
        numbers: _Numbers,
        uses: Counter[str],
        outputs: Collection[str],
        emitter: Emitter,
    ) -> NodeProto | None:
        """Adds a function of these nodes; returns the node that calls it, or None if the library cannot run it."""
        ids = {source.value_of[t.id]: t.id for t in (*_tensors(part.ops), *part.constants) if t.id in source.value_of}
        body = [*numbers.of(inside, ids), *inside]
        made = {n for node in body for n in node.output if n}
        within = Counter(n for node in inside for n in node.input)
        inputs = list(dict.fromkeys(n for node in body for n in node.input if n and n not in made))
        results = [n for node in inside for n in node.output if n and (uses[n] > within[n] or n in outputs)]
        results = results or [inside[-1].output[0]]
        dtype_of = {source.value_of[t.id]: t.dtype for t in _tensors(part.ops) if t.id in source.value_of}
        for node in body[: len(body) - len(inside)]:
            dtype_of[node.output[0]] = dtypes.BY_ONNX[node.attribute[0].t.data_type].name
        nodes = _numbered(widened(body, inputs, results, dtype_of, emitter), inputs, results)
        # The results follow the order in which the body makes them: that of the nodes after unfolding.
        made_at = {name: place for place, node in enumerate(nodes) for name in node.output}
        results.sort(key=made_at.__getitem__)
        function = FunctionProto(domain=DOMAIN, doc_string="One fused partition.")
        function.input.extend(inputs)
        function.output.extend(results)
        function.node.extend(nodes)
        function.opset_import.append(helper.make_opsetid("", emitter.opset))
        for domain in sorted({node.domain for node in nodes} - {""}):
            function.opset_import.append(helper.make_opsetid(domain, 1))
        stem = "_".join(dict.fromkeys(part.units)) or "fused"
        types = "_".join(dict.fromkeys(dtype_of.get(n, "") for n in (*inputs, *results)))
        bare = FunctionProto()
        bare.CopyFrom(function)
        for node in bare.node:
            node.ClearField("overload")  # overloads are settled at the end; the called bodies are hashed below
        bodies = [emitter.functions.functions[n.op_type, n.overload] for n in nodes if n.domain == DOMAIN]
        named = canonical(bare) + types.encode() + b"".join(map(canonical, bodies))
        function.name = f"{stem}_{hashlib.sha256(named).hexdigest()[:8]}"
        if self.library:
            if any(name not in ids for name in (*inputs, *results)):
                return None
            places = {ids[name]: place for place, name in enumerate(inputs)}
            op = fused_op(function.name, part, places, [ids[name] for name in results])
            if op is None or (self.on_gpu and not serves_gpu(op)):
                return None
            self.ops.append(replace(op, on_gpu=self.on_gpu))
        overload = emitter.functions.add(function, "other")
        return NodeProto(
            op_type=function.name,
            domain=DOMAIN,
            overload=overload or None,
            input=inputs,
            output=results,
        )


def _with_dtype_stated(node: NodeProto, dtype_of: Mapping[str | None, str]) -> NodeProto:
    """The node; a CastLike becomes a Cast: its op ignores the second operand, which may depend on this partition."""
    if (node.domain, node.op_type) != ("", "CastLike"):
        return node
    cast = NodeProto()
    cast.CopyFrom(node)
    cast.op_type = "Cast"
    del cast.input[1:]
    cast.attribute.append(helper.make_attribute("to", dtypes.get(dtype_of[node.output[0]]).onnx))
    return cast


def _numbered(nodes: Sequence[NodeProto], inputs: Collection[str], results: Collection[str]) -> list[NodeProto]:
    """The nodes of a body, without node names, and with the inner values numbered.

    onnx's inliner renames both at each load, so a body with the inliner's names would differ after each load.
    """
    kept = {*inputs, *results, ""}
    free = (name for name in (f"t{number}" for number in count()) if name not in kept)
    names = {name: next(free) for node in nodes for name in node.output if name not in kept}
    made = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.ClearField("name")
        for values in (copy.input, copy.output):
            values[:] = [names.get(name, name) for name in values]
        made.append(copy)
    return made


def is_onnxruntimes_own(unit: Unit) -> bool:
    """True if onnxruntime has a faster kernel for this unit alone: x sigmoid(x) in f32 (AVX-512)."""
    plain = unit.kind == CHOSEN and len(unit.inputs) == 1 and unit.attrs.get("alpha") == 1
    return plain and unit.root.outputs[0].dtype == "f32"


def _whole_nodes(
    part: Partition, source: Source, ops_of_node: Mapping[int, int], by_index: Mapping[int, object]
) -> list[int]:
    """Indices of a partition's nodes, in order; none if it contains only a part of a node."""
    inside = Counter(source.node_of[op.id] for op in part.ops if op.id in source.node_of)
    whole = all(count == ops_of_node[index] for index, count in inside.items())
    return sorted(inside.keys() & by_index.keys()) if whole else []


def _tensors(ops: Iterable[Op]) -> list[LogicalTensor]:
    return [t for op in ops for t in (*op.inputs, *op.outputs)]


@dataclass(slots=True)
class _Numbers:
    """The small constants of a model, by name: numbers and axes, which are part of the body of a function.

    They are compiled into the kernel, so they must affect the function's name.
    """

    source: Source
    emitter: Emitter
    nodes: dict[str, NodeProto] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.source.origin.skeleton.graph.node:
            if node.op_type == "Constant" and node.domain == "":
                self.nodes[node.output[0]] = node

    def of(self, inside: list[NodeProto], operands: Collection[str]) -> list[NodeProto]:
        """Constant nodes for the values that these nodes read: single elements, and non-operands of the ops (axes)."""
        names = dict.fromkeys(n for node in inside for n in node.input if n)
        found = [(name, self._value(name)) for name in names]
        return [
            helper.make_node("Constant", [], [name], value=tensor_proto("", data))
            for name, data in found
            if data is not None and (data.size == 1 or name not in operands)
        ]

    def _value(self, name: str) -> np.ndarray | None:
        origin = self.source.origin
        if name in self.emitter.arrays:
            return self.emitter.arrays[name]
        if name in self.nodes:
            return constant_value(self.nodes[name])
        if name not in origin.tensors or name in origin.inputs:  # a default may be overridden at run time
            return None
        tensor = origin.tensors[name]
        small = int(np.prod(tensor.shape.numpy(), dtype=np.int64)) <= _MOST_AXES and int(tensor.dtype) in dtypes.BY_ONNX
        return origin.array(name) if small else None
