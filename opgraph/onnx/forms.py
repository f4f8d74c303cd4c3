"""An index of the ONNX forms of the op records, and lookups in onnx's own schemas."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import onnx
from onnx import AttributeProto

from opgraph.ir import dtypes, opdef
from opgraph.ir.op import AttrValue
from opgraph.ir.opdef import Onnx, OpDef
from opgraph.runtime.providers.onnx_node import plain_value
from opgraph.runtime.providers.onnx_types import ELEMENT_NAMES

#: dtype name by ONNX's type string: "tensor(float)" -> "f32".
_BY_TYPE_STRING = {f"tensor({ELEMENT_NAMES[t.onnx]})": t.name for t in dtypes.BY_NAME.values()}


@cache
def schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    """The ai.onnx schema of an op in an opset, or None."""
    try:
        return onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def forms_of(record: OpDef, opset: int) -> Iterator[Onnx]:
    """The forms of a record that exist in an opset, best first."""
    for form in record.onnx if isinstance(record.onnx, tuple) else ():
        if form.since <= opset <= (form.until or opset) and schema(form.op_type, opset) is not None:
            yield form


@cache
def kinds_of(op_type: str, opset: int) -> list[tuple[OpDef, Onnx]]:
    """The records that have a form of this op type in this opset."""
    return [(record, form) for record, form in _by_op_type().get(op_type, ()) if form in tuple(forms_of(record, opset))]


@cache
def _by_op_type() -> dict[str, list[tuple[OpDef, Onnx]]]:
    result: dict[str, list[tuple[OpDef, Onnx]]] = {}
    for record in opdef.all_ops():
        for form in record.onnx if isinstance(record.onnx, tuple) else ():
            result.setdefault(form.op_type, []).append((record, form))
    return result


def slots(record: OpDef, form: Onnx, count: int) -> tuple[str, ...]:
    """The content of each ONNX input of a form: "input", "$attr", or "input|$attr".

    Args:
        count: the number of inputs given, for variadic ops.
    """
    if form.inputs is not None:
        return form.inputs
    variadic = bool(record.inputs) and record.inputs[-1].variadic
    return tuple(record.input_names(count if variadic else len(record.inputs)))


@cache
def allowed(op_type: str, opset: int, index: int) -> frozenset[str]:
    """The dtypes, under opgraph's names, that an op accepts at input `index` or returns at output `-1 - index`."""
    found = schema(op_type, opset)
    assert found is not None
    ports = found.inputs if index >= 0 else found.outputs
    if not ports:
        return frozenset()
    port = ports[min(index if index >= 0 else -1 - index, len(ports) - 1)]
    return frozenset(_BY_TYPE_STRING[t] for t in port.types if t in _BY_TYPE_STRING)


@cache
def attribute_default(op_type: str, opset: int, name: str) -> AttrValue | None:
    """ONNX's default of an attribute; None if it has none."""
    found = schema(op_type, opset)
    if found is None or name not in found.attributes:
        return None
    default = found.attributes[name].default_value
    return None if default.type == AttributeProto.UNDEFINED else plain_value(default)
