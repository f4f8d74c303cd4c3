"""Random ONNX models that are valid by construction, and random damage to them.

Everything is drawn from one `random.Random`-like source: hypothesis' `randoms()`, a seed, or the bytes of a fuzzer.
The models contain all that a reader must keep: names of every sort, metadata and doc strings, symbols, inline, typed,
large and overridable initializers, omitted optional operands, functions, subgraphs that capture, old and new opsets.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import TensorProto, helper

NASTY = (
    '"', "a\nb", "*/ #", "%0", "const", "graph", "a b", "α", "\u2028", "\x85", "\x00", "->", "int", "x" * 300, "'",
    "\\", "1x", "?", "[*]", "og_t1", "..", "y 2", "\u202e", "__", "-", "if", "sha256:" + "0" * 64,
)  # fmt: skip
ELEMENTS = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.DOUBLE: np.dtype(np.float64),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_LARGEST = 1 << 16
SHAPES = ((2, 3), (3,), (1, 3), (2, 1), (), (4, 2, 3))
#: Bounded or slowly growing, so that two correct implementations stay close.
UNARY = ("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Softplus", "Softsign", "Sin", "Cos", "Erf", "Atan", "Identity",
         "Elu", "LeakyRelu", "HardSigmoid", "Selu")  # fmt: skip
#: Their bf16 forms came later.
_NO_BF16 = {
    "Softplus",
    "Softsign",
    "Sin",
    "Cos",
    "Atan",
    "Elu",
    "LeakyRelu",
    "HardSigmoid",
    "Selu",
    "HardSwish",
    "Mish",
}


@dataclass(frozen=True)
class Value:
    """A value of the model so far: its name and shape."""

    name: str
    shape: tuple[int, ...]


@dataclass
class Writer:
    """A model under construction.

    Attributes:
        rng: the source of all random choices.
        element: the element type of every float value.
        symbols: size -> the symbol that inputs declare for it.
    """

    rng: Any
    element: int
    opset: int
    symbols: dict[int, str]
    nodes: list[Any] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    initializers: list[Any] = field(default_factory=list)
    sparse: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    functions: dict[str, Any] = field(default_factory=dict)
    domains: dict[str, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    foreign: bool = False

    def name(self) -> str:
        stem = self.rng.choice(NASTY) if self.rng.random() < 0.2 else f"v{len(self.names)}"
        name = stem
        while name in self.names or name == "":
            name = f"{stem}_{len(self.names)}"
        self.names.add(name)
        return name

    def pick(self) -> Value:
        return self.rng.choice(self.values[-6:] if self.rng.random() < 0.7 else self.values)

    def node(self, op_type: str, inputs: list[str], outputs: list[str], domain: str = "", **attrs: Any) -> Any:
        made = helper.make_node(op_type, inputs, outputs, domain=domain, **attrs)
        if self.rng.random() < 0.5:
            made.name = f"node {len(self.nodes)} {self.rng.choice(NASTY)}"
        _remark(self.rng, made)
        self.nodes.append(made)
        return made

    def result(self, op_type: str, inputs: list[str], shape: tuple[int, ...], **attrs: Any) -> None:
        output = self.name()
        self.node(op_type, inputs, [output], **attrs)
        self.values.append(Value(output, shape))

    def constant(self, array: np.ndarray, element: int | None = None) -> str:
        """A constant in one of the forms that a model can have."""
        name, element = self.name(), self.element if element is None else element
        how = self.rng.randrange(5)
        if how == 0:
            self.node("Constant", [], [name], value=_tensor("", element, array, raw=self.rng.random() < 0.5))
            return name
        if how == 4 and array.ndim:
            self.sparse.append(_sparse(name, element, array, rows=self.rng.random() < 0.5))
            return name
        tensor = _tensor(name, element, array, raw=how > 1)
        _remark(self.rng, tensor)
        self.initializers.append(tensor)
        if how == 3:  # a default that a caller may override
            self.inputs.append(helper.make_tensor_value_info(name, element, list(array.shape)))
        return name

    def numbers(self, shape: tuple[int, ...]) -> str:
        values = [self.rng.choice((-1.5, -0.5, 0.0, 0.25, 0.5, 1.0, 2.0)) for _ in range(int(np.prod(shape)))]
        return self.constant(np.asarray(values).reshape(shape).astype(ELEMENTS[self.element]))


def _tensor(name: str, element: int, array: np.ndarray, *, raw: bool) -> Any:
    if raw or element == TensorProto.BFLOAT16:
        return helper.make_tensor(name, element, array.shape, array.tobytes(), raw=True)
    return helper.make_tensor(name, element, array.shape, array.reshape(-1).tolist())


def _sparse(name: str, element: int, array: np.ndarray, *, rows: bool) -> Any:
    places = np.argwhere(array != 0) if rows else np.flatnonzero(array)
    values = _tensor(name, element, array[array != 0], raw=True)
    return helper.make_sparse_tensor(values, _tensor("", TensorProto.INT64, places, raw=True), array.shape)


def _remark(rng: Any, proto: Any) -> None:
    if rng.random() < 0.3:
        proto.metadata_props.add(key=rng.choice(("namespace", "pkg.torch", "k")), value=rng.choice(NASTY))
    if rng.random() < 0.2:
        proto.doc_string = rng.choice(NASTY)


# -- nodes ----------------------------------------------------------------------------------------------------------


def _unary(w: Writer) -> None:
    x = w.pick()
    choices = [*UNARY, *(["HardSwish"] if w.opset >= 14 else []), *(["Mish"] if w.opset >= 18 else [])]
    if w.opset >= 20:
        choices.append("Gelu")
    if w.opset == 24:
        choices.append("Swish")
    op_type = w.rng.choice(choices)
    if w.element == TensorProto.BFLOAT16 and op_type in _NO_BF16 and w.opset < 22:
        op_type = "Tanh"
    attrs = {"alpha": 0.75} if op_type in ("Elu", "LeakyRelu", "Swish") and w.rng.random() < 0.5 else {}
    w.result(op_type, [x.name], x.shape, **attrs)


def _binary(w: Writer) -> None:
    x, y = w.pick(), w.pick()
    try:
        shape = np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        y, shape = x, x.shape
    op_type = w.rng.choice(("Add", "Sub", "Mul", "Max", "Min"))
    if op_type == "Mul":  # products of products exceed every tolerance
        bounded = w.name()
        w.node("Tanh", [x.name], [bounded])
        w.values.append(Value(bounded, x.shape))
        x = w.values[-1]
    w.result(op_type, [x.name, y.name], shape)


def _swish(w: Writer) -> None:
    x, sigmoid = w.pick(), w.name()
    inner = x.name
    if w.rng.random() < 0.5:
        inner = w.name()
        w.node("Mul", [x.name, w.numbers(())], [inner])
    w.node("Sigmoid", [inner], [sigmoid])
    w.result("Mul", [x.name, sigmoid] if w.rng.random() < 0.5 else [sigmoid, x.name], x.shape)


def _with_constant(w: Writer) -> None:
    x = w.pick()
    shape = w.rng.choice([s for s in SHAPES if len(s) <= len(x.shape) and _fits(s, x.shape)])
    w.result(w.rng.choice(("Add", "Sub", "Max")), [x.name, w.numbers(shape)], x.shape)


def _fits(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, onto) == onto
    except ValueError:
        return False


def _clip(w: Writer) -> None:
    x = w.pick()
    bounds = [w.numbers(()) if w.rng.random() < 0.5 else "", w.numbers(()) if w.rng.random() < 0.5 else ""]
    if all(bounds):  # runtimes differ if the lower bound is above the upper one
        bounds[0] = ""
    while bounds and not bounds[-1]:
        bounds.pop()
    w.result("Clip", [x.name, *bounds], x.shape)


def _variadic(w: Writer) -> None:
    x = w.pick()
    same = [v for v in w.values if v.shape == x.shape][:3]
    w.result(w.rng.choice(("Sum", "Mean", "Max", "Min")), [v.name for v in same], x.shape)


def _where(w: Writer) -> None:
    x, condition, other = w.pick(), w.name(), w.numbers(())
    if w.element == TensorProto.BFLOAT16 and w.opset < 16:
        return
    w.node("Less", [x.name, other], [condition])
    w.result("Where", [condition, other, x.name], x.shape)


def _casts(w: Writer) -> None:
    x, wide = w.pick(), w.name()
    w.node("Cast", [x.name], [wide], to=TensorProto.DOUBLE)
    if w.opset >= 15 and w.rng.random() < 0.5:
        w.result("CastLike", [wide, x.name], x.shape)
    else:
        w.result("Cast", [wide], x.shape, to=w.element)


def _foreign(w: Writer) -> None:
    x = w.pick()
    w.foreign = True
    if not x.shape:
        w.result("Reshape", [x.name, w.constant(np.asarray([1], np.int64), TensorProto.INT64)], (1,))
        return
    which = w.rng.randrange(4)
    if which == 0:
        w.result("Softmax", [x.name], x.shape, axis=-1)
    elif which == 1:
        w.result("Concat", [x.name, x.name], (*x.shape[:-1], 2 * x.shape[-1]), axis=-1)
        w.values.pop()  # a value that nothing reads
    elif which == 2:
        w.result("MatMul", [x.name, w.numbers((x.shape[-1], 3))], (*x.shape[:-1], 3))
    else:
        outputs = [w.name(), "", w.name()][: w.rng.choice((1, 3))]
        w.node("LayerNormalization" if w.opset >= 17 and len(outputs) == 1 else "Identity",
               [x.name, *([w.numbers((x.shape[-1],))] if w.opset >= 17 and len(outputs) == 1 else [])],
               outputs[:1])  # fmt: skip
        w.values.append(Value(outputs[0], x.shape))


def _branches(w: Writer) -> None:
    x, condition, output = w.pick(), w.name(), w.name()
    if w.element == TensorProto.BFLOAT16 and w.opset < 16:
        return
    w.foreign = True
    value = np.asarray(w.rng.random() < 0.5)
    w.initializers.append(helper.make_tensor(condition, TensorProto.BOOL, (), [bool(value)]))
    graphs = []
    for op_type in ("Tanh", "Neg"):
        inner = w.name()
        body = [helper.make_node(op_type, [x.name], [inner])]  # x is captured
        graphs.append(helper.make_graph(body, op_type, [], [helper.make_tensor_value_info(inner, w.element, None)]))
    w.node("If", [condition], [output], then_branch=graphs[0], else_branch=graphs[1])
    w.values.append(Value(output, x.shape))


def _call(w: Writer) -> None:
    x, domain = w.pick(), w.rng.choice(("pkg", "d.e"))
    name = w.rng.choice(("Act", "Twice"))
    key = f"{domain}::{name}"
    if key not in w.functions:
        slope = onnx.NodeProto(op_type="Elu", input=["a"], output=["e"])
        slope.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=1))
        body = [slope, helper.make_node("Add", ["e", "a"], ["b"])]
        if name == "Twice":
            body = [helper.make_node("Tanh", ["a"], ["e"]), helper.make_node("Sub", ["e", "a"], ["b"])]
        function = helper.make_function(domain, name, ["a"], ["b"], body, [helper.make_opsetid("", w.opset)])
        if name == "Act":
            function.attribute_proto.append(helper.make_attribute("slope", 0.5))
        w.functions[key] = function
        w.domains[domain] = 1
    if name == "Act" and w.element == TensorProto.BFLOAT16 and w.opset < 22:
        return
    attrs = {"slope": 0.25} if name == "Act" and w.rng.random() < 0.5 else {}
    w.result(name, [x.name], x.shape, domain=domain, **attrs)


PARTS: tuple[Callable[[Writer], None], ...] = (
    _unary, _unary, _binary, _binary, _swish, _with_constant, _clip, _variadic, _where, _casts, _foreign, _branches,
    _call,
)  # fmt: skip


def random_model(rng: Any, *, longest: int = 10) -> onnx.ModelProto:
    """A valid model. onnx's checker accepts it, except for sparse initializers, which its inference does not support.

    Args:
        rng: has `random`, `randrange` and `choice`, as `random.Random`.
        longest: the largest number of parts; each makes one node or a few.
    """
    element = rng.choice((*[TensorProto.FLOAT] * 5, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16))
    opset = rng.choice((13, 14, 15, 17, 18, 20, 21, 22, 23, 24))
    w = Writer(rng, element, opset, {2: rng.choice(("n", "seq + 1", "α", "*/")), 4: "batch"})
    for _ in range(rng.randrange(1, 4)):
        shape = rng.choice(SHAPES)
        name = w.name()
        declared = [w.symbols.get(d, d) if rng.random() < 0.5 else d for d in shape]
        w.inputs.append(helper.make_tensor_value_info(name, element, declared, doc_string=rng.choice(("", "an input"))))
        w.values.append(Value(name, shape))
    for _ in range(rng.randrange(1, longest + 1)):
        rng.choice(PARTS)(w)
    made = {name for node in w.nodes for name in node.output}
    outputs = [v for v in w.values if v.name in made]
    if not outputs:
        w.result("Identity", [w.values[0].name], w.values[0].shape)
        outputs = w.values[-1:]
    chosen = {v.name: v for v in (outputs[-1], *(rng.choice(outputs) for _ in range(rng.randrange(3))))}
    infos = [helper.make_tensor_value_info(v.name, element, list(v.shape)) for v in chosen.values()]
    if rng.random() < 0.1:  # listed twice
        infos.append(infos[0])
    graph = helper.make_graph(w.nodes, rng.choice(("g", *NASTY)), w.inputs, infos, w.initializers,
                              doc_string=rng.choice(("", "text")), sparse_initializer=w.sparse)  # fmt: skip
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in w.domains.items())]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(w.functions.values()))
    model.producer_name, model.model_version = rng.choice(("", "pytorch")), rng.randrange(3)
    if rng.random() < 0.3:
        model = onnx.shape_inference.infer_shapes(model)
    if rng.random() < 0.1:
        step = helper.make_node("Anything", [infos[0].name], ["new"], domain="some.where")
        model.training_info.add(algorithm=helper.make_graph([step], "step", [], []))
    _remark(rng, model)
    return model


def feeds_of(model: onnx.ModelProto, rng: Any) -> dict[str, np.ndarray]:
    """Arrays for the inputs without a default; symbols have the sizes that the model was built with.

    Raises:
        KeyError: an input has another type, or a size made by damage.
    """
    given = {t.name for t in model.graph.initializer}
    sizes = {"batch": 4}
    feeds = {}
    for value in model.graph.input:
        if value.name in given:
            continue
        kind = value.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else sizes.get(d.dim_param, 2) for d in kind.shape.dim]
        if math.prod(max(size, 1) for size in shape) > _LARGEST:  # NumPy counts an empty array's other sizes, too
            raise KeyError(f"an input of shape {shape}")
        values = [rng.choice((-2.0, -1.0, -0.25, 0.0, 0.5, 1.0, 3.0)) for _ in range(math.prod(shape))]
        feeds[value.name] = np.asarray(values).reshape(shape).astype(ELEMENTS[kind.elem_type])
    return feeds


# -- damage ---------------------------------------------------------------------------------------------------------

_NUMBERS = (0, 1, -1, 2, 3, 7, 13, 255, 1 << 20, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 45, (1 << 63) - 1, -(1 << 63))


def _messages(root: Message, deepest: int = 12) -> list[Message]:
    found, waiting = [], [(root, 0)]
    while waiting:
        message, depth = waiting.pop()
        found.append(message)
        if depth < deepest:
            for descriptor, value in message.ListFields():
                if descriptor.message_type is not None:
                    inner = value if hasattr(value, "append") or hasattr(value, "add") else [value]
                    waiting += [(one, depth + 1) for one in inner]
    return found


def damaged(model: onnx.ModelProto, rng: Any, times: int) -> onnx.ModelProto:
    """The model with fields changed at random: values, names, repeated entries dropped, doubled, moved, swapped in."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for _ in range(times):
        messages = _messages(result)
        message = rng.choice(messages)
        descriptor = rng.choice(list(message.DESCRIPTOR.fields))
        try:
            _damage(message, descriptor, rng, messages)
        except (TypeError, ValueError):
            continue  # protobuf itself refuses such a value
    return result


def _damage(message: Any, descriptor: Any, rng: Any, messages: list[Message]) -> None:
    repeated = descriptor.is_repeated
    if repeated:
        entries = getattr(message, descriptor.name)
        if len(entries) and rng.random() < 0.7:
            what, place = rng.randrange(3), rng.randrange(len(entries))
            if what == 0:
                del entries[place]
            elif what == 1:
                entries.append(entries[place])
            else:
                first = list(entries)
                rng.shuffle(first)
                kept = [_copy(e) for e in first]
                del entries[:]
                entries.extend(kept)
            return
    if descriptor.message_type is not None:
        alike = [m for m in messages if m.DESCRIPTOR is descriptor.message_type]
        source = rng.choice(alike) if alike else None
        if source is None or source.ByteSize() > 1 << 16:
            return
        copy = _copy(source)
        if repeated:
            getattr(message, descriptor.name).append(copy)
        else:
            getattr(message, descriptor.name).CopyFrom(copy)
        return
    value = _scalar(message, descriptor, rng, messages)
    if repeated:
        getattr(message, descriptor.name).append(value)
    elif rng.random() < 0.2:
        message.ClearField(descriptor.name)
    else:
        setattr(message, descriptor.name, value)


def _copy(entry: Any) -> Any:
    if not isinstance(entry, Message):
        return entry
    copy = type(entry)()
    copy.CopyFrom(entry)
    return copy


def _scalar(message: Any, descriptor: Any, rng: Any, messages: list[Message]) -> Any:
    if descriptor.cpp_type == descriptor.CPPTYPE_STRING:
        names = [n for m in messages for n in (getattr(m, "name", ""),) if isinstance(n, str)]
        text = rng.choice([*NASTY, "", *names, "Relu", "Loop", "opgraph", "Swish", "Constant", "/etc/passwd", "../x"])
        return text.encode() if descriptor.type == descriptor.TYPE_BYTES else text
    if descriptor.cpp_type in (descriptor.CPPTYPE_FLOAT, descriptor.CPPTYPE_DOUBLE):
        return rng.choice((0.0, -0.0, 1.0, float("inf"), float("nan"), 1e30, -1e-45))
    if descriptor.cpp_type == descriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    return rng.choice(_NUMBERS)


def seeded(seed: int) -> random.Random:
    """The random source of a seed."""
    return random.Random(seed)
