"""The body of a fused f16 or bf16 partition: computed in f32 and rounded once, as in opgraph's kernels.

This is the definition of a fused partition, and for bf16 onnxruntime has kernels for no other form. A TypeCast between
two values of the body still rounds at its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto, helper, numpy_helper

from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.onnx.emit import Emitter
from opgraph.onnx.export_forms import CONTRIB, FUNCTION, way_out
from opgraph.onnx.functions import attributes_of
from opgraph.onnx.signature import DOMAIN
from opgraph.runtime.providers.onnx_region import tensor_proto

_NARROW = ("f16", "bf16")
_CASTS = ("Cast", "CastLike")


def widened(
    nodes: Sequence[NodeProto],
    inputs: Sequence[str],
    results: Sequence[str],
    dtype_of: Mapping[str, str],
    emitter: Emitter,
) -> list[NodeProto]:
    """Returns the nodes, with f16 and bf16 computations replaced by f32.

    Args:
        inputs, results: of the function with this body.
        dtype_of: dtype of every value; if one is unknown, the nodes stay as they are.
    """
    known = all(name in dtype_of for node in nodes if node.op_type != "Constant" for name in node.output)
    if not known or not any(dtype_of.get(n) in _NARROW for node in nodes for n in (*node.input, *node.output)):
        return list(nodes)
    return _Wide(dtype_of, emitter).run(nodes, inputs, results)


@dataclass(slots=True)
class _Wide:
    """Writes a body.

    Attributes:
        made: its nodes so far.
        wide: the f32 stand-in of each narrow value that has one.
        narrow: the values that exist under their own names, in their own dtypes.
        taken: names that no stand-in may have.
    """

    dtype_of: Mapping[str, str]
    emitter: Emitter
    made: list[NodeProto] = field(default_factory=list)
    wide: dict[str, str] = field(default_factory=dict)
    narrow: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)

    def run(self, nodes: Sequence[NodeProto], inputs: Sequence[str], results: Sequence[str]) -> list[NodeProto]:
        self.narrow.update(inputs)
        self.taken.update(name for node in nodes for name in (*node.input, *node.output))
        for node in nodes:
            if node.op_type == "Constant" and node.domain == "":
                self.constant(node)
            elif node.op_type in _CASTS and node.domain == "":
                self.cast(node)
            else:
                self.compute(node)
        for name in results:
            if name not in self.narrow:
                self.made.append(_cast(self.wide[name], name, self.dtype_of[name]))
        return self.made

    def is_narrow(self, name: str) -> bool:
        return self.dtype_of.get(name) in _NARROW

    def stand_in(self, name: str) -> str:
        """The f32 value that stands for a narrow one; other values stand for themselves."""
        if not self.is_narrow(name):
            return name
        if name not in self.wide:
            self.wide[name] = self.fresh(name)
            self.made.append(_cast(name, self.wide[name], "f32"))
        return self.wide[name]

    def fresh(self, name: str) -> str:
        """The name of a new stand-in of a value."""
        found = f"{name} wide"
        while found in self.taken:
            found += "_"
        self.taken.add(found)
        return found

    def constant(self, node: NodeProto) -> None:
        name = node.output[0]
        if not self.is_narrow(name):
            self.made.append(node)
            self.narrow.add(name)
            return
        value = next(a.t for a in node.attribute if a.name == "value")
        array = numpy_helper.to_array(value).astype("float32")
        self.wide[name] = self.fresh(name)
        self.made.append(helper.make_node("Constant", [], [self.wide[name]], value=tensor_proto("", array)))

    def cast(self, node: NodeProto) -> None:
        source, target = node.input[0], node.output[0]
        # A value that exists in its own dtype is cast from that, so that widening a body twice changes nothing.
        given = source if source in self.narrow else self.stand_in(source)
        self.made.append(_cast(given, target, self.dtype_of[target]))
        self.narrow.add(target)

    def compute(self, node: NodeProto) -> None:
        names = [self.stand_in(n) if n else "" for n in node.input]
        copy = NodeProto()
        copy.CopyFrom(node)
        if node.domain == DOMAIN:
            copy = self._called(node, names)
        del copy.input[:]
        copy.input.extend(names)
        for place, name in enumerate(node.output):
            if self.is_narrow(name):
                self.wide[name] = copy.output[place] = self.fresh(name)
            else:
                self.narrow.add(name)
        self.made.append(copy)

    def _called(self, node: NodeProto, names: Sequence[str]) -> NodeProto:
        """The node that computes a function's op in f32: the node used in f32 models, or a call of its f32 body."""
        record = opdef.get(node.op_type, where="a fused partition")
        attrs = attributes_of(record, node)
        assert attrs is not None, node.op_type
        emitter = self.emitter
        types = [self._work(n) for n in node.input]
        inputs = [(LogicalTensor(0, dtype, None), name) for dtype, name in zip(types, names)]
        output = (LogicalTensor(0, self._work(node.output[0]), None), node.output[0])
        way = way_out(record.kind, output[0].dtype, attrs, emitter.opset, "auto")
        if way is None or way.write == FUNCTION:
            call = emitter.called(record, attrs, inputs, output)
        elif way.write == CONTRIB:
            call = emitter.contributed(way.op_type, inputs, output)
        else:
            (call,) = emitter.nodes(record, attrs, inputs, output)
        call.name = node.name
        return call

    def _work(self, name: str) -> str:
        return "f32" if self.is_narrow(name) else self.dtype_of.get(name, "f32")


def _cast(source: str, target: str, dtype: str) -> NodeProto:
    element = int(dtypes.get(dtype).onnx) if dtype in dtypes.BY_NAME else TensorProto.UNDEFINED
    return helper.make_node("Cast", [source], [target], to=element)
