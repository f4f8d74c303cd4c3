"""The onnxruntime provider: a region of ONNX nodes runs as one session, in any dtypes."""

from __future__ import annotations

import os
import sys
from base64 import b64encode
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opgraph as og
from opgraph.errors import DeviceError, ModelError, Unimplemented

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from opgraph.runtime.providers import onnxruntime as provider  # noqa: E402  # needs onnx
from opgraph.runtime.providers.onnx_region import region_model  # noqa: E402

NODE = 'onnx_domain="", onnx_opset=21'


def region(text: str, constants: dict[str, np.ndarray] | None = None) -> provider.OnnxRuntimeRegion:
    (part,) = og.parse(text, constants=constants).get_partitions()
    assert (part.kind, part.provider) == ("library", "onnxruntime")
    return provider.OnnxRuntimeRegion(part)


def test_region_is_one_onnxruntime_session() -> None:
    made = region(
        "graph(x: f32[n,4], w: f32[4,4]) -> (z, y)\n"
        f'  y: f32[n,4] = Wildcard(x, w, onnx_op="MatMul", {NODE})\n'
        f'  z: f32[4,n] = Wildcard(y, onnx_op="Transpose", {NODE})'
    )
    x, w = np.ones((3, 4), np.float32), np.eye(4, dtype=np.float32)
    outs = {a.shape: a for a in made.run([x, w])}
    assert set(outs) == {(4, 3), (3, 4)}
    assert made.runs_in == "onnxruntime"


def test_equal_sizes_are_declared_until_a_call_contradicts() -> None:
    """Otherwise it reshapes both operands of a sum of convolutions. Sizes declared for inner values may be wrong."""
    made = region(
        "graph(x: f32[n,4], y: f32[n,4]) -> (z)\n"
        f'  a: f32[4,n] = Wildcard(x, onnx_op="Transpose", {NODE})\n'
        f'  b: f32[4,n] = Wildcard(y, onnx_op="Transpose", {NODE})\n'
        f'  z: f32[4,n] = Wildcard(a, b, onnx_op="Max", {NODE})'
    )

    def declared() -> list[str]:
        return [i.type.tensor_type.shape.dim[0].dim_param for i in made._model.proto.graph.input]

    x, y = np.ones((3, 4), np.float32), np.arange(4, dtype=np.float32).reshape(1, 4)
    assert made.run([x, x])[0].tolist() == x.T.tolist()
    assert declared() == ["n", "n"]
    assert made.run([x, y])[0].tolist() == np.maximum(x, y).T.tolist()
    assert declared() == ["", ""]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="says which cores a process may use")
def test_region_threads_are_limited_to_available_cores() -> None:
    """onnxruntime counts the machine's cores; two spinning threads would then share one core."""
    text = f'graph(x: f32[n,4]) -> (y)\n  y: f32[4,n] = Wildcard(x, onnx_op="Transpose", {NODE})'
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        few = region(text)._session.get_session_options().intra_op_num_threads
    finally:
        os.sched_setaffinity(0, before)
    assert few == (1 if os.cpu_count() != 1 else 0)


def test_trailing_absent_input_is_omitted() -> None:
    """Written as "", it makes onnxruntime 1.31 crash over a constant scale."""
    made = region(
        "graph(x: f32[3]) -> (y)\n  const w: f32[3] = [1.0, 2.0, 3.0]\n"
        f'  y: f32[3] = Wildcard(x, w, onnx_op="LayerNormalization", {NODE}, onnx_absent_inputs=[2])'
    )
    (got,) = made.run([np.float32([-1, 0, 1])])
    np.testing.assert_allclose(got, np.float32([-1, 0, 3]) * np.sqrt(1.5, dtype=np.float32), rtol=1e-4)


def test_a_result_that_is_left_out_among_any_number_has_a_name() -> None:
    """Written as "", it makes onnxruntime 1.31 crash."""
    (part,) = og.parse(
        "graph(x: f32[8]) -> (a, b)\n"
        f'  a: f32[2], b: f32[2] = Wildcard(x, onnx_op="Split", {NODE}, num_outputs=4, onnx_absent_outputs=[0, 3])'
    ).get_partitions()
    node = region_model(part.ops, part.input_ports, part.output_ports).proto.graph.node[0]
    assert all(node.output) and len({*node.output}) == 4
    got = provider.OnnxRuntimeRegion(part).run([np.arange(8, dtype=np.float32)])
    assert [result.tolist() for result in got] == [[2, 3], [4, 5]]


def test_large_constants_stay_outside_the_region_model() -> None:
    weights = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    made = region(
        "graph(x: f32[n,64]) -> (y)\n  const w: f32[64,64] = sha256:"
        + og.ir.equality.constant_digest(og.LogicalTensor(0, "f32", (64, 64), data=weights))
        + f'\n  y: f32[n,64] = Wildcard(x, w, onnx_op="MatMul", {NODE})',
        {"w": weights},
    )
    assert made._model.proto.ByteSize() < 2000
    np.testing.assert_array_equal(made.run([np.eye(64, dtype=np.float32)])[0], weights)


@pytest.mark.parametrize("name", ["bf16", "f8_e4m3", "f8_e5m2", "f16", "s8", "boolean", "f64"])
def test_every_dtype_passes_through_a_session(name: str) -> None:
    target = og.ir.dtypes.get(name).numpy
    made = region(f'graph(x: {name}[2,3]) -> (y)\n  y: {name}[3,2] = Wildcard(x, onnx_op="Transpose", {NODE})')
    x = np.arange(6).reshape(2, 3).astype(target)
    (y,) = made.run([x])
    assert y.dtype == target
    np.testing.assert_array_equal(y.astype(np.float32), x.T.astype(np.float32))


def test_outputs_survive_later_runs_and_out_arrays_are_filled() -> None:
    made = region(f'graph(x: bf16[4]) -> (y)\n  y: bf16[4] = Wildcard(x, onnx_op="Identity", {NODE})')
    (first,) = made.run([np.ones(4, ml_dtypes.bfloat16)])
    out = np.zeros(4, ml_dtypes.bfloat16)
    assert made([np.full(4, 2, ml_dtypes.bfloat16)], [out])[0] is out
    assert first.tolist() == [1] * 4
    assert out.tolist() == [2] * 4


def test_zero_dimensional_and_empty_arrays_pass_through() -> None:
    one = region(f'graph(x: f32[]) -> (y)\n  y: f32[] = Wildcard(x, onnx_op="Identity", {NODE})')
    assert one.run([np.float32(3)])[0].shape == ()
    none = region(f'graph(x: f32[0,3]) -> (y)\n  y: f32[3,0] = Wildcard(x, onnx_op="Transpose", {NODE})')
    assert none.run([np.zeros((0, 3), np.float32)])[0].shape == (3, 0)


def test_onnx_evaluator_runs_ops_without_an_onnxruntime_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provider, "_noticed", False)
    text = f'graph(x: bf16[2,2]) -> (y)\n  y: bf16[2,2] = Wildcard(x, x, onnx_op="MatMul", {NODE})'
    with pytest.warns(RuntimeWarning, match="onnxruntime cannot run"):
        made = region(text)
    assert made.runs_in == "onnx"
    (y,) = made.run([np.full((2, 2), 1.5, ml_dtypes.bfloat16)])
    assert y.dtype == ml_dtypes.bfloat16
    assert y.tolist() == [[4.5, 4.5]] * 2
    region(text)  # no second notice: warnings are errors here


def test_op_without_any_implementation_is_refused_by_name() -> None:
    with pytest.raises(DeviceError, match="Nope"):
        region('graph(x: f32[2]) -> (y)\n  y: f32[2] = Wildcard(x, onnx_op="Nope", onnx_domain="my", onnx_opset=1)')


def test_malformed_wildcards_are_refused() -> None:
    with pytest.raises(ModelError, match="AttributeProto"):
        region(f'graph(x: f32[2]) -> (y)\n  y: f32[2] = Wildcard(x, onnx_op="If", then_branch="proto:!!", {NODE})')
    outside = onnx.TensorProto(name="t", dims=[2], data_type=1, data_location=1)
    outside.external_data.add(key="location", value="secret")
    value = b64encode(onnx.helper.make_attribute("value", outside).SerializeToString()).decode()
    with pytest.raises(ModelError, match="refers to a file"):
        region(f'graph() -> (y)\n  y: f32[2] = Wildcard(onnx_op="Constant", value="proto:{value}", {NODE})')
    with pytest.raises(Unimplemented, match="opsets 21 and 13"):
        region(
            f'graph(x: f32[2]) -> (z)\n  y: f32[2] = Wildcard(x, onnx_op="Softmax", {NODE})\n'
            '  z: f32[2] = Wildcard(y, onnx_op="Softmax", onnx_domain="", onnx_opset=13)'
        )
    with pytest.raises(Unimplemented, match="type of"):
        region(f'graph(x: undef[2]) -> (y)\n  y: f32[2] = Wildcard(x, onnx_op="Softmax", {NODE})')


def test_missing_onnxruntime_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DeviceError, match=r"pip install 'opgraph\[ort\]'"):
        region(f'graph(x: f32[2]) -> (y)\n  y: f32[2] = Wildcard(x, onnx_op="Softmax", {NODE})')


# -- the reference --------------------------------------------------------------------------------------------------


def wildcard(text: str) -> og.Op:
    return og.parse(text).ops[0]


def test_reference_computes_foreign_ops_in_float64() -> None:
    op = wildcard(f'graph(x: f32[2,3], w: f32[3,2]) -> (y)\n  y: f32[2,2] = Wildcard(x, w, onnx_op="MatMul", {NODE})')
    x, w = np.random.default_rng(0).normal(size=(2, 3)), np.random.default_rng(1).normal(size=(3, 2))
    (y,) = provider.reference_foreign(op, (x, w))
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, x @ w, rtol=1e-15)


def test_reference_runs_contrib_ops_in_onnxruntime() -> None:
    op = wildcard(
        'graph(x: f32[2,2]) -> (y)\n  y: f32[2,2] = Wildcard(x, x, onnx_op="FusedMatMul", onnx_domain="com.microsoft", '
        "onnx_opset=1, transB=1)"
    )
    x = np.float64([[1, 2], [3, 4]])
    (y,) = provider.reference_foreign(op, (x, x))
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, x @ x.T)


def test_evaluate_runs_imported_graphs_without_a_runner() -> None:
    graph = og.parse(
        f'graph(x: f32[2,2]) -> (y)\n  a: f32[2,2] = Wildcard(x, x, onnx_op="MatMul", {NODE})\n  y = Exp(a)'
    )
    x = np.float64([[0.1, 0.2], [0.3, 0.4]]).astype(np.float32)
    got: Any = og.evaluate(graph, x=x)
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64) @ x.astype(np.float64)), rtol=1e-14)


#: Nodes for which onnx's evaluator (1.23) differs from onnxruntime and from its own specification.
MISTAKEN = [
    ("Softmax", 11, ""),
    ("LogSoftmax", 11, ", axis=2"),
    ("Hardmax", 11, ""),
    ("LRN", 13, ", size=3, alpha=0.5"),
    ("LpNormalization", 17, ", p=1, axis=1"),
]


@pytest.mark.parametrize(("kind", "opset", "attrs"), MISTAKEN, ids=[m[0] for m in MISTAKEN])
def test_reference_follows_onnxruntime_where_the_evaluator_is_wrong(kind: str, opset: int, attrs: str) -> None:
    node = f'onnx_op="{kind}", onnx_domain="", onnx_opset={opset}{attrs}'
    graph = og.parse(f"graph(x: f32[2,4,3,5]) -> (y)\n  y: f32[2,4,3,5] = Wildcard(x, {node})")
    x = np.random.default_rng(0).normal(size=(2, 4, 3, 5)).astype(np.float32)
    np.testing.assert_allclose(og.evaluate(graph, x=x), og.compile(graph)(x=x), rtol=1e-5, atol=1e-6)


def test_reference_batch_norm_uses_given_statistics_in_old_opsets() -> None:
    node = 'onnx_op="BatchNormalization", onnx_domain="", onnx_opset=11'
    graph = og.parse(
        f"graph(x: f32[2,4,3], s: f32[4], b: f32[4], m: f32[4], v: f32[4]) -> (y)\n"
        f"  y: f32[2,4,3] = Wildcard(x, s, b, m, v, {node})"
    )
    rng = np.random.default_rng(0)
    x, (s, b, m, v) = rng.normal(size=(2, 4, 3)).astype(np.float32), rng.random((4, 4)).astype(np.float32) + 0.1
    exact = (x - m[:, None]) / np.sqrt(v[:, None] + 1e-5) * s[:, None] + b[:, None]
    np.testing.assert_allclose(og.evaluate(graph, x=x, s=s, b=b, m=m, v=v), exact, rtol=1e-5, atol=1e-6)


def test_reference_floor_is_computed_in_float64() -> None:
    """Floor of 1 - 2^-40 is 0; in f32 it is 1 and its floor 1, both in onnxruntime and in the evaluator."""
    op = wildcard(f'graph(x: f32[2]) -> (y)\n  y: f32[2] = Wildcard(x, onnx_op="Floor", {NODE})')
    (y,) = provider.reference_foreign(op, [np.array([1 - 2.0**-40, 2.5])])
    np.testing.assert_array_equal(y, [0, 2])


def test_reference_does_not_overflow_narrow_types() -> None:
    op = wildcard(f'graph(x: f16[2]) -> (y)\n  y: f16[2] = Wildcard(x, x, onnx_op="Mul", {NODE})')
    (y,) = provider.reference_foreign(op, [np.array([300.0, 2.0])] * 2)
    np.testing.assert_array_equal(y, [90000, 4])


def test_reference_passes_sequences_between_ops() -> None:
    text = f"""graph(x: f32[2,3], w: f32[3], i: s64[]) -> (y, n)
      s: undef[*] = Wildcard(x, w, onnx_op="SequenceConstruct", {NODE})
      y: f32[*] = Wildcard(s, i, onnx_op="SequenceAt", {NODE})
      n: s64[] = Wildcard(s, onnx_op="SequenceLength", {NODE})"""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = og.evaluate(og.parse(text), x=x, w=x[0], i=np.int64(0))
    np.testing.assert_array_equal(made["y"], x)
    assert made["n"] == 2
