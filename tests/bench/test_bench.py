"""`opgraph.bench` measures what its results state, and times only peers whose results are right."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opgraph.bench import entries, plan
from opgraph.bench.case import as_numpy, make
from opgraph.bench.entries import BACKWARD, DTYPES, ENTRIES, FORWARD, Entry, chosen
from opgraph.bench.formula import recorded
from opgraph.bench.peers import table
from opgraph.bench.peers.copies import copies
from opgraph.bench.peers.peer import Absent, Built, Peer, Refused
from opgraph.bench.peers.text import cxx_function, triton_module
from opgraph.bench.plan import (
    ENTRY_SUITES,
    GROUPS,
    SLOW_TO_BUILD,
    WAITS,
    available_bytes,
    jobs,
    needed_bytes,
    suites_of,
)
from opgraph.bench.results import Cell, Figure, Results, Row, from_json
from opgraph.bench.run import Settings, run
from opgraph.bench.suites import host as host_suite
from opgraph.bench.suites.entries import SHORTEST, Budget, last_level_cache, row_of
from opgraph.bench.suites.host import python_calls
from opgraph.bench.suites.scale import network
from opgraph.bench.suites.timed import checked, measured
from opgraph.bench.timing import LEAST, MOST, HostClock, Ratio, in_turns, planned, ratio, takes_part
from opgraph.bench.truth import Truth
from opgraph.errors import InvalidArguments, ModelError

SIZE = 640
PAIRS = [(e, d) for e in ENTRIES for d in e.directions]
HERE = [f.peer for f in table.look("cpu") if f.version and f.peer.name != "torch.compile"]


def entry_of(name: str) -> Entry:
    return next(e for e in ENTRIES if e.name == name)


# -- entries and cases --


@pytest.mark.parametrize(("entry", "direction"), PAIRS, ids=lambda v: v if isinstance(v, str) else v.name)
def test_every_entry_has_a_graph_in_every_dtype(entry: Entry, direction: str) -> None:
    for dtype in entry.dtypes:
        graph = entry.graph(entry.dims(SIZE), dtype, direction)
        names = [t.name for t in graph.outputs]
        assert names == (["y"] if direction == FORWARD else [f"d_{name}" for name in entry.wrt])
        assert {t.dtype for t in graph.outputs} == {dtype}


def test_entry_names_are_unique_and_formulas_documented() -> None:
    assert len({e.name for e in ENTRIES}) == len(ENTRIES)
    assert all(e.formula.__doc__ for e in ENTRIES)


def test_entry_sizes_are_near_the_requested_size() -> None:
    for entry in ENTRIES:
        for n in (1000, 1 << 20, 1 << 25, 2**31 + 2**20):
            assert 0.6 * n <= np.prod(entry.dims(n), dtype=float) <= 1.001 * n


def test_byte_counts_are_one_read_and_one_write() -> None:
    assert make(entry_of("swish"), FORWARD, "f32", SIZE).bytes == 2 * 4 * SIZE
    assert make(entry_of("swish"), BACKWARD, "bf16", SIZE).bytes == 3 * 2 * SIZE
    assert make(entry_of("glu of halves"), BACKWARD, "f32", SIZE).bytes == 5 * 4 * SIZE
    case = make(entry_of("swish"), FORWARD, "f32", SIZE)
    a, b = copies(case).keys() & {"copy (memcpy)"}, copies(case)
    assert a and len(b) >= 2


def test_backward_entries_read_the_tensors_saved_in_training() -> None:
    case = make(entry_of("softmax"), BACKWARD, "f32", SIZE)
    x = case.arrays["x"].astype(np.float64)
    true = np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)
    assert case.kept == ("y",) and set(case.feeds) == {"y", "d_y"}
    np.testing.assert_allclose(case.feeds["y"], true, rtol=1e-6)
    assert make(entry_of("rms norm"), BACKWARD, "f32", SIZE).kept == ()


def test_halves_are_views_and_transposed_operand_is_a_transpose() -> None:
    case = make(entry_of("glu of halves"), BACKWARD, "f32", SIZE)
    assert np.shares_memory(case.arrays["a"], case.packed) and np.shares_memory(case.arrays["b"], case.packed)
    assert np.shares_memory(case.outs["d_a"], case.packed_out)
    assert not make(entry_of("transposed + residual"), FORWARD, "f32", SIZE).arrays["x"].flags.c_contiguous


def test_patterns_select_entries_and_unknown_ones_raise() -> None:
    assert {e.name for e in chosen({"activation"}, ("gelu*",))} == {"gelu", "gelu, tanh"}
    with pytest.raises(InvalidArguments, match="no entry"):
        chosen({"rows"}, ("gelu",))


def test_formula_is_recorded_op_by_op() -> None:
    steps = recorded(lambda m, x: m.Clamp(2.0 - x, min=0.0, max=1.0), ["x"])
    assert [(s.kind, s.args, s.attrs) for s in steps] == [
        ("Subtract", (2.0, "x"), ()),
        ("Clamp", ("t0",), (("min", 0.0), ("max", 1.0))),
    ]
    assert len(entry_of("chain of 12").steps()) == 12 and len(entry_of("chain of 60").steps()) == 60


# -- peers --


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_every_installed_peer_agrees_with_float64(entry: Entry) -> None:
    """Checks all pairs in f32, and forward in bf16; opgraph itself only where no other test compiles its kernels."""
    took_part = set()
    for direction, dtype in [(d, "f32") for d in entry.directions] + [(FORWARD, "bf16")]:
        case = make(entry, direction, dtype, SIZE)
        truth = Truth(case)
        ours = [table.OURS] if (direction, dtype) == (FORWARD, "f32") else []
        for peer in (*ours, *HERE):
            cell, built = checked(case, peer, truth)
            assert not cell.failed.startswith("wrong"), (direction, dtype, cell)
            if built is not None:
                took_part.add(peer.name)
    if any(p.name == "torch eager" for p in HERE):
        assert {"opgraph", "torch eager"} <= took_part


@pytest.mark.slow
def test_torch_compile_agrees_in_both_directions() -> None:
    pytest.importorskip("torch")
    peer = next(p for p in table.PEERS if p.name == "torch.compile")
    for direction in (FORWARD, BACKWARD):
        case = make(entry_of("swish, alpha per channel"), direction, "f32", SIZE)
        cell, built = checked(case, peer, Truth(case))
        assert built is not None and not built.allocates, cell


def test_wrong_peer_is_reported_and_not_timed() -> None:
    def build(case):  # type: ignore[no-untyped-def]
        def call() -> None:
            np.multiply(case.arrays["x"], 0.51, out=case.out)

        return Built(call=call)

    wrong = Peer(name="half", get="", find=lambda device: "1", build=build)
    row = measured(make(entry_of("swish"), FORWARD, "f32", SIZE), [wrong], HostClock(), 0.01, "warm", lambda _: None)
    cell = row.cells[1]
    assert cell.failed.startswith("wrong: y is") and cell.us is None and cell.ratio is None
    assert row.ours.us is not None and row.copy is not None and row.copy.ratio is not None


def test_unwritten_results_are_reported_wrong() -> None:
    lazy = Peer(name="lazy", get="", find=lambda device: "1", build=lambda case: Built(call=lambda: None))
    case = make(entry_of("swish"), FORWARD, "f32", SIZE)
    table.OURS.build(case).call()
    assert checked(case, lazy, Truth(case))[0].failed.startswith("wrong: y is inf")


def test_ends_of_large_backward_entries_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraph.bench.truth.WHOLE", 0)
    case = make(entry_of("bias + gelu"), BACKWARD, "f32", 1 << 22)
    few = case.entry.graph((8, *case.space[1:]), "f32", BACKWARD)
    assert not {t.name for t in few.inputs} <= case.feeds.keys(), "nothing else is kept of few rows"
    cell, _ = checked(case, table.OURS, Truth(case))
    assert not cell.failed


def test_first_and_last_elements_of_a_large_array_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraph.bench.truth.WHOLE", 100)
    monkeypatch.setattr("opgraph.bench.truth.ELEMENTS", 8)
    case = make(entry_of("swish"), FORWARD, "f32", 1000)
    truth = Truth(case)
    exact = case.arrays["x"] / (1 + np.exp(-case.arrays["x"]))
    for position, is_right in ((500, True), (0, False), (999, False), (992, False)):
        got = exact.copy()
        got[position] += 1
        assert (truth.check({"y": got}).wrong == "") is is_right


def test_in_place_entry_restores_its_inputs_for_each_peer() -> None:
    case = make(entry_of("in place"), FORWARD, "f32", SIZE)
    before, truth = as_numpy(case.arrays["x"]).copy(), Truth(case)
    for _ in range(2):
        cell, built = checked(case, table.OURS, truth)
        assert built is not None, cell
        assert not np.array_equal(case.arrays["x"], before)
    truth.restore()
    np.testing.assert_array_equal(case.arrays["x"], before)


def test_failing_peer_is_reported_and_others_continue() -> None:
    def raises(case):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError("of its own")

    def refuses(case):  # type: ignore[no-untyped-def]
        raise Refused("has no word for it")

    case = make(entry_of("swish"), FORWARD, "f32", SIZE)
    for build, said in ((raises, "error: ZeroDivisionError: of its own"), (refuses, "has no word for it")):
        peer = Peer(name="other", get="", find=lambda device: "1", build=build)
        cell, built = checked(case, peer, Truth(case))
        assert built is None and cell.failed == said


def test_absent_peers_are_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(device: str) -> str:
        raise Absent("No module named 'somelib'")

    absent = Peer(name="somelib", get="pip install somelib", find=find, build=lambda case: Built(call=lambda: None))
    monkeypatch.setattr(table, "PEERS", (absent, *table.PEERS))
    found = {f.peer.name: f for f in table.look("cpu")}
    assert found["somelib"].reason == "No module named 'somelib'" and not found["somelib"].version
    assert "GPU" in found["Triton"].reason and found["Triton"].peer.get == "pip install triton"
    assert [f.peer.name for f in table.look("cpu", only=("NumPy",))] == ["NumPy"]
    assert "NumPy" not in [f.peer.name for f in table.look("cpu", without=("NumPy",))]
    with pytest.raises(InvalidArguments, match="no peer 'somelob'"):
        table.look("cpu", only=("somelob",))


def test_jiterator_source_compiles_for_every_pointwise_formula(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    head = "#include <cmath>\nusing namespace std;\n"
    parts = []
    for index, entry in enumerate(e for e in ENTRIES if e.suite != "rows"):
        given = ", ".join(["1.f"] * len(entry.operands))
        parts.append(f"namespace n{index} {{ {cxx_function(entry)} float used = fused<float>({given}); }}\n")
    source = tmp_path / "all.cpp"
    source.write_text(head + "#include <algorithm>\n" + "".join(parts))
    done = subprocess.run([compiler, "-fsyntax-only", str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_triton_source_is_valid_python_and_rows_are_refused() -> None:
    for entry in ENTRIES:
        if entry.suite == "rows":
            with pytest.raises(Refused):
                triton_module(entry)
        else:
            compile(triton_module(entry), entry.name, "exec")


# -- timing --


def test_ratios_compare_neighbouring_runs() -> None:
    found = ratio([1.0, 2.0, 30.0], [2.0, 4.0, 60.0])
    assert found == Ratio(median=0.5, low=0.5, high=0.5, rounds=3) and not found.noisy
    with_gaps = ratio([1.0, 9.0, 3.0, 4.0, 5.0], [1.0, None, 1.0, 2.0, 1.0])
    assert (with_gaps.median, with_gaps.rounds) == (2.5, 4)
    assert with_gaps.low == pytest.approx(1.75) and with_gaps.high == pytest.approx(3.5) and with_gaps.noisy
    once = ratio([3.0], [1.0])
    assert once == Ratio(median=3.0, low=3.0, high=3.0, rounds=1) and once.noisy


def test_slow_peers_skip_rounds_and_opgraph_runs_in_all() -> None:
    rounds = planned({"ours": 0.001, "fast": 0.001, "slow": 0.05}, 1.0)
    assert rounds == {"ours": MOST, "fast": MOST, "slow": 6}
    assert sum(takes_part(i, 6, MOST) for i in range(MOST)) == 6
    assert planned({"ours": 0.1, "slow": 0.4}, 0.5) == {"ours": 3, "slow": 3}
    assert planned({"ours": 0.05, "fast": 0.001}, 1.0) == {"ours": 10, "fast": 10}
    assert planned({"ours": 0.1, "slow": 0.4}, 0.0) == {"ours": 3, "slow": 3}
    assert planned({"ours": 0.1, "slow": 9.0}, 0.5) == {"ours": 3, "slow": 1}
    assert planned({"ours": 0.01, "other": 0.01}, 0.11) == {"ours": LEAST, "other": LEAST}


def test_timed_calls_alternate_in_both_orders() -> None:
    seen: list[str] = []

    class Clock:
        def repeats(self, seconds: float) -> int:
            return 2

        def run(self, call, repeats: int) -> float:  # type: ignore[no-untyped-def]
            call()
            return 0.01

    times = in_turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, Clock(), 0.31)
    assert "".join(seen[4:12]) == "abbaabba"
    assert len(times["a"]) == len(times["b"]) == 7


def test_cold_runs_are_single_calls() -> None:
    assert HostClock(cold=1 << 12).repeats(1e-6) == 1 < HostClock().repeats(1e-6)


def test_last_level_cache_size_is_read_from_the_system(tmp_path: Path) -> None:
    assert last_level_cache(str(tmp_path)) == 64 << 20
    for index, text in enumerate(("32K\n", "2M\n", "512K\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(text)
    assert last_level_cache(str(tmp_path)) == 2 << 20
    assert last_level_cache() >= 1 << 18


def test_time_budget_is_shared_and_limits_torch_compile() -> None:
    row = Row(suite="s", entry="e", cells=(Cell(peer="torch.compile", first_ms=9e6),))
    tight = Budget(1.0, rows=100)
    assert tight.of_row() == SHORTEST and not tight.may_compile()
    wide = Budget(1e4, rows=2)
    assert wide.may_compile()
    wide.end_row(row, 0.0, 0.0)
    assert Budget(None, rows=9).may_compile()


def test_row_lists_omitted_peers_with_reasons() -> None:
    (job, *_) = jobs(("activation",), ("swish",), device="cpu", quick=True, sizes=(SIZE,))
    peer = next(p for p in table.PEERS if p.name == "torch.compile")
    for without, budget, why in (
        (("torch.compile",), Budget(None, 1), "by the plan"),
        ((), Budget(0.1, 1), "no time was left"),
    ):
        one = replace(job, without=without)
        row = row_of(one, [peer], "cpu", 1, "warm", budget, lambda _: None)
        assert row.ours.us is not None and row.size == SIZE
        assert row.cells[1].us is None and why in row.cells[1].failed


def test_row_that_does_not_fit_into_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (job, *_) = jobs(("activation",), ("swish",), device="cpu", quick=True)
    assert needed_bytes(job) >= 4 * make(job.entry, job.direction, job.dtype, 1 << 20).bytes / 2
    monkeypatch.setattr("opgraph.bench.suites.entries.available_bytes", lambda device: 1 << 20)
    row = row_of(job, [], "cpu", 1, "warm", Budget(None, 1), lambda _: None)
    assert "GiB of memory" in row.ours.failed and row.ours.us is None


def test_python_calls_are_counted() -> None:
    def inner() -> None:
        len("")

    def outer() -> None:
        inner(), inner()

    assert python_calls(outer) == 3 and python_calls(lambda: inner()) == 1


def test_gpu_call_overhead_is_measured_without_a_gpu() -> None:
    """It runs in another process, where CuPy is replaced: with an incomplete stand-in, nothing would be measured."""
    pytest.importorskip("torch")
    figures = host_suite._posing(0.01, lambda _: None)
    ways = {f.subject.removeprefix("GPU without its driver: ") for f in figures}
    assert {"opgraph, f(x=x)", "@ogt.fuse x*sigmoid(x), forward and backward"} <= ways
    assert all(0 < f.value < 1e6 for f in figures)


def test_scale_network_has_the_requested_number_of_ops() -> None:
    for count in (7, 100, 1000):
        g = network(count).finalize()
        assert len(g.ops) == count
    assert {p.kind for p in g.get_partitions()} == {"fused", "library"}


# -- networks --


def test_smallest_network_row_compares_and_times_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from opgraph.bench.suites.networks import asked_for
    from opgraph.bench.suites.networks import measured as networks_measured

    # Uses the tests' cache of compiled kernels: this test is not about a first step.
    monkeypatch.setattr("opgraph.bench.suites.networks.caches", lambda: nullcontext({}))
    found = Results(machine={}, settings={})
    kept: list[int] = []
    networks_measured(
        asked_for(("x*sigmoid*",)), found, device="cpu", threads=1, compiles=False, left=lambda: 0.5,
        say=lambda _: None, keep=lambda some: kept.append(len(some.rows)),
    )  # fmt: skip
    (row,) = found.rows
    assert (row.suite, row.direction, kept) == ("networks", "forward and backward", [1])
    assert [c.peer for c in row.cells] == ["opgraph", "opgraph, a function", "torch eager", "torch.utils.checkpoint"]
    for cell in row.cells:
        assert cell.us and cell.off is not None and cell.first_ms and not cell.failed, cell
    assert all(cell.ratio for cell in row.cells[1:])


def test_saved_bytes_exclude_parameters() -> None:
    """For x * sigmoid(a * x) over 1,024 elements eager keeps x and the sigmoid, opgraph only x."""
    pytest.importorskip("torch")
    from opgraph.bench.network_process import made_of, running
    from opgraph.bench.networks import EAGER, OURS, STEP_ALONE, network

    net = network("x*sigmoid(a*x), 1,024 elements")
    found = {way: running(net, made_of(net), way, STEP_ALONE, 1, "cpu")[0].kept() for way in (EAGER, OURS)}
    assert found == {EAGER: 2 * 4096, OURS: 4096}


def test_networks_are_selected_by_name_and_question() -> None:
    pytest.importorskip("torch")
    from opgraph.bench.suites.networks import asked_for

    assert [(net.name, question) for net, question in asked_for(("llama, memory", "NAF1*"))] == [
        ("NAF1, 1,024 elements", "forward and backward"), ("Llama", "memory"),
    ]  # fmt: skip
    assert {question for net, question in asked_for(("GPT-2",))} == set(asked_for(("GPT-2",))[0][0].questions)
    with pytest.raises(InvalidArguments, match="no network"):
        run(Settings(suites=("networks",), entries=("swish",)))


def test_absent_package_and_exhausted_time_are_reported() -> None:
    pytest.importorskip("torch")
    from opgraph.bench.networks import MEMORY, NETWORKS
    from opgraph.bench.suites.networks import measured as networks_measured

    found, net = Results(machine={}, settings={}), NETWORKS[-1]
    nothing: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "compiles": False,
        "say": lambda _: None,
        "keep": lambda _: None,
    }
    networks_measured([(replace(net, package="no_such"), MEMORY)], found, left=lambda: None, **nothing)
    assert found.absent == {f"{net.name}, memory": "no_such is not installed; pip install no_such"}
    networks_measured([(replace(net, package=""), MEMORY)], found, left=lambda: 0.0, **nothing)
    assert found.absent == {f"{net.name}, memory": "no time was left"} and not found.figures


# -- plan and results --


def test_groups_contain_every_suite() -> None:
    assert set(suites_of(("all",))) == set(GROUPS["all"]) > set(ENTRY_SUITES)
    assert suites_of(("entries",)) == ENTRY_SUITES
    assert suites_of(("rows", "gpu", "rows"))[0] == "rows" and len(suites_of(("gpu", "gpu"))) == len(GROUPS["gpu"])
    with pytest.raises(InvalidArguments, match="no suite"):
        suites_of(("none",))


def test_gpu_run_has_large_arrays_and_one_beyond_2_to_the_31() -> None:
    found, main = jobs(suites_of(("gpu",)), (), device="cuda", quick=False), {("bf16", 64 << 20), ("f32", 64 << 20)}
    assert {(j.dtype, j.size) for j in found} >= {(t, 64 << 20) for t in DTYPES}
    assert [j.dtype for j in found if j.size == 64 << 20 and not j.without][: len(PAIRS)] == ["bf16"] * len(PAIRS)
    assert [j.entry.name for j in found if j.size > 2**31] == ["swish", "swish"]
    assert all(set(j.without) == (set(SLOW_TO_BUILD) if (j.dtype, j.size) not in main else set()) for j in found)
    assert [(j.dtype, j.size) for j in jobs(("rows",), ("softmax",), device="cpu", quick=True)] == [
        ("f32", 1 << 20)
    ] * 2


def test_jobs_cover_entries_directions_sizes_and_dtypes() -> None:
    def asked(**keywords: Any) -> list[tuple[str, int]]:
        found = jobs(("activation",), ("swish",), device="cpu", **{"quick": False, **keywords})
        assert [j.direction for j in found] == ["forward", "backward"] * (len(found) // 2)
        assert {j.entry.name for j in found} == {"swish"}
        return [(j.dtype, j.size) for j in found[::2]]

    mega = 1 << 20
    assert asked() == [("f32", 1000), ("f32", mega), ("f32", 32 * mega), ("bf16", mega), ("f16", mega)]
    assert asked(quick=True) == [("f32", mega)]
    assert asked(sizes=(7, 5)) == [("f32", 7), ("f32", 5)] and asked(types=("f16",)) == [("f16", mega)]
    assert asked(sizes=(7,), types=("bf16", "f32"), quick=True) == [("bf16", 7), ("f32", 7)]
    for quick in (False, True):
        waits = {j.entry.name for j in jobs(ENTRY_SUITES, (), device="cpu", quick=quick) if not j.without}
        assert waits == (set(WAITS) if quick else {e.name for e in ENTRIES})


def test_entries_are_planned_only_in_their_dtypes() -> None:
    few = replace(chosen({"activation"}, ("swish",))[0], name="few", dtypes=("f32",))
    assert [j.dtype for t in DTYPES for j in plan._rows((few,), t, 8)] == ["f32", "f32"]


def test_needed_memory_counts_arrays_and_peer_allocations() -> None:
    """For swish over 1M f32, 4 MiB each: x and y, again for the copy, and two results; backward also the gradients."""
    forward, backward = jobs(("activation",), ("swish",), device="cpu", quick=True)
    assert [needed_bytes(j) for j in (forward, backward)] == [6 << 22, 10 << 22]
    page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    assert 0.9 * os.sysconf("SC_AVPHYS_PAGES") * page < available_bytes("cpu") < total * page


@pytest.mark.parametrize(("seconds", "counts"), [(None, 4), (1000.0, 4), (100.0, 3)])
def test_largest_graph_is_omitted_from_short_runs(
    seconds: float | None, counts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That graph alone takes longer than short runs may."""
    asked: list[bool] = []
    monkeypatch.setattr("opgraph.bench.suites.scale.measured", lambda *, quick, say: asked.append(quick) or [])
    monkeypatch.setattr("opgraph.bench.run.look", lambda *_: [])
    run(Settings(suites=("scale",), budget=seconds))
    assert asked == [counts == 3]


def results() -> Results:
    cell = Cell(peer="torch native", us=2.0, ratio=Ratio(median=0.5, low=0.4, high=0.6, rounds=9), off=0.5, first_ms=1)
    slower = Cell(peer="torch eager", us=4.0, ratio=Ratio(median=0.25, low=0.2, high=0.3, rounds=9))
    row = Row(
        suite="activation", entry="swish", size=1000, elements=1000, bytes=8000, copy=cell,
        cells=(Cell(peer="opgraph", us=1.0), slower, cell, Cell(peer="NumPy", failed="refused")),
    )  # fmt: skip
    figure = Figure(suite="host", subject="a call", column="us", value=1.5, unit="us")
    return Results(
        machine={"cpu": "some"}, settings={"quick": True}, peers={"torch native": "2"}, absent={"Liger": "no; get it"},
        rows=[row], figures=[figure],
    )  # fmt: skip


def test_json_round_trip_keeps_all_results() -> None:
    made = results()
    again = from_json(made.to_json())
    assert again == made and again.to_json() == made.to_json()
    assert again.rows[0].best is not None and again.rows[0].best.peer == "torch native"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "rows": 3, "figures": []}'])
def test_file_without_bench_results_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="no results of opgraph bench"):
        from_json(text)


def test_every_suite_of_entries_is_listed_once() -> None:
    assert list(ENTRY_SUITES) == list(dict.fromkeys(e.suite for e in entries.ENTRIES))


def test_nan_and_infinity_agree_only_with_themselves() -> None:
    from opgraph.bench.truth import far_off

    true = {"y": np.array([1.0, np.nan, np.inf, -2.0])}
    for got, right in (
        ([1.0, np.nan, np.inf, -2.0], True),
        ([np.nan, np.nan, np.inf, -2.0], False),
        ([1.0, 0.0, np.inf, -2.0], False),
        ([1.0, np.nan, -np.inf, -2.0], False),
        ([1.0, np.nan, 3.0, -2.0], False),
    ):
        off, wrong = far_off({"y": np.array(got, np.float32)}, true, {"y": "f32"})
        assert (wrong == "") is right and (off == 0.0) is right


def test_tolerance_grows_with_the_effect_of_rounding_on_the_truth() -> None:
    from opgraph.bench.network_process import judged

    true = {"y": np.array([1.0, -2.0]), "g": np.array([0.5, 0.0])}
    jump = {"y": np.array([1.0, -2.0]), "g": np.array([0.5, 0.1])}
    wrong = {"y": np.array([1.0, -1.0]), "g": np.array([0.5, 0.1])}
    farther = {"y": np.array([1.0, -2.0]), "g": np.array([0.5, 0.45])}
    asked = []

    def moved() -> dict[str, np.ndarray]:
        asked.append(1)
        return {"y": true["y"], "g": np.array([0.4, 0.0])}

    assert judged(true, true, moved)[1:] == ("", "") and not asked
    assert judged(jump, true, moved)[1:] == ("", "rounding alone moves eager torch's results as far")
    assert "y is" in judged(wrong, true, moved)[1]
    assert "g is" in judged(farther, true, moved)[1]
    assert judged(jump, true, lambda: true)[1]


def test_torch_compile_memory_budgets_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one model share the code compiled with one backend."""
    torch = pytest.importorskip("torch")
    from opgraph.bench.networks import WAYS, network

    seen: list[float] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(torch._functorch.config.activation_memory_budget)
        return graph.forward

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: backend)
    net = network("x*sigmoid(a*x), 1,024 elements")
    for part in (0.5, 0.25):
        WAYS[f"torch.compile, budget {part:g}"].apply(net.make(), net)(**net.feed(1))
    assert seen == [0.5, 0.25]
