"""Reshape(y, Shape(x)) is read as ReshapeTo(y, x), if only reshapes read the shape, and written back the same way."""

from __future__ import annotations

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidShape

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from opgraph.onnx.save import to_model  # noqa: E402  # needs onnx

MODEL = """<ir_version: 8, opset_import: ["": 18]>
g (float[n,6] x, float[m,k] y) => (float[n,3,2] z)
<int64[3] six = {0, 3, 2}>
{
  s = Shape(x)
  e = Exp(y)
  r = Reshape(e, s)
  z = Reshape(r, six)
}"""


def kinds(graph: og.Graph) -> list[str]:
    return [str(op.attrs.get("onnx_op", op.kind)) for op in graph.ops]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", ["Exp", "ReshapeTo", "StaticReshape"]),
        ("Shape(x)", "Shape <start = 0> (x)", ["Exp", "ReshapeTo", "StaticReshape"]),
        ("Reshape(e, s)", "Reshape <allowzero = 1> (e, s)", ["Exp", "ReshapeTo", "StaticReshape"]),
        # A part of the shape, or a shape that is also read as numbers or is an output.
        ("Shape(x)", "Shape <end = 2> (x)", ["Shape", "Exp", "Reshape", "StaticReshape"]),
        ("e = Exp(y)", "q = Size(s)  e = Exp(y)", ["Shape", "Size", "Exp", "Reshape", "StaticReshape"]),
        ("(float[n,3,2] z)", "(float[n,3,2] z, int64[2] s)", ["Shape", "Exp", "Reshape", "StaticReshape"]),
        # The shape is also read inside a branch, so a node makes it.
        (
            "z = Reshape(r, six)",
            "c = Cast<to = 9>(k0)  p = If(c) <then_branch = t () => (float[2] u) {u = Cast<to = 1>(s)},"
            " else_branch = f () => (float[2] v) {v = Cast<to = 1>(s)}>  z = Reshape(r, six)",
            ["Exp", "ReshapeTo", "Cast", "Shape", "If", "StaticReshape"],
        ),
    ],
)
def test_shape_read_only_by_reshapes_loads_as_reshape_to(old: str, new: str, expected: list[str]) -> None:
    text = MODEL.replace(old, new).replace("{0, 3, 2}>", "{0, 3, 2}, int64 k0 = {1}>" if "k0" in new else "{0, 3, 2}>")
    model = onnx.parser.parse_model(text)
    graph = og.onnx.load(model, library=True)
    assert [k for k in kinds(graph) if k != "TypeCast"] == [k for k in expected if k != "Cast"]
    given = {"x": np.zeros((4, 6), np.float32), "y": np.arange(24, dtype=np.float32).reshape(8, 3) / 24}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    made = og.compile(graph)(**given)
    (got, *_) = made.values() if isinstance(made, dict) else [made]
    np.testing.assert_allclose(got, session.run(None, given)[0], rtol=1e-6)
    assert to_model(graph, form="decomposed") == model
    assert "ReshapeTo" not in kinds(og.onnx.load(model))  # onnxruntime runs it together with its neighbours


@pytest.mark.parametrize("opset", [13, 18])
def test_gradient_with_unknown_sizes_is_saved_and_runs_in_onnxruntime(opset: int) -> None:
    text = "graph(x: f32[n,h,w]) -> (y)\n r = StaticReshape(x, shape=[0,-1], special_zero=true)\n y = Exp(r)"
    graph = og.gradient(og.parse(text), wrt=("x",))
    assert [op.kind for op in graph.ops][-1] == "ReshapeTo"
    model = to_model(graph, opset=opset)
    assert og.onnx.load(model) == graph
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x, d = np.zeros((2, 3, 4), np.float32), np.arange(24, dtype=np.float32).reshape(2, 12)
    np.testing.assert_array_equal(session.run(None, {"x": x, "d_y": d})[0], d.reshape(2, 3, 4))


@pytest.mark.parametrize("library", [False, True])
def test_stale_stated_sizes_are_ignored_if_inputs_have_symbols(library: bool) -> None:
    """Making a batch symbolic by hand leaves old numbers in the model; onnxruntime warns and runs such a model."""
    made = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[n,c] x, float[c,c] w) => (float[1,4] y)
        <int64[1] axes = {-1}, float e = {0.00001}, float[1,4] k, float[1,4] t, float[1,4] q, float[1,1] m>
        { k = MatMul(x, w) t = Add(k, x) q = Mul(t, t) m = ReduceMean(q, axes)
          p = Add(m, e) s = Sqrt(p) y = Div(t, s) }"""
    )
    loaded = og.onnx.load(made, library=library)
    assert loaded.outputs[0].dims == ("n", "c")
    assert to_model(loaded, form="decomposed") == made
    compiled = og.compile(loaded, device="cpu")
    session = onnxruntime.InferenceSession(to_model(loaded).SerializeToString(), providers=["CPUExecutionProvider"])
    for n, c in ((1, 4), (3, 4), (2, 6), (3, 1)):
        x, w = (np.random.default_rng(0).normal(size=size).astype(np.float32) for size in ((n, c), (c, c)))
        t = x.astype(np.float64) @ w + x
        expected = t / np.sqrt((t * t).mean(-1, keepdims=True) + 1e-5)
        for y in (compiled(x=x, w=w), og.evaluate(loaded, x=x, w=w), session.run(None, {"x": x, "w": w})[0]):
            np.testing.assert_allclose(y, expected, rtol=1e-4)


def test_values_get_the_right_dtype_where_onnx_infers_none_or_a_wrong_one() -> None:
    """GroupNormalization of opset 21 has no type inference; onnx's evaluator gives s64 for sums of s32."""
    head = '<ir_version: 9, opset_import: ["" : 21]>\n'
    model = onnx.parser.parse_model(
        f"""{head} g (float[n,4,3] x) => (float[n,4,3] z) <float[4] s = {{1,2,3,4}}, float[4] b = {{1,0,0,1}}> {{
        y = GroupNormalization <num_groups = 2> (x, s, b) z = Tanh(y) }}"""
    )
    graph = og.onnx.load(model)
    assert [t.dtype for op in graph.ops for t in op.outputs] == ["f32", "f32"]
    assert og.evaluate(graph, x=np.ones((2, 4, 3), np.float32)).shape == (2, 4, 3)
    sums = onnx.parser.parse_model(
        f"{head} g (int32[2,3] x) => (int32[2] y) <int64[1] a = {{1}}> {{ y = ReduceSumSquare <keepdims = 0> (x, a) }}"
    )
    made = og.evaluate(og.onnx.load(sums), x=np.ones((2, 3), np.int32))
    assert made.dtype == np.int32 and made.tolist() == [3, 3]


def test_wrongly_stated_sizes_raise_only_if_the_true_sizes_do_not_fit() -> None:
    made = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[4,6] x, int64[2] s, float[8,5] w) => (float[p,5] y)
        <float[3,8] r>
        {
          r = Reshape(x, s)
          a = MatMul(r, w)
          y = Relu(a)
        }"""
    )
    given = {"x": np.ones((4, 6), np.float32), "w": np.ones((8, 5), np.float32)}
    f = og.compile(og.onnx.load(made, library=True))
    np.testing.assert_array_equal(f({**given, "s": np.array([3, 8])}), np.full((3, 5), 8))
    with pytest.raises(InvalidShape, match=r"\[6,4\] and \[8,5\] have no common inner size"):
        f({**given, "s": np.array([6, 4])})
