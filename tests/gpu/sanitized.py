"""A small program of every kind of kernel, for compute-sanitizer; optionally with a planted fault.

`compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/sanitized.py` must exit with 0, and with
`--fault memcheck` appended with 9: a tool that finds nothing might not have checked anything. Memory comes directly
from the driver, one allocation for each array, because the tools track only these.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import opgraph as og
from opgraph.ir import dtypes

#: For each tool, a kernel with a fault that it must find.
FAULTS = {
    "memcheck": """
extern "C" __global__ void planted(float* y, const float* x) { y[threadIdx.x + 1] = 1.0f; }  // one past the end
""",
    "racecheck": """
extern "C" __global__ void planted(float* y, const float* x) {  // no barrier between a write and another thread's read
  __shared__ float s[256];
  s[threadIdx.x] = (float)threadIdx.x;
  y[threadIdx.x] = s[255 - threadIdx.x];
}
""",
    "initcheck": """
extern "C" __global__ void planted(float* y, const float* x) { y[threadIdx.x] = x[threadIdx.x]; }  // of nobody
""",
}
GATED = "graph(x: {0}[n], a: {0}[n]) -> (y)\n  %0 = Swish(x, a)\n  y = Add(%0, a)"
NORM = "graph(x: {0}[n,c], w: {0}[c]) -> (y)\n  t = RMSNorm(x, w)\n  y = SoftMax(t, axis=-1)"
ROWS = "graph(x: {0}[n,c], a: {0}[c]) -> (y)\n  %0 = Swish(x, a)\n  y = Multiply(%0, x)"


def graphs() -> list[tuple[og.Graph, dict[str, tuple[int, ...]]]]:
    """Flat and in rows, whole and partial tiles, sums of every kind, casts to bytes, several partitions."""
    found = []
    for dtype in ("f32", "bf16", "f16", "f64"):
        for size in (3, 8192, 10_007):
            found.append((og.parse(GATED.format(dtype)), {"x": (size,), "a": (size,)}))
        for shape in ((37, 97), (64, 256)):
            found.append((og.parse(ROWS.format(dtype)), {"x": shape, "a": shape[1:]}))
            trained = og.gradient(og.parse(ROWS.format(dtype)), ["x", "a"])
            found.append((trained, {"x": shape, "a": shape[1:], "d_y": shape}))
        total = og.gradient(og.parse(ROWS.format(dtype).replace("[c]", "[1]")), ["a"])
        found.append((total, {"x": (130, 70), "a": (1,), "d_y": (130, 70)}))
    mask = "graph(x: f32[n]) -> (y)\n  %0 = Greater(x, 0.0)\n  y: u8[n] = TypeCast(%0)"
    found.append((og.parse(mask), {"x": (4099,)}))
    # Two partitions, without library ops: their kernels are not opgraph's, and tools report faults in some.
    whole = "graph(x: f32[n,c], a: f32[c]) -> (y)\n  %0 = Exp(x)\n  %1 = SumTo(%0, a)\n  y = Multiply(x, %1)"
    found.append((og.parse(whole), {"x": (300, 40), "a": (40,)}))
    return found + rows()


def rows() -> list[tuple[og.Graph, dict[str, tuple[int, ...]]]]:
    """Rows of a few threads, of a warp, of a block; held and read again; gradients summed over rows, and separately."""
    found = []
    for dtype in ("f32", "bf16"):
        for length in (7, 257, 1000, 4096, 40_001):
            found.append((og.parse(NORM.format(dtype)), {"x": (33, length), "w": (length,)}))
    trained = og.gradient(og.parse(NORM.format("f32")), ["x", "w"])
    for shape in ((300, 40), (40, 1000), (33, 4096), (17, 20_000)):
        found.append((trained, {"x": shape, "w": shape[1:], "d_y": shape}))
    batch = "graph(x: f32[n,c,h]) -> (y, m)\n  m = ReduceMean(x, axes=[0,2], keep_dims=true)\n  y = Subtract(x, m)"
    found.append((og.parse(batch), {"x": (9, 5, 40)}))
    columns = "graph(x: f32[n,c]) -> (y, m)\n  y = SoftMax(x, axis=0)\n  m = ReduceMax(x, axes=[0])"
    for shape in ((37, 90), (2000, 33), (300, 2), (40_000, 3)):  # neighbouring rows together; in pieces
        found.append((og.parse(columns), {"x": shape}))
    found.append((og.parse("graph(x: f32[n,c]) -> (y)\n  y = SoftMax(x, axis=1)"), {"x": (2, 100_001)}))
    return found


def check(cupy: Any, graph: og.Graph, shapes: dict[str, tuple[int, ...]]) -> None:
    """Runs a graph twice and compares it with the reference, which needs no compiler: these are slow under a tool."""
    rng = np.random.default_rng(0)
    graph.finalize()
    feeds = {str(t.name): rng.normal(0, 1, shapes[str(t.name)]).astype(dtypes.get(t.dtype).numpy) for t in graph.inputs}
    f = og.compile(graph, device="cuda")
    given = {k: cupy.asarray(v) for k, v in feeds.items()}
    f(given)
    got, expected = f(given), og.evaluate(graph, feeds)
    pairs = zip(got.values(), expected.values(), strict=True) if isinstance(got, dict) else [(got, expected)]
    for mine, truth in pairs:
        a, b = (np.asarray(v).astype(np.float64) for v in (cupy.asnumpy(mine), truth))
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2 * max(1.0, np.abs(b).max(initial=0)))


def run(cupy: Any, threads: int = 1) -> None:
    """Checks every graph, `threads` at a time."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda each: check(cupy, *each), graphs()))


def main() -> None:
    """Runs the program, or the requested fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=tuple(FAULTS))
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    fault = given.fault
    import cupy

    cupy.cuda.set_allocator(None)
    if fault:
        x, y = cupy.empty(256, "f4"), cupy.empty(256, "f4")
        cupy.RawKernel(FAULTS[fault], "planted")((1,), (256,), (y, x))
        cupy.cuda.runtime.deviceSynchronize()
    else:
        run(cupy, given.threads)
    print("done")


if __name__ == "__main__":
    main()
