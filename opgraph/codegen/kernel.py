"""Whole source texts: spliced headers, the emitted functor, and the entry point of each target."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from opgraph.codegen.cuda_row_functor import emit_cuda_rows
from opgraph.codegen.emit import emit_functor
from opgraph.codegen.emitter import Emitter
from opgraph.codegen.functor import Form, Functor
from opgraph.codegen.needed import needed
from opgraph.codegen.rolled import group_of
from opgraph.codegen.rows import emit_rows
from opgraph.codegen.tier import approximate
from opgraph.ir import dtypes
from opgraph.loops.layout import CONTIGUOUS, STRIDED, Layout, Variant
from opgraph.loops.loop import Loop
from opgraph.loops.tiles import BLOCK_SIZE

_BYTES_PER_ACCESS = 16
BYTES_IN_FLIGHT = 32  # that one thread loads before it computes, for the memory latency of an H200
_ELEMENTS_PER_THREAD = 16  # more would cost registers that the other threads of a multiprocessor need
#: Instructions per element, by the records' costs, beyond which a thread does one element after the other: NVRTC would
#: take 3 s for a pack's body, and what is the same for all its elements is 4% of such a kernel.
SINGLES_COST = 400
_SINGLES = 4  # of a thread, as in kernels/singles.cuh
_ROLLED_UNROLL = 2  # packs of a thread, one after the other: enough that what comes before them counts little
NARROW = 2**31 - 2**16  # with the last, partly empty tile still below 2^31
_HOST, _HOST_SUMS, _HOST_ROWS, _HOST_BESIDE = "host.h", "host_sums.h", "host_rows.h", "host_beside.h"
_HOST_BESIDE_PIECES, _HOST_GROUPS = "host_beside_pieces.h", "host_groups.h"
_HOST_PIECES, _HOST_AT_ONCE, _CUDA = "host_pieces.h", "host_at_once.h", "pointwise.cuh"
_CUDA_SINGLES, _CUDA_ROLLED = "singles.cuh", "rolled.cuh"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """Source text of one kernel.

    Attributes:
        entry: name of the entry point.
        functor: what was emitted for this kernel alone.
        code: all of it, ready for a compiler.
        tags: line of `code`, from 1 -> tag of the op that the line came from.
        skeleton: the file of `kernels/` that it is made with.
        own: what stands behind that.
        form: see `Functor`.
    """

    entry: str
    functor: str
    code: str
    tags: Mapping[int, int]
    skeleton: str = ""
    own: str = ""
    form: Form = Form.LOOP


def source_of(
    loop: Loop, variant: Variant, skeleton: str, entry_text: str, *, rolled: bool = False, walk: str = ""
) -> KernelSource:
    """A whole text: a skeleton of `kernels/`, the functor, and an entry point whose name is written ENTRY.

    `rolled`: the functor does a few elements of a pack at a time. `walk`: what makes the function of
    two branches, where there are two.
    """
    on_gpu = skeleton.endswith(".cuh")
    chosen = approximate(loop, variant)
    if loop.row_axes:
        functor = emit_cuda_rows(loop, variant, chosen) if on_gpu else emit_rows(loop, variant)
    else:
        functor = emit_functor(loop, variant, packs=on_gpu, rolled=rolled, approximate=chosen)
    if functor.form is Form.BRANCHES:
        entry_text = f"{walk}\n\n{entry_text}"
    return text_of(functor, skeleton, entry_text)


def text_of(functor: Functor, skeleton: str, entry_text: str) -> KernelSource:
    """A functor with its skeleton and its entry points, named ENTRY or beginning so."""
    entry = f"og_{hashlib.sha256((functor.code + entry_text).encode()).hexdigest()[:12]}"
    own = f"{functor.code}\n\n{entry_text.replace('ENTRY', entry)}\n"
    head = needed(skeleton, own) + "\n\n"
    first = head.count("\n")
    return KernelSource(
        entry=entry,
        functor=functor.code,
        code=head + own,
        tags={first + line: t for line, t in functor.tags.items()},
        skeleton=skeleton,
        own=own,
        form=functor.form,
    )


def host_source(loop: Loop, variant: Variant, *, boxed: bool = False, several: bool = False) -> KernelSource:
    """The CPU kernel of a variant. Entry: `void(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads,
    GOMP_parallel)`; layout as kernels/host.h says; as kernels/host_sums.h where there are sums, or where `boxed`; as
    kernels/host_rows.h where rows are reduced, of `several` runs or one, there with pieces of rows where `boxed`."""
    skeleton, launch, fused = _HOST, "launch<Fused>", "Fused"
    if variant.beside:
        skeleton, launch = _HOST_BESIDE, "launch_beside<Fused>"
        if variant.grouped:
            skeleton, launch = _HOST_GROUPS, "launch_groups<Fused>"
        elif boxed:
            skeleton, launch = _HOST_BESIDE_PIECES, "launch_beside_pieces<Fused>"
    elif variant.vectors:
        skeleton, launch = _HOST_AT_ONCE, f"launch_at_once<Fused, {variant.vectors}>"
    elif loop.row_axes:
        skeleton, launch = _HOST_ROWS, f"launch_rows<Fused, {str(several).lower()}>"
        if boxed:
            skeleton, launch = _HOST_PIECES, "launch_pieces<Fused>"
    elif variant.has_sums:
        skeleton, launch = _HOST_SUMS, "launch_boxes<Fused>"
    elif boxed:
        skeleton, launch, fused = _HOST_SUMS, "launch_boxes<og::Plain<Fused>>", "og::Plain<Fused>"
    entry = (
        'extern "C" void ENTRY(void* const* base, const og::i64* layout, og::i64 begin, og::i64 end, og::i64 threads,\n'
        "                      og::Parallel parallel) {\n"
        f"  og::{launch}(base, layout, begin, end, threads, parallel);\n"
        "}"
    )
    addends = f", {fused}::Addend*" if skeleton == _HOST_SUMS else ""
    walk = (
        "#if defined(OG_FUNCTIONS)\n"
        f"template void og::Branches<{fused}>::walk(const {fused}, og::i64, og::i64{addends});\n"
        "#endif"
    )
    return source_of(loop, variant, skeleton, entry, walk=walk)


@dataclass(frozen=True, slots=True)
class CudaVariant:
    """How a CUDA kernel moves memory.

    Attributes:
        base: operand kinds.
        rank: of the collapsed space.
        vector: elements per pack.
        unroll: packs per thread.
        narrow: rows are found in 32-bit arithmetic; flat positions always have 64 bits.
        singles: each thread does one element after the other (kernels/singles.cuh).
        group: elements of a pack whose arithmetic the text has, in a loop (kernels/rolled.cuh); 0: those of all packs.
    """

    base: Variant
    rank: int
    vector: int
    unroll: int
    narrow: bool
    singles: bool = False
    group: int = 0

    @property
    def tile(self) -> int:
        """How many elements of a flat space, or packs of rows, one block does."""
        if self.singles:
            return BLOCK_SIZE * _SINGLES
        return BLOCK_SIZE * self.unroll * (self.vector if self.base.flat else 1)


def cuda_variant(loop: Loop, layout: Layout, *, alignment: int = _BYTES_PER_ACCESS) -> CudaVariant:
    """The variant for a layout without sums (`opgraph.codegen.cuda_sums` serves the others).

    Args:
        alignment: the power of two up to 16 that divides the address of every contiguous operand.
    """
    kinds = layout.variant.operands
    emitter = Emitter(loop, layout.variant, approximate(loop, layout.variant))
    singles = emitter.cost > SINGLES_COST
    sizes = [0 if x.is_position else dtypes.BY_NAME[x.dtype].itemsize for x in loop.loads]
    vector = packed_vector(loop, layout, alignment)
    loaded = sum(vector * s for s, k in zip(sizes, kinds) if k in (CONTIGUOUS, STRIDED))
    unroll = max(min(BYTES_IN_FLIGHT // loaded, _ELEMENTS_PER_THREAD // vector, 4), 1) if loaded else 1
    narrow = layout.size < NARROW and all(abs(s) < NARROW for strides in layout.strides for s in strides)
    narrow = narrow and not layout.variant.flat
    if singles:
        return CudaVariant(layout.variant, len(layout.dims), 1, 1, narrow, singles=True)
    group = group_of(emitter, vector)
    unroll = max(unroll, _ROLLED_UNROLL) if group else unroll
    return CudaVariant(layout.variant, len(layout.dims), vector, unroll, narrow, group=group)


def packed_vector(loop: Loop, layout: Layout, alignment: int, *, whole_rows: bool = True) -> int:
    """How many neighbouring elements a thread may move at a time.

    Args:
        whole_rows: whether rows must consist of whole packs.
    """
    operands = [x.dtype for x in loop.loads] + [s.dtype for s in loop.stores]
    sizes = [dtypes.BY_NAME[d].itemsize for d in operands]
    in_memory = [not x.is_position for x in loop.loads] + [True] * len(loop.stores)
    runs = [kind == CONTIGUOUS and m for kind, m in zip(layout.variant.operands, in_memory, strict=True)]
    moving = [size for size, runs_on in zip(sizes, runs, strict=True) if runs_on]
    if not moving:
        return 1
    # Twice 16 bytes of the widest type: f64 next to booleans would fill 128 bytes of registers for each operand.
    vector = min(_BYTES_PER_ACCESS // min(moving), max(2 * _BYTES_PER_ACCESS // max(moving), 1))
    rows = [layout.dims[-1]] if whole_rows and not layout.variant.flat else []
    for strides, runs_on in zip(layout.strides, runs, strict=True):
        rows.extend(strides[:-1] if runs_on else ())
    while vector > 1 and (
        any(r % vector for r in rows) or any(min(_BYTES_PER_ACCESS, vector * m) > alignment for m in moving)
    ):
        vector //= 2
    return vector


def cuda_source(loop: Loop, variant: CudaVariant, *, by_value: Collection[int] = ()) -> KernelSource:
    """The CUDA kernel of a variant.

    Args:
        by_value: places of loads of one element that are no address but the number itself.

    Entry: base pointers one by one; then, for a flat space, the step of each strided operand and the number of
    elements, both i64; for rows og::Layout by value and the number of packs (i32 if `narrow`). `cuda_layout` packs it.
    """
    operands = [*[f"x{i}" for i in range(len(loop.loads))], *[f"y{i}" for i in range(len(loop.stores))]]
    params = [f"void* {name}" for name in operands]
    places = list(operands)
    for i in by_value:
        params[i], places[i] = f"{dtypes.get(loop.loads[i].dtype).storage} {operands[i]}", f"(void*)&{operands[i]}"
    body = [f"  void* const base[] = {{{', '.join(places)}}};"]
    how = f"<Fused, {variant.vector}, {variant.unroll}>"
    if variant.group:
        how = f"_rolled<Fused, {variant.vector}, {variant.unroll}, {variant.group}>"
    if variant.base.flat:
        strided = [k == STRIDED for k in variant.base.operands]
        params += [f"og::i64 {name}_step" for name, s in zip(operands, strided, strict=True) if s]
        steps = [f"{name}_step" if s else "1" for name, s in zip(operands, strided, strict=True)]
        params.append("og::i64 n")
        body.append(f"  const og::i64 step[] = {{{', '.join(steps)}}};")
        flat = "flat_singles<Fused>" if variant.singles else f"flat{how}"
        body.append(f"  og::{flat}(base, step, n);")
    else:
        index = "og::u32" if variant.narrow else "og::i64"
        params += [f"const og::Layout<{index}, {variant.rank}, {len(operands)}> layout", f"{index} n"]
        rows = "row_singles<Fused>" if variant.singles else f"rows{how}"
        body.append(f"  og::{rows}(base, layout, n);")
    head = f'extern "C" __global__ void __launch_bounds__({BLOCK_SIZE}) ENTRY({", ".join(params)}) {{'
    skeleton = _CUDA_SINGLES if variant.singles else _CUDA_ROLLED if variant.group else _CUDA
    return source_of(loop, variant.base, skeleton, "\n".join([head, *body, "}"]), rolled=variant.group > 0)


def cuda_layout(layout: Layout, variant: CudaVariant) -> tuple[int, ...]:
    """og::Layout of kernels/pointwise.cuh for rows, as 64-bit words."""
    words = []
    for extent in (*layout.dims[:-1], layout.dims[-1] // variant.vector):
        words += [extent, _magic(extent) if variant.narrow else 0]
    return (*words, *[step for strides in layout.strides for step in strides])


def _magic(divisor: int) -> int:
    """The multiplier and, in the upper half, the shift that divide by `divisor`; formula at og::Divider."""
    shift = (divisor - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - divisor) // divisor + 1) | shift << 32
