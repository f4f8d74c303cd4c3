"""The GPU computes the same bits as the CPU engine in every op and dtype, except in f16 and bf16 with approximate
instructions; these must be within their bound of the truth, over all 65,536 values."""

from __future__ import annotations

from typing import Any

import approximate
import approximate_cases
import measure
import numpy as np
import points
import pytest
from agreement import agree, differing
from one_op import POINTWISE, OneOp, calls
from ulp import errors

import opgraph as og
from opgraph.codegen.sources import spliced
from opgraph.errors import Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.opdef import OpDef
from opgraph.partition.rules import RULES
from opgraph.partition.units import Rule

CHUNK = 60_000  # so small that the CPU engine stays in this thread, which flushes


def columns(call: OneOp) -> list[np.ndarray]:
    """One long array for each input: every value of 16-bit types, special points and random bits of the others."""
    kind = dtypes.get(call.dtype)
    if len(call.ports) == 1 and kind.is_float:
        if kind.itemsize == 2:
            return [points.every_16_bit_value(kind.numpy)]
        if call.dtype == "f32":
            return [points.f32_line(call.record, call.attrs)]
        return [points.f64_line(call.record, call.attrs, 2000)]
    return points.grid(call.record, call.ports, call.dtype, count=100_000)


def subnormal(array: np.ndarray) -> np.ndarray:
    """True where a GPU has zeros. The smallest normal number is included: values that round up to it may be flushed."""
    if array.dtype not in (np.float32, dtypes.get("bf16").numpy):
        return np.zeros(array.shape, bool)
    return np.abs(array.astype(np.float64)) <= 2.0**-126


def flushed(array: np.ndarray) -> np.ndarray:
    """The array with zeros for subnormals: where values are only moved, as by Maximum, only one side may flush them."""
    return np.where(subnormal(array), np.copysign(np.zeros_like(array), array), array)


def in_this_thread(f: Any, given: list[np.ndarray]) -> np.ndarray:
    """The CPU's results, in pieces so small that only this thread, which flushes, computes."""
    starts = range(0, len(given[0]), CHUNK)
    return np.concatenate([f({f"x{i}": c[s : s + CHUNK] for i, c in enumerate(given)}) for s in starts])


@pytest.mark.parametrize("record", POINTWISE, ids=lambda r: r.kind)
def test_every_op_equals_the_cpu(any_memory: Any, flush: Any, record: OpDef) -> None:
    for call in calls(record):
        if record.channel_inputs or record.index_of or record.by_position:
            continue  # tested below: only positions or layouts differ, not arithmetic
        graph = call.graph([(None,)] * len(call.ports))
        if call.dtype in measure.NARROW and approximate.is_changed(approximate_cases.loop_of(graph)):
            continue  # compared with the truth below
        given = columns(call)
        shapes: list[tuple[int | None, ...]] = [(None,)] * len(given)
        on_cpu, on_gpu = og.compile(call.graph(shapes)), og.compile(call.graph(shapes), device="cuda")
        got = any_memory.get(on_gpu({f"x{i}": any_memory.put(c) for i, c in enumerate(given)}))
        with flush(call.dtype), np.errstate(all="ignore"):
            expected = in_this_thread(on_cpu, given)
            # A CPU does not flush subnormal arguments of library functions: its remainder by 1e-45 is a number.
            of_zeros = in_this_thread(on_cpu, [flushed(c) for c in given])
        has_subnormal = np.any([subnormal(c) for c in given], axis=0)
        different = [differing(flushed(got), flushed(e)) for e in (expected, of_zeros)]
        wrong = np.flatnonzero(different[0] & (different[1] | ~has_subnormal))
        shown = [([c[i] for c in given], got[i], expected[i]) for i in wrong[:5]]
        assert wrong.size == 0, f"{call}: {wrong.size} of {got.size} differ, (arguments, GPU, CPU): {shown}"


#: Ops that depend on an element's position, or on an operand's layout.
PLACED = [r for r in POINTWISE if r.index_of or r.channel_inputs or r.by_position]


@pytest.mark.parametrize("record", PLACED, ids=lambda r: r.kind)
def test_channel_and_position_ops_equal_the_cpu(any_memory: Any, record: OpDef) -> None:
    from opgraph.ops import samples

    for call in calls(record):
        shapes = call.shapes((33, 65))
        given = samples.arrays(record, call.ports, call.dtype, shapes)
        feeds = {f"x{i}": a for i, a in enumerate(given)}
        graph = call.graph(shapes)
        got = og.compile(graph, device="cuda")({k: any_memory.put(a) for k, a in feeds.items()})
        assert not differing(any_memory.get(got), og.compile(graph)(feeds)).any(), str(call)


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
@pytest.mark.parametrize("record", [r for r in POINTWISE if len(r.inputs) == 1], ids=lambda r: r.kind)
def test_unary_ops_are_as_accurate_as_on_the_cpu(any_memory: Any, record: OpDef, dtype: str) -> None:
    from opgraph.ops import samples

    if dtype not in samples.dtypes_of(record) or record.is_cast or record.index_of:
        pytest.skip(f"not of {dtype} to {dtype}")
    for call in calls(record, dtype):
        (given,) = samples.arrays(record, call.ports, dtype, [(30_000,)])
        graph = call.graph([(None,)])
        try:
            truth = og.evaluate(graph, x0=given)
        except Unimplemented as error:
            pytest.skip(str(error))
        if dtypes.of_array(truth.dtype, where="truth").category != "float":
            continue
        got = any_memory.get(og.compile(graph, device="cuda")(x0=any_memory.put(given)))
        peer = og.compile(graph)(x0=given)
        smallest = {"f32": 1.2e-38, "bf16": 1.2e-38}.get(dtype, 0.0)
        kept = (np.abs(truth) > smallest) | (truth == 0)
        worst, allowed = (errors(x[kept], truth[kept]).max(initial=0) for x in (got, peer))
        bound = max(allowed, measure.BOUNDS[dtype]) if dtype in measure.NARROW else allowed
        assert worst <= bound, f"{call}: {worst} ulp on the GPU, {allowed} on the CPU"


APPROXIMATE = approximate_cases.cases()


@pytest.mark.parametrize("index", range(len(APPROXIMATE)), ids=[f"{c.label} {c.dtype}" for c, _ in APPROXIMATE])
def test_approximate_functions_are_within_their_bound_over_all_values(any_memory: Any, index: int) -> None:
    """The CPU tests this with simulated errors within the PTX ISA's bounds; here the instructions themselves run."""
    case = APPROXIMATE[index][0]
    columns = approximate_cases.columns_of(case)
    graph = case.graph()
    feeds = case.feeds(columns)
    f = og.compile(graph, device="cuda")
    got = any_memory.get(f({name: any_memory.put(a) for name, a in feeds.items()})).ravel()
    with np.errstate(all="ignore"):
        truth = og.evaluate(graph, feeds).ravel()
        found = errors(got, truth, 0.0, measure.condition(case, columns))
    found = np.where(approximate_cases.judged(case.dtype, columns, truth), found, 0.0)
    at = int(np.argmax(found))
    assert found[at] <= measure.BOUNDS[case.dtype], ([c[at] for c in columns], got[at], truth[at], found[at])


@pytest.mark.parametrize("dtype", measure.NARROW)
def test_positive_base_power_equals_general_power(any_memory: Any, dtype: str) -> None:
    """lg2(1) is 0 and ex2(0) is 1, which the form without a sign relies on at 1."""
    (chosen, plain), (x, b, d), base = approximate_cases.positive_powers(dtype)
    got, want = (
        og.compile(og.parse(text), device="cuda")({k: any_memory.put(v) for k, v in feeds.items()})
        for text, feeds in ((chosen, {"x": x, "b": b, "d": d}), (plain, {"p": base, "b": b, "d": d}))
    )
    for name in want:
        assert not differing(any_memory.get(got[name]), any_memory.get(want[name])).any(), name


@pytest.mark.parametrize("rule", RULES, ids=[f"{i}-{r.name}" for i, r in enumerate(RULES)])
def test_every_rule_equals_the_cpu(any_memory: Any, flush: Any, rule: Rule) -> None:
    graph = og.parse(rule.takes)
    rng = np.random.default_rng(0)
    feeds = {str(t.name): rng.normal(0, 2, t.shape).astype(dtypes.get(t.dtype).numpy) for t in graph.inputs}
    f = og.compile(graph, device="cuda")
    got = any_memory.get(f({name: any_memory.put(a) for name, a in feeds.items()}))
    with flush("f32"):
        assert agree(got, og.compile(graph)(feeds))


def test_f32_subnormals_are_flushed_to_zero(any_memory: Any) -> None:
    g = og.Graph()
    x = g.input("x", dtype="f32", shape=(None,))
    g.output(g.add_op("Multiply", x, 2.0))  # a factor of 1 would need no instruction
    f = og.compile(g, device="cuda")
    given = np.array([1e-40, -1e-40, 1.2e-38, 2e-38], np.float32)
    got = any_memory.get(f(x=any_memory.put(given)))
    np.testing.assert_array_equal(got, np.array([0.0, -0.0, 2.4e-38, 4e-38], np.float32))
    assert np.signbit(got[1])


INVERSES = """
extern "C" __global__ void inverses(float* y, float* q, const float* a) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const float b = og::from_bits(0x3f800000u + i);
  y[i] = og::inverse(b);
  q[i] = og::quotient(a[i], b);
}
"""


def test_unguarded_inverses_and_quotients_are_correctly_rounded(cupy: Any) -> None:
    """Checks all mantissas. One result that the PTX ISA allows would be wrong: see tests/cuda/test_exact.py."""
    kernel = cupy.RawKernel(spliced("math/exact.h") + INVERSES, "inverses", options=("-std=c++17", "-fmad=false"))
    b = (np.arange(1 << 23, dtype=np.uint32) + 0x3F800000).view(np.float32)
    middle = 1 + (np.random.default_rng(0).integers(0, 1 << 23, b.size) + 0.5) * 2.0**-23
    a = (middle * b).astype(np.float32)  # all are next to the middle between two floats
    y, q = cupy.empty(b.size, "f4"), cupy.empty(b.size, "f4")
    kernel((b.size // 256,), (256,), (y, q, cupy.asarray(a)))
    np.testing.assert_array_equal(cupy.asnumpy(y), np.float32(1) / b)
    np.testing.assert_array_equal(cupy.asnumpy(q), a / b)
