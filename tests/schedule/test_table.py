"""The table of schedules: each row takes its example and leaves its counter-example, which runs by another row."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedules import bound, cuda_launches

from opgraph.codegen.kernel import cuda_source, host_source
from opgraph.schedule import schedule
from opgraph.schedule.cpu import Cpu
from opgraph.schedule.cuda import Cuda
from opgraph.schedule.schedule import CpuSchedule, CudaPointwise, Schedule
from opgraph.schedule.table import TABLE, Row, choose_schedule

ROWS = [(target, row) for target, rows in TABLE.items() for row in rows]
EACH = pytest.mark.parametrize(("target", "row"), ROWS, ids=[f"{target}-{row.name}" for target, row in ROWS])
DECISIONS = Path(__file__).parents[2] / "specs" / "decisions"


def chosen(text: str, target: str) -> Schedule:
    """On a machine with vectors of 16 floats, or a GPU."""
    return choose_schedule(*bound(text), Cpu(lanes=True) if target == "cpu" else Cuda())


@EACH
def test_each_row_takes_its_example_and_leaves_its_counter_example(target: str, row: Row) -> None:
    taken, left = chosen(row.takes, target), chosen(row.leaves, target)
    assert taken.name == row.name and str(taken).startswith(f"{row.name} over ")
    assert left.name != row.name and left.name in {other.name for other in TABLE[target]}


@EACH
def test_each_row_has_a_kernel_that_says_its_name(target: str, row: Row) -> None:
    found = chosen(row.takes, target)
    if isinstance(found, CpuSchedule):
        sources = [host_source(found)]
    elif isinstance(found, CudaPointwise):
        sources = [cuda_source(found)]
    else:
        sources = [launch.source for launch in cuda_launches(*bound(row.takes))]
    names = {source.schedule for source in sources}
    if row.name == schedule.LOOP_FISSION:
        assert len(sources) > 1 and names < {other.name for other in TABLE[target]}
    else:
        assert names == {row.name}


@EACH
def test_each_row_gives_its_reasons_on_a_page(target: str, row: Row) -> None:
    assert (DECISIONS / row.why).is_file()


def test_each_name_has_a_row() -> None:
    names = {value for name, value in vars(schedule).items() if name.isupper() and isinstance(value, str)}
    assert names == {row.name for _, row in ROWS}
    for rows in TABLE.values():
        assert len({row.name for row in rows}) == len(rows)


def test_a_schedule_is_a_value() -> None:
    """Equal for equal loops and layouts; on the CPU calls of other sizes share a kernel."""
    text = "graph(x: f32[{},40]) -> (y)\n  y = SoftMax(x, axis=-1)"
    one, same, other = (chosen(text.format(n), "cpu") for n in (100, 100, 300))
    assert one == same != other and str(one) == str(same)
    assert isinstance(one, CpuSchedule) and isinstance(other, CpuSchedule)
    assert one.key == other.key and host_source(one) == host_source(other)
