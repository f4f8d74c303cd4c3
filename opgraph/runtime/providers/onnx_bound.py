"""An onnxruntime region bound to buffers: inputs are read and outputs are written in place, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.runtime.providers.onnx_session import BITS


class BoundRegion:
    """One binding of a session. A session may have many, and they may run at once.

    Attributes:
        launch: runs the region on the current contents of the bound arrays. It raises the errors of onnxruntime, for
            example if an output has another shape than its buffer.
    """

    def __init__(
        self,
        ort: Any,
        session: Any,
        inputs: Sequence[tuple[str, LogicalTensor]],
        outputs: Sequence[tuple[str, LogicalTensor]],
        memory: str = "cpu",
        device: int = 0,
    ) -> None:
        self._inputs = [(name, _element_type(t)) for name, t in inputs]
        self._outputs = [(name, _element_type(t)) for name, t in outputs]
        # The wrappers around these two look a device up by name at every call, which takes longer than the binding.
        self._binding = session.io_binding()._iobinding
        self._device = ort.OrtDevice.make(memory, device)._get_c_device()
        self._copies: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._run: Callable[[], None] = partial(session._sess.run_with_iobinding, self._binding, None)
        self.launch: Callable[[], None] = self._run

    def read(self, index: int, array: np.ndarray) -> None:
        """Binds an input to an array, which the caller keeps alive. Each run copies an array that is not row-major."""
        if not array.flags.c_contiguous:
            row_major = np.empty(array.shape, array.dtype)
            self._copies[index] = row_major, array
            self.launch, array = self._on_copies, row_major
        self.read_at(index, array.shape, array.__array_interface__["data"][0])

    def _on_copies(self) -> None:
        for row_major, array in self._copies.values():
            row_major[...] = array
        self._run()

    def read_at(self, index: int, shape: Sequence[int], address: int) -> None:
        """Binds an input to row-major memory, which the caller keeps alive."""
        name, kind = self._inputs[index]
        self._binding.bind_input(name, self._device, kind, shape, address)

    def write(self, index: int, array: np.ndarray) -> None:
        """Binds an output to a row-major array, which the caller keeps alive."""
        self.write_at(index, array.shape, array.__array_interface__["data"][0])

    def write_at(self, index: int, shape: Sequence[int], address: int) -> None:
        """Binds an output to row-major memory, which the caller keeps alive."""
        name, kind = self._outputs[index]
        self._binding.bind_output(name, self._device, kind, shape, address)

    def leave(self, index: int) -> None:
        """Lets onnxruntime allocate the memory of an output, on the device of the binding."""
        self._binding.bind_output(self._outputs[index][0], self._device)

    def made(self) -> list[Any]:
        """onnxruntime's own values of all outputs, after a launch."""
        return list(self._binding.get_outputs())


def _element_type(tensor: LogicalTensor) -> Any:
    """onnxruntime's name of the dtype; its number if NumPy has no such dtype."""
    dtype = dtypes.get(tensor.dtype)
    return dtype.onnx if tensor.dtype in BITS else dtype.numpy.type
