"""The computation of an element of a row in each pass: one at a time, or 16 if all are in f32 (cpu/row_lanes.h)."""

from __future__ import annotations

from opgraph.codegen.emitter import index_text
from opgraph.codegen.lanes import emit_results
from opgraph.codegen.prefetch import emit_ahead
from opgraph.codegen.row_buffers import Rows
from opgraph.loops.layout import RUN, STRIDED
from opgraph.loops.loop import Load, Store
from opgraph.schedule.reduction_passes import Pass


def emit_passes(rows: Rows) -> None:
    """Adds `element`, which computes element i of the row, or n elements from there on.

    Their addends for reduction k go to s[k * apart]; the addends of sums follow.
    """
    emitter, put = rows.emitter, rows.emitter.put
    if emitter.by_lanes:
        put("  static constexpr bool by_lanes = true;")
        written = next((f"og::apart_from_line({name})" for name in rows.along()), "0")
        put(f"  OG_FN og::i64 apart_from_line() const {{ return {written}; }}")
        if not rows.is_persistent:
            emit_results(emitter)
        _emit_nearness(rows)
        emit_ahead(rows)
        count = ", class N = og::i64" if rows.is_persistent else ""  # or og::Some of a vector
        put(f"  template <int pass, bool keep, int apart, class F = float, bool near = false{count}>")
        put(f"  OG_FN void element(og::i64 i, F* s, {'N' if count else 'og::i64'} n = 1) const {{")
    else:
        place = ", og::i64 at" if rows.counter == "at" else ""  # `at` of the row of lane i
        put(f"  template <int pass, bool keep, int apart> OG_FN void element(og::i64 i{place}, Addend* s) const {{")
    for number, (one, again) in enumerate(zip(rows.passes, rows.again, strict=True)):
        if rows.passes == rows.again:
            _emit_pass(rows, one, f"pass == {number}")
        else:
            _emit_pass(rows, one, f"pass == {number} && keep")
            _emit_pass(rows, again, f"pass == {number} && !keep")
    put("  }")


def _emit_nearness(rows: Rows) -> None:
    """Adds `nears`, true for passes whose exponentials are simpler in rows with all elements near the largest one."""
    emitter = rows.emitter
    both = zip(rows.passes, rows.again, strict=True)
    passes = [n for n, p in enumerate(both) if any(s.result in emitter.peaks for q in p for s in q.statements)]
    chosen = " || ".join(f"pass == {n}" for n in passes)
    emitter.put(f"  static constexpr bool nears(int pass) {{ return {chosen or 'pass < 0'}; }}")
    near = " && ".join(f"{name}_near" for name in dict.fromkeys(emitter.peaks.values()))
    emitter.put(f"  OG_FN bool all_near() const {{ return {near or 'false'}; }}")


def _emit_pass(rows: Rows, one: Pass, condition: str) -> None:
    emitter, put = rows.emitter, rows.emitter.put
    put(f"    if constexpr ({condition}) {{")
    used = one.reads(emitter.loop)
    for load in emitter.element_loads():
        if load.name in used and (emitter.kinds[load.name] != RUN or emitter.by_lanes):
            value = emitter.value(load.name)
            put(f"      const {emitter.apply_type(load.dtype)} {value} = {_taken(rows, load)};")
    n = "og::i64(16)" if rows.is_persistent else "n"  # buffers have room for whole vectors
    for name in one.read:
        kept = rows.waiting(name)
        text = f"og::elements<F>({kept} + i, {n})" if emitter.by_lanes else f"{kept}[{rows.counter}]"
        put(f"      const {emitter.apply_type(emitter.dtypes[name])} {name} = {text};")
    for s in one.statements:
        text = f"const {emitter.apply_type(s.dtype)} {s.result} = {emitter.expression(s)};"
        put(f"      {text}  // {s.kind} #{s.tag}", s.tag)
    for name in one.kept:
        kept = rows.waiting(name)
        text = (
            f"og::store_elements({kept} + i, {name}, {n})" if emitter.by_lanes else f"{kept}[{rows.counter}] = {name}"
        )
        put(f"      {text};")
    for k, s in enumerate(one.reductions):
        each = s.row.each.format(src=emitter.argument(s, 0))
        put(f"      s[{k} * apart] = {each};  // {s.kind} #{s.tag}", s.tag)
    if one.stores:
        for i, store in emitter.elementwise():
            put(f"      {_given(rows, i, store)}")
        for k, i in enumerate(emitter.sums):
            value = emitter.in_apply(emitter.loop.stores[i].value)
            put(f"      s[{len(one.reductions) + k} * apart] = {value};")
    put("    }")


def _taken(rows: Rows, load: Load) -> str:
    """C++ for element i of a load, or n elements from there on."""
    emitter, kind = rows.emitter, rows.emitter.kinds[load.name]
    if not emitter.by_lanes:
        return emitter.read(load, rows.counter)
    if kind == RUN:
        return f"this->{emitter.value(load.name)}"
    step = f", {load.name}_step" if kind == STRIDED else ""
    return f"og::elements<F>({load.name} + {index_text('i', load.name, kind)}{step}, n)"


def _given(rows: Rows, i: int, store: Store) -> str:
    """The line that writes element i of a result, or n elements from there on."""
    emitter, kind = rows.emitter, rows.emitter.store_kinds[i]
    value = emitter.in_apply(store.value)
    if not emitter.by_lanes:
        return emitter.stored(i, store, rows.counter, value)
    place = f"y{i} + {index_text('i', f'y{i}', kind)}"
    if kind == STRIDED:
        return f"og::store_elements({place}, y{i}_step, {value}, n);"
    if rows.is_persistent or i == rows.place:
        return f"og::store_elements({place}, {value}, n);"
    return f"og::store_results(out, {place}, {value}, n);"
