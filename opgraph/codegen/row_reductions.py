"""Results of row reductions, on the CPU and on the GPU: members with their kinds, and the values after each pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opgraph.codegen.arithmetic import compute_type, storage_type
from opgraph.codegen.emitter import Emitter, lane_of
from opgraph.loops.loop import Statement
from opgraph.schedule.levels import PER_ROW
from opgraph.schedule.reduction_passes import Pass


def emit_reduction_members(emitter: Emitter, passes: Sequence[Pass], ways: Mapping[str, str]) -> None:
    """Adds the number of reductions of each pass and their kinds, and the inverses of values of rows.

    Args:
        ways: the kinds (og::How) of some results, where they differ from their records.
    """
    counts = [len(p.reductions) for p in passes]
    emitter.put(f"  static constexpr int passes = {len(passes)}, most = {max(counts)};")
    chosen = "".join(f"pass == {number} ? {count} : " for number, count in enumerate(counts))
    emitter.put(f"  static constexpr int reductions(int pass) {{ return {chosen}0; }}")
    chosen = ""
    for number, one in enumerate(passes):
        for k, s in enumerate(one.reductions):
            how = ways.get(s.result, s.row.how)
            chosen += f"pass == {number} && k == {k} ? og::How::{how} : " if how != "add" else ""
    emitter.put(f"  static constexpr og::How how(int pass, int k) {{ return {chosen}og::How::add; }}")
    for name in emitter.divisors:
        emitter.put(f"  og::Inverse {name}_inverse;")


def emit_reduced(emitter: Emitter, passes: Sequence[Pass], parameters: str, total: str, *, of: str = "") -> None:
    """Adds `reduced`: it computes the results of the reductions of a pass, and the row values that depend on them.

    Args:
        parameters: its parameters.
        total: C++ for the total of reduction {} of the pass.
        of: template parameters besides the pass.
    """
    emitter.put(f"  template <int pass{of}> OG_FN void reduced({parameters}) {{")
    for number, one in enumerate(passes):
        emitter.put(f"    if constexpr (pass == {number}) {{")
        for k, s in enumerate(one.reductions):
            _emit_row_value(emitter, s, _total(emitter, s, total.format(k)))
            if s.result in emitter.peaks.values():
                emitter.put(f"      {s.result}_near = og::all_near({total.format(k)});")
        for s in emitter.loop.statements:
            is_here = emitter.levels[s.result] == PER_ROW and emitter.depth[s.result] == number + 1
            if is_here and not s.reduces:
                _emit_row_value(emitter, s, emitter.expression(s))
        emitter.put("    }")
    emitter.put("  }")


def _emit_row_value(emitter: Emitter, s: Statement, text: str) -> None:
    emitter.assign(s, text, "      ")
    if s.result in emitter.divisors:
        emitter.put(f"      {s.result}_inverse = og::inverse_of({s.result});")


def _total(emitter: Emitter, s: Statement, total: str) -> str:
    """C++ for the result of a reduction, from its total."""
    row = s.row
    if row.is_mean and emitter.sums and s.result in emitter.approximate:
        # Without a division's slow path registers hold more values; in loops without sums, rows then have less room.
        text = f"{total} * og::fast::reciprocal(count)"
    else:
        text = row.total.format(total=total, count="count")
    if s.rounds and s.dtype in ("f16", "bf16"):
        return f"og::round_{s.dtype}({text})"  # once: not through f32
    narrow = f"({compute_type(s.dtype)})({text})"
    return f"og::round_{s.dtype}({narrow})" if s.rounds else narrow


def emit_finish(emitter: Emitter) -> None:
    """Adds `finish`, which writes the results of the row."""
    each = emitter.each_lane(PER_ROW)
    emitter.put(f"  OG_FN void finish({'og::i64 n' if each else ''}) const {{")
    for i, store in emitter.per_row:
        at = f"{lane_of(emitter.store_kinds[i])} * y{i}_step" if each else "0"
        stored = f"og::store<{storage_type(store.dtype)}>({emitter.value(store.value)})"
        emitter.put(f"    {each}y{i}[{at}] = {stored};")
    emitter.put("  }")
