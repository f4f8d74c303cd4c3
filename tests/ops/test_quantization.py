"""Quantize, Dequantize and their dynamic forms: numbers, saturation, f8, groups of 4 bits, with and without torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from library_calls import spelled

import opgraph as og
from opgraph import errors
from opgraph.ir import dtypes
from opgraph.ir.opdef import all_ops
from opgraph.ir.schema import bind_dtypes
from opgraph.runtime.library_partition import NativePartition, NumpyOps, OpLibrary, Program

INF, NAN = float("inf"), float("nan")


def graph(kind: str, dtypes_in: list[str], arrays: list[np.ndarray], result: str | None, **attrs: Any) -> og.Graph:
    g = og.Graph()
    inputs = [g.input(f"x{i}", d, a.shape) for i, (d, a) in enumerate(zip(dtypes_in, arrays, strict=True))]
    g.add_op(kind, *inputs, name="y", dtype=result, **attrs)
    return g.finalize()


def libraries() -> list[OpLibrary]:
    found: list[OpLibrary] = [NumpyOps()]
    try:
        from opgraph.runtime.providers.torch_ops import TorchOps
    except ImportError:
        return found
    return [*found, TorchOps()]


def everywhere(g: og.Graph, arrays: list[np.ndarray]) -> np.ndarray:
    """The result of every library, and of the smaller ops; checks that all are equal."""
    named = {f"x{i}": a for i, a in enumerate(arrays)}
    expected = np.asarray(og.evaluate(g, named, dtype=None))
    for part in g.get_partitions(policy="debug"):
        for library in libraries():
            (got,) = NativePartition(Program(part), library)([named[str(t.name)] for t in part.input_ports])
            np.testing.assert_array_equal(got, expected, strict=True)
    np.testing.assert_array_equal(og.compile(g)(named), expected, strict=True)
    try:
        small = spelled(g)
    except errors.Unimplemented:
        return expected
    np.testing.assert_array_equal(og.evaluate(small, named, dtype=None), expected, strict=True)
    return expected


def test_quantize_rounds_halves_to_even_and_saturates() -> None:
    x = np.array([0.25, 0.75, -0.25, 1.25, 100, -100, INF, -INF, NAN, -0.0], np.float32)
    g = graph("Quantize", ["f32"], [x], "s8", scales=[0.5])
    np.testing.assert_array_equal(everywhere(g, [x]), np.array([0, 2, 0, 2, 127, -128, 127, -128, 0, 0], np.int8))
    g = graph("Quantize", ["f32"], [x], "u8", scales=[0.5], zps=[3])
    np.testing.assert_array_equal(everywhere(g, [x]), np.array([4, 4, 2, 6, 203, 0, 255, 0, 0, 3], np.uint8))


def test_dequantize_subtracts_the_zero_point_first() -> None:
    x = np.array([-128, -1, 0, 1, 127], np.int8)
    g = graph("Dequantize", ["s8"], [x], None, scales=[0.25], zps=[-4])
    np.testing.assert_array_equal(everywhere(g, [x]), np.float32(0.25) * (x.astype(np.float32) + 4))
    assert g.outputs[0].dtype == "f32"


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_per_channel_scales_apply_along_their_axis(axis: int) -> None:
    x = np.arange(24, dtype=np.int8).reshape(2, 3, 4)
    count = x.shape[axis]
    scales, zps = [2.0**-i for i in range(count)], list(range(count))
    g = graph("Dequantize", ["s8"], [x], None, scales=scales, zps=zps, axis=axis, qtype="per_channel")
    shape = [-1 if i == axis % 3 else 1 for i in range(3)]
    along = np.array(scales, np.float32).reshape(shape), np.array(zps, np.float32).reshape(shape)
    np.testing.assert_array_equal(everywhere(g, [x]), (x - along[1]) * along[0])
    s = np.array(scales, np.float32)
    dynamic = graph("DynamicDequantize", ["s8", "f32"], [x, s], None, axis=axis, qtype="per_channel")
    np.testing.assert_array_equal(everywhere(dynamic, [x, s]), x * along[0])
    y = x.astype(np.float32)
    back = graph("DynamicQuantize", ["f32", "f32"], [y, s], "u8", axis=axis, qtype="per_channel")
    np.testing.assert_array_equal(everywhere(back, [y, s]), np.clip(np.rint(y / along[0]), 0, 255).astype(np.uint8))


@pytest.mark.parametrize("stored", ["f8_e4m3", "f8_e5m2"])
def test_f8_is_a_scaled_conversion(stored: str) -> None:
    x = np.array([1.0, 0.3, -7.7, 100.0, 0.0], np.float32)
    g = graph("Quantize", ["f32"], [x], stored, scales=[0.25])
    made = everywhere(g, [x])
    np.testing.assert_array_equal(made, (x / np.float32(0.25)).astype(dtypes.get(stored).numpy))
    back = graph("Dequantize", [stored], [made], None, scales=[0.25])
    np.testing.assert_array_equal(everywhere(back, [made]), made.astype(np.float32) * np.float32(0.25))


@pytest.mark.parametrize(("src", "zps"), [("s4", "s4"), ("u4", "u8"), ("s8", "s8"), ("u8", "s32")])
@pytest.mark.parametrize("scale", ["f16", "bf16", "f32"])
def test_per_group_scales_apply_to_their_group(src: str, zps: str, scale: str) -> None:
    rng = np.random.default_rng(0)
    low = 0 if src.startswith("u") else -8
    x = rng.integers(low, low + 16, (2, 8, 3)).astype(dtypes.get(src).numpy)
    s = (2.0 ** rng.integers(-3, 3, (2, 2, 3))).astype(dtypes.get(scale).numpy)
    z = rng.integers(0, 4, (2, 2, 3)).astype(dtypes.get(zps).numpy)
    form = {"axis": 1, "qtype": "per_group", "group_shape": [1, 4, 1]}
    g = graph("DynamicDequantize", [src, scale, zps], [x, s, z], None, **form)
    expected = (x.astype(np.float32) - np.repeat(z.astype(np.float32), 4, 1)) * np.repeat(s.astype(np.float32), 4, 1)
    got = everywhere(g, [x, s, z])
    assert got.dtype == s.dtype
    np.testing.assert_array_equal(got, expected.astype(s.dtype))


def test_float64_evaluation_of_quantize_rounds() -> None:
    x = np.array([0.2, 0.30000001], np.float32)
    g = graph("Quantize", ["f32"], [x], "s8", scales=[0.1])
    np.testing.assert_array_equal(og.evaluate(g, x0=x), [2, 3])
    assert og.evaluate(g, x0=x).dtype == np.int8


def test_scales_have_gradients_and_quantized_values_have_none() -> None:
    x, s = np.arange(6, dtype=np.int8).reshape(2, 3), np.array([0.5, 2, 4], np.float32)
    g = graph("DynamicDequantize", ["s8", "f32"], [x, s], None, axis=1, qtype="per_channel")
    h = og.gradient(g, ["x1"])
    got = og.evaluate(
        h, {t.name: {"x0": x, "x1": s, "d_y": np.ones((2, 3), np.float32)}[str(t.name)] for t in h.inputs}
    )
    np.testing.assert_array_equal(got, x.sum(axis=0))
    rounded = og.Graph()
    q = rounded.add_op("Quantize", rounded.input("x", shape=(3,)), dtype="s8", scales=[1.0])
    rounded.add_op("Dequantize", q, name="y", scales=[1.0])
    np.testing.assert_array_equal(og.evaluate(og.gradient(rounded, ["x"]), x=np.ones(3, np.float32)), np.zeros(3))


BAD = [
    ("y: s8[*] = Quantize(x, scales=[1.0, 2.0])", errors.InvalidGraphOp, "2 scales for qtype=per_tensor"),
    ("y: s8[*] = Quantize(x, scales=[])", errors.InvalidGraphOp, "0 scales"),
    ("y: s8[*] = Quantize(x, scales=[1.0], zps=[1, 2])", errors.InvalidGraphOp, "2 zps for 1 scales"),
    ("y: f8_e4m3[*] = Quantize(x, scales=[1.0], zps=[1])", errors.InvalidGraphOp, "zero points next to f8"),
    ('y: s8[*] = Quantize(x, scales=[1.0, 2.0], qtype="per_channel")', errors.InvalidShape, "2 scales for 3"),
    ("y = Quantize(x, scales=[1.0])", errors.InvalidDataType, "is not stated"),
    ("y: s32[*] = Quantize(x, scales=[1.0])", errors.InvalidDataType, "does not take s32"),
    ("y = Dequantize(x, scales=[1.0])", errors.InvalidDataType, "does not take f32"),
    ('y = DynamicDequantize(i, s, qtype="per_channel")', errors.InvalidShape, "scales are [2]"),
    ('y = DynamicDequantize(i, s, qtype="per_group")', errors.InvalidShape, "group_shape has 0 entries for 2 axes"),
    ('y = DynamicDequantize(u, s, qtype="per_group")', errors.InvalidGraphOp, "no group_shape"),
    ("y = DynamicDequantize(i, t, group_shape=[1, 1])", errors.InvalidGraphOp, "a group_shape"),
    ('y = DynamicDequantize(i, s, qtype="per_group", group_shape=[1, 2])', errors.InvalidShape, "do not divide 3"),
]


@pytest.mark.parametrize(("line", "error", "what"), BAD, ids=[b[0] for b in BAD])
def test_invalid_call_is_refused_in_three_lines(line: str, error: type[errors.OpGraphError], what: str) -> None:
    with pytest.raises(error) as caught:
        og.parse(f"graph(x: f32[2,3], i: s8[2,3], s: f32[2], t: f32[], u: s8[*]) -> (y)\n  {line}")
    assert what in caught.value.what and len(str(caught.value).split("\n")) == 3


@pytest.mark.parametrize("dtype", [name for name, d in dtypes.BY_NAME.items() if d.category == "storage"])
def test_only_quantization_ops_accept_storage_dtypes(dtype: str) -> None:
    """Checks the records of all ops; structural ones take any dtype of a graph."""
    takers = set()
    for record in all_ops():
        given = [og.LogicalTensor(i, dtype, (4,)) for i, p in enumerate(record.inputs) if p.variadic or not p.optional]
        try:
            bind_dtypes(record, given, ["f32"] if record.by_dtype else [], "test")
        except errors.InvalidDataType as error:
            assert dtype in error.what
        else:
            takers.add(record.kind)
    structural = {r.kind for r in all_ops() if r.family == "structural"}
    assert takers >= structural and takers - structural <= {"Dequantize"}


def test_4_bit_dtypes_are_only_stored() -> None:
    assert ml_dtypes.int4 == dtypes.get("s4").numpy.type
    with pytest.raises(errors.InvalidDataType, match="does not take s4"):
        og.parse("graph(x: s4[3]) -> (y)\n  y = Add(x, x)")


def test_scale_of_symbolic_size_may_have_one_element() -> None:
    text = "graph(x: f32[4,3], s: f32[{}]) -> (y)\n  q: u8[4,3] = DynamicQuantize(x, s)\n  y = DynamicDequantize(q, s)"
    for size in ("?", "n"):
        g = og.parse(text.format(size)).finalize()
        x = np.arange(12, dtype=np.float32).reshape(4, 3)
        np.testing.assert_array_equal(og.compile(g)(x=x, s=np.ones(1, np.float32)), x)
        with pytest.raises(errors.InvalidShape):
            og.evaluate(g, x=x, s=np.ones(2, np.float32))
