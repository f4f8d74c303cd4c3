"""Emits a loop as C++: the functor, which differs between kernels. Skeletons and arithmetic are in `kernels/`.

The text depends only on the loop and the variant, so one loop has the same text in every process. It contains no name
of a model: operands are x0, x1, ..., values t0, t1, ..., results y0, y1, ..., and each statement ends with the kind and
position of the op that it came from.
"""

from __future__ import annotations

from opgraph.codegen.branch_compaction import emit_branches
from opgraph.codegen.emitter import Emitter, Functor
from opgraph.codegen.lanes import emit_halves, emit_lanes
from opgraph.codegen.outlining import emit_functions
from opgraph.codegen.packs import emit_packs
from opgraph.codegen.partial_unroll import emit_unrolled
from opgraph.codegen.reduction_finalize import emit_totals
from opgraph.codegen.shifts import emit_shift_members, shift_lines, shifted_exponentials
from opgraph.codegen.strip_mining import emit_strips, row_starts
from opgraph.ir import dtypes
from opgraph.loops.layout import STRIDED, Variant
from opgraph.loops.loop import Loop
from opgraph.schedule.cpu_body import Body, Form, body_of
from opgraph.schedule.levels import CALL, PER_ROW


def emit_functor(
    loop: Loop, variant: Variant, *, packs: bool, rolled: bool = False, approximate: frozenset[str] = frozenset()
) -> Functor:
    """The functor of one kernel variant: its operands, its arithmetic, and how an element is loaded and stored.

    Args:
        packs: with `fetch` and `finish`, which move packs (CUDA); else with `lanes`, for 16 floats at a time, if all
            arithmetic is in f32, and with `element`, which the CPU's compiler vectorises.
        rolled: with `group`, for a few elements of a pack at a time.
        approximate: results of the statements that are computed by og::fast, on the CPU by og::reduced.
    """
    emitter = Emitter(loop, variant, approximate, "fast" if packs else "reduced")
    body = Body(Form.LOOP, by_lanes=False) if packs else body_of(emitter)
    emitter.by_lanes, branches = body.by_lanes, body.branches
    emitter.by_strips = body.form in (Form.STRIPS, Form.LANE_STRIPS)
    for side in branches.sides if branches else ():
        emitter.shifted |= shifted_exponentials(emitter, side.statements)
    emitter.put("struct Fused {")
    emitter.members()
    emit_shift_members(emitter)
    emitter.bind(row_starts(emitter) if emitter.by_strips else ())
    emitter.hoisted("call", CALL, shift_lines(emitter, CALL))
    emitter.hoisted("row", PER_ROW, shift_lines(emitter, PER_ROW))
    emitter.calls = emit_functions(emitter) if packs else {}
    if emitter.by_strips:
        emit_strips(emitter)
    elif branches:
        emit_branches(emitter, branches)
    else:
        emitter.apply()
        emitter.element()
    if emitter.sums:
        emit_totals(emitter)
    if packs:
        emit_packs(emitter)
        if rolled:
            emit_unrolled(emitter)
    else:
        _emit_strided_bytes(emitter)
        if not branches and not emitter.by_strips:
            emit_halves(emitter)
            if emitter.by_lanes:
                emit_lanes(emitter)
    return emitter.functor(body.form)


def _emit_strided_bytes(emitter: Emitter) -> None:
    """Adds `strided_bytes`: the element size of operand k where cpu/pointwise.h copies its elements at once, else 0."""
    if emitter.sums:
        return  # the skeleton of sums walks boxes
    strided = [x for x in emitter.element_loads() if emitter.kinds[x.name] == STRIDED and not x.is_position]
    if strided:
        places = [f"k == {emitter.positions[x.name]} ? {dtypes.BY_NAME[x.dtype].itemsize} : " for x in strided]
        emitter.put(f"  static constexpr int strided_bytes(int k) {{ return {''.join(places)}0; }}")
