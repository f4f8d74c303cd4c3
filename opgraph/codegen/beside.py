"""What the functor of rows that are walked side by side has besides (kernels/host_beside.h, kernels/host_groups.h)."""

from __future__ import annotations

from opgraph.codegen.arithmetic import storage_type
from opgraph.codegen.emitter import Emitter
from opgraph.loops.layout import CONTIGUOUS, GROUP, RUN, TURNED, Variant


def put_beside_members(emitter: Emitter, variant: Variant) -> None:
    """Adds which operands are turned, a tile of them at a time, and how groups of lanes lie.

    Args:
        variant: with the letters of operands that are turned, which the emitter takes for contiguous ones.
    """
    put, loop = emitter.put, emitter.loop
    items = [storage_type(d) for d in (*(x.dtype for x in loop.loads), *(s.dtype for s in loop.stores))]
    turned = [i for i, kind in enumerate(variant.operands) if kind == TURNED]
    sizes = "".join(f"k == {i} ? (int)sizeof({items[i]}) : " for i in turned)
    put(f"  static constexpr int turned(int k) {{ return {sizes}0; }}")
    put(f"  static constexpr int loads = {len(loop.loads)};")
    if not variant.grouped:
        return
    places = " || ".join(f"k == {i}" for i, kind in enumerate(variant.operands) if kind == GROUP)
    put(f"  static constexpr bool per_group(int k) {{ return {places or 'k < 0'}; }}")
    moving = [x for x in emitter.element_loads() if emitter.kinds[x.name] != RUN]
    moved = [*(emitter.positions[x.name] for x in moving), *(len(loop.loads) + i for i, _ in emitter.elementwise())]
    places = " || ".join(f"k == {i}" for i in moved)
    put(f"  static constexpr bool moves(int k) {{ return {places or 'k < 0'}; }}")
    put(f"  static constexpr bool runs = {'true' if len(moving) < len(emitter.element_loads()) else 'false'};")
    put("  og::i64 group;")
    put("  OG_FN void ahead(og::i64 at) const {")
    for load in moving:
        if emitter.kinds[load.name] == CONTIGUOUS and not load.is_position:
            put(f"    og::fetch({load.name} + at);")
    put("  }")
