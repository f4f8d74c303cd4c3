"""Selects the CUDA kernels for a layout: to plan launches, to compile ahead of a call, and to print sources.

Needs neither CuPy nor a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from opgraph.codegen.cuda_rows import launches
from opgraph.codegen.cuda_sums import SumLaunch
from opgraph.codegen.kernel import KernelSource, cuda_source
from opgraph.ir.logical_tensor import Dims
from opgraph.runtime.operands import Operands
from opgraph.schedule.cuda import Cuda
from opgraph.schedule.schedule import CudaPointwise, Schedule
from opgraph.schedule.table import choose_schedule

#: Guesses for sizes that are not known yet: kernels that fit both are assumed to fit all sizes.
SHORT, LONG = 24, 1000


def launched_sources(made: Sequence[SumLaunch]) -> list[KernelSource]:
    """The kernels of launches, in their order."""
    return [source for launch in made for source in (launch.source, launch.totals) if source is not None]


def sources_of(schedule: Schedule) -> list[KernelSource]:
    """The kernels of a schedule, in the order of their launches."""
    return [cuda_source(schedule)] if isinstance(schedule, CudaPointwise) else launched_sources(launches(schedule))


def sources_ahead(operands: Operands, dims: Sequence[Dims]) -> list[KernelSource]:
    """The kernels that dense arrays of these dimensions will need; none if they depend on sizes that are not known."""
    found = _guessed(operands, dims, SHORT)
    if all(isinstance(d, int) for shape in dims for d in shape or (None,)):
        return found
    entries = [s.entry for s in _guessed(operands, dims, LONG)]
    return found if [s.entry for s in found] == entries else []


def probable_schedule(operands: Operands, dims: Sequence[Dims]) -> Schedule | None:
    """The schedule of these kernels; the one for long axes if it depends on sizes that are not known."""
    return _scheduled(operands, dims, SHORT if sources_ahead(operands, dims) else LONG)


def _guessed(operands: Operands, dims: Sequence[Dims], low: int) -> list[KernelSource]:
    schedule = _scheduled(operands, dims, low)
    return [] if schedule is None else sources_of(schedule)


def _scheduled(operands: Operands, dims: Sequence[Dims], low: int) -> Schedule | None:
    """The schedule for arrays aligned to 16 bytes; None if they have no elements."""
    layout = operands.probable_layout(dims, low)
    return choose_schedule(operands.loop, layout, Cuda()) if layout is not None and layout.size else None
