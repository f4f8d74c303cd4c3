"""The report on kept tensors as lines and tables of text."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opgraph.torch.memory.recomputed import Recomputed
from opgraph.torch.memory.report import COSTS, INPUT, MADE, WEIGHT, Group, Kept, MemoryReport, Totals

#: Tables are cut to this many rows, and tensors are listed one by one up to this many.
MAX_ROWS = 40


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text; `right` names the columns that hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    right: tuple[str, ...]


def report_text(report: MemoryReport) -> str:
    """The report as plain text."""
    lines = summary(report)
    for table in tables(report):
        lines += ["", table.title, *aligned(table.columns, table.rows, table.right)]
    return "\n".join(lines + [f"note: {note}" for note in report.notes])


def summary(report: MemoryReport) -> list[str]:
    """The kept bytes and the peak, in a few lines."""
    totals, peak, after = report.totals, report.peak, report.after
    lines = [f"{report.subject}: {size(totals.kept)} kept for backward, {_counts(totals)}"]
    if after is not None:
        lines.append(f"  {report.after_name:<11} {_change(totals.kept, after.totals.kept)}, {_counts(after.totals)}")
    if totals.inputs:
        lines.append(f"  inputs      {size(totals.inputs)} of it")
    if totals.hooked != totals.kept:
        lines.append(f"  on ctx      {size(totals.kept - totals.hooked)} of it: attributes of custom Functions, which "
                     "no saved-tensor hook sees")  # fmt: skip
    lines.append(f"  allocator   {size(totals.rounded)} as CUDA's rounds each storage up to 512 bytes")
    if totals.weights:
        lines.append(f"  weights     {size(totals.weights)} are kept too, and cost nothing: they exist anyway")
    place = f" of {peak.module}" if peak.module else ""
    lines.append(f"  peak        {size(peak.bytes)} above the weights, after {peak.op or 'nothing'}{place} in the "
                 f"{peak.phase} pass")  # fmt: skip
    if after is not None:
        lines.append(f"  {report.after_name:<11} {_change(peak.bytes, after.peak.bytes)}")
    lines.append(f"              {size(peak.after_forward)} between the passes, {size(peak.after_backward)} at the end")
    if peak.unexplained:
        lines.append(f"              {size(peak.unexplained)} between the passes are held by something else")
    if peak.cuda is not None:
        lines.append(f"              {size(peak.cuda)} by torch.cuda.max_memory_allocated")
    return lines


def tables(report: MemoryReport, limit: int | None = MAX_ROWS) -> list[Table]:
    """The report's tables, each cut to `limit` rows: by class, by module call, by op, and tensor by tensor if few."""
    made = []
    if len(report.modules) > 1:
        made.append(_groups("By class of module", ("class", "calls"), report.classes, _class_cells, report, limit))
        again = any(group.of[1] != "1" for group in report.modules)
        names = ("module", "class", "call") if again else ("module", "class")
        made.append(
            _groups("By module", names, report.modules, lambda g: _module_cells(g)[: len(names)], report, limit)
        )
    if report.lines:
        made.append(_groups("By line of source", ("line", "source"), report.lines, _line_cells, report, limit))
    made.append(_groups("By op", ("op", "calls"), report.ops, _class_cells, report, limit))
    if limit is None or len(report.kept) <= limit:
        made.append(_tensors(report.kept))
    for told, name in ((report, ""), (report.after, f", {report.after_name}")):
        if told is not None and told.recomputed:
            rows = recomputed_rows(told.recomputed)
            title = f"Computed again in the backward pass{name}{_cut(rows, limit)}"
            cells: list[tuple[str, ...]] = [(*row[:3], size(row[3])) for row in rows[:limit]]
            made.append(Table(title, ("module", "ops", "times", "saves"), cells, ("times", "saves")))
    return made


def recomputed_rows(recomputed: Sequence[Recomputed]) -> list[tuple[str, str, str, int]]:
    """For each module the recomputed ops, their number, and the bytes that this saves; the most first."""
    times: dict[str, Counter[str]] = {}
    saves: Counter[str] = Counter()
    for entry in recomputed:
        times.setdefault(entry.module, Counter())[entry.op] += entry.times
        saves[entry.module] += entry.saves
    rows = []
    for module, ops in times.items():
        text = ", ".join(op if count == 1 else f"{count} {op}" for op, count in ops.most_common())
        rows.append((module or "(the model itself)", _shortened(text), str(ops.total()), saves[module]))
    return sorted(rows, key=lambda row: -row[3])


def _class_cells(group: Group) -> tuple[str, ...]:
    return group.of[0] or "(not in the graph)", str(group.calls)


def _module_cells(group: Group) -> tuple[str, ...]:
    module, call, module_class = group.of
    return module or "(the model itself)", module_class, call


def _line_cells(group: Group) -> tuple[str, ...]:
    where, code = group.of
    return os.path.basename(where), _shortened(code)


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _groups(
    title: str,
    names: tuple[str, ...],
    groups: Sequence[Group],
    cells: Callable[[Group], tuple[str, ...]],
    report: MemoryReport,
    limit: int | None,
) -> Table:
    compares = report.after is not None
    numbers = ("tensors", "kept", "alone", *((report.after_name,) if compares else ()))
    rows = []
    for group in groups[:limit]:
        after = (size(group.after or 0),) if compares else ()
        rows.append((*cells(group), str(group.tensors), size(group.kept), size(group.alone), *after))
    return Table(title + _cut(groups, limit), (*names, *numbers), rows, ("calls", "call", *numbers))


def _cut(rows: Sequence[object], limit: int | None) -> str:
    return f": the first {limit} of {len(rows)}" if limit is not None and len(rows) > limit else ""


def _tensors(kept: Sequence[Kept]) -> Table:
    columns = ("op", "keeps", "shape", "dtype", "bytes", "storage", "counts", "which is")
    rows: list[tuple[str, ...]] = []
    for k in kept:
        shape = "x".join(str(d) for d in k.shape) or "scalar"
        counts = size(k.counted) if k.role in COSTS else "-"
        rows.append(
            (k.op or "(not in the graph)", k.slot, shape, k.dtype, size(k.bytes), f"#{k.storage}", counts, _whose(k))
        )
    return Table("Tensor by tensor", columns, rows, ("bytes", "storage", "counts"))


def _whose(k: Kept) -> str:
    if k.role == MADE:
        return f"made by {k.name}" if k.name else "made"
    if k.role == WEIGHT:
        return f"weight {k.name}"
    return k.name if k.role == INPUT else "existed before"


def size(count: int) -> str:
    """Bytes in a readable unit: 846.0 MiB."""
    if count < 1024:
        return f"{count} B"
    return f"{count / 2**10:.1f} KiB" if count < 2**20 else f"{count / 2**20:.1f} MiB"


def _change(before: int, after: int) -> str:
    part = f" ({abs(before - after) / before:.0%})" if before else ""
    return f"{size(after)}: {size(abs(before - after))}{part} {'less' if after <= before else 'more'}"


def _counts(totals: Totals) -> str:
    return f"{plural(totals.tensors, 'tensor')} in {plural(totals.storages, 'storage')}"


def plural(count: int, word: str) -> str:
    """A count with its noun, singular or plural."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """The lines of a table; `right` names the columns that hold numbers."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    lines = []
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines
