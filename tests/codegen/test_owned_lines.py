"""Results stored to prefetched cache lines, or with non-temporal stores, equal those of plain stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from by_lanes import needs_lanes

import opgraph as og
from opgraph.ir import dtypes
from opgraph.runtime import cpu_compiler, processor

pytestmark = needs_lanes

#: Results of 16 MiB and more use non-temporal stores; these are slightly larger, and multiples of no block size.
LARGE, SMALL = 4 * 1024 * 1024 + 37, 4 * 1024 + 37

FLAT = "graph(x: f32[n]) -> (y)\n  y = Swish(x)"
SIXTEEN = """graph(x: f32[n]) -> (h, b, t)
  h: f16[n] = TypeCast(x)
  b: bf16[n] = TypeCast(x)
  t = Greater(x, 0.0)"""
BRANCHES = """graph(x: f32[n], a: f32[]) -> (y)
  up = Greater(x, 0.0)
  %0 = Pow(1.5, x)
  %1 = Exp(x)
  %2 = Tanh(%1)
  %3 = Multiply(%2, a)
  y = Select(up, %0, %3)"""
SUMS = """graph(x: f32[n], a: f32[1]) -> (y, s)
  y = Multiply(x, a)
  s: f32[1] = SumTo(y, a)"""
ROWS = "graph(x: f32[m,k]) -> (y)\n  y = LayerNorm(x, keep_stats=false, use_affine=false)"
SOFTMAX = "graph(x: f32[m,k], r: f32[m,k]) -> (y)\n  %0 = SoftMax(x, axis=-1)\n  y = Subtract(%0, r)"


def guarded(shape: tuple[int, ...], dtype: Any, apart: int) -> tuple[np.ndarray, np.ndarray]:
    """An array that begins `apart` bytes after a cache line, and all memory around it."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(size + 4096, 0xA5, np.uint8)
    begin = 1024 + -(memory.ctypes.data + 1024) % 64 + apart
    return memory[begin : begin + size].view(dtype).reshape(shape), memory


def results(monkeypatch: pytest.MonkeyPatch, text: str, dims: dict[str, int], apart: int, owns: bool) -> list[bytes]:
    monkeypatch.setattr(processor, "owns_lines", lambda: owns)
    graph = og.parse(text)
    rng = np.random.default_rng(0)

    def shape(t: og.LogicalTensor) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else dims[str(d)] for d in t.dims or ())

    arrays = {t.name: rng.standard_normal(shape(t), dtype=np.float32) for t in graph.inputs}
    made = {t.name: guarded(shape(t), dtypes.get(t.dtype).numpy, apart) for t in graph.outputs}
    out = {name: array for name, (array, _) in made.items()}
    og.compile(graph, device="cpu")(arrays, out=out if len(out) > 1 else next(iter(out.values())))
    for array, memory in made.values():
        begin = array.ctypes.data - memory.ctypes.data
        assert (memory[:begin] == 0xA5).all() and (memory[begin + array.nbytes :] == 0xA5).all()
    return [array.tobytes() for array, _ in made.values()]


@pytest.mark.parametrize("apart", [0, 4, 16])
@pytest.mark.parametrize("n", [31, SMALL, LARGE])
@pytest.mark.parametrize("text", [FLAT, BRANCHES, SUMS], ids=["flat", "branches", "sums"])
@pytest.mark.usefixtures("no_cache")
def test_prefetched_stores_give_the_same_bits_at_every_alignment(
    monkeypatch: pytest.MonkeyPatch, text: str, n: int, apart: int
) -> None:
    plain, owned = (results(monkeypatch, text, {"n": n}, apart, owns) for owns in (False, True))
    assert plain == owned


def test_cases_include_a_kernel_of_two_branches() -> None:
    f = og.compile(og.parse(BRANCHES), device="cpu")
    f(x=np.ones(8, np.float32), a=np.float32(1))
    assert "branch_inputs" in next(iter(f.kernels.values())).partition("struct Fused")[2]


@pytest.mark.parametrize("n", [SMALL, 3 * LARGE])
@pytest.mark.usefixtures("no_cache")
def test_prefetched_stores_of_16_bit_and_boolean_results(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    plain, owned = (results(monkeypatch, SIXTEEN, {"n": n}, 16, owns) for owns in (False, True))
    assert plain == owned


@pytest.mark.parametrize("apart", [0, 4])
@pytest.mark.parametrize(("m", "k"), [(3, 1000), (4200, 1000), (4200, 1024), (500, 9001)])
@pytest.mark.parametrize("text", [ROWS, SOFTMAX], ids=["norm", "softmax"])
@pytest.mark.usefixtures("no_cache")
def test_prefetched_stores_give_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, text: str, m: int, k: int, apart: int
) -> None:
    plain, owned = (results(monkeypatch, text, {"m": m, "k": k}, apart, owns) for owns in (False, True))
    assert plain == owned


@pytest.mark.usefixtures("no_cache")
def test_prefetched_stores_work_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal(LARGE, dtype=np.float32)
    monkeypatch.setattr(processor, "owns_lines", lambda: True)
    f = og.compile(og.parse(FLAT), device="cpu", donate=("x",))
    want = f(x=x.copy())
    own = x.copy()
    assert f(x=own, out=own) is own
    np.testing.assert_array_equal(own, want)


def test_prefetched_stores_are_enabled_only_on_intel() -> None:
    compiler = cpu_compiler.find_compiler()
    assert compiler is not None
    with open("/proc/cpuinfo") as file:
        intel = "GenuineIntel" in file.read()
    assert (cpu_compiler.OWNS_LINES in compiler.flags(flat=True, branches=False)) == intel
