"""A graph as a list of torch calls: one for each fused partition, one for each other op.

Ops outside fused partitions are called by the form in their record, or in the table of ONNX nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opgraph.errors import Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.partition.partition import FUSED, Partition, needed_for
from opgraph.partition.partitioner import partition
from opgraph.runtime.providers.onnx_node import is_onnx_node
from opgraph.runtime.providers.torch import known_dtype
from opgraph.runtime.providers.torch_onnx.nodes import call_of, form_for, kind_of, node_refused, numbers_of, run_node
from opgraph.runtime.providers.torch_onnx.sizes import carries_sizes
from opgraph.runtime.providers.torch_onnx.table import Call
from opgraph.torch.fused.op import FusedOp

#: Takes tensors, the device and the mode of the module; returns tensors.
Run = Callable[[Sequence[Any], torch.device, bool], Sequence[torch.Tensor]]
#: The call, the tensors that it reads and makes, the flags of those read as numbers, and True if it makes sizes.
Piece = tuple[Run, tuple[int, ...], tuple[LogicalTensor, ...], tuple[bool, ...], bool]


def unable(op: Op) -> str | None:
    """The reason why torch cannot run an op here, "" for the op as such; None if it can run it."""
    if not is_onnx_node(op):
        record = opdef.find(op.kind)
        return None if record is not None and record.torch is not None else ""
    return node_refused(op)


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
    """A partition op by op: a kernel for integers alone is not worthwhile."""
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
    declared = [known_dtype(t.dtype) for t in operands]

    def run(tensors: Sequence[Any], device: torch.device, training: bool) -> Sequence[torch.Tensor]:
        given = [tensors[i] for i in places]
        return op(*given) if [t.dtype for t in given] == declared else slow(tensors, device, training)

    return run, reads, part.output_ports, (False,) * len(reads), False


def _graph_of(part: Partition, operands: Sequence[LogicalTensor]) -> Graph:
    """The ops of a partition as a separate graph with these inputs, some of which were constants."""
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
    declared = [known_dtype(t.dtype) for t in op.inputs]
    target, is_cast = known_dtype(op.outputs[0].dtype), record.is_cast

    def run(tensors: Sequence[Any], device: torch.device, training: bool) -> Sequence[torch.Tensor]:
        result = form(torch, *tensors, **attrs)
        made = list(result) if isinstance(result, (tuple, list)) else [result]
        # A model that was converted to another dtype (module.double()) keeps it; only casts have a dtype of their own.
        if target is not None and (is_cast or [t.dtype for t in tensors] == declared):
            made[0] = made[0].to(target)
        return made

    return run, tuple(t.id for t in op.inputs), op.outputs, (False,) * len(op.inputs), False


def _node(op: Op) -> Piece:
    form = form_for(op)
    assert form is not None
    calls: dict[tuple[torch.device, bool], Call] = {}

    def run(tensors: Sequence[Any], device: torch.device, training: bool) -> Sequence[torch.Tensor]:
        call = calls.get((device, training))
        if call is None:
            call = calls[(device, training)] = call_of(op, device, training)
        return run_node(op, form, call, tensors)

    return run, tuple(t.id for t in op.inputs), op.outputs, numbers_of(op, form), form.on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call.

    Attributes:
        reads, makes: tensor ids.
        frees: tensors that no later step reads.
        numbers: for each of `reads`, True if it is taken as Python numbers.
        on_host: True if it works on shapes, and stays on the CPU.
    """

    run: Run
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: tuple[int, ...]
    numbers: tuple[bool, ...]
    on_host: bool


def steps_of(graph: Graph, weights: Collection[int]) -> list[Step]:
    """The calls that compute a graph's outputs, in order.

    Args:
        weights: ids of the constants that are trained.

    Raises:
        Unimplemented: nodes without a torch form here; the message names them.
    """
    _refuse_unknown(graph)
    kept = {t.id for t in graph.outputs}
    needed = needed_for(partition(graph).partitions, kept)
    runs = [piece for part in needed for piece in pieces(part, weights)]
    last = {i: place for place, (_, reads, _, _, _) in enumerate(runs) for i in reads}
    kept |= {t.id for t in (*graph.inputs, *graph.constants)}
    constants = {t.id for t in graph.constants}
    host: set[int] = set()
    result = []
    for place, (run, reads, made, numbers, sizes) in enumerate(runs):
        on_host = carries_sizes(reads, made, constants, host)
        host |= {t.id for t in made} if on_host or sizes else set()
        result.append(
            Step(
                run=run,
                reads=reads,
                makes=tuple(t.id for t in made),
                frees=tuple({i for i in reads if last[i] == place} - kept),
                numbers=numbers,
                on_host=on_host,
            )
        )
    return result


def _refuse_unknown(graph: Graph) -> None:
    reasons = [(op, reason) for op in graph.ops if op.outputs and (reason := unable(op)) is not None]
    if not reasons:
        return
    kinds = sorted({f"{kind_of(op)} with {reason}" if reason else kind_of(op) for op, reason in reasons})
    names = ", ".join(f'{kind_of(op)} "{op.name}"' for op, _ in reasons[:5]) + (" ..." if len(reasons) > 5 else "")
    raise Unimplemented(
        f"from_onnx has no torch form for {', '.join(kinds)}",
        where=f"{len(reasons)} nodes: {names}" if len(reasons) > 1 else names,
        fix="replace these nodes in the model, or export it with an opset or options that avoid them",
    )
