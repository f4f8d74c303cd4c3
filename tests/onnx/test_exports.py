"""Models from torch's exporters load, run as in torch, and are written back unchanged.

`python tests/onnx_exports/run.py --zoo` runs every opset from 13 to 25 in every type.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import opgraph as og

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", reason="runs what is not pointwise")
pytest.importorskip("onnxscript", reason="torch's exporter needs it")
torch = pytest.importorskip("torch")

import exported  # noqa: E402  # needs torch

from opgraph.onnx.save import to_model  # noqa: E402
from opgraph.partition.rules import find_units  # noqa: E402

#: Kinds that run in onnxruntime at any opset.
FOREIGN = {"Split", "Softmax", "LayerNormalization", "ReduceMean", "Shape", "ConstantOfShape", "RMSNormalization"}
WHOLE = {**exported.ZOO, **exported.NEW_ONLY}


def run(graph: og.Graph, *inputs: Any) -> list[np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # onnx's evaluator runs bf16 instead
        compiled = og.compile(graph)
        made = compiled(dict(zip([t.name for t in graph.inputs], inputs, strict=True)))
    return list(made.values()) if isinstance(made, dict) else [made]


def assert_as_torch(graph: og.Graph, zoo: dict[str, Any], dtype: Any) -> None:
    torch.manual_seed(0)
    for rows in (3, 5):
        x = (torch.randn(rows, 8) * 3).to(dtype)
        got = run(graph, exported.numpy_of(x))
        errors = {n: exported.rounding_errors(g, f(x)) for (n, f), g in zip(zoo.items(), got, strict=True)}
        assert max(errors.values()) < 2, errors


def assert_native(graph: og.Graph) -> None:
    assert {op.attrs["onnx_op"] for op in graph.ops if op.kind == "Wildcard"} <= FOREIGN


@pytest.mark.slow
@pytest.mark.parametrize(("opset", "dtype"), [(25, "float32"), (20, "float16"), (18, "bfloat16")])
def test_exported_activations_load_natively_and_agree_with_torch(opset: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    model = exported.export(exported.Zoo(WHOLE).to(kind), (torch.randn(3, 8).to(kind),), opset)
    graph = og.onnx.load(model)
    assert [e.version for e in model.opset_import if e.domain == ""] == [opset]
    assert_native(graph)
    assert graph.inputs[0].dims == ("n", 8)
    assert_as_torch(graph, WHOLE, kind)
    units = [unit.name for unit in find_units(graph)]
    assert units.count("swish") == 3
    back = to_model(graph, form="decomposed")
    assert back == model
    assert sum(bool(node.metadata_props) for node in back.graph.node) > 50


@pytest.mark.parametrize("opset", [13])
def test_tracing_exporter_at_opset_13_agrees_with_torch(opset: int) -> None:
    zoo = {n: f for n, f in exported.ZOO.items() if n != "hardswish"}  # exported since opset 14
    model = exported.export_by_tracing(exported.Zoo(zoo), (torch.randn(3, 8),), opset)
    graph = og.onnx.load(model)
    assert_as_torch(graph, zoo, torch.float32)
    assert to_model(graph, form="decomposed") == model


def test_invalid_opset_26_export_is_refused_by_op_name() -> None:
    try:
        model = exported.export(exported.Zoo({"gelu": exported.ZOO["gelu"]}), (torch.randn(3, 8),), 26)
    except Exception:  # a newer torch may not raise
        pytest.skip("this torch writes no opset 26")
    if [e.version for e in model.opset_import if e.domain == ""] == [26]:
        assert og.onnx.load(model).ops[0].kind == "GELU"
        return
    with pytest.raises(og.errors.ModelError, match="Gelu with domain_version of 18"):
        og.onnx.load(model)


def test_fused_activation_with_parameter_branches_exports_and_loads() -> None:
    import opgraph.torch as ogt
    from opgraph.torch.naf1 import NAF1

    module = ogt.fuse(torch.nn.Sequential(torch.nn.Linear(8, 8), NAF1())).eval()
    model = exported.export(module, (torch.randn(3, 8),), 20)
    assert not {"If", "Sigmoid", "LGamma"} & {node.op_type for node in model.graph.node}  # the order became numbers
    x = torch.randn(5, 8)
    (got,) = run(og.onnx.load(model), x.numpy())
    assert exported.rounding_errors(got, module(x)) < 2
