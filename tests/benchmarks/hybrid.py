"""Imported models in opgraph and in onnxruntime alone: interleaved ratios, and the seams between regions and kernels.

    python tests/benchmarks/hybrid.py MODEL.onnx [MODEL.onnx ...] [--sizes batch=2,seq=16] [--sizes ...] [--rounds 201]
        [--threads N] [--json FILE]

It prints two latency ratios, where below 1 is faster: a call with arrays against `session.run`, and a bound call
against a session with bound buffers; medians and quartiles, and the ratio of the fastest runs. Both sides have as many
threads, and their idle threads do the same: those of a session spin if opgraph's do. On a shared machine, spinning
threads wait for those that are not running: `taskset -c 1 python ...` compares one thread each.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import opgraph as og
from opgraph.bench.machine import machine, use_threads
from opgraph.bench.peers.onnxruntime import session
from opgraph.bench.suites.models import drawn
from opgraph.bench.timing import HostClock, in_turns, ratio


def seams(f: og.Executable) -> str:
    """The partitions of each call, in order, with their engines."""
    kinds = [f"{engine} {len(p.ops)}" for p, engine in zip(f.partitions, f.engines, strict=True)]
    return ", ".join(kinds)


def bound_session(made: Any, feeds: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """A session's call on bound buffers, and the objects that must stay alive for it."""
    binding = made.io_binding()
    outs = [onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in made.run(None, feeds)]
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    for port, value in zip(made.get_outputs(), outs, strict=True):
        binding.bind_ortvalue_output(port.name, value)
    return lambda: made.run_with_iobinding(binding), outs


def measured(path: str, sizes: dict[str, int], threads: int, rounds: int) -> dict[str, Any]:
    """One model at one set of sizes."""
    graph = og.onnx.load(path)
    feeds = {t.name or str(t.id): drawn(t, sizes) for t in graph.inputs}
    f = og.compile(graph)
    theirs = session(path, threads, spins=f.spins)
    got = f(feeds)
    results = got if isinstance(got, dict) else {graph.outputs[0].name or "": got}
    off = max(
        float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0))
        for a, b in zip(results.values(), theirs.run(None, feeds), strict=True)
    )
    outs = {name: np.empty_like(a) for name, a in results.items()}
    ours_bound = f.bind(feeds, out=outs if len(outs) > 1 else next(iter(outs.values())))
    theirs_bound, kept = bound_session(theirs, feeds)
    # Two at a time: rounds run in alternating order, so with more calls the first and the last would find their own
    # weights in the caches more often than those between (observed with four calls of one model: 10%).
    pairs: tuple[dict[str, Any], ...] = (
        {"ours": lambda: f(feeds), "theirs": lambda: theirs.run(None, feeds)},
        {"ours bound": ours_bound, "theirs bound": theirs_bound},
    )
    times = {}
    for calls in pairs:
        times.update(in_turns(calls, HostClock(), budget=float("inf"), most=rounds))
    del kept
    found = {name: [x for x in row if x is not None] for name, row in times.items()}
    plain, bound = (ratio(found[f"ours{b}"], found[f"theirs{b}"]) for b in ("", " bound"))
    return {
        "model": Path(path).name, "sizes": sizes, "seams": seams(f), "differs_by": off,
        "theirs_us": float(np.median(found["theirs"])) * 1e6,
        "call": [plain.median, plain.low, plain.high, min(found["ours"]) / min(found["theirs"])],
        "bound": [bound.median, bound.low, bound.high, min(found["ours bound"]) / min(found["theirs bound"])],
    }  # fmt: skip


def main() -> int:
    """Prints a line for each model and set of sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--sizes", action="append", help="symbol=size, separated by commas; may be repeated")
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    threads = use_threads(given.threads or None)
    rows = []
    for path in given.models:
        for text in given.sizes or ["batch=2,seq=16"]:
            sizes = {name: int(size) for name, size in (pair.split("=") for pair in text.split(","))}
            row = measured(path, sizes, threads, given.rounds)
            rows.append(row)
            ratios = ", ".join(
                f"{k} {row[k][0]:.2f} ({row[k][1]:.2f} to {row[k][2]:.2f}; fastest {row[k][3]:.2f})"
                for k in ("call", "bound")
            )
            print(f"{row['model']} {text}: {row['theirs_us']:.0f} us, {ratios}; {row['seams']}", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "threads": threads, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
