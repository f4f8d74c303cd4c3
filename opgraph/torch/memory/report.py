"""The report on what is kept for backward: every kept tensor, and sums over modules, classes and ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from opgraph.torch.memory.recomputed import Recomputed
from opgraph.torch.memory.sums import Group, Kept, Totals, grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Memory above the weights over a forward and a backward pass, in bytes; inputs included.

    Attributes:
        bytes: at most.
        phase, module, op: after which op that was.
        after_forward: between the two passes; after_backward: with the gradients of the weights.
        unexplained: alive after the forward pass, but neither kept for backward nor an output.
        cuda: `torch.cuda.max_memory_allocated` above what was there before; None without a GPU.
    """

    bytes: int
    phase: str
    module: str
    op: str
    after_forward: int
    after_backward: int
    unexplained: int
    cuda: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What `saved_tensors` returns; `print` shows it as tables.

    Attributes:
        subject: what was measured.
        kept: every kept tensor, in the order of saving.
        recomputed: what captured graphs compute again in the backward pass.
        timeline: (phase, module, op, bytes above the weights) after each op.
        uncounted: of a dry run, the ops whose workspaces it does not know.
        after: a report on the same model after a change, to be shown beside this one under `after_name`.
    """

    subject: str
    kept: tuple[Kept, ...]
    recomputed: tuple[Recomputed, ...]
    totals: Totals
    peak: Peak
    timeline: tuple[tuple[str, str, str, int], ...]
    notes: tuple[str, ...]
    uncounted: tuple[str, ...] = ()
    after: MemoryReport | None = None
    after_name: str = "after"

    @cached_property
    def modules(self) -> tuple[Group, ...]:
        """One row for each module call that keeps something, in the order of the calls."""
        # The class is not compared: what replaces a module may have another.
        return self._grouped(lambda k: (k.module, str(k.call), k.module_class), compare=2)

    @cached_property
    def classes(self) -> tuple[Group, ...]:
        """One row for each class of modules, the costliest first."""
        return tuple(sorted(self._grouped(lambda k: (k.module_class,)), key=lambda row: -row.kept))

    @cached_property
    def ops(self) -> tuple[Group, ...]:
        """One row for each kind of op, the costliest first."""
        return tuple(sorted(self._grouped(lambda k: (k.op,)), key=lambda row: -row.kept))

    @cached_property
    def lines(self) -> tuple[Group, ...]:
        """One row for each line of the user's source that keeps something, the costliest first."""
        rows = self._grouped(lambda k: (k.where, k.code))
        return tuple(sorted((row for row in rows if row.of[0]), key=lambda row: -row.kept))

    def compared(self, after: MemoryReport, name: str = "after") -> MemoryReport:
        """This report with one on the same model after a change beside it; `name` says what changed, in a word."""
        return replace(self, after=after, after_name=name)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers, fit for JSON."""
        return {
            "subject": self.subject,
            "totals": asdict(self.totals),
            "peak": asdict(self.peak),
            "kept": [{**asdict(k), "shape": list(k.shape)} for k in self.kept],
            "recomputed": [asdict(r) for r in self.recomputed],
            **{
                name: [{**asdict(g), "of": list(g.of)} for g in getattr(self, name)]
                for name in ("modules", "classes", "ops")
            },
            "timeline": [list(sample) for sample in self.timeline],
            "notes": list(self.notes),
            "uncounted": list(self.uncounted),
            "after": self.after.to_dict() if self.after is not None else None,
        }

    def svg(self) -> str:
        """The picture as the text of an SVG file: bars per layer, and memory over the two passes."""
        from opgraph.torch.memory.picture import svg_text

        return svg_text(self)

    def plot(self, path: str | Path) -> None:
        """Writes the picture.

        Args:
            path: ends in .svg.

        Raises:
            InvalidArguments: another ending.
        """
        from opgraph.torch.memory.picture import write_picture

        write_picture(self, Path(path))

    def __str__(self) -> str:
        from opgraph.torch.memory.report_text import report_text

        return report_text(self)

    def _grouped(self, key: Callable[[Kept], tuple[str, ...]], compare: int = 1) -> tuple[Group, ...]:
        rows = grouped(self.kept, key)
        if self.after is None:
            return rows
        others = {row.of[:compare]: row for row in grouped(self.after.kept, key)}
        found = [replace(row, after=_kept(others.pop(row.of[:compare], None))) for row in rows]
        found += [replace(row, calls=0, tensors=0, kept=0, alone=0, after=row.kept) for row in others.values()]
        return tuple(found)


def _kept(group: Group | None) -> int:
    return 0 if group is None else group.kept


def _plain(group: Group) -> dict[str, Any]:
    return {**asdict(group), "of": list(group.of)}
