"""The text form of a graph, which `str(graph)` returns: one line per op.

    graph(x: f32[?,4096]) -> (y)
      const a: f32[] = 1.5
      %0 = Sigmoid(x)          # "act"
      y = Multiply(x, %0)

`opgraph.ir.parse.parse` reads it back to an equal graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import ml_dtypes
import numpy as np

from opgraph.errors import OpGraphError
from opgraph.ir import dtypes, opdef, schema
from opgraph.ir.attributes import f32
from opgraph.ir.dims import quoted, word
from opgraph.ir.equality import constant_digest
from opgraph.ir.graph_view import Content
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.ir.verify import topological_order

#: Constants with more elements print as their sha256.
MAX_PRINTED_ELEMENTS = 64


def graph_text(graph: Content) -> str:
    """The text form of a graph, with ops in topological order and without unused constants.

    Raises:
        InvalidGraph: the graph is not finalized, and has a cycle.
    """
    ops = graph.ops if graph.is_finalized else topological_order({o.id: o for o in graph.ops}, graph.producer)
    inlined = _inlined_constants(graph)
    names = value_names(graph, left_out=inlined | _unread_constants(graph))
    inputs = ", ".join(f"{names[t.id]}: {_type(t)}" for t in graph.inputs)
    outputs = ", ".join(names[t.id] for t in graph.outputs)
    ports = {t.id for t in (*graph.inputs, *graph.outputs)}
    hidden = {i for i in ports if (t := graph.tensor(i)).name is not None and names[i] != word(t.name)}
    lines = [f"graph({inputs}) -> ({outputs})"]
    lines += [_constant_line(names[t.id], t, t.id in hidden) for t in graph.constants if t.id in names]
    lines += [_op_line(op, names, inlined, hidden) for op in ops]
    return "\n".join(lines)


def value_names(graph: Content, left_out: Collection[int] = ()) -> dict[int, str]:
    """The name of each tensor in the text: its own name if that is unique, else %number.

    For equal names, inputs take precedence, then outputs. An output with the name of an input is a %number, and its
    name is printed with its type.

    Args:
        left_out: ids of constants that have no line of their own.
    """
    tensors = {t.id: t for t in (*graph.inputs, *graph.constants) if t.id not in left_out}
    for op in graph.ops:
        tensors.update((t.id, t) for t in op.outputs)
    ports = dict.fromkeys([t.id for t in (*graph.inputs, *graph.outputs)])
    owner: dict[str, int] = {}
    for id in ports:
        if (name := tensors[id].name) is not None:
            owner.setdefault(name, id)
    uses = Counter(t.name for t in tensors.values())
    names, number = {}, 0
    for id, tensor in tensors.items():
        name = tensor.name
        if name is not None and (owner.get(name) == id or (uses[name] == 1 and name not in owner)):
            names[id] = word(name)
        else:
            names[id] = f"%{number}"
            number += 1
    return names


def _type(tensor: LogicalTensor, hidden: bool = False) -> str:
    extra = [] if tensor.layout == "strided" else [f"layout={tensor.layout}"]
    usual = "constant" if tensor.is_constant else "variable"
    extra += [] if tensor.property == usual else [f"property={tensor.property}"]
    extra += [] if tensor.odd_strides is None else [f"strides=[{','.join(map(str, tensor.odd_strides))}]"]
    extra += [f"name={quoted(tensor.name)}"] if hidden and tensor.name is not None else []
    return tensor.type_text + (f"({', '.join(extra)})" if extra else "")


def _constant_line(name: str, tensor: LogicalTensor, hidden: bool) -> str:
    data = opdef.array_of(tensor)
    if data.size > MAX_PRINTED_ELEMENTS:
        value = f"sha256:{constant_digest(tensor)}"
    elif data.ndim == 0:
        value = number_text(data[()])
    else:
        value = f"[{', '.join(number_text(v) for v in data.reshape(-1))}]"
    return f"  const {name}: {_type(tensor, hidden)} = {value}"


def number_text(value: object) -> str:
    """A number as text that reads back to the same bits: shortest digits, inf, nan, true, false."""
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (int, np.integer, ml_dtypes.int4, ml_dtypes.uint4)):
        return str(int(value))
    if isinstance(value, np.float32):
        short = str(value)
        # The parser rounds twice, to f64 and then to f32; for one number in a few hundred million that changes the f32.
        return short if np.float32(float(short)) == value or value != value else repr(float(value))
    return repr(float(value))  # type: ignore[arg-type]  # bf16, f16, f8 are exact in float


def _attr_text(value: AttrValue) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_attr_text(v) for v in value)}]"
    if isinstance(value, str):
        return quoted(value)
    return number_text(np.float32(value) if isinstance(value, float) else value)


def _op_line(op: Op, names: dict[int, str], inlined: set[int], hidden: set[int]) -> str:
    args = [number_text(opdef.array_of(t)[()]) if t.id in inlined else names[t.id] for t in op.inputs]
    record = opdef.find(op.kind)
    for name, value in op.attrs.items():
        attr = record.attr(name) if record else None
        if attr is None or not _is_default(value, attr.default):
            args.append(f"{word(name)}={_attr_text(value)}")
    typed = any(t.id in hidden for t in op.outputs) or _needs_types(op)
    outs = ", ".join(f"{names[t.id]}: {_type(t, t.id in hidden)}" if typed else names[t.id] for t in op.outputs)
    implied = (f"{op.kind}_{op.id}", *(t.name for t in op.outputs[:1]))
    label = "" if op.name in implied else f"  # {quoted(op.name)}"
    return f"  {outs} = {op.kind}({', '.join(args)}){label}" if outs else f"  {op.kind}({', '.join(args)}){label}"


def _is_default(value: AttrValue, default: AttrValue | None) -> bool:
    """True if the parser would fill in exactly this value; -0.0 is not 0.0."""
    if isinstance(default, float):
        return repr(value) == repr(f32(default))
    return value == default and type(value) is type(default)


def _needs_types(op: Op) -> bool:
    """True if the parser could not infer the outputs' types from the inputs."""
    record = opdef.get(op.kind, where=op.label)
    try:
        _, types = schema.bind_dtypes(record, op.inputs, [None] * len(op.outputs), op)
        dims = schema.inferred_dims(record, op.inputs, op.attrs, op)
    except OpGraphError:
        return True
    if len(dims) < len(op.outputs):
        return True
    plain = all(t.layout == "strided" and t.property == "variable" and t.odd_strides is None for t in op.outputs)
    return not plain or [(t.dtype, t.dims) for t in op.outputs] != list(zip(types, dims, strict=False))


def _unread_constants(graph: Content) -> set[int]:
    read = {t.id for op in graph.ops for t in op.inputs} | {t.id for t in graph.outputs}
    return {t.id for t in graph.constants} - read


def _inlined_constants(graph: Content) -> set[int]:
    """Unnamed scalar constants used once, whose dtype the parser infers from the op's other inputs."""
    used: Counter[int] = Counter()
    candidates: dict[int, bool] = {}
    for op in graph.ops:
        record = opdef.find(op.kind)
        fixed = {t.dtype for t in op.inputs if not _may_inline(t)}
        for tensor in op.inputs:
            used[tensor.id] += 1
            if _may_inline(tensor):
                fits = len(fixed) == 1 and tensor.dtype in fixed and record is not None and record.is_pointwise
                candidates[tensor.id] = fits and candidates.get(tensor.id, True)
    outputs = {t.id for t in graph.outputs}
    return {id for id, fits in candidates.items() if fits and used[id] == 1 and id not in outputs}


def _may_inline(tensor: LogicalTensor) -> bool:
    plain = tensor.layout == "strided" and tensor.property == "constant"
    return tensor.is_scalar_constant and tensor.name is None and plain and tensor.dtype in dtypes.ARITHMETIC
