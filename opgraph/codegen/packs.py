"""Packs of neighbouring elements on CUDA: `fetch` and `finish` of a functor move a pack at a time."""

from __future__ import annotations

from opgraph.codegen.arithmetic import compute_type, storage_type
from opgraph.codegen.emitter import Emitter
from opgraph.loops.layout import CONTIGUOUS, STRIDED


def emit_packs(emitter: Emitter) -> None:
    """Adds the loads of V neighbouring elements, and separately the rest, so that a skeleton can load several packs
    first."""
    put = emitter.put
    loads = emitter.element_loads()
    put("  template <int V> struct Packs {")
    packed = [x for x in loads if not x.is_position]
    for x in packed:
        put(f"    og::Pack<{storage_type(x.dtype)}, V> {x.name};")
    put("  };")
    put("  template <int V> OG_FN void fetch(Packs<V>& in, og::i64 i) const {")
    for x in packed:
        if emitter.kinds[x.name] == CONTIGUOUS:
            put(f"    in.{x.name} = og::load_pack<V>({x.name} + i);")
        else:
            put(f"    in.{x.name} = og::gather_pack<V>({x.name}, i, {x.name}_step);")
    put("  }")
    put(f"  template <int V> OG_FN void finish(const Packs<V>& in, og::i64 i{emitter.addends()}) const {{")
    emit_applied(emitter, "V", "in.{}")
    for i, _ in emitter.elementwise():
        if emitter.store_kinds[i] == STRIDED:
            put(f"    og::scatter_pack<V>(y{i}, i, y{i}_step, r{i});")
        else:
            put(f"    og::store_pack<V>(y{i} + i, r{i});")
    put("  }")


def emit_applied(emitter: Emitter, count: str, pack: str) -> None:
    """Adds the arithmetic of `count` elements from i on.

    It writes results to r0, r1, ..., and the addends of sum k to s[k * count] and the following places.

    Args:
        pack: a format: name of an operand -> name of its pack.
    """
    stores = emitter.loop.stores
    # Addends go straight to s where possible: a copy loop for each, and its unrolling, cost NVRTC a sixth of its time.
    straight = {i: k for k, i in enumerate(emitter.sums) if compute_type(stores[i].dtype) == emitter.addend()}
    for i, store in enumerate(stores):
        if i not in straight:
            emitter.put(f"    {compute_type(store.dtype)} r{i}[{count}];")
    args = [
        emitter.read(x, "(i + k)") if x.is_position else f"og::load({pack.format(x.name)}.item[k])"
        for x in emitter.element_loads()
    ]
    args += [f"s[{straight[i]} * {count} + k]" if i in straight else f"r{i}[k]" for i in range(len(stores))]
    emitter.put(f"    OG_UNROLL for (int k = 0; k < {count}; ++k) apply({', '.join(args)});")
    for k, i in enumerate(emitter.sums):
        if i not in straight:
            emitter.put(f"    OG_UNROLL for (int k = 0; k < {count}; ++k) s[{k} * {count} + k] = r{i}[k];")
