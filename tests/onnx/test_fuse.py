"""Fusing in memory: paths, protos and onnx_ir models; and as a pass of onnx_ir."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import opgraph as og
from opgraph.errors import InvalidArguments, ModelError

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")

from opgraph.onnx.save import to_model  # noqa: E402  # needs onnx

TEXT = (
    "graph(x: f32[n,8]) -> (y)\n  const c: f32[] = 1.5\n  a = Multiply(x, c)\n  s = Sigmoid(a)\n  m = Multiply(x, s)\n"
    "  const d: f32[8] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]\n  y = Multiply(m, d)"
)


def proto() -> Any:
    return to_model(og.parse(TEXT), form="decomposed")


def model() -> Any:
    return ir.from_proto(proto())


def types(made: Any) -> list[str]:
    return [n.op_type for n in (made.graph.node if isinstance(made, onnx.ModelProto) else made.graph)]


def test_fuse_returns_the_kind_of_model_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(proto(), path)
    before = proto().SerializeToString()
    given = proto()
    made = [og.onnx.fuse(given), og.onnx.fuse(model()), og.onnx.fuse(path), og.onnx.fuse(str(path))]
    assert [type(m) for m in made] == [onnx.ModelProto, ir.Model, type(path), str]
    assert given.SerializeToString() == before
    assert types(made[0]) == types(made[1]) == types(onnx.load(made[2])) == ["Swish", "Mul"]
    onnx.checker.check_model(ir.to_proto(made[1]), full_check=True)


def test_pass_leaves_its_input_unchanged_and_modifies_only_once() -> None:
    given = model()
    first = og.onnx.FusePass()(given)
    assert first.modified and first.model is not given
    assert (types(given), types(first.model)) == (["Mul", "Sigmoid", "Mul", "Mul"], ["Swish", "Mul"])
    second = og.onnx.FusePass()(first.model)
    assert not second.modified
    assert types(second.model) == types(first.model)
    assert not og.onnx.FusePass(form="decomposed")(given).modified


def test_pass_works_in_a_pass_manager_with_other_passes() -> None:
    from onnx_ir.passes.common import TopologicalSortPass

    passes = ir.passes.PassManager([TopologicalSortPass(), og.onnx.FusePass(functions=True)], steps=3, early_stop=True)
    result = passes(model())
    (node,) = result.model.graph
    assert node.domain == "opgraph"
    assert {f.name for f in result.model.functions.values()} == {node.op_type, "Swish"}


def test_pass_checks_its_preconditions() -> None:
    newer = model()
    newer.opset_imports[""] = 27
    with pytest.raises(ir.passes.PreconditionError, match="opset 27"):
        og.onnx.FusePass()(newer)
    empty = model()
    next(iter(empty.graph.initializers.values())).const_value = None
    with pytest.raises(ir.passes.PreconditionError, match="has no value"):
        og.onnx.FusePass()(empty)
    with pytest.raises(InvalidArguments, match="unknown form"):
        og.onnx.FusePass(form="fast")


def test_pass_checks_its_postconditions() -> None:
    fused = og.onnx.FusePass()
    result = fused(model()).model
    result.functions.clear()
    with pytest.raises(ir.passes.PostconditionError, match="not defined"):
        fused.ensures(result)


def test_keep_must_be_a_list_of_unit_names() -> None:
    assert types(og.onnx.fuse(proto(), keep=["swish"])) == ["Mul", "Sigmoid", "Mul", "Mul"]
    with pytest.raises(InvalidArguments, match="give a list"):
        og.onnx.fuse(proto(), keep="swish")
    with pytest.raises(InvalidArguments, match="no unit is called 'swich'"):
        og.onnx.fuse(proto(), keep=["swich"])
    with pytest.raises(InvalidArguments, match="no unit is called"):
        og.onnx.FusePass(keep=["swich"])


def test_missing_model_file_raises_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        og.onnx.fuse(tmp_path / "missing.onnx")
