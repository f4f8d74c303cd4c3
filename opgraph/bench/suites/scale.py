"""Large graphs: microseconds per op of partitioning, from 100 to 100,000 ops; memory of a compiled graph of 10,000."""

from __future__ import annotations

import statistics
import tempfile
import time

import opgraph as og
from opgraph.bench.machine import fresh_process
from opgraph.bench.results import Figure
from opgraph.bench.suites.timed import Say
from opgraph.bench.timing import undisturbed

COUNTS = (100, 1_000, 10_000, 100_000)
COMPILED = 10_000
#: The distance between two ops that do not fuse, such as the matrix products of a network.
BLOCK = 10


def network(count: int, width: int = 16) -> og.Graph:
    """A graph of `count` ops, not finalized: a product, then pointwise ops with a residual, repeated."""
    g = og.Graph()
    x = g.input("x", shape=(4, width))
    w = g.input("w", shape=(width, width))
    made = 0
    while made < count:
        h = g.add_op("MatMul", x, w)
        for index in range(min(BLOCK - 1, count - made - 1)):
            if index == BLOCK - 2:
                h = g.add_op("Add", h, x)
            elif index % 3 == 1:
                h = g.add_op("Multiply", h, 0.5)
            else:
                h = g.add_op(("Tanh", "Sigmoid")[index % 2], h)
        x = h
        made += BLOCK
    g.output(x)
    return g


def measured(*, quick: bool, say: Say) -> list[Figure]:
    """The time of building, checking and partitioning, per op; and the time and memory of compiling."""
    figures = []
    for count in COUNTS[:3] if quick else COUNTS:
        say(f"{count} ops")
        rounds = max(1, min(5, 2_000 // count))
        found = [_stages(count) for _ in range(rounds)]
        for column in found[0]:
            value = statistics.median(one[column] for one in found) / count * 1e6
            figures.append(Figure(suite="scale", subject=f"{count:,} ops", column=column, value=value, unit="us/op"))
    say(f"memory of {COMPILED} ops")
    with tempfile.TemporaryDirectory(prefix="opgraph-bench-") as cache:
        seconds, mebibytes, source = (v / 1e3 for v in fresh_process(_MEMORY.format(count=COMPILED), cache))
    subject = f"{COMPILED:,} ops, compiled for the CPU"
    for column, value, unit in (
        ("compile", seconds, "s"),
        ("memory", mebibytes, "MiB"),
        ("graph alone", source, "MiB"),
    ):
        figures.append(Figure(suite="scale", subject=subject, column=column, value=value, unit=unit))
    return figures


def _stages(count: int) -> dict[str, float]:
    from opgraph.partition.partitioner import partition

    with undisturbed():
        start = time.perf_counter()
        g = network(count)
        built = time.perf_counter()
        g.finalize()
        checked = time.perf_counter()
        partition(g)
        return {
            "build": built - start,
            "finalize": checked - built,
            "partition": time.perf_counter() - checked,
        }


#: Resident memory before and after. The process runs a small graph first, so that loaded modules do not count.
_MEMORY = """
import gc, time
import numpy as np, opgraph as og
from opgraph.bench.suites.scale import network
def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20
feeds = dict(x=np.ones((4, 16), np.float32), w=np.full((16, 16), 0.1, np.float32))
og.compile(network(20))(feeds)
before = resident()
g = network({count}).finalize()
graph = resident()
start = time.perf_counter()
f = og.compile(g)
seconds = time.perf_counter() - start
f(feeds)
print(seconds, resident() - before, graph - before)
"""
