"""Equality of graphs by content: compares ports, shapes and wiring; ignores ids, op names and insertion order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from opgraph.ir.constants import canonical_bytes
from opgraph.ir.graph_view import Content
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.ir.verify import topological_order

#: Maximum number of refinement rounds, more than any known graph needs. Each round follows all paths down and up.
MAX_ROUNDS = 10


def fingerprint(graph: Content) -> tuple[object, ...]:
    """Returns a value that is equal for two graphs if and only if their contents are equal.

    Each op is identified by a hash of its kind, attributes and inputs. Where two ops, or two unnamed inputs, have the
    same hash, their uses are hashed in as well, until no more of them can be distinguished. (This is the refinement of
    Weisfeiler and Lehman. It cannot distinguish two rings of equal ops over unnamed inputs from one ring of twice the
    length. Hashes are sha256.)
    """
    ops = graph.ops if graph.is_finalized else topological_order({o.id: o for o in graph.ops}, graph.producer)
    graph_outputs = graph.outputs
    ports = {t.id: _digest("in", _port(t)) for t in graph.inputs}
    nameless = [t.id for t in graph.inputs if t.name is None]
    fixed = {op.id: _fixed_part(op) for op in ops}
    salt: dict[int, str] = {}
    told_apart = 0
    for _ in range(MAX_ROUNDS):
        hashes = _computes(ops, ports, fixed, salt)
        distinct = len(set(hashes.ops.values())) + len({ports[i] for i in nameless})
        if distinct in (told_apart, len(ops) + len(nameless)):
            break
        told_apart = distinct
        salt, uses = _is_used(ops, graph_outputs, hashes)
        ports.update({i: _digest(ports[i], *sorted(uses.get(i, ()))) for i in nameless})
    outputs = Counter(f"{_port(t)} {hashes.values.get(t.id, '')}" for t in graph_outputs)
    return Counter(ports.values()), Counter(hashes.ops.values()), outputs


@dataclass(slots=True)
class _Hashes:
    """Hashes of the computation: by op id, and by tensor id."""

    ops: dict[int, str]
    values: dict[int, str]


def _computes(ops: Sequence[Op], ports: dict[int, str], fixed: dict[int, str], salt: dict[int, str]) -> _Hashes:
    values = dict(ports)
    hashes: dict[int, str] = {}
    for op in ops:
        for tensor in op.inputs:
            if tensor.id not in values:
                values[tensor.id] = constant_digest(tensor) if tensor.is_constant else "nothing"
        own = _digest(fixed[op.id], salt.get(op.id, ""), *[values[t.id] for t in op.inputs])
        hashes[op.id] = own
        for index, tensor in enumerate(op.outputs):
            values[tensor.id] = f"{own} {index}"
    return _Hashes(hashes, values)


def _is_used(
    ops: Sequence[Op], outputs: Sequence[LogicalTensor], hashes: _Hashes
) -> tuple[dict[int, str], dict[int, list[str]]]:
    """By op id, a hash of the op and of all uses of its results; by tensor id, the uses."""
    uses: dict[int, list[str]] = {}
    for tensor in outputs:
        uses.setdefault(tensor.id, []).append(f"output {tensor.name!r}")
    used: dict[int, str] = {}
    for op in reversed(ops):
        used[op.id] = _digest(hashes.ops[op.id], *[_digest(*sorted(uses.get(t.id, ()))) for t in op.outputs])
        for port, tensor in enumerate(op.inputs):
            uses.setdefault(tensor.id, []).append(f"{used[op.id]} {port}")
    return used, uses


def constant_digest(tensor: LogicalTensor) -> str:
    """sha256 over dtype, shape and bits of a constant."""
    assert tensor.data is not None
    h = hashlib.sha256(f"{tensor.dtype} {tensor.data.shape} ".encode())
    h.update(canonical_bytes(tensor.data))
    return h.hexdigest()


def _fixed_part(op: Op) -> str:
    """The text of an op without its wiring."""
    attrs = [f"{name!r}={_attr_bits(value)}" for name, value in sorted(op.attrs.items())]
    return "\0".join([op.kind, *attrs, str(len(op.inputs)), *[_type(t) for t in op.outputs]])


def _port(tensor: LogicalTensor) -> str:
    return f"{tensor.name!r} {_type(tensor)}"


def _type(tensor: LogicalTensor) -> str:
    return f"{tensor.type_text} {tensor.layout} {tensor.property} {tensor.odd_strides}"


def _attr_bits(value: AttrValue) -> str:
    # repr distinguishes 0.0 from -0.0 and has one text for all nans; the type name distinguishes bool from int.
    return f"{type(value).__name__}{value!r}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
