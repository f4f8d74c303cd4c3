"""THE table of schedules: one row for each way to iterate over a loop, and `choose_schedule`, which decides.

Sizes are known when a kernel is called, not when a graph is compiled (specs/loops.md). So a schedule is chosen for each
layout of a call. For compilation ahead of time, the same function chooses one for a guessed layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, overload

from opgraph.ir.stage_log import is_on, log
from opgraph.loops.layout import Layout
from opgraph.loops.loop import Loop
from opgraph.schedule import cpu, cuda, schedule
from opgraph.schedule.cpu import Cpu
from opgraph.schedule.cuda import Cuda
from opgraph.schedule.schedule import SPLIT_COLUMN_SUM, CpuSchedule, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule of one target.

    Attributes:
        name: the value of `Schedule.name`.
        when: the condition, in words.
        choose: returns the schedule for a loop, a layout and a target, or that of an adjacent row that shares the
            function; None if neither applies. The first function that returns one decides.
        takes, leaves: graphs of one loop: this row applies to the first, another row to the second.
        why: the page of specs/decisions/ that gives the reasons and the measurements.
        by_length: true if it requires certain row lengths, so that it is not chosen for a guess of sizes.
    """

    name: str
    when: str
    choose: Callable[[Loop, Layout, Any], Schedule | None]
    takes: str
    leaves: str
    why: str
    by_length: bool = False


_SOFTMAX = "graph(x: f32[{}]) -> (y)\n  y = SoftMax(x, axis={})"
_SUM = "graph(x: f32[{}]) -> (y)\n  y = ReduceSum(x, axes=[{}])"
_LARGEST = "graph(x: f32[{}]) -> (y)\n  y = ReduceMax(x, axes=[{}])"
_SCALED = "graph(x: f32[{}], w: f32[{}]) -> (y)\n  y = Multiply(x, w)"
_SCALE_GRADIENT = "graph(x: f32[{}], d: f32[{}], w: f32[{}]) -> (s)\n  p = Multiply(x, d)\n  s = SumTo(p, w)"
_GROUP_NORM = (
    "graph(x: f32[{}], w: f32[32], b: f32[32]) -> (y)\n"
    '  y = GroupNorm(x, w, b, groups={}, keep_stats=false, data_format="NXC")'
)
_ROW_SUMS = (
    "graph(x: f32[{}], w: f32[{}]) -> (y, s)\n  y = SoftMax(x, axis=-1)\n  p = Multiply(y, x)\n  s = SumTo(p, w)"
)


def _chain(op: str, length: int) -> str:
    """A chain of `length` ops."""
    lines = [
        f"  {'y' if i == length else f't{i}'} = {op}({f't{i - 1}' if i > 1 else 'x'})" for i in range(1, length + 1)
    ]
    return "\n".join(["graph(x: f32[4096]) -> (y)", *lines])


CPU_TABLE = (
    Row(
        name=schedule.SPLIT_COLUMN_SUM,
        when="few long columns are only added up: a loop without rows has them as sums, and its tiles cut columns too",
        choose=cpu.split_column_sum,
        takes=_SUM.format("100000,8", 0),
        leaves=_LARGEST.format("100000,8", 0),
        why="0014-row-reductions-as-loop-passes.md",
    ),
    Row(
        name=schedule.SPLIT_GROUPED,
        when="as grouped reduction, with too few rows for all threads: tiles are pieces of rows, passes are stages",
        choose=cpu.grouped_rows,
        takes=_GROUP_NORM.format("1,128,128,32", 4),
        leaves=_GROUP_NORM.format("64,16,16,32", 4),
        why="0027-group-norm-across-channels.md",
    ),
    Row(
        name=schedule.GROUPED,
        when="rows are many short runs, each beside one of the next row: lanes are the elements of a run",
        choose=cpu.grouped_rows,
        takes=_GROUP_NORM.format("64,16,16,32", 4),
        leaves=_GROUP_NORM.format("1,128,128,32", 4),
        why="0027-group-norm-across-channels.md",
    ),
    Row(
        name=schedule.SPLIT_OUTER,
        when="as outer reduction in one pass, with few long columns that are not only added up: tiles are their pieces",
        choose=cpu.short_or_strided_rows,
        takes=_LARGEST.format("100000,8", 0),
        leaves=_LARGEST.format("40,300,64", 1),
        why="0014-row-reductions-as-loop-passes.md",
        by_length=True,
    ),
    Row(
        name=schedule.TRANSPOSED_INNER,
        when="rows are short: tiles of them are transposed, and lanes are rows",
        choose=cpu.short_or_strided_rows,
        takes=_SOFTMAX.format("100,8", -1),
        leaves=_SOFTMAX.format("100,300", -1),
        why="0023-persistent-short-rows.md",
        by_length=True,
    ),
    Row(
        name=schedule.OUTER,
        when="neighbours in memory are neighbouring rows: lanes are rows",
        choose=cpu.short_or_strided_rows,
        takes=_SOFTMAX.format("16,40,64", 1),
        leaves=_SOFTMAX.format("16,40,64", -1),
        why="0014-row-reductions-as-loop-passes.md",
        by_length=True,
    ),
    Row(
        name=schedule.PERSISTENT_INNER,
        when="rows are a few vectors of floats: their elements stay in registers from pass to pass",
        choose=cpu.short_or_strided_rows,
        takes=_SOFTMAX.format("100,100", -1),
        leaves=_SOFTMAX.format("100,129", -1),
        why="0023-persistent-short-rows.md",
        by_length=True,
    ),
    Row(
        name=schedule.SPLIT_INNER,
        when="few long rows: tiles are pieces of rows, passes are stages",
        choose=cpu.rows_in_blocks,
        takes=_SOFTMAX.format("2,100000", -1),
        leaves=_SOFTMAX.format("200,1000", -1),
        why="0014-row-reductions-as-loop-passes.md",
    ),
    Row(
        name=schedule.INNER,
        when="one row after the other: elements of a row are lanes",
        choose=cpu.rows_in_blocks,
        takes=_SOFTMAX.format("200,1000", -1),
        leaves=_SOFTMAX.format("2,100000", -1),
        why="0014-row-reductions-as-loop-passes.md",
    ),
    Row(
        name=schedule.TILED_SUM,
        when="elements are added up to sums: tiles leave partial sums, which are added up in their order",
        choose=cpu.tiled_elements,
        takes=_SCALE_GRADIENT.format("300,40", "300,40", "40"),
        leaves=_SCALED.format("300,40", "40"),
        why="0033-schedule-table.md",
    ),
    Row(
        name=schedule.POINTWISE_TILED,
        when="the last axis is short, and an operand does not move along the one before: both are walked as one axis",
        choose=cpu.tiled_elements,
        takes=_SCALED.format("64,16,4,4", "16,1,1"),
        leaves=_SCALED.format("64,256", "256"),
        why="0033-schedule-table.md",
    ),
    Row(
        name=schedule.POINTWISE,
        when="everything else: elements are independent",
        choose=cpu.pointwise,
        takes=_SCALED.format("64,256", "256"),
        leaves=_SCALED.format("64,16,4,4", "16,1,1"),
        why="0001-sizes-are-kernel-arguments.md",
    ),
)
CUDA_TABLE = (
    Row(
        name=schedule.POINTWISE,
        when="elements are independent: a thread moves packs of neighbours",
        choose=cuda.pointwise,
        takes=_SCALED.format("64,256", "256"),
        leaves=_SCALE_GRADIENT.format("300,40", "300,40", "40"),
        why="0008-cuda-launch-arguments.md",
    ),
    Row(
        name=schedule.POINTWISE_UNROLLED,
        when="as pointwise, with much arithmetic: the text has that of a few elements of a pack, in a loop",
        choose=cuda.pointwise,
        takes=_chain("Mish", 4),
        leaves=_chain("Mish", 1),
        why="0026-partial-unrolling-and-pruned-source.md",
    ),
    Row(
        name=schedule.POINTWISE_SCALAR,
        when="as pointwise, with so much arithmetic that packs save nothing: a thread does one element after the other",
        choose=cuda.pointwise,
        takes=_chain("Mish", 20),
        leaves=_chain("Mish", 4),
        why="0026-partial-unrolling-and-pruned-source.md",
    ),
    Row(
        name=schedule.TILED_SUM,
        when="elements are added up to sums: tiles leave partial sums, which a second kernel adds up in their order",
        choose=cuda.sums,
        takes=_SCALE_GRADIENT.format("300,40", "300,40", "40"),
        leaves=_SOFTMAX.format("300,40", -1),
        why="0033-schedule-table.md",
    ),
    Row(
        name=schedule.LOOP_FISSION,
        when="sums do not go together, or the kernel of rows does not add them up: several loops, one kernel each",
        choose=cuda.rows,
        takes=_ROW_SUMS.format("300,2000", "300,1"),
        leaves=_ROW_SUMS.format("300,2000", "2000"),
        why="0014-row-reductions-as-loop-passes.md",
    ),
    Row(
        name=schedule.SPLIT_OUTER,
        when="as outer reduction, with few long columns: blocks share rows, passes are kernels",
        choose=cuda.rows,
        takes=_SUM.format("1000000,8", 0),
        leaves=_SOFTMAX.format("16,40,64", 1),
        why="0014-row-reductions-as-loop-passes.md",
    ),
    Row(
        name=schedule.PERSISTENT_OUTER,
        when="as outer reduction, with rows that fit into the registers of a block: each is read once",
        choose=cuda.rows,
        takes=_SOFTMAX.format("16,40,64", 1),
        leaves=_SOFTMAX.format("16,40,64", -1),
        why="0014-row-reductions-as-loop-passes.md",
    ),
    Row(
        name=schedule.OUTER,
        when="neighbours in memory are neighbouring rows: neighbouring threads take them",
        choose=cuda.rows,
        takes=_SOFTMAX.format("64,3000,2048", 1),
        leaves=_SOFTMAX.format("16,40,64", 1),
        why="0014-row-reductions-as-loop-passes.md",
    ),
    Row(
        name=schedule.SPLIT_INNER,
        when="few long rows: blocks share rows, passes are kernels",
        choose=cuda.rows,
        takes=_SOFTMAX.format("2,1000000", -1),
        leaves=_SOFTMAX.format("2000,1000", -1),
        why="0014-row-reductions-as-loop-passes.md",
    ),
    Row(
        name=schedule.PERSISTENT_INNER,
        when="rows fit into the registers of their threads: each is read once",
        choose=cuda.rows,
        takes=_SOFTMAX.format("2000,1000", -1),
        leaves=_SOFTMAX.format("2000,100000", -1),
        why="0014-row-reductions-as-loop-passes.md",
    ),
    Row(
        name=schedule.INNER,
        when="threads share a row, which each pass reads again",
        choose=cuda.rows,
        takes=_SOFTMAX.format("2000,100000", -1),
        leaves=_SOFTMAX.format("2000,1000", -1),
        why="0014-row-reductions-as-loop-passes.md",
    ),
)

TABLE = {"cpu": CPU_TABLE, "cuda": CUDA_TABLE}


@overload
def choose_schedule(loop: Loop, layout: Layout, target: Cpu, *, of_any_length: bool = False) -> CpuSchedule: ...


@overload
def choose_schedule(loop: Loop, layout: Layout, target: Cuda, *, of_any_length: bool = False) -> Schedule: ...


def choose_schedule(loop: Loop, layout: Layout, target: Cpu | Cuda, *, of_any_length: bool = False) -> Schedule:
    """Chooses how a loop runs on a target over a layout. No other function decides this.

    Args:
        layout: has at least one element if there are sums without rows, and at least one row (CUDA).
        of_any_length: true if the lengths of rows are guesses: rows then run one after the other.
    """
    for choose in _choosers("cpu" if isinstance(target, Cpu) else "cuda", of_any_length):
        found = choose(loop, layout, target)
        if found is not None:
            if is_on("schedule"):
                log("schedule", str(found), reason(found))
            if is_on("loop") and (rewritten := rewritten_loops(found, loop)):
                log("loop", f"loop after {found.name}", rewritten)
            return found
    raise AssertionError("the last function of each table always gives a schedule")


def rewritten_loops(schedule: Schedule, loop: Loop) -> str:
    """The text of the loops that a schedule runs in place of the loop it was chosen for; "" if it runs that loop."""
    loops = schedule.loops()
    if loops == [loop]:
        return ""
    note = "\n  # its layout makes sums of stores" if schedule.name == SPLIT_COLUMN_SUM else ""
    return "\n".join(map(str, loops)) + note


def reason(schedule: Schedule) -> str:
    """The reason for a schedule: the condition of its row in the table, and the page with the reasons."""
    rows = TABLE["cpu" if isinstance(schedule, CpuSchedule) else "cuda"]
    row = next(row for row in rows if row.name == schedule.name)
    return f"  when: {row.when}\n  why:  specs/decisions/{row.why}"


@cache
def _choosers(target: str, of_any_length: bool) -> tuple[Callable[[Loop, Layout, Any], Schedule | None], ...]:
    """The functions of a table, in its order."""
    return tuple(dict.fromkeys(row.choose for row in TABLE[target] if not (of_any_length and row.by_length)))
