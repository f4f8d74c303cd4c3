"""GroupNorm, whole and decomposed: reshapes inside a loop, and the resulting indexing of operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from row_graphs import SPELLED, WHOLE
from row_truth import assert_near

import opgraph as og
from opgraph.errors import InvalidShape
from opgraph.loops.interpret import interpret
from opgraph.loops.lower import lower
from opgraph.loops.text import parse_loop
from opgraph.partition.axis_factors import common_pieces, flat
from opgraph.runtime import cpu_compiler

torch = pytest.importorskip("torch")


def arrays(*shape: int) -> dict[str, np.ndarray]:
    choose = np.random.default_rng(0)
    x = choose.standard_normal(shape).astype(np.float32)
    return {"x": x, "g": choose.standard_normal(12).astype(np.float32), "b": np.ones(12, np.float32)}


def cut(graph: og.Graph) -> list[tuple[str, int]]:
    return [(p.kind, len(p.ops)) for p in graph.get_partitions()]


def as_good_as_f32(got: Any, graph: og.Graph, given: dict[str, np.ndarray]) -> None:
    """Checks that the error is at most twice that of the same ops in f32."""
    as_near(got, og.evaluate(graph, **given), og.evaluate(graph, given, dtype=None))


def as_near(got: np.ndarray, exact: np.ndarray, peer: np.ndarray) -> None:
    error, own = np.abs(got - exact).max(), np.abs(peer - exact).max()
    assert error <= 2 * own + 1e-7 * np.abs(exact).max(), (error, own)


@pytest.mark.parametrize("shape", [(2, 12, 5, 6), (1, 12, 1, 1), (3, 12, 1, 7), (1, 12, 40, 33)])
def test_decomposed_group_norm_is_one_kernel_with_neighbours(shape: tuple[int, ...]) -> None:
    graph = og.parse(SPELLED)
    assert cut(graph) == [("fused", 13)]
    given = arrays(*shape)
    given |= {n: given[n].reshape(12, 1, 1) for n in "gb"}
    as_good_as_f32(og.compile(graph)(**given), graph, given)


@pytest.mark.parametrize("shape", [(1, 1), (1, 1, 1), (1, 3), (2, 1)])
def test_group_norm_after_relu_keeps_the_rank_of_one_element_shapes(shape: tuple[int, ...]) -> None:
    graph = og.parse(
        f"graph(x: f32{list(shape)}) -> (y, z)\n  a = ReLU(x)\n"
        '  y, m, v = GroupNorm(a, groups=1, use_affine=false, data_format="NCX")\n  z = Sin(m)'
    )
    x = np.full(shape, 2, np.float32)
    assert [p.kind for p in graph.get_partitions()] == ["fused"]
    made, exact = og.compile(graph)(x=x), og.evaluate(graph, x=x)
    for name in "yz":
        assert made[name].shape == exact[name].shape
        np.testing.assert_allclose(made[name], exact[name], rtol=1e-6)


def test_explicit_reshape_sizes_give_the_same_kernel() -> None:
    """Both reshapes have all sizes written out; groups are a separate axis in one place and not in the other."""
    text = (
        SPELLED.replace("n,12,h,w", "2,12,5,6").replace("[0,3,-1]", "[2,3,4,5,6]").replace("axes=[2]", "axes=[2,3,4]")
    )
    text = text.replace("axes=[-1]", "axes=[-3,-2,-1]")
    text = text.replace("ReshapeTo(o, x)", "StaticReshape(o, shape=[2,12,5,6], special_zero=false)")
    assert cut(og.parse(text)) == [("fused", 13)]
    other = og.parse(SPELLED.replace("n,12,h,w", "2,12,5,6"))
    (a,), (b,) = og.compile(og.parse(text)).kernels, og.compile(other).kernels
    assert a == b


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_group_norm_is_one_kernel_in_any_layout(data_format: str) -> None:
    text = WHOLE.replace("NCX", data_format).replace("groups=3, keep_stats=false", "groups=3")
    text = text.replace("(y)", "(y, m, v)").replace("y = Group", "y, m, v = Group")
    given = arrays(2, 12, 5, 6)
    if data_format == "NXC":
        text = text.replace("n,12,h,w", "n,h,w,12")
        given["x"] = np.ascontiguousarray(given["x"].transpose(0, 2, 3, 1))
    graph = og.parse(text)
    assert cut(graph) == [("fused", 2)]
    f = og.compile(graph)
    wanted, peer = og.evaluate(graph, **given), og.evaluate(graph, given, dtype=None)
    for transposed in (False, True):
        x = given["x"]
        laid = np.ascontiguousarray(x.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0) if transposed else x
        out = {"y": np.empty(x.shape[::-1], np.float32).T} if transposed else None
        made = f(**{**given, "x": laid}, **({"out": {**f(**given), **out}} if out else {}))
        for name in "ymv":
            as_near(made[name], wanted[name], peer[name])


def test_channels_last_group_norm_is_a_kernel_except_small_f64() -> None:
    text = WHOLE.replace("NCX", "NXC").replace("n,12,h,w", "n,h,w,12")
    assert cut(og.parse(text)) == [("fused", 2)]
    assert "library" in [p.kind for p in og.parse(text.replace("f32", "f64")).get_partitions()]
    graph = og.parse(text.replace("12]", "24]"))
    assert cut(graph) == [("fused", 2)]
    choose = np.random.default_rng(0)
    shapes = {"x": (2, 9, 7, 24), "g": (24,), "b": (24,)}
    given = {name: choose.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    given["x"] += np.arange(24, dtype=np.float32) / 8  # groups differ, so that mixing them up is visible
    as_good_as_f32(og.compile(graph)(**given), graph, given)


@pytest.mark.parametrize("text", [WHOLE, SPELLED.replace("  y = Add(a, x)\n", "").replace("a = Add(u", "y = Add(u")])
def test_group_norm_gradient_is_one_kernel_saving_inputs_and_statistics(text: str) -> None:
    given = arrays(2, 12, 5, 6)
    vectors = {n: given[n] if text is WHOLE else given[n].reshape(12, 1, 1) for n in "gb"}
    f = og.compile(og.parse(text), wrt=("x", "g", "b"))
    assert [p.kind for p in og.gradient(og.parse(text), wrt=("x", "g", "b")).get_partitions()] == ["fused"]
    kept = {s.name: s for s in f.saved_tensors() if s.role != "shape"}
    assert {s.shape for s in kept.values() if s.role == "value"} <= {("n", 3, 1)}
    _, vjp = f.vjp(x=given["x"], **vectors)
    d = np.random.default_rng(1).standard_normal(given["x"].shape).astype(np.float32)
    made = vjp(d)
    errors = []
    for dtype in (torch.float64, torch.float32):
        x, g, b = (torch.tensor(given[n], dtype=dtype, requires_grad=True) for n in "xgb")
        torch.nn.functional.group_norm(torch.tanh(x), 3, g, b, 1e-5).backward(torch.tensor(d, dtype=dtype))
        errors.append({n: t.grad.double().numpy() for n, t in zip("xgb", (x, g, b), strict=True)})
    for name, exact in errors[0].items():
        own = np.abs(made[name].reshape(exact.shape) - exact).max()
        assert own <= 2 * np.abs(errors[1][name] - exact).max() + 1e-6, name


def test_instance_norm_equals_group_norm_with_one_channel_per_group() -> None:
    text = WHOLE.replace("groups=3", "groups=0").replace("n,12", "n,c").replace("f32[12]", "f32[c]")
    given = arrays(2, 12, 5, 6)
    graph = og.parse(text)
    assert cut(graph) == [("fused", 2)]
    assert [p.kind for p in og.gradient(graph, wrt=("x", "g", "b")).get_partitions()] == ["fused"]
    each = og.parse(WHOLE.replace("groups=3", "groups=12"))
    np.testing.assert_array_equal(og.evaluate(graph, **given), og.evaluate(each, **given))
    as_good_as_f32(og.compile(graph)(**given), graph, given)


def test_group_norm_exported_by_torch_is_one_kernel() -> None:
    """Reshape, InstanceNormalization with ones and zeros, Reshape, Mul, Add; then Sigmoid and Mul."""
    onnx = pytest.importorskip("onnx")
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[2,12,5,6] x, float[12,1,1] a, float[12,1,1] b) => (float[2,12,5,6] y)
        <int64[3] groups = {0, 3, -1}, float[3] one = {1, 1, 1}, float[3] zero = {0, 0, 0},
         int64[4] whole = {2, 12, 5, 6}>
        {
          r = Reshape(x, groups)
          n = InstanceNormalization <epsilon = 0.00001> (r, one, zero)
          k = Reshape(n, whole)
          u = Mul(k, a)
          v = Add(u, b)
          s = Sigmoid(v)
          y = Mul(v, s)
        }"""
    )
    graph = og.onnx.load(model, library=True)
    assert cut(graph) == [("library", 1), ("fused", 6)]
    given = arrays(2, 12, 5, 6)
    got = og.compile(graph)(x=given["x"], a=given["g"].reshape(12, 1, 1), b=given["b"].reshape(12, 1, 1))

    def in_torch(dtype: type) -> np.ndarray:
        x, g, b = (torch.from_numpy(given[n].astype(dtype)) for n in "xgb")
        return torch.nn.functional.silu(torch.nn.functional.group_norm(x, 3, g, b, 1e-5)).numpy()

    as_near(got, in_torch(np.float64), in_torch(np.float32))


@pytest.mark.parametrize(("opset", "count"), [(18, 9), (21, 5)])
def test_dynamic_group_norm_exported_by_torch_is_fused_with_neighbours(opset: int, count: int) -> None:
    """Before opset 21 it ends in Reshape(y, Shape(x)), and Shape is then no op of the graph."""
    pytest.importorskip("onnxscript", reason="torch's exporter needs it")
    import exported

    size = torch.export.Dim
    module = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.GroupNorm(3, 12), torch.nn.SiLU()).eval()
    model = exported.export(
        module, (torch.randn(2, 12, 5, 6),), opset, dynamic_shapes=({0: size("n"), 2: size("h"), 3: size("w")},)
    )
    assert (opset == 18) == any(node.op_type == "Shape" for node in model.graph.node)
    graph = og.onnx.load(model, library=True)
    assert cut(graph) == [("fused", count)]
    run = og.compile(graph)
    for shape in [(2, 12, 5, 6), (1, 12, 3, 40), (0, 12, 5, 6)]:
        x = torch.randn(shape)
        peer = module(x).detach().numpy()
        exact = module.double()(x.double()).detach().numpy()
        assert_near(run({graph.inputs[0].name: x.numpy()}), exact, peer)
        module.float()
    from opgraph.onnx.save import to_model

    assert to_model(graph, form="decomposed") == model


def test_gradients_flow_through_group_norm_statistics() -> None:
    text = (
        WHOLE.replace("(y)", "(y, m, v)")
        .replace("y = G", "y, m, v = G")
        .replace("groups=3, keep_stats=false", "groups=3")
    )
    given = {n: v.astype(np.float64) for n, v in arrays(2, 12, 2, 3).items()}
    graph = og.parse(text.replace("f32", "f64"))
    _, vjp = og.compile(graph, wrt=("x",)).vjp(**given)
    rng = np.random.default_rng(2)
    d = {"y": rng.standard_normal((2, 12, 2, 3)), "m": rng.standard_normal((2, 3)), "v": rng.standard_normal((2, 3))}

    def loss(x: np.ndarray) -> float:
        return float(sum((v * d[n]).sum() for n, v in og.evaluate(graph, **{**given, "x": x}).items()))

    step = rng.standard_normal(given["x"].shape)
    slope = (loss(given["x"] + 1e-5 * step) - loss(given["x"] - 1e-5 * step)) / 2e-5
    np.testing.assert_allclose((vjp(d)["x"] * step).sum(), slope, rtol=1e-6)


def test_loop_over_split_axes_prints_and_runs_in_numpy() -> None:
    (part,) = og.parse(SPELLED).get_partitions()
    low = lower(part)
    assert parse_loop(str(low.loop)) == low.loop
    assert "cut=[* 3x4 * *]" in str(low.loop) and "reduce -3,-2,-1" in str(low.loop)
    given = arrays(2, 12, 5, 6)
    given |= {n: given[n].reshape(12, 1, 1) for n in "gb"}
    (made,) = interpret(low.loop, [given[t.name] for t in low.loads])
    wide = {n: v.astype(np.float64) for n, v in given.items()}
    exact = og.evaluate(og.parse(SPELLED.replace("f32", "f64")), **wide)
    assert_near(made, exact, exact.astype(np.float32))


def test_two_different_axis_splits_of_one_tensor_are_right() -> None:
    text = """graph(x: f32[n,12,h,w]) -> (y)
      t = Tanh(x)
      a = GroupNorm(t, groups=3, use_affine=false, keep_stats=false, data_format="NCX")
      b = GroupNorm(t, groups=4, use_affine=false, keep_stats=false, data_format="NCX")
      y = Add(a, b)"""
    graph = og.parse(text)
    given = {"x": arrays(2, 12, 5, 6)["x"]}
    as_good_as_f32(og.compile(graph)(**given), graph, given)


def test_reshape_without_a_producer_stays_a_library_op() -> None:
    text = "graph(x: f32[n,12,h,w], k: f32[n,3,1]) -> (y)\n r = StaticReshape(x, shape=[0,3,-1], special_zero=true)\n"
    assert cut(og.parse(text + " y = SoftMax(r, axis=-1)")) == [("library", 1), ("fused", 1)]


@pytest.mark.parametrize(
    ("shape", "groups", "layout"), [((2, 6, 1, 1), 3, "NCX"), ((2, 6, 5, 1), 3, "NCX"), ((2, 5, 6), 6, "NXC")], ids=str
)
def test_group_norm_of_tiny_images_is_fused_with_neighbours(shape: tuple[int, ...], groups: int, layout: str) -> None:
    g = og.Graph()
    x, v = g.input("x", shape=shape), g.input("v", shape=(6,))
    y = g.add_op("GroupNorm", g.add_op("Abs", x), v, v, groups=groups, keep_stats=False, data_format=layout)
    g.add_op("Tanh", y)
    assert [(p.kind, len(p.ops)) for p in g.finalize().get_partitions()] == [("fused", 3)]
    feeds = {str(t.name): np.random.default_rng(t.id).normal(size=t.shape).astype(np.float32) for t in (x, v)}
    np.testing.assert_allclose(og.compile(g)(feeds), og.evaluate(g, feeds), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b", "pieces"),
    [
        (("n", 12, "h", "w"), ("n", 3, "?"), ("n", 3, 4, "h", "w")),
        (("n", "h", "w", 12), ("n", "?", 3, 4), ("n", "h", "w", 3, 4)),
        ((2, 12, 5), (6, 20), (2, 3, 4, 5)),
        ((8, 3), (4, 6), (4, 2, 3)),
        ((6, 4), (4, 6), None),
        (("n", "c"), ("n", 3, 4), ("n", 3, 4)),
        (("n", "c", "d"), ("n", 3, 4), None),
        (("a", "b"), ("?",), ("a", "b")),
        ((1, 12), (1, 1, 12), (1, 1, 12)),
        ((2, 12, 1), (2, 3, 4), (2, 3, 4, 1)),
        ((2, 12, 5, 1, 1), (2, 3, 20), (2, 3, 4, 5, 1, 1)),
        ((2, 5, 12), (2, 5, 12, 1), (2, 5, 12, 1)),
        ((1, 1), (), None),
        (("?",), (), None),
        ((0, 3, "?", 3), (0, 6), None),
        ((3, "?"), (3,), (3, 1)),
        (("?", 3), (3,), (1, 3)),
    ],
)
def test_common_pieces_of_two_shapes(a: tuple[int | str, ...], b: tuple[int | str, ...], pieces: object) -> None:
    found = common_pieces(a, b)
    assert (found and (flat(found[0]), flat(found[1]))) == (pieces and (pieces, pieces))
    turned = common_pieces(b, a)
    assert (turned and flat(turned[0])) == (found and flat(found[1]))


@pytest.mark.parametrize("batch", [0, "n"])
def test_reshape_of_no_elements_gives_the_stated_shape(batch: int | str) -> None:
    graph = og.parse(
        f"graph(x: f64[{batch},3,?,3]) -> (y, z)\n  a = Add(x, x)\n"
        f"  y = StaticReshape(a, shape=[0, 6], special_zero={str(bool(batch)).lower()})\n  z = ReduceSum(y, axes=[1])"
    )
    got = og.compile(graph)(x=np.zeros((0, 3, 2, 3)))
    assert (got["y"].shape, got["z"].shape) == ((0, 6), (0,))


#: A kernel that treats an axis as another one, or a factor as a number, which is wrong where there are no elements.
NOTHING = {
    "an axis is dropped": (
        "graph(x: f32[n,3,?], b: f32[]) -> (y, z, w)\n  a = Add(x, x)\n"
        "  y = StaticReshape(a, shape=[0, 3], special_zero=true)\n  z = ReduceSum(y, axes=[1])\n"
        "  v = ReduceSum(y, axes=[0])\n  w = Add(v, b)",
        {"x": (0, 3, 5), "b": ()},
    ),
    "as another": (
        "graph(x: f32[n,?], like: f32[n,?]) -> (y, z)\n  a = Exp(x)\n  m = ReduceMax(a, axes=[1], keep_dims=true)\n"
        "  b = Subtract(a, m)\n  r = ReshapeTo(b, like)\n  y = Exp(r)\n  z = ReduceSum(y, axes=[0])",
        {"x": (0, 4), "like": (0, 8)},
    ),
    "rows of nothing": (
        "graph(x: f32[n,?], like: f32[n,?]) -> (z)\n  m = ReduceMean(x, axes=[0], keep_dims=true)\n"
        "  b = Subtract(x, m)\n  r = ReshapeTo(b, like)\n  z = ReduceMax(r, axes=[0])",
        {"x": (0, 0), "like": (0, 2)},
    ),
    "of which the shape alone is read": (
        "graph(x: f32[?,?,?], v: f32[0,1,8]) -> (z)\n  s = SumTo(x, x)\n"
        "  a = Slice(x, starts=[0], ends=[4], axes=[-1])\n  b = Sigmoid(a)\n  r = ReshapeTo(b, s)\n  z = SumTo(v, r)",
        {"x": (0, 1, 8), "v": (0, 1, 8)},
    ),
    "in another kernel with the axes of the reshape": (
        "graph(x: f32[n,a,b,n], g: f32[a], v: f32[a]) -> (y, z)\n  m = ReduceMin(x, axes=[3], keep_dims=true)\n"
        "  p = SoftMaxBackward(x, x, axis=-1)\n  t = Maximum(p, x)\n  s = SumTo(t, m)\n  l = LogSoftmax(x, axis=-2)\n"
        "  r = ReshapeTo(l, s)\n  c = Less(r, m)\n  k = Neg(m)\n  d = Select(c, m, k)\n  z = Exp(s)\n"
        '  w, q, y, i, j = BatchNormForwardTraining(d, g, v, epsilon=0.25, momentum=0.5, data_format="NCX")',
        {"x": (3, 0, 2, 3), "g": (0,), "v": (0,)},
    ),
    "a sum of a product with a factor that is no number": (
        "graph(x: f32[?,?]) -> (y, z)\n  p, q = SoftMax(x, axis=0)\n  y = SumTo(p, q)\n  z = Exp(q)",
        {"x": (0, 3)},
    ),
}


@pytest.mark.filterwarnings("ignore:there is no C")
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("case", NOTHING)
def test_reshape_of_no_elements_gives_any_empty_shape(
    case: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
    text, shapes = NOTHING[case]
    graph = og.parse(text)
    feeds = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    want, f = og.evaluate(graph, feeds), og.compile(graph)
    for _ in range(3):  # prepared after the first
        got = f(feeds)
        for a, b in zip(*(r.values() if isinstance(r, dict) else [r] for r in (got, want)), strict=True):
            assert a.shape == b.shape
            np.testing.assert_array_equal(a, b)


def test_reshape_to_an_empty_shape_refuses_elements() -> None:
    text, _ = NOTHING["an axis is dropped"]
    f = og.compile(og.parse(text))
    assert f(x=np.ones((2, 3, 1), np.float32), b=np.float32(1))["y"].shape == (2, 3)
    with pytest.raises(InvalidShape):
        f(x=np.ones((2, 3, 5), np.float32), b=np.float32(1))


@pytest.mark.parametrize(("src", "like"), [("?", ""), ("", "?"), ("3,?", "3"), ("?,3", "3")])
def test_unknown_size_that_must_be_1_keeps_its_axis(src: str, like: str) -> None:
    graph = og.parse(
        f"graph(x: f32[{src}], like: f32[{like}]) -> (y)\n  e = Exp(x)\n  r = ReshapeTo(e, like)\n  y = SumTo(r, like)"
    )
    feeds = {
        n: np.ones(tuple(1 if d == "?" else int(d) for d in s.split(",") if d), np.float32)
        for n, s in (("x", src), ("like", like))
    }
    np.testing.assert_allclose(og.compile(graph)(feeds), og.evaluate(graph, feeds), rtol=1e-6)


@pytest.mark.parametrize("like", ["s", "k"])
def test_sum_over_all_lanes_of_grouped_rows(like: str) -> None:
    text = "graph(x: f32[13,7,33], s: f32[], k: f32[13,1,1]) -> (y, z)\n  t = Tanh(x)\n"
    text += f"  r = ReduceSum(t, axes=[0, 2], keep_dims=true)\n  z = Multiply(t, r)\n  y = SumTo(z, {like})"
    graph = og.parse(text)
    assert cut(graph) == [("fused", 4)]
    x = np.random.default_rng(0).standard_normal((13, 7, 33)).astype(np.float32)
    given = {"x": x, "s": x[0, 0, 0], "k": x[:, :1, :1]}
    given = {str(t.name): given[str(t.name)] for t in graph.inputs}
    made, wanted = og.compile(graph)(given), og.evaluate(graph, given)
    peer = og.evaluate(graph, given, dtype=None)
    for name in "yz":
        as_near(made[name], wanted[name], peer[name])


@pytest.mark.parametrize("like", ["", "1", "1,1", "1,1,1"])
def test_sum_beside_a_group_norm_is_written_into_out(like: str) -> None:
    graph = og.parse(
        f"graph(x: f32[2,3,6], g: f32[6], b: f32[6], v: f32[{like}]) -> (y, s)\n"
        "  y = GroupNorm(x, g, b, keep_stats=false, groups=2)\n  s = SumTo(x, v)"
    )
    assert cut(graph) == [("fused", 2)]
    f = og.compile(graph)
    given = {"x": arrays(2, 3, 6)["x"], "g": np.ones(6, np.float32), "b": np.zeros(6, np.float32)}
    given["v"] = np.zeros(graph.inputs[3].shape, np.float32)
    made, outs = f(given), {"y": np.zeros((2, 3, 6), np.float32), "s": np.zeros_like(given["v"])}
    f(given, out=outs)
    np.testing.assert_array_equal(outs["y"], made["y"])
    np.testing.assert_allclose(outs["s"], given["x"].sum(dtype=np.float64), rtol=1e-6)


#: Reshapes of an axis into several of unknown size, with an operand along a single axis that is not the last.
ALONG_ONE = {
    "an index": (
        "graph(z: f32[?,3,?], u: f32[?]) -> (w, y)\n  m = ReduceMean(z, axes=[2], keep_dims=true)\n"
        "  c = Subtract(z, m)\n  i = GenIndex(z, axis=0)\n  j: f32[?,3,?] = TypeCast(i)\n  y = Multiply(c, j)\n"
        "  r = ReshapeTo(c, u)\n  w = Multiply(r, u)",
        {"z": (4, 3, 5), "u": (60,)},
    ),
    "channels": (
        "graph(q: f32[4,3], z: f32[?,3,?], u: f32[?], b: f32[3]) -> (p, w, y)\n  a = Add(q, b)\n"
        "  d = StaticReshape(a, shape=[2,2,3], special_zero=false)\n  p = SoftMax(d, axis=1)\n"
        "  m = ReduceMean(z, axes=[2], keep_dims=true)\n  c = Subtract(z, m)\n"
        '  y = BiasAdd(c, b, data_format="NCX")\n  r = ReshapeTo(c, u)\n  w = Multiply(r, u)',
        {"q": (4, 3), "z": (4, 3, 5), "u": (60,), "b": (3,)},
    ),
}


@pytest.mark.parametrize("case", ALONG_ONE)
def test_operand_along_one_axis_does_not_fix_the_last_size(case: str) -> None:
    text, shapes = ALONG_ONE[case]
    graph, rng = og.parse(text), np.random.default_rng(0)
    given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    got, want = og.compile(graph)(given), og.evaluate(graph, given)
    for name, exact in want.items():
        np.testing.assert_allclose(got[name], exact, rtol=1e-5, atol=1e-5)


def test_row_sum_may_be_reshaped_by_another_kernel() -> None:
    """The kernel that makes `d` has it as [4,5], next to [4,5,2,3]; the kernel that reads it has [2,2,5]."""
    graph = og.parse(
        """graph(x: f32[4,5,6], y: f32[4,5]) -> (n, d, s)
      r = StaticReshape(x, shape=[4,5,2,3], special_zero=false)
      n = SoftMax(r, axis=-1)
      d = ReduceSum(x, axes=[2])
      q = Add(y, d)
      z = StaticReshape(q, shape=[2,2,5], special_zero=false)
      s = SoftMax(z, axis=1)
    """
    )
    rng = np.random.default_rng(0)
    given = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in graph.inputs}
    got, want = og.compile(graph)(given), og.evaluate(graph, given)
    for name, exact in want.items():
        np.testing.assert_allclose(got[name], exact, rtol=1e-5, atol=1e-5)
