"""What a loop over rows asks memory for before it needs it (kernels/row_lanes.h).

A row is read from memory by its first pass and written by its last one, each of which waits for memory while the passes
between find all of it in the cache. There the results of this row, and the next row, are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opgraph.loops.layout import CONTIGUOUS
from opgraph.loops.passes import cost

if TYPE_CHECKING:
    from opgraph.codegen.rows import RowEmitter

#: Instructions for each element of a pass that waits for memory. Where more is computed memory has its time anyway, and
#: what was asked for too early is gone again.
_LITTLE = 12


def asks_ahead(emitter: RowEmitter) -> bool:
    """Whether all passes, two at least, wait for memory rather than for arithmetic."""
    return emitter.by_lanes and len(emitter.passes) > 1 and all(cost(p) <= _LITTLE for p in emitter.passes)


def put_next_members(emitter: RowEmitter) -> None:
    """Adds whether memory is far, and how far it is to the next row of each operand that is asked for."""
    emitter.put(f"  {'bool is_far;' if asks_ahead(emitter) else 'static constexpr bool is_far = false;'}")
    for _, name in _awaited(emitter):
        emitter.put(f"  og::i64 {name}_next;")


def put_nexts(emitter: RowEmitter) -> None:
    """Adds `nexts`, which finds these."""
    emitter.put("  OG_FN void nexts(const og::i64* step, og::i64 rank, og::i64 size) {")
    if asks_ahead(emitter):
        moved = [*(name for _, name in _awaited(emitter)), *emitter.along()]
        bytes_each = " + ".join(f"sizeof(*{name})" for name in moved) or "0"
        emitter.put(f"    is_far = size * ({bytes_each}) > og::near_bytes;")
    for position, name in _awaited(emitter):
        emitter.put(f"    {name}_next = step ? step[{position} * rank] : 0;")
    emitter.put("  }")


def put_ahead(emitter: RowEmitter) -> None:
    """Adds `ahead`, by which the pass before the last asks for what belongs to element i."""
    emitter.put("  template <int pass> OG_FN void ahead(og::i64 i) const {")
    if asks_ahead(emitter):
        emitter.put(f"    if constexpr (pass == {len(emitter.passes) - 2}) {{")
        for _, name in _awaited(emitter):
            emitter.put(f"      og::fetch({name} + {name}_next + i);")
        for name in emitter.along():
            emitter.put(f"      og::fetch_to_write({name} + i);")
        emitter.put("    }")
    emitter.put("  }")


def _awaited(emitter: RowEmitter) -> list[tuple[int, str]]:
    """Places and names of what the first pass reads, element after element."""
    if not asks_ahead(emitter):
        return []
    first = emitter.passes[0]
    used = {a for s in (*first.statements, *first.reductions) for a in s.args}
    loads = ((place, name) for place, name, _, const in emitter.pointers() if const)
    return [(place, name) for place, name in loads if name in used and emitter.kinds[name] == CONTIGUOUS]
