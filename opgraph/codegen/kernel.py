"""Whole source texts: spliced headers, the emitted functor, and the entry point of each target."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from opgraph.codegen.emit import emit_functor
from opgraph.codegen.sources import spliced
from opgraph.ir import dtypes
from opgraph.loops.layout import CONTIGUOUS, Layout, Variant
from opgraph.loops.loop import Loop

BLOCK_SIZE = 256  # kernels/pointwise.cuh
_BYTES_PER_ACCESS = 16
_HOST, _CUDA = "host.h", "pointwise.cuh"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """Source text of one kernel.

    Attributes:
        entry: name of the entry point.
        functor: what was emitted for this kernel alone.
        code: all of it, ready for a compiler.
        tags: line of `code`, from 1 -> tag of the op that the line came from.
    """

    entry: str
    functor: str
    code: str
    tags: Mapping[int, int]


def _source(loop: Loop, variant: Variant, skeleton: str, entry_text: str) -> KernelSource:
    functor = emit_functor(loop, variant, packs=skeleton == _CUDA)
    entry = f"og_{hashlib.sha256((functor.code + entry_text).encode()).hexdigest()[:12]}"
    head = spliced(skeleton) + "\n\n"
    code = f"{head}{functor.code}\n\n{entry_text.replace('ENTRY', entry)}\n"
    first = head.count("\n")
    return KernelSource(
        entry=entry, functor=functor.code, code=code, tags={first + line: t for line, t in functor.tags.items()}
    )


def host_source(loop: Loop, variant: Variant) -> KernelSource:
    """The CPU kernel of a variant. Entry: `void(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads,
    GOMP_parallel)`; layout as kernels/host.h says."""
    stores = variant.operands[len(loop.loads) :]
    may_stream = "true" if all(k == CONTIGUOUS for k in stores) else "false"
    entry = (
        'extern "C" void ENTRY(void* const* base, const og::i64* layout, og::i64 begin, og::i64 end, og::i64 threads,\n'
        "                      og::Parallel parallel) {\n"
        f"  og::launch<Fused, {may_stream}>(base, layout, begin, end, threads, parallel);\n"
        "}"
    )
    return _source(loop, variant, _HOST, entry)


@dataclass(frozen=True, slots=True)
class CudaVariant:
    """How a CUDA kernel moves memory.

    Attributes:
        base: operand kinds.
        rank: of the collapsed space.
        vector: elements per pack; 1 where an operand is not aligned for more.
        unroll: packs per thread.
    """

    base: Variant
    rank: int
    vector: int
    unroll: int


def cuda_variant(loop: Loop, layout: Layout, *, aligned: bool) -> CudaVariant:
    """The variant for a layout.

    Args:
        aligned: whether every contiguous operand's address is a multiple of 16 bytes.
    """
    operands = [x.dtype for x in loop.loads] + [s.dtype for s in loop.stores]
    moving = [
        dtypes.BY_NAME[d].itemsize for d, k in zip(operands, layout.variant.operands, strict=True) if k == CONTIGUOUS
    ]
    vector = _BYTES_PER_ACCESS // min(moving) if moving and aligned else 1
    if not layout.variant.flat and vector > 1:
        rows = [layout.dims[-1]]
        rows += [
            s for st, k in zip(layout.strides, layout.variant.operands, strict=True) if k == CONTIGUOUS for s in st[:-1]
        ]
        if any(r % vector for r in rows):
            vector = 1
    one_input = sum(k == CONTIGUOUS for k in layout.variant.operands[: len(loop.loads)]) == 1
    unroll = 2 if layout.variant.flat and one_input and vector > 1 else 1
    return CudaVariant(layout.variant, len(layout.dims), vector, unroll)


def cuda_source(loop: Loop, variant: CudaVariant) -> KernelSource:
    """The CUDA kernel of a variant. Entry: base pointers one by one, then the layout struct by value, then counts."""
    count = len(loop.loads) + len(loop.stores)
    params = ", ".join(f"void* p{i}" for i in range(count))
    base = ", ".join(f"p{i}" for i in range(count))
    layout = f"og::Layout<{variant.rank}, {count}>"
    head = f'extern "C" __global__ void __launch_bounds__({BLOCK_SIZE}) ENTRY({params}, const {layout} layout, '
    if variant.base.flat:
        tail = f"og::i64 n) {{\n  void* const base[] = {{{base}}};\n  og::flat<Fused, {variant.vector}, {variant.unroll}>(base, layout, n);\n}}"
    else:
        tail = (
            f"og::i64 packs, og::i64 n) {{\n  void* const base[] = {{{base}}};\n"
            f"  og::rows<Fused, {variant.vector}, {variant.rank}>(base, layout, packs, n);\n}}"
        )
    return _source(loop, variant.base, _CUDA, head + tail)
