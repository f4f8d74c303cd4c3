"""Graphs compare by content: ids, order, op names and inner names are ignored, everything else is compared."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from any_graph import graphs, renumbered
from growth import growth
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import opgraph as og
from opgraph.errors import OpGraphError
from opgraph.ir.equality import fingerprint

RELAXED = settings(
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


@RELAXED
@given(graphs(), st.integers(0, 2**32))
def test_equality_ignores_ids_and_insertion_order(g: og.Graph, seed: int) -> None:
    h = renumbered(g, seed)
    assert fingerprint(h) == fingerprint(g)
    assert h == g and g == h


def copied(g: og.Graph, change: Callable[[og.Op], og.Op | None] = lambda op: None) -> og.Graph:
    """A copy of the graph with ops changed; outputs that no longer exist are dropped."""
    h = og.Graph()
    for t in g.inputs:
        h._add_input(t)
    for op in g.ops:
        h.add_op(change(op) or op)
    h.set_outputs([t for t in g.outputs if t.id in h._tables.tensors])
    return h.finalize()


@pytest.mark.slow
@RELAXED
@given(graphs(), st.data())
def test_changed_attribute_makes_graphs_unequal(g: og.Graph, data: st.DataObject) -> None:
    floats = [(op.id, n) for op in g.ops for n, v in op.attrs.items() if isinstance(v, float)]
    assume(floats)
    op_id, name = data.draw(st.sampled_from(floats))

    def change(op: og.Op) -> og.Op | None:
        if op.id != op_id:
            return None
        changed = og.Op(op.id, op.kind, op.inputs, op.outputs, op.name)
        for key, value in op.attrs.items():
            changed.set_attr(key, (1.0 if value != 1.0 else 2.0) if key == name else value)
        return changed

    assert copied(g) == g
    assert copied(g, change) != g


@pytest.mark.slow
@RELAXED
@given(graphs(), st.data())
def test_changed_wiring_makes_graphs_unequal(g: og.Graph, data: st.DataObject) -> None:
    slots = [
        (op.id, i, other)
        for op in g.ops
        for i, t in enumerate(op.inputs)
        for other in g.inputs
        if other.id != t.id and (other.dtype, other.dims) == (t.dtype, t.dims) and (other.name or t.name)
    ]
    assume(slots)
    op_id, index, other = data.draw(st.sampled_from(slots))

    def change(op: og.Op) -> og.Op | None:
        if op.id != op_id:
            return None
        inputs = [other if i == index else t for i, t in enumerate(op.inputs)]
        changed = og.Op(op.id, op.kind, inputs, op.outputs, op.name)
        for key, value in op.attrs.items():
            changed.set_attr(key, value)
        return changed

    assert copied(g, change) != g


@RELAXED
@given(graphs(named=True), st.data())
def test_changed_input_name_makes_graphs_unequal(g: og.Graph, data: st.DataObject) -> None:
    assume(g.inputs)
    chosen = data.draw(st.sampled_from(g.inputs))
    renamed = og.Graph()
    swap = {chosen.id: chosen.with_(name="another name")}
    for op in g.ops:
        fresh = og.Op(op.id, op.kind, [swap.get(t.id, t) for t in op.inputs], op.outputs, op.name)
        for key, value in op.attrs.items():
            fresh.set_attr(key, value)
        renamed.add_op(fresh)
    renamed.set_outputs([swap.get(t.id, t) for t in g.outputs])
    assert renamed.finalize() != g


def build(lines: str) -> og.Graph:
    return og.parse(lines)


ONE = "graph(x: f32[2], y: f32[2]) -> (z)\n  %0 = Subtract(x, y)\n  z = Elu(%0, alpha=0.5)"


@pytest.mark.parametrize(
    "other",
    [
        ONE.replace("%0", "inner"),
        ONE.replace("x: f32[2], y: f32[2]", "y: f32[2], x: f32[2]"),
        ONE + "  # another op name",
    ],
    ids=("inner name", "order of inputs", "op name"),
)
def test_differences_that_equality_ignores(other: str) -> None:
    assert build(other) == build(ONE)


@pytest.mark.parametrize(
    "other",
    [
        ONE.replace("0.5", "0.25"),
        ONE.replace("Subtract(x, y)", "Subtract(y, x)"),
        ONE.replace("x", "v"),
        ONE.replace("z", "w"),
        ONE.replace("[2]", "[3]"),
        ONE.replace("[2]", "[n]"),
        ONE.replace("f32[2]", "f64[2]"),
        ONE.replace("Subtract", "Add"),
        ONE.replace("-> (z)", "-> (z, %0)"),
        ONE.replace("x: f32[2]", "x: f32[2](property=constant)"),
        ONE.replace("x: f32[2]", "x: f32[2](strides=[2])"),
        ONE + "\n  Abs(x)".replace("Abs(x)", "%1 = Abs(x)"),
    ],
    ids=("attribute", "operands", "input name", "output name", "shape", "symbol", "dtype", "kind", "outputs",
         "property", "strides", "an op more"),
)  # fmt: skip
def test_differences_that_equality_sees(other: str) -> None:
    assert build(other) != build(ONE)


def test_inner_value_types_are_compared() -> None:
    text = "graph(x: f32[2]) -> (y)\n  %0: {} = Wildcard(x)\n  y: f32[2] = TypeCast(%0)"
    kinds = ("f16[2]", "bf16[2]", "f16[?]", "f16[2](layout=any)")
    assert all((build(text.format(a)) == build(text.format(b))) == (a == b) for a in kinds for b in kinds)


def constant_graph(value: object, dtype: str = "f32") -> og.Graph:
    g = og.Graph()
    g.add_op("Add", g.input("x", dtype, (2,)), g.constant("c", value, dtype))
    return g.finalize()


def test_constants_compare_by_bits() -> None:
    negative_nan = np.array(0xFFC00001, np.uint32).view(np.float32)
    assert constant_graph(float("nan")) == constant_graph(float("nan"))
    assert constant_graph(negative_nan) == constant_graph(float("nan"))
    assert constant_graph(0.0) != constant_graph(-0.0)
    assert constant_graph(1.0) != constant_graph(1.0 + 2**-23)
    assert constant_graph([1.0, 2.0]) != constant_graph([2.0, 1.0])
    assert constant_graph(1.0) != constant_graph([1.0])


def test_a_scalar_constant_compares_as_rounded() -> None:
    assert constant_graph(1.0) == constant_graph(1.0 + 2**-30)
    g = og.Graph()
    g.add_op("Add", g.input("x", "bf16", (2,)), g.constant("c", 1.0 + 2**-20))
    assert g.finalize() == constant_graph(1.0, "bf16")


def test_attributes_compare_by_bits() -> None:
    text = "graph(x: f32[2]) -> (z)\n  z = Elu(x, alpha={})"
    assert build(text.format("nan")) == build(text.format("nan"))
    assert build(text.format("0.0")) != build(text.format("-0.0"))


def test_unnamed_inputs_are_distinguished_by_their_use() -> None:
    head = "graph(%0: f32[2], %1: f32[2]) -> (a, b)\n  a = Subtract(%0, %1)\n  b = Divide"
    assert build(head + "(%0, %1)") != build(head + "(%1, %0)")
    swapped = "graph(%1: f32[2], %0: f32[2]) -> (b, a)\n  b = Divide(%0, %1)\n  a = Subtract(%0, %1)"
    assert build(head + "(%0, %1)") == build(swapped)


def test_identical_ops_are_distinguished_by_their_use() -> None:
    head = "graph(x: f32[2]) -> (a, b)\n  %0 = Abs(x)\n  %1 = Abs(x)\n"
    apart = build(head + "  a = Add(%0, %0)\n  b = Multiply(%1, %1)")
    assert apart != build(head + "  a = Add(%0, %1)\n  b = Multiply(%0, %1)")
    assert apart == build(head + "  a = Add(%1, %1)\n  b = Multiply(%0, %0)")


def test_a_graph_is_not_equal_to_other_things_and_not_hashable() -> None:
    g = build(ONE)
    assert g != ONE and g != 3
    with pytest.raises(TypeError):
        hash(g)


def chain(length: int) -> og.Graph:
    g = og.Graph()
    y = x = g.input("x", shape=(None, 8))
    for i in range(length // 2):
        y = g.add_op("Add", g.add_op("Sigmoid", y), 1.5 if i % 2 else x)
    return g


def test_build_print_parse_and_compare_are_linear_in_time() -> None:
    def round_trip(length: int) -> None:
        g = chain(length).finalize()
        assert og.parse(str(g)) == g

    assert growth(lambda length: partial(round_trip, length), 1_000) < 3


def test_refinement_ends_for_indistinguishable_ops() -> None:
    g = og.Graph()
    for _ in range(300):  # equal and disconnected
        g.add_op("Abs", g._add_input(og.LogicalTensor(g._next_tensor, "f32", (2,))))
    assert renumbered(g.finalize(), 1) == g


def test_printing_an_unfinalized_cycle_is_refused() -> None:
    x, y = og.LogicalTensor(0, "f32", (2,)), og.LogicalTensor(1, "f32", (2,))
    g = og.Graph()
    g.add_op(og.Op(0, "Abs", [x], [y]))
    g.add_op(og.Op(1, "Abs", [y], [x]))
    with pytest.raises(OpGraphError, match="cycle"):
        str(g)


@RELAXED
@given(graphs())
def test_a_copy_and_a_pickled_graph_are_equal_graphs(g: og.Graph) -> None:
    for other in copy.deepcopy(g), pickle.loads(pickle.dumps(g)):
        assert other == g and [op.kind for op in other.ops] == [op.kind for op in g.ops]
