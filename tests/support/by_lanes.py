"""Kernels on a CPU that takes 16 floats at a time, and the same kernels with one float at a time."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

import opgraph as og
from opgraph.runtime import cpu_compiler


def _has_lanes() -> bool:
    compiler = cpu_compiler.find_compiler()
    if compiler is None or not compiler.is_gcc:
        return False
    command = [*compiler.command, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return all(f"__AVX512{part}__" in told for part in ("F", "DQ", "BW", "VL"))


needs_lanes = pytest.mark.skipif(not _has_lanes(), reason="no GCC, or a machine without AVX-512: there are no lanes")


def functor(f: og.Executable) -> str:
    """The code of its one kernel."""
    (source,) = f.kernels.values()
    return source[source.index("struct Fused") :]


def scalar_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compiler, "FLAGS", (*cpu_compiler.FLAGS, cpu_compiler.NO_LANES))


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.dtype != bool:
        nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nan)
        got, want = np.where(nan, got.dtype.type(0), got), np.where(nan, want.dtype.type(0), want)
    bits = f"u{got.itemsize}"
    np.testing.assert_array_equal(got.view(bits), want.view(bits))


def both_ways(text: str, given: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = og.compile(og.parse(text))
    got = lanes(given)
    assert all("by_lanes = true" in source for source in lanes.kernels.values())
    with monkeypatch.context() as patch:
        scalar_form(patch)
        want = og.compile(og.parse(text))(given)
    for name in want:
        same(np.asarray(got[name]), np.asarray(want[name]))
