"""Which CUDA kernels serve a layout: what launches are planned with, what is compiled ahead, and what is printed.

Needs neither CuPy nor a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraph.codegen.cuda_rows import row_launches
from opgraph.codegen.cuda_sums import SumLaunch, sum_launches
from opgraph.codegen.kernel import CudaVariant, KernelSource, cuda_source, cuda_variant
from opgraph.ir.logical_tensor import Dims
from opgraph.loops.layout import Layout
from opgraph.loops.loop import Loop
from opgraph.runtime.operands import Operands

#: Guesses for sizes that are not known yet: kernels that serve both are taken to serve all.
SHORT, LONG = 24, 1000


def reduces(layout: Layout) -> bool:
    """Whether a layout has sums or rows, which take launches of their own."""
    return layout.variant.has_sums or layout.row_rank > 0


def reduction_launches(loop: Loop, layout: Layout, *, alignment: int = 16) -> list[SumLaunch]:
    """The launches of a layout with sums or rows.

    Args:
        alignment: the power of two up to 16 that divides the address of every contiguous operand.
    """
    return (row_launches if layout.row_rank else sum_launches)(loop, layout, alignment=alignment)


def launched_sources(launches: Sequence[SumLaunch]) -> list[KernelSource]:
    """Their kernels in the order of the launches."""
    return [source for launch in launches for source in (launch.source, launch.totals) if source is not None]


def pointwise_kernel(loop: Loop, layout: Layout, *, alignment: int = 16) -> tuple[CudaVariant, KernelSource]:
    """The kernel of a layout without sums and rows; `alignment` as above."""
    variant = cuda_variant(loop, layout, alignment=alignment)
    return variant, cuda_source(loop, variant)


def sources_of(loop: Loop, layout: Layout) -> list[KernelSource]:
    """The kernels of a layout whose arrays lie at multiples of 16 bytes, in the order of their launches."""
    if layout.size == 0:
        return []
    return (
        launched_sources(reduction_launches(loop, layout)) if reduces(layout) else [pointwise_kernel(loop, layout)[1]]
    )


def sources_ahead(operands: Operands, dims: Sequence[Dims]) -> list[KernelSource]:
    """The kernels that dense arrays of these dimensions will need; none where sizes that are not known decide."""
    found = _guessed(operands, dims, SHORT)
    if all(isinstance(d, int) for shape in dims for d in shape or (None,)):
        return found
    entries = [s.entry for s in _guessed(operands, dims, LONG)]
    return found if [s.entry for s in found] == entries else []


def probable_sources(operands: Operands, dims: Sequence[Dims]) -> list[KernelSource]:
    """The same, with kernels for long axes where sizes that are not known decide."""
    return sources_ahead(operands, dims) or _guessed(operands, dims, LONG)


def _guessed(operands: Operands, dims: Sequence[Dims], low: int) -> list[KernelSource]:
    layout = operands.probable_layout(dims, low)
    return [] if layout is None else sources_of(operands.loop, layout)
