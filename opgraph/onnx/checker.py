"""Runs onnx's checker, but accepts two kinds of models that it refuses although their meaning is clear."""

from __future__ import annotations

import contextlib

import onnx
from onnx import ModelProto

#: First opset of ai.onnx that allows bf16 nearly everywhere.
_BF16_SINCE = 22
_BF16 = "unsupported type: tensor(bfloat16)"


def run_checker(model: ModelProto) -> None:
    """Runs onnx's checker with full shape inference.

    Two kinds of models pass although the checker refuses them unchanged:
    - onnx 1.23 ignores attribute defaults when it examines an op's body (MeanVarianceNormalization). The defaults are
      written out for the check.
    - Exporters write ops in bf16 below the opset that allows it (torch: Mish, Elu and others at 18). Such a model is
      checked as one of opset 22, whose ops mean the same.

    Raises:
        onnx.checker.ValidationError, onnx.shape_inference.InferenceError, TypeError: the checker refuses the model.
    """
    try:
        _checked(model)
    except onnx.shape_inference.InferenceError as error:
        other = ModelProto()
        other.CopyFrom(model)
        changed = _write_defaults(other)
        if _BF16 in str(error):
            changed |= _stamp(other, _BF16_SINCE)
        if not changed:
            raise
        _checked(other)


def _checked(model: ModelProto) -> None:
    try:
        onnx.checker.check_model(model, full_check=True)
    except ValueError as error:
        # Its shape inference was aborted, for example by an element type 0 inside a subgraph.
        raise onnx.checker.ValidationError(str(error)) from None


def _write_defaults(model: ModelProto) -> bool:
    """Writes out the attributes that nodes omit, for ops with a body; returns True if there were any."""
    version, found = next((e.version for e in model.opset_import if e.domain == ""), 0), False
    for node in model.graph.node:
        schema = None
        if node.domain == "":
            with contextlib.suppress(onnx.defs.SchemaError):
                schema = onnx.defs.get_schema(node.op_type, version, "")
        if schema is None or not getattr(schema, "has_function", False):  # onnx's stubs lack it
            continue
        given = {a.name for a in node.attribute}
        for name, attribute in schema.attributes.items():
            if name not in given and attribute.default_value.type:
                node.attribute.append(attribute.default_value)
                found = True
    return found


def _stamp(model: ModelProto, opset: int) -> bool:
    """Stamps the model and its functions with an opset of ai.onnx where theirs is older; returns True if one was."""
    older = False
    for entry in (*model.opset_import, *(e for f in model.functions for e in f.opset_import)):
        if entry.domain == "" and entry.version < opset:
            entry.version, older = opset, True
    return older
