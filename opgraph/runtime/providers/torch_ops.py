"""Runs single ops in torch: with the torch form of each record, outside autograd and autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opgraph.ir import dtypes
from opgraph.ir.op import Op
from opgraph.ir.opdef import OpDef
from opgraph.runtime.providers.torch import from_numpy, to_numpy, torch_dtype
from opgraph.runtime.providers.torch_internals import set_cudnn
from opgraph.runtime.reference import by_reference

if TYPE_CHECKING:
    from opgraph.runtime.providers.torch_onnx.adjoint import Adjoint

#: dtypes that quantized graphs store: neither torch nor opgraph has arithmetic for them.
_STORED = {t.numpy for t in dtypes.BY_NAME.values() if t.category == "storage"}


class TorchOps:
    """Ops on the CPU."""

    def __init__(self) -> None:
        self._adjoints: dict[int, Adjoint] = {}

    def enter(self, array: np.ndarray) -> Any:
        """Returns a tensor on the same memory; a copy if the array has negative strides, which torch does not have.

        f8, s4 and u4, which torch hardly supports, stay arrays: NumPy runs the ops that read or make them.
        """
        return array if array.dtype in _STORED else from_numpy(_writable(array))

    def run(self, op: Op, record: OpDef, values: Sequence[Any]) -> list[Any]:
        """See OpLibrary."""
        makes = {dtypes.BY_NAME[t.dtype].numpy for t in op.outputs if t.dtype in dtypes.BY_NAME}
        if makes & _STORED or any(isinstance(v, np.ndarray) for v in values):
            return self._by_numpy(op, record, values)
        with plain(values[0].device.type), exact_convolutions(record):
            return run_op(op, record, values) if record.torch is not None else self._adjoint(op)(values)

    def _by_numpy(self, op: Op, record: OpDef, values: Sequence[Any]) -> list[Any]:
        arrays = [v if isinstance(v, np.ndarray) else to_numpy(v) for v in values]
        return [self.enter(a) for a in by_reference(op, record, arrays, [t.dtype for t in op.outputs])]

    def _adjoint(self, op: Op) -> Adjoint:
        """The gradient of an ONNX node."""
        if op.id not in self._adjoints:
            from opgraph.runtime.providers.torch_onnx.adjoint import Adjoint  # needs onnx

            self._adjoints[op.id] = Adjoint(op)
        return self._adjoints[op.id]

    def leave(self, value: Any) -> np.ndarray:
        """Returns a dense array, on the same memory where possible."""
        return np.asarray(value, order="C") if isinstance(value, np.ndarray) else to_numpy(value.contiguous())


def run_op(op: Op, record: OpDef, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs one op; returns its results in the dtypes that it declares."""
    assert record.torch is not None
    wanted = [torch_dtype(t.dtype) for t in op.outputs]
    if wanted[0].is_floating_point and wanted[0].itemsize > values[0].dtype.itemsize:
        # Operands are widened first, so that no intermediate value is rounded to their dtype.
        values = [v.to(wanted[0]) if v.is_floating_point() else v for v in values]
    told = {"to": op.outputs[0].dtype} if record.by_dtype else {}
    made = record.torch(torch, *values, **op.attrs, **told)
    # Outputs that the op does not declare are not computed, if `made` is a generator.
    return [value.to(dtype) for dtype, value in zip(wanted, _each(record, made))]


def _each(record: OpDef, made: Any) -> Iterable[torch.Tensor]:
    return made if record.returns_several else (made,)


@contextmanager
def plain(device: str) -> Iterator[None]:
    """A context in which torch neither records gradients nor changes dtypes: the ops define the dtypes."""
    with torch.no_grad():
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                yield
        else:
            yield


@contextmanager
def exact_convolutions(record: OpDef, node: object = "") -> Iterator[None]:
    """A context in which cuDNN convolves f32 in f32, not in TF32, and sums in one order; restores the settings.

    Args:
        record: the record of the op that will run; nothing changes if it is no convolution.
        node: the ONNX op that it carries, if any.
    """
    if record.family != "convolution" and node not in ("Conv", "ConvTranspose"):
        yield
        return
    cudnn = torch.backends.cudnn
    chosen = cudnn.allow_tf32, cudnn.deterministic
    set_cudnn(allow_tf32=False, deterministic=True)
    try:
        yield
    finally:
        set_cudnn(*chosen)


def sees_gpus() -> bool:
    """True if this torch runs on GPUs."""
    return torch.cuda.is_available()


def _writable(array: np.ndarray) -> np.ndarray:
    """Returns an array that torch accepts without a warning, on the same memory where possible: ops only read it."""
    if any(s < 0 or s % array.itemsize for s in array.strides):
        return array.copy()
    return array if array.flags.writeable else np.asarray(_Unlocked(array)).view(array.dtype)


class _Unlocked:
    """An array interface that presents a read-only array as writable."""

    def __init__(self, array: np.ndarray) -> None:
        plain_bytes: Any = array if array.dtype.kind != "V" else array.view(np.uint16)
        interface = plain_bytes.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self.kept = array
