"""Equality of graphs by content: ids, op names and insertion order do not count; inputs, outputs and wiring do."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor, canonical_bytes
from opgraph.ir.op import AttrValue, Op
from opgraph.ir.verify import topological_order


def fingerprint(graph: Graph) -> tuple[object, ...]:
    """A value equal for two graphs exactly if their contents are (up to collisions of sha256).

    Every op is named by what it computes (a hash of its kind, attributes and inputs), then by how its results are
    used as well, so that two equal ops whose results go to different places are told apart.
    """
    ops = graph.ops if graph.is_finalized else topological_order({o.id: o for o in graph.ops}, graph._producer)
    ports = [_digest("in", _port(t)) for t in graph.inputs]
    values = {t.id: p for t, p in zip(graph.inputs, ports, strict=True)}
    down = _computes(ops, values, {})
    up = _is_used(ops, graph.outputs, down)
    both = _computes(ops, values, {op.id: up[op.id] for op in ops})
    outputs = tuple((_port(t), both.get(t.id, "")) for t in graph.outputs)
    return tuple(ports), Counter(both[f"op {op.id}"] for op in ops), outputs


def _computes(ops: Iterable[Op], values: dict[int, str], salt: dict[int, str]) -> dict[object, str]:
    result: dict[object, str] = dict(values)
    for op in ops:
        for tensor in op.inputs:
            if tensor.is_constant and tensor.id not in result:
                result[tensor.id] = constant_digest(tensor)
        inputs = [result[t.id] for t in op.inputs]
        attrs = [f"{k}={_attr_bits(v)}" for k, v in sorted(op.attrs.items())]
        own = _digest(
            op.kind, *attrs, "inputs", *inputs, "outputs", *[_type(t) for t in op.outputs], salt.get(op.id, "")
        )
        result[f"op {op.id}"] = own
        for index, tensor in enumerate(op.outputs):
            result[tensor.id] = _digest(own, str(index))
    return result


def _is_used(ops: Iterable[Op], outputs: tuple[LogicalTensor, ...], down: dict[object, str]) -> dict[int, str]:
    uses: dict[int, list[str]] = {}
    for index, tensor in enumerate(outputs):
        uses.setdefault(tensor.id, []).append(f"output {index}")
    result = {}
    for op in reversed(list(ops)):
        used = [_digest(*sorted(uses.get(t.id, ()))) for t in op.outputs]
        result[op.id] = _digest(down[f"op {op.id}"], *used)
        for port, tensor in enumerate(op.inputs):
            uses.setdefault(tensor.id, []).append(f"{result[op.id]} {port}")
    return result


def constant_digest(tensor: LogicalTensor) -> str:
    """sha256 over dtype, shape and bits of a constant."""
    assert tensor.data is not None
    h = hashlib.sha256(f"{tensor.dtype} {tensor.data.shape} ".encode())
    h.update(canonical_bytes(tensor.data))
    return h.hexdigest()


def _port(tensor: LogicalTensor) -> str:
    return f"{tensor.name!r} {_type(tensor)}"


def _type(tensor: LogicalTensor) -> str:
    return f"{tensor.type_text} {tensor.layout} {tensor.property} {tensor.strides}"


def _attr_bits(value: AttrValue) -> str:
    # repr tells 0.0 from -0.0 and writes every nan alike; bool and int differ too.
    return f"{type(value).__name__}{value!r}"


def _digest(*parts: str) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(part.encode())
        h.update(b"\0")
    return h.hexdigest()
