"""Writes the ops of a graph as nodes of one model: as plain nodes if ai.onnx has the op, else as function calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, helper

from opgraph.errors import Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.attributes import typed_literal
from opgraph.ir.expression import Call, Expr, Num, Param, Var
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.ir.opdef import OpDef
from opgraph.onnx.function_table import FunctionTable
from opgraph.onnx.signature import Signature
from opgraph.onnx.target import Target
from opgraph.onnx.to_nodes import mark_operands, plain_form, plain_node
from opgraph.onnx.whole_shapes import SHAPE

#: The kind whose form the caller chooses.
CHOSEN = "Swish"
CONTRIB = ("com.microsoft", "QuickGelu")

#: A value: its tensor in the graph, and its name in the model.
Value = tuple[LogicalTensor, str]


@dataclass(slots=True)
class Emitter:
    """Writes ops as nodes.

    Attributes:
        opset: of ai.onnx.
        form: how Swish is written: "decomposed", "function", "standard" or "contrib".
        names: all value names in use.
        functions: the functions that the nodes call.
        arrays: constants created for the nodes, by name.
    """

    opset: int
    form: str
    target: Target
    names: set[str]
    functions: FunctionTable
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    domains: set[str] = field(default_factory=set)

    def nodes(
        self,
        record: OpDef,
        attrs: Mapping[str, AttrValue],
        inputs: Sequence[Value],
        output: Value,
        op: Op | None = None,
    ) -> list[NodeProto]:
        """The nodes that compute an op; the last one makes its output.

        Raises:
            Unimplemented: ONNX has no form of it; the message gives the reason.
        """
        if record.kind == CHOSEN and self.form != "function":
            return self._chosen(record, attrs, inputs, output)
        given = dict(zip(record.input_names(len(inputs)), inputs))
        form = None
        if record.kind != CHOSEN:
            form = plain_form(record, attrs, {n: t for n, (t, _) in given.items()}, output[0].dtype, self.opset)
        if form is None:
            return [self.called(record, attrs, inputs, output)]

        def scalar(attr: str) -> str:
            return self.scalar(attrs[attr], inputs[0][0].dtype, f"{output[1]}.{attr}")

        before: list[NodeProto] = []

        def shape(value: str) -> str:
            name = self.fresh(f"{output[1]}.shape")
            before.append(NodeProto(op_type=SHAPE, input=[value], output=[name]))
            return name

        operands = {name: value for name, (_, value) in given.items()}
        whole = (output[1], output[0].dtype)
        node = plain_node(record, form, attrs, operands, whole, self.opset, scalar, shape=shape)
        if op is not None:
            mark_operands(node, op, record, form)
        return [*before, node]

    def called(
        self, record: OpDef, attrs: Mapping[str, AttrValue], inputs: Sequence[Value], output: Value
    ) -> NodeProto:
        """A call of the op's function, even if ai.onnx has the op.

        Raises:
            Unimplemented: ai.onnx cannot compute it.
        """
        given = dict(zip(record.input_names(len(inputs)), inputs))
        return self.functions.call(record, _signature(given, attrs, output, self.opset), _names(inputs), output[1])

    def contributed(self, op_type: str, inputs: Sequence[Value], output: Value) -> NodeProto:
        """A node of onnxruntime's own domain."""
        self.domains.add(CONTRIB[0])
        return NodeProto(op_type=op_type, domain=CONTRIB[0], input=_names(inputs), output=[output[1]])

    def _chosen(
        self, record: OpDef, attrs: Mapping[str, AttrValue], inputs: Sequence[Value], output: Value
    ) -> list[NodeProto]:
        """Writes Swish in the requested form. Only the decomposed form and the function accept a factor operand."""
        given = {p.name: v for p, v in zip(record.inputs, inputs)}
        if self.form == "standard" and len(inputs) == 1:
            last = self.target.runs_swish_until
            tensors = {n: t for n, (t, _) in given.items()}
            form = plain_form(record, attrs, tensors, output[0].dtype, self.opset)
            if form is None or self.opset > last:
                raise Unimplemented(
                    f"{self.target.name} runs no ai.onnx {record.kind} at opset {self.opset}",
                    where=f"value {output[1]!r}",
                    fix=f'save with opset={last} or form="function"' if last else 'save with form="function"',
                )
            return [plain_node(record, form, attrs, {n: v for n, (_, v) in given.items()},
                               (output[1], output[0].dtype), self.opset, str)]  # fmt: skip
        if self.form == "contrib" and len(inputs) == 1:
            self.domains.add(CONTRIB[0])
            alpha = helper.make_attribute("alpha", attrs["alpha"])  # always written: its default there is 1.702
            return [NodeProto(op_type=CONTRIB[1], domain=CONTRIB[0], input=_names(inputs), output=[output[1]],
                              attribute=[alpha])]  # fmt: skip
        tree = record.decompose(attrs, list(given))
        assert isinstance(tree, Call)
        made: list[NodeProto] = []
        values: dict[Expr, Value] = {Var(name): value for name, value in given.items()}
        self._write(tree, attrs, inputs[0][0], values, made, output)
        return made

    def _write(
        self,
        tree: Expr,
        attrs: Mapping[str, AttrValue],
        like: LogicalTensor,
        values: dict[Expr, Value],
        made: list[NodeProto],
        output: Value | None = None,
    ) -> Value:
        """The value of an expression, in the dtype of `like`. Decompositions are short, so the recursion is bounded."""
        if tree in values:
            return values[tree]
        if isinstance(tree, (Num, Param)):
            number = tree.value if isinstance(tree, Num) else attrs[tree.name]
            stem = tree.name if isinstance(tree, Param) else "number"
            scalar = LogicalTensor(0, like.dtype, ())
            values[tree] = (scalar, self.scalar(number, like.dtype, f"{like.name or 'value'}.{stem}"))
            return values[tree]
        assert isinstance(tree, Call)
        inputs = [self._write(arg, attrs, like, values, made) for arg in tree.args]
        record = opdef.get(tree.kind, where="decomposition")
        literal = {
            n: attrs[v.name] if isinstance(v, Param) else typed_literal(record.attr(n), v) for n, v in tree.attrs
        }
        defaults = {a.name: a.default for a in record.attrs if a.default is not None}
        result = output or (like, self.fresh(f"{like.name or 'value'}.{tree.kind}"))
        made += self.nodes(record, {**defaults, **literal}, inputs, result)
        values[tree] = result
        return result

    def scalar(self, value: AttrValue, dtype: str, name: str) -> str:
        """A scalar constant of a dtype, or a list of ints; returns its name."""
        name = self.fresh(name)
        stored = np.dtype(np.int64) if isinstance(value, tuple) else dtypes.BY_NAME[dtype].numpy
        self.arrays[name] = np.asarray(value).astype(stored)
        return name

    def ones(self, dtype: str, size: int) -> str:
        """Returns the name of a constant of ones. There is one constant for each dtype and size."""
        ones = np.ones(size, dtypes.BY_NAME[dtype].numpy)
        for name, known in self.arrays.items():
            if known.dtype == ones.dtype and known.shape == ones.shape and np.array_equal(known, ones):
                return name
        name = self.fresh(f"ones_{dtype}_{size}")
        self.arrays[name] = ones
        return name

    def fresh(self, name: str) -> str:
        """Reserves and returns the name, or its first numbered variant that is free."""
        found, number = name, 1
        while found in self.names:
            found, number = f"{name}_{number}", number + 1
        self.names.add(found)
        return found


def _names(values: Sequence[Value]) -> list[str]:
    return [name for _, name in values]


def _signature(given: Mapping[str, Value], attrs: Mapping[str, AttrValue], output: Value, opset: int) -> Signature:
    return Signature(tuple((n, t.dtype, t.ndim) for n, (t, _) in given.items()), output[0].dtype, attrs, opset)
