"""The command that runs everything on a GPU: its steps are killed, counted and reported as specified. Needs no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import budget
import nvrtc
import pytest
import sass_table
from emulator import FakeCupy

from opgraph.bench.plan import GROUPS
from opgraph.bench.results import Cell, Results, Row
from opgraph.bench.timing import Ratio

GPU = Path(__file__).parents[1] / "gpu"
needs_nvrtc = pytest.mark.skipif(
    nvrtc.library() is None or nvrtc.disassembler() is None, reason="NVRTC or nvdisasm is missing: see the extra test"
)


def module(name: str) -> Any:
    """The module of a file in tests/gpu, which is no package."""
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", GPU / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def test_hanging_step_is_killed_and_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = module("run")
    python = sys.executable
    made = [
        run.Step("hangs", [python, "-c", "import time; time.sleep(60)"], 1, "a.log"),
        run.Step("fails as it should", [python, "-c", "raise SystemExit(9)"], 30, "a.log", expected=9),
        run.Step("is not there", ["no-such-program"], 30, "b.log"),
        run.Step("works", [python, "-c", "print('here')"], 30, "b.log"),
    ]
    monkeypatch.setattr(run, "steps", lambda folder: made)
    monkeypatch.setattr(run, "KEPT", tmp_path / "kept")
    assert run.main([str(tmp_path / "out")]) == 1
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [r["status"] for r in rows] == ["out of time", 9, "there is no no-such-program", 0]
    assert [r["good"] for r in rows] == [False, True, False, True]
    assert "here" in (tmp_path / "out" / "b.log").read_text()
    assert run.main([str(tmp_path / "more"), "--only", "works", "--only", "should"]) == 0


FAILING = """
import time

def test_fails():
    assert 6 * 7 == 41

def test_hangs():
    time.sleep(60)
"""


def test_interrupted_tests_report_their_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = module("run")
    (tmp_path / "test_some.py").write_text(FAILING)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "GRACE", 20.0)
    tests = run.Step("tests", [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], 1, "tests.log")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
    tests.run(tmp_path, 24.0)
    signal.signal(signal.SIGINT, before)
    assert tests.status == "out of time"
    assert "assert (6 * 7) == 41" in (tmp_path / "tests.log").read_text()


def test_step_is_skipped_if_its_fault_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Example: a tool that does not find a planted fault, for instance because it refuses the device."""
    run = module("run")
    python = sys.executable
    made = [
        run.Step("finds a fault", [python, "-c", ""], 30, "a.log", expected=9),
        run.Step("finds none", [python, "-c", ""], 30, "a.log", after="finds a fault"),
    ]
    monkeypatch.setattr(run, "steps", lambda folder: made)
    monkeypatch.setattr(run, "KEPT", tmp_path / "kept")
    assert run.main([str(tmp_path)]) == 1
    assert made[1].status == "not run, as this was not good: finds a fault" and not made[1].is_good


def test_steps_of_each_call_fit_its_time_limit() -> None:
    run = module("run")
    found = run.steps(Path("out"))
    calls = {call: [s for s in found if s.call == call] for call in run.CALLS}
    assert [s.name for s in calls[1]][:2] == ["environment", "smoke tests"] and calls[1][-1].name == "tests"
    assert calls[2][0].name == "what did not pass"
    for call, chosen in calls.items():
        assert chosen and sum(s.limit for s in chosen) <= run.CALLS[call]
    suites = [word for s in found for word in s.command if "--json" in s.command and word in GROUPS["all"]]
    assert sorted(suites) == sorted(GROUPS["gpu"])
    assert [s.expected for s in found].count(run.FOUND) == 3
    assert {s.after for s in found} - {""} == {s.name for s in found if s.expected == run.FOUND}


def test_spare_time_is_shared_by_weight() -> None:
    run = module("run")
    first, second, third = (run.Step(n, [], 100, "a.log", spare=s) for n, s in (("a", 0), ("b", 1), ("c", 3)))
    assert run.limit_of(first, [second, third], 500) == 100
    assert run.limit_of(second, [third], 400) == 100 + 200 / 4
    assert run.limit_of(third, [], 250) == 250  # the others took less than their time
    assert run.limit_of(second, [third], 150) == 100 and run.limit_of(third, [], 40) == 40


PARTLY = """
import pytest

def test_passes(): pass
def test_fails(): assert 6 * 7 == 41
def test_is_skipped(): pytest.skip("so")
@pytest.fixture
def broken(): raise RuntimeError("before it began")
def test_never_begins(broken): pass
"""


def test_second_run_repeats_only_tests_that_did_not_pass(tmp_path: Path) -> None:
    """With pytest-xdist's workers, which collect separately, and without."""
    (tmp_path / "test_some.py").write_text(PARTLY)
    outcomes = tmp_path / "outcomes.txt"
    options = ["--tb=no", "--outcomes", str(outcomes), "--again", str(outcomes)]
    assert "1 failed, 1 passed, 1 skipped, 1 error" in pytest_of(tmp_path, *options)
    lines = {line.split(" ")[1].partition("::")[2]: line.split(" ")[0] for line in outcomes.read_text().splitlines()}
    expected = {"test_passes": "passed", "test_is_skipped": "skipped"}
    assert lines == expected | {"test_fails": "failed", "test_never_begins": "failed"}
    assert "1 failed, 1 error" in pytest_of(tmp_path, *options, "-n", "2")
    (tmp_path / "test_some.py").write_text(PARTLY.replace("== 41", "== 42").replace("(broken)", "()"))
    assert "2 passed" in pytest_of(tmp_path, *options)
    told = pytest_of(tmp_path, *options, "-n", "1")
    assert "failed" not in told and "no tests ran" in told


def test_second_call_reads_outcomes_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call's folder is another one, and empty."""
    run = module("run")
    said = "import sys; open(sys.argv[1], 'a').write('passed ' + sys.argv[2] + chr(10))"

    def steps(folder: Path) -> list[Any]:
        made = [run.Step(f"step {n}", [], 30, "a.log", call=n, keeps=run.OUTCOMES) for n in (1, 2)]
        for step in made:
            step.command = [sys.executable, "-c", said, str(folder / run.OUTCOMES), step.name]
        return made

    monkeypatch.setattr(run, "steps", steps)
    monkeypatch.setattr(run, "KEPT", tmp_path / "kept")
    for call, expected in ((1, 1), (2, 2), (1, 1)):  # a first call starts again
        folder = tmp_path / f"out{call}{expected}{len(list(tmp_path.iterdir()))}"
        assert run.main([str(folder), "--call", str(call)]) == 0
        assert len((folder / run.OUTCOMES).read_text().splitlines()) == expected


def test_cuda_toolkit_program_is_found_beside_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = module("run")
    for place in ("bin/nvcc", "compute-sanitizer/compute-sanitizer"):
        path = tmp_path / place
        path.parent.mkdir()
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert run.tool("compute-sanitizer") == str(tmp_path / "compute-sanitizer" / "compute-sanitizer")
    assert run.tool("no-such-tool") == "no-such-tool"


def test_the_slowest_rows_are_profiled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    profiled = module("profiled")
    rows = [
        Row(
            suite="activation", entry="swish", dtype=dtype, size=1 << 26, elements=1 << 26,
            cells=(Cell(peer="opgraph", us=us),), copy=Cell(peer="copy", us=100.0),
        )
        for dtype, us in (("f32", 104.0), ("f32", 120.0), ("bf16", 115.0), ("f16", 110.0))
    ]  # fmt: skip
    assert [(r.dtype, r.ours.us) for r in profiled.slow(rows, 6)] == [("f32", 120.0), ("bf16", 115.0)]
    assert len(profiled.slow(rows, 1)) == 1
    (tmp_path / "bench.json").write_text(Results(machine={}, settings={}, rows=rows).to_json())
    assert profiled.main(["--ncu", "echo", str(tmp_path / "bench.json"), str(tmp_path / "none.json")]) == 0
    told = capfd.readouterr().out
    assert "4 rows, of which 2 are profiled" in told and "--run swish forward bf16 67108864" in told
    assert profiled.main(["--ncu", "echo", str(tmp_path / "none.json")]) == 1


def test_output_files_are_few_and_small_with_plain_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output that a borrowed machine returns, for any outcome of the steps."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = module("run")
    out = tmp_path / "out"
    monkeypatch.setattr(run, "KEPT", tmp_path / "kept")
    assert run.main([str(out), "--only", "environment", "--only", "of others"]) == 1
    told = {row["step"]: row for row in json.loads((out / "summary.json").read_text())}
    assert "GPU" in (out / "bench.log").read_text() and told["benchmark of others"]["status"] == 2
    for call in run.CALLS:
        chosen = [s for s in run.steps(out) if s.call == call]
        written = {"summary.json", *(s.log for s in chosen), *(s.keeps for s in chosen if s.keeps)}
        assert len(written) + 1 <= 8  # one more that a killed process was writing
        assert all(re.fullmatch(r"[\w.-]+", name) for name in written)
    assert {f.name for f in out.iterdir()} <= {"summary.json", "environment.log", "bench.log"}
    long = tmp_path / "long.log"
    long.write_text("first\n" + "x" * (run.LARGEST + 5) + "\nlast line")
    run.shorten(long)
    text = long.read_text()
    assert len(text) < run.LARGEST and text.startswith("first\n") and "are left out" in text
    assert run.last_line(long) == "last line"


LOSES_IT = """
import time, cupy, pytest

def test_that_loses_the_gpu():
    cupy.lost.append(1)
    assert 6 * 7 == 41

@pytest.mark.parametrize("i", range(6))
def test_that_needs_it(i):
    time.sleep(0.05)
    cupy.cuda.runtime.memGetInfo()
"""
LOST_CUPY = """
import types
lost = []
class CUDARuntimeError(RuntimeError): status = 700
def memGetInfo():
    if lost: raise CUDARuntimeError("an illegal memory access was encountered")
    return 1, 1
cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(memGetInfo=memGetInfo, CUDARuntimeError=CUDARuntimeError))
"""


def pytest_of(folder: Path, *options: str) -> str:
    """The output of a run with the plugin, in a separate process without a visible GPU."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (folder, GPU, GPU.parents[1]))),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
        "-p",
        "as_they_come",
    ]
    done = subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_that_loses_the_gpu_fails_alone(tmp_path: Path) -> None:
    """CUDA refuses every later call of its process; another worker runs the remaining tests."""
    (tmp_path / "test_some.py").write_text(LOSES_IT)
    (tmp_path / "cupy.py").write_text(LOST_CUPY)
    told = pytest_of(tmp_path, "-n", "1", "--dist", "worksteal", "--tb=no")
    assert "6 passed" in told and "assert (6 * 7) == 41" in told and "crashed" in told, told
    (tmp_path / "cupy.py").write_text(LOST_CUPY.replace("status = 700", "status = 35"))
    told = pytest_of(tmp_path, "-n", "1", "--tb=no")
    assert "7 failed" in told and "crashed" not in told, told  # as if there had never been a GPU


def test_missing_gpu_fails_under_the_gpu_option(tmp_path: Path) -> None:
    """A run on a machine with a GPU that skips everything has tested nothing."""
    one = [str(GPU / "test_failures.py"), "-c", str(GPU.parents[1] / "pyproject.toml"), "-k", "cupy_out_of_memory"]
    assert "1 skipped" in pytest_of(tmp_path, *one)
    told = pytest_of(tmp_path, *one, "--gpu", "--tb=no")
    assert "1 error" in told and ("no GPU" in told or "CuPy is missing" in told), told


@needs_nvrtc
def test_row_bounds_follow_copy_bandwidth_and_gpu_clocks() -> None:
    bounds = module("bounds")
    copy, peer = (
        Cell(peer="copy", us=120.0),
        Cell(peer="torch native", us=100.0, ratio=Ratio(median=1.3, low=1.2, high=1.4, rounds=9)),
    )
    ours = Cell(peer="opgraph", us=130.0)
    row = Row(suite="activation", entry="swish", size=1 << 26, elements=1 << 26, cells=(ours,), copy=copy)
    h200 = {"multiprocessors": 132, "gpu_mhz": 1980}
    (found,) = bounds.reached(Results(machine=h200, settings={}, rows=[row]))
    assert found.part == 120 / 130 and not found.is_good  # the goal is 95 %
    (page,) = (r for r in sass_table.read() if r.key == ("swish", "forward", "f32"))
    memory = 8 * (1 << 26) / budget.BYTES_A_SECOND * 1e6
    assert found.arithmetic == pytest.approx(page.share * memory, rel=0.2) and found.limit == page.limit
    slow = Results(machine=h200 | {"gpu_mhz": 990}, settings={}, rows=[replace(row, dtype="bf16", cells=(ours, peer))])
    (again,) = bounds.reached(slow)
    assert again.part == 120 / 130 and not again.is_good  # reaches the goal, but the peer was faster
    assert "1.30 of torch native" in str(again)
    (fast,) = bounds.reached(replace(slow, machine=h200))
    assert again.arithmetic == pytest.approx(2 * fast.arithmetic)
    with pytest.raises(SystemExit, match="multiprocessors"):
        next(bounds.reached(replace(slow, machine={})))


def test_benchmark_stores_each_row_when_it_is_measured() -> None:
    from opgraph.bench.run import Settings
    from opgraph.bench.run import run as bench

    kept: list[int] = []
    chosen = {"entries": ("swish",), "sizes": (1000,), "dtypes": ("f32",), "peers": ("NumPy",)}
    some = Settings(suites=("activation",), budget=0.2, **chosen)  # type: ignore[arg-type]
    results = bench(some, keep=lambda r: kept.append(len(r.rows)))
    assert kept == list(range(1, len(results.rows) + 1)) and kept


def test_sanitizer_program_runs_on_the_emulator(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its graphs compile and give the right results; under the tools all of them run on a GPU."""
    program = module("sanitized")
    some = program.graphs()[1::9]
    monkeypatch.setattr(program, "graphs", lambda: some)
    program.run(cupy)
    assert len({name for name, _, _ in cupy.launches}) >= len(some) > 4
