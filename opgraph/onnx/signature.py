"""The signature of a function body, and conversions of attributes and decompositions for the body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opgraph.ir.expression import Call, Expr, Num, Param, Var
from opgraph.ir.op import AttrValue
from opgraph.ir.opdef import Attr
from opgraph.ir.schema import f32

#: The domain of the functions that opgraph writes.
DOMAIN = "opgraph"


@dataclass(frozen=True, slots=True)
class Signature:
    """All properties that determine a body, besides the kind.

    Attributes:
        inputs: name of each given input -> its dtype and number of dimensions.
        output: dtype of the output.
        attrs: attributes; those of type f32 stay open, the others determine the body.
        opset: of ai.onnx, for the body's nodes.
    """

    inputs: tuple[tuple[str, str, int | None], ...]
    output: str
    attrs: Mapping[str, AttrValue]
    opset: int


def onnx_value(attr: Attr, value: AttrValue) -> AttrValue:
    """Converts an attribute's value to ONNX: bools become ints, floats are rounded to f32."""
    if isinstance(value, bool):
        return int(value)
    return f32(value) if isinstance(value, float) else value


def substituted(tree: Expr, args: Mapping[str, Expr], attrs: Mapping[str, AttrValue | Param]) -> Expr:
    """Substitutes a call's arguments and attributes into the decomposition that replaces the call."""
    if isinstance(tree, Var):
        return args[tree.name]
    if isinstance(tree, Param):
        value = attrs[tree.name]
        return value if isinstance(value, Param) else Num(float(value))  # type: ignore[arg-type]  # scalars only
    if isinstance(tree, Call):
        inner: tuple[tuple[str, Any], ...] = tuple(
            (n, attrs[v.name] if isinstance(v, Param) else v) for n, v in tree.attrs
        )
        return Call(tree.kind, tuple(substituted(a, args, attrs) for a in tree.args), inner)
    return tree
