"""Calls of torch: a fused partition as one op, everything else by its record or by the table of ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from opgraph.ir import dtypes, opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.onnx.forms import plain_value
from opgraph.partition.partition import FUSED, Partition
from opgraph.runtime.providers.onnx_node import decoded, is_onnx_node, opset_of
from opgraph.runtime.providers.torch import from_numpy
from opgraph.torch.function import FusedOp
from opgraph.torch.onnx_table import Call
from opgraph.torch.onnx_trainable import form_for, given_inputs

#: Tensors in, tensors out; the device and the mode of the module.
Run = Callable[[Sequence[Any], torch.device, bool], Sequence[torch.Tensor]]
#: The call, what it reads and makes, which it reads as numbers, and whether what it makes are sizes.
Piece = tuple[Run, tuple[int, ...], tuple[LogicalTensor, ...], tuple[bool, ...], bool]


def unable(op: Op) -> str | None:
    """Why torch cannot run an op here, "" for the op as such; None where it can."""
    if not is_onnx_node(op):
        record = opdef.find(op.kind)
        return None if record is not None and record.torch is not None else ""
    form = form_for(op)
    if form is None:
        return ""
    return form.refuses(_call(op, torch.device("cpu"), False)) if form.refuses is not None else None


def pieces(part: Partition, weights: Collection[int]) -> list[Piece]:
    """The calls of a partition.

    Args:
        weights: ids of the constants that are trained.
    """
    if part.kind == FUSED:
        floats = any(t.dtype in dtypes.FLOATS for op in part.ops for t in op.outputs)
        return [_fused(part, weights) if floats and len(part.ops) > 1 else _one_by_one(part)]
    return [_node(op) if is_onnx_node(op) else _native(op) for op in part.ops if op.outputs]


def _one_by_one(part: Partition) -> Piece:
    """A partition op by op: what only carries integers is not worth a kernel."""
    pieces = [_native(op) for op in part.ops]
    reads = tuple(t.id for t in (*part.input_ports, *part.constants))
    outputs = tuple(t.id for t in part.output_ports)

    def run(tensors: Sequence[Any], device: torch.device, training: bool) -> Sequence[torch.Tensor]:
        values = dict(zip(reads, tensors))
        for call, needs, made, _, _ in pieces:
            values.update(zip((t.id for t in made), call([values[i] for i in needs], device, training)))
        return [values[i] for i in outputs]

    return run, reads, part.output_ports, (False,) * len(reads), False


def _fused(part: Partition, weights: Collection[int]) -> Piece:
    """A partition as one differentiable op; on tensors of other dtypes than the model's, op by op."""
    slow, reads, *_ = _one_by_one(part)
    # Numbers stay in the kernel, where x ** 2 is a product; weights and tables are operands.
    opened = [t for t in part.constants if t.id in weights or t.ndim]
    operands = [*part.input_ports, *opened]
    op = FusedOp(_graph_of(part, operands))
    places = [reads.index(t.id) for t in operands]
    declared = [torch_dtype(t.dtype) for t in operands]

    def run(tensors: Sequence[Any], device: torch.device, training: bool) -> Sequence[torch.Tensor]:
        given = [tensors[i] for i in places]
        return op(*given) if [t.dtype for t in given] == declared else slow(tensors, device, training)

    return run, reads, part.output_ports, (False,) * len(reads), False


def _graph_of(part: Partition, operands: Sequence[LogicalTensor]) -> Graph:
    """The ops of a partition as a graph of its own with these inputs, some of which were constants."""
    graph = Graph(part.engine)
    names = {t.id: f"in{i}" for i, t in enumerate(operands)}
    names.update((t.id, f"out{i}") for i, t in enumerate(part.output_ports))

    def own(tensor: LogicalTensor) -> LogicalTensor:
        if tensor.id not in names:
            return tensor
        return tensor.with_(name=names[tensor.id], data=None, property="variable")

    for tensor in operands:
        graph._add_input(own(tensor))
    for op in part.ops:
        graph._add(op.id, op.kind, tuple(map(own, op.inputs)), tuple(map(own, op.outputs)), op.name, op.attrs)
    graph.set_outputs([own(t) for t in part.output_ports])
    return graph.finalize()


def _native(op: Op) -> Piece:
    record = opdef.get(op.kind, where=op.label)
    form, attrs = record.torch, dict(op.attrs)
    assert form is not None
    declared = [torch_dtype(t.dtype) for t in op.inputs]
    target, is_cast = torch_dtype(op.outputs[0].dtype), record.is_cast

    def run(tensors: Sequence[Any], device: torch.device, training: bool) -> Sequence[torch.Tensor]:
        result = form(torch, *tensors, **attrs)
        made = list(result) if isinstance(result, (tuple, list)) else [result]
        # A model moved to another dtype (module.double()) keeps that; only casts say what they mean.
        if target is not None and (is_cast or [t.dtype for t in tensors] == declared):
            made[0] = made[0].to(target)
        return made

    return run, tuple(t.id for t in op.inputs), op.outputs, (False,) * len(op.inputs), False


def _made(op: Op) -> list[int]:
    """Which outputs of its node an op makes."""
    absent = op.attrs.get("onnx_absent_outputs", ())
    missing = {int(i) for i in absent} if isinstance(absent, tuple) else set()
    return [i for i in range(len(op.outputs) + len(missing)) if i not in missing]


def _call(op: Op, device: torch.device, training: bool) -> Call:
    return Call(
        attrs={a.name: _plain(plain_value(a)) for a in decoded(op)},
        opset=opset_of(op)[1],
        outputs=_made(op)[-1] + 1,
        dtype=torch_dtype(op.outputs[0].dtype),
        device=device,
        training=training,
        where=op.label,
    )


def _node(op: Op) -> Piece:
    form = form_for(op)
    assert form is not None
    run_form, places, outputs = form.run, given_inputs(op), _made(op)
    calls: dict[tuple[torch.device, bool], Call] = {}

    def run(tensors: Sequence[Any], device: torch.device, training: bool) -> Sequence[torch.Tensor]:
        call = calls.get((device, training))
        if call is None:
            call = calls[(device, training)] = _call(op, device, training)
        result = run_form(call, *[None if i is None else tensors[i] for i in places])
        made = result if isinstance(result, (tuple, list)) else (result,)
        return [made[i] for i in outputs]

    wanted = {places[i] for i in form.numbers if i < len(places)}
    numbers = tuple(i in wanted for i in range(len(op.inputs)))
    return run, tuple(t.id for t in op.inputs), op.outputs, numbers, form.on_host


def _plain(value: Any) -> Any:
    """An attribute as the torch forms take it: tensors as arrays."""
    if hasattr(value, "data_type"):
        import onnx_ir as ir

        return np.asarray(ir.from_proto(value).numpy())
    return list(value) if not isinstance(value, (int, float, str)) else value


def torch_dtype(name: str) -> torch.dtype | None:
    """Torch's dtype of a name; None where nothing is declared, or torch has none."""
    return _DTYPES.get(name)


def _dtypes() -> Mapping[str, torch.dtype]:
    names = ("f64", "f32", "bf16", "f16", "s64", "s32", "s8", "u8", "boolean")
    return {name: from_numpy(np.empty(0, dtypes.get(name).numpy)).dtype for name in names}


_DTYPES = _dtypes()
