"""Graph: both ways of composing, constants, inputs and outputs; a failed call does not change the graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidArguments, InvalidDataType, InvalidGraph, InvalidGraphOp, InvalidShape, OpGraphError
from opgraph.ir import dtypes


def lt(id: int, dims: Any = (2, 3), dtype: str = "f32", **keywords: Any) -> og.LogicalTensor:
    return og.LogicalTensor(id, dtype, dims, **keywords)


# -- composing by add_op with a kind --------------------------------------------------------------------------------


def test_add_op_by_kind_infers_types_and_names() -> None:
    g = og.Graph()
    x = g.input("x", dtype="f16", shape=(None, 4096))
    y = g.add_op("Multiply", x, g.add_op("Sigmoid", x), name="y")
    assert (y.name, y.dtype, y.dims) == ("y", "f16", (None, 4096))
    assert [(op.kind, op.name) for op in g.ops] == [("Sigmoid", "Sigmoid_0"), ("Multiply", "y")]
    assert g.inputs == (x,) and g.outputs == (y,)


def test_attributes_are_keywords_and_defaults_are_filled_in() -> None:
    g = og.Graph()
    x = g.input("x", shape=(2,))
    g.add_op("Clamp", x, min=0.0, max=6)
    g.add_op("GELU", x)
    assert g.ops[0].attrs == {"min": 0.0, "max": 6.0} and g.ops[1].attrs["mode"] == "gelu_erf"


def test_several_outputs_are_a_tuple() -> None:
    g = og.Graph()
    outs = g.add_op("Wildcard", g.input("x"), outputs=3, dtype="f32", name="w")
    assert [t.name for t in outs] == ["w", None, None] and len({t.id for t in outs}) == 3
    assert g.add_op("Wildcard", outs[0], outputs=0) == ()


def test_float_attributes_are_f32() -> None:
    g = og.Graph()
    g.add_op("Elu", g.input("x"), alpha=0.1)
    assert g.ops[0].attrs["alpha"] == float(np.float32(0.1))


def test_integer_attribute_beyond_f32_becomes_infinite() -> None:
    for sign in (1, -1):
        g = og.Graph()
        g.add_op("Elu", g.input("x"), alpha=sign * 10**400)
        assert g.ops[0].attr("alpha") == sign * float("inf")


def test_zero_dimensional_array_is_refused_as_a_list_attribute() -> None:
    g = og.Graph()
    with pytest.raises(InvalidGraphOp, match="axes=array\\(0\\) is not s64"):
        g.add_op("ReduceSum", g.input("x", shape=(2, 3)), axes=np.array(0))


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.int64(1), np.array(0.5), 1, True], ids=repr)
def test_numpy_scalars_are_valid_attributes(value: Any) -> None:
    g = og.Graph()
    if value is True or isinstance(value, np.ndarray):
        with pytest.raises(InvalidGraphOp, match="is not f32"):
            g.add_op("Elu", g.input("x"), alpha=value)
    else:
        g.add_op("Elu", g.input("x"), alpha=value)
        assert g.ops[0].attrs["alpha"] == float(value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 1.0, True], ids=repr)
def test_an_s64_attribute_is_an_int_of_64_bits(value: Any) -> None:
    g = og.Graph()
    x = g.input("x", shape=(2,))
    with pytest.raises(InvalidGraphOp, match="is not s64"):
        g.add_op("GenIndex", x, axis=value)


@pytest.mark.parametrize(
    "value",
    [None, {}, [1, 2.0], [1, True], [[1]], b"a", 2**63, 1j, np.zeros((2, 2)), [None], object()],
    ids=lambda v: type(v).__name__,
)
def test_wildcard_refuses_invalid_attributes(value: Any) -> None:
    g = og.Graph()
    with pytest.raises(InvalidGraphOp, match="attribute"):
        g.add_op("Wildcard", g.input("x"), a=value)


def test_a_wildcard_keeps_every_type_of_attribute() -> None:
    g = og.Graph()
    g.add_op("Wildcard", g.input("x"), a=np.float32(0.5), b=[1, 2], c=np.array([0.1]), d=("x",), e=np.True_, f=[])
    assert g.ops[0].attrs == {"a": 0.5, "b": (1, 2), "c": (float(np.float32(0.1)),), "d": ("x",), "e": True, "f": ()}


# -- composing as in oneDNN -----------------------------------------------------------------------------------------


def test_graph_copies_added_ops() -> None:
    op = og.Op(5, "Elu", inputs=[lt(0)], outputs=[lt(1)], name="act").set_attr("alpha", 1.0)
    g = og.Graph()
    assert g.add_op(op) is None
    op.set_attr("alpha", 2.0)
    op.name = "other"
    assert g.ops[0].attrs == {"alpha": 1.0} and (g.ops[0].id, g.ops[0].name) == (5, "act")


def test_an_op_of_a_graph_cannot_be_changed() -> None:
    g = og.Graph()
    g.add_op("Abs", g.input("x"))
    changes: list[Callable[[og.Op], object]] = [
        lambda op: op.set_attr("alpha", 1.0),
        lambda op: op.add_input(lt(9)),
        lambda op: op.add_output(lt(9)),
        lambda op: setattr(op, "kind", "Exp"),
        lambda op: setattr(op, "id", 3),
    ]
    for change in changes:
        with pytest.raises(InvalidGraph, match="cannot be changed"):
            change(g.ops[0])
    g.ops[0].attrs["alpha"] = 1.0  # a copy
    assert g.ops[0].attrs == {}


def test_ops_and_tensors_have_separate_ids() -> None:
    g = og.Graph()
    g.add_op(og.Op(0, "Abs", [lt(0)], [lt(1)]))
    g.add_op(og.Op(1, "Abs", [lt(1)], [lt(2)]))
    assert len(g.finalize()) == 2


def test_ops_added_in_any_order_connect_by_id_and_are_sorted() -> None:
    g = og.Graph()
    g.add_op(og.Op(1, "Exp", [lt(1)], [lt(2, name="y")]))
    g.add_op(og.Op(0, "Abs", [lt(0, name="x")], [lt(1)]))
    g.finalize()
    assert [op.kind for op in g] == ["Abs", "Exp"]
    assert [t.id for t in g.inputs] == [0] and [t.id for t in g.outputs] == [2]
    assert g.producer(1) is not None and [op.id for op in g.consumers(1)] == [1]


def test_unknown_shapes_are_inferred_by_finalize() -> None:
    g = og.Graph()
    g.add_op(og.Op(1, "Add", [lt(1, None), lt(3, (3,))], [lt(2, (None, None))]))
    g.add_op(og.Op(0, "Abs", [lt(0)], [lt(1, None)]))
    g.finalize()
    assert g.tensor(1).dims == g.tensor(2).dims == g.ops[1].outputs[0].dims == (2, 3)


def test_name_may_be_given_in_one_mention_of_a_tensor() -> None:
    g = og.Graph()
    g.add_op(og.Op(0, "Abs", [lt(0, None)], [lt(1, None)]))
    g.add_op(og.Op(1, "Abs", [lt(1, None, name="inner")], [lt(2, None)]))
    g.add_op(og.Op(2, "Abs", [lt(0, None, name="x")], [lt(3, None)]))
    g.finalize()
    assert g.inputs[0].name == "x" and g.ops[0].outputs[0].name == "inner"


def test_both_forms_of_add_op_work_on_one_graph() -> None:
    g = og.Graph()
    x = g.input("x", shape=(2, 3))
    g.add_op(og.Op(7, "Abs", [x], [lt(40)]))
    y = g.add_op("Exp", lt(40))
    assert y.id == 41 and g.ops[-1].id == 8 and g.finalize().inputs == (x,)


def test_tensor_of_unknown_id_becomes_an_input() -> None:
    g = og.Graph()
    y = g.add_op("Abs", lt(0, name="x"))
    assert y.id == 1 and [t.name for t in g.finalize().inputs] == ["x"]


@pytest.mark.parametrize("kind", [None, 3, ["Abs"], b"Abs"], ids=repr)
def test_op_kind_must_be_a_string(kind: Any) -> None:
    g = og.Graph()
    with pytest.raises(OpGraphError):
        g.add_op(kind, g.input("x"))
    with pytest.raises(InvalidArguments):
        og.Op(0, kind)


def test_op_arguments_are_checked() -> None:
    for call in (
        lambda: og.Op(-1, "Abs"),
        lambda: og.Op(True, "Abs"),
        lambda: og.Op(0, "Abs", name=3),  # type: ignore[arg-type]
        lambda: og.Op(0, "Abs", inputs=[0]),  # type: ignore[list-item]
        lambda: og.Op(0, "Abs").add_output(None),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArguments):
            call()
    assert og.Op(np.int64(3), "Abs", inputs=lt(0)).inputs == (lt(0),)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [3, 10**30])
def test_too_many_outputs_are_refused_before_creation(count: int) -> None:
    g = og.Graph()
    with pytest.raises(InvalidGraphOp, match="takes 1 outputs"):
        g.add_op("Abs", g.input("x"), outputs=count)


def test_graph_accepts_an_engine_for_its_kind() -> None:
    assert og.Graph(og.Engine("cpu")).engine == "cpu" and og.Graph(og.Engine("cpu")) == og.Graph()
    for wrong in (None, [], "gpu", og.Stream(og.Engine())):
        with pytest.raises(InvalidArguments, match="unknown engine kind"):
            og.Graph(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [[], 3, None])
def test_attribute_name_must_be_a_string(name: Any) -> None:
    op = og.Op(0, "Elu", [lt(0)], [lt(1)])
    with pytest.raises(InvalidArguments, match="is no name of an attribute"):
        op.set_attr(name, 1.0)
    with pytest.raises(InvalidArguments, match="is not set"):
        op.attr(name)
    assert op.attrs == {}


# -- constants ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_number_takes_its_operands_dtype_and_is_rounded_once(dtype: str) -> None:
    g = og.Graph()
    value = 1 + 2**-8 + 2**-11 + 2**-24 + 2**-40
    g.add_op("Add", g.input("x", dtype), g.constant("a", value))
    (c,) = g.constants
    numpy = dtypes.get(dtype).numpy
    assert c.dtype == dtype and c.data is not None and c.data.dtype == numpy
    around = [float(c.data.view(f"i{numpy.itemsize}").__add__(d).view(numpy)) for d in (-1, 0, 1)]
    assert min(around, key=lambda v: abs(v - value)) == around[1]


def test_bf16_constants_are_not_rounded_through_f32() -> None:
    g = og.Graph()
    g.add_op("Add", g.input("x", "bf16"), 1 + 2**-8 + 2**-40)  # just above the middle of two bf16 numbers
    assert float(g.constants[0].data[()]) == 1 + 2**-7  # type: ignore[index]


@pytest.mark.parametrize(("dtype", "value"), [("s8", 127), ("u8", 255), ("s64", 2**63 - 1), ("s32", -5.0)])
def test_whole_number_takes_an_integer_operands_dtype(dtype: str, value: float) -> None:
    g = og.Graph()
    g.add_op("Add", g.input("x", dtype), value)
    assert g.constants[0].data == value


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("s8", 128), ("u8", -1), ("s32", 0.5), ("s64", 2**63), ("s64", math.nan), ("s32", math.inf), ("s64", 10**400)],
    ids=lambda v: str(v)[:8],
)
def test_number_outside_the_integer_dtype_is_refused(dtype: str, value: float) -> None:
    g = og.Graph()
    x = g.input("x", dtype)
    with pytest.raises(InvalidDataType, match=f"is no {dtype}"):
        g.add_op("Add", x, value)


def test_too_large_number_becomes_infinite() -> None:
    g = og.Graph()
    g.add_op("Add", g.input("x", "f16"), 1e6)
    g.add_op("Add", g.input("y", "f64"), 10**400)
    assert [float(c.data[()]) for c in g.constants] == [math.inf, math.inf]  # type: ignore[index]


def test_constant_used_with_two_dtypes_is_refused() -> None:
    g = og.Graph()
    a = g.constant("a", 1.5)
    g.add_op("Add", g.input("x", "f32"), a)
    g.add_op("Multiply", g.input("z", "f32"), a)
    with pytest.raises(InvalidDataType, match="elsewhere"):
        g.add_op("Add", g.input("y", "f16"), a)


def test_constant_in_select_takes_the_value_dtype() -> None:
    g = og.Graph()
    g.add_op("Select", g.input("c", "boolean"), g.input("x", "f16"), 0.5)
    assert g.constants[0].dtype == "f16"


def test_number_without_typed_operands_is_f32() -> None:
    g = og.Graph()
    g.output(g.constant("c", 1.5))
    g.add_op("Wildcard", 2.5)
    assert [t.dtype for t in g.finalize().constants] == ["f32", "f32"]


def test_number_in_a_wildcard_takes_its_neighbours_dtype() -> None:
    g = og.Graph()
    g.add_op("Wildcard", g.input("x", "bf16"), 2.5)
    assert g.constants[0].dtype == "bf16"


def test_constants_are_neither_ops_nor_partitions() -> None:
    g = og.Graph()
    y = g.add_op("Add", g.input("x", shape=(3,)), g.constant("c", np.ones(3, np.float32)), name="y")
    assert len(g) == 1 and g.outputs == (y,) and [t.name for t in g.inputs] == ["x"]
    (p,) = g.finalize().get_partitions()
    assert [t.name for t in p.input_ports] == ["x"] and [t.name for t in p.constants] == ["c"]


def test_an_array_keeps_its_dtype_and_is_copied_if_writable() -> None:
    g = og.Graph()
    array = np.array([1, 2], ml_dtypes.bfloat16)
    c = g.constant("c", array)
    array[0] = 5
    assert c.dtype == "bf16" and c.data is not None and float(c.data[0]) == 1
    assert g.constant("d", [1.0, 2.0]).dtype == "f64"
    assert g.constant("e", np.float32(1)).dtype == "f32"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [([1.5], "s8"), ([300], "u8"), ([2], "boolean"), (9, "s4"), (-1, "u4"), ([math.nan], "s32"), ("a", "f32"),
     ([None], "f32"), (1j, "f32")],
    ids=str,
)  # fmt: skip
def test_values_outside_the_stated_dtype_are_refused(value: Any, dtype: str) -> None:
    g = og.Graph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidDataType):
            g.constant("c", value, dtype)
    assert g.constants == ()


@pytest.mark.parametrize(
    "value", [np.zeros(2, ">f4"), np.zeros(2, complex), np.zeros(2, np.uint16), "text", None, [[1], [1, 2]], object()],
    ids=lambda v: str(v)[:12],
)  # fmt: skip
def test_constants_of_unknown_dtype_are_refused(value: Any) -> None:
    g = og.Graph()
    with pytest.raises((InvalidDataType, InvalidArguments)):
        g.constant("c", value)
    with pytest.raises(OpGraphError):
        g.add_op("Abs", value)
    assert g.constants == () and len(g) == 0


# -- inputs and outputs ---------------------------------------------------------------------------------------------


def test_inputs_and_outputs_keep_the_order_of_declaration() -> None:
    g = og.Graph()
    b, a = g.input("b"), g.input("a")
    y = g.add_op("Add", a, b, name="y")
    z = g.add_op("Abs", y, name="z")
    g.add_op("Exp", y, name="w")
    g.output(y)
    assert [t.name for t in g.inputs] == ["b", "a"]
    assert [t.name for t in g.outputs] == ["y", "z", "w"] == [t.name for t in g.finalize().outputs]
    assert z in g.outputs


def test_unread_input_stays_an_input() -> None:
    g = og.Graph()
    g.input("unused")
    g.add_op("Abs", g.input("x"), name="y")
    assert [t.name for t in g.finalize().inputs] == ["unused", "x"] and [t.name for t in g.outputs] == ["y"]


def test_output_appends_and_set_outputs_replaces() -> None:
    g = og.Graph()
    x = g.input("x")
    y = g.add_op("Abs", x, name="y")
    g.add_op("Exp", y, name="z")
    g.output(x)
    g.output(y)
    assert [t.name for t in g.outputs] == ["x", "y", "z"]
    g.set_outputs(iter([y, x]))
    assert [t.name for t in g.outputs] == ["y", "x"] == [t.name for t in g.finalize().outputs]


def test_end_marks_an_output_and_is_in_no_partition() -> None:
    g = og.Graph()
    y = g.add_op("Abs", g.input("x", shape=(2,)), name="y")
    g.add_op("Exp", y, name="z")
    g.add_op("End", y)
    assert [t.name for t in g.finalize().outputs] == ["z", "y"]
    assert [op.kind for p in g.get_partitions() for op in p.ops] == ["Abs", "Exp"]


def test_an_output_may_be_named_by_its_id_alone() -> None:
    g = og.Graph()
    x = og.LogicalTensor(0, "f32", (2, None), name="x")
    g.add_op(og.Op(0, "Abs", [x], [og.LogicalTensor(1, "f32", (2, 3))]))
    g.add_op(og.Op(1, "Exp", [og.LogicalTensor(1, "f32", (2, 3))], [og.LogicalTensor(2, "f32", (2, 3))]))
    g.output(og.LogicalTensor(1, "undef", None), og.LogicalTensor(0, "f32", (None, 3)))
    assert [t.id for t in g.finalize().outputs] == [1, 0, 2]


def test_marking_an_output_does_not_rename_it() -> None:
    g = og.Graph()
    y = g.add_op("Abs", g.input("x"))
    for mark in (g.output, lambda t: g.set_outputs([t])):
        with pytest.raises(InvalidGraph, match=r'"y" .* is not tensor 1'):
            mark(y.with_(name="y"))
    assert [t.name for t in g.outputs] == [None]


def test_inputs_and_constants_may_be_outputs_without_duplicates() -> None:
    g = og.Graph()
    x, c = g.input("x"), g.constant("c", 1.0, "f32")
    g.output(x, c, x)
    assert [t.name for t in g.finalize().outputs] == ["x", "c"]


def test_an_empty_graph_finalizes() -> None:
    g = og.Graph().finalize()
    assert (g.inputs, g.outputs, g.ops, g.get_partitions()) == ((), (), (), [])


# -- a failed call does not change the graph ------------------------------------------------------------------------


def base() -> og.Graph:
    g = og.Graph()
    x = g.input("x", shape=(2, 3))
    g.constant("c", 1.5)
    g.add_op("Abs", x, name="y")
    return g


def abs_of(*ids: int) -> og.Op:
    return og.Op(9, "Abs", [lt(ids[0])], [lt(i) for i in ids[1:]])


FAILURES: list[tuple[str, type[OpGraphError], Callable[[og.Graph], object]]] = [
    ("two inputs of one name", InvalidGraph, lambda g: g.input("x")),
    ("negative dimension", InvalidArguments, lambda g: g.input("n", shape=(-1,))),
    ("bool dimension", InvalidArguments, lambda g: g.input("n", shape=(True,))),
    ("shape that is no sequence", InvalidArguments, lambda g: g.input("n", shape=4)),  # type: ignore[arg-type]
    ("no name", InvalidArguments, lambda g: g.input(None)),  # type: ignore[arg-type]
    ("unknown dtype", InvalidDataType, lambda g: g.input("n", "float")),
    ("duplicate op id", InvalidGraph, lambda g: g.add_op(og.Op(0, "Abs", [lt(0, name="x")], [lt(9)]))),
    ("two producers", InvalidGraph, lambda g: g.add_op(abs_of(0, 2))),
    ("one output twice", InvalidGraph, lambda g: g.add_op(og.Op(9, "Wildcard", [], [lt(9), lt(9)]))),
    ("producer of an input", InvalidGraph, lambda g: g.add_op(abs_of(9, 0))),
    ("producer of a constant", InvalidGraph, lambda g: g.add_op(abs_of(0, 1))),
    ("output of unknown id", InvalidGraph, lambda g: g.output(g.ops[0].outputs[0], lt(99))),
    ("output of another graph", InvalidGraph, lambda g: g.output(lt(0, name="other"))),
    ("output that is no tensor", InvalidArguments, lambda g: g.output(0)),  # type: ignore[arg-type]
    ("set_outputs of unknown id", InvalidGraph, lambda g: g.set_outputs([g.inputs[0], lt(99)])),
    ("output of another dtype", InvalidGraph, lambda g: g.output(g.ops[0].outputs[0].with_(dtype="f16"))),
    ("output of other sizes", InvalidGraph, lambda g: g.output(g.ops[0].outputs[0].with_(dims=(2, 4)))),
    ("tensor of another graph", InvalidGraph, lambda g: g.add_op("Abs", lt(0, (7,), name="z"))),
    ("unknown attribute", InvalidGraphOp, lambda g: g.add_op("Abs", g.inputs[0], alpha=1.0)),
    ("missing attribute", InvalidGraphOp, lambda g: g.add_op("Elu", g.inputs[0])),
    ("broadcast", InvalidShape, lambda g: g.add_op("Add", g.inputs[0], lt(50, (4,)))),
    ("no broadcast", InvalidShape, lambda g: g.add_op("Add", g.inputs[0], lt(50, (3,)), auto_broadcast="none")),
    ("dtype", InvalidDataType, lambda g: g.add_op("Add", g.inputs[0], lt(50, (3,), "s32"))),
    ("unknown dtype of an operand", InvalidDataType, lambda g: g.add_op("Abs", lt(50, (3,), "undef"))),
    ("output dtype not stated", InvalidDataType, lambda g: g.add_op("TypeCast", g.inputs[0])),
    ("count", InvalidGraphOp, lambda g: g.add_op("Wildcard", outputs=-1)),
    ("count of a fixed kind", InvalidGraphOp, lambda g: g.add_op("Abs", g.inputs[0], outputs=2)),
    ("an Op and more", InvalidArguments, lambda g: g.add_op(abs_of(0, 9), name="n")),
    ("an Op and a count", InvalidArguments, lambda g: g.add_op(abs_of(0, 9), outputs=1)),
    ("constant", InvalidDataType, lambda g: g.constant("d", [1.5], "s8")),
    ("op on a constant number", InvalidDataType, lambda g: g.add_op("Add", lt(60, (), "s8"), 1.5)),
]


@pytest.mark.parametrize(("error", "call"), [f[1:] for f in FAILURES], ids=[f[0] for f in FAILURES])
def test_failed_call_leaves_the_graph_unchanged(error: type[OpGraphError], call: Callable[[og.Graph], object]) -> None:
    g = base()
    before = (str(g), g.inputs, g.outputs, g.constants, g.ops, g._next_tensor, g._next_op)
    with pytest.raises(error):
        call(g)
    assert (str(g), g.inputs, g.outputs, g.constants, g.ops, g._next_tensor, g._next_op) == before
    assert not g.is_finalized
    assert g.add_op("Exp", g.inputs[0], name="still").dims == (2, 3)
    assert g.finalize().is_finalized


def two_mentions(*mentions: og.LogicalTensor) -> og.Graph:
    g = og.Graph()
    for i, mention in enumerate(mentions):
        g.add_op(og.Op(i, "Abs", [mention], [lt(10 + i, None, mention.dtype)]))
    return g


BROKEN: list[tuple[str, type[OpGraphError], Callable[[], og.Graph]]] = [
    ("dims", InvalidGraph, lambda: two_mentions(lt(0), lt(0, (2,)))),
    ("dtype", InvalidGraph, lambda: two_mentions(lt(0), lt(0, dtype="f16"))),
    ("layout", InvalidGraph, lambda: two_mentions(lt(0), lt(0, layout="any"))),
    ("strides", InvalidGraph, lambda: two_mentions(lt(0), lt(0, strides=(1, 2)))),
    ("property", InvalidGraph, lambda: two_mentions(lt(0), lt(0, property="constant"))),
    ("name", InvalidGraph, lambda: two_mentions(lt(0, name="a"), lt(0, name="b"))),
    ("data", InvalidGraph, lambda: two_mentions(
        lt(0, (), data=np.array(1, np.float32)), lt(0, (), data=np.array(2, np.float32)))),
    ("input names", InvalidGraph, lambda: two_mentions(lt(0, name="a"), lt(1, name="a"))),
    ("shape", InvalidShape, lambda: _with(og.Op(0, "Abs", [lt(0)], [lt(1, (3, 2))]))),
    ("broadcast", InvalidShape, lambda: _with(og.Op(0, "Add", [lt(0), lt(1, (4, 5))], [lt(2, None)]))),
    ("cycle", InvalidGraph, lambda: _with(og.Op(0, "Abs", [lt(0)], [lt(1)]), og.Op(1, "Abs", [lt(1)], [lt(0)]))),
    ("own output", InvalidGraph, lambda: _with(og.Op(0, "Abs", [lt(0)], [lt(0)]))),
    ("cycle beside a sound part", InvalidGraph, lambda: _with(
        og.Op(5, "Abs", [lt(5)], [lt(6)]), og.Op(0, "Abs", [lt(0)], [lt(1)]), og.Op(1, "Abs", [lt(1)], [lt(0)]))),
]  # fmt: skip


def _with(*ops: og.Op) -> og.Graph:
    g = og.Graph()
    for op in ops:
        g.add_op(op)
    return g


@pytest.mark.parametrize(("error", "make"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_failed_finalize_leaves_the_graph_open(error: type[OpGraphError], make: Callable[[], og.Graph]) -> None:
    g = make()
    before = (g.inputs, g.outputs, g.ops)
    for _ in range(2):
        with pytest.raises(error) as caught:
            g.finalize()
        assert caught.value.fix
    assert not g.is_finalized and (g.inputs, g.outputs, g.ops) == before
    g.add_op("Abs", g.input("still open"))


def test_explicit_row_major_strides_match_omitted_strides() -> None:
    assert two_mentions(lt(0), lt(0, strides=(3, 1))).finalize().is_finalized


def test_name_equal_to_an_automatic_name_is_refused() -> None:
    g = og.Graph()
    x = g.input("x", shape=(2,))
    y = g.add_op("Exp", x)
    g.add_op("Sin", x, name=f"t{y.id}")
    with pytest.raises(InvalidGraph, match=f"two outputs are called 't{y.id}'"):
        g.finalize()
    g = og.Graph()
    g.add_op(og.Op(0, "Add", [g.input("t5"), og.LogicalTensor(5, "f32", ())], [og.LogicalTensor(6, "f32", ())]))
    with pytest.raises(InvalidGraph, match="two inputs are called 't5'"):
        g.finalize()


def test_finalized_flag_is_set_after_all_tables() -> None:
    class Watched(og.Graph):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_order" and value is not None:  # from here on other threads treat it as finalized
                seen.append((self._outputs, self._tables.tensors[y.id].dims, self.consumers(x.id)))
            super().__setattr__(name, value)

    seen: list[Any] = []
    g = Watched()
    x, y = lt(0), og.LogicalTensor(1, "f32", None)
    g.add_op(og.Op(0, "Exp", [x], [y]))
    g.finalize()
    assert seen == [((1,), x.dims, list(g.ops))]


def test_two_outputs_with_one_name_are_refused() -> None:
    g = og.Graph()
    x = g.input("x")
    g.add_op("Abs", x, name="y")
    g.add_op("Exp", x, name="y")
    with pytest.raises(InvalidGraph, match="two outputs are called 'y'"):
        g.finalize()


def test_deep_graph_does_not_overflow_the_stack() -> None:
    g = og.Graph()
    y = g.input("x", shape=(2,))
    for _ in range(20_000):
        y = g.add_op("Abs", y)
    assert len(g.finalize().ops) == 20_000 and og.parse(str(g)) == g


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.int32, np.uint32])
@pytest.mark.parametrize("dtype", ["bf16", "f8_e5m2"])
def test_large_integers_are_rounded_once(kind: Any, dtype: str) -> None:
    # Halfway between two numbers of the dtype, one more and one less; by way of a float all three would be halfway.
    bits = {"bf16": 8, "f8_e5m2": 3}[dtype]
    places = range(1, min(np.iinfo(kind).bits - bits, 62 - bits) if dtype == "bf16" else 13)
    low = [(2**bits - 2) << place for place in places]
    numbers = [n + (1 << place >> 1) + off for n, place in zip(low, places, strict=True) for off in (-1, 0, 1)]
    want = [n + (off << place) for n, place in zip(low, places, strict=True) for off in (0, 0, 1)]
    for sign in (1, -1) if np.iinfo(kind).min else (1,):
        made = og.Graph().constant("k", np.array([sign * n for n in numbers], kind), dtype=dtype)
        assert made.data is not None
        exact = [place > 1 for place in places for _ in range(3)]  # there the neighbours are numbers of the dtype
        got = made.data.astype(np.float64).tolist()
        assert [g for g, e in zip(got, exact, strict=True) if e] == [
            sign * n for n, e in zip(want, exact, strict=True) if e
        ]
