"""Partitions: as few as one pass allows, all of them executable, and a reason for every boundary."""

import dataclasses
import itertools
import json
import random
from functools import partial

import numpy as np
import pytest
from growth import growth
from hypothesis import given, settings
from hypothesis import strategies as st

import opgraph as og
from opgraph.errors import InvalidArguments, InvalidGraph
from opgraph.ir import opdef
from opgraph.partition.clusters import Blocked, Clusters
from opgraph.partition.examples import graph_of
from opgraph.partition.partition import FUSED, LIBRARY, make_partition
from opgraph.partition.partition import graph_of as partition_graph
from opgraph.partition.partitioner import partition
from opgraph.partition.report import MOST_REASONS
from opgraph.partition.symbols import shape_text, symbolic_shapes
from opgraph.partition.verify import verify_partitions


def foreign(graph, *inputs, onnx_op="Conv", name="", dims=None, dtype="f32"):
    """A Wildcard as the ONNX importer makes them; with onnx_op=None one that no engine runs."""
    op = og.Op(graph._next_op, "Wildcard", list(inputs), name=name)
    made = og.LogicalTensor(graph._next_tensor, dtype, dims or inputs[0].dims)
    op.add_output(made)
    if onnx_op is not None:
        op.set_attr("onnx_op", onnx_op)
    graph.add_op(op)
    return made


def cut(graph):
    return partition(graph.finalize()).partitions


def test_partition_graph_keeps_ports_with_colliding_names():
    graph = og.Graph()
    x = graph.input("x", "f32", (2,))
    y = graph.add_op("Exp", x)
    z = graph.add_op("Sin", x, name=f"t{y.id}")
    graph.set_outputs([foreign(graph, y), foreign(graph, z)])
    part = next(p for p in cut(graph) if p.kind == FUSED)
    alone = partition_graph(part)
    assert {t.id for t in alone.outputs} == {y.id, z.id} and len(og.evaluate(alone, x=np.ones(2, np.float32))) == 2


def cut_text(text):
    return cut(og.parse(text))


# -- one pass where one pass is enough -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "Multiply(x, Sigmoid(x))",
        "Multiply(Sigmoid(x), z)",
        "ReLU(Multiply(x, Sigmoid(x)))",
        "Add(z, Multiply(x, Sigmoid(x)))",
        "ReLU(Add(z, Multiply(x, Sigmoid(x))))",
        "Multiply(u, Multiply(x, Sigmoid(x)))",
        "Multiply(x, Sigmoid(Multiply(a, x)))",
        "Sigmoid(ReLU(x))",
        "Abs(Tanh(Log(Exp(x))))",
        "Tanh(Multiply(z, Sigmoid(ReLU(Add(x, z)))))",
        "Add(ReLU(x), Tanh(x))",
        "Multiply(GELU(x), u)",
        "Multiply(x, HardSigmoid(x, alpha=0.16666667, beta=0.5))",
        "Multiply(x, Tanh(Log(Add(1, Exp(x)))))",
        "Multiply(Multiply(0.5, x), Add(1, Tanh(Multiply(0.79788456, Add(x, Multiply(0.044715, Pow(x, 3)))))))",
        "Select(GreaterEqual(x, 0), x, Multiply(x, 0.1))",
        "Multiply(Exp(x), Sigmoid(Exp(x)))",
        "Divide(Subtract(Exp(x), Exp(Neg(x))), Add(Exp(x), Exp(Neg(x))))",
        "Add(Multiply(z, Sigmoid(x)), Multiply(Multiply(z, x), Multiply(Sigmoid(x), Subtract(1, Sigmoid(x)))))",
        "Reciprocal(x)",
        "Pow(x, beta=2.5)",
    ],
)
@pytest.mark.parametrize("shape", ["[4,8]", "[?,8]", "[?,?]", "[*]", "[batch,8]", "[]", "[0,3]"])
def test_a_pointwise_graph_is_one_partition(expression, shape):
    (part,) = cut_text(graph_of(expression, shape=shape))
    assert (part.kind, part.provider, part.supported) == ("fused", "opgraph", True)


@pytest.mark.parametrize("shape", ["[8]", "[?,8]", "[*]", "[seq,8]"])
def test_swish_with_sigmoid_as_output_is_one_partition(shape):
    (part,) = cut_text(f"graph(x: f32{shape}) -> (s, y)\n s = Sigmoid(x)\n y = Multiply(x, s)")
    assert part.units == ("swish",)
    assert [t.name for t in part.output_ports] == ["s", "y"]
    assert [t.name for t in part.input_ports] == ["x"]


def test_swiglu_lists_its_nested_swish():
    (part,) = cut_text(graph_of("ReLU(Multiply(Multiply(x, Sigmoid(x)), u))"))
    assert part.units == ("swish", "swiglu")


@pytest.mark.parametrize("length", [25, 800])
def test_pointwise_chain_is_one_partition(length):
    graph = og.Graph()
    value = graph.input("x", shape=(None, 8))
    for i in range(length):
        value = graph.add_op("Add", value, graph.input(f"x{i}", shape=(None, 8)))
    (part,) = cut(graph)
    assert len(part.ops) == length


def test_casts_are_fused():
    (part,) = cut_text("graph(x: bf16[8]) -> (y)\n %0: f32[8] = TypeCast(x)\n %1 = Exp(%0)\n y: bf16[8] = TypeCast(%1)")
    assert len(part.ops) == 3


def test_fan_out_and_several_outputs_are_fused():
    text = "graph(x: f32[8]) -> (a, b, c)\n %0 = Exp(x)\n a = ReLU(%0)\n b = Tanh(%0)\n c = Add(a, b)"
    (part,) = cut_text(text)
    assert [t.name for t in part.output_ports] == ["a", "b", "c"]


#: Graphs with Backward kinds and Dropout for which oneDNN makes one to three partitions.
ONE_PASS = {
    "a gradient and a product": "%0 = SigmoidBackward(x, d, use_dst=false)\n  y = Multiply(%0, z)",
    "a product and a gradient": "%0 = Multiply(d, z)\n  y = SigmoidBackward(x, %0, use_dst=false)",
    "the gradient of swish": (
        "%0 = Multiply(d, x)\n  %1 = SigmoidBackward(z, %0)\n  %2 = Multiply(d, z)\n  y = Add(%1, %2)"
    ),
    "a comparison and a choice": "%0 = GreaterEqual(x, z)\n  y = Select(%0, x, d)",
    "dropout after an activation": "%0 = Exp(x)\n  y = Dropout(%0, seed, offset, p)",
}


@pytest.mark.parametrize("name", ONE_PASS)
def test_gradients_and_dropout_are_one_partition(name):
    inputs = dict.fromkeys("dxz", "f32[64]") | {"seed": "s64[1]", "offset": "s64[1]", "p": "f32[1]"}
    read = {n: t for n, t in inputs.items() if n in ONE_PASS[name]}
    declared = ", ".join(f"{n}: {t}" for n, t in read.items())
    graph = og.parse(f"graph({declared}) -> (y)\n  {ONE_PASS[name]}").finalize()
    assert len(graph.get_partitions()) == 1


def test_readers_of_one_value_are_one_partition():
    assert len(cut_text("graph(x: f32[8]) -> (a, b)\n a = ReLU(x)\n b = Tanh(x)")) == 1
    gated = "graph(g: f32[n,8], u: f32[n,8], d: f32[n,8]) -> (dg, du)\n %0 = Sigmoid(g)\n dg = Multiply(d, u)\n"
    (part,) = cut_text(gated + " du = Multiply(d, %0)")
    assert [op.kind for op in part.ops] == ["Sigmoid", "Multiply", "Multiply"]


@pytest.mark.parametrize(
    "graph",
    [
        "graph(x: f32[8], z: f32[8]) -> (a, b)\n a = ReLU(x)\n b = Tanh(z)",
        "graph(x: f32[?,8], z: f32[?,8]) -> (a, b)\n a = Add(x, z)\n b = Tanh(x)",
        "graph(x: f32[]) -> (a, b)\n a = ReLU(x)\n b = Tanh(x)",
        "graph(x: f32[8], z: f32[2,8]) -> (a, b)\n a = Add(z, x)\n b = Tanh(x)",
    ],
    ids=["no value in common", "perhaps two shapes", "one number", "two shapes"],
)
def test_ops_without_an_edge_between_them_stay_apart(graph):
    assert len(cut_text(graph)) == 2


def test_readers_of_one_value_stay_apart_if_fusing_makes_a_cycle():
    graph = og.Graph()
    x = graph.input("x", shape=(4, 8))
    graph.add_op("Multiply", x, foreign(graph, graph.add_op("ReLU", x)))
    assert [p.kind for p in cut(graph)] == ["fused", "library", "fused"]


def test_partition_inputs_are_limited():
    """Seventeen outputs of x with one more input each."""
    names = [f"i{k}" for k in range(17)]
    head = f"graph(x: f32[8], {', '.join(f'{n}: f32[8]' for n in names)}) -> ({', '.join('o' + n for n in names)})\n"
    parts = cut_text(head + "".join(f" o{n} = Add(x, {n})\n" for n in names))
    assert [len(p.input_ports) for p in parts] == [16, 3]


# -- boundaries ------------------------------------------------------------------------------------------------------


def test_residual_stream_is_split_where_fusing_makes_a_cycle():
    graph = og.Graph()
    x = graph.input("x", shape=(4, 8))
    h = graph.add_op("ReLU", x, name="pre")
    graph.add_op("ReLU", graph.add_op("Add", foreign(graph, h, name="conv"), h, name="add"), name="post")
    parts = cut(graph)
    assert [[op.name for op in p.ops] for p in parts] == [["pre"], ["conv"], ["add", "post"]]
    assert [p.kind for p in parts] == ["fused", "library", "fused"]
    rows = {row.name: row for row in graph.explain().ops}
    assert 'would make a cycle through Conv "conv"' in rows["add"].why
    assert rows["pre"].why == 'apart from Add "add": fusing would make a cycle through Conv "conv"'


def test_branch_beside_a_foreign_op_is_fused_without_a_cycle():
    """relu(x) feeds only the add, whose other operand is a convolution of z: no path from relu leads to it."""
    graph = og.Graph()
    x, z = graph.input("x", shape=(4, 8)), graph.input("z", shape=(4, 8))
    h = graph.add_op("Tanh", graph.add_op("ReLU", x))
    graph.add_op("Add", foreign(graph, z), h)
    parts = cut(graph)
    assert [len(p.ops) for p in parts] == [1, 3]


def test_diamond_of_foreign_and_pointwise_ops_is_split_once():
    graph = og.Graph()
    x = graph.input("x", shape=(4, 8))
    a = graph.add_op("Exp", x)
    b = graph.add_op("Tanh", a)
    graph.add_op("Add", graph.add_op("ReLU", foreign(graph, a)), b)
    parts = cut(graph)
    assert sorted(p.kind for p in parts) == ["fused", "fused", "library"]


def test_neighbouring_foreign_ops_are_one_partition():
    graph = og.Graph()
    x = graph.input("x", shape=(4, 8))
    graph.add_op("ReLU", foreign(graph, foreign(graph, x), foreign(graph, x)))
    assert [(p.kind, p.provider, len(p.ops)) for p in cut(graph)] == [
        ("library", "onnxruntime", 3),
        ("fused", "opgraph", 1),
    ]


def test_independent_foreign_ops_are_one_partition():
    """Two branches of convolution and activation: the convolutions of equal depth run in one call."""
    graph = og.Graph()
    x = graph.input("x", shape=(4, 8))
    for _ in range(2):
        foreign(graph, graph.add_op("ReLU", foreign(graph, x)))
    assert [p.kind for p in cut(graph)] == ["library", "fused", "fused", "library"]


def test_fusing_kernels_has_priority_over_merging_library_ops():
    """Either exp and add are one kernel, or both foreign ops are one call. One kernel saves a pass over the data."""
    graph = og.Graph()
    x, z = graph.input("x", shape=(4, 8)), graph.input("z", shape=(4, 8))
    a = graph.add_op("Exp", x)
    w = foreign(graph, z)
    graph.add_op("Add", a, w)
    foreign(graph, w, a)
    parts = cut(graph)
    assert [p.kind for p in parts] == ["library", "fused", "library"]


def test_unsupported_wildcard_is_a_separate_partition():
    graph = og.Graph()
    x = graph.input("x", shape=(4, 8))
    foreign(graph, foreign(graph, x, onnx_op=None), onnx_op=None)
    assert [(p.kind, p.provider, p.supported) for p in cut(graph)] == [("unsupported", "", False)] * 2


def test_end_is_in_no_partition_and_makes_an_output():
    graph = og.Graph()
    x = graph.input("x", shape=(8,))
    s = graph.add_op("Sigmoid", x)
    graph.add_op(og.Op(7, "End", [s]))
    graph.add_op("Multiply", x, s)
    (part,) = cut(graph)
    assert [op.kind for op in part.ops] == ["Sigmoid", "Multiply"]
    assert len(part.output_ports) == 2


# -- shapes ----------------------------------------------------------------------------------------------------------


def test_scalar_parameter_arithmetic_is_fused_into_its_kernel():
    """0-d parts move out of the loop, so even an exp costs nothing per element."""
    (part,) = cut_text(graph_of("Multiply(x, Exp(Tanh(Sigmoid(a))))", a="f32[]"))
    assert len(part.ops) == 4


def test_chain_of_smaller_shapes_is_fused():
    (part,) = cut_text(graph_of("Add(Multiply(x, Add(c, Exp(a))), 1)", a="f32[]", c="f32[8]"))
    assert len(part.ops) == 4


def test_expensive_broadcast_part_is_not_recomputed_per_element():
    graph = og.parse(graph_of("Multiply(x, Exp(Sigmoid(c)))", x="f32[1024,8]", c="f32[8]"))
    small, _ = cut(graph)
    assert [op.kind for op in small.ops] == ["Sigmoid", "Exp"]
    cost = sum(opdef.find(op.kind).cost for op in small.ops)
    why = {row.kind: row.why for row in graph.explain().ops}["Exp"]
    assert "smaller shape [8] inside [1024,8]" in why
    assert "1024 times each" in why
    assert f"{cost} instructions" in why


def test_cheap_broadcast_part_is_recomputed_per_element():
    assert len(cut_text(graph_of("Multiply(x, Add(c, 1))", x="f32[1024,8]", c="f32[8]"))) == 1


def test_part_that_is_constant_along_a_row_is_fused():
    """The end of an RMSNorm: computed once per row on the CPU, once per pack on CUDA."""
    norm = "Multiply(x, Reciprocal(Sqrt(Add(m, 1e-5))))"
    assert len(cut_text(graph_of(norm, x="f32[b,s,64]", m="f32[b,s,1]"))) == 1
    assert len(cut_text(graph_of(norm, x="f32[b,s,?]", m="f32[b,s,1]"))) == 1
    assert len(cut_text(graph_of(norm, x="f32[8,s,64]", m="f32[1,s,64]"))) == 2
    assert len(cut_text(graph_of("Multiply(x, Lgamma(m))", x="f32[b,s,64]", m="f32[b,s,1]"))) == 2


def test_expensive_part_is_recomputed_if_the_loop_is_little_larger():
    assert len(cut_text(graph_of("Multiply(x, Exp(c))", x="f32[2,8]", c="f32[8]"))) == 1
    assert len(cut_text(graph_of("Multiply(x, Exp(c))", x="f32[3,8]", c="f32[8]"))) == 2


def test_broadcast_part_with_several_readers_is_computed_once():
    text = "graph(x: f32[64,8], c: f32[8]) -> (y, z)\n z = Add(c, 1.0)\n y = Multiply(x, z)"
    assert len(cut_text(text)) == 2
    head = "graph(x: f32[64,8], w: f32[32,8], c: f32[8]) -> (y, z)\n %0 = Add(c, 1.0)"
    text = head + "\n y = Multiply(x, %0)\n z = Add(w, %0)"
    graph = og.parse(text)
    assert len(cut(graph)) == 3
    _, y, z = graph.explain().ops
    for row, big in ((y, "[64,8]"), (z, "[32,8]")):
        assert f"smaller shape [8] inside {big}: 2 partitions use it" in row.why


def test_reasons_for_a_value_with_many_readers_are_limited():
    def report_of(readers):
        graph = og.Graph()
        small = graph.add_op("Exp", graph.input("c", shape=(8,)))
        for index in range(readers):
            graph.add_op("Multiply", graph.input(f"x{index}", shape=(index + 9, 8)), small)
        return graph.explain

    report = report_of(2000)()
    why = report.ops[0].why
    assert why.count("apart from") == MOST_REASONS - 1 and why.endswith(f"; and from {2000 - MOST_REASONS + 1} more")
    assert len(str(report)) < 10**6
    assert growth(report_of, 250) < 3


def test_unknown_shapes_of_one_op_are_assumed_equal():
    """SwiGLU over two inputs of unknown length: such a declaration means that the lengths are equal."""
    for shape in ("[?,8]", "[*]"):
        (part,) = cut_text(graph_of("Multiply(Multiply(x, Sigmoid(x)), u)", shape=shape))
        assert part.units == ("swish", "swiglu")
    assert len(cut_text(graph_of("Multiply(x, Sigmoid(c))", x="f32[?,8]", c="f32[8]"))) == 2


def test_unknown_sizes_that_prevent_fusion_are_explained():
    """If one of them were 1, the rows would be different; a name declares that they are equal."""
    for size, count in (("?", 2), ("n", 1)):
        graph = og.parse(graph_of("Add(SoftMax(x, axis=-1), u)", shape=f"[4,{size}]"))
        assert len(cut(graph)) == count
        assert ("give equal sizes one name" in graph.explain().ops[0].why) == (count == 2)
    head = "graph(x: f32[{0}], u: f32[{0}], v: f32[{0}]) -> (y, z)\n s = Exp(x)\n"
    for size, count in (("?", 3), ("n", 1)):
        graph = og.parse(head.format(size) + " y = Multiply(s, u)\n z = Multiply(s, v)")
        assert len(cut(graph)) == count
        told = ["give equal sizes one name): 2 partitions use it" in row.why for row in graph.explain().ops]
        assert told == [count == 3] * 3
    for size, kind in (("?", LIBRARY), ("n", FUSED)):
        graph = og.parse(graph_of("RMSNorm(x, u)", x=f"f32[4,{size}]", u=f"f32[{size}]"))
        assert [part.kind for part in cut(graph)] == [kind]
        assert ("give equal ones one name" in graph.explain().ops[0].why) == (kind == LIBRARY)


def test_channel_operand_is_read_from_memory():
    text = "graph(x: f32[2,3,5,5], b: f32[3]) -> (y)\n %0 = Add(b, 1.0)\n y = BiasAdd(x, %0, data_format={})"
    assert len(cut_text(text.format('"NCX"'))) == 2
    assert len(cut_text(text.format('"NXC"').replace("[2,3,5,5]", "[2,5,5,3]"))) == 1
    graph = og.parse(text.format('"NCX"'))
    assert "channel axis" in {row.kind: row.why for row in graph.explain().ops}["Add"]


def test_channel_op_is_not_fused_into_a_larger_shape():
    """Axis 1 of [3,4,4] is axis 2 of [2,3,4,4]."""
    text = "graph(x: f32[2,3,4,4], z: f32[3,4,4], b: f32[4]) -> (y)\n"
    text += ' %0 = BiasAdd(z, b, data_format="NCX")\n y = Multiply(x, %0)'
    assert len(cut_text(text)) == 2
    assert "its channel axis is one of its own shape" in og.parse(text).explain().ops[0].why


def test_possible_channel_operand_is_read_from_memory():
    text = 'graph(x: f32[*], b: f32[3]) -> (y)\n %0 = Add(b, 1.0)\n y = BiasAdd(x, %0, data_format="NCX")'
    assert len(cut_text(text)) == 2
    assert len(cut_text('graph(x: f32[*]) -> (y)\n %0 = ReLU(x)\n y = PReLU(x, %0, data_format="NCX")')) == 2


def test_fused_small_parts_do_not_change_the_loop_shape():
    """The [8] part with three foreign operands is fused first; the exp, also [8], is still next to [1024,8]."""
    graph = og.Graph()
    x, c = graph.input("x", shape=(1024, 8)), graph.input("c", shape=(8,))
    e = graph.add_op("Exp", c)
    a, b, d = (foreign(graph, c) for _ in range(3))
    busy = graph.add_op("Add", graph.add_op("Add", a, b), d)
    graph.add_op("Multiply", graph.add_op("Multiply", x, busy), e)
    assert sorted((p.kind, len(p.ops)) for p in cut(graph)) == [("fused", 1), ("fused", 4), ("library", 3)]


def test_symbolic_shapes_are_equal_only_if_certain():
    graph = og.parse(
        "graph(x: f32[*], z: f32[*], v: f32[?,8], w: f32[?,8], m: f32[seq,8]) -> (a, b, c, d, e, f, g, h)\n"
        " a = Multiply(x, 2.0)\n b = Add(x, z)\n c = Add(x, v)\n d = ReLU(v)\n e = Add(v, w)\n"
        " f = Add(v, d)\n g: f32[4,8] = Add(v, w)\n h = Add(m, 1.0)"
    )
    shapes = symbolic_shapes(graph)
    of = {t.name: shapes[t.id] for t in (*graph.inputs, *graph.outputs)}
    assert of["a"] == of["x"] and of["d"] == of["f"] == of["v"] and of["h"] == of["m"] == ("seq", 8)
    assert of["g"] == (4, 8)
    apart = [of[name] for name in "xzbcvweg"]
    assert len(set(apart)) == len(apart)
    assert [shape_text(of[name]) for name in "xbevh"] == ["[*]", "[*]", "[?,8]", "[?,8]", "[seq,8]"]


def test_gen_index_is_not_fused_into_a_larger_shape():
    text = "graph(x: s32[64,8], c: f32[8]) -> (y)\n %0 = GenIndex(c, axis=0)\n y = Add(x, %0)"
    assert len(cut_text(text)) == 2


# -- ports, units, order ---------------------------------------------------------------------------------------------


def test_ports_are_listed_once_and_constants_separately():
    (part,) = cut_text(graph_of("Add(Multiply(x, Sigmoid(x)), Multiply(z, 2))"))
    assert [t.name for t in part.input_ports] == ["x", "z"]
    assert [t.data.item() for t in part.constants] == [2.0]
    assert [t.name for t in part.output_ports] == ["y"]


def test_unused_values_are_ports_only_if_there_are_no_others():
    graph = og.Graph()
    x = graph.input("x", shape=(8,))
    graph.add_op("Tanh", graph.add_op("ReLU", x, name="dead"), name="last")
    graph.add_op("Exp", kept := graph.add_op("Abs", x, name="kept"), name="dropped")
    graph.set_outputs([kept])
    dead, alive = cut(graph)
    assert [t.name for t in dead.output_ports] == ["last"]
    assert [t.name for t in alive.output_ports] == ["kept"]


def test_unit_split_between_partitions_is_not_reported():
    """Sigmoid of [?,8] and the product are in different partitions, separated by the convolution."""
    graph = og.Graph()
    x = graph.input("x", shape=(4, 8))
    s = graph.add_op("Sigmoid", x)
    y = graph.add_op("Multiply", x, s)
    graph.add_op("Multiply", y, foreign(graph, y, name="up"))
    parts = cut(graph)
    assert [p.units for p in parts] == [("swish",), (), ()]


def test_unit_names_come_in_the_order_of_their_roots():
    (part,) = cut_text(graph_of("GELU(Multiply(Multiply(x, Sigmoid(x)), Mish(u)))"))
    assert set(part.units) == {"swish", "mish", "swiglu", "gelu"}
    roots = [part.ops.index(u.root) for u in part.unit_matches]
    assert roots == sorted(roots)


def test_partitions_are_ordered_by_their_first_ops():
    graph = og.Graph()
    first = graph.add_op("ReLU", graph.input("x", shape=(8,)))
    graph.add_op("Tanh", graph.input("z", shape=(8,)))
    graph.add_op("Exp", first)
    assert [p.ops[0].kind for p in cut(graph)] == ["ReLU", "Tanh"]


def test_partitioning_is_deterministic():
    graph = random_graph(random.Random(3), 200)
    first, second = cut(graph), cut(graph)
    assert [[o.id for o in p.ops] for p in first] == [[o.id for o in p.ops] for p in second]


# -- get_partitions --------------------------------------------------------------------------------------------------


def test_debug_policy_separates_every_op():
    graph = og.parse(graph_of("Multiply(x, Sigmoid(x))"))
    parts = graph.get_partitions("debug")
    assert [len(p.ops) for p in parts] == [1, 1]
    assert [p.units for p in parts] == [(), ()]
    assert len(graph.get_partitions("fusion")) == 1


def test_an_unknown_policy_is_refused():
    with pytest.raises(InvalidArguments, match="unknown policy 'max'"):
        og.parse(graph_of("ReLU(x)")).get_partitions("max")


def test_a_graph_that_is_not_finalized_is_refused():
    graph = og.Graph()
    graph.add_op("ReLU", graph.input("x", shape=(8,)))
    with pytest.raises(InvalidGraph, match="not finalized"):
        graph.get_partitions()
    assert graph.explain().partitions


def test_an_empty_graph_has_no_partitions():
    assert cut(og.Graph()) == ()
    assert str(og.Graph().explain()).startswith("0 ops in 0 partitions")


# -- the report ------------------------------------------------------------------------------------------------------


def test_explain_prints_reasons_in_a_table():
    graph = og.Graph()
    x = graph.input("x", shape=(4, 8))
    h = graph.add_op("Multiply", x, graph.add_op("Sigmoid", x, name="gate"), name="act")
    h = graph.add_op("Tanh", foreign(graph, foreign(graph, h, name="conv"), onnx_op=None, name="odd"), name="last")
    graph.notes.append("a remark of the importer")
    report = graph.explain()
    text = str(report)
    for line in ("5 ops in 4 partitions: 2 fused, 1 library, 1 unsupported", "note: a remark of the importer"):
        assert line in text.splitlines()
    why = {row.name: row.why for row in report.ops}
    assert why["gate"] == "part of swish; fused with 1 more"
    assert why["conv"] == "foreign op Conv: runs in onnxruntime"
    assert why["odd"] == "foreign op Wildcard: nobody runs it"
    assert why["last"] == "no neighbour to fuse with"
    assert all(word in text for word in why.values())
    first = report.partitions[0]
    assert (first.kind, first.ops, first.units, first.input_bytes, first.output_bytes) == (
        "fused",
        2,
        ("swish",),
        128,
        128,
    )


def test_explain_report_is_json_serializable():
    graph = og.parse(graph_of("Multiply(x, Sigmoid(x))", shape="[?,8]"))
    told = json.loads(json.dumps(graph.explain().to_dict()))
    assert [row["partition"] for row in told["ops"]] == [0, 0]
    assert told["partitions"][0]["units"] == ["swish"]
    assert told["partitions"][0]["input_bytes"] is None


# -- any graph -------------------------------------------------------------------------------------------------------


def random_graph(rng, size, *, window=6, foreign_share=0.25, shapes=((4, 8), (8,), (), (4, 1), (None, 8), None)):
    """Pointwise ops and Wildcards, mixed; operands are among the last `window` values."""
    graph = og.Graph()
    values = [graph.input(f"x{i}", shape=shape) for i, shape in enumerate(shapes)]
    for _ in range(size):
        a, b = (values[len(values) - 1 - rng.randrange(min(window, len(values)))] for _ in range(2))
        if rng.random() < foreign_share:
            onnx_op = rng.choice(["Conv", "Conv", "Conv", None])
            values.append(foreign(graph, a, b, onnx_op=onnx_op, dims=rng.choice(shapes)))
        else:
            kind = rng.choice(["Sigmoid", "ReLU", "Multiply", "Add", "Multiply", "Exp"])
            values.append(graph.add_op(kind, a, b) if kind in ("Multiply", "Add") else graph.add_op(kind, a))
        if rng.random() < 0.1 and len(values) > len(shapes):
            graph.output(values[-1])
    return graph.finalize()


def reaches(count, edges):
    """True at [i][j] if a path of at least one edge leads from i to j; edges go from smaller to larger numbers."""
    closure = np.zeros((count, count), bool)
    for a, b in sorted(edges, reverse=True):
        closure[a] |= closure[b]
        closure[a, b] = True
    return closure


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    size=st.integers(1, 60),
    window=st.integers(2, 20),
    share=st.sampled_from([0.1, 0.3, 0.6]),
)
def test_random_graphs_are_split_into_executable_partitions(seed, size, window, share):
    graph = random_graph(random.Random(seed), size, window=window, foreign_share=share)
    parts = cut(graph)
    shapes = symbolic_shapes(graph)
    place = {op.id: p.id for p in parts for op in p.ops}
    assert sorted(place) == sorted(op.id for op in graph.ops)
    edges = {
        (place[graph.producer(t.id).id], place[op.id])
        for op in graph.ops
        for t in op.inputs
        if graph.producer(t.id) is not None
    }
    assert all(a <= b for a, b in edges), "in order, hence convex and without cycles"
    for part in parts:
        kinds = {
            "fused" if op.kind != "Wildcard" else "library" if op.attrs.get("onnx_op") else "unsupported"
            for op in part.ops
        }
        assert kinds == {part.kind}
        if part.kind == "fused":
            assert len({shapes[t.id] for t in part.output_ports}) == 1, "one loop writes all outputs"
        if part.kind == "fused":
            assert len({shapes[t.id] for t in part.output_ports}) == 1, "one loop writes all outputs"
    # No more fusion is possible: between fused neighbours of one known shape a path leads through a third partition.
    through = reaches(len(parts), {(a, b) for a, b in edges if a != b})
    for op in graph.ops:
        for tensor in op.inputs:
            maker = graph.producer(tensor.id)
            if maker is None or place[maker.id] == place[op.id]:
                continue
            a, b = place[maker.id], place[op.id]
            alike = tensor.has_known_shape and tensor.dims == op.outputs[0].dims
            if alike and parts[a].kind == parts[b].kind == "fused":
                assert any(through[a, c] and through[c, b] for c in range(len(parts)))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9), count=st.integers(2, 25))
def test_clusters_join_exactly_if_no_cycle_results(seed, count):
    """Compared with brute force: after any joins, two clusters may be joined if no path leads through a third."""
    rng = random.Random(seed)
    sources = [sorted({rng.randrange(n) for _ in range(rng.randrange(4))}) if n else [] for n in range(count)]
    clusters = Clusters(sources, 10**6)
    if rng.random() < 0.5:
        joinable = {(a, b): rng.random() < 0.5 for b in range(count) for a in sources[b]}
        clusters.join_by_level(lambda a, b: joinable[a, b])
    for _ in range(count):
        b = rng.randrange(count)
        if not sources[b]:
            continue
        a = rng.choice(sources[b])
        ca, cb = clusters.find(a), clusters.find(b)
        if ca == cb:
            continue
        edges = {(clusters.find(s), clusters.find(n)) for n in range(count) for s in sources[n]}
        edges = {(x, y) for x, y in edges if x != y}
        around = {x: {y for z, y in edges if z == x} for x in range(count)}
        seen, waiting = set(), [x for x in around[ca] if x != cb]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += around[node]
        result = clusters.join(ca, cb)
        assert isinstance(result, Blocked) == (cb in seen)
        if isinstance(result, Blocked):
            steps = itertools.pairwise((ca, *result.path, cb))
            assert result.path and all(step in edges for step in steps)
        order = list(clusters)
        assert sorted(order) == sorted({clusters.find(n) for n in range(count)})
        at = {c: i for i, c in enumerate(order)}
        assert all(at[clusters.find(s)] <= at[clusters.find(n)] for n in range(count) for s in sources[n])


def test_cycle_search_beyond_its_limit_is_refused():
    """A ladder: every join of neighbours on one rail must search the other rail."""
    sources = [[], *[[n - 1] for n in range(1, 40)]]
    sources[39] = [38, 0]
    assert isinstance(Clusters(sources, 5).join(0, 39), Blocked)
    assert Clusters(sources, 5).join(0, 39) == Blocked(())
    assert Clusters(sources, 10**4).join(0, 39) == Blocked(tuple(range(1, 39)))


# -- the check of partitionings --------------------------------------------------------------------------------------


def test_invalid_partitionings_are_detected():
    graph = og.Graph()
    x = graph.input("x", shape=(8,))
    graph.add_op("ReLU", graph.add_op("Tanh", foreign(graph, graph.add_op("Exp", x))))
    ops = graph.finalize().ops
    outputs = {t.id for t in graph.outputs}

    def make(*groups):
        kinds = [("library" if ops[g[0]].kind == "Wildcard" else "fused") for g in groups]
        return [
            make_partition(graph, outputs, i, kind, [ops[n] for n in group], (), "")
            for i, (kind, group) in enumerate(zip(kinds, groups, strict=True))
        ]

    verify_partitions(graph, make([0], [1], [2, 3]))
    for groups, message in (
        (([0], [1], [2]), "in no partition"),
        (([0], [1], [2, 3], [3]), "holds too"),
        (([0], [1], [3, 2]), "out of order"),
        (([0, 3], [1], [2]), "before partition"),
        (([1], [0], [2, 3]), "before partition"),
    ):
        with pytest.raises(InvalidGraph, match=message):
            verify_partitions(graph, make(*groups))
    swapped = make([0], [1], [2, 3])
    swapped[0], swapped[1] = swapped[1], swapped[0]
    with pytest.raises(InvalidGraph, match="stands at place"):
        verify_partitions(graph, swapped)
    for change, message in (
        ({"input_ports": ()}, "input ports"),
        ({"output_ports": (x,)}, "output ports"),
        ({"constants": (x,)}, "constants"),
    ):
        parts = make([0], [1], [2, 3])
        parts[2] = dataclasses.replace(parts[2], **change)
        with pytest.raises(InvalidGraph, match=message):
            verify_partitions(graph, parts)


def test_disconnected_fused_partition_is_detected():
    graph = og.parse("graph(x: f32[8], z: f32[8]) -> (a, b)\n a = ReLU(x)\n b = Tanh(z)")
    outputs = {t.id for t in graph.outputs}
    with pytest.raises(InvalidGraph, match="not connected"):
        verify_partitions(graph, [make_partition(graph, outputs, 0, "fused", graph.ops, (), "opgraph")])


# -- size ------------------------------------------------------------------------------------------------------------


def chain(length):
    graph = og.Graph()
    value = graph.input("x", shape=(None, 8))
    for i in range(length):
        value = graph.add_op(("ReLU", "Sigmoid", "Tanh", "Abs")[i % 4], value)
    return graph.finalize()


def u_net(length):
    """Every skip is a fusion that would make a cycle."""
    graph = og.Graph()
    value = graph.input("x", shape=(4, 8))
    skips = []
    for _ in range(length // 4):
        value = graph.add_op("ReLU", foreign(graph, value))
        skips.append(value)
    for skip in reversed(skips):
        value = graph.add_op("Add", foreign(graph, value), skip)
    return graph.finalize()


def random_ops(window):
    return lambda length: random_graph(random.Random(0), length, window=window, shapes=((4, 8), (8,), ()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [chain, random_ops(10), random_ops(100_000), u_net], ids=["chain", "local", "global", "skips"]
)
def test_large_graphs_are_partitioned_in_linear_time(make):
    assert growth(lambda size: partial(cut, make(size)), 1_500) < 3


def test_large_graphs_are_split_into_partitions_of_limited_cost():
    assert 20 < len(cut(chain(20_000))) < 26
    assert sum(p.kind == "library" for p in cut(u_net(4_000))) == 2_000


# -- row ops fused for any layout of their tensors -----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["strided", "undef", "any"])
def test_softmax_is_fused_with_neighbours_in_every_layout(layout: str) -> None:
    g = og.Graph()
    x, y, z = (og.LogicalTensor(i, "f32", (4, 128), layout=layout if i == 1 else "strided") for i in range(3))
    g.add_op(og.Op(0, "ReLU", [x], [y]))
    g.add_op(og.Op(1, "SoftMax", [y], [z]))
    assert [len(p.ops) for p in g.finalize().get_partitions()] == [2]


def test_norm_along_the_last_axis_is_fused_with_its_neighbours() -> None:
    g = og.Graph()
    x = g.input("x", shape=(1, 7, 7, 64))
    vectors = [g.input(name, shape=(64,)) for name in ("gamma", "beta", "mean", "variance")]
    normed = g.add_op("BatchNormInference", g.add_op("Exp", x), *vectors, epsilon=1e-5, data_format="NXC")
    g.add_op("ReLU", normed)
    assert [len(p.ops) for p in g.finalize().get_partitions()] == [3]


# -- contents of kernels ----------------------------------------------------------------------------------------------

_VECTORS = "m: f32[c], v: f32[c], g: f32[c], b: f32[c]"
#: Norms, softmax and reductions, whole and in small ops: additional inputs, and the ops that make y from p.
AROUND: dict[str, tuple[str, str]] = {
    "SoftMax": ("", "y = SoftMax(p, axis=-1)"),
    "LogSoftmax": ("", "y = LogSoftmax(p)"),
    "LayerNorm": ("g: f32[c], b: f32[c]", "y = LayerNorm(p, g, b, keep_stats=false)"),
    "RMSNorm": ("g: f32[c]", "y = RMSNorm(p, g)"),
    "BatchNormForwardTraining": (
        _VECTORS,
        'y, rm, rv, bm, bv = BatchNormForwardTraining(p, m, v, g, b, epsilon=0.001, momentum=0.9, data_format="NCX")',
    ),
    "BatchNormInference": (_VECTORS, 'y = BatchNormInference(p, g, b, m, v, epsilon=0.001, data_format="NCX")'),
    "SoftMaxBackward": ("d: {t}[n,c]", "q = Tanh(d)\n y = SoftMaxBackward(q, p, axis=-1)"),
    "LogSoftmaxBackward": ("d: {t}[n,c]", "q = Tanh(d)\n y = LogSoftmaxBackward(q, p)"),
    "LayerNormBackward": (
        "d: {t}[n,c], m: f32[n], v: f32[n], g: f32[c], b: f32[c]",
        "q = Tanh(d)\n y, dg, db = LayerNormBackward(p, q, m, v, g, b)",
    ),
    "BatchNormTrainingBackward": (
        "d: {t}[n,c,h,w], m: f32[c], v: f32[c], g: f32[c]",
        'q = Tanh(d)\n y, dg, db = BatchNormTrainingBackward(p, q, m, v, g, epsilon=0.001, data_format="NCX")',
    ),
    **{
        f"Reduce{name}": ("", f"r = Reduce{name}(p, axes=[-1], keep_dims=true)\n y = Subtract(p, r)")
        for name in ("L1", "L2", "Max", "Mean", "Min", "Prod", "Sum")
    },
    "RMSNorm, spelled": (
        "",
        "a = Pow(p, beta=2.0)\n k = ReduceMean(a, axes=[-1], keep_dims=true)\n e = Add(k, 1e-5)\n s = Sqrt(e)\n"
        " r = Reciprocal(s)\n y = Multiply(p, r)",
    ),
    "LayerNorm, spelled": (
        "g: {t}[c]",
        "a = ReduceMean(p, axes=[-1], keep_dims=true)\n k = Subtract(p, a)\n q = Square(k)\n"
        " v = ReduceMean(q, axes=[-1], keep_dims=true)\n e = Add(v, 1e-5)\n s = Sqrt(e)\n u = Divide(k, s)\n"
        " y = Multiply(u, g)",
    ),
    "SoftMax, spelled": (
        "",
        "a = ReduceMax(p, axes=[-1], keep_dims=true)\n k = Subtract(p, a)\n e = Exp(k)\n"
        " s = ReduceSum(e, axes=[-1], keep_dims=true)\n y = Divide(e, s)",
    ),
}


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", AROUND)
def test_row_op_and_its_gradient_are_fused_with_neighbours(name: str, dtype: str) -> None:
    more, body = AROUND[name]
    shape = "n,c,h,w" if "NCX" in body else "n,c"
    inputs = ", ".join(filter(None, [f"x: {dtype}[{shape}]", more.format(t=dtype)]))
    graph = og.parse(f"graph({inputs}) -> (z)\n p = Sigmoid(x)\n {body}\n w = Tanh(y)\n z = Multiply(w, x)").finalize()
    assert [p.kind for p in graph.get_partitions()] == ["fused"]
    if "Backward" not in name:
        wrt = tuple(str(t.name) for t in graph.inputs if t.name not in ("m", "v"))
        assert [p.kind for p in og.gradient(graph, wrt).get_partitions()] == ["fused"]


def test_gradient_of_training_batch_norm_in_one_kernel_is_right() -> None:
    more, body = AROUND["BatchNormForwardTraining"]
    graph = og.gradient(
        og.parse(f"graph(x: f32[n,c,h,w], {more}) -> (z)\n p = Sigmoid(x)\n {body}\n w = Tanh(y)\n z = Multiply(w, x)"),
        ("x", "g", "b"),
    )
    rng = np.random.default_rng(0)
    sizes = {"n": 3, "c": 5, "h": 4, "w": 7}
    feeds = {t.name: rng.random([sizes[d] for d in t.dims or ()], np.float32) + 0.5 for t in graph.inputs}
    made, exact, peer = og.compile(graph)(feeds), og.evaluate(graph, feeds), og.evaluate(graph, feeds, dtype=None)
    for output, want in exact.items():
        own = np.abs(peer[output] - want).max()
        assert np.abs(made[output] - want).max() <= 2 * own + 1e-6 * np.abs(want).max(), output


def test_decomposed_op_waits_for_operands_its_ops_never_read() -> None:
    # beta: LayerNormBackward reads only its shape, which is that of gamma.
    inputs = "x: f32[n,c], d: f32[n,c], m: f32[n], v: f32[n], g: f32[c], p: f32[c,k], q: f32[k]"
    graph = og.parse(f"""graph({inputs}) -> (y, dg, db)
  t = Tanh(x)
  b = MatMul(p, q)
  y, dg, db = LayerNormBackward(t, d, m, v, g, b)""")
    assert [p.kind for p in graph.get_partitions()] == ["library", "fused"]


#: An op that kernels decompose, and that reads one value for each row of a loop over another shape or other axes.
ROWS_OF_OTHERS = {
    "rows along another axis": """graph(x: f32[4,6], d: f32[1,6]) -> (y)
  a = ReduceSum(x, axes=[0], keep_dims=true)
  y = LogSoftmaxBackward(d, a, axis=-1)""",
    "rows of another length": """graph(x: f32[4,6], d: f32[4,1]) -> (y)
  a = ReduceSum(x, axes=[1], keep_dims=true)
  y = SoftMaxBackward(d, a, axis=-1)""",
    "as many rows of another shape": """graph(x: f32[4,6], s: f32[2,6], m: f32[6]) -> (y)
  a = ReduceSum(x, axes=[0])
  y = BatchNormInference(s, m, m, m, a, epsilon=0.1)""",
    "two operands of two loops": """graph(x: f32[4,6], z: f32[9,6], s: f32[2,6], m: f32[6]) -> (y)
  a = ReduceSum(x, axes=[0])
  b = ReduceSum(z, axes=[0])
  y = BatchNormInference(s, a, m, m, b, epsilon=0.1)""",
}


@pytest.mark.parametrize("case", ROWS_OF_OTHERS)
def test_reader_of_row_values_of_two_loops_is_a_separate_kernel(case: str) -> None:
    g = og.parse(ROWS_OF_OTHERS[case]).finalize()
    *others, last = g.get_partitions()
    assert [op.kind for op in last.ops] == [g.ops[-1].kind] and all(p.kind == "fused" for p in (*others, last))
    feeds = {str(t.name): np.random.default_rng(t.id).random(t.shape, np.float32) + 0.5 for t in g.inputs}
    np.testing.assert_allclose(og.compile(g)(feeds), og.evaluate(g, feeds), rtol=1e-5, atol=1e-4)


def test_shapes_equal_only_through_a_reshape_elsewhere_are_not_fused() -> None:
    """`y` has the shape [6], which the loop of the mean treats as [2,3], and `e` has the shape [2,3]."""
    graph = og.parse(
        """graph(x: f32[6], b: f32[2,3]) -> (y, e, n)
      y = Exp(x)
      e = Exp(b)
      k = StaticReshape(y, shape=[3,2], special_zero=false)
      f = StaticTranspose(e, order=[1,0])
      o = Concat(k, f, axis=0)
      h = Slice(o, starts=[0], ends=[1], axes=[0])
      l = StaticReshape(h, shape=[2], special_zero=false)
      q = ReduceSum(l, axes=[0])
      i = Add(x, q)
      r = StaticReshape(i, shape=[2,3], special_zero=false)
      m = ReduceMean(r, axes=[1], keep_dims=true)
      n = Subtract(r, m)
    """
    )
    parts = partition(graph, side_by_side=True).partitions
    homes = [next(p.id for p in parts if any(t.name == name for t in p.output_ports)) for name in ("y", "e", "n")]
    assert len(set(homes)) == 3
