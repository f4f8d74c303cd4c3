"""Convolutions, pools, interpolation and norms that torch also has: numbers, unknown sizes, training, refusals."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opgraph as og
from opgraph import errors
from opgraph.ir import dtypes, opdef
from opgraph.runtime.library_partition import NativePartition, Program

CONV = 'data_format="NCX", weights_format="OIX"'
POOL = 'kernel=[2, 2], strides=[2, 2], pads_begin=[0, 0], pads_end=[0, 0], data_format="NCX"'


def of(kind: str, *arrays: np.ndarray, **attrs: Any) -> Any:
    reference = opdef.get(kind, where="test").reference
    assert reference is not None
    return reference(*arrays, **attrs)


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12, atol=1e-12)


# -- comparison with torch --------------------------------------------------------------------------------------------


def test_norms_agree_with_torch() -> None:
    torch = pytest.importorskip("torch")
    f, rng = torch.nn.functional, np.random.default_rng(0)
    x, g, b = rng.normal(size=(4, 6, 5)), rng.normal(size=6), rng.normal(size=6)
    t, tg, tb = (torch.from_numpy(a) for a in (x, g, b))
    made = of("BatchNormForwardTraining", x, g, abs(b), g, b, epsilon=0.25, momentum=0.75, data_format="NCX")
    old = [torch.from_numpy(a.copy()) for a in (g, abs(b))]
    close(made[0], f.batch_norm(t, *old, tg, tb, True, 0.25, 0.25))
    close(made[1], old[0])  # torch's running variance is that of a sample, oneDNN's that of the population
    np.testing.assert_allclose(made[2], 0.75 * abs(b) + 0.25 * x.var(axis=(0, 2)), rtol=1e-12)
    np.testing.assert_allclose(made[3:], [x.mean(axis=(0, 2)), x.var(axis=(0, 2))], rtol=1e-12)
    close(
        of("BatchNormInference", x, g, b, b, abs(g), epsilon=0.25, data_format="NCX"),
        f.batch_norm(t, tb, tg.abs(), tg, tb, False, 0, 0.25),
    )
    made = of("GroupNorm", x, g, b, groups=3, epsilon=0.25, data_format="NCX")
    close(made[0], f.group_norm(t, 3, tg, tb, 0.25))
    np.testing.assert_allclose(made[1], x.reshape(4, 3, -1).mean(axis=2), rtol=1e-12)
    made = of("LayerNorm", x, np.ones(5), np.zeros(5), epsilon=0.25)
    close(made[0], f.layer_norm(t, (5,), eps=0.25))
    close(of("RMSNorm", x, begin_norm_axis=1, epsilon=0.25), f.rms_norm(t, (6, 5), eps=0.25))
    np.testing.assert_array_equal(
        of("GroupNorm", x.transpose(0, 2, 1), g, b, groups=3, epsilon=0.25)[0],
        of("GroupNorm", x, g, b, groups=3, epsilon=0.25, data_format="NCX")[0].transpose(0, 2, 1),
    )


def test_softmax_of_minus_infinity_is_nan_or_zero_by_mode() -> None:
    x = np.array([[-np.inf, -np.inf], [0, -np.inf], [np.nan, 1]])
    strict, stats = of("SoftMax", x)
    np.testing.assert_array_equal(strict, [[np.nan, np.nan], [1, 0], [np.nan, np.nan]])
    lenient, also = of("SoftMax", x, mode="inf_as_zero")
    np.testing.assert_array_equal(lenient, [[0, 0], [1, 0], [np.nan, np.nan]])
    np.testing.assert_array_equal(also, [[-np.inf], [0], [np.nan]])
    np.testing.assert_array_equal(stats[1:], also[1:])


def test_pools_agree_with_torch() -> None:
    torch = pytest.importorskip("torch")
    f, x = torch.nn.functional, np.random.default_rng(0).normal(size=(2, 3, 7, 8))
    window = {"kernel": (3, 2), "strides": (2, 1), "pads_begin": (1, 1), "pads_end": (1, 1), "data_format": "NCX"}
    t = torch.from_numpy(x)
    for exclude in (False, True):
        got = of("AvgPool", x, exclude_pad=exclude, **window)
        close(got, f.avg_pool2d(t, (3, 2), (2, 1), (1, 1), count_include_pad=not exclude))
    close(of("MaxPool", x, **window), f.max_pool2d(t, (3, 2), (2, 1), (1, 1)))
    up = {**window, "strides": (3, 3), "pads_begin": (0, 0), "pads_end": (0, 0), "rounding_type": "ceil"}
    close(of("MaxPool", x, **up), f.max_pool2d(t, (3, 2), (3, 3), ceil_mode=True))


def test_auto_pad_equals_explicit_padding() -> None:
    x = np.arange(1.0, 6.0).reshape(1, 1, 5)
    form = {"kernel": (2,), "strides": (2,), "exclude_pad": False, "data_format": "NCX"}
    told = {"pads_begin": (7,), "pads_end": (7,)}  # these are ignored
    for mode, begin, end in (("SAME_UPPER", 0, 1), ("SAME_LOWER", 1, 0), ("VALID", 0, 0)):
        explicit = of("AvgPool", x, pads_begin=(begin,), pads_end=(end,), **form)
        np.testing.assert_array_equal(of("AvgPool", x, auto_pad=mode, **form, **told), explicit)
    np.testing.assert_array_equal(explicit, [[[1.5, 3.5]]])
    weights = np.array([[[1.0, 10.0]]])
    conv = {"strides": (2,), "dilations": (1,), "data_format": "NCX", "weights_format": "IOX"}
    made = of("ConvTranspose", x, weights, auto_pad="SAME_UPPER", **conv, **told)
    np.testing.assert_array_equal(made, [[[1, 10, 2, 20, 3, 30, 4, 40, 5, 50]]])


def test_max_pool_prefers_nan_and_the_first_of_equal_elements() -> None:
    x = np.array([[[1.0, 1, 0, np.nan, 5]]])
    form = {"kernel": (2,), "strides": (1,), "pads_begin": (0,), "pads_end": (0,), "data_format": "NCX"}
    np.testing.assert_array_equal(of("MaxPool", x, **form), [[[1, 1, np.nan, np.nan]]])
    back = of("MaxPoolBackward", x, np.array([[[1.0, 10, 100, 1000]]]), **form)
    np.testing.assert_array_equal(back, [[[1, 10, 0, 1100, 0]]])
    np.testing.assert_array_equal(of("MaxPoolTake", x, np.arange(5.0).reshape(x.shape), **form), [[[0, 1, 3, 3]]])


@pytest.mark.parametrize(
    ("mode", "name"), [("nearest", "nearest-exact"), ("linear", "bilinear"), ("bilinear", "bilinear")]
)
def test_interpolation_agrees_with_torch(mode: str, name: str) -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=(1, 2, 5, 4))
    for sizes in ((7, 9), (3, 2), (5, 4), (1, 8)):
        got = of("Interpolate", x, mode=mode, sizes=sizes, data_format="NCX")
        close(got, torch.nn.functional.interpolate(torch.from_numpy(x), sizes, mode=name))
    if mode != "nearest":
        got = of(
            "Interpolate",
            x,
            mode=mode,
            sizes=(7, 9),
            data_format="NCX",
            coordinate_transformation_mode="align_corners",
        )
        close(got, torch.nn.functional.interpolate(torch.from_numpy(x), (7, 9), mode=name, align_corners=True))


_SLIDING = {"strides": [2, 1], "dilations": [1, 2], "groups": 2, "data_format": "NCX"}
_EVEN, _UNEVEN = ({**_SLIDING, "pads_begin": [1, 1], "pads_end": [1, e]} for e in (1, 0))
#: Kind, shapes of the operands, attributes.
SUMS = {
    "Convolution": ("Convolution", [(3, 4, 9, 9), (6, 2, 3, 3), (6,)], {**_UNEVEN, "weights_format": "OIX"}),
    "ConvTranspose": ("ConvTranspose", [(3, 4, 9, 9), (4, 3, 3, 3), (6,)], {**_EVEN, "weights_format": "IOX"}),
    "ConvTranspose, cropped": (
        "ConvTranspose",
        [(3, 4, 9, 9), (4, 3, 3, 3), (6,)],
        {**_UNEVEN, "weights_format": "IOX"},
    ),
    "ConvolutionBackwardData": (
        "ConvolutionBackwardData",
        [(3, 6, 5, 7), (6, 2, 3, 3)],
        {**_EVEN, "weights_format": "OIX", "dst_shape": [3, 4, 9, 9]},
    ),
    "ConvolutionBackwardWeights": (
        "ConvolutionBackwardWeights",
        [(3, 4, 9, 9), (3, 6, 5, 7)],
        {**_EVEN, "weights_format": "OIX", "weights_shape": [6, 2, 3, 3]},
    ),
    "ConvTransposeBackwardData": (
        "ConvTransposeBackwardData",
        [(3, 6, 9, 9), (4, 3, 3, 3)],
        {**_EVEN, "weights_format": "IOX"},
    ),
    "ConvTransposeBackwardWeights": (
        "ConvTransposeBackwardWeights",
        [(3, 4, 5, 7), (3, 6, 9, 9)],
        {**_EVEN, "weights_format": "IOX", "weights_shape": [4, 3, 3, 3]},
    ),
    "MatMul": ("MatMul", [(4, 200), (200, 5), (5,)], {}),
    "MatMul of batches": ("MatMul", [(3, 4, 200), (3, 200, 5), (5,)], {}),
    "MatMul of batches by one matrix": ("MatMul", [(3, 4, 200), (200, 5), (5,)], {}),
    "MatMul of batches by one matrix, transposed": ("MatMul", [(3, 200, 4), (200, 5), (5,)], {"transpose_a": True}),
    "MatMul of batches, transposed": ("MatMul", [(2, 1, 200, 4), (3, 5, 200), (4, 5)],
                                      {"transpose_a": True, "transpose_b": True}),
    "MatMul of a row": ("MatMul", [(200,), (3, 200, 5), (3, 1)], {}),
    "MatMul of nothing": ("MatMul", [(0, 4, 200), (1, 200, 5), (5,)], {}),
}  # fmt: skip


def strided(array: np.ndarray) -> np.ndarray:
    """The same values, each row in memory of three times its length."""
    wide = np.zeros((*array.shape[:-1], 3 * array.shape[-1]), array.dtype)[..., : array.shape[-1]]
    wide[...] = array
    return wide


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed"])
@pytest.mark.parametrize("case", SUMS)
def test_16_bit_sums_are_accumulated_in_f32_and_rounded_once(case: str, layout: str, dtype: str) -> None:
    """Where torch rounds the result of a window or a sample, or the product before the bias, it computes in f32."""
    pytest.importorskip("torch")
    kind, shapes, attrs = SUMS[case]
    numpy, rng = dtypes.get(dtype).numpy, np.random.default_rng(0)
    g = og.Graph()
    given = {f"x{i}": rng.normal(size=shape).astype(numpy) for i, shape in enumerate(shapes)}
    g.add_op(kind, *[g.input(n, dtype, a.shape) for n, a in given.items()], name="y", **attrs)
    laid = {"contiguous": lambda a: a, "strided": strided, "transposed": lambda a: np.array(a.T, order="C").T}[layout]
    got, truth = og.compile(g, device="cpu")({n: laid(a) for n, a in given.items()}), og.evaluate(g, given)
    assert got.dtype == numpy and got.shape == truth.shape
    terms = max(np.prod(shape[1:]) for shape in shapes) * 2.0**-24 * np.max(np.abs(truth), initial=0)  # f32's own error
    ulp = np.spacing(np.abs(truth).astype(numpy)).astype(np.float64)
    assert (np.abs(got.astype(np.float64) - truth) <= 0.5 * ulp + terms).all()


def test_cudnn_is_deterministic_without_tf32_during_a_convolution() -> None:
    torch = pytest.importorskip("torch")
    from opgraph.runtime.providers.torch_ops import exact_convolutions

    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    with exact_convolutions(opdef.get("Convolution", where="test")):
        assert (cudnn.allow_tf32, cudnn.deterministic) == (False, True)
    assert (cudnn.allow_tf32, cudnn.deterministic) == before
    with exact_convolutions(opdef.get("AvgPool", where="test")):
        assert (cudnn.allow_tf32, cudnn.deterministic) == before


def test_convolution_runs_with_frozen_torch_backend_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    its = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(its, "__allow_nonbracketed_mutation_flag", False)  # as by `disable_global_flags`
    with pytest.raises(RuntimeError, match="not allowed"):
        torch.backends.cudnn.deterministic = False
    kind, shapes, attrs = SUMS["Convolution"]
    g = og.Graph()
    given = {f"x{i}": np.ones(shape, np.float32) for i, shape in enumerate(shapes)}
    g.add_op(kind, *[g.input(n, "f32", a.shape) for n, a in given.items()], name="y", **attrs)
    assert np.array_equal(og.compile(g, device="cpu")(given), og.evaluate(g, given))


# -- unknown sizes and training ---------------------------------------------------------------------------------------

NET = f"""\
graph(x: f32[batch,2,8,8], w: f32[4,2,3,3], b: f32[4], g: f32[4], h: f32[4], v: f32[3,64]) -> (y)
  c = Convolution(x, w, b, strides=[1, 1], pads_begin=[1, 1], pads_end=[1, 1], dilations=[1, 1], {CONV})
  n = GroupNorm(c, g, h, groups=2, keep_stats=false, data_format="NCX")
  r = ReLU(n)
  m = MaxPool(r, {POOL})
  f = StaticReshape(m, shape=[0, 64], special_zero=true)
  z = MatMul(f, v, transpose_b=true)
  y = LogSoftmax(z)
"""


def test_network_with_unknown_batch_size_trains_as_in_torch() -> None:
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    rng = np.random.default_rng(0)
    graph = og.parse(NET)
    given = {
        str(t.name): rng.normal(size=[5 if not isinstance(d, int) else d for d in t.dims or ()]).astype(np.float32)
        for t in graph.inputs
    }
    names = list(given)
    y, vjp = og.compile(graph, wrt=names).vjp(given)
    t = {n: torch.from_numpy(a.copy()).requires_grad_() for n, a in given.items()}
    hidden = f.relu(f.group_norm(f.conv2d(t["x"], t["w"], t["b"], padding=1), 2, t["g"], t["h"]))
    expected = f.log_softmax(f.max_pool2d(hidden, 2).flatten(1) @ t["v"].T, -1)
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    seed = rng.normal(size=y.shape).astype(np.float32)
    expected.backward(torch.from_numpy(seed))
    for name, gradient in vjp(seed).items():
        wanted = t[name].grad.numpy()
        np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=1e-4 * np.max(np.abs(wanted)), err_msg=name)


def test_gradient_of_strided_convolution_needs_known_sizes() -> None:
    text = f"y = Convolution(x, w, strides=[2], pads_begin=[0], pads_end=[0], dilations=[1], {CONV})"
    unknown = og.parse(f"graph(x: f32[n,3,m], w: f32[4,3,2]) -> (y)\n  {text}")
    with pytest.raises(errors.Unimplemented, match="step is larger than 1") as caught:
        og.gradient(unknown, ["x"])
    assert len(str(caught.value).split("\n")) == 3
    g = og.gradient(og.parse(f"graph(x: f32[n,3,7], w: f32[4,3,2]) -> (y)\n  {text}"), ["x"])
    assert g.outputs[0].dims == ("n", 3, 7)
    stepless = og.parse(f"graph(x: f32[n,3,m], w: f32[4,3,2]) -> (y)\n  {text.replace('strides=[2]', 'strides=[1]')}")
    x, w = np.ones((2, 3, 6), np.float32), np.ones((4, 3, 2), np.float32)
    assert og.evaluate(og.gradient(stepless, ["x"]), w=w, x=x, d_y=np.ones((2, 4, 5), np.float32)).shape == x.shape


MIXED = [
    ("LayerNorm", "bf16", "f32", 2, {"keep_stats": False}, 1),
    ("LayerNorm", "bf16", "bf16", 2, {}, 3),
    ("LayerNorm", "f16", "f32", 2, {}, 3),
    ("RMSNorm", "f16", "f16", 1, {}, 1),
    ("RMSNorm", "bf16", "f32", 1, {}, 1),
    ("GroupNorm", "f16", "f32", 2, {"groups": 2}, 3),
    ("BatchNormForwardTraining", "bf16", "f32", 4, {"epsilon": 0.25}, 5),
    ("BatchNormInference", "f16", "f32", 4, {"epsilon": 0.25}, 1),
]


@pytest.mark.parametrize(("kind", "src", "of_others", "count", "attrs", "outputs"), MIXED, ids=lambda v: str(v)[:24])
def test_parameters_may_have_a_wider_dtype_than_data(
    kind: str, src: str, of_others: str, count: int, attrs: dict[str, Any], outputs: int
) -> None:
    pytest.importorskip("torch")
    from opgraph.runtime.providers.torch_ops import TorchOps

    rng = np.random.default_rng(0)
    g = og.Graph()
    names = ["x", *[f"p{i}" for i in range(count)]]
    inputs = [g.input("x", src, (3, 5, 4)), *[g.input(n, of_others, (4,)) for n in names[1:]]]
    g.add_op(kind, *inputs, name="y", outputs=outputs, **attrs)
    given = {
        n: np.asarray(rng.uniform(0.5, 2, t.dims)).astype(dtypes.get(t.dtype).numpy)  # type: ignore[arg-type]
        for n, t in zip(names, inputs, strict=True)
    }
    (part,) = g.finalize().get_partitions()
    made = NativePartition(Program(part), TorchOps())([given[str(t.name)] for t in part.input_ports])
    truths = og.evaluate(g, given)
    truths = list(truths.values()) if outputs > 1 else [truths]
    for got, truth, port in zip(made, truths, g.outputs, strict=True):
        assert got.dtype == dtypes.get(port.dtype).numpy
        np.testing.assert_allclose(
            got.astype(np.float64), truth, rtol=2 * float(ml_dtypes.finfo(got.dtype).eps), atol=1e-6
        )
    backward = og.gradient(g, names)
    seeds = {str(t.name): np.ones((3, 5, 4), dtypes.get(src).numpy) for t in backward.inputs if str(t.name) == "d_y"}
    feeds = {
        str(t.name): {**given, **seeds}.get(str(t.name), np.zeros(t.dims, dtypes.get(t.dtype).numpy))  # type: ignore[arg-type]
        for t in backward.inputs
    }
    rounded, exact = og.evaluate(backward, feeds, dtype=None), og.evaluate(backward, feeds)
    for name, port in zip(names, backward.outputs, strict=True):
        assert port.dtype == (src if name == "x" else of_others)
        size = np.max(np.abs(exact[f"d_{name}"])) + 1
        np.testing.assert_allclose(rounded[f"d_{name}"].astype(np.float64), exact[f"d_{name}"], atol=0.05 * size)


# -- refusals ---------------------------------------------------------------------------------------------------------

STEP = "strides=[1], pads_begin=[0], pads_end=[0], dilations=[1]"
UP = f'{STEP}, data_format="NCX", weights_format="IOX", output_padding=[1]'
MANY, FAR = STEP.replace("[1]", "[1, 1]"), STEP.replace("dilations=[1]", "dilations=[9]")
STILL = STEP.replace("strides=[1]", "strides=[0]")
BACK = f"ConvolutionBackwardData(d, w, {STEP}, {CONV}, dst_shape="
SHAPE, ITSELF = errors.InvalidShape, errors.InvalidGraphOp
BAD = [
    (f"Convolution(d, w, {STEP}, {CONV})", SHAPE, "input channels of a group: 4 in the data, 3", "weights"),
    (f"Convolution(c, w, {STEP}, {CONV}, groups=2)", SHAPE, "3 channels do not make 2 groups", "divide"),
    (f"Convolution(c, w, {STEP}, {CONV}, groups=0)", SHAPE, "there are 0 groups", "1 or more"),
    (f"Convolution(u, w, {STEP}, {CONV}, groups=0)", ITSELF, "groups=0", "1 or more"),
    (f"Convolution(c, w, v, {STEP}, {CONV})", SHAPE, "a bias [7] for 4 channels", "one element"),
    (f"Convolution(c, w, {MANY}, {CONV})", SHAPE, "has 2 entries for 1", "each"),
    (f"Convolution(c, w, {STILL}, {CONV})", SHAPE, "strides is [0]", "at least 1"),
    (f"Convolution(u, w, {STILL}, {CONV})", ITSELF, "strides=[0]", "at least 1"),
    (f"Convolution(c, w, {FAR}, {CONV})", SHAPE, "does not fit", "pad"),
    (f"Convolution(x, w, {STEP}, {CONV})", SHAPE, "no spatial axes", "batch"),
    (f"{BACK}[2, 3, 9])", SHAPE, "has [8] positions", "dst_shape"),
    (f"{BACK}[3, 3, 5])", SHAPE, "operands make it", "fits"),
    (f"{BACK}[5])", SHAPE, "1 entries for 3", "each"),
    (f"ConvolutionBackwardWeights(c, e, {STEP}, {CONV}, weights_shape=[4, 3, 2])", SHAPE, "of 2 and 1 samples", "one"),
    (f"ConvTranspose(d, w, {UP})", ITSELF, "output_padding=[1] for strides [1]", "less"),
    (
        f'ConvTranspose(d, w, {UP.replace("strides=[1]", "strides=[2]")}, auto_pad="SAME_UPPER")',
        ITSELF,
        "auto_pad=SAME_UPPER and an output_padding",
        "instead",
    ),
    ("MaxPool(x, kernel=[2], strides=[1], pads_begin=[0], pads_end=[0])", SHAPE, "no spatial axes", "batch"),
    ("MaxPool(c, kernel=[9], strides=[1], pads_begin=[0], pads_end=[0])", SHAPE, "does not fit", "pad"),
    ("MaxPool(c, kernel=[0], strides=[1], pads_begin=[0], pads_end=[0])", SHAPE, "kernel is [0]", "at least 1"),
    ('Interpolate(c, mode="trilinear", sizes=[4])', SHAPE, "trilinear for 1 spatial axes", "linear"),
    ('Interpolate(c, mode="linear", sizes=[4, 4])', SHAPE, "2 entries for 1", "each"),
    ('Interpolate(c, mode="linear", scales=[-1.0])', SHAPE, "are [-1.0]", "positive"),
    ('Interpolate(o, mode="linear", sizes=[4])', SHAPE, "no elements along a spatial axis of [0]", "scales"),
    ('Interpolate(c, mode="cubic", sizes=[4])', ITSELF, "mode='cubic' is not a choice", "nearest"),
    ("LayerNorm(c, v, v, keep_stats=false)", SHAPE, "gamma is [7]", "begin_norm_axis"),
    ("LayerNorm(c, use_affine=false)", ITSELF, "keep_stats=True got 1 outputs", "outputs=3"),
    ("RMSNorm(c, begin_norm_axis=5)", SHAPE, "no axis 5", "from -3"),
    ("GroupNorm(c, groups=4, use_affine=false, keep_stats=false)", SHAPE, "5 channels do not make 4", "divide"),
    ("BatchNormInference(c, v, v, v, v, epsilon=0.1)", SHAPE, "5 channels and", "data_format"),
    ("SoftMax(c, axis=3)", SHAPE, "no axis 3", "from -3"),
    ("SoftMaxBackward(c, d, axis=1)", SHAPE, "differ in shape", "gradient of dst"),
    ("PReLUBackward(c, v, c)", ITSELF, "takes 2 outputs", "diff_slope"),
    ("BiasAddBackward(v)", SHAPE, "no channel axis", "two dimensions"),
]


@pytest.mark.parametrize(("call", "error", "what", "fix"), BAD, ids=[b[0][:60] for b in BAD])
def test_invalid_call_is_refused_in_three_lines(
    call: str, error: type[errors.OpGraphError], what: str, fix: str
) -> None:
    header = (
        "c: f32[2,3,5], w: f32[4,3,2], d: f32[2,4,4], e: f32[1,4,4], v: f32[7], x: f32[2,3], o: f32[2,0,3], u: f32[*]"
    )
    with pytest.raises(error) as caught:
        og.parse(f"graph({header}) -> (y)\n  y = {call}")
    assert what in caught.value.what and fix in caught.value.fix, str(caught.value)
    assert call.split("(")[0] in caught.value.where
    assert len(str(caught.value).split("\n")) == 3


def test_interpolation_of_an_empty_axis_is_refused_at_run_time() -> None:
    graph = og.parse(
        "graph(x: f64[1,2,?,3], n: s32[2]) -> (y)\n"
        '  y = Interpolate(x, n, mode="linear", coordinate_transformation_mode="align_corners", data_format="NCX")'
    )
    given = {"x": np.ones((1, 2, 0, 3)), "n": np.array([4, 3], np.int32)}
    for call in (og.evaluate, lambda graph, feeds: og.compile(graph)(feeds)):
        with pytest.raises(errors.InvalidShape, match="no elements along a spatial axis"):
            call(graph.finalize(), given)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("declared", ["?", "{}"])
def test_interpolation_scales_may_empty_an_axis(mode: str, size: int, declared: str) -> None:
    graph = og.parse(
        f"graph(x: f32[2,3,{declared.format(size)},4]) -> (y)\n"
        f'  y = Interpolate(x, mode="{mode}", scales=[0.5, 2.0], data_format="NCX")'
    )
    x, d = np.ones((2, 3, size, 4), np.float32), np.ones((2, 3, 0, 8), np.float32)
    for made in og.evaluate(graph, {"x": x}, dtype=None), og.compile(graph)(x=x):
        np.testing.assert_array_equal(made, d, strict=True)
    slope = og.gradient(graph, ("x",))
    for made in og.evaluate(slope, {"x": x, "d_y": d}, dtype=None), og.compile(slope)(x=x, d_y=d):
        np.testing.assert_array_equal(made, np.zeros_like(x), strict=True)


def test_random_calls_are_accepted_or_refused_in_three_lines() -> None:
    families = {"norm", "convolution", "pooling", "resampling", "quantization", "parameter"}
    heavy = [r for r in opdef.all_ops() if r.family in families]
    rng, taken, refused = random.Random(0), 0, 0

    def shape() -> tuple[Any, ...] | None:
        return tuple(rng.choice((0, 1, 2, 3, 4, 6, None, "n")) for _ in range(rng.choice((0, 1, 2, 3, 3, 4, 5))))

    def value(kind: str, rank: int) -> Any:
        if kind.endswith("[]"):
            odd = (-1, 0, 2, 3, 2**40) if kind == "s64[]" else (0.0, -1.0, float("nan"), float("inf"))
            one = 1 if kind == "s64[]" else 1.5
            return [
                rng.choice(odd) if rng.random() < 0.3 else one for _ in range(max(rng.choice((0, rank - 2, rank)), 0))
            ]
        return rng.choice({"s64": (-9, -1, 0, 1, 2, 2**40), "bool": (False, True), "f32": (0.0, 1e-5, -1.0)}[kind])

    for _ in range(2500):
        record, g, like = rng.choice(heavy), og.Graph(), shape()
        inputs = []
        for port in record.inputs[: len(record.inputs) - rng.randint(0, sum(p.optional for p in record.inputs))]:
            dtype = record.types.get(port.type, (port.type,))[0]
            dims = rng.choice((like, like, shape(), None, tuple(like or ())[-1:]))
            inputs.append(g.input(f"x{len(inputs)}", dtype, dims))
        rank = len(like or ())
        attrs = {
            a.name: rng.choice(a.choices) if a.choices else value(a.type, rank)
            for a in record.attrs
            if a.required or rng.random() < 0.5
        }
        stated = "s8" if record.by_dtype else None
        try:
            g.add_op(record.kind, *inputs, outputs=rng.choice((1, len(record.outputs))), dtype=stated, **attrs)
            taken += 1
        except errors.OpGraphError as error:
            assert len(str(error).split("\n")) == 3
            refused += 1
    assert taken > 100 and refused > 1000
