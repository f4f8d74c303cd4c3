"""A mistake in a record raises when it is defined; a mistake in a call raises in add_op, in three lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph import errors
from opgraph.ir.opdef import Attr, Onnx, OpDef, Port, all_ops, register
from opgraph.ir.opdef_checks import find_undefined_kind
from opgraph.ir.schema import f32
from opgraph.ops.families import broadcast_rule

GOOD: dict[str, Any] = {
    "kind": "Sample",
    "doc": "y = alpha x + b.",
    "family": "pointwise",
    "inputs": (Port(name="src"), Port(name="other", optional=True)),
    "outputs": (Port(name="dst"),),
    "attrs": (Attr(name="alpha", type="f32", default=1.0),),
    "types": {"T": ("f32",)},
    "infer": broadcast_rule,
    "reference": lambda x: x,
    "expression": "og::mul({src}, {alpha})",
    "torch": lambda t, x: x,
    "onnx": "none: a sample",
}
DATA_FORMAT = Attr(name="data_format", type="string", default="NXC", choices=("NXC", "NCX"))


def test_sample_record_is_valid() -> None:
    OpDef(**GOOD)


def test_formula_naming_an_unknown_op_is_found() -> None:
    OpDef(**{**GOOD, "decomposition": "Multiply(src, Sigmod(src))"})
    kinds = {record.kind for record in all_ops()}
    assert find_undefined_kind(kinds) == "Sample: a formula names Sigmod, which is no op"
    assert find_undefined_kind({*kinds, "Sigmod"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": (Port(name="src"), Port(name="src"))}, "a name is used twice"),
        ({"inputs": (Port(name="src"), Port(name="alpha"))}, "a name is used twice"),
        ({"inputs": (Port(name="src", type="U"),)}, "port src has unknown type 'U'"),
        ({"types": {"T": ("f33",)}}, "unknown dtype"),
        ({"inputs": (Port(name="other", optional=True), Port(name="src"))}, "optional and variadic inputs come last"),
        ({"inputs": (Port(name="more", variadic=True), Port(name="src"))}, "optional and variadic inputs come last"),
        ({"domain": ((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))}, "domain"),
        ({"domain": ((2.0, 1.0),)}, "domain"),
        ({"channel_inputs": (5,), "attrs": (DATA_FORMAT,)}, "channel_inputs"),
        ({"channel_inputs": (1,)}, "need the attribute data_format"),
        ({"index_of": "axis"}, "index_of names 'axis'"),
        ({"inputs": (Port(name="src"),), "commutative": True}, "two inputs"),
        ({"reference": None}, "needs reference"),
        ({"expression": None}, "needs expression"),
        ({"torch": None}, "needs torch"),
        ({"onnx": ()}, "or the reason why there is none"),
        ({"onnx": (Onnx(op_type="X", since=1, attrs={"beta": "beta"}),)}, "unknown attributes: beta"),
        ({"onnx": (Onnx(op_type="X", since=1, when={"gamma": 1.0}),)}, "unknown attributes: gamma"),
        ({"onnx": (Onnx(op_type="X", since=1, inputs=("src", "other|$delta")),)}, "unknown attributes: delta"),
        ({"onnx": (Onnx(op_type="X", since=1, inputs=("source",)),)}, "unknown inputs"),
        ({"onnx": (Onnx(op_type="X", since=1, scalars=("bound",)),)}, "unknown inputs"),
        ({"onnx": (Onnx(op_type="X", since=1, dtypes=("int",)),)}, "unknown dtypes"),
        ({"decomposition": "Multiply(src, factor)"}, "names factor"),
        ({"decomposition": "Multiply(src, $beta)"}, r"names \$beta"),
        ({"decomposition": "Elu(src, alpha=$beta)"}, r"names \$beta"),
        ({"decomposition": "Multiply(src, other)"}, "names other"),  # it is optional
    ],
)
def test_invalid_record_fails_at_definition(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpDef(**{**GOOD, **change})


@pytest.mark.parametrize("text", ["og::mul({src}, {beta})", "og::mul({source}, {alpha})", "og::add({src}, {other})"])
def test_expression_with_an_unknown_name_fails_at_definition(text: str) -> None:
    with pytest.raises(KeyError):
        OpDef(**{**GOOD, "expression": text})


@pytest.mark.parametrize("text", ["{src} * {alpha}", "og::mul(og::abs({src}), {alpha})", "mul({src}, {alpha})"])
def test_expression_other_than_one_call_fails_at_definition(text: str) -> None:
    with pytest.raises(ValueError, match="no call of one function"):
        OpDef(**{**GOOD, "expression": text})


def test_unreadable_decomposition_fails_at_definition() -> None:
    with pytest.raises(errors.InvalidArguments, match="not closed"):
        OpDef(**{**GOOD, "decomposition": "Multiply(src, src"})


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "f64"},
        {"type": "f32", "default": "one"},
        {"type": "f32", "default": 1},
        {"type": "s64", "default": True},
        {"type": "bool", "default": 1},
        {"type": "string", "default": "a", "choices": ("b", "c")},
    ],
)
def test_invalid_attribute_fails_at_definition(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="attribute a"):
        Attr(name="a", **fields)


def test_kind_may_be_defined_only_once() -> None:
    with pytest.raises(ValueError, match="defined twice"):
        register(OpDef(**{**GOOD, "kind": "Sigmoid"}))


@pytest.mark.parametrize("record", [r for r in all_ops() if r.is_pointwise], ids=lambda r: r.kind)
def test_record_has_doc_source_and_cost(record: OpDef) -> None:
    assert record.doc.endswith(".")
    assert record.source
    assert record.cost >= 1
    assert record.kind[0].isupper() and record.kind.isalnum()


# -- calls ------------------------------------------------------------------------------------------------------------


def graph() -> tuple[og.Graph, Any, Any, Any, Any]:
    g = og.Graph()
    return (
        g,
        g.input("x", shape=(2, 3)),
        g.input("z", shape=(2, 4)),
        g.input("i", "s32", (2, 3)),
        g.input("h", "f16", (2, 3)),
    )


BAD_CALLS: list[tuple[str, Callable[[og.Graph, Any, Any, Any, Any], Any], type[Exception], str, str, str]] = [
    (
        "kind",
        lambda g, x, z, i, h: g.add_op("Sigmod", x),
        errors.InvalidGraphOp,
        "unknown op kind 'Sigmod'",
        'Sigmod "Sigmod_0"',
        "did you mean Sigmoid",
    ),
    (
        "far kind",
        lambda g, x, z, i, h: g.add_op("Qqqqqqq", x),
        errors.InvalidGraphOp,
        "unknown op kind",
        "Qqqqqqq",
        "`opgraph ops` lists the kinds",
    ),
    (
        "unknown attribute",
        lambda g, x, z, i, h: g.add_op("Elu", x, beta=1.0),
        errors.InvalidGraphOp,
        "Elu has no attribute 'beta'",
        "Elu",
        "its attributes are alpha",
    ),
    (
        "no attributes",
        lambda g, x, z, i, h: g.add_op("Exp", x, beta=1.0),
        errors.InvalidGraphOp,
        "Exp has no attribute 'beta'",
        "Exp",
        "it takes no attributes",
    ),
    (
        "missing attribute",
        lambda g, x, z, i, h: g.add_op("Elu", x),
        errors.InvalidGraphOp,
        "Elu needs attribute 'alpha'",
        "Elu",
        "set alpha (f32)",
    ),
    (
        "attribute type",
        lambda g, x, z, i, h: g.add_op("Elu", x, alpha="1"),
        errors.InvalidGraphOp,
        "attribute alpha='1' is not f32",
        "Elu",
        "give a value of type f32",
    ),
    (
        "bool for f32",
        lambda g, x, z, i, h: g.add_op("Elu", x, alpha=True),
        errors.InvalidGraphOp,
        "attribute alpha=True is not f32",
        "Elu",
        "give a value of type f32",
    ),
    (
        "int for bool",
        lambda g, x, z, i, h: g.add_op("IsInf", x, detect_negative=1),
        errors.InvalidGraphOp,
        "attribute detect_negative=1 is not bool",
        "IsInf",
        "give a value of type bool",
    ),
    (
        "choice",
        lambda g, x, z, i, h: g.add_op("GELU", x, mode="erf"),
        errors.InvalidGraphOp,
        "attribute mode='erf' is not a choice",
        "GELU",
        "use one of gelu_erf, gelu_tanh",
    ),
    (
        "too few inputs",
        lambda g, x, z, i, h: g.add_op("Add", x),
        errors.InvalidGraphOp,
        "Add takes 2 inputs, got 1",
        "Add",
        "its inputs are: src_0, src_1",
    ),
    (
        "too many inputs",
        lambda g, x, z, i, h: g.add_op("Clamp", x, x, x, x),
        errors.InvalidGraphOp,
        "Clamp takes 1 to 3 inputs, got 4",
        "Clamp",
        "its inputs are: src, low, high",
    ),
    (
        "not a tensor",
        lambda g, x, z, i, h: g.add_op("Exp", "x"),
        errors.InvalidGraphOp,
        "an input is str",
        "Exp",
        "pass LogicalTensors or numbers",
    ),
    (
        "dtype",
        lambda g, x, z, i, h: g.add_op("Exp", i),
        errors.InvalidDataType,
        "Exp does not take s32 as src",
        "i s32[2,3]",
        "use one of f64, f32, bf16, f16",
    ),
    (
        "one dtype",
        lambda g, x, z, i, h: g.add_op("Maximum", x, h),
        errors.InvalidDataType,
        "Maximum needs one dtype, got f32 and f16 (as src_1)",
        "x f32[2,3], h f16[2,3]",
        "insert a TypeCast",
    ),
    (
        "dtype mix",
        lambda g, x, z, i, h: g.add_op("Add", x, i),
        errors.InvalidDataType,
        "dtypes f32 and s32 do not mix",
        "x f32[2,3], i s32[2,3]",
        "insert a TypeCast",
    ),
    (
        "stated dtype mix",
        lambda g, x, z, i, h: g.add_op("Add", x, x, dtype="s32"),
        errors.InvalidDataType,
        "dtypes f32 and s32 do not mix",
        "Add",
        "insert a TypeCast",
    ),
    (
        "cast without a dtype",
        lambda g, x, z, i, h: g.add_op("TypeCast", x),
        errors.InvalidDataType,
        "the dtype of output dst is not stated",
        "TypeCast",
        'give it: dtype="f32"',
    ),
    (
        "whole numbers",
        lambda g, x, z, i, h: g.add_op("Add", i, 1.5),
        errors.InvalidDataType,
        "the constant 1.5 is no s32",
        "tensor",
        "insert a TypeCast",
    ),
    (
        "constants alone",
        lambda g, x, z, i, h: g.add_op("BitwiseAnd", 1, 2),
        errors.InvalidDataType,
        "BitwiseAnd does not take f32",
        "BitwiseAnd",
        "use one of s64, s32, s8, u8",
    ),
    (
        "condition",
        lambda g, x, z, i, h: g.add_op("Select", x, x, x),
        errors.InvalidDataType,
        "Select does not take f32 as cond",
        "Select",
        "use one of boolean",
    ),
    (
        "shapes",
        lambda g, x, z, i, h: g.add_op("Add", x, z, name="residual"),
        errors.InvalidShape,
        "shapes [2,3] and [2,4] do not broadcast",
        'Add "residual" (inputs: x f32[2,3], z f32[2,4])',
        "insert a Reshape",
    ),
    (
        "no broadcast",
        lambda g, x, z, i, h: g.add_op("Add", x, 1.0, auto_broadcast="none"),
        errors.InvalidShape,
        "shapes differ and auto_broadcast is none",
        "Add",
        "give inputs of one shape",
    ),
    (
        "bias",
        lambda g, x, z, i, h: g.add_op("BiasAdd", x, g.constant("b", np.zeros(2, "f4"))),
        errors.InvalidShape,
        "src has 3 channels and bias 2 elements",
        "BiasAdd",
        "set data_format",
    ),
    (
        "bias rank",
        lambda g, x, z, i, h: g.add_op("BiasAdd", x, x),
        errors.InvalidShape,
        "bias has 2 dimensions",
        "BiasAdd",
        "or use Add",
    ),
    (
        "no channels",
        lambda g, x, z, i, h: g.add_op("BiasAdd", g.input("v", shape=(3,)), g.constant("b", np.zeros(3, "f4"))),
        errors.InvalidShape,
        "src has 1 dimensions, no channel axis",
        "BiasAdd",
        "give src two dimensions",
    ),
    (
        "slope",
        lambda g, x, z, i, h: g.add_op("PReLU", g.input("v", shape=(3,)), x),
        errors.InvalidShape,
        "slope does not broadcast to the shape of src",
        "PReLU",
        "give src the larger shape",
    ),
    (
        "axis",
        lambda g, x, z, i, h: g.add_op("GenIndex", x, axis=2),
        errors.InvalidShape,
        "there is no axis 2 in 2 dimensions",
        "GenIndex",
        "name an axis of src",
    ),
    (
        "two exponents",
        lambda g, x, z, i, h: g.add_op("Pow", x, x, beta=2.0),
        errors.InvalidGraphOp,
        "Pow got two exponents",
        "Pow",
        "give either beta or a second input",
    ),
    (
        "no exponent",
        lambda g, x, z, i, h: g.add_op("Pow", x),
        errors.InvalidGraphOp,
        "Pow got no exponent",
        "Pow",
        "give either beta or a second input",
    ),
    (
        "float exponent",
        lambda g, x, z, i, h: g.add_op("Pow", i, beta=2.0),
        errors.InvalidGraphOp,
        "Pow takes no beta for s32",
        "Pow",
        "give a second input",
    ),
    (
        "no bound",
        lambda g, x, z, i, h: g.add_op("Clamp", x),
        errors.InvalidGraphOp,
        "Clamp got no bound",
        "Clamp",
        "set min or max",
    ),
    (
        "bound twice",
        lambda g, x, z, i, h: g.add_op("Clamp", x, 0.0, min=0.0),
        errors.InvalidGraphOp,
        "Clamp got min twice",
        "Clamp",
        "give either min or input low",
    ),
    (
        "fractional bound",
        lambda g, x, z, i, h: g.add_op("Clamp", i, max=6.5),
        errors.InvalidGraphOp,
        "Clamp of s32 got max=6.5",
        "Clamp",
        "give a whole number in the range of s32",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "what", "where", "fix"), [b[1:] for b in BAD_CALLS], ids=[b[0] for b in BAD_CALLS]
)
def test_invalid_call_raises_a_three_line_error(
    call: Callable[..., Any], error: type[errors.OpGraphError], what: str, where: str, fix: str
) -> None:
    g, *tensors = graph()
    with pytest.raises(error) as caught:
        call(g, *tensors)
    assert type(caught.value) is error
    lines = str(caught.value).split("\n")
    assert len(lines) == 3
    assert what in lines[0]
    assert lines[1].startswith("  where: ") and where in lines[1]
    assert lines[2].startswith("  fix:   ") and fix in lines[2]
    assert not g.ops


# -- valid calls ------------------------------------------------------------------------------------------------------


def test_scalar_constants_take_their_operands_dtype() -> None:
    g = og.Graph()
    x, c = g.input("x", "f16", (3,)), g.input("c", "boolean", (3,))
    assert g.add_op("Select", c, x, 0.0).dtype == "f16"
    assert g.add_op("Select", c, 1.0, 0.0).dtype == "f32"  # the condition does not affect the branches' dtype
    assert g.add_op("Select", c, 1.0, 0.0, dtype="bf16").dtype == "bf16"
    assert g.add_op("Clamp", x, -1.0, max=1.0).dtype == "f16"
    assert g.add_op("TypeCast", 1.5, dtype="s8").dtype == "s8"


def test_float_attributes_and_defaults_are_f32() -> None:
    g = og.Graph()
    g.add_op("Selu", g.input("x", shape=(3,)))
    g.add_op("Elu", g.input("z", shape=(3,)), alpha=0.1)
    assert g.ops[0].attr("gamma") == f32(1.0507010221482)
    assert g.ops[1].attr("alpha") == float(np.float32(0.1)) != 0.1


def test_mixed_floats_give_the_stated_dtype_or_f32() -> None:
    g = og.Graph()
    x, h, b = (g.input(n, d, (3,)) for n, d in (("x", "f32"), ("h", "f16"), ("b", "bf16")))
    assert g.add_op("Add", x, h).dtype == g.add_op("Multiply", h, b).dtype == "f32"
    assert g.add_op("Add", h, h).dtype == "f16"
    assert g.add_op("Add", x, x, dtype="bf16").dtype == "bf16"


def test_channel_operands_broadcast_along_the_channel_axis() -> None:
    src, bias = np.zeros((2, 3, 4, 5), np.float32), np.arange(3, dtype=np.float32)
    g = og.Graph()
    x, b = g.input("x", shape=src.shape), g.input("b", shape=bias.shape)
    g.add_op("BiasAdd", x, b, name="y", data_format="NCX")
    expected = np.broadcast_to(bias[:, None, None], src.shape)
    np.testing.assert_array_equal(og.evaluate(g, x=src, b=bias), expected)
    record = next(r for r in all_ops() if r.kind == "PReLU")
    assert record.appended_axes(1, [4, 1], {"data_format": "NCX", "per_channel_broadcast": True}) == 2
    assert record.appended_axes(1, [4, 1], {"data_format": "NXC", "per_channel_broadcast": True}) == 0
    assert record.appended_axes(1, [4, 1], {"data_format": "NCX", "per_channel_broadcast": False}) == 0
    assert record.appended_axes(1, [4, 4], {"data_format": "NCX", "per_channel_broadcast": True}) == 0
    assert record.appended_axes(0, [1, 1], {"data_format": "NCX", "per_channel_broadcast": True}) == 0


def test_gen_index_counts_along_its_axis() -> None:
    g = og.Graph()
    g.add_op("GenIndex", g.input("x", shape=(2, 3)), name="y", axis=-1)
    np.testing.assert_array_equal(og.evaluate(g, x=np.zeros((2, 3), "f4")), [[0, 1, 2]] * 2)
    assert g.outputs[0].dtype == "s32"
