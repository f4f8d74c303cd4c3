"""Finds norms that a model spells out, and writes each as a single node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnx import NodeProto, helper

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.schema import f32
from opgraph.onnx.emit import Emitter
from opgraph.onnx.load import imported
from opgraph.onnx.norm_bodies import RMS_NORM
from opgraph.onnx.source import Source
from opgraph.partition.rules import NORMS
from opgraph.partition.units import RuleTable, Unit, match_units
from opgraph.partition.view import scalar

_LAYER = "layer_norm"
_LAYER_SINCE, _RMS_SINCE = 17, 23
#: f64 is left alone: onnxruntime 1.31's own f64 norms take twice as long as the spelling.
_LAYER_DTYPES, _RMS_DTYPES = ("f32", "f16", "bf16"), ("f32", "f16")
#: dtypes of a core and of the tensor around its casts for which one node computes the same.
_WIDENED = (("f32", "f16"), ("f32", "bf16"))


@dataclass(frozen=True, slots=True)
class Norm:
    """One norm.

    Attributes:
        name: of the unit.
        root: index of the node that makes the result.
        nodes: indices of all its nodes.
        inputs: the tensors x, gamma and, for a layer norm, beta; x alone if an RMS norm has no weight.
        names: of these values in the model.
        output: the result and its name.
    """

    name: str
    root: int
    nodes: frozenset[int]
    inputs: tuple[LogicalTensor, ...]
    names: tuple[str, ...]
    output: tuple[LogicalTensor, str]
    epsilon: float

    def written(self, emitter: Emitter) -> list[NodeProto]:
        """The node that computes it."""
        dtype = self.output[0].dtype
        made = [self.output[1]]
        inputs, names = self.inputs, self.names
        if len(inputs) == 1:  # every form that can be written has a weight, and onnxruntime fuses none without
            size = inputs[0].get_dims()[-1]
            assert isinstance(size, int)
            inputs = (*inputs, LogicalTensor(0, dtype, (size,)))
            names = (*names, emitter.ones(dtype, size))
        if self.name == _LAYER:
            kind = "LayerNormalization"
        elif emitter.opset >= _RMS_SINCE and dtype in _RMS_DTYPES:
            kind = "RMSNormalization"
        else:
            record = opdef.get(RMS_NORM, where="save")
            attrs = {**record.default_attrs(), "begin_norm_axis": -1, "epsilon": self.epsilon}
            values = list(zip(inputs, names, strict=True))
            return [emitter.called(record, attrs, values, self.output)]
        return [helper.make_node(kind, list(names), made, axis=-1, epsilon=self.epsilon)]


def norms_of(graph: Graph, source: Source, opset: int) -> list[Norm]:
    """The norms of a model that are faster as one node, in order, none inside another.

    Args:
        opset: of ai.onnx, for the model to be written.
    """
    if not any(node.op_type == "ReduceMean" and node.domain == "" for node in source.origin.skeleton.graph.node):
        return []
    if all(op.kind != "ReduceMean" for op in graph.ops):
        graph = imported(replace(source.origin), library=True)
        assert isinstance(graph.source, Source)
        source = graph.source
    found: list[Norm] = []
    taken: set[int] = set()
    units = match_units(graph, RuleTable(NORMS))
    roots = {unit.root.id for unit in units}
    for unit in reversed(units):
        if unit.root.id in taken:
            continue
        smaller = [op for op in unit.ops if op.id in roots and op is not unit.root]
        # An inner norm that is also read outside would be computed twice.
        stays = any(_is_read_outside(op, unit, graph) for op in smaller)
        norm = None if stays else _norm(unit, graph, source, opset)
        if norm is not None:
            found.append(norm)
        if norm is not None or unit.name == _LAYER:  # one that stays is left whole, for onnxruntime to match
            taken.update(op.id for op in unit.ops)
    return found[::-1]


def _is_read_outside(op: Op, unit: Unit, graph: Graph) -> bool:
    """True if the result of a unit's op is an output, or is read by an op outside the unit."""
    made = op.outputs[0]
    return made in graph.outputs or not {o.id for o in graph.consumers(made.id)} <= {o.id for o in unit.ops}


def _norm(unit: Unit, graph: Graph, source: Source, opset: int) -> Norm | None:
    values = dict(unit.captured)
    root, ops, x = unit.root, list(unit.ops), values["x"]
    layer = unit.name == _LAYER
    if unit.name == "rms_norm_core":
        root, x, weight, more = _in_casts(root, x, graph)
        ops += more
        if weight is not None:
            values["w"] = weight
        elif not x.dims or not isinstance(x.dims[-1], int):
            return None  # its weight of ones needs a known size
    dtype = root.outputs[0].dtype
    allowed = _LAYER_DTYPES if layer else (*_RMS_DTYPES, "bf16")
    if dtype not in allowed or (layer and opset < _LAYER_SINCE):
        return None
    inputs = (x, *(values[name] for name in ("w", "b") if name in values))
    if any(t.id not in source.value_of or t.dtype != dtype for t in inputs) or root.id not in source.node_of:
        return None
    return Norm(
        name=_LAYER if layer else "rms_norm",
        root=source.node_of[root.id],
        nodes=frozenset(source.node_of[op.id] for op in ops if op.id in source.node_of),
        inputs=inputs,
        names=tuple(source.value_of[t.id] for t in inputs),
        output=(root.outputs[0], source.value_of[root.outputs[0].id]),
        epsilon=f32(scalar(unit.captured["e"])),
    )


def _in_casts(core: Op, wide: LogicalTensor, graph: Graph) -> tuple[Op, LogicalTensor, LogicalTensor | None, list[Op]]:
    """Finds the ops around an f32 core in a 16-bit model: a cast before, a cast after, and the product with the weight.

    Returns: the last op, the tensor that is normed, the weight if there is one, and the ops around the core.
    """
    before = graph.producer(wide.id)
    after = graph.consumers(core.outputs[0].id)
    if before is None or before.kind != "TypeCast" or [op.kind for op in after] != ["TypeCast"]:
        return core, wide, None, []
    x, rounded = before.inputs[0], after[0].outputs[0]
    if (wide.dtype, x.dtype) not in _WIDENED or rounded.dtype != x.dtype:
        return core, wide, None, []
    if core.outputs[0].id in {t.id for t in graph.outputs}:
        return core, wide, None, []
    scaled = graph.consumers(rounded.id)
    if [op.kind for op in scaled] == ["Multiply"] and rounded.id not in {t.id for t in graph.outputs}:
        weight = next((t for t in scaled[0].inputs if t.id != rounded.id), None)
        if weight is not None and x.dims and isinstance(x.dims[-1], int) and weight.dims == (x.dims[-1],):
            return scaled[0], x, weight, [before, *after, *scaled]
    return after[0], x, None, [before, *after]
