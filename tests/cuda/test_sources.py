"""`opgraph show --source`, `compile` and launches use the same kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator import FakeCupy

import opgraph as og
from opgraph.cli.sources import kernel_sources
from opgraph.ir import dtypes
from opgraph.partition.partition import FUSED

#: Graphs of known shapes that each use another kind of kernel: flat, rows of a view, sums, rows, columns, pieces.
TEXTS = {
    "flat": "graph(x: f32[4099]) -> (y)\n  y = Swish(x)",
    "broadcast": "graph(x: bf16[64,7,32], a: bf16[7,1]) -> (y)\n  %0 = Swish(x, a)\n  y = Multiply(%0, x)",
    "sum": "graph(x: f32[300,40], a: f32[40]) -> (s)\n  %0 = Exp(x)\n  s = SumTo(%0, a)",
    "sum of columns, few": "graph(x: f32[3000,3], a: f32[3]) -> (s)\n  s = SumTo(x, a)",
    "sum and values": "graph(x: f32[130,70], a: f32[1]) -> (y, s)\n  y = Exp(x)\n  s = SumTo(y, a)",
    "softmax": "graph(x: f32[33,257]) -> (y)\n  y = SoftMax(x, axis=-1)",
    "norm": "graph(x: bf16[33,4096], w: bf16[4096]) -> (y)\n  y = RMSNorm(x, w)",
    "softmax of columns": "graph(x: f32[37,90]) -> (y)\n  y = SoftMax(x, axis=0)",
    "short rows": "graph(x: f32[500,7]) -> (y)\n  y = SoftMax(x, axis=1)",
    "pieces": "graph(x: f32[2,100001]) -> (y)\n  y = SoftMax(x, axis=1)",
    "statistics": "graph(x: f32[9,5,40]) -> (y, m)\n  m = ReduceMean(x, axes=[0,2], keep_dims=true)\n  y = Sign(x)",
    "two kernels": "graph(x: f32[300,40], a: f32[40]) -> (y)\n  %0 = Exp(x)\n  %1 = SumTo(%0, a)\n  y = Add(x, %1)",
}


def graphs() -> dict[str, og.Graph]:
    """The graphs, and a gradient whose sums go over rows."""
    found = {name: og.parse(text).finalize() for name, text in TEXTS.items()}
    norm = "graph(x: f32[300,64], w: f32[64]) -> (y)\n  t = RMSNorm(x, w)\n  y = SoftMax(t, axis=-1)"
    return found | {"gradient of a norm": og.gradient(og.parse(norm), ["x", "w"]).finalize()}


def arrays(graph: og.Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {str(t.name): rng.standard_normal(t.shape).astype(dtypes.get(t.dtype).numpy) for t in graph.inputs}


def shown(f: Any, device: str) -> dict[str, str]:
    return {s.entry: s.code for p in f.partitions if p.kind == FUSED for s in kernel_sources(p, device)}


def schedules_shown(f: Any, device: str) -> dict[str, str]:
    return {s.entry: s.schedule for p in f.partitions if p.kind == FUSED for s in kernel_sources(p, device)}


def schedules_compiled(f: Any) -> dict[str, str]:
    return {s.entry: s.schedule for step in f._steps for s in step.run.sources.values()}


@pytest.mark.parametrize("name", graphs())
def test_shown_cuda_sources_are_the_launched_kernels(cupy: FakeCupy, name: str) -> None:
    graph = graphs()[name]
    f = og.compile(graph, device="cuda")
    assert shown(f, "cuda") == f.kernels
    f({k: cupy.asarray(v) for k, v in arrays(graph).items()})
    assert {entry for entry, _, _ in cupy.launches} == {*f.kernels} == {*shown(f, "cuda")}
    assert schedules_compiled(f) == schedules_shown(f, "cuda")


@pytest.mark.parametrize("name", graphs())
def test_shown_cpu_sources_are_the_kernels_run(name: str, no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from opgraph.runtime import cpu_compiler

    loaded: list[str] = []
    real = cpu_compiler.load
    monkeypatch.setattr(
        cpu_compiler,
        "load",
        lambda source, *args, **more: (loaded.append(source.entry), real(source, *args, **more))[1],
    )
    graph = graphs()[name]
    f = og.compile(graph, device="cpu")
    f(arrays(graph))
    assert shown(f, "cpu") == f.kernels and {*loaded} == {*f.kernels}
    assert schedules_compiled(f) == schedules_shown(f, "cpu")


def test_kernel_of_unknown_sizes_is_compiled_at_the_first_call(cupy: FakeCupy) -> None:
    """A guessed kernel would be compiled in vain, and be listed though it never runs."""
    f = og.compile(og.parse("graph(x: f32[?,?]) -> (y)\n  y = SoftMax(x, axis=-1)"), device="cuda")
    assert f.kernels == {} and len(shown(f, "cuda")) == 1  # that of long rows
    f(x=cupy.asarray(np.ones((3, 1000), np.float32)))
    assert f.kernels == shown(f, "cuda")
    flat = og.compile(og.parse("graph(x: f32[?]) -> (y)\n  y = Swish(x)"), device="cuda")
    assert len(flat.kernels) == 1 and flat.kernels == shown(flat, "cuda")  # for any size


def test_fused_torch_function_compiles_no_kernel_before_the_first_call(cupy: FakeCupy) -> None:
    """Gradients are often broadcast, as from sum(): kernels for dense ones would be compiled in vain."""
    torch = pytest.importorskip("torch")
    from opgraph.torch.fused.program import Program

    program = Program(graphs()["sum"], torch.device("cuda", 0), "store")
    assert program._executable.kernels == {}
