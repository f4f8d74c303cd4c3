"""`opgraph show --stages`, and the stage that `opgraph check` names: faults are planted in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_rows import row_graph
from row_graphs import feeds_of

import opgraph as og
from opgraph.cli.main import main
from opgraph.cli.sources import kernel_sources
from opgraph.cli.stages import first_wrong_stage
from opgraph.codegen.kernel import KernelSource
from opgraph.ir.op import Op
from opgraph.loops import hoist_factors, lower
from opgraph.loops.hoist_factors import without_row_factors
from opgraph.loops.loop import Loop
from opgraph.loops.lower import Lowered
from opgraph.loops.text import parse_loop
from opgraph.partition import decompose, partitioner
from opgraph.partition.partition import FUSED, Partition, graph_of
from opgraph.partition.units import Unit
from opgraph.runtime import cpu_compiler, cpu_kernel
from opgraph.runtime.reference import evaluate
from opgraph.schedule import cpu, cuda, schedule
from opgraph.schedule.table import CPU_TABLE, CUDA_TABLE

SWISH = "graph(x: f32[64,300]) -> (y)\n  s = Sigmoid(x)\n  y = Multiply(x, s)"
NORM = "graph(x: f32[64,300], w: f32[300]) -> (y)\n  y = RMSNorm(x, w)"
#: The factor m moves out of the sum of the last line.
SCALED = """graph(x: f32[64,300]) -> (y)
  m = ReduceMean(x, axes=[-1], keep_dims=true)
  p = Multiply(x, m)
  y = ReduceSum(p, axes=[-1], keep_dims=true)"""
COLUMNS = "graph(x: f32[100000,8]) -> (y)\n  y = ReduceSum(x, axes=[0])"
#: Three loops on CUDA: the row values that the sum needs, the sum, and y.
FISSION = (
    "graph(x: f32[300,2000], w: f32[300,1]) -> (y, s)\n  y = SoftMax(x, axis=-1)\n  p = Multiply(y, x)\n"
    "  s = SumTo(p, w)"
)

#: The same with an operand that lacks the axis of a row.
FISSION_OF_ROWS = (
    "graph(x: f32[300,2000], r: f32[300], w: f32[300,1]) -> (y, s)\n  y = SoftMax(x, axis=-1)\n"
    "  q = Unsqueeze(r, axes=[1])\n  p = Multiply(y, q)\n  s = SumTo(p, w)"
)


def show(model: Path, text: str, capsys: pytest.CaptureFixture[str], device: str = "cpu") -> list[str]:
    """The lines of `show --stages` after its tables."""
    model.write_text(text)
    assert main(["show", str(model), "--stages", "--device", device]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("partition ")) :]


def part_of(text: str) -> Partition:
    (part,) = og.parse(text).get_partitions()
    return part


@pytest.mark.parametrize(("device", "rows"), [("cpu", CPU_TABLE), ("cuda", CUDA_TABLE)])
def test_show_prints_each_stage(device: str, rows: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(tmp_path / "model.txt", SCALED, capsys, device)
    at = {
        name: i
        for i, line in enumerate(lines)
        for name in ("loop after", "schedule", "kernel")
        if line.startswith(name)
    }
    first, second = (i for i, line in enumerate(lines) if line.startswith("loop after"))
    assert lines[0] == "partition 0: 3 ops"
    assert og.parse("\n".join(lines[1:first])) == og.parse(SCALED)
    assert lines[first] == "loop after lowering" and lines[second] == "loop after hoist_factors"
    loops = [parse_loop("\n".join(lines[a + 1 : b])) for a, b in ((first, second), (second, at["schedule"]))]
    assert loops == [lowered.loop for _, lowered in lower.lowerings(part_of(SCALED))]
    (row,) = [row for row in rows if lines[at["schedule"]].startswith(f"schedule ({device}): {row.name} over 64 x 300")]
    assert lines[at["schedule"] + 1 : at["kernel"]] == [f"  when: {row.when}", f"  why:  specs/decisions/{row.why}"]
    entries = ", ".join(source.entry for source in kernel_sources(part_of(SCALED), device))
    assert lines[at["kernel"] :] == [f"kernel ({device}): {entries}"]


def test_show_prints_no_loop_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(tmp_path / "model.txt", SWISH, capsys)
    assert lines[0] == "partition 0: 2 ops; units: swish"
    assert [line for line in lines if line.startswith("loop after")] == ["loop after lowering"]


@pytest.mark.parametrize(
    ("text", "device", "name", "count"),
    [(COLUMNS, "cpu", schedule.SPLIT_COLUMN_SUM, 1), (FISSION, "cuda", schedule.LOOP_FISSION, 3)],
    ids=["cpu", "cuda"],
)
def test_show_prints_the_loops_that_a_schedule_makes_of_one(
    text: str, device: str, name: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = show(tmp_path / "model.txt", text, capsys, device)
    begin = lines.index(f"loop after {name}")
    assert [line.partition("(")[0] for line in lines[begin + 1 :] if not line.startswith(" ")] == ["loop"] * count + [
        "kernel "
    ]


def test_show_of_unknown_rank_defers_the_schedule_to_a_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(tmp_path / "model.txt", "graph(x: f32[*]) -> (y)\n  y = Exp(x)", capsys)
    assert lines[-1] == "schedule (cpu): follows from the shapes of a call"


# -- the first wrong stage ---------------------------------------------------------------------------------------------


def wrong_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a swish with another factor than that of its ops."""
    honest = partitioner.find_units

    def find(*args: Any) -> list[Unit]:
        return [replace(unit, attrs={**unit.attrs, "alpha": 1.5}) for unit in honest(*args)]

    monkeypatch.setattr(partitioner, "find_units", find)


def wrong_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a norm that takes the sum of squares instead of the mean."""
    honest = decompose.spelled_ops

    def spelled(op: Op) -> tuple[Op, ...]:
        other = {"ReduceMean": "ReduceSum"}
        return tuple(
            Op.locked(o.id, other.get(o.kind, o.kind), o.inputs, o.outputs, o.name, o.attrs) for o in honest(op)
        )

    monkeypatch.setattr(decompose, "spelled_ops", spelled)


def with_kind(loop: Loop, old: str, new: str) -> Loop:
    """A loop with the kind of some statements replaced."""
    return replace(loop, statements=tuple(replace(s, kind=new) if s.kind == old else s for s in loop.statements))


def wrong_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault in a loop that is rewritten afterwards."""
    honest = lower._lowered

    def lowered(*args: Any) -> Lowered:
        made = honest(*args)
        return replace(made, loop=with_kind(made.loop, "ReduceMean", "ReduceSum"))

    monkeypatch.setattr(lower, "_lowered", lowered)


def wrong_rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the factor that moved out of the sum instead of multiplying by it."""

    def hoisted(loop: Loop, numbers: Any) -> Loop:
        return with_kind(without_row_factors(loop, numbers), "Multiply", "Add")

    monkeypatch.setitem(lower.REWRITINGS, "hoist_factors", hoisted)


def further_rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lower.REWRITINGS, "of_sums", lambda loop, _: with_kind(loop, "ReduceSum", "ReduceMax"))


def wrong_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants column means instead of column sums."""
    honest: Any = cpu.column_sums

    def sums(*args: Any) -> Any:
        loop, layout = honest(*args)
        return replace(loop, stores=tuple(replace(s, total="{total} / {count}") for s in loop.stores)), layout

    monkeypatch.setattr(cpu, "column_sums", sums)


def wrong_text(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = cpu_kernel.host_source

    def source(*args: Any) -> KernelSource:
        made = honest(*args)
        return replace(made, code=made.code.replace("= og::mul(", "= og::add("))

    monkeypatch.setattr(cpu_kernel, "host_source", source)


OPS = "ops of the partition: units and decompositions"
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "a unit": (wrong_unit, SWISH, OPS),
    "a decomposition": (wrong_decomposition, NORM, OPS),
    "lowering": (wrong_lowering, SCALED, "loop after lowering"),
    "a rewriting": (wrong_rewriting, SCALED, "loop after hoist_factors"),
    "a rewriting behind it": (further_rewriting, SCALED, "loop after of_sums"),
    "the schedule": (wrong_schedule, COLUMNS, "kernel {entry} (split column sum)"),
    "the text": (wrong_text, SCALED, "kernel {entry} (inner reduction)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_names_the_first_wrong_stage(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_cache: None
) -> None:
    plant, text, stage = FAULTS[fault]
    model = tmp_path / "model.txt"
    model.write_text(text)
    assert main(["check", str(model), "--device", "cpu"]) == 0
    assert "first wrong stage" not in capsys.readouterr().out
    plant(monkeypatch)
    (source,) = kernel_sources(part_of(text))
    assert main(["check", str(model), "--device", "cpu"]) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("first wrong stage")]
    assert found == [f"first wrong stage: {stage.format(entry=source.entry)}"]


def test_check_names_a_partition_whose_ops_differ_from_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its kernel computes the partition's ops, so that only the whole graph is wrong."""
    honest = partitioner.make_partition

    def made(graph: og.Graph, outputs: set[int], id: int, kind: str, ops: Any, *rest: Any) -> Partition:
        other = {"Exp": "Tanh"}
        ops = [Op.locked(o.id, other.get(o.kind, o.kind), o.inputs, o.outputs, o.name, o.attrs) for o in ops]
        return honest(graph, outputs, id, kind, ops, *rest)

    model = tmp_path / "model.txt"
    model.write_text("graph(x: f32[8,8], w: f32[8,8]) -> (y)\n  m = MatMul(x, w)\n  y = Exp(m)")
    monkeypatch.setattr(partitioner, "make_partition", made)
    assert main(["check", str(model), "--device", "cpu"]) == 1
    assert "first wrong stage: partition 1: its ops are not the graph's\n" in capsys.readouterr().out


def test_check_reports_errors_between_correct_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole graph passes on a changed value between its partitions."""
    from opgraph.cli import check

    honest = check.compile

    def compiled(graph: og.Graph, engine: og.Engine) -> Callable[..., Any]:
        f = honest(graph, engine)
        return f if len(f.partitions) == 1 else lambda feeds: f(feeds) * np.float32(1.01)

    model = tmp_path / "model.txt"
    model.write_text("graph(x: f32[8,8], w: f32[8,8]) -> (y)\n  m = MatMul(x, w)\n  y = Exp(m)")
    monkeypatch.setattr(check, "compile", compiled)
    assert main(["check", str(model), "--device", "cpu"]) == 1
    told = "first wrong stage: run: each partition by itself is right, so look at what goes from one to the next\n"
    assert told in capsys.readouterr().out


def test_check_without_a_compiler_names_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from opgraph.runtime import fallback

    monkeypatch.setattr(cpu_compiler, "is_available", lambda: False)  # only this: dependent results are cached
    monkeypatch.setattr(fallback, "_notice", lambda engine: None)
    honest = fallback.interpret
    monkeypatch.setattr(fallback, "interpret", lambda *args: [2 * array for array in honest(*args)])
    model = tmp_path / "model.txt"
    model.write_text(SWISH)
    assert main(["check", str(model), "--device", "cpu"]) == 1
    told = "first wrong stage: the statements of the loop, which run one by one where there is no compiler\n"
    assert told in capsys.readouterr().out


def stages_of(graph: og.Graph, feeds: dict[str, np.ndarray], device: str) -> list[str]:
    """The first wrong stage of each fused partition of a graph, as if its kernel were wrong."""
    truth = {t.id: feeds[str(t.name)] for t in graph.inputs}
    evaluate(graph, feeds, watch=lambda t, a: truth.update({t.id: a}))
    found = []
    for part in graph.get_partitions():
        if part.kind == FUSED:
            alone = graph_of(part)
            inputs = {t.id: truth[t.id].astype(np.float32) for t in part.input_ports}
            exact, peer = (evaluate(alone, inputs, dtype=dtype) for dtype in ("f64", None))
            results = [list(r.values()) if isinstance(r, dict) else [r] for r in (exact, peer)]
            found.append(first_wrong_stage(part, inputs, *results, device))
    return found


def arrays(graph: og.Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {str(t.name): rng.standard_normal(t.shape).astype(np.float32) for t in graph.inputs}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_stage_before_the_kernel_is_right(device: str) -> None:
    """For each schedule, and for rows that are reduced along any axes, with reshapes and sums between them."""
    rows = {"cpu": CPU_TABLE, "cuda": CUDA_TABLE}[device]
    for row in rows:
        graph = og.parse(row.takes).finalize()
        if sum(np.prod(t.shape) for t in graph.inputs) < 10_000_000:
            (stage,) = stages_of(graph, arrays(graph), device)
            needs_lanes = device == "cpu" and row.name == schedule.PERSISTENT_INNER
            name = schedule.INNER if needs_lanes and not cpu_compiler.has_lanes() else row.name
            assert stage.startswith("kernel og_") and stage.endswith(f"({name})")
    for seed in range(12):
        graph = row_graph(seed, "f32").finalize()
        feeds = {name: a.astype(np.float32) for name, a in feeds_of(graph, seed).items()}
        assert all(stage.startswith("kernel og_") for stage in stages_of(graph, feeds, device))


@pytest.mark.parametrize("text", [FISSION, FISSION_OF_ROWS], ids=["elements", "rows"])
def test_loop_fission_is_named_as_a_stage(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no GPU: the loops after the split run in NumPy."""
    honest = cuda.row_values

    def values(*args: Any) -> Any:
        made, (adding, layout) = honest(*args)
        return made, (with_kind(adding, "Multiply", "Add"), layout)

    graph = og.parse(text).finalize()
    (right,) = stages_of(graph, arrays(graph), "cuda")
    assert right.startswith("kernel og_") and right.endswith("(loop fission)")
    monkeypatch.setattr(cuda, "row_values", values)
    assert stages_of(graph, arrays(graph), "cuda") == ["loop after loop fission"]


def blocks_of(page: Path, section: str) -> list[str]:
    """The code blocks in a section of a page."""
    text = page.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [block.partition("\n")[2] for block in text.split("```")[1::2]]


def test_contributing_example_prints_the_shown_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Except for the names of kernels and the tables before."""
    source = Path(hoist_factors.__file__).read_text()
    difference, graph, checked, shown = blocks_of(Path(__file__).parents[2] / "CONTRIBUTING.md", "A wrong result")
    old, new = (line[1:] for line in difference.splitlines())
    assert source.count(old) == 1
    names: dict[str, Any] = {"__name__": hoist_factors.__name__}
    exec(source.replace(old, new), names)
    monkeypatch.setitem(lower.REWRITINGS, "hoist_factors", names["without_row_factors"])
    model = tmp_path / "scaled_max.txt"
    model.write_text(graph)
    assert main(["check", str(model), "--device", "cpu"]) == 1
    told = capsys.readouterr()
    assert "first wrong stage: loop after hoist_factors" in checked.splitlines()
    assert f"{told.out}{told.err}".endswith(checked)
    assert main(["show", str(model), "--stages"]) == 0
    kept = [line for line in shown.splitlines() if not line.startswith("kernel")]
    assert capsys.readouterr().out.splitlines()[-1 - len(kept) : -1] == kept
