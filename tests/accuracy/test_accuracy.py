"""Errors of results against the truth: every op in every dtype, units, casts, integers, and sequences of ops.

The bounds are those of specs/accuracy.md; `python tests/accuracy/table.py` writes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from expressions import COMPOSED, peers

pytest.importorskip("mpmath")
pytest.importorskip("scipy")

import expressions
import measure
import points
import real
import spelled
import table
from hypothesis import HealthCheck, given, settings
from ulp import assert_as_accurate_as, errors, spacing

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.opdef import OpDef, all_ops
from opgraph.loops.interpret import interpret
from opgraph.loops.lower import lower
from opgraph.ops import samples
from opgraph.ops.conversion import cast
from opgraph.partition.rules import Rule
from opgraph.runtime import cpu_compiler, threads

pytestmark = pytest.mark.skipif(not cpu_compiler.is_available(), reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def _no_warnings_of_floats() -> Iterator[None]:
    with np.errstate(all="ignore"):  # signalling NaN and overflow are valid inputs and results
        yield


# -- the yardstick ----------------------------------------------------------------------------------------------------


def test_ulp_is_the_distance_to_the_next_number() -> None:
    for name in measure.FLOATS:
        dtype = dtypes.get(name).numpy
        values = points.specials(name)
        values = values[np.isfinite(values.astype(np.float64)) & ~np.signbit(values)]
        values = values[values != ml_dtypes.finfo(dtype).max]
        following = points.of_bits(points.bits_of(values) + 1, dtype).astype(np.float64)
        np.testing.assert_array_equal(spacing(values.astype(np.float64), dtype), following - values.astype(np.float64))


@pytest.mark.parametrize(
    ("got", "truth", "expected"),
    [
        (1.0, 1.0, 0.0),
        (1.0, 1.0 + 2.0**-12, 0.25),
        (-2.0, 2.0, 2048.0),
        (np.nan, np.nan, 0.0),
        (np.nan, 1.0, np.inf),
        (1.0, np.nan, np.inf),
        (np.inf, np.inf, 0.0),
        (-np.inf, np.inf, np.inf),
        (65504.0, np.inf, np.inf),
        (np.inf, 65520.0, 0.5),
        (np.inf, 1e9, 0.0),
        (65504.0, 65536.0, 1.0),
        (-0.0, 0.0, np.inf),
        (0.0, -1e-30, np.inf),
        (-0.0, -1e-30, 1e-30 * 2**24),
        (2.0**-24, 0.0, np.inf),
        (2.0**-24, 2.0**-24, 0.0),
    ],
)
def test_error_in_ulp_of_pinned_values(got: float, truth: float, expected: float) -> None:
    assert errors(np.array([got], np.float16), np.array([truth])) == pytest.approx(expected)


def test_slack_rule_refuses_more_than_twice_the_peers_error() -> None:
    exact = np.linspace(1, 2, 100)
    peer = (exact * (1 + 2.0**-22)).astype(np.float32)
    assert_as_accurate_as((exact * (1 - 1.9 * 2.0**-22)).astype(np.float32), peer, exact)
    with pytest.raises(AssertionError, match="worst"):
        assert_as_accurate_as((exact * (1 - 2.5 * 2.0**-22)).astype(np.float32), peer, exact)
    with pytest.raises(AssertionError, match="worst"):
        assert_as_accurate_as(np.full(100, np.nan, np.float32), peer, exact)


# -- single ops -------------------------------------------------------------------------------------------------------


@functools.cache
def page() -> dict[tuple[str, str], table.Row]:
    return {(r.label, r.dtype): r for r in table.read()}


@pytest.fixture(params=measure.measured_ops(), ids=lambda r: r.kind)
def record(request: pytest.FixtureRequest) -> OpDef:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", measure.FLOATS)
def test_op_error_is_within_the_bound_in_specs_accuracy(record: OpDef, dtype: str) -> None:
    for case in measure.cases(record, dtype):
        found = measure.measure(case)
        print(found)
        row = page().get((case.label, dtype))
        assert row is not None, f"{case.label} {dtype} is not in specs/accuracy.md: {table.REWRITE}"
        assert row.bound == case.bound, f"{case.label} {dtype}: the page has another bound: {table.REWRITE}"
        assert found.ulp <= row.bound, str(found)


@pytest.mark.parametrize("dtype,end", [("f32", 9.5), ("f64", 20)])
def test_tanh_near_1_is_rounded_once(dtype: str, end: float) -> None:
    """Backward computes 1 - y^2 from the result, where the last bit of y has a large effect."""
    import mpmath

    x = np.linspace(2, end, 3000).astype(dtypes.get(dtype).numpy)
    y = og.compile(og.parse(f"graph(x: {dtype}[n]) -> (y)\n  y = Tanh(x)").finalize())(x=x)
    last_bit = np.finfo(y.dtype).eps / 2
    with mpmath.workdps(30):
        off = [abs(mpmath.tanh(float(at)) - float(got)) / last_bit for at, got in zip(x, y, strict=True)]
    assert max(off) <= 0.6


def test_accuracy_table_rewrites_only_the_given_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = table.PAGE.read_text(encoding="utf-8")
    assert table.text(()) == right  # nothing is measured and nothing else changes
    mine = tmp_path / "accuracy.md"
    mine.write_text(
        right.replace("| Floor | f64 | 0 |", "| Floor | f64 | 7 |").replace("| Abs | f64 | 0 |", "| Abs | f64 | 7 |")
    )
    monkeypatch.setattr(table, "PAGE", mine)
    with pytest.raises(SystemExit):
        table.main(["Floors"])
    table.main(["Floor"])
    assert mine.read_text(encoding="utf-8") == right.replace("| Abs | f64 | 0 |", "| Abs | f64 | 7 |")
    mine.write_text(right.replace("| Abs | f64 | 0 |", "| Abs | f64 | 9 |"))
    with pytest.raises(SystemExit, match=r"Abs f64: 9 ulp at .*where 8 is the bound"):
        table.main(["Floor"])


def test_accuracy_page_has_no_other_rows() -> None:
    known = {(c.label, d) for r in measure.measured_ops() for d in measure.FLOATS for c in measure.cases(r, d)}
    assert page().keys() <= known, table.REWRITE
    assert all(r.ulp <= r.bound for r in page().values())


def test_float64_reference_agrees_with_mpmath(record: OpDef) -> None:
    # A reference that is off by 16 ulp of f64 changes a measured f32 error by 3e-8 ulp.
    if "f64" not in samples.dtypes_of(record):
        pytest.skip("not in f64")
    for case in measure.cases(record, "f64"):
        columns = [c[::4] for c in measure.columns_of(case)]
        reference = og.evaluate(case.graph(), case.feeds(columns)).ravel()
        found = measure.errors_in_f64(case, columns, reference, reference)
        at = int(np.argmax(found))
        assert found[at] <= 16, f"{case.label} at {[c[at] for c in columns]}: {found[at]:.3g} ulp, {reference[at]!r}"


def test_every_measured_op_has_a_real_function() -> None:
    missing = {r.kind for r in measure.measured_ops()} - real.REAL.keys()
    assert not missing, "write it in tests/accuracy/real.py"


# -- named units, spelled out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [r for _, r in spelled.spelled_rules()], ids=[n for n, _ in spelled.spelled_rules()])
def test_decomposed_unit_is_as_accurate_as_the_op(rule: Rule) -> None:
    for dtype in (*measure.NARROW, "f32"):
        graph = spelled.graph_in(rule, dtype)
        feeds = spelled.feeds_of(graph)
        truth, sound = spelled.truth_of(graph, feeds)
        found = np.where(sound, errors(og.compile(graph)(feeds), truth), 0.0)
        at = int(np.argmax(found))
        assert found[at] <= (measure.BOUNDS if rule.becomes else measure.GATED)[dtype], (
            dtype,
            found[at],
            {n: a[at] for n, a in feeds.items()},
            truth[at],
        )


# -- integers, booleans, indices --------------------------------------------------------------------------------------

WHOLE = (*dtypes.INTS, "boolean")


def whole_values(dtype: str, count: int) -> np.ndarray:
    """All values of an 8-bit or 1-bit dtype; the edges of the others, and random ones."""
    if dtype == "boolean":
        return np.array([False, True])
    info = np.iinfo(dtypes.get(dtype).numpy)
    if info.bits == 8:
        return np.arange(info.min, info.max + 1).astype(info.dtype)
    edges = [info.min, info.min + 1, info.max, info.max - 1, *range(-9, 10), 31, 32, 33, 63, 64, 65, -31, -32, -63, -64]
    edges += [s * 2**k + d for k in range(3, info.bits - 1, 4) for s in (1, -1) for d in (-1, 0, 1)]
    rng = np.random.default_rng(2)
    return np.concatenate([np.array(edges, info.dtype), rng.integers(info.min, info.max, count, info.dtype)])


def whole_columns(record: OpDef, ports: Any, dtype: str) -> list[np.ndarray]:
    axes = [whole_values(dtype if p.type in record.types else p.type, 40 if len(ports) > 1 else 1000) for p in ports]
    axes = axes if len(ports) < 3 else [a[:: max(1, len(a) // 64)] for a in axes]
    return [np.ascontiguousarray(m.ravel()) for m in np.meshgrid(*axes, indexing="ij")]


def exact_calls(record: OpDef) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for dtype in samples.dtypes_of(record):
        if dtype in WHOLE or record.outputs[0].type == "boolean":
            seen = set()
            for ports, attrs in samples.forms(record, dtype):
                text = record.cxx({p.name: p.name for p in ports}, attrs, repr)
                if text not in seen:
                    seen.add(text)
                    yield dtype, ports, attrs


EXACT = [r for r in all_ops() if r.is_pointwise and not r.is_cast and r.index_of is None and next(exact_calls(r), None)]


@pytest.mark.parametrize("record", EXACT, ids=lambda r: r.kind)
def test_integer_and_boolean_results_equal_the_reference(record: OpDef) -> None:
    for dtype, ports, attrs in exact_calls(record):
        whole = dtype in WHOLE
        columns = whole_columns(record, ports, dtype) if whole else points.grid(record, ports, dtype, 3000)
        g = og.Graph()
        ins = [g.input(f"x{i}", dtypes.of_array(c.dtype, where="test").name, (None,)) for i, c in enumerate(columns)]
        g.add_op(record.kind, *ins, name="y", **attrs)
        feeds = {f"x{i}": c for i, c in enumerate(columns)}
        got, expected = og.compile(g)(feeds), og.evaluate(g, feeds, dtype=None)
        wrong = np.flatnonzero(got != expected)
        assert got.dtype == expected.dtype
        assert not len(wrong), (dtype, attrs, [c[wrong[0]] for c in columns], got[wrong[0]], expected[wrong[0]])


def python_whole(record: OpDef) -> Any:
    """Integer arithmetic in Python, modulo 2^8, as the truth of s8 and u8 results."""
    quotient = lambda a, b: 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # noqa: E731
    return {
        "Add": lambda a, b: a + b,
        "Subtract": lambda a, b: a - b,
        "Multiply": lambda a, b: a * b,
        "Divide": quotient,
        "Mod": lambda a, b: a % b if b else 0,
        "SquaredDifference": lambda a, b: ((a - b) & 255) ** 2,
        "BitwiseAnd": lambda a, b: a & b,
        "BitwiseOr": lambda a, b: a | b,
        "BitwiseXor": lambda a, b: a ^ b,
        "Maximum": max,
        "Minimum": min,
        "Pow": lambda a, b: a**b if b >= 0 else {1: 1, -1: (-1) ** (b & 1)}.get(a, 0),
        "BitShift": lambda a, b: a << b if 0 <= b < 8 else 0,
    }.get(record.kind)


@pytest.mark.parametrize("record", [r for r in EXACT if python_whole(r)], ids=lambda r: r.kind)
def test_integer_reference_is_arithmetic_modulo_256(record: OpDef) -> None:
    formula = python_whole(record)
    for dtype in ("s8", "u8"):
        ports, attrs = next(
            f for f in reversed(samples.forms(record, dtype)) if len(f[0]) == 2 and f[1].get("fmod", 0) == 0
            and f[1].get("direction", "LEFT") == "LEFT"
        )  # fmt: skip
        a, b = whole_columns(record, ports, dtype)
        assert record.reference is not None
        expected = np.array([formula(int(x), int(y)) & 255 for x, y in zip(a, b)], np.uint8).view(a.dtype)
        np.testing.assert_array_equal(record.reference(a, b, **attrs), expected)


@pytest.mark.parametrize("record", [r for r in all_ops() if r.index_of], ids=lambda r: r.kind)
def test_gen_index_is_exact(record: OpDef) -> None:
    for dtype in samples.dtypes_of(record):
        for axis in (0, 1, 2, -1):
            g = og.Graph()
            x = g.input("x", dtype, (None, None, None))
            g.add_op(record.kind, x, name="y", **{str(record.index_of): axis})
            array = np.zeros((3, 70, 5), dtypes.get(dtype).numpy)
            np.testing.assert_array_equal(og.compile(g)(x=array), og.evaluate(g, x=array))


# -- casts ------------------------------------------------------------------------------------------------------------


def cast_values(dtype: str) -> np.ndarray:
    """Every value of a narrow dtype; for the others the edges of all dtypes, ties, and random ones."""
    if dtype in WHOLE:
        return whole_values(dtype, 20_000)
    target = dtypes.get(dtype).numpy
    if dtype in measure.NARROW:
        return points.every_16_bit_value(target)
    rng = np.random.default_rng(3)
    edges = [s * (2.0**k + d) for k in range(65) for d in (-1, -0.5, 0, 0.5, 1) for s in (1, -1)]
    for narrow in measure.NARROW:  # ties between neighbours, and values next to them
        values = points.every_16_bit_value(dtypes.get(narrow).numpy).astype(np.float64)
        ordered = np.unique(values[np.isfinite(values)])
        edges += list((ordered[1:] / 2 + ordered[:-1] / 2)[:: 7 if dtype == "f64" else 11])
    with np.errstate(over="ignore"):
        near = points.neighbourhoods(np.array(edges).astype(target), 1)
        mixed = (rng.normal(size=20_000) * 2.0 ** rng.integers(-30, 70, 20_000)).astype(target)
    random = points.of_bits(rng.integers(0, 2 ** (8 * target.itemsize), 20_000, dtype=np.uint64), target)
    return np.concatenate([near, mixed, random, points.specials(dtype)])


def nearest(values: np.ndarray, target: np.dtype[Any]) -> np.ndarray:
    """|float64| to a narrow float, by binary search among all of its values; ties to the even bit pattern. No NaN."""
    order = points.every_16_bit_value(target)
    wide = order.astype(np.float64)
    keep = np.isfinite(wide) & ~np.signbit(wide)
    grid, bits = wide[keep], points.bits_of(order)[keep].astype(np.int64)  # ascending
    limit = np.ldexp(1.0, ml_dtypes.finfo(target).maxexp)
    grid, bits = np.append(grid, limit), np.append(bits, bits[-1] + 1)  # the next pattern is infinity
    size = np.minimum(np.abs(values), limit)
    above = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    down, up = size - grid[above - 1], grid[above] - size  # exact: both are within a factor of two, or subnormal
    up_wins = (up < down) | ((up == down) & (bits[above] % 2 == 0))
    return points.of_bits(np.where(up_wins, bits[above], bits[above - 1]), target)


@pytest.mark.parametrize("source", dtypes.ARITHMETIC)
def test_casts_equal_the_reference(source: str) -> None:
    values = cast_values(source)
    for target in dtypes.ARITHMETIC:
        g = og.Graph()
        g.add_op("TypeCast", g.input("x", source, (None,)), name="y", dtype=target)
        got, expected = og.compile(g)(x=values), cast(values, target)
        assert got.dtype == expected.dtype
        both_nan = (got != got) & (expected != expected)
        wrong = np.flatnonzero((got != expected) & ~both_nan)
        assert not len(wrong), (source, target, values[wrong[0]], got[wrong[0]], expected[wrong[0]])
        if dtypes.get(target).is_float:
            np.testing.assert_array_equal(np.signbit(got[~both_nan]), np.signbit(expected[~both_nan]))


@pytest.mark.parametrize("target", measure.NARROW)
@pytest.mark.parametrize("source", ["f64", "f32"])
def test_a_cast_to_a_narrow_float_rounds_once(source: str, target: str) -> None:
    values = cast_values(source)
    values = values[~np.isnan(values)]
    got = np.abs(cast(values, target))
    np.testing.assert_array_equal(points.bits_of(got), points.bits_of(nearest(values.astype(np.float64), got.dtype)))


def python_cast(value: float, low: int, high: int) -> int:
    return 0 if np.isnan(value) else low if value <= low else high if value >= high else int(value)


@pytest.mark.parametrize("target", dtypes.INTS)
def test_a_cast_to_an_integer_truncates_and_saturates(target: str) -> None:
    info = np.iinfo(dtypes.get(target).numpy)
    values = cast_values("f64")
    expected = [python_cast(float(v), info.min, info.max) for v in values]
    assert cast(values, target).tolist() == expected


# -- sequences of ops -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("text", COMPOSED.values(), ids=COMPOSED.keys())
def test_fused_ops_are_as_accurate_as_numpy(text: str, dtype: str) -> None:
    from opgraph.partition.examples import graph_of

    rng = np.random.default_rng(11)
    feeds = {n: rng.uniform(-4, 4, 50_000).astype(dtypes.get(dtype).numpy) for n in "abc"}
    graph = og.parse(graph_of(text, dtype=dtype, shape="[n]")).finalize()
    feeds = {t.name: feeds[t.name] for t in graph.inputs}
    judge(graph, feeds)


def judge(graph: og.Graph, feeds: dict[str, np.ndarray]) -> None:
    """Checks the slack rule: the kernel against NumPy, and against the interpreted loop."""
    exact, peer = np.asarray(og.evaluate(graph, feeds)), peers(graph, feeds)
    if not dtypes.of_array(peer.dtype, where="test").is_float:
        return
    name = graph.outputs[0].dtype
    floor = measure.BOUNDS[name]
    f = og.compile(graph)
    got = f(feeds)
    assert_as_accurate_as(got, peer, exact, floor=floor, label=f"{name} against NumPy\n{graph}\n")
    each = og.compile(graph, rounding="each")(feeds)
    assert_as_accurate_as(each, peer, exact, floor=floor, label=f"{name}, rounded each, against NumPy\n{graph}\n")
    if len(f.partitions) == 1:
        lowered = lower(f.partitions[0])
        arrays = [None if t is None else t.data if t.is_constant else feeds[t.name] for t in lowered.loads]
        (wanted,) = interpret(lowered.loop, arrays)
        assert wanted.dtype == got.dtype
        assert_as_accurate_as(got, wanted, exact, floor=floor, label=f"{name} against its loop\n{graph}\n")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_random_fused_ops_are_as_accurate_as_numpy(dtype: str) -> None:
    @settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(expressions.expressions(dtype))
    def run(builder: expressions.Builder) -> None:
        graph = builder.graph.finalize()
        used = {t.name for t in graph.inputs}
        judge_last(graph, {n: a for n, a in builder.feeds.items() if n in used}, builder.values[-1].id)

    run()


def judge_last(graph: og.Graph, feeds: dict[str, np.ndarray], output: int) -> None:
    """As `judge`, for the output with an id, without the other values."""
    g = og.Graph()
    made: dict[int, Any] = {t.id: g.input(str(t.name), t.dtype, t.dims) for t in graph.inputs}
    needed = {output}
    kept = []
    for op in reversed(graph.ops):
        if op.outputs and op.outputs[0].id in needed:
            kept.append(op)
            needed |= {t.id for t in op.inputs}
    for op in reversed(kept):
        args = [made[t.id] for t in op.inputs]
        made[op.outputs[0].id] = g.add_op(op.kind, *args, dtype=op.outputs[0].dtype, **op.attrs)
    if output in {t.id for t in g.inputs} or not kept:
        return
    judge(g.finalize(), feeds)


def test_random_expressions_contain_every_kind_of_op() -> None:
    kinds: set[str] = set()

    @settings(max_examples=800, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(expressions.expressions("f32"))
    def collect(builder: expressions.Builder) -> None:
        kinds.update(op.kind for op in builder.graph.ops)

    collect()
    missing = {r.kind for r in expressions.usable_ops()} - kinds
    assert not missing


# -- the same bits ----------------------------------------------------------------------------------------------------

CHUNK = 8


def chunks() -> list[tuple[str, list[measure.Case]]]:
    """The first form of every op in f32, of some in bf16, a few per graph: kernels take time to compile."""
    found = []
    for dtype, step in (("f32", 1), ("bf16", 5)):
        cases = [next(measure.cases(r, dtype)) for r in measure.measured_ops()[::step] if not r.channel_inputs]
        cases = [c for c in cases if all(p.type in c.record.types for p in c.ports)]
        found += [(dtype, cases[i : i + CHUNK]) for i in range(0, len(cases), CHUNK)]
    return found


def sum_of(dtype: str, cases: list[measure.Case], dims: int) -> og.Graph:
    """The ops of a chunk and their sum, which connects them into one kernel."""
    g = og.Graph()
    x, y = (g.input(n, dtype, (None,) * dims) for n in "xy")
    total = None
    for i, case in enumerate(cases):
        value = g.add_op(case.record.kind, *[x, y, y][: len(case.ports)], name=f"r{i}", **case.attrs)
        g.output(value)
        total = value if total is None else g.add_op("Add", total, value)
    return g


def same_bits(a: Any, b: Any) -> None:
    """Compares results by name, or a single one."""
    a, b = ({"y": r} if isinstance(r, np.ndarray) else r for r in (a, b))
    assert a.keys() == b.keys()
    for name in a:
        one, two = (np.ascontiguousarray(r[name]) for r in (a, b))
        # The sign and payload of NaN are unspecified.
        both_nan = (one != one) & (two != two)
        differ = (points.bits_of(one) != points.bits_of(two)) & ~both_nan
        assert not differ.any(), (name, np.argwhere(differ)[0])


@pytest.mark.parametrize(("dtype", "cases"), chunks(), ids=lambda v: v if isinstance(v, str) else v[0].record.kind)
def test_bits_do_not_depend_on_layout_and_threads(
    dtype: str, cases: list[measure.Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(13)
    rows, columns = 37, 4001
    target = dtypes.get(dtype).numpy
    double = points.of_bits(rng.integers(0, 2 ** (8 * target.itemsize), (rows, 2 * columns)), target)
    double[:, ::3] = rng.normal(0, 3, double[:, ::3].shape).astype(target)
    strided = double[:, ::2]
    x = np.ascontiguousarray(strided)
    y = np.ascontiguousarray(double[:, 1::2])
    f = og.compile(sum_of(dtype, cases, 2))
    once = f(x=x, y=y)
    same_bits(once, f(x=x, y=y))
    assert x.size >= threads.SINGLE_THREADED
    with monkeypatch.context() as patch:
        patch.setattr(threads, "team", lambda size: (1, None))
        same_bits(once, f(x=x, y=y))
    same_bits(once, f(x=strided, y=double[:, 1::2]))
    column = f(x=np.ascontiguousarray(np.broadcast_to(x[:, :1], x.shape)), y=y)
    same_bits(column, f(x=np.broadcast_to(x[:, :1], x.shape), y=y))
