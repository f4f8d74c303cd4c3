"""Prefetches of a loop over rows (kernels/cpu/row_lanes.h).

The first pass over a row reads it from memory and the last pass writes it; both wait for memory. The passes between
find the whole row in the cache. They prefetch the cache lines of this row's results, and the next row.
"""

from __future__ import annotations

from opgraph.codegen.row_buffers import Rows
from opgraph.loops.layout import CONTIGUOUS
from opgraph.schedule.reduction_passes import cost

#: Most instructions per element of a pass that waits for memory. With more arithmetic memory is fast enough anyway, and
#: lines that are prefetched too early are evicted again.
_LITTLE = 12


def asks_ahead(rows: Rows) -> bool:
    """True if all passes, at least two, wait for memory rather than for arithmetic. A persistent row has no pass
    between its reading and its writing."""
    if rows.is_persistent or not rows.emitter.by_lanes:
        return False
    return len(rows.passes) > 1 and all(cost(p) <= _LITTLE for p in rows.passes)


def emit_next_members(rows: Rows) -> None:
    """Adds `is_far`, and for each prefetched operand the distance to its next row."""
    rows.emitter.put(f"  {'bool is_far;' if asks_ahead(rows) else 'static constexpr bool is_far = false;'}")
    for _, name in _awaited(rows):
        rows.emitter.put(f"  og::i64 {name}_next;")


def emit_nexts(rows: Rows) -> None:
    """Adds `nexts`, which computes these members."""
    rows.emitter.put("  OG_FN void nexts(const og::i64* step, og::i64 rank, og::i64 size) {")
    if asks_ahead(rows):
        moved = [*(name for _, name in _awaited(rows)), *rows.along()]
        bytes_each = " + ".join(f"sizeof(*{name})" for name in moved) or "0"
        rows.emitter.put(f"    is_far = size * ({bytes_each}) > og::near_bytes;")
    for position, name in _awaited(rows):
        rows.emitter.put(f"    {name}_next = step ? step[{position} * rank] : 0;")
    rows.emitter.put("  }")


def emit_ahead(rows: Rows) -> None:
    """Adds `ahead`, with which the pass before the last prefetches the lines of element i."""
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
    """Indices and names of the operands that the first pass reads element after element."""
    if not asks_ahead(rows):
        return []
    used = rows.passes[0].reads(rows.emitter.loop)
    loads = ((place, name) for place, name, _, const in rows.emitter.pointers() if const)
    return [(place, name) for place, name in loads if name in used and rows.emitter.kinds[name] == CONTIGUOUS]
