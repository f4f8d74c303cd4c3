"""Choices between two costly values on the CPU: each element runs through the side that it needs, not through both.

For `where(x > 0, f(x), g(x))`, vector code computes f and g for every element. Packing the elements of a strip by the
condition (kernels/cpu/branch_compaction.h) costs some instructions for each operand and result; then each element
runs through one side only. If either side alone costs more than packing, this pays for any data, however often each
side is taken. It is done only in this case.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraph.codegen.emitter import Emitter
from opgraph.codegen.lanes import emit_results, emit_stored_lanes, lanes_of
from opgraph.codegen.shifts import member
from opgraph.loops.layout import ADDED, CONTIGUOUS
from opgraph.loops.loop import Arg, Statement
from opgraph.schedule.cpu_body import Branches


def emit_branches(emitter: Emitter, branches: Branches) -> None:
    """Adds the members that kernels/cpu/branch_compaction.h requires, in place of those for one element or 16.

    Operands and results are arrays by index. `fetch` reads operands, `condition` and `branch` compute, `finish` writes
    results and the addends for the cells of columns: for 16 floats, or for a strip if there are no lanes.
    """
    put = emitter.put
    loads, stores = emitter.element_loads(), emitter.loop.stores
    sums = " || ".join(f"k == {i}" for i in emitter.sums if emitter.store_kinds[i] == ADDED)
    put(f"  static constexpr int branch_inputs = {len(loads)}, branch_results = {len(stores)};")
    put("  static constexpr bool makes(bool side, int k) {")
    for side, text in zip(branches.sides, ("!side", "side"), strict=True):
        made = " || ".join(f"k == {k}" for k in range(len(stores)) if side.makes(k))
        put(f"    if ({text}) return {made or 'false'};")
    put("    return false;")
    put("  }")
    put(f"  static constexpr bool stays_packed(int k) {{ return {sums or 'false'}; }}")
    if emitter.sums:
        places = "".join(f"k == {k} ? {i} : " for k, i in enumerate(emitter.sums))
        put(f"  static constexpr int sum_result(int k) {{ return {places}-1; }}")
    put("  template <class F> OG_FN og::mask<F> condition(const F* x) const {")
    _emit_body(emitter, branches.condition)
    put(f"    return {emitter.in_apply(branches.condition[-1].result)};")
    put("  }")
    told = [any(s.result in emitter.positive for s in side.statements) for side in branches.sides]
    put(f"  static constexpr bool has_ends(bool side) {{ return side ? {told[1]:d} : {told[0]:d}; }}")
    shifts = [[s.result for s in side.statements if s.result in emitter.shifted] for side in branches.sides]
    put(f"  static constexpr bool has_shifts(bool side) {{ return side ? {any(shifts[1]):d} : {any(shifts[0]):d}; }}")
    near = [" && ".join(f"{member(r)}.near" for r in side) or "true" for side in shifts]
    put(f"  OG_FN bool near(bool side) const {{ return side ? {near[1]} : {near[0]}; }}")
    put("  template <bool side, class F, class Ends> OG_FN void branch(const F* x, F* r, Ends& ends) const {")
    emitter.told_ends = True
    for holds, side in reversed(list(enumerate(branches.sides))):
        put("    if constexpr (side) {" if holds else "    } else {")
        _emit_body(emitter, side.statements, side.results)
        for k, result in enumerate(side.results):
            if side.makes(k):
                text = emitter.in_apply(result) if isinstance(result, str) else emitter.literal(result, "float", True)
                put(f"    r[{k}] = {text};")
    emitter.told_ends = False
    put("    }")
    put("  }")
    put("#if OG_LANES")
    _emit_lanes(emitter)
    put("#else")
    _emit_strips(emitter)
    put("#endif")


def _emit_body(emitter: Emitter, statements: Sequence[Statement], results: Sequence[Arg] = ()) -> None:
    """Adds the operands and statements of one side."""
    used = {a for s in statements for a in s.args if isinstance(a, str)} | {r for r in results if isinstance(r, str)}
    for k, x in enumerate(emitter.element_loads()):
        if x.name in used:
            emitter.put(f"    const F {emitter.value(x.name)} = x[{k}];")
    shared = set()
    for s in statements:
        base = emitter.shifted[s.result].base if s.result in emitter.shifted else None
        if base and emitter.told_ends and base not in shared:
            shared.add(base)
            emitter.put(f"    const og::Exponential<F> exp_{base} = og::exponential_of({emitter.value(base)});")
        emitter.statements([s])


def _emit_lanes(emitter: Emitter) -> None:
    put = emitter.put
    emit_results(emitter)
    put("  OG_FN void fetch(og::floats* x, og::i64 i, og::i64 n) const {")
    for k, x in enumerate(emitter.element_loads()):
        put(f"    x[{k}] = {lanes_of(x.name, emitter.kinds[x.name])};")
    put("  }")
    put(f"  OG_FN void finish(const og::floats* r, og::i64 i, og::i64 n{emitter.addends()}) const {{")
    kept = [k for k, i in enumerate(emitter.sums) if emitter.store_kinds[i] != ADDED]
    emit_stored_lanes(emitter, "r[{}]", kept)
    put("  }")


def _emit_strips(emitter: Emitter) -> None:
    put = emitter.put
    put("  OG_FN void fetch(float (*x)[og::strip], og::i64 first, og::i64 n) const {")
    for k, x in enumerate(emitter.element_loads()):
        if x.dtype == "f16" and emitter.kinds[x.name] == CONTIGUOUS:
            put(f"    og::widen(x[{k}], {x.name} + first, n);")
        else:
            put("    OG_VECTORIZE")
            put(f"    for (og::i64 i = 0; i < n; ++i) x[{k}][i] = {emitter.read(x, '(first + i)')};")
    put("  }")
    put(f"  OG_FN void finish(const float (*r)[og::strip], og::i64 first, og::i64 n{emitter.addends()}) const {{")
    for i, store in emitter.elementwise():
        if store.dtype == "f16" and emitter.store_kinds[i] == CONTIGUOUS:
            put(f"    og::narrow(y{i} + first, r[{i}], n);")
        else:
            put("    OG_VECTORIZE")
            put(f"    for (og::i64 i = 0; i < n; ++i) {emitter.stored(i, store, '(first + i)', f'r[{i}][i]')}")
    for k, i in enumerate(emitter.sums):
        if emitter.store_kinds[i] != ADDED:
            put(f"    for (og::i64 i = 0; i < n; ++i) s[{k} * og::strip + i] = r[{i}][i];")
    put("  }")
