"""Sums of products with a factor of the row: rewritten where that saves a pass, and unchanged everywhere else."""

from __future__ import annotations

import numpy as np
import pytest

import opgraph as og
from opgraph.loops.hoist_factors import without_row_factors
from opgraph.loops.text import parse_loop

#: x0 and x1 of each element, x2 of each row; t0 and t1 are numbers of a row that are computed late.
HEAD = """loop(parallel *, reduce -1)
  x0 = load f32
  x1 = load f32
  x2 = load f32 align=rows
  t0: f32 = ReduceSum(x0)  # 0
  t1: f32 = Sqrt(t0)  # 1
"""


def changed(*lines: str) -> list[str]:
    """The statements after the first two."""
    text = HEAD + "".join(f"  {line}  # {tag}\n" for tag, line in enumerate(lines[:-1], 2)) + f"  {lines[-1]}\n"
    loop = parse_loop(text)
    made = str(without_row_factors(loop)).splitlines()
    assert made[:4] == HEAD.splitlines()[:4] and made[-1] == f"  {lines[-1]}"
    return [line.strip().rpartition("  #")[0] for line in made[4:-1]]


BEFORE = ["t0: f32 = ReduceSum(x0)", "t1: f32 = Sqrt(t0)"]


@pytest.mark.parametrize(
    ("product", "then"),
    [
        (("t2: f32 = Multiply(x1, t1)",), ("t4: f32 = ReduceSum(x1)", "t3: f32 = Multiply(t4, t1)")),
        (("t2: f32 = Multiply(t1, x1)",), ("t4: f32 = ReduceSum(x1)", "t3: f32 = Multiply(t4, t1)")),
        (("t2: f32 = Divide(x1, t1)",), ("t4: f32 = ReduceSum(x1)", "t3: f32 = Divide(t4, t1)")),
    ],
    ids=("times", "the other way round", "by"),
)
def test_row_factor_is_moved_after_the_sum(product: tuple[str, ...], then: tuple[str, ...]) -> None:
    """The product, which is no longer read, is removed."""
    assert changed(*product, "t3: f32 = ReduceSum(t2)", "store f32 t3 per row") == [*BEFORE, *then]


@pytest.mark.parametrize(
    ("lines", "then"),
    [
        (
            ("t1: f32 = Square(x0)", "t2: f32 = ReduceMean(t1)", "t3: f32 = Add(t2, 0.001)", "t4: f32 = Rsqrt(t3)",
             "t5: f32 = Multiply(x0, t4)", "t6: f32 = Multiply(x1, t5)", "t7: f32 = Divide(t6, t4)"),
            ("ReduceSum({product})", "Divide({sum}, t4)", "Multiply({sum}, t4)"),
        ),
        (
            ("t1: f32 = ReduceMax(x0)", "t2: f32 = Subtract(x0, t1)", "t3: f32 = Exp(t2)", "t4: f32 = ReduceSum(t3)",
             "t5: f32 = Divide(t3, t4)", "t6: f32 = Multiply(t5, t5)"),
            ("ReduceSum({product})", "Divide({sum}, t4)", "Divide({sum}, t4)"),
        ),
    ],
    ids=("a norm", "a softmax"),
)  # fmt: skip
def test_bounded_row_factors_are_moved_after_the_sum(lines: tuple[str, ...], then: tuple[str, ...]) -> None:
    """The other two factors are multiplied before."""
    last = lines[-1].partition(":")[0]
    text = "".join(f"  {line}  # 0\n" for line in ("t0: f32 = Identity(x0)", *lines, f"t9: f32 = ReduceSum({last})"))
    loop = parse_loop(HEAD.partition("  t0")[0] + text + "  store f32 t9 per row\n")
    product, *rest = without_row_factors(loop).statements[-len(then) - 1 :]
    assert product.kind == "Multiply"
    shown = [f"{s.kind}({', '.join(map(str, s.args))})" for s in rest]
    assert shown[0] == then[0].format(product=product.result)
    before = [s.result for s in rest[:-1]]
    assert sorted(shown[1:]) == sorted(t.format(sum=name) for t, name in zip(then[1:], before, strict=True))
    assert rest[-1].result == "t9"


@pytest.mark.parametrize("value", [1e20, 1.0, 1e-25])
@pytest.mark.parametrize("other", ["p", "x"])
def test_factor_that_keeps_the_product_in_range_stays_in_the_sum(value: float, other: str) -> None:
    """The square of 1e20 is infinite in f32, and that of 1e-25 is 0."""
    graph = og.parse(
        "graph(x: f32[1,40]) -> (y)\n  s = ReduceSum(x, axes=[-1], keep_dims=true)\n  p = Divide(x, s)\n"
        f"  q = Multiply(p, {other})\n  y = ReduceSum(q, axes=[-1])"
    )
    x = np.full((1, 40), value, np.float32)
    truth = 40 * (0.025 if other == "p" else float(x[0, 0])) / 40
    np.testing.assert_allclose(og.compile(graph)(x=x), [truth], rtol=1e-6)


LEFT = {
    "the largest: a factor may be negative": ("t2: f32 = Multiply(x1, t1)", "t3: f32 = ReduceMax(t2)"),
    "a product that is rounded": ("t2: f32 = Multiply(x1, t1) rounded", "t3: f32 = ReduceSum(t2)"),
    "a sum that is rounded": ("t2: f32 = Multiply(x1, t1)", "t3: f32 = ReduceSum(t2) rounded"),
    "a product in another dtype": ("t2: f64 = Multiply(x1, t1)", "t3: f32 = ReduceSum(t2)"),
    "divided by what is of each element": ("t2: f32 = Divide(t1, x1)", "t3: f32 = ReduceSum(t2)"),
    "a sum": ("t2: f32 = Add(x1, t1)", "t3: f32 = ReduceSum(t2)"),
    "a factor that is there from the start": ("t2: f32 = Multiply(x1, x2)", "t3: f32 = ReduceSum(t2)"),
    "what has to wait in any case": (
        "t2: f32 = Subtract(x1, t1)",
        "t3: f32 = Multiply(t2, t1)",
        "t4: f32 = ReduceSum(t3)",
    ),
    "more factors than are looked at": (
        "t2: f32 = Multiply(x1, t1)",
        *[f"t{i}: f32 = Multiply(t{i - 1}, x{i % 2})" for i in range(3, 11)],
        "t11: f32 = ReduceSum(t10)",
    ),
    "more than are looked at, the row's among the first": (
        *[f"t{i}: f32 = Multiply(x{i % 2}, {'x2' if i == 2 else f't{i - 1}'})" for i in range(2, 11)],
        "t11: f32 = Multiply(t1, t10)",
        "t12: f32 = ReduceSum(t11)",
    ),
    "a product of one in another dtype": (
        "t2: f64 = Multiply(x1, t1)",
        "t3: f32 = Multiply(t2, x0)",
        "t4: f32 = ReduceSum(t3)",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_unsafe_or_useless_factor_moves_are_not_done(name: str) -> None:
    lines = LEFT[name]
    last = lines[-1].partition(":")[0]
    assert changed(*lines, f"store f32 {last} per row") == [*BEFORE[: 2 if "t1" in "".join(lines) else 0], *lines]


@pytest.mark.parametrize(("x", "value"), [([], 0.0), ([np.inf, -1.0], np.nan)], ids=("no elements", "infinite"))
def test_row_maximum_stays_in_the_sum(x: list[float], value: float) -> None:
    g = og.Graph()
    given = g.input("x", "f32", (len(x),))
    largest = g.add_op("ReduceMax", given, axes=[0], keep_dims=True)
    g.set_outputs([g.add_op("ReduceSum", g.add_op("Multiply", given, largest), axes=[0])])
    g.finalize()
    with np.errstate(invalid="ignore"):
        np.testing.assert_equal(og.compile(g)(x=np.array(x, np.float32)), np.float32(value))
