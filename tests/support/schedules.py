"""Schedules of loops, and of the graphs in the table of schedules."""

from __future__ import annotations

from typing import Any

import opgraph as og
from opgraph.codegen.cuda_rows import launches
from opgraph.codegen.cuda_sums import SumLaunch
from opgraph.loops.layout import Layout, Variant
from opgraph.loops.loop import Loop
from opgraph.loops.lower import lower
from opgraph.runtime.operands import Operands
from opgraph.schedule.cpu import Cpu
from opgraph.schedule.cuda import Cuda
from opgraph.schedule.schedule import INNER, POINTWISE, TILED_SUM, CpuSchedule, CudaPointwise
from opgraph.schedule.table import choose_schedule


def bound(text: str) -> tuple[Loop, Layout]:
    """The loop of a graph that is one kernel, over row-major arrays of its sizes."""
    (part,) = og.parse(text).get_partitions()
    low = lower(part)
    layout = Operands(low, part.input_ports).probable_layout([t.dims for t in part.input_ports])
    assert part.kind == "fused" and layout is not None
    return low.loop, layout


def followed(f: og.Executable) -> list[str]:
    """The schedules that the kernels of an executable follow, in the order in which they were compiled."""
    return [source.schedule for step in f._steps for source in step.run.sources.values()]


def cpu_schedule(loop: Loop, layout: Layout, *, lanes: bool = True) -> CpuSchedule:
    return choose_schedule(loop, layout, Cpu(lanes))


def in_order(loop: Loop, variant: Variant) -> CpuSchedule:
    """The schedule on the CPU of one element or row after the other, for any sizes."""
    name = INNER if loop.row_axes else TILED_SUM if variant.has_sums else POINTWISE
    return CpuSchedule(name=name, loop=loop, layout=Layout((), (), (), (), variant))


def pointwise(loop: Loop, layout: Layout, alignment: int = 16) -> CudaPointwise:
    """The schedule on CUDA of a loop that computes elements."""
    found: Any = choose_schedule(loop, layout, Cuda(alignment))
    assert isinstance(found, CudaPointwise)
    return found


def cuda_launches(loop: Loop, layout: Layout, alignment: int = 16) -> list[SumLaunch]:
    """The launches on CUDA of a loop with sums or rows."""
    return launches(choose_schedule(loop, layout, Cuda(alignment)))
