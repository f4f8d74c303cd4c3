"""What is kept for backward, tensor by tensor, and sums over it: a storage counts once, weights count nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

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
