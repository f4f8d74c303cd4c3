"""The report on tensors kept for backward: every kept tensor, and sums over modules, classes and ops.

Each storage counts once; weights do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from opgraph.torch.memory.recomputed import Recomputed

#: The CUDA caching allocator rounds every block up to multiples of this (c10/cuda/CUDACachingAllocator, kMinBlockSize).
CUDA_BLOCK = 512

#: Roles of storages. Only storages that the forward pass made, and the caller's inputs, cost something.
MADE, INPUT, WEIGHT, OUTSIDE = "made", "input", "weight", "outside"
COSTS = (MADE, INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One tensor that one op keeps.

    Attributes:
        module, module_class, call: the module call that saved it; `module` is "" for the whole model.
        op: the node of the autograd graph; "" if the outputs do not lead to it (checkpointed regions, for example).
        slot: its name in the node; `ctx.name` for an attribute of a custom Function, which no hook sees.
        bytes: the size of the tensor; its storage may be larger.
        storage: entries with the same number are one storage.
        role: made (by the forward pass), input, weight (parameter or buffer), outside (existed before the run).
        name: the weight's qualified name, the input's position, or the op that made it.
        counted: bytes that this entry adds to the total; 0 if an earlier entry has the storage, and for weights.
        hooked: True if a saved-tensor hook sees it.
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
        kept: storages that the forward pass made, and inputs: the cost of backward.
        inputs: the part of it that belongs to the caller's inputs.
        hooked: the part of it that saved-tensor hooks see; the rest are attributes of custom Functions.
        rounded: `kept`, with each storage rounded up to the CUDA allocator's 512 bytes.
        weights: kept parameters and buffers, which exist anyway and cost nothing.
        tensors, storages: the number of entries that cost something, and the number of their storages.
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
    """Kept tensors with a common key.

    Attributes:
        of: the key: (module, call, class), (class,), (op,) or (where, code).
        calls: the number of module calls.
        tensors: the number of entries that cost something.
        kept: bytes counted here; each storage counts at the first entry that keeps it.
        alone: bytes of storages that no entry outside the group keeps: they would be free if the group kept nothing.
        after: `kept` in the compared report; None without one.
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
    """The bytes that a block of `size` bytes takes in the CUDA caching allocator."""
    return -(-size // CUDA_BLOCK) * CUDA_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Memory above the weights over a forward and a backward pass, in bytes; inputs included.

    Attributes:
        bytes: the maximum.
        phase, module, op: the op after which it was reached.
        after_forward: between the two passes; after_backward: with the gradients of the weights.
        unexplained: alive after the forward pass, but neither kept for backward nor an output.
        cuda: `torch.cuda.max_memory_allocated` above the amount before; None without a GPU.
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
    """The result of `saved_tensors`; `print` shows it as tables.

    Attributes:
        subject: the name of the model or function.
        kept: every kept tensor, in the order of saving.
        recomputed: the ops that captured graphs recompute in the backward pass.
        timeline: (phase, module, op, bytes above the weights) after each op.
        uncounted: the ops of a dry run whose workspaces are unknown.
        after: a report on the same model after a change, to be shown next to this one under `after_name`.
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
        # The class is not compared: a replacement of a module may have another one.
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
        """This report, next to one on the same model after a change; `name` is a word for the change."""
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
