"""The text form of a graph: what `str(graph)` prints, in one line per op.

    graph(x: f32[?,4096]) -> (y)
      const a: f32[] = 1.5
      %0 = Sigmoid(x)          # "act"
      y = Multiply(x, %0)

`opgraph.ir.parse.parse` reads it back to an equal graph.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from opgraph.errors import OpGraphError
from opgraph.ir import dtypes, opdef, schema
from opgraph.ir.equality import constant_digest
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor, quoted
from opgraph.ir.op import AttrValue, Op

#: Constants of more elements print as their sha256.
MAX_PRINTED_ELEMENTS = 64


def graph_text(graph: Graph) -> str:
    """The text form of a graph."""
    names = value_names(graph)
    inputs = ", ".join(f"{names[t.id]}: {_type(t)}" for t in graph.inputs)
    outputs = ", ".join(names[t.id] for t in graph.outputs)
    inlined = _inlined_constants(graph)
    lines = [f"graph({inputs}) -> ({outputs})"]
    lines += [_constant_line(names[t.id], t) for t in graph.constants if t.id not in inlined]
    lines += [_op_line(op, names, inlined) for op in graph.ops]
    return "\n".join(lines)


def value_names(graph: Graph) -> dict[int, str]:
    """How each tensor is called in the text: its name where that is unique, else %number."""
    tensors: dict[int, LogicalTensor] = {t.id: t for t in (*graph.inputs, *graph.constants)}
    for op in graph.ops:
        tensors.update((t.id, t) for t in op.outputs)
    ports = {t.id for t in (*graph.inputs, *graph.outputs)}
    port_names = {tensors[i].name for i in ports if i in tensors}
    uses = Counter(t.name for t in tensors.values())
    names, number = {}, 0
    for id, tensor in tensors.items():
        own = tensor.name is not None and (id in ports or (uses[tensor.name] == 1 and tensor.name not in port_names))
        if (
            tensor.name is not None
            and own
            and uses[tensor.name] > 1
            and sum(tensors[i].name == tensor.name for i in ports) > 1
        ):
            own = False  # an input and an output share the name: only one of them may be written by it
        names[id] = _name_text(tensor.name) if own and tensor.name is not None else f"%{number}"
        number += not own
    return names


def _name_text(name: str) -> str:
    return name if name.isidentifier() and name.isascii() and name != "const" else quoted(name)


def _type(tensor: LogicalTensor) -> str:
    extra = [] if tensor.layout == "strided" else [f"layout={tensor.layout}"]
    extra += [] if tensor.property == "variable" else [f"property={tensor.property}"]
    extra += [] if tensor.strides is None else [f"strides=[{','.join(map(str, tensor.strides))}]"]
    return tensor.type_text + (f"({', '.join(extra)})" if extra else "")


def _constant_line(name: str, tensor: LogicalTensor) -> str:
    assert tensor.data is not None
    if tensor.data.size > MAX_PRINTED_ELEMENTS:
        value = f"sha256:{constant_digest(tensor)}"
    elif tensor.data.ndim == 0:
        value = number_text(tensor.data[()])
    else:
        value = f"[{', '.join(number_text(v) for v in tensor.data.reshape(-1))}]"
    return f"  const {name}: {tensor.type_text} = {value}"


def number_text(value: object) -> str:
    """A number so that reading it back gives the same bits: shortest digits, inf, nan, true, false."""
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, np.float32):
        return str(value)
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    return repr(float(value))  # type: ignore[arg-type]  # bf16, f16, f8 are exact in float


def _attr_text(value: AttrValue) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_attr_text(v) for v in value)}]"
    if isinstance(value, str):
        return quoted(value)
    return number_text(np.float32(value) if isinstance(value, float) else value)


def _op_line(op: Op, names: dict[int, str], inlined: set[int]) -> str:
    args = [number_text(opdef.array_of(t)[()]) if t.id in inlined else names[t.id] for t in op.inputs]
    record = opdef.find(op.kind)
    defaults = {a.name: a.default for a in record.attrs} if record else {}
    for name, value in op.attrs.items():
        if defaults.get(name) is None or value != defaults[name]:
            args.append(f"{name}={_attr_text(value)}")
    typed = _needs_types(op)
    outs = ", ".join(f"{names[t.id]}: {_type(t)}" if typed else names[t.id] for t in op.outputs)
    implied = (f"{op.kind}_{op.id}", *(t.name for t in op.outputs[:1]))
    label = "" if op.name in implied else f"  # {quoted(op.name)}"
    return f"  {outs} = {op.kind}({', '.join(args)}){label}" if outs else f"  {op.kind}({', '.join(args)}){label}"


def _needs_types(op: Op) -> bool:
    """Whether the reader could not infer the outputs' types from the inputs."""
    record = opdef.get(op.kind, where=op.label)
    try:
        _, types = schema.bind_dtypes(record, op.inputs, [None] * len(op.outputs), op.where)
        dims = schema.inferred_dims(record, op.inputs, op.attrs, op.where)
    except OpGraphError:
        return True
    if len(dims) != len(op.outputs):
        return True
    plain = all(t.layout == "strided" and t.property == "variable" and t.strides is None for t in op.outputs)
    return not plain or [(t.dtype, t.dims) for t in op.outputs] != list(zip(types, dims, strict=True))


def _inlined_constants(graph: Graph) -> set[int]:
    """Unnamed scalar constants used once, whose dtype the reader finds from the op's other inputs."""
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
    return tensor.is_scalar_constant and tensor.name is None and tensor.dtype in dtypes.ARITHMETIC
