"""Whole source texts: spliced headers, the emitted functor, and the entry point of each target."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from opgraph.codegen.cuda_row_functor import emit_cuda_rows
from opgraph.codegen.emit import emit_functor
from opgraph.codegen.emitter import Functor
from opgraph.codegen.prune_source import needed
from opgraph.codegen.rows import emit_rows
from opgraph.ir import dtypes
from opgraph.ir.stage_log import log
from opgraph.loops.layout import STRIDED
from opgraph.schedule.cpu_body import Form
from opgraph.schedule.cuda_tiles import BLOCK_SIZE
from opgraph.schedule.fast_math import approximate
from opgraph.schedule.schedule import (
    GROUPED,
    INNER,
    OUTER,
    PERSISTENT_INNER,
    POINTWISE,
    POINTWISE_SCALAR,
    POINTWISE_TILED,
    POINTWISE_UNROLLED,
    SPLIT_COLUMN_SUM,
    SPLIT_GROUPED,
    SPLIT_INNER,
    SPLIT_OUTER,
    TILED_SUM,
    TRANSPOSED_INNER,
    CpuSchedule,
    CudaPointwise,
    CudaSums,
    Schedule,
)

#: For each CPU schedule: the file of `kernels/`, and its function that walks the space.
_HOST = {
    POINTWISE: ("cpu/pointwise.h", "launch<Fused>"),
    POINTWISE_TILED: ("cpu/tiled_sums.h", "launch_tiled<og::Plain<Fused>>"),
    TILED_SUM: ("cpu/tiled_sums.h", "launch_tiled<Fused>"),
    SPLIT_COLUMN_SUM: ("cpu/tiled_sums.h", "launch_tiled<Fused>"),
    INNER: ("cpu/inner_reduction.h", "launch_inner<Fused, {runs}>"),
    PERSISTENT_INNER: ("cpu/persistent_reduction.h", "launch_persistent<Fused, {vectors}>"),
    SPLIT_INNER: ("cpu/split_reduction.h", "launch_split<Fused>"),
    TRANSPOSED_INNER: ("cpu/outer_reduction.h", "launch_outer<Fused>"),
    OUTER: ("cpu/outer_reduction.h", "launch_outer<Fused>"),
    SPLIT_OUTER: ("cpu/split_outer_reduction.h", "launch_split_outer<Fused>"),
    GROUPED: ("cpu/grouped_reduction.h", "launch_grouped<Fused>"),
    SPLIT_GROUPED: ("cpu/grouped_reduction.h", "launch_grouped<Fused>"),
}
#: The same for each CUDA schedule that computes elements.
_CUDA = {
    POINTWISE: ("cuda/pointwise.cuh", "{space}<Fused, {vector}, {unroll}>"),
    POINTWISE_SCALAR: ("cuda/pointwise_scalar.cuh", "{space}_scalar<Fused>"),
    POINTWISE_UNROLLED: ("cuda/pointwise_unrolled.cuh", "{space}_unrolled<Fused, {vector}, {unroll}, {group}>"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """Source text of one kernel.

    Attributes:
        entry: name of the entry point.
        functor: the text emitted for this kernel alone.
        code: the whole text, ready for a compiler.
        tags: line of `code`, from 1 -> tag of the op that the line came from.
        skeleton: the file of `kernels/` that it uses.
        own: the text after the skeleton.
        form: see `Functor`.
        schedule: name of the schedule that it follows.
    """

    entry: str
    functor: str
    code: str
    tags: Mapping[int, int]
    skeleton: str = ""
    own: str = ""
    form: Form = Form.LOOP
    schedule: str = ""


def source_of(schedule: Schedule, skeleton: str, entry_text: str, *, walk: str = "") -> KernelSource:
    """A whole text: a skeleton of `kernels/`, the functor, and an entry point whose name is written ENTRY.

    `walk`: the instantiation of the function with two branches, if there are two.
    """
    loop, variant = schedule.loop, schedule.layout.variant
    on_gpu = skeleton.endswith(".cuh")
    chosen = approximate(loop, variant)
    if loop.row_axes:
        fits = isinstance(schedule, CpuSchedule) and schedule.fits
        name = schedule.name
        functor = emit_cuda_rows(loop, variant, chosen) if on_gpu else emit_rows(loop, variant, name, fits=fits)
    else:
        rolled = isinstance(schedule, (CudaPointwise, CudaSums)) and schedule.group > 0
        functor = emit_functor(loop, variant, packs=on_gpu, rolled=rolled, approximate=chosen)
    if functor.form is Form.BRANCHES:
        entry_text = f"{walk}\n\n{entry_text}"
    return replace(text_of(functor, skeleton, entry_text), schedule=schedule.name)


def text_of(functor: Functor, skeleton: str, entry_text: str) -> KernelSource:
    """A functor with its skeleton and its entry points, whose names are or begin with ENTRY."""
    entry = f"og_{hashlib.sha256((functor.code + entry_text).encode()).hexdigest()[:12]}"
    own = f"{functor.code}\n\n{entry_text.replace('ENTRY', entry)}\n"
    log("source", f"{entry}, behind kernels/{skeleton}", own)
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


def host_source(schedule: CpuSchedule) -> KernelSource:
    """The CPU kernel of a schedule. Entry: `void(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads,
    GOMP_parallel)`; the layout's numbers are those of `opgraph.schedule.cpu_arguments`."""
    skeleton, launch = _HOST[schedule.name]
    launch = launch.format(runs=str(schedule.layout.row_rank > 1).lower(), vectors=schedule.vectors)
    fused = "og::Plain<Fused>" if schedule.name == POINTWISE_TILED else "Fused"
    entry = (
        'extern "C" void ENTRY(void* const* base, const og::i64* layout, og::i64 begin, og::i64 end, og::i64 threads,\n'
        "                      og::Parallel parallel) {\n"
        f"  og::{launch}(base, layout, begin, end, threads, parallel);\n"
        "}"
    )
    addends = f", {fused}::Addend*" if skeleton == "cpu/tiled_sums.h" else ""
    walk = (
        "#if defined(OG_FUNCTIONS)\n"
        f"template void og::Branches<{fused}>::walk(const {fused}, og::i64, og::i64{addends});\n"
        "#endif"
    )
    return source_of(schedule, skeleton, entry, walk=walk)


def cuda_source(schedule: CudaPointwise, *, by_value: Collection[int] = ()) -> KernelSource:
    """The CUDA kernel of a schedule that computes elements.

    Args:
        by_value: indices of one-element loads that are passed as the number, not as an address.

    Entry: base pointers one by one. Then, for a flat space, the step of each strided operand and the number of
    elements, both i64; for rows, og::Layout by value and the number of packs (i32 if `narrow`). `cuda_layout` packs it.
    """
    loop, layout = schedule.loop, schedule.layout
    operands = [*[f"x{i}" for i in range(len(loop.loads))], *[f"y{i}" for i in range(len(loop.stores))]]
    params = [f"void* {name}" for name in operands]
    places = list(operands)
    for i in by_value:
        params[i], places[i] = f"{dtypes.get(loop.loads[i].dtype).storage} {operands[i]}", f"(void*)&{operands[i]}"
    body = [f"  void* const base[] = {{{', '.join(places)}}};"]
    skeleton, how = _CUDA[schedule.name]
    space = "flat" if layout.variant.flat else "rows"
    how = how.format(space=space, vector=schedule.vector, unroll=schedule.unroll, group=schedule.group)
    if layout.variant.flat:
        strided = [k == STRIDED for k in layout.variant.operands]
        params += [f"og::i64 {name}_step" for name, s in zip(operands, strided, strict=True) if s]
        steps = [f"{name}_step" if s else "1" for name, s in zip(operands, strided, strict=True)]
        params.append("og::i64 n")
        body.append(f"  const og::i64 step[] = {{{', '.join(steps)}}};")
        body.append(f"  og::{how}(base, step, n);")
    else:
        index = "og::u32" if schedule.narrow else "og::i64"
        params += [f"const og::Layout<{index}, {len(layout.dims)}, {len(operands)}> layout", f"{index} n"]
        body.append(f"  og::{how}(base, layout, n);")
    head = f'extern "C" __global__ void __launch_bounds__({BLOCK_SIZE}) ENTRY({", ".join(params)}) {{'
    return source_of(schedule, skeleton, "\n".join([head, *body, "}"]))


def cuda_layout(schedule: CudaPointwise) -> tuple[int, ...]:
    """The og::Layout of kernels/cuda/pointwise.cuh for rows, as 64-bit words."""
    words, layout = [], schedule.layout
    for extent in (*layout.dims[:-1], layout.dims[-1] // schedule.vector):
        words += [extent, _magic(extent) if schedule.narrow else 0]
    return (*words, *[step for strides in layout.strides for step in strides])


def _magic(divisor: int) -> int:
    """The multiplier and, in the upper half, the shift that divide by `divisor`; formula at og::Divider."""
    shift = (divisor - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - divisor) // divisor + 1) | shift << 32
