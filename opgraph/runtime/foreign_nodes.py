"""Checks that a graph's ONNX nodes can be computed: by onnx and onnxruntime, their gradients by torch."""

from __future__ import annotations

from collections.abc import Iterable

from opgraph.ir import opdef
from opgraph.ir.op import Op
from opgraph.ir.optional_dependencies import require
from opgraph.partition.partition import NATIVE


def check_onnx(op: Op) -> None:
    """Raises NotInstalled if no installed library computes an ONNX node."""
    require("onnx", "ort", "an ONNX node needs", op.label)


def check_foreign(ops: Iterable[Op]) -> None:
    """Checks that torch computes the gradients of the ONNX nodes among some ops.

    Raises:
        Unimplemented: torch is missing, or has no form for a node; all such nodes are named.
    """
    foreign = [op for op in ops if opdef.get(op.kind, where=op.label).foreign == NATIVE]
    if not foreign:
        return
    names = ", ".join(f'{op.attrs["onnx_op"]} "{op.name}"' for op in foreign[:5])
    require("torch", "torch", f"the gradient of an ONNX node ({names}) needs", "training")
    from opgraph.runtime.providers.torch_onnx.adjoint import check  # needs torch

    check(foreign)
