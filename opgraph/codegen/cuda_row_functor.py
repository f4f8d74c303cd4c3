"""Emits a loop over rows for CUDA, pass by pass, as `opgraph.codegen.emit` does (cuda/inner_reduction.cuh)."""

from __future__ import annotations

from opgraph.codegen.arithmetic import compute_type, storage_type
from opgraph.codegen.emitter import Emitter, Functor
from opgraph.codegen.reduction_finalize import emit_totals
from opgraph.codegen.row_reductions import emit_finish, emit_reduced, emit_reduction_members
from opgraph.loops.layout import RUN, STRIDED, Variant
from opgraph.loops.loop import Load, Loop
from opgraph.schedule.levels import CALL, PER_ROW
from opgraph.schedule.reduction_passes import Pass
from opgraph.schedule.row_registers import RowReads


def emit_cuda_rows(loop: Loop, variant: Variant, approximate: frozenset[str]) -> Functor:
    """The functor of one variant of a loop over rows.

    Args:
        approximate: results of the statements that are computed by og::fast.
    """
    emitter = Emitter(loop, variant, approximate, "fast")
    emitter.divisors = emitter.row_divisors()
    reads = RowReads(emitter)
    emitter.put("struct Fused {")
    emitter.members()
    emit_reduction_members(emitter, reads.held, {})
    counts = [len(p.reductions) for p in reads.held]
    emitter.put(f"  static constexpr int terms = {max([*counts[:-1], counts[-1] + len(emitter.sums)])};")
    emitter.bind()
    emitter.hoisted("call", CALL)
    emitter.hoisted("row", PER_ROW)
    _emit_packs(emitter, reads)
    _emit_fetch(emitter, reads)
    _emit_compute(emitter, reads)
    emit_reduced(emitter, reads.held, "const Addend* total, Addend count", "total[{}]")
    emit_finish(emitter)
    if emitter.sums:
        emit_totals(emitter)
    return emitter.functor()


def _emit_packs(emitter: Emitter, reads: RowReads) -> None:
    """Adds the struct of V loaded elements and the values that passes keep for each other."""
    emitter.put("  template <int V> struct Packs {")
    for load in emitter.element_loads():
        if not load.is_position:
            length = "1" if emitter.kinds[load.name] == RUN else "V"
            emitter.put(f"    og::Pack<{storage_type(load.dtype)}, {length}> {load.name};")
    for name in reads.kept:
        emitter.put(f"    {compute_type(emitter.dtypes[name])} {name}[V];")
    emitter.put("  };")


def _emit_fetch(emitter: Emitter, reads: RowReads) -> None:
    """Adds the loads of a pass. For a held row each load happens once. The exceptions are loads that are the same for
    many rows, marked by a bit of `small`: they are in a cache."""
    lines: list[tuple[str, str]] = []
    for number, (one, again) in enumerate(zip(reads.held, reads.again, strict=True)):
        in_held, in_again = ({x.name for x in reads.of(p)} for p in (one, again))
        for load in emitter.element_loads():
            position, name = emitter.positions[load.name], load.name
            when = []
            if name in reads.first and reads.fetched_in(name) == number:
                when.append(f"how == og::Reading::once && !(small >> {position} & 1)")
            if name in in_held:
                when.append(f"how == og::Reading::cached && small >> {position} & 1")
            if name in in_again:
                when.append("how == og::Reading::again")
            if when:
                condition = " || ".join(f"({w})" if len(when) > 1 else w for w in when)
                lines.append((f"pass == {number} && ({condition})", f"in.{name} = {_fetched(emitter, load)};"))
    head = "  template <int pass, og::Reading how, unsigned long long small"
    any_of = " || ".join(f"({condition})" for condition, _ in lines)
    emitter.put(f"{head}> static constexpr bool fetches() {{ return {any_of or 'pass < 0'}; }}")
    # loose: bits of the operands whose packs are not aligned.
    emitter.put(f"{head}, unsigned long long loose, int V> OG_FN void fetch(Packs<V>& in, og::i64 i) const {{")
    for condition, text in lines:
        emitter.put(f"    if constexpr ({condition}) {text}")
    emitter.put("  }")


def _fetched(emitter: Emitter, load: Load) -> str:
    kind = emitter.kinds[load.name]
    if kind == RUN:
        return f"{{{{{load.name}[0]}}}}"
    if kind == STRIDED:
        return f"og::gather_pack<V>({load.name}, i, {load.name}_step)"
    return f"og::load_run<(loose >> {emitter.positions[load.name]} & 1), V>({load.name} + i)"


def _emit_compute(emitter: Emitter, reads: RowReads) -> None:
    """Adds V elements of a pass: their addends for reduction k go to s[k], followed by those for each sum."""
    put = emitter.put
    put("  template <int pass, bool held, int V>")
    put("  OG_FN void compute(Packs<V>& in, og::i64 i, bool inside, Addend (*s)[V]) const {")
    for number, (one, again) in enumerate(zip(reads.held, reads.again, strict=True)):
        if (one.statements, one.read, one.kept) == (again.statements, again.read, again.kept):
            _emit_pass(emitter, one, f"pass == {number}")
        else:
            _emit_pass(emitter, one, f"pass == {number} && held")
            _emit_pass(emitter, again, f"pass == {number} && !held")
    put("  }")


def _emit_pass(emitter: Emitter, one: Pass, condition: str) -> None:
    if not (one.statements or one.reductions or one.stores):
        return
    put, used = emitter.put, one.reads(emitter.loop)
    put(f"    if constexpr ({condition}) {{")
    stores = emitter.elementwise() if one.stores else []
    for i, store in stores:
        put(f"      {compute_type(store.dtype)} r{i}[V];")
    put("      OG_UNROLL for (int k = 0; k < V; ++k) {")
    for load in emitter.element_loads():
        if load.name in used:
            at = "0" if emitter.kinds[load.name] == RUN else "k"
            text = emitter.read(load, "(i + k)") if load.is_position else f"og::load(in.{load.name}.item[{at}])"
            put(f"        const {compute_type(load.dtype)} {emitter.value(load.name)} = {text};")
    for name in one.read:
        put(f"        const {compute_type(emitter.dtypes[name])} {name} = in.{name}[k];")
    for s in one.statements:
        text = f"const {compute_type(s.dtype)} {s.result} = {emitter.expression(s)};"
        put(f"        {text}  // {s.kind} #{s.tag}", s.tag)
    for name in one.kept:
        put(f"        in.{name}[k] = {name};")
    for k, s in enumerate(one.reductions):
        each = s.row.each.format(src=emitter.argument(s, 0))
        put(f"        s[{k}][k] = {each};  // {s.kind} #{s.tag}", s.tag)
    for k, i in enumerate(emitter.sums if one.stores else ()):
        put(f"        s[{len(one.reductions) + k}][k] = {emitter.value(emitter.loop.stores[i].value)};")
    for i, store in stores:
        put(f"        r{i}[k] = {emitter.value(store.value)};")
    put("      }")
    for i, _ in stores:
        scattered = emitter.store_kinds[i] == STRIDED
        text = f"scatter_pack<V>(y{i}, i, y{i}_step, r{i})" if scattered else f"store_pack<V>(y{i} + i, r{i})"
        put(f"      if (inside) og::{text};")
    put("    }")
