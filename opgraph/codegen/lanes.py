"""16 floats at a time on the CPU: kernels whose arithmetic is all in f32 need no vectoriser where there is AVX-512."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opgraph.ir import dtypes
from opgraph.loops.layout import STRIDED

if TYPE_CHECKING:
    from opgraph.codegen.emit import Emitter

#: What og::load_lanes reads and og::store_lanes writes.
_STORED = frozenset({"f32", "f16", "bf16", "boolean"})


def goes_by_lanes(emitter: Emitter) -> bool:
    """Whether all that an element meets is f32 or a truth value, in memory perhaps f16 or bf16."""
    loop = emitter.loop
    computed = {dtypes.BY_NAME[emitter.dtypes[name]].compute for name in emitter.per_element()}
    stored = {x.dtype for x in emitter.element_loads()} | {s.dtype for s in loop.stores}
    return (
        computed <= {"float", "bool"} and stored <= _STORED and not any(x.is_position for x in emitter.element_loads())
    )


def put_lanes(emitter: Emitter) -> None:
    """Adds `lanes`, which does n of the 16 elements from i on: see kernels/lanes.h.

    What element i + j adds to sum k goes to s[k * og::strip + j], zeros for j >= n.
    """
    put = emitter.put
    put("#if OG_LANES")
    put("  static constexpr bool by_lanes = true;")
    put(f"  OG_FN void lanes(og::i64 i, og::i64 n{', Addend* s' if emitter.sums else ''}) const {{")
    kinds = {x.name: kind for x, kind in emitter.loads}
    args = []
    for x in emitter.element_loads():
        if kinds[x.name] == STRIDED:
            args.append(f"og::gather_lanes({x.name} + i * {x.name}_step, {x.name}_step, n)")
        else:
            args.append(f"og::load_lanes({x.name} + i, n)")
    for i, store in enumerate(emitter.loop.stores):
        put(f"    {'og::bools' if store.dtype == 'boolean' else 'og::floats'} r{i};")
    results = [f"r{i}" for i in range(len(emitter.loop.stores))]
    put(f"    apply<og::floats>({', '.join([*args, *results])});")
    for i, _ in emitter.elementwise():
        if emitter.store_kinds[i] == STRIDED:
            put(f"    og::scatter_lanes(y{i} + i * y{i}_step, y{i}_step, r{i}, n);")
        else:
            put(f"    og::store_lanes(y{i} + i, r{i}, n);")
    for k, i in enumerate(emitter.sums):
        put(f"    og::store_lanes(s + {k} * og::strip, og::first_lanes(r{i}, n), og::lane_count);")
    put("  }")
    put("#endif")
