"""Approximate computations of a GPU in f16 and bf16: ops, operands, and the results that count."""

from __future__ import annotations

import functools

import approximate
import measure
import numpy as np
import points
from measure import Case

import opgraph as og
from opgraph.ir import dtypes, opdef
from opgraph.loops.loop import Loop
from opgraph.loops.lower import lower
from opgraph.ops import samples

SMALLEST = 2.0**-126
#: A result so near the smallest normal number is flushed if its parts fall below that number.
FLUSHED = SMALLEST * (1 + 2.0**-7)
#: Operands of an op with several inputs: as many as the time of the tests allows.
GRID = 60_000


def loop_of(graph: og.Graph) -> Loop:
    (partition,) = graph.finalize().get_partitions()
    return lower(partition).loop


@functools.cache
def cases() -> tuple[tuple[Case, Loop], ...]:
    """Every form of every op, in f16 and bf16, that og::fast computes in its own way."""
    every = (c for r in measure.measured_ops() for d in measure.NARROW for c in measure.cases(r, d))
    return tuple((c, loop) for c, loop in ((c, loop_of(c.graph())) for c in every) if approximate.is_changed(loop))


def columns_of(case: Case) -> list[np.ndarray]:
    """All 65,536 values: alone, and for a derivative with factor 1 and with random factors; then a grid."""
    line = points.every_16_bit_value(dtypes.get(case.dtype).numpy)
    if len(case.ports) == 1:
        return [line]
    columns = points.grid(case.record, case.ports, case.dtype, GRID)
    if case.is_derivative:
        whole = samples.arrays(case.record, case.ports, case.dtype, [(len(line),)] * len(case.ports), seed=10)
        first, second = [line, np.ones_like(line), *whole[2:]], [line, *whole[1:]]
        columns = [np.concatenate(c) for c in zip(first, second, columns, strict=True)]
    if case.attrs.get("use_dst"):
        forward = opdef.get(case.record.kind.removesuffix("Backward"), where="test")
        assert forward.reference is not None
        columns[0] = forward.reference(columns[0], **{n: v for n, v in case.attrs.items() if forward.attr(n)})
    return columns


def judged(dtype: str, columns: list[np.ndarray], truth: np.ndarray) -> np.ndarray:
    """Marks the results that count: bf16 has the range of f32, whose subnormals are zeros on a GPU."""
    if dtype != "bf16":
        return np.ones(len(truth), bool)
    floats = [c.astype(np.float64) for c in columns if c.dtype != bool]
    kept = np.all([(np.abs(c) >= SMALLEST) | (c == 0) | np.isnan(c) for c in floats], axis=0)
    return kept & ((np.abs(truth) >= FLUSHED) | (truth == 0) | np.isnan(truth))


def positive_powers(dtype: str) -> tuple[tuple[str, str], list[np.ndarray], np.ndarray]:
    """Powers of surely positive numbers, and of any numbers: texts, operands, and the base of the second."""
    both = "  y = Pow(p, b)\n  dx = PowBackward(p, d, b)\n  dxx = PowBackward(p, d, b, order=2)"
    head = f"graph({{0}}: {dtype}[n], b: {dtype}[n], d: {dtype}[n]) -> (y, dx, dxx)\n"
    chosen = head.format("x") + "  c = Greater(x, 0.0)\n  p = Select(c, x, 1.0)\n" + both
    kind = dtypes.get(dtype).numpy
    line = np.tile(points.every_16_bit_value(kind), 8)
    rng = np.random.default_rng(0)
    some = np.array([0.0, -0.0, 0.5, 1.0, 2.0, -3.0, 17.0, np.inf, -np.inf, np.nan]).astype(kind)
    b = np.where(rng.random(len(line)) < 0.5, rng.choice(some, len(line)), rng.uniform(-20, 20, len(line)).astype(kind))
    line, b = np.append(line, np.full(len(some), np.inf, kind)), np.append(b, some)
    d = rng.normal(0, 1, len(line)).astype(kind)
    plain = np.where(line.astype(np.float32) >= SMALLEST, line, np.ones((), kind))
    return (chosen, head.format("p") + both), [line, b, d], plain
