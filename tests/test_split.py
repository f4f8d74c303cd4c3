"""Large fused partitions are cut where that pays, and only there."""

from __future__ import annotations

import numpy as np
import pytest

import opgraph as og
from opgraph.partition.partition import Partition
from opgraph.partition.partitioner import partition
from opgraph.partition.split import BYTE_COST, MAX_COST, MAX_LOSS
from opgraph.partition.traits import cost_of

KINDS = ("Sigmoid", "Add", "Multiply", "Tanh", "Abs", "Sqrt")


def chained(g: og.Graph, value: og.LogicalTensor, count: int) -> og.LogicalTensor:
    """`count` ops one after the other; some read the start again."""
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


def test_a_long_chain_is_cut_into_pieces_of_which_each_compiles_quickly() -> None:
    g = chain(300)
    cut = partition(g)
    assert len(cut.partitions) == 3
    assert all(MAX_COST / 3 <= cost(p) <= MAX_COST for p in cut.partitions)
    assert sum(len(p.ops) for p in cut.partitions) == 300
    border = cut.partitions[0].ops[-1]
    row = next(r for r in g.explain().ops if r.id == border.id)
    assert "split: one kernel of 2550 instructions per element would compile slowly" in row.why


def test_the_pieces_compute_what_the_whole_does() -> None:
    g = chain(160)
    f = og.compile(g)
    assert len(f.partitions) == 2
    x = np.random.default_rng(0).random(5000, np.float32)
    for _ in range(2):
        np.testing.assert_allclose(f(x=x), og.evaluate(g, x=x), rtol=1e-4)
    assert f.memory_plan(x=x).clashes() == []


@pytest.mark.parametrize("count", [1, 60, 100])
def test_what_compiles_quickly_stays_whole(count: int) -> None:
    assert len(chain(count).get_partitions()) == 1


def test_where_too_many_values_are_alive_nothing_is_cut() -> None:
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


def test_branches_that_have_nothing_to_do_with_each_other_become_pieces_of_their_own() -> None:
    """Whatever lies in a piece hangs together; `partition` checks it."""
    g = og.Graph()
    x, y = g.input("x", shape=("n",)), g.input("y", shape=("n",))
    for i in range(120):  # two chains, op by op in turns
        kind = KINDS[i % 6] if i % 6 not in (1, 2) else "Neg"
        x, y = g.add_op(kind, x), g.add_op(kind, y)
    g.add_op("Add", x, y)
    parts = g.finalize().get_partitions()
    assert len(parts) > 2 and all(cost(p) <= MAX_COST for p in parts)


def test_a_named_unit_is_not_cut() -> None:
    g = og.Graph()
    value = g.input("x", shape=(None,))
    for _ in range(3):
        value = g.add_op("Abs", value)  # so that a kernel of the largest size would end inside a unit
    for _ in range(100):  # softplus: inside it no more values are alive than between two of them
        value = g.add_op("Log", g.add_op("Add", g.add_op("Exp", value), 1.0))
    parts = g.finalize().get_partitions()
    assert len(parts) > 1
    assert sum(len(p.units) for p in parts) == 100


def test_many_operands_are_no_reason_to_cut() -> None:
    g = og.Graph()
    total = g.input("x0", shape=("n",))
    for i in range(1, 40):
        total = g.add_op("Add", total, g.input(f"x{i}", shape=("n",)))
    (part,) = g.finalize().get_partitions()
    assert len(part.input_ports) == 40
    f = og.compile(g)
    feeds = {f"x{i}": np.full(3, i, np.float32) for i in range(40)}
    np.testing.assert_array_equal(f(feeds), np.full(3, 780))


def test_many_outputs_are_no_reason_to_cut() -> None:
    g = og.Graph()
    value = g.input("x", shape=("n",))
    for _ in range(20):
        value = g.add_op("Neg", value)
        g.output(value)
    (part,) = g.finalize().get_partitions()
    assert len(part.output_ports) == 20
    got = og.compile(g)(x=np.ones(3, np.float32))
    assert [float(v[0]) for v in got.values()] == [-1.0, 1.0] * 10
