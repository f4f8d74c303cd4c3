"""A graph that is one region of onnxruntime: calls cost as much as onnxruntime's own, and errors are opgraph's."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import DeviceError, InvalidArguments, InvalidDataType, InvalidShape

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")

from opgraph.runtime.providers import onnx_region, onnxruntime  # noqa: E402  # needs onnx

NODE = 'onnx_domain="", onnx_opset=21'
rng = np.random.default_rng(5)


@pytest.fixture
def whole() -> og.Executable:
    return og.compile(
        og.parse(
            "graph(x: f32[n,8], w: f32[8,n]) -> (z, y)\n"
            f'  y: f32[n,n] = Wildcard(x, w, onnx_op="MatMul", {NODE})\n'
            f'  z: f32[n,n] = Wildcard(y, onnx_op="Softmax", {NODE})'
        )
    )


def feeds(n: int) -> dict[str, Any]:
    return {"x": rng.standard_normal((n, 8), np.float32), "w": rng.standard_normal((8, n), np.float32)}


def assert_right(f: og.Executable, given: dict[str, Any], got: dict[str, Any]) -> None:
    wanted = og.evaluate(f.graph, given)
    assert list(got) == ["z", "y"]
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-5)


def test_repeated_calls_go_straight_to_onnxruntime(whole: og.Executable) -> None:
    for n in (3, 4, 3, 4, 0, 0, 1, 1):
        given = feeds(n)
        assert_right(whole, given, whole(given))
        assert_right(whole, given, whole(**given))
    names: list[str] = []
    given = feeds(3)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        whole(given)
    finally:
        sys.setprofile(before)
    assert names == ["__call__", "__call__", "feed"]


@pytest.mark.parametrize(
    ("name", "make", "error"),
    [
        ("x", lambda a: a.astype(np.float64), InvalidDataType),
        ("x", lambda a: a.astype(">f4"), InvalidDataType),
        ("x", lambda a: a[:2], InvalidShape),
        ("w", lambda a: a[:, :2], InvalidShape),
        ("w", lambda a: a[None], InvalidShape),
        ("w", lambda a: a.tolist(), InvalidArguments),
        ("v", lambda a: a, InvalidArguments),
    ],
)
def test_invalid_call_is_refused_after_valid_ones(whole: og.Executable, name: str, make: Any, error: Any) -> None:
    given = feeds(3)
    whole(given), whole(given)
    with pytest.raises(error):
        whole({**given, name: make(given.get(name, given["x"]))})
    with pytest.raises(InvalidArguments):
        whole({"x": given["x"]})
    assert_right(whole, given, whole(given))


def test_views_and_torch_tensors_are_accepted(whole: og.Executable) -> None:
    given = feeds(8)
    whole(given), whole(given)
    turned = {"x": given["w"].T[::-1], "w": given["x"].T}
    assert_right(whole, turned, whole(turned))
    torch = pytest.importorskip("torch")
    got = whole({k: torch.from_numpy(a) for k, a in given.items()})
    assert isinstance(got["y"], torch.Tensor)
    assert_right(whole, given, {k: v.numpy() for k, v in got.items()})


def test_large_results_are_written_without_a_copy(whole: og.Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    given = feeds(256)
    whole(given)

    def refuse(*_: Any) -> Any:
        raise AssertionError("onnxruntime would copy them")

    monkeypatch.setattr(onnxruntime.OnnxRuntimeRegion, "feed", refuse)
    assert_right(whole, given, whole(given))


def test_node_error_raises_after_valid_calls() -> None:
    f = og.compile(
        og.parse("graph(x: f32[3], i: s64[1]) -> (y)\n" + f'  y: f32[1] = Wildcard(x, i, onnx_op="Gather", {NODE})')
    )
    x = np.float32([1, 2, 3])
    for _ in range(2):
        assert f(x=x, i=np.int64([2])).tolist() == [3]
        with pytest.raises(DeviceError, match="out of"):
            f(x=x, i=np.int64([7]))


# -- quantized weights ------------------------------------------------------------------------------------------------


def test_quantized_weights_stay_integers() -> None:
    """As floats, converted once, they would take four times the memory, and onnxruntime could not multiply integers."""
    make, to_proto = onnx.helper.make_node, onnx.numpy_helper.from_array
    weights = rng.integers(-127, 127, (64, 32)).astype(np.int8)
    constants = {"s": np.float32(0.05), "z": np.uint8(3), "v": np.float32(0.01), "o": np.int8(0), "weights": weights}
    graph = onnx.helper.make_graph(
        [
            make("QuantizeLinear", ["x", "s", "z"], ["q"]),
            make("DequantizeLinear", ["q", "s", "z"], ["d"]),
            make("DequantizeLinear", ["weights", "v", "o"], ["w"]),
            make("MatMul", ["d", "w"], ["m"]),
            make("QuantizeLinear", ["m", "s", "z"], ["r"]),
            make("DequantizeLinear", ["r", "s", "z"], ["y"]),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ("n", 64))],
        [onnx.helper.make_tensor_value_info("y", 1, ("n", 32))],
        [to_proto(np.asarray(a), name) for name, a in constants.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    f = og.compile(og.onnx.load(model))
    assert [len(p.ops) for p in f.partitions] == [6]
    x = rng.standard_normal((5, 64), np.float32)
    session = onnxruntime.onnxruntime_module().InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    np.testing.assert_array_equal(f(x=x), session.run(None, {"x": x})[0])


# -- means over pixels ------------------------------------------------------------------------------------------------


def image_model(axes: list[int], keepdims: int = 1, dims: tuple[int, ...] = (2, 3, 6, 6), kind: str = "Conv") -> Any:
    """A convolution (or a Relu) and a mean over some axes."""
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["a"], kernel_shape=[3] * (len(dims) - 2))
        if kind == "Conv"
        else onnx.helper.make_node(kind, ["x"], ["a"]),
        onnx.helper.make_node("ReduceMean", ["a", "axes"], ["y"], keepdims=keepdims),
    ]
    weights = rng.standard_normal((5, dims[1], *[3] * (len(dims) - 2))).astype(np.float32)
    constants = [onnx.numpy_helper.from_array(np.int64(axes), "axes")]
    constants += [onnx.numpy_helper.from_array(weights, "w")] if kind == "Conv" else []
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ("n", *dims[1:]))],
        [onnx.helper.make_tensor_value_info("y", 1, [None] * (len(dims) if keepdims else len(dims) - len(axes)))],
        constants,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.parametrize(
    ("given", "pools"),
    [
        ({"axes": [2, 3]}, True),
        ({"axes": [-1, -2]}, True),
        ({"axes": [3]}, False),
        ({"axes": [1, 2]}, False),
        ({"axes": [2, 3], "keepdims": 0}, False),
        ({"axes": [2, 3], "dims": (2, 3, 6, 6, 6)}, False),
        ({"axes": [2, 3], "kind": "Relu"}, False),
    ],
)
def test_mean_over_pixels_beside_convolutions_becomes_a_pool(given: dict[str, Any], pools: bool) -> None:
    graph = og.onnx.load(image_model(**given))
    f = og.compile(graph)
    (part,) = f.partitions
    ops = [n.op_type for n in onnx_region.region_model(part.ops, part.input_ports, part.output_ports).proto.graph.node]
    assert ("GlobalAveragePool" in ops, "ReduceMean" in ops) == (pools, not pools)
    x = rng.standard_normal(given.get("dims", (2, 3, 6, 6))).astype(np.float32)
    np.testing.assert_allclose(f(x=x), og.evaluate(graph, {"x": x}), rtol=1e-4, atol=1e-5)
