"""Rewrites ONNX nodes to equivalent simpler nodes, before the op records are matched.

Sum(a, b, c)        Add(Add(a, b), c)            also Mean, Max and Min of any number of inputs
CastLike(x, y)      Cast(x, to=dtype of y)
Pow(x, n)           Cast(Pow(Cast(x), Cast(n)))  of different types, in f64
QuickGelu(x)        Swish(x, alpha=1.702)        com.microsoft; also Gelu, FastGelu and BiasGelu
SwiGLU(x, y)        Mul(Swish(x), y)             opset 28
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
from onnx import NodeProto, TensorProto

from opgraph.ir import dtypes

#: Name of a value -> its ONNX element type, if known.
Elements = Mapping[str, int]


def plain_nodes(node: NodeProto, elements: Elements, opset: int) -> list[NodeProto]:
    """The node itself, or the simpler nodes that mean the same; the last one has the node's output.

    Args:
        opset: of ai.onnx in the model.

    Inner values are named after the output, followed by a space; the caller ensures that no other value is.
    """
    rewrite = _REWRITES.get((node.domain, node.op_type))
    if node.op_type == "Clip" and 6 <= opset < 11:  # its default bounds are those of f32 for every dtype
        return [node]
    result = rewrite(node, elements) if rewrite is not None else None
    return [node] if result is None else result


def same_type(node: NodeProto) -> NodeProto | None:
    """If onnx infers no type for a node, returns one whose output has the same type; else None."""
    if (node.domain, node.op_type) == ("", "GroupNormalization"):
        return _node("Identity", [node.input[0]], node.output[0], node.name)
    if (node.domain, node.op_type) not in _ELEMENTWISE:
        return None
    given = [name for name in node.input if name]
    return _node("Add" if len(given) == 2 else "Identity", given, node.output[0], node.name)


def _chain(op_type: str, fewest: int = 2) -> Callable[[NodeProto, Elements], list[NodeProto] | None]:
    """Splits a node with any number of inputs into nodes with two."""

    def rewrite(node: NodeProto, elements: Elements) -> list[NodeProto] | None:
        if len(node.input) == 2 and node.op_type == op_type:
            return None
        if len(node.input) == 1:
            return [_node("Identity", [node.input[0]], node.output[0], node.name)]
        made, so_far = [], node.input[0]
        for index, name in enumerate(node.input[1:], start=2):
            output = node.output[0] if index == len(node.input) else f"{node.output[0]} {index}"
            made.append(_node(op_type, [so_far, name], output, node.name))
            so_far = output
        return made

    return rewrite


def _mean(node: NodeProto, elements: Elements) -> list[NodeProto] | None:
    element = elements.get(node.input[0])
    if element is None or len(node.input) == 1:
        return _chain("Add")(node, elements) if len(node.input) == 1 else None
    total, count = f"{node.output[0]} sum", f"{node.output[0]} count"
    added = _node("Sum", list(node.input), total, node.name)
    number = onnx.helper.make_tensor(count, element, (), [float(len(node.input))])
    constant = onnx.helper.make_node("Constant", [], [count], value=number)
    divided = _node("Div", [total, count], node.output[0], node.name)
    return [*(_chain("Add")(added, elements) or ()), constant, divided]


def _cast_like(node: NodeProto, elements: Elements) -> list[NodeProto] | None:
    element = elements.get(node.input[1])
    if element is None:
        return None
    made = _node("Cast", [node.input[0]], node.output[0], node.name)
    made.attribute.extend(node.attribute)
    made.attribute.append(onnx.helper.make_attribute("to", element))
    return [made]


def _clip(node: NodeProto, elements: Elements) -> list[NodeProto] | None:
    """Rewrites Clip without bounds, or with only an upper bound, known at run time: opgraph's inputs are positional."""
    if not any(node.input[1:]) and not node.attribute:
        return [_node("Identity", [node.input[0]], node.output[0], node.name)]
    only_upper = len(node.input) == 3 and not node.input[1]
    return [_node("Min", [node.input[0], node.input[2]], node.output[0], node.name)] if only_upper else None


def _pow(node: NodeProto, elements: Elements) -> list[NodeProto] | None:
    """Rewrites Pow of two dtypes to Pow in f64; the result has the base's dtype."""
    base, exponent = (elements.get(name) for name in node.input)
    known = {t.onnx for t in dtypes.BY_NAME.values() if t.category in ("float", "int")}
    if base == exponent or not {base, exponent} <= known:
        return None
    names = [f"{node.output[0]} {part}" for part in ("base", "exponent", "power")]
    parts = [
        _node("Cast", [node.input[0]], names[0], node.name),
        _node("Cast", [node.input[1]], names[1], node.name),
        _node("Pow", names[:2], names[2], node.name),
        _node("Cast", [names[2]], node.output[0], node.name),
    ]
    for part, element in zip(parts, (TensorProto.DOUBLE, TensorProto.DOUBLE, None, base), strict=True):
        if element is not None:
            part.attribute.append(onnx.helper.make_attribute("to", element))
    return parts


def _quick_gelu(node: NodeProto, elements: Elements) -> list[NodeProto]:
    made = _node("Swish", [node.input[0]], node.output[0], node.name)
    given = {a.name: a for a in node.attribute}
    # The default of the contributed op, which is not that of ai.onnx Swish.
    made.attribute.append(given.get("alpha") or onnx.helper.make_attribute("alpha", 1.702))
    return [made]


def _gelu(approximate: str) -> Callable[[NodeProto, Elements], list[NodeProto]]:
    """Rewrites onnxruntime's GELUs; some add a bias first."""

    def rewrite(node: NodeProto, elements: Elements) -> list[NodeProto]:
        given = [name for name in node.input if name]
        biased = f"{node.output[0]} biased"
        made = [_node("Add", given, biased, node.name)] if len(given) == 2 else []
        made.append(_node("Gelu", [biased if made else given[0]], node.output[0], node.name))
        made[-1].attribute.append(onnx.helper.make_attribute("approximate", approximate))
        return made

    return rewrite


def _swiglu(node: NodeProto, elements: Elements) -> list[NodeProto]:
    gate = _node("Swish", [node.input[0]], f"{node.output[0]} gate", node.name)
    gate.attribute.extend(node.attribute)
    return [gate, _node("Mul", [gate.output[0], node.input[1]], node.output[0], node.name)]


def _node(op_type: str, inputs: list[str], output: str, name: str) -> NodeProto:
    return NodeProto(op_type=op_type, input=inputs, output=[output], name=name)


_REWRITES: dict[tuple[str, str], Callable[[NodeProto, Elements], list[NodeProto] | None]] = {
    ("", "Sum"): _chain("Add"),
    ("", "Max"): _chain("Max"),
    ("", "Min"): _chain("Min"),
    ("", "Mean"): _mean,
    ("", "Clip"): _clip,
    ("", "CastLike"): _cast_like,
    ("", "Pow"): _pow,
    ("", "SwiGLU"): _swiglu,
    ("com.microsoft", "QuickGelu"): _quick_gelu,
    ("com.microsoft", "Gelu"): _gelu("none"),
    ("com.microsoft", "FastGelu"): _gelu("tanh"),
    ("com.microsoft", "BiasGelu"): _gelu("none"),
}


#: Contributed ops with one operand; some add a bias.
_ELEMENTWISE = {key for key in _REWRITES if key[0] == "com.microsoft"}


def disguises() -> tuple[tuple[str, str], ...]:
    """(domain, op type) of every node that may be rewritten."""
    return tuple(_REWRITES)
