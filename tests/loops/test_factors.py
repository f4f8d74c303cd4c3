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
def test_a_factor_of_the_row_comes_after_the_sum(product: tuple[str, ...], then: tuple[str, ...]) -> None:
    """The product, which is no longer read, is removed."""
    assert changed(*product, "t3: f32 = ReduceSum(t2)", "store f32 t3 per row") == [*BEFORE, *then]


def test_several_factors_come_after_it_in_turn_and_the_others_are_multiplied_before() -> None:
    found = changed(
        "t2: f32 = Multiply(x1, t1)",
        "t3: f32 = Divide(t2, t0)",
        "t4: f32 = Multiply(x0, t3)",
        "t5: f32 = Multiply(t4, x2)",
        "t6: f32 = ReduceMean(t5)",
        "store f32 t6 per row",
    )
    sums = [line for line in found if "ReduceMean" in line]
    (product,) = [line for line in found if "Multiply(x" in line]
    assert product.endswith(("Multiply(x0, x1)", "Multiply(x1, x0)"))
    assert len(sums) == 1 and sums[0].endswith(f"ReduceMean({product[:2]})")
    applied = found[found.index(sums[0]) + 1 :]
    assert sorted(line.partition("= ")[2].partition("(")[0] + line[-4:] for line in applied) == [
        "Divide t0)", "Multiply t1)", "Multiply x2)",
    ]  # fmt: skip
    assert applied[-1].startswith("t6: f32 =")


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
def test_what_would_be_another_number_or_saves_nothing_stays(name: str) -> None:
    lines = LEFT[name]
    last = lines[-1].partition(":")[0]
    assert changed(*lines, f"store f32 {last} per row") == [*BEFORE[: 2 if "t1" in "".join(lines) else 0], *lines]


@pytest.mark.parametrize(("x", "value"), [([], 0.0), ([np.inf, -1.0], np.nan)], ids=("no elements", "infinite"))
def test_a_largest_element_stays_in_the_sum(x: list[float], value: float) -> None:
    g = og.Graph()
    given = g.input("x", "f32", (len(x),))
    largest = g.add_op("ReduceMax", given, axes=[0], keep_dims=True)
    g.set_outputs([g.add_op("ReduceSum", g.add_op("Multiply", given, largest), axes=[0])])
    g.finalize()
    with np.errstate(invalid="ignore"):
        np.testing.assert_equal(og.compile(g)(x=np.array(x, np.float32)), np.float32(value))
