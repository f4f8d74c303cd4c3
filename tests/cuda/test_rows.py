"""Rows on CUDA, without a GPU: emulated kernels against float64 and torch, the same bits in any order, NVRTC."""

from __future__ import annotations

import numpy as np
import nvrtc
import pytest
import sass
from cuda_row_graphs import BACKWARD, NORMS, OTHERS, VIEWS, bound, compiled, run, unit
from emulator import FakeArray, FakeCupy
from nvrtc import together
from random_rows import row_graph
from row_graphs import ALL, RMS, WHOLE, as_dict, feeds_of, samples
from row_truth import EVERYTHING, assert_near, truth_and_peer
from schedules import cuda_launches

import opgraph as og
from opgraph.codegen.cuda_sums import SumLaunch
from opgraph.loops.lower import lower
from opgraph.schedule.cuda_row_tiles import RowTiles, row_tiles

pytest.importorskip("torch")


# -- numbers ----------------------------------------------------------------------------------------------------------

LENGTHS = {
    "f32": (1, 2, 31, 32, 33, 1000, 4096, 8192, 10_000, 70_001),
    "bf16": (33, 4096, 40_000),
    "f16": (1000,),
    "f64": (31, 10_000),
}


@pytest.mark.parametrize(("dtype", "length"), [(d, n) for d, lengths in LENGTHS.items() for n in lengths])
def test_rows_of_every_length_are_as_accurate_as_torch(
    cupy: FakeCupy,
    dtype: str,
    length: int,
) -> None:
    x, r = samples((3, length), dtype), samples((3, length), dtype, seed=1)
    got = run(cupy, compiled(EVERYTHING, dtype), {"x": x, "r": r})
    exact, peer = truth_and_peer(x, r)
    # One kernel; if rows are few and too long to be held, one for each of three passes and one for the row values.
    assert len(cupy.launches) == 2 * (4 if length >= 40_000 else 1)
    for name, want in exact.items():
        assert_near(got[name], want, peer[name])
    if length < 100:
        np.testing.assert_allclose(got["e"].astype("f8"), x.astype("f8").prod(1), rtol=max(length * unit(dtype), 1e-14))


@pytest.mark.parametrize(
    ("name", "dtype", "length"),
    [("LayerNorm", "f32", 1000), ("LayerNorm", "bf16", 9000), ("RMSNorm", "f32", 33), ("LogSoftmax", "bf16", 1000)],
)
def test_norms_with_neighbouring_ops_are_one_kernel(
    cupy: FakeCupy,
    name: str,
    dtype: str,
    length: int,
) -> None:
    text = "graph(x: {t}[n,c], w: {t}[c], r: {t}[n,c]) -> (g, y)\n  g = GELU(x)\n  "
    text += NORMS[name] + "\n  y = Add(t, r)"
    shapes = {"x": (9, length), "w": (length,), "r": (9, length)}
    feeds = {n: samples(s, dtype, seed=i) for i, (n, s) in enumerate(shapes.items())}
    f = compiled(text, dtype)
    got = run(cupy, f, feeds)
    assert [p.kind for p in f.partitions] == ["fused"] and len(cupy.launches) == 2
    graph = og.parse(text.format(t=dtype))
    exact, host = as_dict(og.evaluate(graph, feeds)), as_dict(og.compile(graph)(feeds))
    for key, want in exact.items():
        assert_near(got[key], np.asarray(want, np.longdouble), host[key])


@pytest.mark.parametrize(
    "lines",
    [
        "  b = Greater(m, w)\n  y = Select(b, x, v)",
        "  i: s64[n,1] = TypeCast(m)\n  k = BitwiseXor(i, z)\n  y: {t}[n,c] = TypeCast(k)",
    ],
    ids=["a truth value", "an integer"],
)
def test_separate_sums_read_row_values_unrounded(cupy: FakeCupy, lines: str) -> None:
    text = "graph(x: {t}[n,c], v: {t}[c], w: {t}[n,1], z: s64[n,c]) -> (y, s)\n"
    text += f"  m = ReduceSum(x, axes=[-1], keep_dims=true)\n{lines}\n  s = SumTo(y, w)"
    feeds = {"x": 1e9 + samples((7, 40), "f64"), "v": samples((40,), "f64"), "w": 4e10 + samples((7, 1), "f64")}
    feeds["z"] = np.arange(280).reshape(7, 40)  # 35 bits with the other values, more than f32 holds
    f = compiled(text, "f64")
    got = run(cupy, f, feeds)
    assert len(f.kernels) > 2  # for row values, sums, and the rest
    for name, want in og.evaluate(f.graph, feeds).items():
        np.testing.assert_allclose(got[name], want, rtol=1e-13)


@pytest.mark.parametrize("factor", ["Multiply(x, m)", "Divide(x, m)"])
def test_empty_sum_with_nan_factor_is_zero(cupy: FakeCupy, factor: str) -> None:
    """The mean of no elements is NaN; it moves out of the sum only where rows have elements."""
    text = "graph(x: {t}[n,c]) -> (s)\n  m = ReduceMean(x, axes=[-1], keep_dims=true)\n"
    f = compiled(f"{text}  p = {factor}\n  s = ReduceSum(p, axes=[-1], keep_dims=true)", "f32")
    for length in (3, 0):
        x = samples((4, length), "f32")
        np.testing.assert_allclose(run(cupy, f, {"x": x})["y"], og.evaluate(f.graph, x=x), rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_random_row_graphs_agree_with_the_reference(cupy: FakeCupy, seed: int) -> None:
    graph = row_graph(seed)
    f = og.compile(graph, device="cuda")
    for again in range(2):
        feeds = feeds_of(graph, 3 * seed + again)
        got = as_dict(f({k: cupy.asarray(v) for k, v in feeds.items()}))
        for (name, value), want in zip(got.items(), as_dict(og.evaluate(graph, feeds)).values(), strict=True):
            assert value.shape == want.shape, name
            np.testing.assert_allclose(value.host, want, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "launches"), [((1, 40), 1), ((300, 40), 2), ((33, 4096), 2), ((17, 9000), 3)], ids=str
)
def test_norm_backward_sums_parameter_gradients(
    cupy: FakeCupy,
    shape: tuple[int, int],
    launches: int,
) -> None:
    """One pass over the data, and one over its groups' sums; if rows do not fit into registers, sums are separate."""
    shapes = {"x": shape, "w": shape[1:], "b": shape[1:], "d_y": shape}
    feeds = {n: samples(s, seed=i) for i, (n, s) in enumerate(shapes.items())}
    got = run(cupy, compiled(BACKWARD, "f32"), feeds)
    assert len(cupy.launches) == 2 * launches
    graph = og.parse(BACKWARD.format(t="f32"))
    host = as_dict(og.compile(graph)(feeds))
    for key, want in as_dict(og.evaluate(graph, feeds)).items():
        limit = max(4 * np.abs(host[key] - want).max(), 2.0**-22 * np.abs(want).max())
        assert np.abs(got[key] - want).max() <= limit, key


@pytest.mark.parametrize("name", OTHERS)
def test_other_row_and_sum_graphs_agree_with_the_reference(cupy: FakeCupy, name: str) -> None:
    text, shapes = OTHERS[name]
    feeds = {n: samples(s, "f64", seed=i) for i, (n, s) in enumerate(shapes.items())}
    f = compiled(text, "f64")
    got = run(cupy, f, feeds)
    assert [p.kind for p in f.partitions] == ["fused"]
    for key, want in as_dict(og.evaluate(og.parse(text.format(t="f64")), feeds)).items():
        assert got[key].shape == want.shape
        np.testing.assert_allclose(got[key], want, rtol=1e-11, atol=1e-11, err_msg=key)


def test_group_norm_gradients_agree_with_the_reference(cupy: FakeCupy) -> None:
    graph = og.gradient(og.parse(WHOLE.replace("f32", "f64")).finalize(), wrt=["x", "g", "b"])
    feeds = {
        t.name: samples((12,) if t.name in "gb" else (2, 12, 5, 7), "f64", seed=i) for i, t in enumerate(graph.inputs)
    }
    got = run(cupy, og.compile(graph, device="cuda"), feeds)
    for key, want in as_dict(og.evaluate(graph, feeds)).items():
        np.testing.assert_allclose(got[key], want, rtol=1e-10, atol=1e-10, err_msg=key)


def test_gradient_reuses_row_statistics_of_forward() -> None:
    """Mean and variance are computed once: the derivative recomputes the normalised rows under other names."""
    text = "graph(x: bf16[n,c], w: bf16[c]) -> (y)\n  n = LayerNorm(x, use_affine=false, keep_stats=false)\n"
    graph = og.gradient(og.parse(text + "  y = Multiply(n, w)").finalize(), ["x", "w"])
    (partition,) = graph.get_partitions()
    kinds = [s.kind for s in lower(partition).loop.statements]
    # The two of the norm, those of its derivative, and one cast of x.
    assert kinds.count("ReduceMean") == 4 and kinds.count("Sqrt") == 1 and kinds.count("Square") == 1


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_read_and_written_in_place(cupy: FakeCupy, name: str) -> None:
    text = "graph(x: f32[n,c]) -> (y)\n  s = SoftMax(x, axis=-1)\n  y = Multiply(s, x)"
    f = og.compile(og.parse(text), device="cuda")
    base, out = samples((64, 130)), np.full((64, 130), -7, np.float32)
    view = VIEWS[name]
    f(x=FakeArray(view(cupy.asarray(base).host)), out=FakeArray(view(out)))
    expected = np.full((64, 130), -7, np.float32)
    powers = np.exp(view(base).astype(np.float64))
    view(expected)[...] = powers / powers.sum(1, keepdims=True) * view(base)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-7)  # and no other element is written


def test_64_bit_indices_give_the_same_bits(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    text, shapes = OTHERS["a batch norm, whose rows are several runs"]
    feeds = {n: samples(s, "f64", seed=i) for i, (n, s) in enumerate(shapes.items())}
    narrow = run(cupy, compiled(text, "f64"), feeds)
    monkeypatch.setattr("opgraph.schedule.cuda_row_tiles.NARROW", 1)
    f = compiled(text, "f64")
    wide = run(cupy, f, feeds)
    assert all("og::i64, 2, 1, -1, 0ull>" in text for text in f.kernels.values())
    assert all(wide[k].tobytes() == narrow[k].tobytes() for k in wide)


def test_bound_calls_may_write_results_over_inputs(cupy: FakeCupy) -> None:
    """Rows that are held and rows that are read again; sums must be computed before."""
    for shape, name in [((17, 9000), "x"), ((300, 40), "d_y")]:
        shapes = {"x": shape, "w": shape[1:], "b": shape[1:], "d_y": shape}
        feeds = {n: samples(s, seed=i) for i, (n, s) in enumerate(shapes.items())}
        f = compiled(BACKWARD, "f32")
        want = {k: v.host for k, v in f({k: cupy.asarray(v) for k, v in feeds.items()}).items()}
        held = {k: cupy.asarray(v) for k, v in feeds.items()}
        outs = {"dx": held[name], "dw": cupy.empty(shapes["w"], "f4"), "db": cupy.empty(shapes["w"], "f4")}
        launch, before = f.bind(held, out=outs), cupy.allocated
        launch()
        assert all(outs[k].host.tobytes() == want[k].tobytes() for k in want) and cupy.allocated == before


def test_empty_rows_have_the_neutral_value(cupy: FakeCupy) -> None:
    f = compiled(ALL, "f32")
    got = {k: v.host for k, v in f(x=cupy.asarray(np.zeros((2, 0), np.float32))).items()}
    assert got["a"].tolist() == [0, 0] and np.isnan(got["b"]).all() and got["c"].tolist() == [-np.inf] * 2
    assert got["d"].ravel().tolist() == [np.inf] * 2 and got["e"].tolist() == [1, 1] and got["g"].tolist() == [0, 0]
    none = f(x=cupy.asarray(np.zeros((0, 5), np.float32)))
    assert none["a"].shape == (0,) and none["b"].shape == (0, 1)
    backward = compiled(BACKWARD, "f32")
    empty = {n: cupy.asarray(np.zeros(s, "f4")) for n, s in {"x": (0, 8), "w": (8,), "b": (8,), "d_y": (0, 8)}.items()}
    assert backward(empty)["dw"].host.tolist() == [0] * 8


def test_nan_and_infinities_stay_in_their_rows(cupy: FakeCupy) -> None:
    x = samples((6, 1000))
    x[1, 7], x[2, 99], x[3, 0], x[4, 50], x[4, 51] = np.nan, np.inf, -np.inf, np.inf, -np.inf
    got = run(cupy, compiled(EVERYTHING, "f32"), {"x": x, "r": np.zeros_like(x)})
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.isnan(got["a"]), np.isnan(x.sum(1)))
        np.testing.assert_array_equal(got["c"], x.max(1))
        np.testing.assert_array_equal(got["d"][:, 0], x.min(1))
    np.testing.assert_array_equal(np.isnan(got["y"]).all(1), [False, True, True, False, True, False])


# -- the cut, and machine code ----------------------------------------------------------------------------------------


SOFTMAX = "graph(x: f32[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)"


@pytest.mark.parametrize(
    ("length", "vector", "threads", "packs", "held"),
    [
        (1, 1, 1, 1, True), (8, 4, 2, 1, True), (33, 1, 16, 3, True), (64, 4, 4, 4, True), (1024, 4, 32, 8, True),
        (4096, 4, 256, 4, True), (8192, 4, 512, 4, True), (10_000, 4, 512, 5, True), (65_536, 4, 512, 4, False),
    ],
)  # fmt: skip
def test_threads_per_row_follow_the_row_length(length: int, vector: int, threads: int, packs: int, held: bool) -> None:
    cut = row_tiles(*bound(SOFTMAX, 4096, length))
    assert cut == RowTiles(vector, packs, threads, held, vector * threads * packs == length, 0, True)


@pytest.mark.parametrize(
    ("rows", "length", "neighbours", "pieces"),
    [
        (32_768, 4096, 32, 1),
        (8192, 4096, 32, 2),
        (64, 1 << 20, 32, 256),
        (100, 1 << 20, 32, 128),
        (8192, 3, 256, 1),
        (1, 1 << 27, 1, 512),
        (2, 1 << 20, 2, 128),
        (3, 1 << 20, 4, 256),
        (5, 1 << 24, 8, 512),
        (3, 1000, 4, 1),
    ],
)
def test_few_rows_are_split_over_blocks_and_columns_grouped(
    rows: int, length: int, neighbours: int, pieces: int
) -> None:
    """Columns of a matrix: for any shape there are as many blocks and working threads as a GPU needs."""
    text = "graph(x: f32[n,c]) -> (y)\n  y = ReduceMean(x, axes=[0])"
    cut = row_tiles(*bound(text, length, rows))
    assert (cut.neighbours, cut.pieces) == (neighbours, pieces)


def launches(text: str, dtype: str, length: int, rows: int = 4096) -> list[SumLaunch]:
    return cuda_launches(*bound(text.replace("f32", dtype).format(t=dtype), rows, length))


COMPILED = {
    "softmax": SOFTMAX,
    "rmsnorm": RMS,
    "softmax backward": "graph(x: f32[n,c], d: f32[n,c]) -> (dx)\n  y = SoftMax(x, axis=-1)\n"
    "  dx = SoftMaxBackward(d, y, axis=-1)",
    "gelu, layernorm, add": "graph(x: f32[n,c], w: f32[c], r: f32[n,c]) -> (y)\n  g = GELU(x)\n"
    "  t = LayerNorm(g, w, w, keep_stats=false)\n  y = Add(t, r)",
    "layernorm backward": BACKWARD,
    "everything": EVERYTHING,
}


@pytest.mark.skipif(
    nvrtc.library() is None or nvrtc.disassembler() is None,
    reason="pip install nvidia-cuda-nvrtc nvidia-cuda-nvdisasm",
)
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_kind_of_row_compiles_without_spills(dtype: str, arch: str) -> None:
    wanted = {
        "f32": [("softmax", 33), ("rmsnorm", 1000), ("softmax backward", 8192), ("gelu, layernorm, add", 8192),
                ("layernorm backward", 8192), ("everything", 100_000)],
        "bf16": [("softmax", 1000), ("gelu, layernorm, add", 8192)],
    }  # fmt: skip
    made = [item.source for name, n in wanted[dtype] for item in launches(COMPILED[name], dtype, n)]
    if dtype == "f32":
        made.append(launches(SOFTMAX.replace("-1", "0"), dtype, 4096)[0].source)
        made += [item.source for item in launches(SOFTMAX, dtype, 1 << 20, rows=2)[:1]]
    sources = [s for s in made if s.skeleton == "cuda/inner_reduction.cuh"]
    programs = sass.programs(
        nvrtc.disassemble(nvrtc.compile_text(together(sources, "cuda/inner_reduction.cuh"), arch, nvrtc.OPTIONS))
    )
    assert programs.keys() >= {s.entry for s in sources}
    for name, program in programs.items():
        assert program.frame == 0 and not [x for x in program.instructions if x.kind in ("LDL", "STL")], name
