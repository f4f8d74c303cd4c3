"""Every form of `save` finds the units of every graph, of any origin, and is a fixed point after one save."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.cli import main
from opgraph.errors import Unimplemented
from opgraph.ir import dtypes
from opgraph.partition.rules import NORMS, RULES, Rule

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")

from opgraph.onnx.request import Request  # noqa: E402  # needs onnx
from opgraph.onnx.save import drafted, to_model  # noqa: E402

FINDING = ("auto", "function", "standard", "contrib")
ROWS = [*RULES, *NORMS]
README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def types(model: Any) -> list[str]:
    return [f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in model.graph.node]


def loaded(graph: og.Graph) -> og.Graph:
    return og.onnx.load(to_model(graph, form="decomposed"))


#: Origins of a graph; each gives a graph of the same content.
ORIGINS: dict[str, Callable[[og.Graph], og.Graph]] = {
    "composed": lambda g: g,
    "its text": lambda g: og.parse(str(g)),
    "loaded": loaded,
    "the text of a loaded one": lambda g: og.parse(str(loaded(g))),
    "a pickled one": lambda g: pickle.loads(pickle.dumps(g)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("row", ROWS, ids=[f"{i}-{row.name}" for i, row in enumerate(ROWS)])
def test_every_form_finds_the_same_units_whatever_the_graphs_origin(row: Rule, dtype: str) -> None:
    text = row.takes.replace("f32", dtype)
    for form in FINDING:
        drafts = {origin: drafted(make(og.parse(text)), Request(form=form)) for origin, make in ORIGINS.items()}
        expected = drafts["loaded"]
        for origin, draft in drafts.items():
            assert Counter(types(draft.proto())) == Counter(types(expected.proto())), (form, origin)
            assert draft.summary.units == expected.summary.units, (form, origin)
            assert draft.summary.opset == expected.summary.opset, (form, origin)
            assert to_model(og.onnx.load(draft.proto()), form=form) == draft.proto(), (form, origin)


def test_save_and_command_line_write_the_readme_graph_the_same(tmp_path: Path) -> None:
    code = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1].split("print(g.explain())")[0]
    names: dict[str, Any] = {}
    exec(code, names)  # the page's own code, up to its first print
    graph = names["g"]
    og.onnx.save(graph, tmp_path / "plain.onnx", form="decomposed")
    assert types(onnx.load(tmp_path / "plain.onnx"))[:3] == ["Mul", "Sigmoid", "Mul"]
    unit = {"auto": "opgraph::Swish", "function": "opgraph::Swish", "standard": "Swish",
            "contrib": "com.microsoft::QuickGelu"}  # fmt: skip
    for form in FINDING:
        og.onnx.save(graph, tmp_path / "saved.onnx", form=form)
        out = tmp_path / f"{form}.onnx"
        assert main(["fuse", str(tmp_path / "plain.onnx"), "-o", str(out), "--form", form, "--unchecked"]) == 0
        assert types(onnx.load(tmp_path / "saved.onnx")) == types(onnx.load(out)) == [unit[form], "Tanh", "Add", "Clip"]


def test_keep_applies_to_composed_graphs() -> None:
    graph = og.parse("graph(x: f32[n,4]) -> (y)\n s = Sigmoid(x)\n y = Multiply(x, s)")
    kept = to_model(graph, form="standard", keep=["swish"])
    assert types(kept) == ["Sigmoid", "Mul"] and kept.opset_import[0].version == 22
    with pytest.raises(Unimplemented, match=r"no ai\.onnx Swish at opset 20"):
        to_model(graph, form="standard", opset=20)


def test_opgraph_functions_move_to_a_newer_opset_if_their_body_is_valid_there() -> None:
    swish = " s = Sigmoid(a)\n y = Multiply(a, s)"
    square = og.parse(f"graph(x: f32[n,4]) -> (y)\n b = Square(x)\n c = Pow(b, beta=2.0)\n a = Identity(c)\n{swish}")
    assert types(to_model(loaded(square), form="standard"))[-1] == "Swish"
    # At opset 13 the body of a norm has its axes in an attribute, which ReduceMean no longer has at 24.
    norm = og.onnx.load(to_model(og.parse(NORMS[0].takes), opset=13))
    assert types(to_model(norm)) == ["opgraph::RMSNorm"]
    model = to_model(norm)
    model.graph.node[0].output[0] = "a"
    model.graph.node.extend(
        [onnx.helper.make_node("Sigmoid", ["a"], ["s"]), onnx.helper.make_node("Mul", ["a", "s"], ["y"])]
    )
    with pytest.raises(Unimplemented, match="ReduceMean would change on the way to 24"):
        to_model(og.onnx.load(model), form="standard")


def test_bf16_exponent_is_not_given_to_pow_before_opset_15() -> None:
    graph = og.parse("graph(x: bf16[n,4]) -> (y)\n a = Pow(x, beta=2.0)\n y = ReduceMean(a, axes=[-1])")
    made = to_model(graph, form="decomposed", opset=13)  # ai.onnx Pow takes a bf16 exponent from opset 15 on
    assert types(made) == ["opgraph::Pow", "ReduceMean"]
    assert og.onnx.load(made) == graph


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
@pytest.mark.parametrize("bounds", ["min=nan, max=1.0", "min=-1.0, max=nan", "min=nan"])
def test_clamp_with_a_nan_bound_gives_nan_in_onnxruntime(bounds: str, dtype: str) -> None:
    """onnxruntime's Clip ignores such a bound; Max and Min do not."""
    ort = pytest.importorskip("onnxruntime")
    graph = og.parse(f"graph(x: {dtype}[3]) -> (y)\n y = Clamp(x, {bounds})")
    x = np.asarray([-2, 0, 2]).astype(dtypes.get(dtype).numpy)
    for form in ("decomposed", "auto"):
        made = to_model(graph, form=form)
        assert og.onnx.load(made) == graph
        run = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
        assert np.isnan(run.run(None, {"x": x})[0]).all() and np.isnan(og.evaluate(graph, x=x)).all()
