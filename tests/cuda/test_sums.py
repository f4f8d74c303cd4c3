"""Sums on CUDA, without a GPU: emulated kernels against float64, the same bits in any order of threads, and NVRTC."""

from __future__ import annotations

import ctypes
import os
from threading import Barrier
from typing import Any

import numpy as np
import nvrtc
import pytest
from emulator import FakeArray, FakeCupy, build
from nvrtc import together
from schedules import cuda_launches

import opgraph as og
from opgraph.codegen.cuda_sums import SumLaunch
from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import row_major
from opgraph.loops.layout import bind
from opgraph.loops.lower import lower
from opgraph.schedule.cuda_tiles import tiled
from opgraph.schedule.loop_fission import passes

#: Shape of the data, shapes that it is summed to.
CASES = {
    "one number, of one row": ((5000,), [()]),
    "one number, of many tiles": ((70001,), [(1,)]),
    "a channel of images": ((6, 5, 7, 7), [(5, 1, 1)]),
    "a channel of single pixels": ((300, 33), [(33,)]),
    "a column of a wide matrix": ((200, 1000), [(1000,)]),
    "a row": ((70, 300), [(70, 1)]),
    "a short row": ((500, 3), [(500, 1)]),
    "rows and columns": ((130, 140), [(130, 1), (140,)]),
    "a channel and one number": ((4, 8, 30), [(8, 1), ()]),
    "two kinds of columns": ((9, 10, 64), [(10, 64), (64,)]),
    "an outer and an inner axis": ((3, 40, 5, 6), [(3, 1, 5, 1)]),
    "nothing at all to add up": ((12, 8), [(12, 8)]),
}


def graph(shape: tuple[int, ...], targets: list[tuple[int, ...]], dtype: str = "f32") -> og.Graph:
    """y = x z, and x z summed to each target."""
    g = og.Graph()
    x, z = g.input("x", dtype, shape), g.input("z", dtype, shape)
    product = g.add_op("Multiply", x, z, name="y")
    g.output(product)
    for i, target in enumerate(targets):
        g.output(g.add_op("SumTo", product, g.input(f"like{i}", dtype, target), name=f"s{i}"))
    return g


def random(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtypes.get(dtype).numpy)


def run(cupy: FakeCupy, g: og.Graph, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    made = og.compile(g, device="cuda")({k: cupy.asarray(v) for k, v in feeds.items()})
    return {k: v.host for k, v in made.items()}


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("name", CASES)
def test_sums_agree_with_float64_and_ignore_thread_order(cupy: FakeCupy, name: str, dtype: str) -> None:
    shape, targets = CASES[name]
    g = graph(shape, targets, dtype)
    feeds = {t.name: random(t.shape, dtype, i) for i, t in enumerate(g.inputs)}
    got = run(cupy, g, feeds)  # type: ignore[arg-type]
    truth = og.evaluate(g, feeds)
    unit = {"f32": 2.0**-24, "bf16": 2.0**-8, "f64": 2.0**-53}[dtype]
    for key, value in truth.items():
        assert got[key].shape == value.shape and got[key].dtype == dtypes.get(dtype).numpy
        error = np.abs(np.asarray(got[key], np.float64) - value)
        # One rounding of the result, and the error of some 60 additions in f32 (f64), relative to the magnitudes added.
        added = np.abs(feeds["x"].astype(np.float64) * feeds["z"].astype(np.float64)).sum() / max(value.size, 1)
        assert (error <= unit * np.abs(value) + 4 * min(unit, 2.0**-24) * max(added, 1)).all(), (key, error.max())
    cupy.backwards = True
    again = run(cupy, g, feeds)  # type: ignore[arg-type]
    for key in truth:
        assert got[key].tobytes() == again[key].tobytes()


def test_64_bit_indices_give_the_same_bits(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    g = graph(*CASES["two kinds of columns"])
    feeds = {t.name: random(t.shape, "f32", i) for i, t in enumerate(g.inputs)}
    narrow = run(cupy, g, feeds)  # type: ignore[arg-type]
    monkeypatch.setattr("opgraph.schedule.cuda.NARROW", 1)
    f = og.compile(g, device="cuda")
    wide = f({k: cupy.asarray(v) for k, v in feeds.items()})  # type: ignore[misc]
    entered = [text.rsplit("sum_tiles<", 1)[1] for text in f.kernels.values() if "sum_tiles<" in text]
    assert entered and all("og::i64, " in text for text in entered)
    for key, value in narrow.items():
        assert value.tobytes() == wide[key].host.tobytes()


def test_sums_of_views_at_odd_addresses(cupy: FakeCupy) -> None:
    g = graph((40, 30), [(30,), (40, 1)])
    base = random((41, 64), "f32", 0)
    feeds = {"z": random((40, 30), "f32", 1), "like0": np.zeros(30, "f4"), "like1": np.zeros((40, 1), "f4")}
    f = og.compile(g, device="cuda")
    for view in (lambda a: a[1:, 3:33], lambda a: a[:40, ::2][:, :30]):
        held = cupy.asarray(base)
        x = FakeArray(view(held.host))
        got = f({"x": x, **{k: cupy.asarray(v) for k, v in feeds.items()}})
        expected = view(base).astype(np.float64) * feeds["z"]
        np.testing.assert_allclose(got["s0"].host, expected.sum(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got["s1"].host, expected.sum(1, keepdims=True), rtol=1e-5, atol=1e-5)


def test_empty_sum_is_zero(cupy: FakeCupy) -> None:
    g = graph((None, 8), [(8,)])  # type: ignore[arg-type]
    got = og.compile(g, device="cuda")(
        x=cupy.asarray(np.zeros((0, 8), "f4")),
        z=cupy.asarray(np.zeros((0, 8), "f4")),
        like0=cupy.asarray(np.ones(8, "f4")),
    )
    np.testing.assert_array_equal(got["s0"].host, np.zeros(8))


def test_result_may_overwrite_an_input_in_several_passes(cupy: FakeCupy) -> None:
    shape, targets = CASES["rows and columns"]
    g = graph(shape, targets)
    feeds = {t.name: random(t.shape, "f32", i) for i, t in enumerate(g.inputs)}
    expected = run(cupy, g, feeds)  # type: ignore[arg-type]
    held = {k: cupy.asarray(v) for k, v in feeds.items()}
    out = {"y": held["x"], "s0": cupy.empty((130, 1), "f4"), "s1": cupy.empty((140,), "f4")}
    og.compile(g, device="cuda")(held, out=out)
    for key, value in expected.items():
        np.testing.assert_array_equal(out[key].host, value)


def test_sum_result_may_not_overwrite_a_read_operand(cupy: FakeCupy) -> None:
    """Sums of rows and of columns are two kernels: the second one would read the result of the first."""
    f = og.compile(
        og.parse(
            "graph(x: f32[40,3000], q: f32[3000], r: f32[40,1], k: f32[40,1]) -> (s, t)\n  a = Multiply(x, q)\n"
            "  p = Multiply(a, r)\n  s = SumTo(p, q)\n  t = SumTo(p, k)"
        ),
        device="cuda",
    )
    shapes = {"x": (40, 3000), "q": (3000,), "r": (40, 1), "k": (40, 1)}
    feeds = {n: random(s, "f32", i) for i, (n, s) in enumerate(shapes.items())}
    exact = og.evaluate(f.graph, feeds)
    x, q, r, k = (cupy.asarray(a) for a in feeds.values())
    s, t = cupy.empty((3000,), "f4"), cupy.empty((40, 1), "f4")
    for outs in {"s": q, "t": t}, {"s": s, "t": r}:
        with pytest.raises(InvalidArguments, match="overlaps an input that is still read"):
            f(x=x, q=q, r=r, k=k, out=outs)
    with pytest.raises(InvalidArguments, match="kernels, read it where an earlier one's result would be"):
        og.compile(f.graph, device="cuda", donate=("q",))
    f(x=x, q=q, r=r, k=k, out={"s": s, "t": k})  # only the shape of k is read
    for made, want in ((s, exact["s"]), (k, exact["t"])):
        np.testing.assert_allclose(made.host, want, rtol=1e-4, atol=1e-3)


def test_emulated_kernels_have_separate_shared_memory() -> None:
    """The same template in two libraries could share the first one's memory, which may be shorter."""
    text = """struct Fused {{ enum {{ room = {room} }}; }};
template <class F> void add(int* total) {{
  __shared__ int place[F::room];
  *total = place[0] += 1;
}}
extern "C" __global__ void {entry}(int* total) {{ add<Fused>(total); }}"""
    total = ctypes.c_int()
    address = ctypes.c_void_p(ctypes.addressof(total))
    for room in 1, 1000:
        library = build(text.format(room=room, entry=f"with_{room}"), f"with_{room}")
        assert library.run((ctypes.c_void_p * 1)(ctypes.addressof(address)), 1, 32, 0) == 0
        assert total.value == 32


def test_both_stages_of_a_sum_compile_concurrently(
    cupy: FakeCupy, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    both, compile_one = Barrier(2, timeout=30), cupy.RawKernel

    def compile_with_another(code: str, name: str, options: tuple[str, ...]) -> Any:
        both.wait()  # breaks unless another one is compiled concurrently
        return compile_one(code, name, options)

    cupy.RawKernel = compile_with_another  # type: ignore[method-assign]
    shape, targets = CASES["one number, of many tiles"]
    f = og.compile(graph(shape, targets), device="cuda")
    f({t.name: cupy.asarray(random(t.shape, "f32", 0)) for t in f.graph.inputs})  # type: ignore[arg-type]
    assert len(f.kernels) == 2


def test_partitions_with_equal_sums_share_the_second_stage(cupy: FakeCupy, no_cache: None) -> None:
    def kernels(kind: str) -> set[str]:
        g = og.Graph()
        x, like = g.input("x", "f32", (70001,)), g.input("like", "f32", (1,))
        g.output(g.add_op("SumTo", g.add_op(kind, x), like, name="s"))
        f = og.compile(g, device="cuda")
        f(x=cupy.asarray(random((70001,), "f32", 0)), like=cupy.asarray(np.zeros(1, "f4")))
        return set(f.kernels)

    one, other = kernels("Tanh"), kernels("Sigmoid")
    assert len(one) == len(other) == 2 and len(one & other) == 1


def launches(name: str, dtype: str) -> list[SumLaunch]:
    shape, targets = CASES[name]
    (partition,) = graph(shape, targets, dtype).finalize().get_partitions()
    lowered = lower(partition)
    shapes = [t.shape for t in lowered.loads if t is not None]
    return cuda_launches(lowered.loop, bind(lowered.loop, shapes, [row_major(s) for s in shapes]))


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is missing: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
def test_every_sum_case_compiles(dtype: str, arch: str) -> None:
    made = [item for name in CASES if name != "nothing at all to add up" for item in launches(name, dtype)]
    totals = [item.totals for item in made if item.totals is not None]
    for sources, skeleton in (
        ([item.source for item in made], "cuda/tiled_sums.cuh"),
        (totals, "cuda/reduction_finalize.cuh"),
    ):
        cubin = nvrtc.compile_text(together(sources, skeleton), arch, nvrtc.OPTIONS)
        assert sources and all(s.entry.encode() in cubin for s in sources)


@pytest.mark.parametrize(
    ("shape", "targets", "count"),
    [
        ((8192, 4096), [(4096,)], 1),
        ((8192, 4096), [(8192, 1)], 1),
        ((8192, 4096), [(8192, 1), (4096,)], 2),
        ((128, 64, 32, 32), [(64, 1, 1), (), (1,)], 1),
        ((1 << 31,), [()], 1),
    ],
)
def test_partial_sums_of_tiles_are_few(shape: tuple[int, ...], targets: list[tuple[int, ...]], count: int) -> None:
    (partition,) = graph(shape, targets).finalize().get_partitions()
    loop = lower(partition).loop
    shapes = [shape, shape, *targets]
    layout = bind(loop, shapes, [row_major(s) for s in shapes])
    made = passes(loop, layout, 4)
    assert len(made) == count
    for _, part, _ in made:
        if part.variant.has_sums:
            tiling = tiled(part, 4)
            assert tiling.work <= layout.size / 32
            assert tiling.blocks < 2**31
