"""The CUDA kernels of a library: a few source texts that support dense operands of any shape.

The engine compiles a kernel for the layout of a call; a library must contain its kernels in advance. So a kernel here
receives a fixed number of axes, some of which may have extent 1. Its packs are as long as possible, or single elements:

- one row, for each combination of full operands and single numbers; an op with one operand needs no more;
- three axes, to which a bias, or a factor for each channel or row, collapses: for each combination that is expected;
- three axes of operands with any strides, and eight in 64-bit arithmetic, which support everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from opgraph.codegen.kernel import KernelSource, cuda_source
from opgraph.codegen.prune_source import needed
from opgraph.ir.logical_tensor import row_major
from opgraph.loops.layout import CONTIGUOUS, ROW, STRIDED, UNIFORM, Layout, Variant
from opgraph.onnx.library.ops import ALPHA, Form, LibraryOp
from opgraph.schedule.cuda import Cuda, pointwise
from opgraph.schedule.cuda_tiles import NARROW
from opgraph.schedule.schedule import CudaPointwise

#: Same as kernels/ort/gpu.h: gpu_rank, gpu_operands; the arguments of a launch then take less than 4096 bytes.
MAX_RANK, MAX_OPERANDS = 8, 48
_RANK = 3
_ANY = 1 << 62
#: A size for each axis that is a multiple of every pack; with eight axes, indices take 64 bits.
_EXTENT = 64


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """A kernel for one combination of operand kinds.

    Attributes:
        kinds: one for each operand, as in `opgraph.loops.layout.Variant`.
        rank: the number of axes that it receives; 0 for one row.
        most: the maximum number of elements.
    """

    kinds: str
    rank: int
    most: int
    schedule: CudaPointwise
    source: KernelSource


def serves_gpu(op: LibraryOp) -> bool:
    """True if GPU kernels can be made for an op: it is elementwise, and has not too many operands."""
    return all(form.row_rank == 0 and len(form.loop.loads) + len(form.loop.stores) <= MAX_OPERANDS for form in op.forms)


def gpu_kernels(form: Form) -> tuple[GpuKernel, ...]:
    """The kernels of one form of an op; a call uses the first kernel that supports it."""
    ways = [kinds for kinds in form.kinds if STRIDED not in kinds]
    rows = dict.fromkeys(kinds.replace(ROW, UNIFORM) for kinds in ways)
    found = [_kernel(form, kinds, (_EXTENT**_RANK,), aligned=True, flat=True) for kinds in rows]
    if sum(source != ALPHA for source in form.reads) == 1:  # a single operand is always one row
        return (*found, *[_kernel(form, kinds, (_EXTENT**_RANK,), flat=True) for kinds in rows])
    used = form.loop.reads()
    moving = [source != ALPHA and x.name in used for x, source in zip(form.loop.loads, form.reads, strict=True)]
    anyhow = "".join(STRIDED if moves else UNIFORM for moves in moving) + CONTIGUOUS * len(form.loop.stores)
    found += [_kernel(form, kinds, (_EXTENT,) * _RANK, aligned=True) for kinds in dict.fromkeys(ways)]
    return (*found, _kernel(form, anyhow, (_EXTENT,) * _RANK), _kernel(form, anyhow, (_EXTENT,) * MAX_RANK))


def _kernel(form: Form, kinds: str, dims: tuple[int, ...], *, aligned: bool = False, flat: bool = False) -> GpuKernel:
    """The kernel that the engine would make for operands of these kinds in an iteration space of `dims`."""
    steps = {
        UNIFORM: (0,) * len(dims),
        ROW: (*row_major(dims[:-1]), 0),
        CONTIGUOUS: row_major(dims),
        STRIDED: row_major(dims),
    }
    strides = tuple(steps[kind] for kind in kinds)
    layout = Layout(dims, (dims,) * len(form.loop.stores), dims, strides, Variant(kinds, flat))
    schedule = pointwise(form.loop, layout, Cuda(16 if aligned else 1))
    assert schedule is not None, "ops of elements alone"
    by_value = [place for place, source in enumerate(form.reads) if source == ALPHA]
    source = cuda_source(schedule, by_value=by_value)
    return GpuKernel(
        kinds, 0 if flat else len(dims), NARROW - 1 if prod(dims) < NARROW and not flat else _ANY, schedule, source
    )


def kernels_text(sources: Sequence[KernelSource]) -> str:
    """Joins kernels into one source text, so that NVRTC parses it once."""
    bodies = {source.entry: source.own for source in sources}
    own = "".join(f"\nnamespace n{i} {{\n{body}}}\n" for i, body in enumerate(bodies.values()))
    return needed("ort/library.cuh", own) + own
