"""Emits a loop over rows for the CPU: as `opgraph.codegen.emit`, with passes (`opgraph.codegen.row_passes`).

`kernels/cpu/inner_reduction.h` walks rows one after the other, `kernels/cpu/outer_reduction.h` rows side by side. In
the second case lanes of a vector are rows, and a value for each row is an array with one element for each lane.
"""

from __future__ import annotations

from dataclasses import replace

from opgraph.codegen.arithmetic import compute_type, storage_type
from opgraph.codegen.emitter import Emitter, Functor
from opgraph.codegen.prefetch import emit_next_members, emit_nexts
from opgraph.codegen.reduction_finalize import emit_totals
from opgraph.codegen.row_buffers import Rows, emit_buffers
from opgraph.codegen.row_passes import emit_passes
from opgraph.codegen.row_reductions import emit_finish, emit_reduced, emit_reduction_members
from opgraph.loops.layout import CONTIGUOUS, GROUP, RUN, TURNED, UNIFORM, Variant
from opgraph.loops.loop import Loop
from opgraph.schedule.cpu_body import goes_by_lanes
from opgraph.schedule.levels import CALL, PER_ROW
from opgraph.schedule.schedule import GROUPS, INTERLEAVED


def emit_rows(loop: Loop, variant: Variant, schedule: str, *, fits: bool = False) -> Functor:
    """The functor of a loop over rows, for the schedule of that name.

    Args:
        fits: true if there is always room for the values of a row that are kept for a later pass.
    """
    emitter = Emitter(loop, replace(variant, operands=variant.operands.replace(TURNED, CONTIGUOUS)))
    emitter.interleaved = schedule in INTERLEAVED
    rows = Rows(emitter, schedule, fits=fits)
    if not emitter.interleaved:
        emitter.by_lanes = goes_by_lanes(emitter) and all(
            compute_type(emitter.dtypes[name]) == "float" for name in rows.kept
        )
        emitter.peaks = _peaks(emitter) if emitter.by_lanes else {}
        emitter.divisors = emitter.row_divisors()
    emitter.put("struct Fused {")
    emitter.members()
    _emit_members(rows)
    if emitter.interleaved:
        _emit_interleaved_members(emitter, variant, is_grouped=schedule in GROUPS)
    else:
        emit_next_members(rows)
    emitter.bind()
    if not emitter.interleaved:
        emit_nexts(rows)
    emit_buffers(rows)
    emitter.hoisted("call", CALL)
    emitter.hoisted("row", PER_ROW)
    _emit_run(emitter)
    emit_passes(rows)
    if emitter.interleaved:
        emit_reduced(emitter, rows.passes, "const double (*total)[og::side], double count, og::i64 n", "total[{}][i]")
    else:
        emit_reduced(emitter, rows.passes, "const Totals& total, double count", "total({})", of=", class Totals")
    emit_finish(emitter)
    emit_totals(emitter)
    return emitter.functor()


def _peaks(emitter: Emitter) -> dict[str, str]:
    """Maps the result of each Exp(v - ReduceMax(v)) to the result of its ReduceMax."""
    made = {s.result: s for s in emitter.loop.statements}
    found = {}
    for s in emitter.varying():
        distance = made.get(str(s.args[0])) if s.kind == "Exp" else None
        if distance is None or distance.kind != "Subtract" or distance.rounds:
            continue
        largest = made.get(str(distance.args[1]))
        if largest is not None and largest.kind == "ReduceMax" and largest.args[0] == distance.args[0]:
            found[s.result] = largest.result
    return found


def _emit_members(rows: Rows) -> None:
    """Adds the passes, their reductions, and the values that exist once for each run or row."""
    emitter = rows.emitter
    emitter.put(f"  static constexpr bool stores = {'true' if rows.passes[-1].stores else 'false'};")
    peaks = dict.fromkeys(emitter.peaks.values(), "peak")
    emit_reduction_members(emitter, rows.passes, peaks)
    for load, kind in emitter.loads:
        if kind == RUN:
            emitter.put(f"  {compute_type(load.dtype)} {emitter.value(load.name)};")
    for name in peaks:
        emitter.put(f"  bool {name}_near;")


def _emit_run(emitter: Emitter) -> None:
    """Adds `run`, which sets the values that change with the runs of a row."""
    emitter.put("  OG_FN void run() {")
    for load, kind in emitter.loads:
        if kind == RUN:
            emitter.put(f"    {emitter.value(load.name)} = {emitter.read(load, kind=UNIFORM)};")
    emitter.put("  }")


def _emit_interleaved_members(emitter: Emitter, variant: Variant, *, is_grouped: bool) -> None:
    """Adds members for cpu/outer_reduction.h and cpu/grouped_reduction.h: transposed operands, and groups of lanes.

    Args:
        variant: marks transposed operands, which the emitter treats as contiguous.
    """
    put, loop = emitter.put, emitter.loop
    items = [storage_type(d) for d in (*(x.dtype for x in loop.loads), *(s.dtype for s in loop.stores))]
    turned = [i for i, kind in enumerate(variant.operands) if kind == TURNED]
    sizes = "".join(f"k == {i} ? (int)sizeof({items[i]}) : " for i in turned)
    put(f"  static constexpr int transposed(int k) {{ return {sizes}0; }}")
    put(f"  static constexpr int loads = {len(loop.loads)};")
    if not is_grouped:
        return
    places = " || ".join(f"k == {i}" for i, kind in enumerate(variant.operands) if kind == GROUP)
    put(f"  static constexpr bool per_group(int k) {{ return {places or 'k < 0'}; }}")
    moving = [x for x in emitter.element_loads() if emitter.kinds[x.name] != RUN]
    moved = [*(emitter.positions[x.name] for x in moving), *(len(loop.loads) + i for i, _ in emitter.elementwise())]
    places = " || ".join(f"k == {i}" for i in moved)
    put(f"  static constexpr bool moves(int k) {{ return {places or 'k < 0'}; }}")
    put(f"  static constexpr bool runs = {'true' if len(moving) < len(emitter.element_loads()) else 'false'};")
    put("  og::i64 group;")
    put("  OG_FN void ahead(og::i64 at) const {")
    for load in moving:
        if emitter.kinds[load.name] == CONTIGUOUS and not load.is_position:
            put(f"    og::fetch({load.name} + at);")
    put("  }")
