"""Functions by table on the CPU (math/tables.h), a GPU's forms instead of them, and the shorter forms of 16 bits."""

from __future__ import annotations

import re

import measure
import numpy as np
import pytest
from measure import Case
from schedules import in_order
from ulp import errors

import opgraph as og
from opgraph.codegen.kernel import host_source
from opgraph.codegen.sources import kernel_folder, reduced_functions
from opgraph.loops.layout import Variant
from opgraph.loops.lower import lower
from opgraph.runtime import cpu_compiler

needs_compiler = pytest.mark.skipif(not cpu_compiler.is_available(), reason="there is no C++ compiler")

#: The ops that use tables in f32, each with the arguments at the boundaries of its intervals.
_BINADES = np.array([1.0, 2.0, 4.0, 8.0])
_EIGHTHS = (_BINADES[:, None] * (1 + np.arange(8) / 8)).ravel() - 1
_QUARTERS = ((_BINADES[:, None] * (1 + np.arange(4) / 4)).ravel() - 1) * 4 / 3
_WIDTH = 1 / float.fromhex("0x1.6357fep-1")
_BY_SQUARE = np.append(np.sqrt(1.625**2 + (np.arange(31) + 0.5) * _WIDTH) - 1.625, 5.3)  # t (t + 3.25); the table's end
EDGES = {"GELU": _BY_SQUARE, "GELUBackward": _EIGHTHS, "MishBackward": _QUARTERS}
#: The arguments with the largest errors of the forms without a table, among all floats.
FARTHEST = {"GELU": [-0.0158, -1.3274, -3.0224], "GELUBackward": [-0.3246, -0.3362, -1.2281]}
FARTHEST |= {"MishBackward": [-0.31, -0.6, -1.966, 0.6158]}


def tabled(kind: str) -> Case:
    """The form of an op that uses a table: GELU by erf."""
    (case,) = [
        c
        for record in measure.measured_ops()
        if record.kind == kind
        for c in measure.cases(record, "f32")
        if c.attrs.get("mode") != "gelu_tanh"
    ]
    return case


@needs_compiler
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("flag", ["-DOG_NO_TABLES", "-mno-avx512f"], ids=["a GPU's", "without AVX-512"])
@pytest.mark.parametrize("kind", EDGES)
def test_function_without_its_table_is_as_accurate(
    kind: str, flag: str, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = tabled(kind)
    columns = [c[::7] for c in measure.columns_of(case)]
    by_table = np.asarray(og.compile(case.graph())(case.feeds(columns)))
    monkeypatch.setattr(cpu_compiler, "FLAGS", (*cpu_compiler.FLAGS, flag))
    found = measure.measure(case)
    assert found.ulp <= case.bound, str(found)
    plain = og.compile(case.graph())(case.feeds(columns))
    assert not cpu_compiler.has_lanes() or not np.array_equal(plain, by_table, equal_nan=True), (
        "the flag changes nothing"
    )


@needs_compiler
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bit_functions_without_avx_512_are_as_accurate(
    dtype: str, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_compiler, "FLAGS", (*cpu_compiler.FLAGS, "-mno-avx512f"))
    kinds = {"HardSwish", *(k for kind in ("Sigmoid", "Swish", "GELU", "Mish") for k in (kind, f"{kind}Backward"))}
    records = [record for record in measure.measured_ops() if record.kind in kinds]
    assert {r.kind for r in records} == kinds
    for case in (case for record in records for case in measure.cases(record, dtype)):
        found = measure.measure(case)
        assert found.ulp <= case.bound, str(found)


@needs_compiler
@pytest.mark.parametrize("kind", EDGES)
def test_table_function_is_accurate_where_intervals_meet(kind: str) -> None:
    edges = EDGES[kind].astype(np.float32)
    edges = edges[edges > 0]
    near = (edges.view(np.int32)[:, None] + np.arange(-400, 401)).ravel().view(np.float32)
    within_the_bound(kind, np.concatenate([near, -near]))


@needs_compiler
@pytest.mark.parametrize("kind", FARTHEST)
def test_function_without_its_table_is_accurate_at_its_worst_points(
    kind: str, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_compiler, "FLAGS", (*cpu_compiler.FLAGS, "-DOG_NO_TABLES"))
    farthest = np.array(FARTHEST[kind], np.float32)
    within_the_bound(kind, (farthest.view(np.int32)[:, None] + np.arange(-60_000, 60_001)).ravel().view(np.float32))


def within_the_bound(kind: str, x: np.ndarray) -> None:
    case = tabled(kind)
    columns = [x, *[np.ones_like(x) for _ in case.ports[1:]]]
    got = np.asarray(og.compile(case.graph())(case.feeds(columns)))
    truth = np.asarray(og.evaluate(case.graph(), case.feeds(columns)))
    found = errors(got, truth, 0.0, measure.condition(case, columns), measure.factor_of(case, columns))
    at = int(np.argmax(found))
    assert found[at] <= case.bound, (x[at], got[at], truth[at], found[at])


def number(text: str) -> float:
    return float.fromhex(text) if "x" in text else float(text)


def test_table_points_lie_in_the_intervals_of_their_indices() -> None:
    """An index consists of five bits of a float, see interval_of in kernels/math/tables.h."""
    text = (kernel_folder() / "math/tables.h").read_text(encoding="utf-8")
    found = re.findall(r"static const float (\w+)\[(\d+)\]\[32\] = \{(.*?)\n\};", text, re.DOTALL)
    assert [name for name, _, _ in found] == ["lower_tail", "tail_slope", "mish_slope"]
    for name, rows, body in found:
        lines = re.findall(r"\{([^{}]*)\}", body)
        table = np.array([[number(n.strip().rstrip("f")) for n in line.split(",")] for line in lines])
        assert table.shape == (int(rows), 32), name
        if name == "mish_slope":
            index = (np.minimum(table[0] * 0.75 + 1, 15.5).astype(np.float32).view(np.uint32) >> 21) & 15
            assert (index == np.arange(32) & 15).all(), name
            # 1 - t, 1 + x of the negative ones, and 1: the last intervals have no end.
            assert table[:, [11, 27]].T.tolist() == [[18, *[0] * 6, 1], [18, *[0] * 5, -1, -17]]
        elif name == "lower_tail":
            index = np.rint(table[0] * (table[0] + 3.25) / _WIDTH)
            assert (index == np.arange(32)).all(), name
        else:
            index = ((table[0] + 1).astype(np.float32).view(np.uint32) >> 20) & 31
            assert (index == np.arange(32)).all(), name


@needs_compiler
@pytest.mark.parametrize("flags", [(), ("-DOG_NO_TABLES",)], ids=["by table", "without one, as on a GPU"])
def test_powers_up_to_f32_limits_are_accurate(
    flags: tuple[str, ...], no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power is e^p, |p| up to 88, and has |p| times the error of the logarithm. It is checked where intervals meet,
    around one, and anywhere in an octave."""
    monkeypatch.setattr(cpu_compiler, "FLAGS", (*cpu_compiler.FLAGS, *flags))
    edges = np.concatenate([1 + np.arange(33) / 32, [1.4375, np.sqrt(2)]]).astype(np.float32)
    near = (edges.view(np.int32)[:, None] + np.arange(-400, 401)).ravel().view(np.float32)
    rng = np.random.default_rng(0)
    within = rng.uniform(0.7, 1.45, 500_000).astype(np.float32)
    x = np.concatenate([within, *(near * np.float32(2.0**k) for k in (0, -1, 3, 60, -126, -140))])
    with np.errstate(all="ignore"):
        a = (rng.uniform(-86, 86, x.size) / np.log(x.astype(np.float64))).astype(np.float32)  # the result is finite
    a[~np.isfinite(a)] = 1
    graph = og.parse("graph(x: f32[n], a: f32[n]) -> (y)\n  y = Pow(x, a)")
    got, truth = np.asarray(og.compile(graph)(x=x, a=a)), np.asarray(og.evaluate(graph, x=x, a=a))
    ulp = np.abs(got - truth) / np.spacing(np.abs(truth).astype(np.float32))
    assert ulp.max() <= 3, (x[ulp.argmax()], a[ulp.argmax()], ulp.max())


def test_logarithm_table_has_the_reciprocals_of_its_intervals() -> None:
    text = (kernel_folder() / "math/power.h").read_text(encoding="utf-8")
    (body,) = re.findall(r"static const float logarithms\[3\]\[intervals\] = \{(.*?)\n?\};", text, re.DOTALL)
    c, high, low = (
        [number(n.strip().rstrip("f")) for n in row.split(",")] for row in re.findall(r"\{([^{}]*)\}", body)
    )
    first, last = 1 + np.arange(32) / 32, 1 + (np.arange(32) + 1) / 32
    assert np.all(np.abs(c * first - 1) <= 2.0**-5) and np.all(np.abs(c * last - 1) <= 2.0**-5)
    assert all((64 * v).is_integer() for v in c) and all((2**16 * v).is_integer() for v in high)
    exact = -np.log(np.array(c, np.longdouble)) - np.log(np.longdouble(2)) * (first >= 1.4375)
    np.testing.assert_allclose(np.array(high, np.longdouble) + low, exact, rtol=0, atol=2.0**-41)


# -- f16 and bf16 ------------------------------------------------------------------------------------------------------


def emitted(text: str) -> list[str]:
    """The functions of og::reduced in a kernel for the CPU."""
    (partition,) = og.parse(text).get_partitions()
    loop = lower(partition).loop
    code = host_source(in_order(loop, Variant("c" * (len(loop.loads) + len(loop.stores)), True))).functor
    return re.findall(r"og::reduced::(\w+)\(", code)


@pytest.mark.parametrize(
    ("text", "functions"),
    [
        ("graph(x: bf16[n]) -> (y)\n  y = Swish(x)", ["swish"]),
        ("graph(x: f16[n]) -> (y)\n  y = HardSwish(x)", ["hard_swish"]),
        ("graph(x: f16[n]) -> (y)\n  %0 = Mish(x)\n  y = Square(%0)", ["mish"]),
        ("graph(x: f32[n]) -> (y)\n  y = Mish(x)", []),
        ("graph(x: bf16[n]) -> (y)\n  %0 = Mish(x)\n  y: f32[n] = TypeCast(%0)", []),
        ("graph(x: bf16[n]) -> (y)\n  %0 = Mish(x)\n  y = Floor(%0)", []),
        ("graph(x: bf16[n]) -> (y)\n  %0 = Sigmoid(x)\n  y = Multiply(x, %0)", ["swish"]),
        ("graph(x: bf16[n]) -> (y)\n  y = GELU(x)", []),
    ],
    ids=["Swish", "HardSwish", "Mish", "f32", "f32 is stored", "before a jump", "spelled", "no form of its own"],
)
def test_results_stored_in_16_bits_use_reduced_functions(text: str, functions: list[str]) -> None:
    assert emitted(text) == functions


def test_every_reduced_function_belongs_to_an_op() -> None:
    kinds = {"hard_swish": "HardSwish(x)", "mish": "Mish(x)", "swish": "Swish(x)"}
    kinds |= {"gelu_erf_backward": "GELUBackward(x, x)", "mish_backward": "MishBackward(x, x)"}
    kinds |= {"gelu_tanh": 'GELU(x, mode="gelu_tanh")', "swish_backward": "SwishBackward(x, x)"}
    kinds |= {"sigmoid": "Sigmoid(x)", "sigmoid_backward": "SigmoidBackward(x, x, use_dst=false)"}
    kinds |= {"gelu_tanh_backward": 'GELUBackward(x, x, mode="gelu_tanh")'}
    assert reduced_functions() == {*kinds, "swish_beside_slope"}
    for name, op in kinds.items():
        assert emitted(f"graph(x: bf16[n]) -> (y)\n  y = {op}") == [name]
