"""Runs the ONNX nodes that ops carry, as calls of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from opgraph.ir.op import Op
from opgraph.runtime.providers.onnx_node import decoded, opset_of, plain_value
from opgraph.runtime.providers.torch import known_dtype
from opgraph.runtime.providers.torch_onnx.table import Call, TorchForm, form_of


def form_for(op: Op) -> TorchForm | None:
    """The torch form of the ONNX node that an op carries, or None."""
    return form_of(str(op.attrs.get("onnx_domain", "")), str(op.attrs.get("onnx_op", "")))


def given_inputs(op: Op) -> list[int | None]:
    """For each input of the node that an op carries, the position among the op's inputs; None if it is omitted."""
    places: list[int | None] = list(range(len(op.inputs)))
    for position in sorted(_positions(op, "onnx_absent_inputs")):
        places.insert(position, None)
    return places


def made_outputs(op: Op) -> list[int]:
    """The positions of the node's outputs that an op makes."""
    missing = _positions(op, "onnx_absent_outputs")
    return [i for i in range(len(op.outputs) + len(missing)) if i not in missing]


def _positions(op: Op, name: str) -> set[int]:
    value = op.attrs.get(name, ())
    return {int(i) for i in value} if isinstance(value, tuple) else set()


def node_refused(op: Op) -> str | None:
    """The reason why torch cannot run the node that an op carries; "" if it has no form at all; None if it can."""
    form = form_for(op)
    if form is None:
        return ""
    return form.refuses(call_of(op, torch.device("cpu"), False)) if form.refuses is not None else None


def runs_node(op: Op) -> bool:
    """True if torch runs the node that an op carries, and has the dtypes of its tensors."""
    return node_refused(op) is None and all(known_dtype(t.dtype) is not None for t in (*op.inputs, *op.outputs))


def call_of(op: Op, device: torch.device, training: bool | None) -> Call:
    """The data of a node, besides its operands, for the table."""
    return Call(
        attrs={a.name: _plain(plain_value(a)) for a in decoded(op)},
        opset=opset_of(op)[1],
        outputs=made_outputs(op)[-1] + 1,
        listed=len(op.outputs) + len(_positions(op, "onnx_absent_outputs")),
        dtype=known_dtype(op.outputs[0].dtype),
        device=device,
        training=training,
        where=f'{kind_of(op)} "{op.name}"',
    )


def numbers_of(op: Op, form: TorchForm) -> tuple[bool, ...]:
    """For each input of an op, True if the form of its node reads it as Python numbers."""
    places = given_inputs(op)
    wanted = {places[i] for i in form.numbers if i < len(places)}
    return tuple(i in wanted for i in range(len(op.inputs)))


def run_node(op: Op, form: TorchForm, call: Call, operands: Sequence[Any]) -> list[torch.Tensor]:
    """Runs the node of an op; returns the outputs that the op makes.

    Args:
        operands: one for each input of the op: tensors, or numbers where `numbers_of` is True.
    """
    result = form.run(call, *[None if i is None else operands[i] for i in given_inputs(op)])
    made = result if isinstance(result, (tuple, list)) else (result,)
    return [made[i] for i in made_outputs(op)]


def kind_of(op: Op) -> str:
    """The kind of an op in messages: its ONNX name if it carries a node."""
    domain = op.attrs.get("onnx_domain", "")
    return f"{domain}::{op.attrs['onnx_op']}" if domain else str(op.attrs.get("onnx_op", op.kind))


def _plain(value: Any) -> Any:
    """Converts an attribute for the torch forms: tensors become arrays."""
    if hasattr(value, "data_type"):
        import onnx_ir as ir

        return np.asarray(ir.from_proto(value).numpy())
    return list(value) if not isinstance(value, (int, float, str)) else value
