"""The log of each compilation stage, who may read it, and that it costs nothing when it is not read."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.ir.stage_log import STAGES, Logged
from opgraph.loops.lower import lowerings
from opgraph.loops.text import parse_loop
from opgraph.schedule.schedule import SPLIT_COLUMN_SUM
from opgraph.schedule.table import CPU_TABLE

#: The factor m moves out of the sum of the last line: a rewrite follows lowering.
SCALED = """graph(x: f32[64,300]) -> (y)
  m = ReduceMean(x, axes=[-1], keep_dims=true)
  p = Multiply(x, m)
  y = ReduceSum(p, axes=[-1], keep_dims=true)"""
rng = np.random.default_rng(0)


@pytest.fixture
def log(stage_records: list[logging.LogRecord]) -> Callable[[str], list[str]]:
    """The records of a stage so far, each as its text."""
    return lambda stage: [r.getMessage() for r in stage_records if r.name == f"opgraph.{stage}"]


def values(texts: list[str]) -> list[str]:
    """The text below the titles."""
    return [text.partition("\n")[2] for text in texts]


def test_each_stage_logs_its_value(log: Callable[[str], list[str]], no_cache: None) -> None:
    graph = og.parse(SCALED).finalize()
    f = og.compile(graph)
    f(x=rng.standard_normal((64, 300), np.float32))

    assert [og.parse(text) == graph for text in values(log("partition"))] == [True]
    assert log("partition")[0].startswith("<Partition 0: fused, 3 ops>\n")

    loops = [lowered.loop for _, lowered in lowerings(f.partitions[0])]
    assert [parse_loop(text) for text in values(log("loop"))] == loops and loops[0] != loops[1]
    titles = [text.partition("\n")[0] for text in log("loop")]
    assert titles == ["partition 0: loop after lowering", "partition 0: loop after hoist_factors"]

    (row,) = [row for row in CPU_TABLE if log("schedule")[0].startswith(f"{row.name} over ")]
    assert {text.partition("\n")[2] for text in log("schedule")} == {
        f"  when: {row.when}\n  why:  specs/decisions/{row.why}"
    }

    ((entry, code),) = f.kernels.items()
    assert [text.partition(",")[0] for text in log("source")] == [entry]
    assert all(text and code.endswith(text) for text in values(log("source")))

    assert log("run") == [f"{entry}: [64,300] -> [64,1], 1 thread, from 0 to 1"]


def test_rewritten_loop_of_a_schedule_is_logged(log: Callable[[str], list[str]], no_cache: None) -> None:
    og.compile(og.parse("graph(x: f32[100000,8]) -> (y)\n  y = ReduceSum(x, axes=[0])"))
    before, after = log("loop")
    assert "ReduceSum" in before and "ReduceSum" not in after
    assert after.startswith(f"loop after {SPLIT_COLUMN_SUM}\nloop(parallel *)\n  x0 = load f32\n  store f32 x0\n")


def test_regrouped_partitions_are_logged(log: Callable[[str], list[str]]) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx_ir")
    node = 'onnx_op="MatMul", onnx_domain="", onnx_opset=21'
    f = og.compile(
        og.parse(
            f"graph(x: f32[5,64], w: f32[64,64]) -> (y)\n  a: f32[5,64] = Wildcard(x, w, {node})\n"
            f"  b = Neg(a)\n  y: f32[5,64] = Wildcard(b, w, {node})"
        )
    )
    titles = [text.partition("\n")[0] for text in log("partition")]
    assert len(f.partitions) == 1 and len(titles) == 4
    assert titles[-1] == "<Partition 0: library, 3 ops>, regrouped beside a library"


def swish(rows: int = 8) -> og.Graph:
    return og.parse(f"graph(x: f32[{rows},300]) -> (y)\n  s = Sigmoid(x)\n  y = Multiply(x, s)")


def several() -> og.Graph:
    """Two kernels, the second of which reads the result of the first."""
    return og.parse(
        "graph(x: f32[300,40], w: f32[40]) -> (y)\n  e = Exp(x)\n  s = SumTo(e, w)\n  t = Tanh(s)\n  y = Multiply(x, t)"
    )


def array(graph: og.Graph) -> dict[str, np.ndarray]:
    return {str(t.name): rng.standard_normal(t.shape).astype(np.float32) for t in graph.inputs}


def by_call(f: og.Executable, feeds: dict[str, np.ndarray]) -> Any:
    return f(feeds)


def by_out(f: og.Executable, feeds: dict[str, np.ndarray]) -> Any:
    return f(feeds, out=np.empty(feeds["x"].shape, np.float32))


def by_bind(f: og.Executable, feeds: dict[str, np.ndarray]) -> Any:
    return f.bind(feeds, out=np.empty(feeds["x"].shape, np.float32))()


def by_torch(f: og.Executable, feeds: dict[str, np.ndarray]) -> Any:
    torch = pytest.importorskip("torch")
    return f({name: torch.from_numpy(a) for name, a in feeds.items()}).numpy()


@pytest.mark.parametrize("graph", [swish, several], ids=["one kernel", "several"])
@pytest.mark.parametrize("call", [by_call, by_out, by_bind, by_torch])
def test_every_kind_of_call_logs_each_kernel(
    log: Callable[[str], list[str]], graph: Callable[[], og.Graph], call: Callable[..., Any]
) -> None:
    f = og.compile(graph())
    feeds, entries = array(f.graph), []
    for times in range(1, 5):  # repeated calls, so that prepared ones are included
        before = len(log("run"))
        got = call(f, feeds)
        np.testing.assert_allclose(got, og.evaluate(f.graph, feeds), rtol=1e-4, atol=1e-5)
        entries = [text.partition(":")[0] for text in log("run")[before:]]
        # A separate call, which `bind` makes, finds the shapes between kernels.
        assert set(entries) == set(f.kernels) and (times == 1 or len(entries) % len(f.partitions) == 0)


def test_threads_of_a_large_call_are_logged(log: Callable[[str], list[str]]) -> None:
    f = og.compile(swish(3000))
    (entry,) = f.kernels
    f(array(f.graph))
    from opgraph.runtime import threads

    count, parallel = threads.team(3000 * 300)
    if parallel is None and count > 1:
        assert len(log("run")) == count  # threads of Python, which call it separately
    else:
        told = f"{count} threads" if count > 1 else "1 thread, from 0 to 900000"
        assert log("run") == [f"{entry}: [3000,300] -> [3000,300], {told}"]


def test_fused_torch_function_logs_its_calls(log: Callable[[str], list[str]]) -> None:
    torch = pytest.importorskip("torch")
    import opgraph.torch as ogt

    f, x = ogt.fuse(lambda x: x * torch.sigmoid(x)), torch.ones(4, 50, requires_grad=True)
    for times in range(1, 5):
        assert torch.allclose(f(x), x * torch.sigmoid(x))
        assert len(log("run")) == times and log("run")[-1].endswith(": [4,50] -> [4,50], 1 thread, from 0 to 200")


def test_a_captured_model_logs_its_calls(log: Callable[[str], list[str]]) -> None:
    """At the sizes of the capture, and at others."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.SiLU())
    compiled = torch.compile(model, backend="opgraph")
    for times, rows in enumerate((8, 8, 16, 24, 24), 1):
        x = torch.randn(rows, 30)
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
        assert len(log("run")) == times and f"[{rows},40]" in log("run")[-1]


def test_concurrent_calls_are_all_logged(log: Callable[[str], list[str]]) -> None:
    f = og.compile(swish())
    feeds = array(f.graph)
    working = [threading.Thread(target=f, args=(feeds,)) for _ in range(8)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    assert len(log("run")) == 8


def test_plan_holds_the_bare_kernel_without_a_log_reader() -> None:
    """A call costs the same as without a log; `test_launch` counts the functions that it enters."""
    f = og.compile(swish())
    f(array(f.graph))
    kernel: Any = f._steps[0].run
    (plan,) = kernel._plans.values()
    assert not isinstance(plan.entry, Logged) and plan.entry.__name__ in f.kernels


PROGRAM = f"""
import sys
import numpy as np, opgraph as og
f = og.compile(og.parse({SCALED!r}))
print(float(np.abs(f(x=np.ones((64, 300), np.float32))).sum()), "logging" in sys.modules)
"""


def program(**variables: str) -> tuple[str, str]:
    """The program's output on stdout and on stderr."""
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=env)
    return done.stdout, done.stderr


def stages_of(told: str) -> set[str]:
    return {line.partition(":")[0] for line in told.splitlines() if line.startswith("opgraph.")}


@pytest.mark.parametrize("chosen", [("loop",), ("partition", "run"), ("schedule", "source"), ("all",)], ids=",".join)
def test_opgraph_debug_prints_the_named_stages(chosen: tuple[str, ...]) -> None:
    out, told = program(OPGRAPH_DEBUG=" , ".join(chosen))
    assert out == "19200.0 True\n"
    assert stages_of(told) == {f"opgraph.{stage}" for stage in (STAGES if chosen == ("all",) else chosen)}
    if "loop" in chosen:
        assert "opgraph.loop: partition 0: loop after hoist_factors\nloop(parallel *, reduce -1)\n" in told


@pytest.mark.parametrize("value", ["", None])
def test_without_opgraph_debug_nothing_is_printed_or_imported(value: str | None) -> None:
    variables = {} if value is None else {"OPGRAPH_DEBUG": value}
    assert program(**variables) == ("19200.0 False\n", "")


@pytest.mark.parametrize("value", ["1", "loop,lops", "Loop"])
def test_unknown_stage_in_opgraph_debug_warns_with_valid_names(value: str) -> None:
    out, told = program(OPGRAPH_DEBUG=value)
    assert out.startswith("19200.0")
    name = value.rpartition(",")[2]
    assert f"UserWarning: the environment variable OPGRAPH_DEBUG names a stage {name!r}, which there is not" in told
    assert "Name some of partition, loop, schedule, source, run with commas between them, or all." in told
    assert stages_of(told) == ({"opgraph.loop"} if "loop" in value else set())


def test_without_a_compiler_calls_are_logged_too() -> None:
    _, told = program(OPGRAPH_DEBUG="run", PATH="", CXX="")
    if "no C++ compiler" not in told:
        pytest.skip("the ziglang wheel is installed")
    (line,) = [line for line in told.splitlines() if line.startswith("opgraph.run")]
    assert line.startswith("opgraph.run: a loop, op by op in ") and line.endswith(": [64,300] -> [64,1]")
