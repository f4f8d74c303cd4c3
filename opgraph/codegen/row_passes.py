"""What an element of a row computes in each pass: one, or 16 at a time where all is in f32 (kernels/row_lanes.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opgraph.codegen.arithmetic import ELEMENT, storage_type
from opgraph.codegen.emit import index_text
from opgraph.codegen.row_ahead import put_ahead
from opgraph.codegen.row_reductions import row_of
from opgraph.loops.layout import RUN, STRIDED
from opgraph.loops.loop import Load, Store
from opgraph.loops.passes import Pass

if TYPE_CHECKING:
    from opgraph.codegen.rows import RowEmitter


def put_passes(emitter: RowEmitter) -> None:
    """Adds `element`: element i of the row, or n from there on.

    What they add to reduction k goes to s[k * apart]; the addends of sums follow.
    """
    put = emitter.put
    if emitter.by_lanes:
        put("  static constexpr bool by_lanes = true;")
        written = next((f"og::apart_from_line({name})" for name in emitter.along()), "0")
        put(f"  OG_FN og::i64 apart_from_line() const {{ return {written}; }}")
        _put_nearness(emitter)
        put_ahead(emitter)
        count = ", class N = og::i64" if emitter.at_once else ""  # or og::Some of a vector
        put(f"  template <int pass, bool keep, int apart, class F = float, bool near = false{count}>")
        put(f"  OG_FN void element(og::i64 i, F* s, {'N' if count else 'og::i64'} n = 1) const {{")
    else:
        place = ", og::i64 at" if emitter.counter == "at" else ""  # `at` of the row of lane i
        put(f"  template <int pass, bool keep, int apart> OG_FN void element(og::i64 i{place}, Addend* s) const {{")
    for number, (one, again) in enumerate(zip(emitter.passes, emitter.again, strict=True)):
        if not emitter.kept or emitter.place is not None:
            _put_pass(emitter, one, f"pass == {number}")
        else:
            _put_pass(emitter, one, f"pass == {number} && keep")
            _put_pass(emitter, again, f"pass == {number} && !keep")
    put("  }")


def _put_nearness(emitter: RowEmitter) -> None:
    """Which passes have exponentials that are simpler in rows whose elements are all near the largest one."""
    both = zip(emitter.passes, emitter.again, strict=True)
    passes = [n for n, p in enumerate(both) if any(s.result in emitter.peaks for q in p for s in q.statements)]
    chosen = " || ".join(f"pass == {n}" for n in passes)
    emitter.put(f"  static constexpr bool nears(int pass) {{ return {chosen or 'pass < 0'}; }}")
    near = " && ".join(f"{name}_near" for name in dict.fromkeys(emitter.peaks.values()))
    emitter.put(f"  OG_FN bool all_near() const {{ return {near or 'false'}; }}")


def _put_pass(emitter: RowEmitter, one: Pass, condition: str) -> None:
    put, levels = emitter.put, emitter.levels
    put(f"    if constexpr ({condition}) {{")
    wanted = [s.value for s in emitter.loop.stores if not s.per_row] if one.stores else []
    used = {a for s in (*one.statements, *one.reductions) for a in s.args if isinstance(a, str)} | set(wanted)
    for load, kind in emitter.loads:
        if load.name in used and levels[load.name] == ELEMENT and (kind != RUN or emitter.by_lanes):
            value = emitter.value(load.name)
            put(f"      const {emitter.apply_type(load.dtype)} {value} = {_taken(emitter, load, kind)};")
    n = "og::i64(16)" if emitter.at_once else "n"  # where elements wait there is room for whole vectors
    for name in one.read:
        kept = _kept(emitter, name)
        text = f"og::elements<F>({kept} + i, {n})" if emitter.by_lanes else f"{kept}[{emitter.counter}]"
        put(f"      const {emitter.apply_type(emitter.dtypes[name])} {name} = {text};")
    for s in one.statements:
        text = f"const {emitter.apply_type(s.dtype)} {s.result} = {emitter.expression(s)};"
        put(f"      {text}  // {s.kind} #{s.tag}", s.tag)
    for name in one.kept:
        kept = _kept(emitter, name)
        put(
            f"      og::put_elements({kept} + i, {name}, {n});"
            if emitter.by_lanes
            else f"      {kept}[{emitter.counter}] = {name};"
        )
    for k, s in enumerate(one.reductions):
        each = row_of(s).each.format(src=emitter.argument(s, 0))
        put(f"      s[{k} * apart] = {each};  // {s.kind} #{s.tag}", s.tag)
    if one.stores:
        for i, store in emitter.elementwise():
            put(f"      {_given(emitter, i, store)}")
        for k, i in enumerate(emitter.sums):
            value = emitter.in_apply(emitter.loop.stores[i].value)
            put(f"      s[{len(one.reductions) + k} * apart] = {value};")
    put("    }")


def _kept(emitter: RowEmitter, name: str) -> str:
    """Where values of the row wait for a later pass."""
    return f"b_{name}" if emitter.place is None else f"y{emitter.place}"


def _taken(emitter: RowEmitter, load: Load, kind: str) -> str:
    """Element i of a load, or n from there on."""
    if not emitter.by_lanes:
        return emitter.read(load, kind, emitter.counter)
    if kind == RUN:
        return f"this->{emitter.value(load.name)}"
    step = f", {load.name}_step" if kind == STRIDED else ""
    return f"og::elements<F>({load.name} + {index_text('i', load.name, kind)}{step}, n)"


def _given(emitter: RowEmitter, i: int, store: Store) -> str:
    """The line that writes element i of a result, or n from there on."""
    index, value = index_text(emitter.counter, f"y{i}", emitter.store_kinds[i]), emitter.in_apply(store.value)
    if not emitter.by_lanes:
        return f"y{i}[{index}] = og::store<{storage_type(store.dtype)}>({value});"
    step = f", y{i}_step" if emitter.store_kinds[i] == STRIDED else ""
    return f"og::put_elements(y{i} + {index}{step}, {value}, n);"
