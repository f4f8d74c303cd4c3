"""A machine without a C++ compiler on its PATH: the compiler extra, else torch, else NumPy, each with one notice."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import opgraph as og
from opgraph.ir import dtypes
from opgraph.loops.interpret import NUMPY, interpret
from opgraph.loops.lower import lower
from opgraph.runtime import cpu_compiler

SWIGLU = """\
graph(x: f32[batch,64], up: f32[batch,64]) -> (y)
  s = Sigmoid(x)
  g = Multiply(x, s)
  y = Multiply(g, up)
"""
ROWS = """\
graph(x: f32[batch,64], up: f32[batch,64]) -> (y)
  p = SoftMax(x, axis=-1)
  y = Multiply(p, up)
"""
FALL_BACK = """
import sys
{hide}
import numpy as np, opgraph as og
g = og.parse({text!r})
f = og.compile(g)
x = np.linspace(-9, 9, 128, dtype=np.float32).reshape(2, 64)
for _ in range(2):
    off = np.abs(f(x=x, up=x) - og.evaluate(g, x=x, up=x)).max()
    assert off < 1e-5, off
og.compile(og.parse({text!r}))
"""


@pytest.mark.parametrize(("hidden", "engine"), [((), "torch"), (("torch",), "NumPy")])
def test_torch_or_numpy_runs_without_a_compiler_with_one_notice(
    tmp_path: Path, hidden: tuple[str, ...], engine: str
) -> None:
    pytest.importorskip("torch")
    hide = "".join(f"sys.modules[{name!r}] = None\n" for name in (*hidden, "ziglang"))
    environment = {**os.environ, "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FALL_BACK.format(hide=hide, text=SWIGLU)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("there is no C++ compiler") == 1
    assert f"op by op in {engine}" in done.stderr and "opgraph[compiler]" in done.stderr


@pytest.mark.parametrize("text", [SWIGLU, ROWS], ids=["swiglu", "rows"])
def test_compiler_extra_works_without_path_and_home(text: str, tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="the extra `compiler` is not installed")
    environment = {k: v for k, v in os.environ.items() if k in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [sys.executable, "-c", FALL_BACK.format(hide="", text=text)],
        capture_output=True, text=True, check=False, env={**environment, "PATH": "", "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert [p.name for p in tmp_path.iterdir()] == ["opgraph"]


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, no_cache: None) -> None:
    monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
    warnings.filterwarnings("ignore", "there is no C\\+\\+ compiler|.*op by op", UserWarning)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_arrays_may_have_any_layout() -> None:
    pytest.importorskip("torch")
    g = og.parse("graph(x: f32[3,4], b: f32[4]) -> (y)\n  s = Add(x, b)\n  y = ReLU(s)").finalize()
    f = og.compile(g)
    x, b = np.arange(-5, 7, dtype=np.float32).reshape(3, 4), np.ones(4, np.float32)
    want = np.maximum(x + b, 0)
    np.testing.assert_array_equal(f(x=np.flip(np.flip(x).copy()), b=b), want)
    np.testing.assert_array_equal(f(x=np.flip(np.flip(x, 1).copy(), 1), b=np.broadcast_to(b[:1], 4)), want)
    inside = np.zeros(50, np.uint8)[1:49].view([("x", np.float32)])["x"].reshape(3, 4)  # misaligned by one byte
    inside[...] = x
    np.testing.assert_array_equal(f(x=inside, b=b), want)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_results_share_no_memory() -> None:
    pytest.importorskip("torch")
    text = "graph(x: f32[3,1], w: f32[3,4]) -> (a, b, c)\n  a = Identity(x)\n  b = BroadcastTo(x, w)\n  c = Identity(x)"
    f = og.compile(og.parse(text).finalize())
    x, w = np.array([[1], [2], [3]], np.float32), np.zeros((3, 4), np.float32)
    results = f(x=x, w=w)
    for name, result in results.items():
        result[0, 0] = 9  # changes no other result, and no input
        assert [name for name, r in results.items() if r[0, 0] == 9] == [*"abc"[: "abc".index(name) + 1]]
    np.testing.assert_array_equal(results["b"][0], np.array([9, 1, 1, 1], np.float32))
    np.testing.assert_array_equal(x[:, 0], np.array([1, 2, 3], np.float32))


@pytest.mark.parametrize("engine", ["NumPy", "torch"])
@pytest.mark.parametrize(("dtype", "half", "above"), [("bf16", 2**-8, 2**-7), ("f16", 2**-11, 2**-10)])
def test_without_a_compiler_f64_is_rounded_to_16_bits_once(engine: str, dtype: str, half: float, above: float) -> None:
    library = NUMPY if engine == "NumPy" else pytest.importorskip("opgraph.runtime.providers.torch").TORCH
    g = og.parse(f"graph(x: f64[1]) -> (y)\n  y: {dtype}[1] = TypeCast(x)").finalize()
    (result,) = interpret(lower(g.get_partitions()[0]).loop, [np.array([1 + half + 2**-40])], library)
    assert float(result[0]) == 1 + above  # 1 if rounded by way of f32, which loses the last part


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_without_a_compiler_softplus_does_not_overflow(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
    graph = og.parse(f"graph(x: {dtype}[4]) -> (y)\n  y = SoftPlus(x, beta=0.75)")
    x = np.array([105, 120, 900, 3000]).astype(dtypes.get(dtype).numpy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_array_equal(og.compile(graph)(x=x), x)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_mod_is_exact_if_the_quotient_overflows(dtype: str) -> None:
    torch = pytest.importorskip("opgraph.runtime.providers.torch")
    numpy = dtypes.get(dtype).numpy
    most, least = np.finfo(numpy).max, np.finfo(numpy).tiny
    a = np.array([most, -most, most, most, np.inf, np.nan, 5, 7] * 4, numpy)
    b = np.array([0.7, 0.7, -3 * least, 0.75 * least, 3, 3, 0, -3] * 4, numpy)
    for fmod in (0, 1):
        graph = og.parse(f"graph(a: {dtype}[32], b: {dtype}[32]) -> (y)\n  y = Mod(a, b, fmod={fmod})").finalize()
        with np.errstate(invalid="ignore"):
            (got,) = interpret(lower(graph.get_partitions()[0]).loop, [a, b], torch.TORCH)
            np.testing.assert_array_equal(got, og.evaluate(graph, {"a": a, "b": b}, dtype=None))


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("kind", ["BiasAdd", "PReLU"])
def test_without_a_compiler_channel_axis_survives_a_fused_reshape(kind: str) -> None:
    """The second axis of x[6,3] is the third one of the loop over [2,3,3]."""
    text = f"""graph(x: f32[6,3], w: f32[3]) -> (y)
      p = {kind}(x, w, data_format="NCX")
      r = StaticReshape(p, shape=[2,3,3], special_zero=false)
      m = ReduceMean(r, axes=[1], keep_dims=true)
      y = Subtract(r, m)
    """
    graph, rng = og.parse(text), np.random.default_rng(0)
    given = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in graph.inputs}
    np.testing.assert_allclose(og.compile(graph, device="cpu")(given), og.evaluate(graph, given), atol=1e-6)
