"""A machine without a C++ compiler on its PATH: the compiler extra, else torch, else NumPy, each with one notice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_without_a_compiler_torch_or_numpy_runs_it_and_says_so_once(
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
def test_the_compiler_extra_needs_neither_path_nor_home(text: str, tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="the extra `compiler` is not installed")
    environment = {k: v for k, v in os.environ.items() if k in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [sys.executable, "-c", FALL_BACK.format(hide="", text=text)],
        capture_output=True, text=True, check=False, env={**environment, "PATH": "", "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert [p.name for p in tmp_path.iterdir()] == ["opgraph"]
