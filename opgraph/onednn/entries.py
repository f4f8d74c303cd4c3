"""The form of ops and tensors in a graph file: from a finalized Graph to JSON objects.

Things that oneDNN cannot represent are rejected by name: kinds other than its own, inputs, attributes and dtypes that
they have only in opgraph, f64, constants with data, infinite attributes, ids beyond size_t, more than 12 dimensions.
Symbols become unknown sizes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from opgraph.errors import Unimplemented
from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor, row_major
from opgraph.ir.op import AttrValue, Op
from opgraph.onednn.beyond import beyond, own_attributes
from opgraph.onednn.document import UNKNOWN, Entry

#: The oneDNN version whose format is written.
VERSION = "3.14.0"
#: Ids are size_t; dnnl_max_ndims is 12.
_NO_ID, _MOST_DIMS = 1 << 64, 12
ENGINE_OF = {"cpu": "cpu", "gpu": "cuda"}
KIND_OF = {ours: theirs for theirs, ours in ENGINE_OF.items()}


def head_entry(graph: Graph) -> Entry:
    """The fields before the ops. `input_ports` has one entry for each use, as in oneDNN."""
    made = {t.id for op in graph.ops for t in op.outputs}
    return {
        "version": VERSION,
        "engine_kind": KIND_OF[graph.engine],
        "fpmath_mode": "strict",
        "fpmath_mode_apply_to_int": "false",
        "input_ports": [t.id for op in graph.ops for t in op.inputs if t.id not in made],
        "output_ports": [t.id for t in graph.outputs],
    }


def op_entry(op: Op) -> Entry:
    """The entry of one op.

    Raises:
        Unimplemented: oneDNN has no such kind, attribute, dtype or number.
    """
    if op.id >= _NO_ID:
        raise _no_word(f"the id {op.id}", op.label, "use ids below 2^64")
    record = opdef.get(op.kind, where=op.label)
    if not is_onednn(record):
        raise _no_word(f"kind {op.kind}", op.label, "write the op in oneDNN's kinds, or save the graph as text or ONNX")
    unknown = beyond(op, record)
    if unknown is not None:
        raise _no_word(unknown, op.label, "write it in ops, inputs, attributes and dtypes that oneDNN has")
    attrs: Entry = {}
    for name, value in op.attrs.items():
        attr = record.attr(name)
        assert attr is not None, "the graph has checked its attributes"
        if name not in own_attributes(record):
            attrs[name] = {"type": attr.type, "value": _value(value, op, name)}
    return {
        "id": op.id,
        "name": op.name,
        "kind": op.kind,
        "attrs": attrs,
        "inputs": [tensor_entry(t) for t in op.inputs],
        "outputs": [tensor_entry(t) for t in op.outputs],
    }


def is_onednn(record: opdef.OpDef) -> bool:
    """True if a kind is one of oneDNN's: its record names oneDNN Graph as its source."""
    return record.source.startswith("oneDNN Graph")


def tensor_entry(tensor: LogicalTensor) -> Entry:
    """The entry of one mention of a tensor.

    Raises:
        Unimplemented: a constant with data, or an id, a number of dimensions or a dtype that oneDNN does not have.
    """
    if tensor.id >= _NO_ID:
        raise _no_word(f"the id {tensor.id}", tensor.label, "use ids below 2^64")
    if tensor.dims is not None and len(tensor.dims) > _MOST_DIMS:
        raise _no_word(f"a tensor of {len(tensor.dims)} dimensions", tensor.label, f"use at most {_MOST_DIMS}")
    if tensor.data is not None:
        raise _no_word("data of constants", tensor.label, "make it an input; its property may be 'constant'")
    if tensor.dtype == "f64":
        raise _no_word("dtype f64", tensor.label, "use f32")
    unknown = [UNKNOWN]
    shape = unknown if tensor.dims is None else [d if isinstance(d, int) else UNKNOWN for d in tensor.dims]
    stride = unknown
    if tensor.layout == "strided" and tensor.has_known_shape:
        stride = list(tensor.strides if tensor.strides is not None else row_major(tensor.shape))
    return {
        "id": tensor.id,
        "dtype": tensor.dtype,
        "shape": shape,
        "stride": stride,
        "layout_type": tensor.layout,
        "property_type": tensor.property,
    }


def _value(value: AttrValue, op: Op, name: str) -> Any:
    if isinstance(value, tuple):
        return [_value(v, op, name) for v in value]
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        raise _no_word(f"the number {value}", f"{op.label}, attribute {name}", "use a finite number")
    # The shortest decimal that reads back as this f32. oneDNN itself writes 6 digits, which may be another number.
    return float(str(np.float32(value)))


def _no_word(what: str, where: str, fix: str) -> Unimplemented:
    return Unimplemented(f"oneDNN's files have no word for {what}", where=where, fix=fix)
