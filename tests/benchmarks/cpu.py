"""The CPU figures of the README: opgraph against torch in one process, interleaved, as ratios.

    python tests/benchmarks/cpu.py [--json FILE]

A ratio is the median of pairwise ratios of neighbouring runs, so that other load on the machine cancels; the spread is
that between the quartiles. Both sides write into a given buffer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile

import numpy as np
import torch
from measuring import compare, fresh_process, machine, once

import opgraph as og


def swish(n: int) -> dict[str, dict[str, float]]:
    g = og.Graph()
    x = g.input("x", shape=(None,))
    g.add_op("Multiply", x, g.add_op("Sigmoid", x))
    data = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    out = np.empty_like(data)
    tx, tout = torch.from_numpy(data), torch.empty(n)
    call = og.compile(g).bind(x=data, out=out)
    return {
        "torch silu": compare(call, lambda: torch.ops.aten.silu.out(tx, out=tout)),
        "torch composed": compare(call, lambda: torch.mul(tx, torch.sigmoid(tx), out=tout)),
    }


def chain(n: int) -> dict[str, dict[str, float]]:
    """12 pointwise ops: bias, swish, scale, clamp, tanh, residual, abs, sqrt, negate."""
    g = og.Graph()
    x, r = g.input("x", shape=(None,)), g.input("r", shape=(None,))
    h = g.add_op("Add", x, 0.5)
    h = g.add_op("Multiply", h, g.add_op("Sigmoid", h))
    h = g.add_op("Clamp", g.add_op("Multiply", h, 1.5), min=-3.0, max=3.0)
    h = g.add_op("Add", g.add_op("Tanh", h), r)
    h = g.add_op("Sqrt", g.add_op("Add", g.add_op("Abs", h), 1.0))
    g.add_op("Subtract", g.add_op("Neg", h), x)
    rng = np.random.default_rng(0)
    feeds = {k: rng.standard_normal(n).astype(np.float32) for k in "xr"}
    tx, tr = (torch.from_numpy(feeds[k]) for k in "xr")
    out = np.empty(n, np.float32)

    def eager() -> torch.Tensor:
        h = tx + 0.5
        h = h * torch.sigmoid(h)
        h = torch.clamp(h * 1.5, -3.0, 3.0)
        h = torch.tanh(h) + tr
        h = torch.sqrt(torch.abs(h) + 1.0)
        return torch.neg(h) - tx

    f = og.compile(g)
    assert len(g.ops) == 12 and len(f.partitions) == 1
    np.testing.assert_allclose(f(feeds), eager().numpy(), rtol=1e-5, atol=1e-5)
    return {"torch eager": compare(f.bind(feeds, out=out), eager)}


def call_cost() -> dict[str, float]:
    g = og.Graph()
    x = g.input("x", shape=(1024,))
    g.add_op("Multiply", x, g.add_op("Sigmoid", x))
    f = og.compile(g)
    data, out = np.ones(1024, np.float32), np.empty(1024, np.float32)
    bound = f.bind(x=data, out=out)
    calls = {"call_us": lambda: f(x=data), "call_out_us": lambda: f(x=data, out=out), "bound_us": bound}
    return {name: statistics.median(once(c, 2000) for _ in range(15)) * 1e6 for name, c in calls.items()}


# The first compilation also loads the modules that compile; the second one shows a partition alone.
_COMPILE = """
import time, opgraph as og
def graph(kind):
    g = og.Graph(); x = g.input("x", shape=(None,)); g.add_op("Multiply", x, g.add_op(kind, x)); g.finalize()
    return g
def seconds(g):
    t = time.perf_counter(); og.compile(g); return time.perf_counter() - t
print(seconds(graph("Tanh")), seconds(graph("Sigmoid")))
"""
_IMPORT = "import time; t = time.perf_counter(); import opgraph; print(time.perf_counter() - t)"
_IMPORT_NUMPY = _IMPORT.replace("opgraph", "numpy, ml_dtypes")


def start_cost() -> dict[str, float]:
    cold, warm = [], []
    for _ in range(7):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(fresh_process(_COMPILE, cache))
            warm.append(fresh_process(_COMPILE, cache))
    here = tempfile.gettempdir()
    imports = [fresh_process(_IMPORT, here) + fresh_process(_IMPORT_NUMPY, here) for _ in range(9)]

    def middle(rows: list[list[float]], column: int) -> float:
        return statistics.median(row[column] for row in rows)

    return {
        "compile_cold_ms": middle(cold, 1),
        "compile_from_disk_ms": middle(warm, 1),
        "first_compile_cold_ms": middle(cold, 0),
        "first_compile_from_disk_ms": middle(warm, 0),
        "import_ms": middle(imports, 0),
        "import_of_which_numpy_ms": middle(imports, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    results: dict[str, object] = {"machine": machine()}
    print("machine:", ", ".join(f"{k} {v}" for k, v in results["machine"].items()))  # type: ignore[attr-defined]
    print(f"\n{'case':<34}{'ours us':>12}{'peer us':>12}{'ratio':>8}  quartiles")
    cases = [(f"swish f32 {n >> 20}M", lambda n=n: swish(n)) for n in (1 << 20, 32 << 20)]
    cases += [("12-op chain f32 8M", lambda: chain(8 << 20))]
    for name, run in cases:
        results[name] = found = run()
        for peer, r in found.items():
            row = f"{name} / {peer}"
            times = f"{r['ours_us']:>12.1f}{r['theirs_us']:>12.1f}"
            print(f"{row:<34}{times}{r['ratio']:>8.2f}  {r['low']:.2f} to {r['high']:.2f}")
    for name, run in (("one call at 1,024 elements", call_cost), ("start", start_cost)):
        results[name] = found = run()
        print(f"\n{name}: " + ", ".join(f"{k} {v:.1f}" for k, v in found.items()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
