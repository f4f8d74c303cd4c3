"""Rows on a GPU: reductions, softmax and norms in one kernel with the ops around them, against float64 and torch.

tests/cuda/test_rows.py runs the same kernels on the CPU; here the shuffles, barriers and 16-byte accesses are a GPU's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_row_graphs import BACKWARD, NORMS, ODD, OTHERS, VIEWS, odd_feeds, unit
from row_graphs import ALL, as_dict, samples
from row_truth import EVERYTHING, as_torch, assert_near, from_torch, truth_and_peer

import opgraph as og

LENGTHS = (
    1,
    2,
    3,
    8,
    31,
    33,
    64,
    127,
    257,
    1000,
    1024,
    4096,
    5120,
    8191,
    8192,
    10_001,
    16_384,
    32_768,
    70_001,
    262_144,
)


def compiled(text: str, dtype: str) -> Any:
    return og.compile(og.parse(text.format(t=dtype)), device="cuda")


def called(memory: Any, f: Any, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results; checks that repeated calls give the same bits."""
    given = {k: memory.put(v) for k, v in feeds.items()}
    got = {k: memory.get(v) for k, v in as_dict(f(given)).items()}
    for _ in range(3):
        again = {k: memory.get(v) for k, v in as_dict(f(given)).items()}
        assert all(again[k].tobytes() == got[k].tobytes() for k in got)
    return got


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_every_length_are_as_accurate_as_torch(any_memory: Any, torch: Any, length: int, dtype: str) -> None:
    rows = max(3, min(300, 1_000_000 // length))
    x, r = samples((rows, length), dtype), samples((rows, length), dtype, seed=1)
    f = compiled(EVERYTHING, dtype)
    got = called(any_memory, f, {"x": x, "r": r})
    assert [p.kind for p in f.partitions] == ["fused"]
    exact, peer = truth_and_peer(x, r, "cuda")
    for name, want in exact.items():
        assert_near(got[name], want, peer[name])
    if length < 100 and dtype in ("f32", "f64"):  # in 16 bits the product is subnormal
        np.testing.assert_allclose(got["e"].astype("f8"), x.astype("f8").prod(1), rtol=max(length * unit(dtype), 1e-14))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("length", [33, 768, 1000, 4096, 8192, 40_000])
@pytest.mark.parametrize("name", NORMS)
def test_norms_with_neighbouring_ops_are_one_kernel(any_memory: Any, name: str, length: int, dtype: str) -> None:
    text = "graph(x: {t}[n,c], w: {t}[c], r: {t}[n,c]) -> (g, y)\n  g = GELU(x)\n  "
    text += NORMS[name] + "\n  y = Add(t, r)"
    shapes = {"x": (65, length), "w": (length,), "r": (65, length)}
    feeds = {n: samples(s, dtype, seed=i) for i, (n, s) in enumerate(shapes.items())}
    f = compiled(text, dtype)
    got = called(any_memory, f, feeds)
    assert [p.kind for p in f.partitions] == ["fused"]
    graph = og.parse(text.format(t=dtype))
    exact, host = as_dict(og.evaluate(graph, feeds)), as_dict(og.compile(graph)(feeds))
    for key, want in exact.items():
        assert_near(got[key], np.asarray(want, np.longdouble), host[key])


@pytest.mark.parametrize(
    "shape", [(1, 40), (3000, 40), (5000, 96), (500, 1000), (300, 4096), (200, 8192), (50, 20_000)]
)
def test_norm_backward_is_as_accurate_as_torch(any_memory: Any, torch: Any, shape: tuple[int, int]) -> None:
    shapes = {"x": shape, "w": shape[1:], "b": shape[1:], "d_y": shape}
    feeds = {n: samples(s, seed=i) for i, (n, s) in enumerate(shapes.items())}
    got = called(any_memory, compiled(BACKWARD, "f32"), feeds)
    exact = as_dict(og.evaluate(og.parse(BACKWARD.format(t="f32")), feeds))
    x, w, b = (as_torch(feeds[n]).cuda().requires_grad_() for n in "xwb")
    y = torch.nn.functional.layer_norm(x, shape[1:], w, b)
    peers = torch.autograd.grad(y, (x, w, b), as_torch(feeds["d_y"]).cuda())
    for key, peer in zip(("dx", "dw", "db"), peers, strict=True):
        limit = max(2 * np.abs(from_torch(peer.cpu()) - exact[key]).max(), 2.0**-22 * np.abs(exact[key]).max())
        assert np.abs(got[key] - exact[key]).max() <= limit, key


@pytest.mark.parametrize("name", OTHERS)
def test_other_row_and_sum_graphs_agree_with_the_reference(any_memory: Any, name: str) -> None:
    text, shapes = OTHERS[name]
    feeds = {n: samples(s, "f64", seed=i) for i, (n, s) in enumerate(shapes.items())}
    got = called(any_memory, compiled(text, "f64"), feeds)
    for key, want in as_dict(og.evaluate(og.parse(text.format(t="f64")), feeds)).items():
        np.testing.assert_allclose(got[key], want, rtol=1e-11, atol=1e-11, err_msg=key)


@pytest.mark.parametrize("name", ODD)
def test_misaligned_rows_are_read_and_written_in_packs(any_memory: Any, name: str) -> None:
    text, shapes, dtype, _, _ = ODD[name]
    graph = og.parse(text.format(t=dtype)).finalize()
    feeds = odd_feeds(graph, shapes)
    got = called(any_memory, compiled(text, dtype), feeds)
    exact, host = as_dict(og.evaluate(graph, feeds)), as_dict(og.compile(graph)(feeds))
    for key, want in exact.items():
        assert_near(got[key], np.asarray(want, np.longdouble), host[key])


@pytest.mark.parametrize("name", [n for n in VIEWS if n != "backwards"])  # torch has no negative strides
def test_views_are_read_and_written_in_place(torch: Any, name: str) -> None:
    text = "graph(x: f32[n,c]) -> (y)\n  s = SoftMax(x, axis=-1)\n  y = Multiply(s, x)"
    base, out, view = torch.randn(64, 130, device="cuda"), torch.full((64, 130), -7.0, device="cuda"), VIEWS[name]
    og.compile(og.parse(text), device="cuda")(x=view(base), out=view(out))
    expected = torch.full((64, 130), -7.0, device="cuda")
    view(expected).copy_(torch.softmax(view(base), -1) * view(base))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)  # and no other element is written


def test_empty_rows_and_rows_with_nan(any_memory: Any) -> None:
    f = compiled(ALL, "f32")
    got = {k: any_memory.get(v) for k, v in f(x=any_memory.put(np.zeros((2, 0), np.float32))).items()}
    assert got["a"].tolist() == [0, 0] and np.isnan(got["b"]).all() and got["c"].tolist() == [-np.inf] * 2
    x = samples((6, 1000))
    x[1, 7], x[2, 99], x[3, 0] = np.nan, np.inf, -np.inf
    got = {k: any_memory.get(v) for k, v in f(x=any_memory.put(x)).items()}
    np.testing.assert_array_equal(got["c"], x.max(1))
    np.testing.assert_array_equal(got["d"][:, 0], x.min(1))


def test_more_than_2_31_elements(torch: Any) -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("too little memory")
    rows, length = 70_000, 32_768
    x = torch.randn(rows, length, device="cuda", dtype=torch.bfloat16)
    got = og.compile(og.parse("graph(x: bf16[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)"), device="cuda")(x=x)
    for start in (0, rows // 2, rows - 8):
        want = torch.softmax(x[start : start + 8].float(), -1)
        torch.testing.assert_close(got[start : start + 8].float(), want, rtol=2.0**-7, atol=1e-9)


def test_a_bound_backward_is_captured_in_a_cuda_graph(torch: Any) -> None:
    """Several launches and a workspace, with rows that are too long to be held."""
    shapes = {"x": (50, 20_000), "w": (20_000,), "b": (20_000,), "d_y": (50, 20_000)}
    feeds = {n: torch.randn(s, device="cuda") for n, s in shapes.items()}
    f = compiled(BACKWARD, "f32")
    want = {k: v.clone() for k, v in f(feeds).items()}
    outs = {k: torch.empty_like(v) for k, v in want.items()}
    launch = f.bind(feeds, out=outs)
    launch()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        launch()
    for value in outs.values():
        value.zero_()
    captured.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(outs[k], want[k]) for k in want)
