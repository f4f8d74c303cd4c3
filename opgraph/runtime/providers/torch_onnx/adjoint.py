"""The gradient of one ONNX node: torch runs the node by the table, and its autograd differentiates it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from opgraph.errors import DeviceError, OpGraphError, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.runtime.providers.onnx_session import one_line
from opgraph.runtime.providers.torch import from_numpy, to_numpy
from opgraph.runtime.providers.torch_onnx.nodes import call_of, form_for, kind_of, node_refused, numbers_of, run_node
from opgraph.runtime.providers.torch_onnx.table import Call


class Adjoint:
    """The gradients of a node's inputs.

    Args:
        op: a WildcardBackward.
    """

    def __init__(self, op: Op) -> None:
        self._node, self._wanted, self._given = taken_apart(op)
        form = form_for(self._node)
        assert form is not None, "check was called"
        self._form = form
        self._numbers = numbers_of(self._node, form)
        self._calls: dict[torch.device, Call] = {}

    def __call__(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the node and differentiates it.

        Args:
            values: the node's inputs, then the gradients given; on one device.

        Returns: one gradient for each input with a wanted gradient, of the input's dtype and shape.

        Raises:
            DeviceError: torch fails, with its reason.
            Unimplemented: the operands show that this use of the node is not supported.
        """
        count = len(self._wanted)
        with torch.inference_mode(False), torch.enable_grad():
            operands = [self._operand(i, value) for i, value in enumerate(values[:count])]
            leaves = [operands[i] for i, is_wanted in enumerate(self._wanted) if is_wanted]
            try:
                made = run_node(self._node, self._form, self._call(values[-1].device), operands)
                found = self._differentiated(made, leaves, values[count:])
            except OpGraphError:
                raise
            except Exception as error:  # torch raises exceptions of any class
                raise DeviceError(
                    f"torch cannot differentiate it: {one_line(error)}",
                    where=f'{kind_of(self._node)} "{self._node.name}"',
                    fix="replace the node in the model, or leave what it depends on out of wrt",
                ) from error
        wanted = [value for value, is_wanted in zip(values, self._wanted) if is_wanted]
        return [torch.zeros_like(v) if g is None else g.to(v.dtype) for g, v in zip(found, wanted, strict=True)]

    def _operand(self, index: int, value: torch.Tensor) -> Any:
        if self._numbers[index]:
            return value.tolist()
        own = value.clone() if value.is_inference() else value.detach()
        return own.requires_grad_() if self._wanted[index] else own

    def _call(self, device: torch.device) -> Call:
        if device not in self._calls:
            self._calls[device] = call_of(self._node, device, None)
        return self._calls[device]

    def _differentiated(
        self, made: Sequence[torch.Tensor], leaves: Sequence[Any], given: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of the leaves; None for a leaf that no output depends on, or only as a number."""
        results = [m for m, is_given in zip(made, self._given) if is_given]
        pairs = [(r, d) for r, d in zip(results, given, strict=True) if r.requires_grad]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        found: list[torch.Tensor | None] = [None] * len(leaves)
        if pairs and places:
            gradients = torch.autograd.grad(
                [r for r, _ in pairs],
                [leaves[i] for i in places],
                [d.to(r.dtype) for r, d in pairs],
                allow_unused=True,
            )
            for place, gradient in zip(places, gradients, strict=True):
                found[place] = gradient
        return found


def taken_apart(op: Op) -> tuple[Op, tuple[bool, ...], tuple[bool, ...]]:
    """The Wildcard that a WildcardBackward differentiates; flags of its wanted input and given output gradients."""
    wanted, given = (_flags(op, name) for name in ("onnx_wanted_gradients", "onnx_given_gradients"))
    gradients = iter(op.inputs[len(wanted) :])
    free = 1 + max(t.id for t in (*op.inputs, *op.outputs))
    outputs = tuple(
        next(gradients) if is_given else LogicalTensor(free + i, dtypes.UNDEF, None) for i, is_given in enumerate(given)
    )
    return Op.locked(op.id, "Wildcard", op.inputs[: len(wanted)], outputs, op.name, op.attrs), wanted, given


def _flags(op: Op, name: str) -> tuple[bool, ...]:
    value = op.attrs[name]
    assert isinstance(value, tuple)
    return tuple(bool(v) for v in value)


def check(ops: Sequence[Op]) -> None:
    """Checks that the table has the nodes whose gradients some ops compute.

    Raises:
        Unimplemented: it lacks some; all such nodes are named.
    """
    nodes = [taken_apart(op)[0] for op in ops]
    refused = [(node, reason) for node in nodes if (reason := node_refused(node)) is not None]
    if not refused:
        return
    kinds = sorted({f"{kind_of(n)} with {reason}" if reason else kind_of(n) for n, reason in refused})
    names = ", ".join(f'{kind_of(n)} "{n.name}"' for n, _ in refused[:5]) + (" ..." if len(refused) > 5 else "")
    raise Unimplemented(
        f"there is no gradient of {', '.join(kinds)}: torch has no form for it here",
        where=names,
        fix="replace these nodes in the model, or leave what they depend on out of wrt",
    )


def reference_adjoint(op: Op, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The gradients in the dtypes of the arrays; f16 and bf16 are computed in f32."""
    tensors = [from_numpy(np.array(a)) for a in arrays]
    wide = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]
    return [to_numpy(g.contiguous()) for g in Adjoint(op)(wide)]
