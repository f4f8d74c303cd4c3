"""What a loop over rows asks memory for before it needs it (kernels/cpu/row_lanes.h).

A row is read from memory by its first pass and written by its last one, each of which waits for memory while the passes
between find all of it in the cache. There the results of this row, and the next row, are asked for.
"""

from __future__ import annotations

from opgraph.codegen.row_buffers import Rows
from opgraph.loops.layout import CONTIGUOUS
from opgraph.schedule.reduction_passes import cost

#: Instructions for each element of a pass that waits for memory. Where more is computed memory has its time anyway, and
#: what was asked for too early is gone again.
_LITTLE = 12


def asks_ahead(rows: Rows) -> bool:
    """Whether all passes, two at least, wait for memory rather than for arithmetic. A row that is done at once has no
    pass between its reading and its writing."""
    if rows.is_persistent or not rows.emitter.by_lanes:
        return False
    return len(rows.passes) > 1 and all(cost(p) <= _LITTLE for p in rows.passes)


def emit_next_members(rows: Rows) -> None:
    """Adds whether memory is far, and how far it is to the next row of each operand that is asked for."""
    rows.emitter.put(f"  {'bool is_far;' if asks_ahead(rows) else 'static constexpr bool is_far = false;'}")
    for _, name in _awaited(rows):
        rows.emitter.put(f"  og::i64 {name}_next;")


def emit_nexts(rows: Rows) -> None:
    """Adds `nexts`, which finds these."""
    rows.emitter.put("  OG_FN void nexts(const og::i64* step, og::i64 rank, og::i64 size) {")
    if asks_ahead(rows):
        moved = [*(name for _, name in _awaited(rows)), *rows.along()]
        bytes_each = " + ".join(f"sizeof(*{name})" for name in moved) or "0"
        rows.emitter.put(f"    is_far = size * ({bytes_each}) > og::near_bytes;")
    for position, name in _awaited(rows):
        rows.emitter.put(f"    {name}_next = step ? step[{position} * rank] : 0;")
    rows.emitter.put("  }")


def emit_ahead(rows: Rows) -> None:
    """Adds `ahead`, by which the pass before the last asks for what belongs to element i."""
    rows.emitter.put("  template <int pass> OG_FN void ahead(og::i64 i) const {")
    if asks_ahead(rows):
        rows.emitter.put(f"    if constexpr (pass == {len(rows.passes) - 2}) {{")
        for _, name in _awaited(rows):
            rows.emitter.put(f"      og::fetch({name} + {name}_next + i);")
        for name in rows.along():
            rows.emitter.put(f"      if (!out.are_large) og::fetch_to_write({name} + i);")
        rows.emitter.put("    }")
    rows.emitter.put("  }")


def _awaited(rows: Rows) -> list[tuple[int, str]]:
    """Places and names of what the first pass reads, element after element."""
    if not asks_ahead(rows):
        return []
    used = rows.passes[0].reads(rows.emitter.loop)
    loads = ((place, name) for place, name, _, const in rows.emitter.pointers() if const)
    return [(place, name) for place, name in loads if name in used and rows.emitter.kinds[name] == CONTIGUOUS]
