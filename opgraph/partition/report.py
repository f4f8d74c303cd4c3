"""The report on a partitioning: one line for each partition, and one for each op with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.partition.cluster_info import Refusal
from opgraph.partition.partition import FUSED, LIBRARY, NATIVE, Partition
from opgraph.partition.traits import described

#: The most reasons shown for one op: a value that thousands of ops read has thousands of neighbours.
MOST_REASONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One op: its partition, its units, and the reason why it stayed apart from its neighbours."""

    id: int
    name: str
    kind: str
    partition: int
    units: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRow:
    """One partition; bytes are of its input and output ports, None where a shape is unknown."""

    id: int
    kind: str
    provider: str
    ops: int
    units: tuple[str, ...]
    input_bytes: int | None
    output_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of `Graph.explain`; `print` shows it as a table."""

    policy: str
    partitions: tuple[PartitionRow, ...]
    ops: tuple[OpRow, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers, fit for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        kinds = [p.kind for p in self.partitions]
        counts = ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds))
        lines = [
            f"{counted(len(self.ops), 'op')} in {counted(len(kinds), 'partition')}{f': {counts}' if counts else ''}"
        ]
        lines += _table(
            ("partition", "kind", "ops", "bytes in", "bytes out", "units"),
            [
                (str(p.id), p.kind, str(p.ops), _number(p.input_bytes), _number(p.output_bytes), ", ".join(p.units))
                for p in self.partitions
            ],
        )
        lines += _table(
            ("op", "kind", "partition", "why"), [(o.name, o.kind, str(o.partition), o.why) for o in self.ops]
        )
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def counted(count: int, what: str) -> str:
    """A count with its noun: 1 op, 2 ops."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def make_report(
    graph: Graph,
    partitions: Sequence[Partition],
    refusals: Iterable[Refusal],
    policy: str,
    placed: Mapping[int, str] | None = None,
) -> Report:
    """The report on a finished partitioning.

    Args:
        placed: the reasons why ops run where a device put them, by op id; see `opgraph.runtime.cpu_placement`.
    """
    placed = placed or {}
    told: dict[int, list[str]] = {}
    for refusal in refusals:
        told.setdefault(refusal.producer.id, []).append(f"apart from {described(refusal.consumer)}: {refusal.reason}")
        told.setdefault(refusal.consumer.id, []).append(f"apart from {described(refusal.producer)}: {refusal.reason}")
    rows: dict[int, OpRow] = {}
    for part in partitions:
        units = _units_of(part)
        for op in part.ops:
            why = _why(part, op, units.get(op.id, ()), told.get(op.id, ()), policy)
            if op.id in placed:
                native = part.kind == LIBRARY and "onnx_op" not in op.attrs
                why = placed[op.id] if native else f"{why}; {placed[op.id]}"
            rows[op.id] = OpRow(
                id=op.id, name=op.name, kind=op.kind, partition=part.id, units=tuple(units.get(op.id, ())), why=why
            )
    return Report(
        policy=policy,
        partitions=tuple(_partition_row(part) for part in partitions),
        ops=tuple(rows[op.id] for op in graph.ops if op.id in rows),
        notes=tuple(graph.notes),
    )


def _units_of(part: Partition) -> dict[int, list[str]]:
    """Names of the units that each op belongs to, by op id, the innermost first."""
    found: dict[int, list[str]] = {}
    for unit in part.unit_matches:
        for op in unit.ops:
            found.setdefault(op.id, []).append(unit.name)
    return found


def _why(part: Partition, op: Op, units: Sequence[str], told: Sequence[str], policy: str) -> str:
    if part.provider == NATIVE and "onnx_op" in op.attrs:
        kind = op.attrs["onnx_op"]
        # On a GPU torch also runs nodes; the code that puts them there adds that to the text.
        is_gradient = opdef.get(op.kind, where=op.label).foreign == NATIVE
        return f"gradient of the ONNX node {kind}: runs in torch" if is_gradient else f"foreign op {kind}"
    if part.provider == NATIVE:
        where = f"library op {op.kind}: runs in torch, or in NumPy where torch is not installed"
        return f"{where}; its unknown sizes may be why: give equal ones one name" if _may_be_unknown(op) else where
    if part.kind == LIBRARY:
        return f"foreign op {op.attrs.get('onnx_op', op.kind)}: runs in {part.provider}"
    if part.kind != FUSED:
        return f"foreign op {op.attrs.get('onnx_op', op.kind)}: nobody runs it"
    parts = [f"part of {', '.join(units)}"] if units else []
    if policy == "debug":
        parts.append("policy debug leaves every op alone")
    elif len(part.ops) > 1:
        parts.append(f"fused with {len(part.ops) - 1} more")
    elif not told:
        parts.append("no neighbour to fuse with")
    if part.rows.axes:
        parts.append(f"rows over axes {list(part.rows.axes)}")
    reasons = list(dict.fromkeys(told))
    if len(reasons) > MOST_REASONS:
        reasons[MOST_REASONS - 1 :] = [f"and from {len(reasons) - MOST_REASONS + 1} more"]
    return "; ".join([*parts, *reasons])


def _may_be_unknown(op: Op) -> bool:
    """True if kernels compute such ops if enough of their shapes is known, and this op has an unknown size."""
    record = opdef.of(op)
    has_kernels = record.spelled is not None or record.row is not None
    return has_kernels and any(t.dims is None or None in t.dims for t in op.inputs)


def _partition_row(part: Partition) -> PartitionRow:
    return PartitionRow(
        id=part.id,
        kind=part.kind,
        provider=part.provider,
        ops=len(part.ops),
        units=part.units,
        input_bytes=_bytes((*part.input_ports, *part.constants)),
        output_bytes=_bytes(part.output_ports),
    )


def _bytes(tensors: Iterable[LogicalTensor]) -> int | None:
    total = 0
    for tensor in tensors:
        if not tensor.has_known_shape or tensor.layout != "strided" or tensor.dtype == "undef":
            return None
        total += tensor.mem_size
    return total


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return ["", *("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows))]
