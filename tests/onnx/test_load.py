"""ONNX import: the ops that nodes become, and everything else, which is carried exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import ModelError
from opgraph.ir import dtypes
from opgraph.ir.opdef import all_ops
from opgraph.ops import samples

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
reference = pytest.importorskip("onnx.reference")
helper, T = onnx.helper, onnx.TensorProto


def model(
    nodes: list[Any],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: dict[str, tuple[int, list[Any] | None]],
    initializers: dict[str, np.ndarray] | None = None,
    opset: int = 20,
    domains: tuple[str, ...] = (),
    functions: tuple[Any, ...] = (),
) -> Any:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in outputs.items()],
        [onnx.numpy_helper.from_array(a, n) for n, a in (initializers or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(functions))


def one_node(
    op_type: str, count: int = 1, *, element: int = T.FLOAT, opset: int = 20, domain: str = "", **attrs: Any
) -> Any:
    """A model of one node on inputs x0, x1 ... of shape [n, 4]."""
    names = [f"x{i}" for i in range(count)]
    out = T.BOOL if op_type in ("IsInf", "IsNaN") else element
    return model(
        [helper.make_node(op_type, names, ["y"], domain=domain, **attrs)],
        {n: (element, ["n", 4]) for n in names},
        {"y": (out, ["n", 4])},
        opset=opset,
        domains=(domain,) if domain else (),
    )


def printed_as_hashes(graph: og.Graph) -> dict[str, np.ndarray]:
    return {t.name: t.data for t in graph.constants if t.data.size > 64}


def only(graph: og.Graph) -> og.Op:
    assert len(graph) == 1, str(graph)
    return graph.ops[0]


# -- native ops -----------------------------------------------------------------------------------------------------

FORMS = [(r, f) for r in all_ops() for f in (r.onnx if isinstance(r.onnx, tuple) else ()) if r.is_pointwise]


@pytest.mark.parametrize(("record", "form"), FORMS, ids=lambda v: getattr(v, "kind", getattr(v, "op_type", None)))
def test_every_onnx_form_of_every_op_loads_natively_in_every_dtype(record: Any, form: Any) -> None:
    opset = max(form.since, 13)
    if form.until is not None and form.until < 13:
        pytest.skip("older than what is read")
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip("newer than the installed onnx")
    loaded = 0
    for dtype in samples.dtypes_of(record):
        schema = onnx.defs.get_schema(form.op_type, opset)
        ports = [p for p in record.inputs if form.inputs is None or any(p.name in w.split("|") for w in form.inputs)]
        ports = [p for p in ports if not p.optional] or ports[:1]
        elements = [dtypes.get(d).onnx for d in samples.input_dtypes(record, dtype)[: len(ports)]]
        attrs: dict[str, Any] = dict(form.fixed)
        for ours, theirs in form.attrs.items():
            default = record.attr(ours)
            value = form.when.get(ours, default.default if default.default is not None else
                                  default.choices[0] if default.choices else 0.75)  # fmt: skip
            attrs[theirs] = int(value) if isinstance(value, (bool, int)) else value
        if record.is_cast:
            attrs["to"] = T.FLOAT
        extra = [w for w in form.inputs or () if "|$" in w][:1]
        nodes = [
            helper.make_node(form.op_type, [f"x{i}" for i in range(len(ports))] + ["c"] * bool(extra), ["y"], **attrs)
        ]
        constants = {"c": np.asarray(1).astype(dtypes.get(dtype).numpy)} if extra else {}
        made = helper.make_model(
            helper.make_graph(
                nodes,
                "g",
                [helper.make_tensor_value_info(f"x{i}", e, ["n", 4]) for i, e in enumerate(elements)],
                [helper.make_empty_tensor_value_info("y")],
                [onnx.numpy_helper.from_array(a, n) for n, a in constants.items()],
            ),
            opset_imports=[helper.make_opsetid("", opset)],
            ir_version=10,
        )
        try:
            made = onnx.shape_inference.infer_shapes(made, strict_mode=True, check_type=True)
            onnx.checker.check_model(made, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            continue  # not a dtype of this op in this opset
        if form.dtypes is not None and dtype not in form.dtypes:
            continue
        assert schema is not None
        assert only(og.onnx.load(made)).kind == record.kind, (form, dtype)
        loaded += 1
    assert loaded


@pytest.mark.parametrize(
    ("made", "kind", "attrs"),
    [
        (one_node("LeakyRelu"), "LeakyReLU", {"alpha": 0.01}),
        (one_node("HardSigmoid"), "HardSigmoid", {"alpha": 0.2, "beta": 0.5}),
        (one_node("Elu", alpha=0.5), "Elu", {"alpha": 0.5}),
        (one_node("Gelu"), "GELU", {"mode": "gelu_erf"}),
        (one_node("Gelu", approximate="tanh"), "GELU", {"mode": "gelu_tanh"}),
        (one_node("IsInf", detect_negative=0), "IsInf", {"detect_negative": False, "detect_positive": True}),
        (one_node("Mod", 2, fmod=1), "Mod", {"fmod": 1}),
        (one_node("BitShift", 2, element=T.UINT8, direction="LEFT"), "BitShift", {"direction": "LEFT"}),
        (one_node("Cast", to=T.FLOAT), "TypeCast", {}),
        (one_node("Swish", opset=24), "Swish", {"alpha": 1.0}),
        (one_node("Swish", opset=24, alpha=1.5), "Swish", {"alpha": 1.5}),
        (one_node("QuickGelu", domain="com.microsoft"), "Swish", {"alpha": 1.702}),
        (one_node("QuickGelu", domain="com.microsoft", alpha=1.0), "Swish", {"alpha": 1.0}),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_omitted_attributes_have_onnx_defaults(made: Any, kind: str, attrs: dict[str, Any]) -> None:
    op = only(og.onnx.load(made))
    assert op.kind == kind
    for name, value in attrs.items():
        got = op.attrs[name]
        assert got == (float(np.float32(value)) if isinstance(value, float) else value)


@pytest.mark.parametrize("op_type", ["Sum", "Mean", "Max", "Min"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_variadic_ops_become_chains_with_the_same_value(op_type: str, count: int) -> None:
    made = one_node(op_type, count)
    graph = og.onnx.load(made)
    assert all(op.kind != "Wildcard" for op in graph.ops)
    feeds = {f"x{i}": np.random.default_rng(i).normal(size=(3, 4)).astype(np.float32) for i in range(count)}
    expected = reference.ReferenceEvaluator(made).run(None, feeds)[0]
    np.testing.assert_allclose(og.evaluate(graph, feeds), expected, rtol=1e-6)


@pytest.mark.parametrize("low", ["none", "constant", "input"])
@pytest.mark.parametrize("high", ["none", "constant", "input"])
def test_clip_loads_with_absent_constant_and_input_bounds(low: str, high: str) -> None:
    names = {"none": "", "constant": "c_", "input": "i_"}
    bounds = [names[low] and names[low] + "low", names[high] and names[high] + "high"]
    constants = {n: np.float32(v) for n, v in (("c_low", -0.5), ("c_high", 0.5)) if n in bounds}
    inputs = {"x": (T.FLOAT, ["n", 4]), **{n: (T.FLOAT, []) for n in bounds if n.startswith("i_")}}
    made = model([helper.make_node("Clip", ["x", *bounds], ["y"])], inputs, {"y": (T.FLOAT, ["n", 4])}, constants)
    graph = og.onnx.load(made)
    feeds = {"x": np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)}
    feeds.update({n: np.float32(v) for n, v in (("i_low", -0.25), ("i_high", 0.75)) if n in inputs})
    expected = reference.ReferenceEvaluator(made).run(None, feeds)[0]
    assert all(op.kind in ("Clamp", "Minimum", "Identity") for op in graph.ops)
    np.testing.assert_array_equal(og.evaluate(graph, feeds, dtype=None), expected)


@pytest.mark.parametrize(("base", "exponent"), [(T.FLOAT, T.INT64), (T.INT32, T.FLOAT), (T.FLOAT16, T.INT8)])
def test_powers_of_mixed_types_are_computed_in_f64(base: int, exponent: int) -> None:
    kinds = [dtypes.BY_ONNX[t] for t in (base, exponent)]
    made = model(
        [helper.make_node("Pow", ["x", "n"], ["y"])], {"x": (base, [3]), "n": (exponent, [3])}, {"y": (base, [3])}
    )
    graph = og.onnx.load(made)
    assert [op.kind for op in graph.ops] == ["TypeCast", "TypeCast", "Pow", "TypeCast"]
    feeds = {"x": np.asarray([-2, 3, 5]).astype(kinds[0].numpy), "n": np.asarray([3, 2, 0]).astype(kinds[1].numpy)}
    got = og.compile(graph)(feeds)
    assert (got.dtype, got.tolist()) == (kinds[0].numpy, [-8, 9, 1])
    assert og.onnx.load(onnx.load_from_string(_saved(graph))) == graph


def test_cast_like_loads_as_a_cast_to_the_other_operands_dtype() -> None:
    made = model(
        [helper.make_node("CastLike", ["x", "like"], ["y"])],
        {"x": (T.FLOAT, ["n"]), "like": (T.BFLOAT16, [1])},
        {"y": (T.BFLOAT16, ["n"])},
    )
    op = only(og.onnx.load(made))
    assert (op.kind, op.outputs[0].dtype) == ("TypeCast", "bf16")


def test_constant_nodes_and_initializers_load_as_constants() -> None:
    nodes = [
        helper.make_node("Constant", [], ["a"], value_float=1.5),
        helper.make_node("Constant", [], ["b"], value=helper.make_tensor("", T.FLOAT, [4], [1.0, 2, 3, 4])),
        helper.make_node("Add", ["x", "a"], ["xa"]),
        helper.make_node("Add", ["xa", "b"], ["xb"]),
        helper.make_node("Add", ["xb", "c"], ["y"]),
    ]
    made = model(nodes, {"x": (T.FLOAT, ["n", 4])}, {"y": (T.FLOAT, ["n", 4])}, {"c": np.float32([4, 3, 2, 1])})
    graph = og.onnx.load(made)
    assert [op.kind for op in graph.ops] == ["Add"] * 3
    assert [t.name for t in graph.constants] == ["a", "b", "c"]
    assert og.evaluate(graph, x=np.zeros((1, 4), np.float32)).tolist() == [[6.5, 6.5, 6.5, 6.5]]


def test_four_bit_and_float8_constants_keep_their_values() -> None:
    for element, array in ((T.INT4, [-8, 7, 3]), (T.UINT4, [0, 15, 9]), (T.FLOAT8E4M3FN, [0.5, -448.0, 1.0])):
        tensor = helper.make_tensor("w", element, [3], array)
        graph = helper.make_graph(
            [helper.make_node("DequantizeLinear", ["w", "s"], ["y"])],
            "g",
            [helper.make_tensor_value_info("s", T.FLOAT, [])],
            [helper.make_tensor_value_info("y", T.FLOAT, [3])],
            [tensor],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        loaded = og.onnx.load(made)
        assert [float(v) for v in loaded.constants[0].data] == array
        assert og.onnx.load(onnx.load_from_string(_saved(loaded))) == loaded


def _saved(graph: og.Graph) -> bytes:
    from opgraph.onnx.save import to_model

    return bytes(to_model(graph, form="decomposed").SerializeToString())


# -- shapes and ports -----------------------------------------------------------------------------------------------


def test_stated_symbols_are_kept_and_inferred_symbols_are_not() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("NonZero", ["a"], ["places"]),
        helper.make_node("Neg", ["places"], ["y"]),
    ]
    made = model(nodes, {"x": (T.FLOAT, ["batch", "seq + 1"])}, {"y": (T.INT64, [2, None])})
    graph = og.onnx.load(made)
    assert graph.inputs[0].dims == ("batch", "seq + 1")
    assert [op.outputs[0].dims for op in graph.ops] == [("batch", "seq + 1"), (2, None), (2, None)]


def test_inputs_and_outputs_keep_their_order_and_dead_nodes_are_noted() -> None:
    nodes = [helper.make_node("Relu", ["b"], ["z"]), helper.make_node("Neg", ["a"], ["unused"])]
    made = model(nodes, {n: (T.FLOAT, [2]) for n in "acb"}, {"z": (T.FLOAT, [2]), "a": (T.FLOAT, [2])})
    graph = og.onnx.load(made)
    assert [t.name for t in graph.inputs] == ["a", "c", "b"]
    assert [t.name for t in graph.outputs] == ["z", "a"]
    assert any("unused" in note for note in graph.notes)


# -- wildcards ------------------------------------------------------------------------------------------------------


def test_wildcard_keeps_its_node_exactly_in_text_form() -> None:
    from opgraph.runtime.providers.onnx_node import node_of

    attributes = {
        "i": 3, "f": 0.1, "s": "a \"quoted\" text\n", "ints": [1, -2], "floats": [0.1, float("inf")],
        "strings": ["x", "proto:y"], "onnx_op": 7, "empty": helper.make_attribute("empty", [], attr_type=7),
        "t": helper.make_tensor("t", T.INT16, [2], [1, 2]), "raw": b"\xff\xfe",
    }  # fmt: skip
    node = helper.make_node("Foo", ["x", "", "w"], ["y", "", "z"], domain="my", name="n")
    for name, value in attributes.items():
        node.attribute.append(value if isinstance(value, onnx.AttributeProto) else helper.make_attribute(name, value))
    made = model([node], {"x": (T.FLOAT, [2])}, {"y": (T.FLOAT, [2]), "z": (T.FLOAT, [2])},
                 {"w": np.float32([1, 2])}, domains=("my",))  # fmt: skip
    graph = og.onnx.load(made)
    for g in (graph, og.parse(str(graph), constants=printed_as_hashes(graph))):
        assert g == graph
        back = node_of(only(g), {t.id: t.name for t in (*only(g).inputs, *only(g).outputs)})
        back.name = "n"
        assert {a.name: a for a in back.attribute} == {a.name: a for a in node.attribute}
        assert (list(back.input), list(back.output)) == (["x", "", "w"], ["y", "", "z"])
    assert only(graph).attrs["ints"] == (1, -2)
    assert only(graph).attrs["i"] == 3


def test_nodes_with_unsupported_dtypes_are_carried() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["u"], to=T.UINT16),
        helper.make_node("Add", ["u", "c"], ["v"]),
        helper.make_node("Cast", ["v"], ["y"], to=T.FLOAT),
    ]
    made = model(nodes, {"x": (T.FLOAT, ["n"])}, {"y": (T.FLOAT, ["n"])}, {"c": np.uint16([7])})
    graph = og.onnx.load(made)
    assert {op.kind for op in graph.ops} == {"Wildcard"}
    assert graph.ops[-1].inputs[0].dtype == "undef"
    assert [op.attrs["onnx_op"] for op in graph.ops] == ["Cast", "Constant", "Add", "Cast"]
    assert og.compile(graph)(x=np.float32([1, 2])).tolist() == [8, 9]


def test_subgraphs_list_their_captured_values() -> None:
    then = helper.make_graph(
        [helper.make_node("Add", ["x", "c"], ["t"])], "t", [], [helper.make_empty_tensor_value_info("t")]
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["e"])], "e", [], [helper.make_empty_tensor_value_info("e")]
    )
    nodes = [helper.make_node("If", ["b"], ["y"], then_branch=then, else_branch=other)]
    made = model(nodes, {"b": (T.BOOL, []), "x": (T.FLOAT, [2])}, {"y": (T.FLOAT, [2])}, {"c": np.float32([1, 2])})
    graph = og.onnx.load(made)
    assert only(graph).attrs["onnx_captures"] == ("x", "c")
    text = og.parse(str(graph), constants=printed_as_hashes(graph))
    for g in (graph, text):
        run = og.compile(g)
        assert run(b=np.bool_(True), x=np.float32([1, 1])).tolist() == [2, 3]
        assert run(b=np.bool_(False), x=np.float32([1, 1])).tolist() == [1, 1]


def test_nested_subgraphs_capture_only_values_from_the_outer_graph() -> None:
    def branch(nodes: list[Any], out: str) -> Any:
        return helper.make_graph(nodes, out, [], [helper.make_empty_tensor_value_info(out)])

    inner = [branch([helper.make_node(op, ["x", "made"], [op])], op) for op in ("Add", "Mul")]
    outer = branch(
        [
            helper.make_node("Neg", ["x"], ["made"]),
            helper.make_node("If", ["b"], ["o"], then_branch=inner[0], else_branch=inner[1]),
        ],
        "o",
    )
    other = branch([helper.make_node("Identity", ["x"], ["e"])], "e")
    made = model(
        [helper.make_node("If", ["b"], ["y"], then_branch=outer, else_branch=other)],
        {"b": (T.BOOL, []), "x": (T.FLOAT, [2])},
        {"y": (T.FLOAT, [2])},
    )
    graph = og.onnx.load(made)
    assert only(graph).attrs["onnx_captures"] == ("x", "b")
    assert og.compile(graph)(b=np.bool_(True), x=np.float32([1, 2])).tolist() == [0, 0]


# -- functions ------------------------------------------------------------------------------------------------------


def swish_function(body: list[Any], name: str = "Swish", domain: str = "opgraph") -> Any:
    function = helper.make_function(domain, name, ["x"], ["y"], body, [helper.make_opsetid("", 20)])
    function.attribute_proto.append(helper.make_attribute("alpha", 1.0))
    return function


def test_functions_of_other_domains_are_inlined_and_noted() -> None:
    body = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
    made = model(
        [helper.make_node("SiLU", ["a"], ["b"], domain="pkg", name="call")],
        {"a": (T.FLOAT, ["n"])},
        {"b": (T.FLOAT, ["n"])},
        domains=("pkg",),
        functions=(swish_function(body, "SiLU", "pkg"),),
    )
    graph = og.onnx.load(made)
    assert [op.kind for op in graph.ops] == ["Sigmoid", "Multiply"]
    assert any("pkg::SiLU" in note for note in graph.notes)


def test_function_attribute_defaults_hold_through_nested_calls() -> None:
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("pkg", 1)]
    inner = helper.make_function("pkg", "Inner", ["x"], ["y"], [helper.make_node("Elu", ["x"], ["y"])], imports)
    inner.node[0].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="a", type=1))
    inner.attribute_proto.append(helper.make_attribute("a", 0.25))
    outer = helper.make_function(
        "pkg", "Outer", ["x"], ["y"], [helper.make_node("Inner", ["x"], ["y"], domain="pkg")], imports
    )
    made = model(
        [helper.make_node("Outer", ["a"], ["b"], domain="pkg")],
        {"a": (T.FLOAT, ["n"])},
        {"b": (T.FLOAT, ["n"])},
        domains=("pkg",),
        functions=(outer, inner),
    )
    assert only(og.onnx.load(made)).attrs["alpha"] == 0.25


def test_unknown_body_under_an_opgraph_name_is_not_trusted() -> None:
    body = [helper.make_node("Tanh", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
    made = model([helper.make_node("Swish", ["a"], ["b"], domain="opgraph", name="call")], {"a": (T.FLOAT, ["n"])},
                 {"b": (T.FLOAT, ["n"])}, domains=("opgraph",), functions=(swish_function(body),))  # fmt: skip
    assert [op.kind for op in og.onnx.load(made).ops] == ["Tanh", "Multiply"]


def test_opgraph_body_with_other_defaults_is_not_trusted() -> None:
    from opgraph.onnx.save import to_model

    made = to_model(og.parse("graph(x: f32[n,4]) -> (y)\n  y = Swish(x)"), form="function")
    del made.graph.node[0].attribute[:]
    made.functions[0].attribute_proto[0].f = 3.0
    x = np.float64([-1, 0, 1, 2]).reshape(1, 4)
    got = og.evaluate(og.onnx.load(made), x=x.astype(np.float32))
    np.testing.assert_allclose(got, x / (1 + np.exp(-3 * x)), rtol=1e-12)


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_opgraph_function_body_is_recognised(dtype: str) -> None:
    from opgraph.onnx.save import to_model

    graph = og.parse(f"graph(x: {dtype}[n,4]) -> (y)\n  y = Swish(x, alpha=1.5)")
    made = to_model(graph, form="function")
    assert og.onnx.load(made) == graph
    changed = onnx.ModelProto()
    changed.CopyFrom(made)
    next(n for n in changed.functions[0].node if n.op_type in ("Sigmoid", "Exp")).op_type = "Tanh"
    assert all(op.kind != "Swish" for op in og.onnx.load(changed).ops)


# -- kinds of model -------------------------------------------------------------------------------------------------


def test_path_proto_and_onnx_ir_model_load_alike(tmp_path: Path) -> None:
    weights = {"w": np.arange(4096, dtype=np.float32).reshape(64, 64)}
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": (T.FLOAT, ["n", 64])},
                 {"y": (T.FLOAT, ["n", 64])}, weights)  # fmt: skip
    onnx.save(made, tmp_path / "inside.onnx")
    outside = onnx.ModelProto()
    outside.CopyFrom(made)  # writing external data changes the model
    onnx.save(outside, tmp_path / "outside.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    loaded = [
        og.onnx.load(m)
        for m in (made, ir.from_proto(made), ir.load(tmp_path / "outside.onnx"), tmp_path / "inside.onnx",
                  str(tmp_path / "outside.onnx"))
    ]  # fmt: skip
    assert all(g == loaded[0] for g in loaded)
    for g in loaded:
        np.testing.assert_array_equal(g.constants[0].data, weights["w"])


def test_ops_of_old_opsets_load_natively_if_unchanged_and_are_carried_otherwise() -> None:
    assert only(og.onnx.load(one_node("Elu", opset=11))).kind == "Elu"
    old = og.onnx.load(one_node("Clip", opset=6, min=-0.5, max=0.5))
    assert only(old).attrs["onnx_opset"] == 6
    x = np.float32([[-1, 0, 0.25, 1]])
    assert og.compile(old)(x0=x).tolist() == [[-0.5, 0, 0.25, 0.5]]
    assert og.onnx.load(onnx.load_from_string(_saved(old))) == old


@pytest.mark.parametrize("opset", range(13, 27))
def test_opsets_13_to_26_load(opset: int) -> None:
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
    made = model(nodes, {"x": (T.FLOAT, ["n"])}, {"y": (T.FLOAT, ["n"])}, opset=opset)
    graph = og.onnx.load(made)
    assert [op.kind for op in graph.ops] == ["Sigmoid", "Multiply"]


def test_invalid_model_arguments_are_refused() -> None:
    with pytest.raises(og.errors.InvalidArguments, match=r"a list is no model"):
        og.onnx.load([])
    with pytest.raises(ModelError, match="which folder"):
        og.onnx.load(outside_of_nowhere())
    with pytest.raises(ModelError, match="cannot be read"):
        og.onnx.load("no/such/file.onnx")


def outside_of_nowhere() -> Any:
    made = model([helper.make_node("Add", ["x", "c"], ["y"])], {"x": (T.FLOAT, [4])}, {"y": (T.FLOAT, [4])},
                 {"c": np.ones(4, np.float32)})  # fmt: skip
    constant = made.graph.initializer[0]
    constant.ClearField("raw_data")
    constant.data_location = T.EXTERNAL
    constant.external_data.add(key="location", value="data")
    return made


# -- defaults of inputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 4000])
def test_initializer_of_an_input_is_its_default(size: int) -> None:
    value = np.arange(size, dtype=np.float32)
    made = model([helper.make_node("Add", ["x", "c"], ["y"])], {"x": (T.FLOAT, ["n", size]), "c": (T.FLOAT, [size])},
                 {"y": (T.FLOAT, ["n", size])}, {"c": value})  # fmt: skip
    graph = og.onnx.load(made)
    assert [t.name for t in graph.inputs] == ["x", "c"]
    x = np.ones((1, size), np.float32)
    for run in (og.compile(graph), lambda *a, **k: og.evaluate(graph, *a, **k)):
        np.testing.assert_array_equal(run(x=x), x + value)
        np.testing.assert_array_equal(run(x=x, c=2 * value), x + 2 * value)
    with pytest.raises(og.errors.InvalidArguments, match="missing inputs: x"):
        og.compile(graph)(c=value)
    back = onnx.load_from_string(_saved(graph))
    assert [v.name for v in back.graph.input] == ["x", "c"]
    assert back.graph.initializer[0] == made.graph.initializer[0]
    assert og.onnx.load(back).defaults.keys() == {"c"}
    twin = og.onnx.fuse(ir.from_proto(made))
    assert [v.name for v in twin.graph.inputs] == ["x", "c"]
    np.testing.assert_array_equal(twin.graph.initializers["c"].const_value.numpy(), value)


def test_sizes_are_not_inferred_from_an_overridable_default() -> None:
    """A Reshape whose sizes have a default, and a norm without a weight: its ones would have the default's size."""
    from opgraph.onnx.save import to_model

    nodes = [helper.make_node("Reshape", ["a", "shape"], ["r"]), helper.make_node("Mul", ["r", "r"], ["q"]),
             helper.make_node("ReduceMean", ["q", "axes"], ["m"]), helper.make_node("Add", ["m", "e"], ["p"]),
             helper.make_node("Sqrt", ["p"], ["s"]), helper.make_node("Div", ["r", "s"], ["b"])]  # fmt: skip
    numbers = {"shape": np.asarray([4, 3]), "axes": np.asarray([-1]), "e": np.asarray(1e-5, np.float32)}
    made = model(nodes, {"a": (T.FLOAT, [3, 4]), "shape": (T.INT64, [2])}, {"b": (T.FLOAT, [None, None])}, numbers)
    graph = og.onnx.load(made)
    assert graph.defaults.keys() == {"shape"} and graph.outputs[0].dims == (None, None)
    session = pytest.importorskip("onnxruntime").InferenceSession(to_model(graph).SerializeToString())
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    for sizes in ((4, 3), (2, 6), (12, 1)):
        feeds = {"a": a, "shape": np.asarray(sizes)}
        r = a.reshape(sizes).astype(np.float64)
        expected = r / np.sqrt((r * r).mean(-1, keepdims=True) + 1e-5)
        for got in (og.evaluate(graph, feeds), og.compile(graph, device="cpu")(feeds), session.run(None, feeds)[0]):
            np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("node", "taken"),
    [
        (helper.make_node("Sum", ["a", "b", "c"], ["y"]), "y 2"),
        (helper.make_node("Mean", ["a", "b", "c"], ["y"]), "y sum"),
        (helper.make_node("Mean", ["a", "b", "c"], ["y"]), "y count"),
        (helper.make_node("Pow", ["a", "i"], ["y"]), "y base"),
        (helper.make_node("BiasGelu", ["a", "w"], ["y"], domain="com.microsoft"), "y biased"),
        (helper.make_node("Sum", ["a", "b", "y 2"], ["y"]), "y 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inner_values_of_a_decomposed_node_do_not_shadow_model_values(node: Any, taken: str) -> None:
    sizes = {"a": [None, 4], "b": [None, 4], "c": [None, 4], "w": [4]}
    nodes = [helper.make_node("Neg", ["a"], [taken]), node, helper.make_node("Exp", [taken], ["z"])]
    inputs = {**{name: (T.FLOAT, size) for name, size in sizes.items()}, "i": (T.INT64, [None, 4])}
    made = model(nodes, inputs, dict.fromkeys("yz", (T.FLOAT, [None, 4])), domains=("com.microsoft",))
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=[n or 3 for n in size]).astype(np.float32) for name, size in sizes.items()}
    feeds["i"] = rng.integers(0, 4, (3, 4))
    graph = og.onnx.load(made)
    session = pytest.importorskip("onnxruntime").InferenceSession(made.SerializeToString())
    expected = dict(zip("yz", session.run(None, feeds), strict=True))
    for name, got in og.evaluate(graph, feeds).items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-5, atol=1e-6)
