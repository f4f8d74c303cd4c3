"""Packs of neighbouring elements on CUDA: what `fetch` and `finish` of a functor move at a time."""

from __future__ import annotations

from opgraph.codegen.arithmetic import compute_type, storage_type
from opgraph.codegen.emitter import Emitter
from opgraph.loops.layout import CONTIGUOUS, STRIDED


def emit_packs(emitter: Emitter) -> None:
    """V neighbouring elements: loads, then all that follows, so that a skeleton can load several packs first."""
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
    """Adds the arithmetic of `count` elements, those of i on.

    It leaves results in r0, r1, ..., and what sum k adds up from s[k * count] on.

    Args:
        pack: what the pack of an operand is called, a format of its name.
    """
    stores = emitter.loop.stores
    # Where it can go straight there it does: a loop to copy each, and what unrolls it, cost NVRTC a sixth of its time.
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
