"""The meaning of a model in another opset: an opset changes only if every node keeps its meaning."""

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

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)


def parsed(body: str, opset: int) -> Any:
    """A model in onnx's text form."""
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\ng {body}')


def run(model: Any) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": X})[0]
    return result


@pytest.mark.parametrize(
    ("body", "opset", "others"),
    [
        ("(float[2,3,4] x) => (float[2,3,4] y) { y = Hardmax(x) }", 11, (13, 20)),
        ("(float[2,3,4] x) => (float[2,3,4] y) { y = Hardmax <axis = 1> (x) }", 13, (12,)),
        ("(float[2,3,4] x) => (float[2,3,4] y, float[2,3,4] k) { y, k = Dropout(x) }", 9, (10, 11)),
        ("(float[2,3,4] x, float[3] s) => (float[2,3,4] y) { y = PRelu(x, s) }", 6, (7, 16)),
        ("(float[2,3,4] x) => (float[2,4] y) { y = ReduceMean <axes = [-2], keepdims = 0> (x) }", 11, (10,)),
        (
            "(float[1,1,4,4] x, float[0] r, float[4] s) => (float[a,b,c,d] y) "
            '{ y = Resize <coordinate_transformation_mode = "tf_half_pixel_for_nn"> (x, r, s) }',
            11,
            (13,),
        ),
    ],
)
def test_op_with_changed_meaning_in_the_new_opset_is_refused(body: str, opset: int, others: tuple[int, ...]) -> None:
    graph = og.onnx.load(parsed(body, opset))
    for other in others:
        with pytest.raises(Unimplemented, match=f"means something else in {other}") as found:
            to_model(graph, opset=other)
        assert "export the model for opset" in found.value.fix


def test_hardmax_over_the_last_axis_converts_from_opset_11_to_13() -> None:
    model = parsed("(float[2,3,4] x) => (float[2,3,4] y) { y = Hardmax <axis = -1> (x) }", 11)
    np.testing.assert_array_equal(run(to_model(og.onnx.load(model), opset=13)), run(model))


@pytest.mark.parametrize(("form", "opset"), [("auto", 13), ("function", 20), ("contrib", 13), ("standard", 24)])
def test_units_are_found_when_an_opset_11_model_is_converted(form: str, opset: int) -> None:
    """A first save used to leave the units as they were, and a second one found them."""
    model = parsed("(float[2,3,4] x) => (float[2,3,4] y) { s = Sigmoid(x) y = Mul(x, s) }", 11)
    made = to_model(og.onnx.load(model), form=form, opset=opset)
    assert [node.op_type for node in made.graph.node] == ["QuickGelu" if form == "contrib" else "Swish"]
    assert to_model(og.onnx.load(made), form=form) == made
    np.testing.assert_allclose(run(made), run(model), rtol=1e-6)
    assert to_model(og.onnx.load(model), form="decomposed") == model


@pytest.mark.parametrize("functions", [False, True])
@pytest.mark.parametrize("form", ["auto", "decomposed", "function", "contrib", "standard"])
@pytest.mark.parametrize("element", ["float", "float16"])
def test_onnx_opset_is_imported_once_a_node_needs_it(element: str, form: str, functions: bool) -> None:
    body = "{ a = com.microsoft.QuickGelu <alpha = 1.5> (x) y = com.microsoft.QuickGelu <alpha = 0.5> (a) }"
    header = '<ir_version: 8, opset_import: ["com.microsoft" : 1]>'
    model = onnx.parser.parse_model(f"{header}\ng ({element}[2,3,4] x) => ({element}[2,3,4] y) {body}")
    made = to_model(og.onnx.load(model), form=form, functions=functions)
    onnx.checker.check_model(made, full_check=True)
    assert to_model(og.onnx.load(made), form=form, functions=functions) == made
    imported = {entry.domain: entry.version for entry in made.opset_import}
    nodes = [*made.graph.node, *(node for function in made.functions for node in function.node)]
    assert imported.get("") == (None if all(node.domain for node in nodes) else 24 if form == "standard" else 22)
    if form == "standard":  # no onnxruntime runs it
        return
    x = X.astype(np.float32 if element == "float" else np.float16)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], og.evaluate(og.onnx.load(model), x=x), rtol=1e-2)
