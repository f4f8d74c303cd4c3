"""The functions of a model written by opgraph: each body once, under names that runtimes can resolve."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import FunctionProto, NodeProto

from opgraph.ir.opdef import OpDef
from opgraph.onnx.bodies import function_of
from opgraph.onnx.functions import canonical
from opgraph.onnx.signature import DOMAIN, Signature, onnx_value
from opgraph.ops.families import LAYOUT_ATTRS


@dataclass(slots=True)
class FunctionTable:
    """The functions of a model written by opgraph, each body once.

    A second body with the same name gets an overload, named after its dtype.
    """

    opset: int
    functions: dict[tuple[str, str], FunctionProto] = field(default_factory=dict)
    bodies: dict[tuple[str, bytes], str] = field(default_factory=dict)
    _labels: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, function: FunctionProto, label: str) -> str:
        """Adds a function unless its body is already there; returns its overload.

        Args:
            label: the name of the overload, if one is needed.
        """
        key = (function.name, canonical(function))
        if key not in self.bodies:
            taken = {overload for name, overload in self.functions if name == function.name}
            overload = free_name(label, taken) if "" in taken else ""
            function.overload = overload
            self.functions[function.name, overload] = function
            self.bodies[key] = overload
            self._labels[function.name, overload] = label
        return self.bodies[key]

    def keep(self, function: FunctionProto) -> None:
        """Adds a function of the model that is being rewritten, under the overload that its callers use."""
        key = (function.name, function.overload)
        if key not in self.functions:
            self.functions[key] = function
            self.bodies.setdefault((function.name, canonical(function)), function.overload)

    def settle(self, nodes: Iterable[NodeProto]) -> None:
        """Drops the functions that are not called, and removes the overload where one body of a name is left.

        Of several bodies, one that other bodies call gets no overload: onnxruntime (1.31) resolves none inside a body.

        Args:
            nodes: of the model, with the calls; renamed calls are changed in place.
        """
        nodes = list(nodes)
        called = self.called(nodes)
        self.functions = {key: self.functions[key] for key in called}
        inside = [node for function in self.functions.values() for node in function.node]
        nested = [key for node in inside if (key := (node.op_type, node.overload)) in called]
        names: dict[tuple[str, str], str] = {}
        for name, first in dict(reversed([*nested, *called])).items():
            if first:
                names[name, first] = ""
                if (name, "") in called:
                    taken = {overload for known, overload in called if known == name}
                    names[name, ""] = free_name(self._labels.get((name, ""), "other"), taken)
        for key, overload in names.items():
            self.functions[key].overload = overload
        for node in (*nodes, *inside):
            if node.domain == DOMAIN and (node.op_type, node.overload) in names:
                overload = names[node.op_type, node.overload]
                node.ClearField("overload")  # an empty field would be present, and compare unequal
                if overload:
                    node.overload = overload
        self.functions = {(f.name, f.overload): f for f in self.functions.values()}
        self.bodies = {(f.name, canonical(f)): f.overload for f in self.functions.values()}

    def called(self, nodes: Iterable[NodeProto]) -> list[tuple[str, str]]:
        """Names and overloads of the functions that nodes call, directly or indirectly, in order of the first call."""
        found: dict[tuple[str, str], None] = {}
        waiting = list(nodes)
        while waiting:
            keys = dict.fromkeys((n.op_type, n.overload) for n in waiting if n.domain == DOMAIN)
            new = [key for key in keys if key in self.functions and key not in found]
            found.update(dict.fromkeys(new))
            waiting = [node for key in new for node in self.functions[key].node]
        return list(found)

    def unfold_nested(self) -> None:
        """Inlines a body where another one calls it by an overload, which onnxruntime (1.31) does not resolve there.

        bf16 is excluded: onnxruntime does not run it, and a unit is better kept under its name.
        """
        for function in self.functions.values():
            bodies = [
                self.functions.get((n.op_type, n.overload)) if n.domain == DOMAIN else None for n in function.node
            ]
            if function.domain != DOMAIN or _casts_to_bf16(function):
                continue
            if any(body is not None and body.overload for body in bodies):
                nodes = list(zip(function.node, bodies))
                taken = {name for n in function.node for name in (*n.input, *n.output)}
                written = [_written_out(n, b, taken) if b is not None and b.overload else [n] for n, b in nodes]
                del function.node[:]
                function.node.extend(node for some in written for node in some)

    def call(self, record: OpDef, signature: Signature, inputs: Sequence[str], output: str) -> NodeProto:
        """A node that calls the function of an op.

        Raises:
            Unimplemented: ai.onnx cannot compute the op.
        """
        overload = self.add(function_of(record, signature), "_".join(dict.fromkeys(d for _, d, _ in signature.inputs)))
        node = NodeProto(op_type=record.kind, domain=DOMAIN, overload=overload or None, input=inputs, output=[output])
        for attr in record.attrs:
            value = signature.attrs.get(attr.name)
            # Written even if it is the default: onnx's evaluator and inliner (1.23) ignore the defaults of functions.
            if value is not None and (value != attr.default or attr.name not in LAYOUT_ATTRS):
                node.attribute.append(onnx.helper.make_attribute(attr.name, onnx_value(attr, value)))
        return node


def free_name(label: str, taken: Collection[str]) -> str:
    """Returns the label, or its first numbered variant that is not taken."""
    found, number = label, 2
    while found in taken:
        found, number = f"{label}_{number}", number + 1
    return found


def _casts_to_bf16(function: FunctionProto) -> bool:
    return any(a.name == "to" and a.i == onnx.TensorProto.BFLOAT16 for n in function.node for a in n.attribute)


def _written_out(call: NodeProto, body: FunctionProto, taken: Collection[str]) -> list[NodeProto]:
    """Inlines a call of a body of plain ops: returns the body's nodes. New values get names that are not taken."""
    stem = str(call.output[0])
    while any(name.startswith(f"{stem} ") for name in taken):
        stem += "_"
    names = {**dict(zip(body.input, call.input)), **dict(zip(body.output, call.output)), "": ""}
    given = {a.name: a for a in (*body.attribute_proto, *call.attribute)}
    nodes = []
    for inner in body.node:
        node = NodeProto()
        node.CopyFrom(inner)
        for values in (node.input, node.output):
            values[:] = [names.get(v, f"{stem} {v}") for v in values]
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                name = attribute.name
                attribute.CopyFrom(given[attribute.ref_attr_name])
                attribute.name = name
        nodes.append(node)
    return nodes
