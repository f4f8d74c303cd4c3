"""Ops that run in a library: shapes, numbers, dtypes, gradients and errors, in NumPy and in torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from library_calls import CALLS, LIBRARY, Call, arrays_of, feeds, graph_of, listed, reference_of

import opgraph as og
from opgraph import errors
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import port_name
from opgraph.ir.opdef import OpDef
from opgraph.runtime.library_partition import NativePartition, Program

KINDS = pytest.mark.parametrize("record", LIBRARY, ids=lambda r: r.kind)
UNKNOWN = pytest.mark.parametrize("unknown", ["", "sizes", "symbols", "rank"])


def op(kind: str) -> OpDef:
    return next(r for r in LIBRARY if r.kind == kind)


def dtypes_of(record: OpDef) -> tuple[str, ...]:
    return record.types[record.inputs[0].type]


def calls(record: OpDef) -> Iterator[tuple[Call, str, list[np.ndarray]]]:
    for call in CALLS[record.kind]:
        for dtype in dtypes_of(record):
            yield call, dtype, arrays_of(call, dtype, record)


def test_every_library_op_has_test_calls() -> None:
    assert set(CALLS) == {r.kind for r in LIBRARY}
    assert all(CALLS.values())


# -- shapes and dtypes ------------------------------------------------------------------------------------------------


@KINDS
@UNKNOWN
def test_inferred_shapes_and_dtypes_match_the_reference(record: OpDef, unknown: str) -> None:
    for call, dtype, arrays in calls(record):
        outputs = graph_of(record, call, dtype, unknown).outputs
        assert outputs[0].dtype == dtype
        for made, result in zip(outputs, reference_of(record, call, arrays), strict=True):
            assert result.dtype == dtypes.get(made.dtype).numpy
            if made.dims is not None:
                assert len(made.dims) == result.ndim
                sizes = [(d, s) for d, s in zip(made.dims, result.shape) if isinstance(d, int)]
                assert all(d == s for d, s in sizes), f"{call}: {made.dims} is not {result.shape}"
            assert unknown or call.given or made.has_known_shape


#: Families whose result sizes are computed from those of the operands.
COMPUTED = ("convolution", "pooling", "resampling")


@KINDS
def test_ops_that_move_axes_keep_symbolic_sizes(record: OpDef) -> None:
    for call in CALLS[record.kind]:
        made = graph_of(record, call, "f32", "symbols").outputs[0]
        computed = record.kind in ("StaticReshape", "Slice", "Concat") or record.family in COMPUTED
        assert made.dims is not None and (computed or None not in made.dims), f"{call}: {made.dims}"


@KINDS
def test_the_text_form_reads_back(record: OpDef) -> None:
    for call in CALLS[record.kind]:
        for unknown in ("", "symbols"):
            g = graph_of(record, call, "f32", unknown)
            assert og.parse(str(g)) == g, str(g)


@KINDS
def test_16_bit_results_are_f32_rounded_once(record: OpDef) -> None:
    for call, dtype, arrays in calls(record):
        if dtype in ("f16", "bf16"):
            wide = reference_of(record, call, [a.astype(np.float32) if a.itemsize == 2 else a for a in arrays])
            for got, exact in zip(reference_of(record, call, arrays), wide, strict=True):
                np.testing.assert_array_equal(got, exact.astype(got.dtype))


def test_bf16_matmul_may_have_an_f32_result() -> None:
    g = og.parse("graph(x: bf16[1,3], w: bf16[3,1]) -> (y)\n  y: f32[1,1] = MatMul(x, w)")
    x, w = np.array([[1, 1, 1]], ml_dtypes.bfloat16), np.array([[1], [2.0**-8], [2.0**-9]], ml_dtypes.bfloat16)
    for result in (og.evaluate(g, dtype=None, x=x, w=w), og.compile(g)(x=x, w=w)):
        assert result.dtype == np.float32 and result[0, 0] == 1 + 2.0**-8 + 2.0**-9


def test_f64_matmul_is_rounded_to_f32_at_the_end() -> None:
    g = og.parse("graph(x: f64[2], w: f64[2]) -> (y)\n  y: f32[] = MatMul(x, w)")
    x, w = np.array([1e8, 1.0]), np.array([1.0, -99999999.0])
    for result in (og.evaluate(g, dtype=None, x=x, w=w), og.compile(g)(x=x, w=w)):
        assert result.dtype == np.float32 and result == 1


# -- numbers ----------------------------------------------------------------------------------------------------------


#: The allowed error of a library's results that take many steps: distances, squares, sums, a root, a quotient.
ULPS = {"norm": 32}


@KINDS
def test_torch_agrees_with_the_reference_in_every_dtype(record: OpDef) -> None:
    pytest.importorskip("torch")
    from opgraph.runtime.providers.torch_ops import TorchOps

    for call, dtype, arrays in calls(record):
        g = graph_of(record, call, dtype)
        (part,) = g.get_partitions()
        named = feeds(arrays)
        made = NativePartition(Program(part), TorchOps())([named[str(t.name)] for t in part.input_ports])
        truths = listed(og.evaluate(g, named))
        for got, truth, port in zip(made, truths, g.outputs, strict=True):
            assert got.shape == truth.shape and got.dtype == dtypes.get(port.dtype).numpy
            if dtypes.get(port.dtype).is_float:
                finite = np.isfinite(truth)
                np.testing.assert_array_equal(got[~finite], truth[~finite].astype(got.dtype))
                got, truth = got[finite].astype(np.float64), truth[finite]
                error = np.max(np.abs(got - truth) / np.maximum(np.abs(truth), 1), initial=0)
                assert error <= ULPS.get(record.family, 4) * float(ml_dtypes.finfo(dtypes.get(port.dtype).numpy).eps), (
                    f"{call} {dtype}"
                )
            else:
                np.testing.assert_array_equal(got, truth)


@pytest.mark.parametrize(
    ("kind", "of_nothing"),
    [
        ("ReduceSum", 0.0),
        ("ReduceMean", np.nan),
        ("ReduceMax", -np.inf),
        ("ReduceMin", np.inf),
        ("ReduceProd", 1.0),
        ("ReduceL1", 0.0),
        ("ReduceL2", 0.0),
    ],
)
def test_reductions_of_empty_axes_and_of_nan(kind: str, of_nothing: float) -> None:
    for array, expected in (
        (np.zeros((0, 2), np.float32), of_nothing),
        (np.array([[1, 1], [np.nan, np.nan], [2, 2]], np.float32), np.nan),
    ):
        g = og.parse(f"graph(x: f32[?,2]) -> (y)\n  y = {kind}(x, axes=[0])")
        wanted = np.full(2, expected, np.float32)
        np.testing.assert_array_equal(og.evaluate(g, dtype=None, x=array), wanted)
        np.testing.assert_array_equal(og.compile(g)(x=array), wanted)
        assert og.evaluate(og.gradient(g, ["x"]), x=array, d_y=np.ones(2, np.float32)).shape == array.shape


@pytest.mark.parametrize("kind", [r.kind for r in LIBRARY if r.family == "reduction"])
def test_reduction_axes_may_be_an_input(kind: str) -> None:
    x, axes = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 8, np.array([-1, 0], np.int32)
    expected = og.evaluate(og.parse(f"graph(x: f32[2,3,4]) -> (y)\n  y = {kind}(x, axes=[-1, 0])"), dtype=None, x=x)
    at_run_time = og.parse(f"graph(x: f32[2,3,4], a: s32[2]) -> (y)\n  y = {kind}(x, a)")
    assert at_run_time.outputs[0].dims is None
    np.testing.assert_array_equal(og.evaluate(at_run_time, dtype=None, x=x, a=axes), expected)
    np.testing.assert_allclose(og.compile(at_run_time)(x=x, a=axes), expected, rtol=1e-6)
    g = og.Graph()
    g.add_op(kind, g.input("x", shape=(2, None, 4)), g.constant("a", axes), name="y")
    assert g.finalize().outputs[0].dims == (None,)
    np.testing.assert_array_equal(og.evaluate(g, dtype=None, x=x), expected)
    np.testing.assert_allclose(og.compile(g)(x=x), expected, rtol=1e-6)


# -- gradients --------------------------------------------------------------------------------------------------------


def torch_derivatives(
    record: OpDef, call: Call, arrays: list[np.ndarray], seeds: list[np.ndarray], order: int
) -> list[Any]:
    """The gradients of the inputs (order 1), or of sum(gradients^2 / 2 + gradients) with respect to them (order 2)."""
    torch = pytest.importorskip("torch")
    given = [torch.from_numpy(a.copy()) for a in arrays]
    tensors = [given[i].requires_grad_() for i in flowing(record, arrays)]
    made = record.torch(torch, *given, **call.attrs)
    results = list(made)[: call.outputs] if record.returns_several else [made]
    more: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    reached = [(r, torch.from_numpy(s)) for r, s in zip(results, seeds, strict=True) if r.requires_grad]
    outputs, weights = [r for r, _ in reached], [s for _, s in reached]
    first = torch.autograd.grad(outputs, tensors, weights, create_graph=order > 1, **more)
    if order == 1:
        return [t.detach().numpy() for t in first]
    total = sum((t * t / 2 + t).sum() for t in first) + sum(0 * t.sum() for t in tensors)
    return [t.numpy() for t in torch.autograd.grad(total, tensors, **more)]


def flowing(record: OpDef, arrays: list[np.ndarray]) -> list[int]:
    """The inputs that have a gradient."""
    ports = enumerate(record.with_optional(len(arrays)))
    return [i for i, p in ports if not p.shape_only and "f64" in record.types.get(p.type, (p.type,))]


def seeds_of(record: OpDef, call: Call, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """A gradient of each output."""
    rng = np.random.default_rng(1)
    return [np.asarray(rng.normal(size=r.shape)) for r in reference_of(record, call, arrays)]


def named_seeds(g: og.Graph, seeds: list[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"d_{port_name(t)}": s for t, s in zip(g.outputs, seeds, strict=True)}


@KINDS
@UNKNOWN
def test_gradient_agrees_with_torch(record: OpDef, unknown: str) -> None:
    for call in CALLS[record.kind]:
        arrays = arrays_of(call, "f64", record)
        names = [f"x{i}" for i in flowing(record, arrays)]
        forward = graph_of(record, call, "f64", unknown)
        try:
            g = og.gradient(forward, names)
        except errors.Unimplemented as error:  # a norm's axes depend on the rank, GroupNorm's on the channels
            assert unknown == "rank" or call.given or (unknown and record.family in (*COMPUTED, "norm"))
            assert "unknown" in error.what or "nobody knows how many channels" in error.what
            continue
        seeds = seeds_of(record, call, arrays)
        values = {**feeds(arrays), **named_seeds(forward, seeds)}
        got = og.evaluate(g, {t.name: values[t.name] for t in g.inputs})
        got = got if isinstance(got, dict) else {f"d_{names[0]}": got}
        for name, expected in zip(names, torch_derivatives(record, call, arrays, seeds, 1)):
            np.testing.assert_allclose(got[f"d_{name}"], expected, rtol=1e-12, atol=1e-12, err_msg=f"{call} {name}")


@KINDS
def test_gradient_agrees_with_differences(record: OpDef) -> None:
    for call in CALLS[record.kind][::3]:
        rng = np.random.default_rng(2)
        arrays = arrays_of(call, "f64", record)  # move the values of ties apart, where the function has kinks
        moving = flowing(record, arrays)
        arrays = [a + rng.uniform(0, 0.1, a.shape) if i in moving else a for i, a in enumerate(arrays)]
        forward = graph_of(record, call, "f64")
        try:
            g = og.gradient(forward, [f"x{i}" for i in moving])
        except errors.Unimplemented:
            assert call.given
            continue
        seeds = seeds_of(record, call, arrays)
        values = {**feeds(arrays), **named_seeds(forward, seeds)}
        found = listed(og.evaluate(g, {t.name: values[t.name] for t in g.inputs}))
        for index, gradient in zip(moving, found, strict=True):
            if gradient.size == 0:
                continue
            way = rng.normal(size=arrays[index].shape)

            def along(step: float, index: int = index, way: np.ndarray = way) -> float:
                moved = [a + step * way if i == index else a for i, a in enumerate(arrays)]  # noqa: B023
                made = zip(seeds, reference_of(record, call, moved), strict=True)  # noqa: B023
                return float(sum(np.sum(s * r) for s, r in made))

            h = 1e-5
            wanted = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
            size = float(np.sum(np.abs(gradient * way))) + 1
            assert abs(float(np.sum(gradient * way)) - wanted) <= 1e-6 * size, f"{call} x{index}"


@KINDS
def test_second_derivative_agrees_with_torch(record: OpDef) -> None:
    for call in CALLS[record.kind]:
        arrays = arrays_of(call, "f64", record)
        names = [f"x{i}" for i in flowing(record, arrays)]
        forward = graph_of(record, call, "f64")
        try:
            first, seeds = og.gradient(forward, names), seeds_of(record, call, arrays)
        except errors.Unimplemented as error:  # sizes in an input are unknown before the call
            assert call.given and "unknown" in error.what
            continue
        values = {**feeds(arrays), **named_seeds(forward, seeds)}
        made = og.evaluate(first, {t.name: values[t.name] for t in first.inputs})
        made = made if isinstance(made, dict) else {f"d_{names[0]}": made}
        reach = [n for n in names if n in {t.name for t in first.inputs}]
        expected = dict(zip(names, torch_derivatives(record, call, arrays, seeds, 2)))
        for name in set(names) - set(reach):
            assert not np.any(expected[name]), f"{call}: the gradient does not depend on {name}, torch's does"
        if not reach:
            continue
        try:
            twice = og.gradient(first, reach)
        except errors.Unimplemented as error:
            assert call.given and "unknown" in error.what
            continue
        values.update((f"d_{n}", a + 1) for n, a in made.items())
        got = og.evaluate(twice, {t.name: values[t.name] for t in twice.inputs})
        got = got if isinstance(got, dict) else {f"d_{reach[0]}": got}
        for name in reach:
            np.testing.assert_allclose(got[f"d_{name}"], expected[name], rtol=1e-11, atol=1e-11, err_msg=str(call))


def test_reduce_prod_gradient_with_zeros_is_the_product_of_the_others() -> None:
    g = og.gradient(og.parse("graph(x: f64[3,4]) -> (y)\n  y = ReduceProd(x, axes=[1])"), ["x"])
    x = np.array([[0.0, 2, 3, 4], [0, 0, 3, 4], [5, 2, 3, 4]])
    got = og.evaluate(g, x=x, d_y=np.array([1.0, 1.0, 2.0]))
    np.testing.assert_array_equal(got, [[24, 0, 0, 0], [0, 0, 0, 0], [48, 120, 80, 60]])


def test_reduce_l2_gradient_is_zero_at_zero() -> None:
    g = og.gradient(og.parse("graph(x: f64[3,2]) -> (y)\n  y = ReduceL2(x, axes=[1])"), ["x"])
    x = np.array([[3.0, -4.0], [0.0, 0.0], [0.0, 2.0]])
    np.testing.assert_allclose(og.evaluate(g, x=x, d_y=np.ones(3)), [[0.6, -0.8], [0, 0], [0, 1]], rtol=1e-15)


def test_f16_mean_over_many_elements_has_a_gradient() -> None:
    for size in (100_000, None):
        g = og.gradient(og.parse(f"graph(x: f16[{size or '?'}]) -> (y)\n  y = ReduceMean(x, axes=[0])"), ["x"])
        given = {"x": np.ones(100_000, np.float16), "d_y": np.float16(1000).reshape(())}
        got = og.evaluate(g, given, dtype=None)
        np.testing.assert_array_equal(got, np.full(100_000, np.float16(0.01)))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@KINDS
def test_a_gradient_has_the_dtype_of_its_input(record: OpDef, dtype: str) -> None:
    call = CALLS[record.kind][0]
    for tensor in og.gradient(graph_of(record, call, dtype), ["x0"]).outputs:
        assert tensor.dtype == dtype


def test_gradient_with_unknown_rank_or_axes_is_refused() -> None:
    for text, fix in (
        ("graph(x: f32[*], w: f32[3,4]) -> (y)\n  y = MatMul(x, w)", "declare its shape"),
        ("graph(x: f32[3,4], w: s32[1]) -> (y)\n  y = ReduceSum(x, w)", "keep_dims=True"),
    ):
        with pytest.raises(errors.Unimplemented, match=fix):
            og.gradient(og.parse(text), ["x"])
    kept = og.parse("graph(x: f32[3,4], w: s32[1]) -> (y)\n  y = ReduceMean(x, w, keep_dims=true)")
    given = {"x": np.ones((3, 4), np.float32), "w": np.array([0], np.int32), "d_y": np.ones((1, 4), np.float32)}
    g = og.gradient(kept, ["x"])
    got = og.evaluate(g, {t.name: given[t.name] for t in g.inputs})
    np.testing.assert_allclose(got, np.full((3, 4), 1 / 3))


@pytest.mark.parametrize(
    ("shape", "src", "made"),
    [([0, 3, -1], (0, 12, 5), (0, 3, 20)), ([0, -1], (2, 0, 5), (2, 0)), ([-1, 5], (0, 12), (0, 5))],
)
@pytest.mark.parametrize("declared", ["known", "unknown"])
def test_reshape_to_minus_one_works_for_an_empty_batch(
    shape: list[int], src: tuple[int, ...], made: tuple[int, ...], declared: str
) -> None:
    """Copied sizes are on both sides, so -1 is the same size for a batch of 0 as for others. torch and NumPy refuse."""
    sizes = ",".join("?" if declared == "unknown" else str(d) for d in src)
    graph = og.parse(
        f"graph(x: f32[{sizes}]) -> (y)\n  %0 = Exp(x)\n  y = StaticReshape(%0, shape={shape}, special_zero=true)"
    )
    x = np.ones(src, np.float32)
    assert declared == "unknown" or graph.outputs[0].dims == made
    assert og.compile(graph)(x=x).shape == og.evaluate(graph, x=x).shape == made


# -- errors -----------------------------------------------------------------------------------------------------------

_INPUTS = "x: f32[2,3], z: f32[7], s: f32[], i: s32[2,3], a: s32[1], h: f16[2,3], e: f32[0,12]"
BAD = [
    ("y = ReduceSum(x)", errors.InvalidGraphOp, "axes nowhere", "axes=[-1]"),
    ("y = ReduceSum(x, a, axes=[0])", errors.InvalidGraphOp, "axes twice", "leave one of them out"),
    ("y = ReduceMax(x, axes=[2])", errors.InvalidShape, "no axis 2 in 2 dimensions", "from -2 to 1"),
    ("y = ReduceMax(x, axes=[1, -1])", errors.InvalidShape, "one axis twice", "once"),
    ("y = ReduceMin(i, axes=[0])", errors.InvalidDataType, "does not take s32", "TypeCast"),
    ("y = MatMul(x, x)", errors.InvalidShape, "no common inner size: 3 and 2", "transpose"),
    ("y = MatMul(x, s)", errors.InvalidShape, "no dimensions", "Multiply"),
    ("y = MatMul(x, x, z, transpose_b=true)", errors.InvalidShape, "does not broadcast to", "column"),
    ("y: f16[*] = MatMul(x, x, transpose_b=true)", errors.InvalidDataType, "does not make f16", "f32"),
    ("y = MatMul(x, i)", errors.InvalidDataType, "does not take s32", "TypeCast"),
    ("y = StaticReshape(x, shape=[4], special_zero=false)", errors.InvalidShape, "does not have the elements", "equal"),
    ("y = StaticReshape(x, shape=[4, -1], special_zero=false)", errors.InvalidShape, "not have the elements", "equal"),
    ("y = StaticReshape(x, shape=[-1, -1], special_zero=true)", errors.InvalidShape, "is none", "at most once"),
    ("y = StaticReshape(x, shape=[-1, 0], special_zero=false)", errors.InvalidShape, "nothing says", "give the size"),
    ("y = StaticReshape(e, shape=[0, 7, -1], special_zero=true)", errors.InvalidShape, "not have the elem", "equal"),
    ("y = StaticReshape(x, shape=[2, 3, 0], special_zero=true)", errors.InvalidShape, "copies axis 2", "give sizes"),
    ("y = StaticReshape(x, shape=[6])", errors.InvalidGraphOp, "needs attribute 'special_zero'", "set special_zero"),
    ("y = ReshapeTo(x, z)", errors.InvalidShape, "differ in their number of elements", "equal size"),
    ("y = StaticTranspose(x, order=[0, 0])", errors.InvalidShape, "no permutation", "each axis of src once"),
    ("y = StaticTranspose(x, order=[0])", errors.InvalidShape, "no permutation", "each axis of src once"),
    ("y = Unsqueeze(x, axes=[3])", errors.InvalidShape, "no axis 3 in 3 dimensions", "from -3 to 2"),
    ("y = Squeeze(x, axes=[0])", errors.InvalidShape, "not of size 1", "name axes of size 1"),
    ("y = Concat(x, z, axis=0)", errors.InvalidShape, "do not join along axis 0", "all other axes equal"),
    ("y = Concat(x, x, axis=2)", errors.InvalidShape, "no axis 2", "from -2 to 1"),
    ("y = Concat(x, h, axis=0)", errors.InvalidDataType, "one dtype", "TypeCast"),
    ("y: f32[*] = Concat(axis=0)", errors.InvalidGraphOp, "joins nothing", "one input or more"),
    ("y = ConcatBackward(x, x, z, axis=0, index=0)", errors.InvalidShape, "do not join", "all other axes equal"),
    ("y = ConcatBackward(x, x, axis=0, index=1)", errors.InvalidGraphOp, "index 1 is none of 1", "from 0"),
    (
        "y = ConcatBackward(z, x, x, axis=0, index=0)",
        errors.InvalidShape,
        "is not the shape of what was joined",
        "give",
    ),
    ("y = Slice(x, starts=[0], ends=[1, 2], axes=[0])", errors.InvalidShape, "do not fit together", "one of each"),
    ("y = Slice(x, starts=[0], ends=[1], axes=[0], steps=[0])", errors.InvalidShape, "not fit together", "step of 0"),
    ("y = Slice(x, starts=[0], ends=[1], axes=[5])", errors.InvalidShape, "no axis 5", "from -2 to 1"),
    ("y = SliceBackward(x, x, starts=[0], ends=[1], axes=[0])", errors.InvalidShape, "is not the shape", "gradient"),
]


@pytest.mark.parametrize(("line", "error", "what", "fix"), BAD, ids=[b[0] for b in BAD])
def test_invalid_call_is_refused_in_three_lines(
    line: str, error: type[errors.OpGraphError], what: str, fix: str
) -> None:
    with pytest.raises(error) as caught:
        og.parse(f"graph({_INPUTS}) -> (y)\n  {line}")
    assert what in caught.value.what and fix in caught.value.fix
    assert line.split("= ")[1].split("(")[0] in caught.value.where


@pytest.mark.parametrize("kind", ["Convolution", "ConvTranspose", "ConvolutionBackwardWeights"])
@pytest.mark.parametrize("samples, inner, outer", [(2, 0, 4), (2, 3, 0), (0, 3, 4), (0, 0, 0)])
def test_convolution_of_no_channels_or_samples_is_zero(kind: str, samples: int, inner: int, outer: int) -> None:
    big, small, weights = (samples, inner, 5), (samples, outer, 4), (outer, inner, 2)
    operands = {
        "Convolution": (big, weights, 'weights_format="OIX"'),
        "ConvTranspose": (small, weights, 'weights_format="IOX"'),
        "ConvolutionBackwardWeights": (big, small, f'weights_format="OIX", weights_shape={list(weights)}'),
    }
    a, b, more = operands[kind]
    window = f'strides=[1], pads_begin=[0], pads_end=[0], dilations=[1], data_format="NCX", {more}'
    graph = og.parse(f"graph(x: f32{list(a)}, w: f32{list(b)}) -> (y)\n  y = {kind}(x, w, {window})")
    feeds = {"x": np.ones(a, np.float32), "w": np.ones(b, np.float32)}
    made = {"Convolution": small, "ConvTranspose": big, "ConvolutionBackwardWeights": weights}[kind]
    for got in og.evaluate(graph, feeds), og.compile(graph)(feeds):
        assert got.shape == made and not got.any()
    slope = og.gradient(graph, ("x", "w"))
    given = {**feeds, "d_y": np.ones(made, np.float32)}
    for name, array in og.compile(slope)({str(t.name): given[str(t.name)] for t in slope.inputs}).items():
        np.testing.assert_array_equal(array, np.zeros_like(feeds[name[2:]]), strict=True)


@pytest.mark.parametrize(
    ("kind", "src", "pads", "made"),
    [
        ("Convolution", (2, 3, 0, 4), (2, 2), (2, 5, 2, 7)),
        ("ConvTranspose", (2, 3, 0, 9), (0, 0), (2, 5, 2, 10)),
        ("ConvTranspose", (2, 3, 9, 0), (0, 0), (2, 5, 11, 1)),
        ("ConvTranspose", (2, 3, 1, 4), (2, 1), (2, 5, 0, 2)),
    ],
    ids=str,
)
def test_convolution_of_an_empty_axis_equals_its_bias(
    kind: str, src: tuple[int, ...], pads: tuple[int, int], made: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (5, 3, 3, 2) if kind == "Convolution" else (3, 5, 3, 2)
    layout = "OIX" if kind == "Convolution" else "IOX"
    begin, end = [pads[0]] * 2, [pads[1]] * 2
    graph = og.parse(
        f"graph(x: f32[n,3,h,w], w: f32{list(weights)}, b: f32[5]) -> (y)\n  y = {kind}(x, w, b, strides=[1, 1], "
        f'pads_begin={begin}, pads_end={end}, dilations=[1, 1], data_format="NCX", weights_format="{layout}")'
    )
    feeds = {"x": np.ones(src, np.float32), "w": np.full(weights, np.inf, np.float32), "b": np.arange(5, dtype="f4")}
    found = [og.evaluate(graph, feeds, dtype=None), og.compile(graph)(feeds)]
    monkeypatch.setattr("opgraph.runtime.library_partition.importlib.util.find_spec", lambda name: None)
    for got in (*found, og.compile(graph)(feeds)):
        want = np.broadcast_to(feeds["b"].reshape(1, 5, 1, 1), made)
        np.testing.assert_array_equal(got, want, strict=True)
