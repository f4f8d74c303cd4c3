"""The report on what is kept for backward: every kept tensor, and sums over modules, classes and ops.

A storage counts once, weights count nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from opgraph.torch.memory.recomputed import Recomputed

#: What the CUDA caching allocator rounds every block to (c10/cuda/CUDACachingAllocator, kMinBlockSize).
CUDA_BLOCK = 512

#: Whose memory a storage is. Only what the forward pass made, and the caller's inputs, cost something.
MADE, INPUT, WEIGHT, OUTSIDE = "made", "input", "weight", "outside"
COSTS = (MADE, INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One tensor that one op keeps.

    Attributes:
        module, module_class, call: the module call it happened in; `module` is "" for the whole model.
        op: the node of the autograd graph; "" where the outputs do not lead to it (checkpointed regions, for one).
        slot: what the node calls it; `ctx.name` for an attribute of a custom Function, which no hook sees.
        bytes: of the tensor; its storage may be larger.
        storage: entries with the same number are one storage.
        role: made (by the forward pass), input, weight (parameter or buffer), outside (existed before the run).
        name: the weight's qualified name, the input's position, or who made it.
        counted: what this entry adds to the total; 0 where an earlier entry has the storage already, and for weights.
        hooked: whether a saved-tensor hook sees it.
        where, code: the innermost line of the user's source that saved it, as `file:line`, and its text.
    """

    module: str
    module_class: str
    call: int
    op: str
    slot: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    storage: int
    storage_bytes: int
    role: str
    name: str
    counted: int
    hooked: bool
    where: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums, in bytes; each storage counts once.

    Attributes:
        kept: of what the forward pass made and of the inputs: what backward costs.
        inputs: the part of it that the caller gave.
        hooked: the part of it that saved-tensor hooks see; the rest are attributes of custom Functions.
        rounded: `kept`, with each storage rounded up to the CUDA allocator's 512 bytes.
        weights: of kept parameters and buffers, which exist anyway and cost nothing.
        tensors, storages: how many entries cost something, and in how many storages.
    """

    kept: int
    inputs: int
    hooked: int
    rounded: int
    weights: int
    tensors: int
    storages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Kept tensors that belong together.

    Attributes:
        of: what they have in common: (module, call, class), (class,), (op,) or (where, code).
        calls: in how many module calls.
        tensors: how many entries cost something.
        kept: bytes counted here: each storage at the first that keeps it.
        alone: bytes of storages that nobody outside the group keeps: what would go if the group kept nothing.
        after: `kept` in the report compared with; None without one.
    """

    of: tuple[str, ...]
    calls: int
    tensors: int
    kept: int
    alone: int
    after: int | None = None


def grouped(kept: Iterable[Kept], key: Callable[[Kept], tuple[str, ...]]) -> tuple[Group, ...]:
    """Sums over the tensors of one key, in the order of first appearance; groups of weights alone are left out."""
    costly = [k for k in kept if k.role in COSTS]
    keepers: dict[int, set[Hashable]] = {}
    members: dict[tuple[str, ...], list[Kept]] = {}
    for k in costly:
        keepers.setdefault(k.storage, set()).add(key(k))
        members.setdefault(key(k), []).append(k)
    return tuple(
        Group(
            of=of,
            calls=len({(k.module, k.call) for k in inside}),
            tensors=len(inside),
            kept=sum(k.counted for k in inside),
            alone=sum({k.storage: k.storage_bytes for k in inside if len(keepers[k.storage]) == 1}.values()),
        )
        for of, inside in members.items()
    )


def totals_of(kept: Iterable[Kept]) -> Totals:
    """The sums over all kept tensors."""
    kept = list(kept)
    costly = [k for k in kept if k.role in COSTS]
    sizes = {k.storage: k.storage_bytes for k in costly}
    return Totals(
        kept=sum(sizes.values()),
        inputs=sum({k.storage: k.storage_bytes for k in costly if k.role == INPUT}.values()),
        hooked=sum({k.storage: k.storage_bytes for k in costly if k.hooked}.values()),
        rounded=sum(rounded(size) for size in sizes.values()),
        weights=sum({k.storage: k.storage_bytes for k in kept if k.role == WEIGHT}.values()),
        tensors=len(costly),
        storages=len(sizes),
    )


def rounded(size: int) -> int:
    """What a block of `size` bytes takes in the CUDA caching allocator."""
    return -(-size // CUDA_BLOCK) * CUDA_BLOCK


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
