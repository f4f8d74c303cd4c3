"""Runs single ops in torch on a GPU: native ops by their records, ONNX nodes by the table, and sizes on the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opgraph.errors import DeviceError, OpGraphError
from opgraph.ir.op import Op
from opgraph.ir.opdef import OpDef
from opgraph.runtime.providers.torch import from_numpy
from opgraph.runtime.providers.torch_ops import TorchOps, exact_convolutions

if TYPE_CHECKING:
    from opgraph.runtime.providers.torch_onnx.table import Call, TorchForm

_HOST = torch.device("cpu")


class DeviceOps(TorchOps):
    """Ops on one GPU.

    Args:
        ops: those that will run; `runs_node` must accept the ONNX nodes among them.
        constants: the constants that they read, by id.
        sizes: ids of the values that stay on the host: the ops that make them run there.
        place: the GPU.

    Attributes:
        constants: by id, each on the device where the ops read it.
    """

    def __init__(
        self, ops: Sequence[Op], constants: Mapping[int, np.ndarray], sizes: Collection[int], place: torch.device
    ) -> None:
        super().__init__()
        self._place = place
        self._on_host = {op.id for op in ops if op.outputs and all(t.id in sizes for t in op.outputs)}
        self._nodes: dict[int, tuple[TorchForm, Call]] = {}
        # By op id, for each operand: True if it is read as Python numbers, and if it is read on the host.
        self._numbers: dict[int, Sequence[bool]] = {}
        self._reads_near: dict[int, Sequence[bool]] = {}
        for op in ops:
            self._numbers[op.id] = (False,) * len(op.inputs)
            self._reads_near[op.id] = (op.id in self._on_host,) * len(op.inputs)
            if op.kind == "Wildcard":
                self._enter_node(op)
        near = {t.id for op in ops for t, reads_near in zip(op.inputs, self._reads_near[op.id]) if reads_near}
        far = {t.id for op in ops for t, reads_near in zip(op.inputs, self._reads_near[op.id]) if not reads_near}
        own = {i: from_numpy(array.copy()) for i, array in constants.items()}
        self._near = {i: value for i, value in own.items() if i in near}
        self.constants = {i: value if i in near - far else value.to(place) for i, value in own.items()}

    def _enter_node(self, op: Op) -> None:
        from opgraph.runtime.providers.torch_onnx.nodes import call_of, form_for, numbers_of  # needs onnx

        form = form_for(op)
        assert form is not None, "runs_node was asked"
        self._nodes[op.id] = form, call_of(op, _HOST if op.id in self._on_host else self._place, None)
        self._numbers[op.id] = numbers_of(op, form)
        if form.on_host or op.id not in self._on_host:  # a node that makes sizes from a shape reads no data
            self._reads_near[op.id] = self._numbers[op.id]

    def run(self, op: Op, record: OpDef, values: Sequence[Any]) -> list[Any]:
        """See OpLibrary.

        Raises:
            DeviceError: torch refuses a node, with its reason.
        """
        given: list[Any] = []
        rows = zip(op.inputs, values, self._reads_near[op.id], self._numbers[op.id], strict=True)
        for tensor, value, reads_near, is_number in rows:
            if reads_near:
                value = self._near.get(tensor.id, value).cpu()  # a copy from a GPU waits for all work before it
            elif isinstance(value, torch.Tensor) and not value.is_cuda:
                value = value.to(self._place)
            given.append(value.tolist() if is_number else value)
        if op.id not in self._nodes:
            return super().run(op, record, given)
        from opgraph.runtime.providers.onnx_session import one_line
        from opgraph.runtime.providers.torch_onnx.nodes import run_node

        form, call = self._nodes[op.id]
        try:
            with exact_convolutions(record, op.attrs["onnx_op"]):
                return run_node(op, form, call, given)
        except (OpGraphError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:  # torch raises exceptions of any class
            raise DeviceError(
                f"torch cannot run it: {one_line(error)}", where=call.where, fix="check the model and its inputs"
            ) from error
