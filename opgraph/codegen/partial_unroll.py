"""Packs of CUDA kernels with much arithmetic: the source text has a few of their elements, in a loop.

`kernels/cuda/pointwise_unrolled.cuh` runs it.

NVRTC takes about 60 us per machine instruction, and the text of such a kernel would have 13 or 25 elements.
"""

from __future__ import annotations

from opgraph.codegen.arithmetic import storage_type
from opgraph.codegen.emitter import Emitter
from opgraph.codegen.packs import emit_applied
from opgraph.loops.layout import STRIDED


def emit_unrolled(emitter: Emitter) -> None:
    """Adds `group`, the arithmetic of the next elements of a pack, and the functions that move results and the packs of
    a last tile."""
    put = emitter.put
    loads = emitter.element_loads()
    packed = [x for x in loads if not x.is_position]
    stores = emitter.elementwise()
    put("  template <int V> struct Held {")
    for x in packed:
        put(f"    og::Words<{storage_type(x.dtype)}, V> {x.name};")
    put("  };")
    put("  template <int V> struct Made {")
    for i, store in stores:
        put(f"    og::Words<{storage_type(store.dtype)}, V> y{i};")
    put("  };")
    put("  template <int V> OG_FN void fetch(Held<V>& in, og::i64 i) const {")
    put("    Packs<V> packs;")
    put("    fetch(packs, i);")
    for x in packed:
        put(f"    in.{x.name}.of(packs.{x.name});")
    put("  }")
    put("  template <int V> OG_FN void fetch_some(Held<V>& in, og::i64 i, int left) const {")
    for x in packed:
        put(f"    in.{x.name}.of(og::load_some<V>({_at(x.name, emitter.kinds[x.name])}, left));")
    put("  }")
    put("  template <int V> OG_FN void put(const Made<V>& out, og::i64 i) const {")
    for i, _ in stores:
        if emitter.store_kinds[i] == STRIDED:
            put(f"    og::store_some<V>({_at(f'y{i}', STRIDED)}, V, out.y{i}.pack());")
        else:
            put(f"    og::store_whole<V>(y{i} + i, out.y{i}.pack());")
    put("  }")
    put("  template <int V> OG_FN void put_some(const Made<V>& out, og::i64 i, int left) const {")
    for i, _ in stores:
        put(f"    og::store_some<V>({_at(f'y{i}', emitter.store_kinds[i])}, left, out.y{i}.pack());")
    put("  }")
    put(f"  template <int G, int V> OG_FN void group(Held<V>& in, Made<V>& out, og::i64 i{emitter.addends()}) const {{")
    for x in packed:
        put(f"    const auto {x.name}_now = in.{x.name}.template take<G>();")
    emit_applied(emitter, "G", "{}_now")
    for i, store in stores:
        put(f"    out.y{i}.give(og::stored<{storage_type(store.dtype)}>(r{i}));")
    put("  }")


def _at(name: str, kind: str) -> str:
    """C++ for an operand's address at element i, and for its step."""
    return f"{name} + i * {name}_step, {name}_step" if kind == STRIDED else f"{name} + i, 1"
