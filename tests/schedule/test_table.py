"""The table of schedules: each row matches its example and not its counter-example, which another row matches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from schedules import bound, cuda_launches

import opgraph as og
from opgraph.cli.main import main
from opgraph.cli.sources import kernel_sources
from opgraph.codegen.kernel import cuda_source, host_source
from opgraph.runtime import cpu_compiler
from opgraph.schedule import schedule
from opgraph.schedule.cpu import Cpu
from opgraph.schedule.cuda import Cuda
from opgraph.schedule.schedule import CpuSchedule, CudaPointwise, Schedule
from opgraph.schedule.table import CPU_TABLE, TABLE, Row, choose_schedule

ROWS = [(target, row) for target, rows in TABLE.items() for row in rows]
EACH = pytest.mark.parametrize(("target", "row"), ROWS, ids=[f"{target}-{row.name}" for target, row in ROWS])
DECISIONS = Path(__file__).parents[2] / "specs" / "decisions"


def chosen(text: str, target: str) -> Schedule:
    """The schedule on a machine with vectors of 16 floats, or on a GPU."""
    return choose_schedule(*bound(text), Cpu(lanes=True) if target == "cpu" else Cuda())


@EACH
def test_each_row_matches_its_example_and_not_its_counter_example(target: str, row: Row) -> None:
    taken, left = chosen(row.takes, target), chosen(row.leaves, target)
    assert taken.name == row.name and str(taken).startswith(f"{row.name} over ")
    assert left.name != row.name and left.name in {other.name for other in TABLE[target]}


@EACH
def test_each_rows_kernel_names_its_schedule(target: str, row: Row) -> None:
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
def test_each_row_refers_to_a_decision_page(target: str, row: Row) -> None:
    assert (DECISIONS / row.why).is_file()


@pytest.mark.parametrize("row", CPU_TABLE, ids=lambda row: row.name)
def test_shown_and_compiled_cpu_kernels_follow_the_row(row: Row, no_cache: None) -> None:
    if row.name == schedule.PERSISTENT_INNER and not cpu_compiler.has_lanes():
        pytest.skip("no GCC, or a machine without AVX-512")
    graph = og.parse(row.takes).finalize()
    (part,) = graph.get_partitions()
    (shown,) = kernel_sources(part)
    f = og.compile(graph)
    assert shown.schedule == row.name and f.kernels == {shown.entry: shown.code}
    rng = np.random.default_rng(0)
    feeds = {str(t.name): rng.standard_normal(t.shape).astype(np.float32) for t in graph.inputs}
    got, exact = f(feeds), og.evaluate(graph, feeds)
    assert f.kernels == {shown.entry: shown.code}
    np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)


def test_show_names_the_schedule_of_each_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.og"
    model.write_text("graph(x: f32[100,8]) -> (y)\n  y = SoftMax(x, axis=-1)\n")
    for device, name in (("cpu", schedule.TRANSPOSED_INNER), ("cuda", schedule.PERSISTENT_INNER)):
        assert main(["show", str(model), "--source", "--device", device]) == 0
        assert f"({device}), {name}\n" in capsys.readouterr().out


def test_each_schedule_name_has_a_row() -> None:
    names = {value for name, value in vars(schedule).items() if name.isupper() and isinstance(value, str)}
    assert names == {row.name for _, row in ROWS}
    for rows in TABLE.values():
        assert len({row.name for row in rows}) == len(rows)


def test_schedules_compare_by_value() -> None:
    """Schedules of equal loops and layouts are equal; on the CPU calls of other sizes share a kernel."""
    text = "graph(x: f32[{},40]) -> (y)\n  y = SoftMax(x, axis=-1)"
    one, same, other = (chosen(text.format(n), "cpu") for n in (100, 100, 300))
    assert one == same != other and str(one) == str(same)
    assert isinstance(one, CpuSchedule) and isinstance(other, CpuSchedule)
    assert one.key == other.key and host_source(one) == host_source(other)
