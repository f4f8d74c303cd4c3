"""Which CUDA kernels a library holds: those that serve dense operands, whatever their shapes, with few texts.

The engine makes a kernel for the layout of a call; a library has to have it before. So a kernel here is told of a fixed
number of axes, some of which may be of extent 1, and packs are as long as can be, or single elements:

- one row, for each way in which operands of the space and single numbers meet; an op of one operand needs no more;
- three axes, which a bias, or a factor for each channel or row, collapse to: for each way that is expected;
- three axes of operands that lie anyhow, and eight in 64-bit arithmetic, which serve everything else.
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

#: As kernels/ort/gpu.h: gpu_rank, gpu_operands; so that the arguments of a launch take less than 4096 bytes.
MAX_RANK, MAX_OPERANDS = 8, 48
_RANK = 3
_ANY = 1 << 62
#: A size in each axis that leaves packs whole; in eight axes it takes 64 bits.
_EXTENT = 64


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """A kernel for operands of some kinds.

    Attributes:
        kinds: one for each operand, as in `opgraph.loops.layout.Variant`.
        rank: how many axes it is told of; 0 for one row.
        most: how many elements it serves.
    """

    kinds: str
    rank: int
    most: int
    schedule: CudaPointwise
    source: KernelSource


def serves_gpu(op: LibraryOp) -> bool:
    """Whether kernels for a GPU can be made for an op: it computes elements, of not too many operands."""
    return all(form.row_rank == 0 and len(form.loop.loads) + len(form.loop.stores) <= MAX_OPERANDS for form in op.forms)


def gpu_kernels(form: Form) -> tuple[GpuKernel, ...]:
    """The kernels of one way to call an op; the first that serves a call wins."""
    ways = [kinds for kinds in form.kinds if STRIDED not in kinds]
    rows = dict.fromkeys(kinds.replace(ROW, UNIFORM) for kinds in ways)
    found = [_kernel(form, kinds, (_EXTENT**_RANK,), aligned=True, flat=True) for kinds in rows]
    if sum(source != ALPHA for source in form.reads) == 1:  # what has one operand is one row of it
        return (*found, *[_kernel(form, kinds, (_EXTENT**_RANK,), flat=True) for kinds in rows])
    used = form.loop.reads()
    moving = [source != ALPHA and x.name in used for x, source in zip(form.loop.loads, form.reads, strict=True)]
    anyhow = "".join(STRIDED if moves else UNIFORM for moves in moving) + CONTIGUOUS * len(form.loop.stores)
    found += [_kernel(form, kinds, (_EXTENT,) * _RANK, aligned=True) for kinds in dict.fromkeys(ways)]
    return (*found, _kernel(form, anyhow, (_EXTENT,) * _RANK), _kernel(form, anyhow, (_EXTENT,) * MAX_RANK))


def _kernel(form: Form, kinds: str, dims: tuple[int, ...], *, aligned: bool = False, flat: bool = False) -> GpuKernel:
    """The kernel that the engine would make for operands of these kinds in such a space."""
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
    """Many kernels in one text, which NVRTC reads once."""
    bodies = {source.entry: source.own for source in sources}
    own = "".join(f"\nnamespace n{i} {{\n{body}}}\n" for i, body in enumerate(bodies.values()))
    return needed("ort/library.cuh", own) + own
