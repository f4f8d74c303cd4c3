"""Nodes with subgraphs and calls of functions: the names visible in them, and the meaning of their bodies elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import Unimplemented

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnx.parser")

from opgraph.onnx.save import to_model  # noqa: E402  # needs onnx

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
#: Both branches of an If.
FEEDS = [{"x": X, "c": np.asarray(c)} for c in (True, False)]


def parsed(body: str, opset: int = 21, *, domains: str = "") -> Any:
    """A model in onnx's text form."""
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}{domains}]>\n{body}')


def run(model: Any, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, feeds)[0]
    return result


@pytest.mark.parametrize("name", ["og_t", "q"])
def test_subgraph_values_may_have_the_names_of_generated_values(name: str) -> None:
    inner = [f"{name}{number}" for number in range(6)] + ["og0_t0", "og1_t1"]
    lines = "\n".join(f"{made} = Exp({read})" for read, made in zip(["s", *inner], inner))
    model = parsed(
        f"""g (float[n,4] x, bool c) => (float[n,4] y) {{
        z = Softmax(x)
        s = Sigmoid(z)
        y = If (c) <then_branch = a () => (float[n,4] t) {{ {lines}\n h = Add({inner[1]}, s) t = Sub(h, z) }},
                    else_branch = b () => (float[n,4] e) {{ e = Neg(s) }}> }}"""
    )
    graph = og.onnx.load(model)
    compiled = og.compile(graph, device="cpu")
    for feeds in FEEDS:
        expected = run(model, feeds)
        np.testing.assert_allclose(compiled(feeds), expected, rtol=1e-5)
        np.testing.assert_allclose(og.evaluate(graph, feeds), expected, rtol=1e-5)


#: A value of the graph, s, and values of bodies with the same name.
SHADOWED = [
    """y = If (c) <
          then_branch = a () => (float[n,4] t) { t = Neg(s) },
          else_branch = b () => (float[n,4] e) {
            e = Loop (three, , x) <body = l (int64 i, bool on, float[n,4] s) => (bool still, float[n,4] r) {
              still = Identity(on) r = Sin(s) }> }>""",
    """y = Loop (three, , x) <body = l (int64 i, bool on, float[n,4] p) => (bool still, float[n,4] r) {
          still = Identity(on)
          q = Scan <num_scan_inputs = 1, body = z (float[4] s) => (float[4] w) { w = Neg(s) }> (p)
          r = Add(q, s) }>""",
]


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("node", SHADOWED)
def test_subgraph_value_may_shadow_an_outer_name(node: str, text: bool) -> None:
    model = parsed(
        f"""g (float[n,4] x, bool c) => (float[n,4] y) <int64 three = {{3}}> {{
        s = Sigmoid(x)
        {node} }}"""
    )
    graph = og.onnx.load(model)
    written = to_model(og.parse(str(graph)) if text else graph, form="decomposed")
    compiled = og.compile(og.onnx.load(written), device="cpu")
    for feeds in FEEDS:
        expected = run(model, feeds)
        np.testing.assert_allclose(run(written, feeds), expected, rtol=1e-5)
        np.testing.assert_allclose(compiled(feeds), expected, rtol=1e-5)


@pytest.mark.parametrize("text", [False, True])
def test_new_values_avoid_names_defined_in_subgraphs(text: bool) -> None:
    model = parsed(
        """g (float[n,4] x, bool c) => (float[n,4] y) {
        z = com.microsoft.QuickGelu <alpha = 1.5> (x)
        y = If (c) <then_branch = a () => (float[n,4] t) { t = Neg(z) }, else_branch = b () => (float[n,4] e) {
            p = Exp(z) q = Abs(z) e = Sub(p, q) }> }""",
        domains=', "com.microsoft" : 1',
    )
    made = {n for node in to_model(og.onnx.load(model), form="decomposed").graph.node for n in node.output}
    new = [*sorted(made - {"x", "y", "z"}), "x.alpha"]
    assert len(new) > 2
    for name in new:  # each of them, defined in a branch
        other = onnx.ModelProto()
        other.CopyFrom(model)
        branch = other.graph.node[1].attribute[1].g
        branch.node[0].output[0] = branch.node[2].input[0] = name
        graph = og.onnx.load(other)
        written = to_model(og.parse(str(graph)) if text else graph, form="decomposed")
        onnx.checker.check_model(written, full_check=True)
        for feeds in FEEDS:
            np.testing.assert_allclose(run(written, feeds), run(model, feeds), rtol=1e-5)


def test_opset_changes_only_if_no_node_of_a_subgraph_changes() -> None:
    body = """g (float[2,3] x, bool c) => (float[2,1] y) {{
        h = Sigmoid(x) m = Mul(x, h)
        y = If (c) <then_branch = a () => (float[2,1] t) {{ t = ReduceMean <axes = [1]> (m) }},
                    else_branch = b () => (float[2,1] e) {{ e = {0}(m) }}> }}"""
    graph = og.onnx.load(parsed(body.format("ReduceMax <axes = [1]> "), 17))
    for arguments in ({"opset": 18}, {"form": "standard"}):
        with pytest.raises(Unimplemented, match="ReduceMean would change on the way to"):
            to_model(graph, **arguments)
    same = parsed(
        """g (float[n,4] x, bool c) => (float[n,4] y) {
        h = Sigmoid(x) m = Mul(x, h)
        y = If (c) <then_branch = a () => (float[n,4] t) { t = Tanh(m) }, else_branch = b () => (float[n,4] e) {
            e = Softmax(m) }> }"""
    )
    made = to_model(og.onnx.load(same), form="standard")  # If itself has a newer definition at 24
    assert [n.op_type for n in made.graph.node] == ["Swish", "If"]
    for feeds in FEEDS:
        np.testing.assert_allclose(run(made, feeds), run(same, feeds), rtol=1e-5)


@pytest.mark.parametrize("passed", ["", "<b = 0.25>"])
def test_attribute_passed_through_a_function_may_be_omitted_by_its_caller(passed: str) -> None:
    """Then the default of the inner function holds, as in onnxruntime."""
    model = parsed(
        f"""g (float[n,4] x) => (float[n,4] y) {{ y = d.Outer {passed} (x) }}
        <domain: "d", opset_import: ["" : 21, "d" : 1]>
        Inner <alpha: float = 0.5> (u) => (v) {{ v = LeakyRelu <alpha: float = @alpha> (u) }}
        <domain: "d", opset_import: ["" : 21, "d" : 1]>
        Outer <b> (u) => (v) {{ v = d.Inner <alpha: float = @b> (u) }}""",
        domains=', "d" : 1',
    )
    graph = og.onnx.load(model)
    assert [(op.kind, op.attrs["alpha"]) for op in graph.ops] == [("LeakyReLU", 0.25 if passed else 0.5)]
    np.testing.assert_allclose(run(to_model(graph, form="decomposed", opset=20), {"x": X}), run(model, {"x": X}))


#: Graphs that are fused in f16 and bf16, where bodies compute in f32, and with f32 values among them.
FOLDED = {
    "f32": "graph(x: f32[n,4], w: f32[4]) -> (y)\n a = Tanh(x)\n b = Add(a, w)\n c = Exp(b)\n y = Multiply(c, a)",
    "read on": "graph(x: f16[n,4]) -> (e, y)\n e = Exp(x)\n a: f32[n,4] = TypeCast(e)\n y = Tanh(a)",
    "numbers": "graph(x: f16[n,4]) -> (y)\n a = Multiply(x, 3.0)\n y = Add(a, x)",
    "swish": "graph(x: f16[n,4]) -> (y)\n a = Multiply(x, x)\n s = Sigmoid(a)\n y = Multiply(a, s)",
    "two types": "graph(x: f16[n,4], w: f32[n,4]) -> (y, z)\n a = Tanh(x)\n s = Sigmoid(a)\n y = Multiply(a, s)\n"
    " t = Sigmoid(w)\n z = Multiply(w, t)",
    "gelu": "graph(x: bf16[n,4]) -> (y)\n a = GELU(x)\n y = Tanh(a)",
}


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize("text", FOLDED.values(), ids=FOLDED)
def test_model_with_functions_is_unchanged_by_load_and_save(text: str, opset: int) -> None:
    """onnx's inliner gives the values and nodes of a body other names at each load."""
    for form in ("decomposed", "auto"):
        model = to_model(og.parse(text), form=form, functions=True, opset=opset)
        assert "opgraph" in {n.domain for n in model.graph.node}
        assert to_model(og.onnx.load(model), form=form, functions=True) == model


def test_fused_16_bit_functions_use_the_f32_form_of_a_unit() -> None:
    """onnxruntime takes longer for a decomposed Gelu, and finds no overload inside a body."""
    for name, op_type in (("gelu", "Gelu"), ("swish", "Swish")):
        model = to_model(og.parse(FOLDED[name]), functions=True)
        called = model.graph.node[0].op_type
        (body,) = (f.node for f in model.functions if f.name == called)
        assert [n.op_type for n in body if n.op_type == op_type] and not any(n.overload for n in body)


def test_function_of_another_opset_is_inlined_if_its_nodes_keep_their_meaning() -> None:
    body = """g (float[n,4] x) => (float[n,4] y) {{ y = d.F (x) }}
        <domain: "d", opset_import: ["" : {1}]>
        F (u) => (v) {{ s = Sigmoid(u) v = {0} }}"""
    model = parsed(body.format("Mul(u, s)", 18), domains=', "d" : 1')
    graph = og.onnx.load(model)
    assert [op.kind for op in graph.ops] == ["Sigmoid", "Multiply"]
    assert to_model(graph, form="decomposed") == model
    np.testing.assert_allclose(run(to_model(graph), {"x": X}), run(model, {"x": X}), rtol=1e-5)
    inner = parsed(
        """g (float[2,3] x, bool c) => (float[2,1] y) { y = d.F (x, c) }
        <domain: "d", opset_import: ["" : 17]>
        F (u, c) => (v) { v = If (c) <then_branch = a () => (t) { t = ReduceMean <axes = [1]> (u) },
                                     else_branch = b () => (e) { e = ReduceMax <axes = [1]> (u) }> }""",
        18,
        domains=', "d" : 1',
    )
    for other in (inner, parsed(body.format("Softmax(s)", 12), domains=', "d" : 1')):
        with pytest.raises(og.errors.OpGraphError, match=r"opset|version"):
            og.onnx.load(other)


def test_opset_is_not_lowered_below_a_nodes_attribute() -> None:
    model = parsed("g (float[n,4] x) => (float[n,4] y) { y = ReduceMean <noop_with_empty_axes = 1> (x) }")
    with pytest.raises(Unimplemented, match="ReduceMean would change on the way to 17"):
        to_model(og.onnx.load(model), opset=17)


def test_fused_partitions_calling_different_bodies_are_separate_functions() -> None:
    graph = og.parse(
        """graph(x: f32[3,3,3], z: f32[3,3,3,3], slope: f32[3]) -> (y, w)
        a = PReLU(x, slope, data_format="NCX", per_channel_broadcast=true)
        y = Exp(a)
        b = PReLU(z, slope, data_format="NCX", per_channel_broadcast=true)
        w = Exp(b)"""
    )
    rng = np.random.default_rng(0)
    feeds = {str(t.name): rng.normal(size=t.get_dims()).astype(np.float32) for t in graph.inputs}
    written = to_model(graph, functions=True)
    assert [node.domain for node in written.graph.node] == ["opgraph"] * 2
    session = ort.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
    for result, expected in zip(session.run(None, feeds), og.evaluate(graph, feeds).values(), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_kept_function_calls_do_not_change_when_others_are_inlined() -> None:
    graph = og.parse(
        """graph(x: f32[2,4], b: f32[4]) -> (y)
        a = BiasAdd(x, b)
        y = Exp(a)"""
    )
    written = to_model(graph, functions=True)
    assert to_model(og.onnx.load(written), functions=True) == written


def test_fused_cast_like_does_not_depend_on_its_type_operand() -> None:
    model = parsed(
        """g (float[n,4] x, float[n,4] z) => (float[n,4] y, float[n,4] w) {
        p = Exp(x)
        r = CastLike(p, q)
        s = Softmax(r)
        y = Sqrt(q)
        t = Add(s, y)
        w = Neg(t) }"""
    )
    model.graph.node.insert(1, onnx.helper.make_node("Abs", ["z"], ["q"]))
    written = to_model(og.onnx.load(model), functions=True)
    assert [node.op_type.split("_")[0] for node in written.graph.node] == ["fused", "Softmax", "fused"]
    assert to_model(og.onnx.load(written), functions=True) == written
    feeds = {"x": X, "z": X[::-1]}
    np.testing.assert_allclose(run(written, feeds), run(model, feeds), rtol=1e-5)


def test_functions_import_their_domain_at_the_models_version() -> None:
    model = parsed(
        """g (float[n,4] x) => (float[n,4] y) {
        p = Softplus(x)
        t = Tanh(p)
        m = Mul(x, t)
        y = Neg(m) }""",
        domains=', "opgraph" : 5',
    )
    written = to_model(og.onnx.load(model), functions=True)
    assert to_model(og.onnx.load(written), functions=True) == written
    np.testing.assert_allclose(run(written, {"x": X}), run(model, {"x": X}), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float", "double", "float16"])
def test_types_stated_inside_a_function_do_not_hold_for_every_call(dtype: str) -> None:
    model = parsed(
        f"""g ({dtype}[3,4] x, {dtype}[5] z) => ({dtype}[3,4] y, {dtype}[5] w) {{
        y = my.gate(x)
        w = my.gate(z) }}
        <opset_import: ["" : 21], domain: "my"> gate (a) => (r) <float[3,4] e, float[3,4] s> {{
        e = Exp(a)
        s = Sigmoid(e)
        r = Mul(e, s) }}""",
        domains=', "my" : 1',
    )
    assert model.functions[0].value_info
    graph = og.onnx.load(model)
    own = {"float": "f32", "double": "f64", "float16": "f16"}[dtype]
    assert {t.dtype for op in graph.ops for t in op.outputs} == {own}
    feeds = {"x": X.astype(og.ir.dtypes.get(own).numpy), "z": np.arange(5).astype(og.ir.dtypes.get(own).numpy)}
    result = og.compile(graph, device="cpu")(feeds)["w"]
    e = np.exp(feeds["z"].astype(np.float64))
    np.testing.assert_allclose(result, e / (1 + np.exp(-e)), rtol=2e-3 if dtype == "float16" else 1e-6)


def test_dtype_stated_only_in_a_function_is_kept_without_its_sizes() -> None:
    model = parsed(
        """g (float[3,4] x) => (float[3,4] y) { y = my.gate(x) }
        <opset_import: ["" : 21, "com.microsoft" : 1], domain: "my"> gate (a) => (r) <float[7] e> {
        e = com.microsoft.Inverse(a)
        r = Tanh(e) }""",
        domains=', "my" : 1, "com.microsoft" : 1',
    )
    first, second = og.onnx.load(model).ops[:2]
    assert (first.outputs[0].dtype, first.outputs[0].dims, second.kind) == ("f32", None, "Tanh")
