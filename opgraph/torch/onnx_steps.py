"""A graph as a list of torch calls: one for each fused partition, one for each other op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opgraph.errors import Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.onnx.forms import plain_value
from opgraph.partition.partition import FUSED, Partition
from opgraph.partition.partitioner import partition
from opgraph.runtime.providers.onnx_node import decoded, is_onnx_node, opset_of
from opgraph.runtime.providers.torch import from_numpy
from opgraph.torch.onnx_table import Call
from opgraph.torch.onnx_trainable import form_for, given_inputs

#: Tensors in, tensors out; the device and the mode of the module.
Run = Callable[[Sequence[Any], torch.device, bool], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call.

    Attributes:
        reads, makes: tensor ids.
        frees: what nobody reads afterwards.
        numbers: which of `reads` it takes as Python numbers.
        on_host: it works on shapes, and stays on the CPU.
    """

    run: Run
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: tuple[int, ...]
    numbers: tuple[bool, ...]
    on_host: bool


def steps_of(graph: Graph) -> list[Step]:
    """The calls that compute a graph's outputs, in order.

    Raises:
        Unimplemented: nodes that torch has no form for here, named.
    """
    _refuse_unknown(graph)
    kept = {t.id for t in graph.outputs}
    needed = _needed(partition(graph).partitions, kept)
    runs = [piece for part in needed for piece in _pieces(part)]
    last = {i: place for place, (_, reads, _, _, _) in enumerate(runs) for i in reads}
    kept |= {t.id for t in (*graph.inputs, *graph.constants)}
    constants = {t.id for t in graph.constants}
    host: set[int] = set()
    result = []
    for place, (run, reads, made, numbers, sizes) in enumerate(runs):
        on_host = _on_host(reads, made, constants, host)
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


def _on_host(
    reads: Sequence[int], made: Sequence[LogicalTensor], constants: Collection[int], host: Collection[int]
) -> bool:
    """Whether a call only carries shapes on: small integers, made of shapes and constants alone."""
    small = all(t.ndim in (0, 1) and t.dtype not in dtypes.FLOATS for t in made)
    varying = [i for i in reads if i not in constants]
    return small and bool(varying) and all(i in host for i in varying)


def _refuse_unknown(graph: Graph) -> None:
    reasons = [(op, reason) for op in graph.ops if op.outputs and (reason := _unable(op)) is not None]
    if not reasons:
        return
    kinds = sorted({f"{_kind(op)} with {reason}" if reason else _kind(op) for op, reason in reasons})
    names = ", ".join(f'{_kind(op)} "{op.name}"' for op, _ in reasons[:5]) + (" ..." if len(reasons) > 5 else "")
    raise Unimplemented(
        f"from_onnx has no torch form for {', '.join(kinds)}",
        where=f"{len(reasons)} nodes: {names}" if len(reasons) > 1 else names,
        fix="replace these nodes in the model, or export it with an opset or options that avoid them",
    )


def _kind(op: Op) -> str:
    domain = op.attrs.get("onnx_domain", "")
    return f"{domain}::{op.attrs['onnx_op']}" if domain else str(op.attrs.get("onnx_op", op.kind))


def _unable(op: Op) -> str | None:
    """Why torch cannot run an op here, "" for the op as such; None where it can."""
    if not is_onnx_node(op):
        record = opdef.find(op.kind)
        return None if record is not None and record.torch is not None else ""
    form = form_for(op)
    if form is None:
        return ""
    return form.refuses(_call(op, torch.device("cpu"), False)) if form.refuses is not None else None


def _needed(parts: Sequence[Partition], wanted: Collection[int]) -> list[Partition]:
    """The partitions that some values depend on."""
    needed, kept = set(wanted), []
    for part in reversed(parts):
        if any(t.id in needed for t in part.output_ports):
            needed.update(t.id for t in part.input_ports)
            kept.append(part)
    return kept[::-1]


# -- calls ------------------------------------------------------------------------------------------------------------

#: The call, what it reads and makes, which it reads as numbers, and whether what it makes are sizes.
_Piece = tuple[Run, tuple[int, ...], tuple[LogicalTensor, ...], tuple[bool, ...], bool]


def _pieces(part: Partition) -> list[_Piece]:
    if part.kind == FUSED:
        return [fused(part)]
    return [_node(op) if is_onnx_node(op) else _native(op) for op in part.ops if op.outputs]


def fused(part: Partition) -> _Piece:
    """A fused partition: its ops one by one, each differentiated by autograd."""
    pieces = [_native(op) for op in part.ops]
    reads = tuple(t.id for t in (*part.input_ports, *part.constants))
    outputs = tuple(t.id for t in part.output_ports)

    def run(tensors: Sequence[Any], device: torch.device, training: bool) -> Sequence[torch.Tensor]:
        values = dict(zip(reads, tensors))
        for call, needs, made, _, _ in pieces:
            values.update(zip((t.id for t in made), call([values[i] for i in needs], device, training)))
        return [values[i] for i in outputs]

    return run, reads, part.output_ports, (False,) * len(reads), False


def _native(op: Op) -> _Piece:
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


def _node(op: Op) -> _Piece:
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
