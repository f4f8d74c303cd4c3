"""Packs of kernels with much arithmetic on CUDA: the text has a few of their elements, in a loop (kernels/rolled.cuh).

NVRTC takes some 60 us for a machine instruction, and the text of such a kernel would have 13 or 25 elements.
"""

from __future__ import annotations

from opgraph.codegen.arithmetic import compute_type, storage_type
from opgraph.codegen.emitter import Emitter
from opgraph.codegen.packs import put_applied
from opgraph.ir import dtypes
from opgraph.loops.layout import CONTIGUOUS, STRIDED

#: Instructions per element, by the records' costs, beyond which the text has a few elements: below, NVRTC takes 0.1 s
#: at most, and memory decides how long the kernel takes.
ROLLED_COST = 64
#: One whose memory takes longer than its arithmetic, so beyond this one. Then its loads have to be many at a time.
_BY_MEMORY_COST = 100
#: Machine instructions for each byte that an H200 copies meanwhile (7.75, specs/sass.md), and what the estimate is off.
_MEANWHILE = 10
#: Machine instructions of the elements that the text has: NVRTC takes some 0.06 s for them. With fewer elements more
#: than 3% of a kernel's instructions would be moves of what comes next.
_CODE = 1000
#: Machine instructions for one of the records' costs (sm_90, kernels of specs/sass.md): in f64, in f32, by approximate
#: instructions.
_WIDE, _EXACT, _APPROXIMATE = 3.6, 1.65, 0.7


def group_of(emitter: Emitter, vector: int) -> int:
    """How many elements of a pack the text has, a divisor of `vector`; 0: all of each pack, as the kernel is small."""
    if emitter.cost <= ROLLED_COST:
        return 0
    wide = any(compute_type(s.dtype) == "double" for s in emitter.loop.statements)
    estimate = 0.0
    for s in emitter.varying():
        factor = _WIDE if wide else _APPROXIMATE if s.result in emitter.approximate else _EXACT
        estimate += factor * s.record.cost
    if emitter.cost <= _BY_MEMORY_COST and estimate <= _MEANWHILE * _bytes(emitter):
        return 0
    group = vector
    # One f32 at a time takes 4% more instructions: constants for one, where two can share them.
    while group > (1 if wide else 2) and group * estimate > _CODE:
        group //= 2
    return group


def _bytes(emitter: Emitter) -> int:
    """That an element reads and writes."""
    kinds, loop = emitter.variant.operands, emitter.loop
    read = [(x.dtype, kind) for x, kind in emitter.loads if not x.is_position]
    moved = [*read, *((s.dtype, kind) for s, kind in zip(loop.stores, kinds[len(loop.loads) :], strict=True))]
    return sum(dtypes.BY_NAME[dtype].itemsize for dtype, kind in moved if kind in (CONTIGUOUS, STRIDED))


def put_rolled(emitter: Emitter) -> None:
    """`group`, the arithmetic of the next elements of a pack, and what moves results and packs of a last tile."""
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
    put_applied(emitter, "G", "{}_now")
    for i, store in stores:
        put(f"    out.y{i}.give(og::stored<{storage_type(store.dtype)}>(r{i}));")
    put("  }")


def _at(name: str, kind: str) -> str:
    """C++ for an operand's address at i, and for its step."""
    return f"{name} + i * {name}_step, {name}_step" if kind == STRIDED else f"{name} + i, 1"
