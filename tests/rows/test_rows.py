"""Loops over rows: the fused ops, the loop's text, and correct numbers for rows of all kinds."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from random_rows import row_graph
from row_graphs import ALL, RMS, as_dict, feeds_of, samples
from row_truth import as_torch, assert_near, from_torch
from schedules import followed, in_order
from ulp import errors

import opgraph as og
from opgraph.codegen.kernel import host_source
from opgraph.loops.interpret import interpret
from opgraph.loops.layout import bind
from opgraph.loops.lower import Lowered, lower
from opgraph.loops.text import parse_loop
from opgraph.runtime import threads
from opgraph.runtime.fallback import InterpretedKernel
from opgraph.schedule.cpu_tiles import boxes_of_rows
from opgraph.schedule.reduction_passes import pass_counts
from opgraph.schedule.schedule import SPLIT_INNER

torch = pytest.importorskip("torch")

SOFTMAX = """graph(x: {t}[*]) -> (y)
  y = SoftMax(x, axis=-1)
"""


def cut(text: str) -> list[tuple[str, list[str]]]:
    return [(p.kind, [op.kind for op in p.ops]) for p in og.parse(text).get_partitions()]


def lowered(text: str, **options: Any) -> Lowered:
    (partition,) = og.parse(text).get_partitions()
    return lower(partition, **options)


# -- fusion -----------------------------------------------------------------------------------------------------------


def test_decomposed_rms_norm_is_one_kernel_with_neighbouring_ops() -> None:
    text = """graph(x: f32[n,c], w: f32[c], b: f32[n,c]) -> (y)
      g = GELU(x)
      p = Pow(g, 2.0)
      m = ReduceMean(p, axes=[-1], keep_dims=true)
      e = Add(m, 1e-5)
      s = Sqrt(e)
      r = Reciprocal(s)
      a = Multiply(g, r)
      v = Multiply(a, w)
      y = Add(v, b)"""
    (part,) = og.parse(text).get_partitions()
    assert (part.kind, part.rows.axes, len(part.ops)) == ("fused", (-1,), 9)


@pytest.mark.parametrize(
    "op",
    [
        "SoftMax(x, axis=-1)", "LogSoftmax(x, axis=-1)", "LayerNorm(x, w, w, keep_stats=false)", "RMSNorm(x, w)",
        "ReduceMax(x, axes=[-1], keep_dims=true)", "ReduceL2(x, axes=[-1])",
    ],
)  # fmt: skip
def test_row_op_is_a_kernel_alone_and_with_neighbours(op: str) -> None:
    assert cut(f"graph(x: f32[n,c], w: f32[c]) -> (y)\n y = {op}") == [("fused", [op.split("(")[0]])]
    around = f"graph(z: f32[n,c], w: f32[c]) -> (y)\n x = Tanh(z)\n t = {op}\n y = Abs(t)"
    assert cut(around) == [("fused", ["Tanh", op.split("(")[0], "Abs"])]


def test_rows_along_different_axes_are_two_kernels() -> None:
    text = """graph(x: f32[n,c,k]) -> (a, b)
      t = Tanh(x)
      a = SoftMax(t, axis=-1)
      b = ReduceMax(t, axes=[1,2], keep_dims=true)"""
    assert cut(text) == [("fused", ["Tanh", "SoftMax"]), ("fused", ["ReduceMax"])]
    assert "two loops" in str(og.parse(text).explain())


def test_explain_names_the_row_axes() -> None:
    graph = og.parse(SOFTMAX.format(t="f32").replace("[*]", "[n,c]"))
    assert "rows over axes [-1]" in str(graph.explain())


def test_value_minus_its_row_sum_is_one_kernel() -> None:
    """x - sum(x), with SumTo as gradients write it."""
    text = """graph(x: f32[n,c], k: f32[n,1]) -> (y)
      t = Tanh(x)
      s = SumTo(t, k)
      y = Subtract(t, s)"""
    assert cut(text) == [("fused", ["Tanh", "SumTo", "Subtract"])]


def test_row_sum_without_kept_axis_broadcasts_as_in_numpy() -> None:
    """s[n] in x[n,n] lies along the last axis, as in NumPy."""
    text = "graph(x: f64[3,3]) -> (y)\n s = ReduceSum(x, axes=[1])\n y = Multiply(x, s)"
    x = samples((3, 3), "f64")
    np.testing.assert_allclose(og.compile(og.parse(text))(x=x), x * x.sum(1))


def test_operand_unsqueezed_to_rows_is_computed_outside() -> None:
    text = """graph(x: f64[3,3], d: f64[3], k: f64[1]) -> (y)
      p = Multiply(d, k)
      u = Unsqueeze(p, axes=[1])
      m = ReduceMean(x, axes=[1], keep_dims=true)
      s = Add(m, u)
      y = Subtract(x, s)"""
    x, d, k = samples((3, 3), "f64"), samples((3,), "f64", 1), np.array([2.0])
    got = og.compile(og.parse(text))(x=x, d=d, k=k)
    np.testing.assert_allclose(got, x - (x.mean(1) + d * k)[:, None])


def test_reshape_of_a_row_value_drops_the_row_axis() -> None:
    text = """graph(x: f64[3,1,5], like: f64[3,1]) -> (y)
      m = ReduceMean(x, axes=[2], keep_dims=true)
      y = ReshapeTo(m, like)"""
    assert cut(text) == [("fused", ["ReduceMean", "ReshapeTo"])]
    x = samples((3, 1, 5), "f64")
    np.testing.assert_allclose(og.compile(og.parse(text))(x=x, like=np.zeros((3, 1))), x.mean(2), strict=True)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('y = BiasAdd(m, bias, data_format="NCX")', "src has 1 channels and bias 5"),
        ("y: f64[?,1] = Add(m, bias)", "one value for each row meets several along"),
    ],
)
def test_row_operand_of_unknown_size_is_checked_at_run_time(line: str, what: str) -> None:
    text = f"graph(x: f64[?,?], bias: f64[?]) -> (y)\n  m = ReduceMax(x, axes=[-1], keep_dims=true)\n  {line}"
    assert len(cut(text)) == 1
    f, x = og.compile(og.parse(text)), samples((3, 5), "f64")
    np.testing.assert_array_equal(f(x=x, bias=np.ones(1)), x.max(1, keepdims=True) + 1)
    with pytest.raises(og.errors.InvalidShape, match=rf"{what} .*\n  where: .*\n  fix: "):
        f(x=x, bias=np.ones(5))


# -- the loop ---------------------------------------------------------------------------------------------------------


def test_loop_text_marks_row_values() -> None:
    text = RMS.format(t="f32").replace("-> (y)", "-> (y, s)")
    assert str(lowered(text).loop) == (
        "loop(parallel *, reduce -1)\n"
        "  x0 = load f32\n"
        "  x1 = load f32\n"
        "  t0: f32 = Pow(x0, 2.0)  # 0\n"
        "  t1: f32 = ReduceMean(t0)  # 1\n"
        '  t2: f32 = Add(t1, 9.999999747378752e-06, auto_broadcast="numpy")  # 2\n'
        "  t3: f32 = Sqrt(t2)  # 3\n"
        "  t4: f32 = Reciprocal(t3)  # 4\n"
        '  t5: f32 = Multiply(x0, t4, auto_broadcast="numpy")  # 5\n'
        '  t6: f32 = Multiply(t5, x1, auto_broadcast="numpy")  # 6\n'
        "  store f32 t3 per row\n"
        "  store f32 t6"
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_row_factor_moves_out_of_the_row_sum(dtype: str) -> None:
    text = f"""graph(x: {dtype}[n,c], g: {dtype}[n,c]) -> (y, s)
      m = ReduceMean(x, axes=[-1], keep_dims=true)
      d = Subtract(x, m)
      z = Square(d)
      v = ReduceMean(z, axes=[-1], keep_dims=true)
      r = Sqrt(v)
      h = Divide(d, r)
      p = Multiply(g, h)
      q = Multiply(p, v)
      s = ReduceSum(q, axes=[-1], keep_dims=true)
      y = Multiply(h, s)
    """
    loop = lowered(text).loop
    assert pass_counts(loop)[0] == 3  # the pass of the variance makes the sum too; its factors v and r follow
    assert pass_counts(lowered(text, rounding="each").loop)[0] == (3 if dtype == "f32" else 4)
    given = {"x": samples((5, 700), dtype), "g": samples((5, 700), dtype, 1)}
    exact, peer = og.evaluate(og.parse(text), given), og.evaluate(og.parse(text), given, dtype=None)
    for name, value in og.compile(og.parse(text))(given).items():
        assert_near(value, exact[name].astype(np.longdouble), peer[name])


def test_softmax_computes_each_exponential_once() -> None:
    loop = lowered(SOFTMAX.format(t="f32").replace("[*]", "[n,c]")).loop
    layout = bind(loop, [(5, 40)], [(40, 1)])
    assert host_source(in_order(loop, layout.variant)).functor.count("og::exp") == 1
    # In bf16 it cannot be saved in the result: there is a buffer for rows that fit; for others it is recomputed.
    loop = lowered(SOFTMAX.format(t="bf16").replace("[*]", "[n,c]")).loop
    functor = host_source(in_order(loop, bind(loop, [(5, 40)], [(40, 1)]).variant)).functor
    assert "kept_bytes = sizeof(float)" in functor and functor.count("og::exp") == 3


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_stored_16_bit_sum_is_rounded_once_for_all_passes(dtype: str) -> None:
    """In a norm of a 16-bit sum, whose mean is that of the stored sum, rounding took a seventh of forward."""
    text = f"""graph(a: {dtype}[n,c], b: {dtype}[n,c]) -> (h, y)
      h = Add(a, b)
      w: f32[n,c] = TypeCast(h)
      m = ReduceMean(w, axes=[-1], keep_dims=true)
      d = Subtract(w, m)
      q = Square(d)
      v = ReduceMean(q, axes=[-1], keep_dims=true)
      y = Divide(d, v)
    """
    loop = lowered(text).loop
    functor = host_source(in_order(loop, bind(loop, [(5, 40), (5, 40)], [(40, 1)] * 2).variant)).functor
    in_turn = functor.split("if constexpr (pass ==")[1:]
    waiting = [one for one in in_turn if "&& keep" in one]
    assert [one.count("og::round_") for one in waiting] == [1, 0, 0]


@pytest.mark.parametrize("seed", range(60))
def test_random_loops_print_and_parse_back(seed: int) -> None:
    for part in row_graph(seed).get_partitions():
        if part.kind == "fused":
            loop = lower(part).loop
            assert parse_loop(str(loop)) == loop


def test_boxes_hold_whole_rows_except_few_long_ones() -> None:
    loop = lowered(RMS.format(t="f32")).loop
    for shape in [(3, 5), (1, 1), (4096, 8192), (100_000, 3), (33, 1 << 20), (2, 1 << 20)]:
        layout = bind(loop, [shape, shape[1:]], [(shape[1], 1), (1,)])
        boxes = boxes_of_rows(layout)
        assert boxes.split_rows == (shape == (2, 1 << 20))
        assert boxes.split_rows or (boxes.box[-1] == shape[1] and boxes.box[0] * boxes.counts[0] >= shape[0])


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_random_row_graphs_agree_with_the_reference(seed: int) -> None:
    graph = row_graph(seed)
    f = og.compile(graph)
    for again in range(3):
        feeds = feeds_of(graph, 3 * seed + again)
        got, exact = as_dict(f(feeds)), as_dict(og.evaluate(graph, feeds))
        for (name, value), want in zip(got.items(), exact.values(), strict=True):
            assert value.shape == want.shape, name
            np.testing.assert_allclose(value, want, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("seed", range(8, 40))
def test_loops_over_rows_run_in_numpy_and_torch(seed: int) -> None:
    graph = row_graph(seed)
    feeds = feeds_of(graph, seed)
    exact = og.evaluate(graph, feeds)
    values = {t.id: feeds[t.name or ""] for t in graph.inputs}
    for part in graph.get_partitions():
        if part.kind != "fused":
            return
        found = lower(part)
        loads = [None if t is None else values.get(t.id, t.data) for t in found.loads]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            in_torch = InterpretedKernel(found, part)([values[t.id] for t in part.input_ports])
        for tensor, value, other in zip(found.stores, interpret(found.loop, loads), in_torch, strict=True):
            values[tensor.id] = value
            np.testing.assert_allclose(other, value, rtol=1e-9, atol=1e-12)
    for tensor, want in zip(graph.outputs, as_dict(exact).values(), strict=True):
        np.testing.assert_allclose(values[tensor.id], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
def test_rows_of_every_length_are_as_accurate_as_torch(dtype: str) -> None:
    kernel = og.compile(og.parse(ALL.format(t=dtype)))
    softmax = og.compile(og.parse(SOFTMAX.format(t=dtype).replace("[*]", "[n,c]")))
    few = [(15, n) for n in (1, 2, 63, 64, 65, 257)]  # with three rows torch's best luck would be the measure
    for rows, length in [*few, (3, 8192), (3, 70_001), (20_000, 3)]:
        x = samples((rows, length), dtype)
        wide = x.astype(np.longdouble)
        exact = {
            "a": wide.sum(1), "b": wide.mean(1, keepdims=True), "f": np.abs(wide).sum(1),
            "g": np.sqrt((wide * wide).sum(1)), "c": wide.max(1), "d": wide.min(1, keepdims=True),
        }  # fmt: skip
        t = as_torch(x)
        peer = {
            "a": t.sum(1), "b": t.mean(1, keepdim=True), "f": t.norm(1, 1), "g": t.norm(2, 1), "c": t.amax(1),
            "d": t.amin(1, keepdim=True),
        }  # fmt: skip
        got = kernel(x=x)
        for name, want in exact.items():
            assert_near(got[name], want, from_torch(peer[name]))
        powers = np.exp(wide - wide.max(1, keepdims=True))
        assert_near(softmax(x=x), powers / powers.sum(1, keepdims=True), from_torch(torch.softmax(t, -1)))


def test_row_products_are_as_accurate_as_torch() -> None:
    x = np.random.default_rng(0).uniform(0.9, 1.1, (5, 300)).astype(np.float32)
    got = og.compile(og.parse(ALL.format(t="f32")))(x=x)["e"]
    assert_near(got, x.astype(np.longdouble).prod(1), as_torch(x).prod(1).numpy())


def test_nan_and_infinities_stay_in_their_rows() -> None:
    kernel = og.compile(og.parse(ALL.format(t="f32")))
    x = samples((6, 100))
    x[1, 7], x[2, 99], x[3, 0], x[4, 50], x[4, 51] = np.nan, np.inf, -np.inf, np.inf, -np.inf
    got = kernel(x=x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.isnan(got["a"]), np.isnan(x.sum(1)))
        np.testing.assert_array_equal(got["c"], x.max(1))
        np.testing.assert_array_equal(got["d"][:, 0], x.min(1))
    softmax = og.compile(og.parse(SOFTMAX.format(t="f32").replace("[*]", "[n,c]")))(x=x)
    np.testing.assert_array_equal(np.isnan(softmax).all(1), [False, True, True, False, True, False])


def test_empty_rows_have_the_neutral_value() -> None:
    got = og.compile(og.parse(ALL.format(t="f32")))(x=np.zeros((2, 0), np.float32))
    assert got["a"].tolist() == [0, 0] and np.isnan(got["b"]).all() and got["c"].tolist() == [-np.inf] * 2
    assert got["d"].ravel().tolist() == [np.inf] * 2 and got["e"].tolist() == [1, 1] and got["g"].tolist() == [0, 0]
    none = og.compile(og.parse(ALL.format(t="f32")))(x=np.zeros((0, 5), np.float32))
    assert none["a"].shape == (0,) and none["b"].shape == (0, 1)


def test_row_may_consist_of_several_runs_in_any_order() -> None:
    text = """graph(x: f32[*]) -> (y)
      m = ReduceMean(x, axes=[0,2,3], keep_dims=true)
      y = Subtract(x, m)""".replace("[*]", "[n,c,h,w]")
    f = og.compile(og.parse(text))
    x = samples((4, 3, 5, 7))
    for view in (x, x.transpose(2, 1, 0, 3), x[:, :, ::2], x[:, :, :, ::-1], x.transpose(3, 1, 2, 0)):
        wide, t = view.astype(np.longdouble), as_torch(view)
        peer = (t - t.mean((0, 2, 3), keepdim=True)).numpy()
        assert_near(f(x=view), wide - wide.mean((0, 2, 3), keepdims=True), peer)


def test_operand_may_vary_between_the_runs_of_a_row() -> None:
    text = """graph(x: f64[n,k,l], w: f64[k,1]) -> (y)
      p = Multiply(x, w)
      m = ReduceMax(p, axes=[1,2], keep_dims=true)
      y = Subtract(p, m)"""
    x, w = samples((4, 3, 50), "f64"), samples((3, 1), "f64", 1)
    p = x * w
    np.testing.assert_allclose(og.compile(og.parse(text))(x=x, w=w), p - p.max((1, 2), keepdims=True))


def test_one_element_row_may_sum_f64_beside_f32_results() -> None:
    text = """graph(x: f32[1], w: f32[1]) -> (y, z)
      y = Maximum(x, w)
      d: f64[1] = TypeCast(y)
      s = ReduceSum(d, axes=[0], keep_dims=true)
      t = Subtract(s, 0.1)
      z: f32[1] = TypeCast(t)
    """
    x, w = np.array([0.1], np.float32), np.array([-1.0], np.float32)
    got = og.compile(og.parse(text))(x=x, w=w)
    assert got["y"] == x and got["z"] == np.float32(np.float64(x[0]) - 0.1) != 0


def test_division_by_a_row_value_is_right_for_any_floats() -> None:
    """It is computed by two products; extremes, zeros, infinities and NaN have the results of a division."""
    text = "graph(x: f32[n,c]) -> (y)\n s = ReduceMax(x, axes=[-1], keep_dims=true)\n y = Divide(x, s)"
    special = np.array([0, 1e-45, 1e-40, 1.2e-38, 1, 3, 1e30, 3.4e38, np.inf], np.float32)
    x = np.stack([*[np.minimum(special, top) for top in special], np.append(special[1:], np.float32(np.nan))])
    x = np.concatenate([x, -x], axis=1)
    got = og.compile(og.parse(text))(x=x)
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        exact = wide / wide.max(1, keepdims=True)
        off = errors(got, exact)
    subnormal = np.abs(exact) < np.finfo(np.float32).smallest_normal
    assert off[~subnormal].max() <= 1.5 and off[subnormal].max() <= 2


def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "graph(x: f32[n,c], w: f32[c], b: f32[c], d_y: f32[n,c]) -> (dx, dw, db)\n"
    text += "  y, m, v = LayerNorm(x, w, b)\n  dx, dw, db = LayerNormBackward(x, d_y, m, v, w, b)"
    f = og.compile(og.parse(text))
    x, d = samples((700, 300)), samples((700, 300), seed=1)
    feeds = {"x": x, "d_y": d, "w": samples((300,)), "b": samples((300,))}
    one = None
    for count in (1, 2, 3, 8):
        monkeypatch.setattr(threads, "team", lambda size, count=count: (count, None))
        got = f(feeds)
        one = got if one is None else one
        assert all(got[k].tobytes() == one[k].tobytes() for k in got)


def test_norm_gradient_with_16_bit_parameters_is_fused_with_f32_statistics() -> None:
    graph = og.parse("graph(x: bf16[n,c], w: bf16[c], b: bf16[c]) -> (y)\n y = LayerNorm(x, w, b, keep_stats=false)")
    backward = og.gradient(graph, wrt=("x", "w", "b"))
    f = og.compile(backward)
    assert {p.kind for p in f.partitions} == {"fused"}
    feeds = {"x": samples((300, 200), "bf16"), "d_y": samples((300, 200), "bf16", 1)}
    feeds |= {"w": samples((200,), "bf16", 2), "b": samples((200,), "bf16", 3)}
    feeds = {t.name or "": feeds[t.name or ""] for t in backward.inputs}
    exact, got = og.evaluate(backward, feeds), f(feeds)
    for name, want in exact.items():
        off = np.abs(got[name].astype(np.float64) - want).max()
        assert off <= 0.51 * 2.0**-7 * 2.0 ** np.floor(np.log2(np.abs(want).max())), name


def test_norm_backward_with_16_bit_sums_is_one_kernel() -> None:
    inputs = "x: bf16[n,c], d: bf16[n,c], m: bf16[n], v: bf16[n], g: bf16[c], b: bf16[c]"
    graph = og.parse(f"graph({inputs}) -> (y, dg, db)\n y, dg, db = LayerNormBackward(x, d, m, v, g, b)")
    assert [p.kind for p in graph.get_partitions()] == ["fused"]


#: Graphs with few long rows, which are split.
LONG = {
    "softmax": ("graph(x: f32[n,c]) -> (y)\n y = SoftMax(x, axis=-1)", (2, 150_001)),
    "all": (
        "graph(x: f32[n,c]) -> (a, b, d)\n a = ReduceMax(x, axes=[0,1])\n"
        " m = ReduceMean(x, axes=[0,1], keep_dims=true)\n b = ReduceL2(x, axes=[0,1])\n d = Subtract(x, m)",
        (700, 301),
    ),
    "runs": (
        "graph(x: f32[n,c,h], w: f32[c,1]) -> (y, dw)\n m = ReduceMean(x, axes=[0,2], keep_dims=true)\n"
        " y = Subtract(x, m)\n p = Multiply(y, x)\n dw = SumTo(p, w)",
        (400, 3, 901),
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_few_long_rows_are_split_with_thread_independent_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, shape = LONG[name]
    graph = og.parse(text)
    f = og.compile(graph)
    feeds = {"x": samples(shape), "w": np.zeros((shape[1], 1), np.float32)}
    feeds = {t.name or "": feeds[t.name or ""] for t in graph.inputs}
    exact, one = as_dict(og.evaluate(graph, feeds)), None
    peer = as_dict(og.evaluate(graph, feeds, dtype=None))
    real = threads.team
    for team in (lambda size: (1, None), lambda size: (7, None), lambda size: (2, real(size)[1])):
        monkeypatch.setattr(threads, "team", team)
        got = as_dict(f(feeds))
        one = got if one is None else one
        for (key, value), want in zip(got.items(), exact.values(), strict=True):
            assert value.tobytes() == one[key].tobytes()
            assert_near(value, want, peer[key] if key in peer else peer["y"])
    assert SPLIT_INNER in followed(f)


def test_row_results_may_overwrite_inputs() -> None:
    """The row is read several times before it is written."""
    text = "graph(x: f32[n,c], r: f32[n,c]) -> (y)\n s = SoftMax(x, axis=-1)\n y = Add(s, r)"
    f = og.compile(og.parse(text))
    x, r = samples((9, 300)), samples((9, 300), seed=1)
    want = f(x=x, r=r)
    for name in ("x", "r"):
        feeds = {"x": x.copy(), "r": r.copy()}
        f(feeds, out=feeds[name])
        np.testing.assert_array_equal(feeds[name], want)


# -- training ---------------------------------------------------------------------------------------------------------

#: A graph, its inputs' shapes, and the tensors saved for backward besides its inputs.
TRAINED: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "RMSNorm in small ops": (RMS.format(t="f32"), {"x": (7, 40), "w": (40,)}, {"value": (7, 1)}),
    "LayerNorm": (
        "graph(x: f32[n,c], w: f32[c], b: f32[c]) -> (y)\n g = GELU(x)\n t, m, v = LayerNorm(g, w, b)\n y = Tanh(t)",
        {"x": (7, 40), "w": (40,), "b": (40,)},
        {"value": (7,), "output": (7, 40)},
    ),
    "SoftMax": (SOFTMAX.format(t="f32").replace("[*]", "[n,c]"), {"x": (7, 40)}, {"output": (7, 40)}),
    "BatchNorm": (
        "graph(x: f32[n,c,h], m: f32[c], v: f32[c], w: f32[c], b: f32[c]) -> (y)\n"
        '  y, rm, rv, k, l = BatchNormForwardTraining(x, m, v, w, b, data_format="NCX", epsilon=1e-5)',
        {"x": (6, 3, 20), "m": (3,), "v": (3,), "w": (3,), "b": (3,)},
        {"value": (3,)},
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_norms_train_with_one_forward_and_one_backward_kernel(name: str) -> None:
    text, shapes, kept = TRAINED[name]
    graph = og.parse(text)
    wrt = [n for n in shapes if n not in ("m", "v")]
    f = og.compile(graph, wrt=wrt)
    feeds = {n: samples(s, seed=i) for i, (n, s) in enumerate(shapes.items())}
    y, vjp = f.vjp(**feeds)
    assert {s.role: s.shape for s in vjp.saved if s.role not in ("input", "shape")} == kept
    d = samples(y.shape, seed=9)
    got = vjp(d)
    assert [p.kind for p in f.partitions] == ["fused"]
    assert [p.kind for p in f._backward_pass().partitions] == ["fused"]
    gradient = og.gradient(graph, wrt=wrt)
    names = {t.name for t in gradient.inputs}
    given = {k: v for k, v in {**feeds, "d_y": d}.items() if k in names}
    exact, peer = (as_dict(og.evaluate(gradient, given, dtype=dtype)).values() for dtype in ("f64", None))
    for key, want, theirs in zip(wrt, exact, peer, strict=True):
        assert_near(got[key], want, theirs)


def test_bf16_norm_rounds_once_or_after_each_op() -> None:
    text = RMS.format(t="bf16")
    x, w = samples((9, 64), "bf16"), samples((64,), "bf16", seed=1)
    exact = og.evaluate(og.parse(text), x=x, w=w)
    once = og.compile(og.parse(text))(x=x, w=w).astype(np.float64)
    assert (np.abs(once - exact) <= 2.0**-8 * np.abs(exact) * 1.02).all()
    each = og.compile(og.parse(text), rounding="each")(x=x, w=w).astype(np.float64)
    assert np.abs(each - exact).max() > np.abs(once - exact).max()


@pytest.mark.parametrize(("along", "fits", "longer"), [("-1", (3, 9000), (3, 40_000)), ("0", (200, 70), (700, 70))])
def test_rows_that_fit_the_buffer_have_a_separate_kernel(
    along: str, fits: tuple[int, int], longer: tuple[int, int]
) -> None:
    """Longer rows have no room for saved values, which are recomputed. For unknown sizes one text does both."""
    text = f"""graph(x: bf16[n,c]) -> (y)
      w: f32[n,c] = TypeCast(x)
      e = Exp(w)
      s = ReduceMean(e, axes=[{along}], keep_dims=true)
      t = Tanh(w)
      p = Multiply(t, e)
      d = Subtract(p, s)
      q = Exp(d)
      r = ReduceSum(q, axes=[{along}], keep_dims=true)
      v = Divide(q, r)
      y: bf16[n,c] = TypeCast(v)"""
    of_any_length = og.compile(og.parse(text))
    for shape in (fits, longer, fits):
        x = np.random.default_rng(0).uniform(-2, 2, shape).astype("bfloat16")
        alone = og.compile(og.parse(text.replace("[n,c]", str(list(shape)).replace(" ", ""))))
        got = of_any_length(x=x)
        exact, peer = (og.evaluate(og.parse(text), {"x": x}, dtype=dtype) for dtype in ("f64", None))
        assert_near(got, exact.astype(np.longdouble), peer)
        np.testing.assert_array_equal(got.view(np.uint16), alone(x=x).view(np.uint16))
        assert ["fits = true" in source for source in alone.kernels.values()] == [shape == fits]
    assert ["fits = true" in source for source in of_any_length.kernels.values()] == [False]
