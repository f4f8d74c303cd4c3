"""f16 operands on the CPU, a strip at a time: converted by instructions that GCC 12 finds in no loop."""

from __future__ import annotations

from opgraph.codegen.emitter import Emitter
from opgraph.loops.layout import CONTIGUOUS


def put_halves(emitter: Emitter) -> None:
    """Adds to a functor what the skeletons do a strip of elements with, if contiguous f16 is among the operands.

    `widen` makes f32 of the f16 operands, `staged` does element i of the row, j of the strip, on those and on the
    other operands as they are, and `narrow` rounds f16 results.
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
    emitter.put_addends()
    put("  }")
    put("  OG_FN void narrow(float (*room)[og::strip], og::i64 first, og::i64 n) const {")
    for name in stores:
        put(f"    og::narrow({name} + first, {room[name]}, n);")
    put("  }")
