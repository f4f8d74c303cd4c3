"""Rows that are groups of lanes: reduced axes on both sides of a kept one, as in GroupNorm of NXC."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from schedules import followed

import opgraph as og
from opgraph.ir import dtypes
from opgraph.runtime import cpu_compiler, threads
from opgraph.schedule.schedule import GROUPS

#: All reductions, values of groups that are read and written, a sum for each channel, an operand along rows only.
TEXT = """graph(x: {t}[n,h,w,g,c], k: {t}[g,c], o: {t}[n,1,1,g,1], v: {t}[w,1,1]) -> (y, m, s, p, d)
  a = Multiply(x, v)
  m = ReduceMax(a, axes=[1,2,4], keep_dims=true)
  e = Subtract(a, m)
  l = ReduceMin(e, axes=[1,2,4], keep_dims=true)
  s = ReduceSum(e, axes=[1,2,4])
  q = Divide(e, l)
  t = Multiply(q, 0.001)
  f = Add(t, 1.0)
  p = ReduceProd(f, axes=[1,2,4], keep_dims=true)
  i = ReduceMean(q, axes=[1,2,4], keep_dims=true)
  u = Subtract(q, i)
  b = Multiply(u, k)
  y = Add(b, o)
  z = Multiply(x, u)
  d = SumTo(z, k)
"""
NORM = """graph(x: f32[n,h,w,{c}], g: f32[{c}], b: f32[{c}]) -> (y, m, v)
  y, m, v = GroupNorm(x, g, b, groups={groups}, data_format="NXC")
"""


def given(shape: tuple[int, ...], dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(shape[-1])
    n, _, w, g, c = shape
    shapes = {"x": shape, "k": (g, c), "o": (n, 1, 1, g, 1), "v": (w, 1, 1)}
    made = {name: rng.uniform(0.5, 1, s).astype(dtypes.get(dtype).numpy) for name, s in shapes.items()}
    made["x"] += np.arange(g, dtype=made["x"].dtype)[:, None] / 4  # groups differ, so that mixing them up is visible
    return made


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_groups_of_any_size_give_the_same_bits_in_any_split(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows in a box, and pieces of them; full and partial strips; elements in turns, and the remainder."""
    f = og.compile(og.parse(TEXT.format(t=dtype)))
    _, parallel = threads.team(1 << 30)
    for shape in [(2, 3, 5, 7, 3), (3, 8, 9, 2, 64), (1, 41, 30, 16, 5), (1, 64, 65, 9, 10), (17, 4, 4, 32, 2)]:
        arrays = given(shape, dtype)
        monkeypatch.setattr(threads, "team", lambda size: (1, None))
        one = f(arrays)
        assert followed(f)[-1] in GROUPS, shape
        exact, peer = og.evaluate(f.graph, **arrays), og.evaluate(f.graph, arrays, dtype=None)
        for name in "ymspd":
            wanted, own = exact[name].astype(np.float64), peer[name].astype(np.float64)
            error = np.abs(one[name].astype(np.float64) - wanted).max()
            bound = 2 * np.abs(own - wanted).max() + 2.0 ** (-9 if dtype == "bf16" else -24) * np.abs(wanted).max()
            assert error <= bound, (shape, name, error, bound)
        for count in (2, 3, 7):
            monkeypatch.setattr(threads, "team", lambda size, count=count: (count, parallel))
            more = f(arrays)
            assert all(more[name].tobytes() == one[name].tobytes() for name in one), (shape, count)
        monkeypatch.setattr(threads, "team", lambda size: (2, None))  # a pool of Python threads
        more = f(arrays)
        assert all(more[name].tobytes() == one[name].tobytes() for name in one), shape


@pytest.mark.parametrize(("c", "groups"), [(12, 6), (96, 32), (320, 32)])
def test_channels_last_group_norm_is_as_accurate_as_torch(c: int, groups: int) -> None:
    torch = pytest.importorskip("torch")
    f = og.compile(og.parse(NORM.format(c=c, groups=groups)))
    rng = np.random.default_rng(c)
    g, b = rng.normal(size=(2, c)).astype(np.float32)
    for n, h, w in [(1, 33, 40), (2, 3, 4), (18, 5, 6)]:
        x = (rng.normal(size=(n, h, w, c)) + np.arange(c)).astype(np.float32)
        made = f(x=x, g=g, b=b)
        assert followed(f)[-1] in GROUPS
        results = []
        for dtype in (torch.float64, torch.float32):
            t = torch.tensor(x, dtype=dtype).permute(0, 3, 1, 2)
            y = torch.nn.functional.group_norm(t, groups, torch.tensor(g, dtype=dtype), torch.tensor(b, dtype=dtype))
            t = t.reshape(n, groups, -1)
            one = {"y": y.permute(0, 2, 3, 1), "m": t.mean(2), "v": t.var(2, correction=0)}
            results.append({name: value.double().numpy() for name, value in one.items()})
        exact, peer = results
        for name in "ymv":
            error, own = (np.abs(a[name].reshape(exact[name].shape) - exact[name]).max() for a in (made, peer))
            assert error <= 2 * own + 2.0**-24 * np.abs(exact[name]).max(), (n, h, w, name, error, own)


@pytest.mark.parametrize("operands", ["a, x", "x, a"])
@pytest.mark.parametrize("width", ["1", "w"], ids=["of one element", "of stride 0"])
def test_operand_repeated_along_the_last_row_axis(operands: str, width: str) -> None:
    """It moves along the row's previous axis, and may be the kernel's first operand that moves at all."""
    f = og.compile(
        og.parse(
            f"graph(a: f32[n,h,{width},g,c], x: f32[n,h,w,g,c]) -> (y)\n"
            f"  p = Multiply({operands})\n  y = ReduceSum(p, axes=[1,2,4])"
        )
    )
    a, x = (np.random.default_rng(0).uniform(1, 2, (2, 20, w, 16, 8)).astype(np.float32) for w in (1, 24))
    made = f(a=a if width == "1" else np.broadcast_to(a, x.shape), x=x)
    assert followed(f)[-1] in GROUPS
    np.testing.assert_allclose(made, (a.astype(np.float64) * x).sum((1, 2, 4)), rtol=2.0**-22)


def test_nan_and_infinity_stay_in_their_group() -> None:
    f = og.compile(og.parse(NORM.format(c=40, groups=8)))
    x = np.random.default_rng(0).normal(size=(2, 9, 7, 40)).astype(np.float32)
    g, b = np.ones(40, np.float32), np.zeros(40, np.float32)
    clean = f(x=x, g=g, b=b)["y"]
    x[0, 3, 4, 12], x[1, 8, 6, 39] = np.nan, np.inf
    y = f(x=x, g=g, b=b)["y"]
    hit = np.zeros(x.shape, bool)
    hit[0, :, :, 10:15] = hit[1, :, :, 35:] = True
    assert np.isnan(y[hit]).all() and (y[~hit] == clean[~hit]).all()


def test_f64_sums_and_long_runs_are_not_grouped() -> None:
    text = "graph(x: {t}[n,h,4,c]) -> (y)\n  y = ReduceSum(x, axes=[1,3])"
    for dtype, c, is_grouped in [("f32", 65, False), ("f64", 16, False), ("f32", 64, True)]:
        f = og.compile(og.parse(text.format(t=dtype)))
        x = np.random.default_rng(c).normal(size=(3, 70, 4, c)).astype(dtypes.get(dtype).numpy)
        exact = x.astype(np.longdouble).sum((1, 3))
        assert np.abs(f(x=x) - exact).max() <= np.finfo(x.dtype).eps * np.abs(x).sum((1, 3)).max() / 2
        assert (followed(f)[-1] in GROUPS) == is_grouped, (dtype, c)


@pytest.mark.parametrize(
    ("images", "kind", "is_grouped"),
    [(63, "Abs", False), (64, "Abs", True), (64, "Exp", True)],
)
def test_small_image_channels_use_the_faster_schedule(images: int, kind: str, is_grouped: bool) -> None:
    """BatchNorm over [N,C,H,W]: a channel is N runs of H W elements."""
    text = f"graph(x: f32[n,32,8,8]) -> (y)\n  e = {kind}(x)\n  y = ReduceSum(e, axes=[0,2,3], keep_dims=true)"
    f = og.compile(og.parse(text))
    x = np.random.default_rng(images).normal(size=(images, 32, 8, 8)).astype(np.float32)
    exact = getattr(np, kind.lower())(x.astype(np.float64)).sum((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(f(x=x), exact, rtol=1e-6)
    assert (followed(f)[-1] in GROUPS) == is_grouped


def test_exponentials_over_lanes_are_inlined() -> None:
    """A compiler vectorises only functions that it has inlined into the loop over lanes."""
    compiler = cpu_compiler.find_compiler()
    if compiler is None or not compiler.is_gcc:
        pytest.skip("needs GCC")
    text = (
        NORM.format(c=256, groups=32).replace("(y, m, v)", "(y)").replace("y, m, v =", "u, m, v =") + "  y = Swish(u)"
    )
    f = og.compile(og.parse(text))
    f(x=np.ones((2, 4, 4, 256), np.float32), g=np.ones(256, np.float32), b=np.ones(256, np.float32))
    assert followed(f)[-1] in GROUPS
    (source,) = f.kernels.values()
    command = [
        *compiler.command,
        *compiler.flags(flat=False, branches=False, grouped=True),
        "-x",
        "c++",
        "-S",
        "-o",
        "-",
        "-",
    ]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    assert "pass_of_groups" in done.stdout and "some_of_each" not in done.stdout
