"""Runs a graph as torch's own ops, one by one: for exporters and tracers that need those, and for shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opgraph.errors import Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.graph import Graph
from opgraph.ir.op import Op
from opgraph.runtime.providers.torch import torch_dtype


def composite(graph: Graph, tensors: Sequence[torch.Tensor], rounding: str) -> list[torch.Tensor]:
    """The results of a graph, each op computed by the torch form in its record; differentiable by torch.

    Each result has memory of its own, like the results of a kernel: an input, or another result, is copied.

    Args:
        rounding: "store": f16 and bf16 values are rounded where a result is made, as in a kernel; "each": by every op.

    Raises:
        Unimplemented: an op without a torch form.
    """
    device = tensors[0].device
    values = {t.id: given for t, given in zip(graph.inputs, tensors, strict=True)}
    for constant in graph.constants:
        data = opdef.array_of(constant)
        # NumPy itself has no bf16: it is converted through f32, which holds it exactly.
        plain = data.astype("float32") if constant.dtype == "bf16" else data
        values[constant.id] = torch.tensor(plain, dtype=torch_dtype(constant.dtype), device=device)
    wide = {name: torch.float32 if rounding == "store" and _is_narrow(name) else torch_dtype(name) for name in _NAMES}
    for op in graph.ops:
        for part in opdef.get(op.kind, where=op.label).parts(op) if op.kind != "End" else ():
            given = [_cast(values[t.id], wide[t.dtype]) for t in part.inputs]
            values[part.outputs[0].id] = _cast(_result(part, given), wide[part.outputs[0].dtype])
    made: list[torch.Tensor] = []
    for t in graph.outputs:
        value = _cast(values[t.id], torch_dtype(t.dtype))
        made.append(value.clone() if any(value is other for other in (*tensors, *made)) else value)
    return made


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value if value.dtype == dtype else value.to(dtype)  # a tracer would record a cast that does nothing


def _result(op: Op, given: list[torch.Tensor]) -> torch.Tensor:
    record = opdef.get(op.kind, where=op.label)
    if record.is_cast:
        return given[0].to(torch_dtype(op.outputs[0].dtype))
    if record.torch is None:
        raise Unimplemented(f"{op.kind} has no form in torch's ops", where=op.where, fix="use ops that have one")
    result: torch.Tensor = record.torch(torch, *given, **op.attrs)
    return result


def _is_narrow(name: str) -> bool:
    return name in ("f16", "bf16")


_NAMES = dtypes.ARITHMETIC
