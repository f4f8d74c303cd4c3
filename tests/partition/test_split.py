"""Large fused partitions are split only where that reduces the cost."""

from __future__ import annotations

import numpy as np
import pytest
from random_rows import row_graph, sizes

import opgraph as og
from opgraph.partition.partition import Partition
from opgraph.partition.partitioner import partition
from opgraph.partition.split import BYTE_COST, MAX_COST, MAX_LOSS, MAX_SHARED_COST, STATEMENT_COST
from opgraph.partition.traits import cost_of

KINDS = ("Sigmoid", "Add", "Multiply", "Tanh", "Abs", "Sqrt")


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every kernel one loop, as a kernel of rows is."""
    monkeypatch.setattr("opgraph.partition.split.MAX_SHARED_COST", MAX_COST)


def chained(g: og.Graph, value: og.LogicalTensor, count: int) -> og.LogicalTensor:
    """`count` ops in sequence; some read the start again."""
    start = value
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        value = g.add_op(kind, value, start) if kind in ("Add", "Multiply") else g.add_op(kind, value)
    return value


def chain(count: int) -> og.Graph:
    g = og.Graph()
    chained(g, g.input("x", shape=(None,)), count)
    return g.finalize()


def cost(part: Partition) -> int:
    return sum(cost_of(op) for op in part.ops)


def test_long_chain_is_split_into_kernels_of_limited_cost(loops: None) -> None:
    g = chain(300)
    cut = partition(g)
    assert len(cut.partitions) == 3
    assert all(MAX_COST / 3 <= cost(p) <= MAX_COST for p in cut.partitions)
    assert sum(len(p.ops) for p in cut.partitions) == 300
    border = cut.partitions[0].ops[-1]
    row = next(r for r in g.explain().ops if r.id == border.id)
    assert "split: one kernel of 2550 instructions per element would compile slowly" in row.why


@pytest.mark.parametrize("count", [150, 220])
def test_pieces_are_large_enough_to_pay_for_memory_traffic(count: int, loops: None) -> None:
    parts = chain(count).get_partitions()
    assert len(parts) > 1
    for part in parts:
        assert cost(part) * MAX_LOSS >= 8 * BYTE_COST


def test_split_chain_agrees_with_the_reference(loops: None) -> None:
    g = chain(160)
    f = og.compile(g)
    assert len(f.partitions) == 2
    x = np.random.default_rng(0).random(5000, np.float32)
    for _ in range(2):
        np.testing.assert_allclose(f(x=x), og.evaluate(g, x=x), rtol=1e-4)
    assert f.memory_plan(x=x).clashes() == []


def test_statements_sharing_functions_have_a_higher_cost_limit() -> None:
    assert len(chain(1000).get_partitions()) == 1
    assert all(cost(p) <= MAX_SHARED_COST for p in chain(3000).get_partitions())
    g = og.Graph()
    value = g.input("x", shape=(None,))
    for i in range(1000):
        value = g.add_op(("Abs", "Neg")[i % 2], value)
    cheap = g.finalize().get_partitions()
    assert len(cheap) > 1 and all(cost(p) <= MAX_COST and cost(p) < STATEMENT_COST * len(p.ops) for p in cheap)


@pytest.mark.parametrize("count", [1, 60, 100])
def test_cheap_partition_is_not_split(count: int) -> None:
    assert len(chain(count).get_partitions()) == 1


def test_partition_with_many_live_values_is_not_split() -> None:
    g = og.Graph()
    x = g.input("x", shape=(None,))
    values = [g.add_op("Tanh", g.add_op("Multiply", x, float(i + 1))) for i in range(60)]
    for _ in range(2):
        values = [g.add_op("Add", v, g.add_op("Exp", values[(i * 7 + 3) % 60])) for i, v in enumerate(values)]
    total = values[0]
    for v in values[1:]:
        total = g.add_op("Multiply", total, v)
    (part,) = g.finalize().get_partitions()
    assert cost(part) > MAX_COST
    assert 60 * 8 * BYTE_COST > MAX_LOSS * MAX_COST


def test_independent_branches_are_split_apart(loops: None) -> None:
    """The ops of a piece are connected; `partition` checks it."""
    g = og.Graph()
    x, y = g.input("x", shape=("n",)), g.input("y", shape=("n",))
    for i in range(120):  # two chains, with alternating ops
        kind = KINDS[i % 6] if i % 6 not in (1, 2) else "Neg"
        x, y = g.add_op(kind, x), g.add_op(kind, y)
    g.add_op("Add", x, y)
    parts = g.finalize().get_partitions()
    most = MAX_COST + 16 * BYTE_COST / MAX_LOSS  # the remainder of two values is a separate piece only if that pays
    assert len(parts) > 2 and all(cost(p) <= most for p in parts)


def test_split_never_divides_a_unit(loops: None) -> None:
    g = og.Graph()
    value = g.input("x", shape=(None,))
    for _ in range(3):
        value = g.add_op("Abs", value)  # so that a kernel of maximum size would end inside a unit
    for _ in range(100):  # softplus: no more values are alive inside it than between two of them
        value = g.add_op("Log", g.add_op("Add", g.add_op("Exp", value), 1.0))
    parts = g.finalize().get_partitions()
    assert len(parts) > 1
    assert sum(len(p.units) for p in parts) == 100


def test_many_operands_cause_no_split() -> None:
    g = og.Graph()
    total = g.input("x0", shape=("n",))
    for i in range(1, 40):
        total = g.add_op("Add", total, g.input(f"x{i}", shape=("n",)))
    (part,) = g.finalize().get_partitions()
    assert len(part.input_ports) == 40
    f = og.compile(g)
    feeds = {f"x{i}": np.full(3, i, np.float32) for i in range(40)}
    np.testing.assert_array_equal(f(feeds), np.full(3, 780))


def test_many_outputs_cause_no_split() -> None:
    g = og.Graph()
    value = g.input("x", shape=("n",))
    for _ in range(20):
        value = g.add_op("Neg", value)
        g.output(value)
    (part,) = g.finalize().get_partitions()
    assert len(part.output_ports) == 20
    got = og.compile(g)(x=np.ones(3, np.float32))
    assert [float(v[0]) for v in got.values()] == [-1.0, 1.0] * 10


# -- rows -------------------------------------------------------------------------------------------------------------


def around_a_softmax(before: int, after: int) -> og.Graph:
    g = og.Graph()
    value = chained(g, g.input("x", shape=(None, None)), before)
    chained(g, g.add_op("SoftMax", value, axis=-1), after)
    return g.finalize()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(60, 20, [81]), (100, 100, [100, 1, 100]), (20, 90, [21, 90]), (120, 20, [120, 21])],
)
def test_long_chains_around_a_row_op_are_split_off(before: int, after: int, expected: list[int]) -> None:
    """In one kernel with the rows these ops would be compiled once for each pass over a row."""
    g = around_a_softmax(before, after)
    parts = g.get_partitions()
    assert [len(p.ops) for p in parts] == expected
    assert [bool(p.rows.axes) for p in parts] == [any(op.kind == "SoftMax" for op in p.ops) for p in parts]


def test_softmax_between_split_chains_agrees_with_the_reference() -> None:
    g = around_a_softmax(60, 60)
    f = og.compile(g)
    assert len(f.partitions) == 3
    x = np.random.default_rng(0).random((5, 70), np.float32)
    np.testing.assert_allclose(f(x=x), og.evaluate(g, x=x), rtol=1e-4)


def one_shape(part: Partition, g: og.Graph) -> bool:
    """True if all results except sums and row values have the shape of one loop."""
    makers = {t.id: op for op in part.ops for t in op.outputs}
    results = [t for t in part.output_ports if t.id not in part.rows.forms and makers[t.id].kind != "SumTo"]
    return len({t.dims for t in results}) < 2


def test_broadcast_value_read_by_several_pieces_is_a_kernel(loops: None) -> None:
    g = og.Graph()
    x, w, s = g.input("x", shape=(None, 64)), g.input("w", shape=(64,)), g.input("s", shape=())
    small, number = g.add_op("Abs", g.add_op("Multiply", w, w)), g.add_op("Exp", s)
    value = g.add_op("Add", x, number)
    for i in range(5):
        value = g.add_op("Multiply", chained(g, value, 60), small if i % 2 == 0 else number)
    parts = g.finalize().get_partitions()
    assert all(one_shape(p, g) for p in parts)
    assert sorted(len(p.ops) for p in parts)[:3] == [1, 2, 61]
    feeds = {"x": np.ones((7, 64), np.float32), "w": np.arange(64, dtype=np.float32) / 64, "s": np.float32(0.3)}
    np.testing.assert_allclose(og.compile(g)(**feeds), og.evaluate(g, **feeds), rtol=1e-4)


@pytest.mark.parametrize("most", [4, 12, 40])
def test_random_row_graphs_may_be_split_anywhere(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraph.partition.split.MAX_COST", most)
    monkeypatch.setattr("opgraph.partition.split.MAX_LOSS", 1e9)
    for seed in range(200):
        g = row_graph(seed)
        parts = partition(g).partitions  # and verified
        assert all(one_shape(p, g) for p in parts if p.kind == "fused"), seed
        if seed % 100 == most:
            extents = sizes(seed, 4)
            feeds = {
                t.name: np.random.default_rng(seed).standard_normal(
                    [d if isinstance(d, int) else extents[int(str(d)[1:])] for d in t.dims or ()]
                )
                for t in g.inputs
            }
            made, exact = og.compile(g)(feeds), og.evaluate(g, feeds)
            for name, want in exact.items() if isinstance(exact, dict) else [("", exact)]:
                np.testing.assert_allclose(made[name] if name else made, want, rtol=1e-9, atol=1e-9)
