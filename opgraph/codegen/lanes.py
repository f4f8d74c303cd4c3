"""16 floats at a time on the CPU: with AVX-512, kernels whose arithmetic is all in f32 do not need a vectoriser."""

from __future__ import annotations

from collections.abc import Iterable

from opgraph.codegen.emitter import Emitter
from opgraph.loops.layout import CONTIGUOUS, STRIDED


def emit_lanes(emitter: Emitter) -> None:
    """Adds `lanes`, which computes n of the 16 elements from i on: see kernels/math/lanes.h.

    The addend of element i + j for sum k goes to s[k * og::strip + j]; it is zero for j >= n.
    """
    put = emitter.put
    put("#if OG_LANES")
    put("  static constexpr bool by_lanes = true;")
    emit_results(emitter)
    emit_aligned(emitter)
    put(f"  OG_FN void lanes(og::i64 i, og::i64 n{emitter.addends()}) const {{")
    args = [lanes_of(x.name, emitter.kinds[x.name]) for x in emitter.element_loads()]
    for i, store in enumerate(emitter.loop.stores):
        put(f"    {'og::bools' if store.dtype == 'boolean' else 'og::floats'} r{i};")
    results = [f"r{i}" for i in range(len(emitter.loop.stores))]
    put(f"    apply<og::floats>({', '.join([*args, *results])});")
    emit_stored_lanes(emitter, "r{}", range(len(emitter.sums)))
    put("  }")
    put("#endif")


def lanes_of(name: str, kind: str) -> str:
    """C++ for n of the 16 elements of an operand from i on."""
    if kind == STRIDED:
        return f"og::gather_lanes({name} + i * {name}_step, {name}_step, n)"
    return f"og::read_lanes({name} + i, n)"


def emit_results(emitter: Emitter) -> None:
    """Adds `out`, which writes results, and the members that kernels/cpu/span.h reads to set it up."""
    size = " + ".join(f"sizeof(*y{i})" for i, _ in emitter.elementwise()) or "0"
    emitter.put("  og::Results out;")
    emitter.put(f"  static constexpr int loads = {len(emitter.loop.loads)};")
    emitter.put(f"  static constexpr og::i64 result_bytes = {size};")


def emit_aligned(emitter: Emitter) -> None:
    """Adds `apart_from_line`: the number of elements from i to the next position where a vector of a result begins."""
    along = (i for i, _ in emitter.elementwise() if emitter.store_kinds[i] != STRIDED)
    apart = next((f"og::apart_from_line(y{i} + i)" for i in along), "0")
    emitter.put(f"  OG_FN og::i64 apart_from_line(og::i64 i) const {{ return {apart}; }}")


def emit_stored_lanes(emitter: Emitter, results: str, sums: Iterable[int]) -> None:
    """Adds the lines that write n of 16 elements from i on, and their addends for some sums.

    Args:
        results: a format: index of a store -> the name of its result.
    """
    for i, _ in emitter.elementwise():
        if emitter.store_kinds[i] == STRIDED:
            emitter.put(f"    og::scatter_lanes(y{i} + i * y{i}_step, y{i}_step, {results.format(i)}, n);")
        else:
            emitter.put(f"    out.write(y{i} + i, {results.format(i)}, n);")
    for k in sums:
        added = f"og::first_lanes({results.format(emitter.sums[k])}, n)"
        emitter.put(f"    og::store_lanes(s + {k} * og::strip, {added}, og::lane_count);")


def emit_halves(emitter: Emitter) -> None:
    """Adds the conversion of contiguous f16 operands, a strip of elements at a time: GCC 12 vectorises it in no loop.

    `widen` converts the f16 operands to f32. `staged` computes element i of the row, j of the strip, from them and from
    the other operands in their own types. `narrow` rounds f16 results.
    """
    loads = [x.name for x in emitter.element_loads() if x.dtype == "f16" and emitter.kinds[x.name] == CONTIGUOUS]
    stores = [f"y{i}" for i, s in emitter.elementwise() if s.dtype == "f16" and emitter.store_kinds[i] == CONTIGUOUS]
    if not loads + stores:
        return
    room = {name: f"room[{k}]" for k, name in enumerate(loads + stores)}
    put = emitter.put
    put(f"  static constexpr int halves = {len(room)};")
    put("  OG_FN void widen(float (*room)[og::strip], og::i64 first, og::i64 n) const {")
    for name in loads:
        put(f"    og::widen({room[name]}, {name} + first, n);")
    put("  }")
    put(f"  OG_FN void staged(float (*room)[og::strip], og::i64 i, og::i64 j{emitter.addends()}) const {{")
    emitter.results([f"{room[x.name]}[j]" if x.name in room else emitter.read(x) for x in emitter.element_loads()])
    for i, store in emitter.elementwise():
        name = f"y{i}"
        put(f"    {room[name]}[j] = r{i};" if name in room else f"    {emitter.stored(i, store)}")
    emitter.emit_addends()
    put("  }")
    put("  OG_FN void narrow(float (*room)[og::strip], og::i64 first, og::i64 n) const {")
    for name in stores:
        put(f"    og::narrow({name} + first, {room[name]}, n);")
    put("  }")
