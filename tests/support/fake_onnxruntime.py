"""A fake onnxruntime for a library of custom ops: the table of functions, and a call of one op.

The table has the functions that kernels/ort/api.h names, at their positions in OrtApi; all others are null. Tensors of
the CUDA provider end where accessible memory ends (tests/support/guarded.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from guarded import guarded

_P, _I, _U32, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_size_t
_OUT = ctypes.POINTER(_P)
#: Members of an OrtCustomOp, in order.
_MEMBERS = (
    *("version", "CreateKernel", "GetName", "GetExecutionProviderType", "GetInputType", "GetInputTypeCount"),
    *("GetOutputType", "GetOutputTypeCount", "KernelCompute", "KernelDestroy", "GetInputCharacteristic"),
    *("GetOutputCharacteristic", "GetInputMemoryType", "GetVariadicInputMinArity", "GetVariadicInputHomogeneity"),
    *("GetVariadicOutputMinArity", "GetVariadicOutputHomogeneity", "CreateKernelV2", "KernelComputeV2"),
)


class StatusError(Exception):
    """An OrtStatus: its code and message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class FakeOnnxruntime:
    """Registers a library and calls its ops.

    Attributes:
        stream: the stream of the CUDA provider.
        offset: the start of its tensors, in bytes beyond a multiple of 16.
        ops: (name, provider) of each op, in order.
    """

    def __init__(self, path: str) -> None:
        self.stream = 0
        self.offset = 0
        self.ops: list[tuple[str, str]] = []
        self._ops: list[int] = []
        self._held: dict[int, Any] = {}  # all objects with a handle
        self._functions: list[Any] = []
        self._alpha: float | None = None
        table = (_P * 275)()
        self._table = table
        for position, (result, arguments, function) in self._api().items():
            made = ctypes.CFUNCTYPE(result, *arguments)(function)
            self._functions.append(made)
            table[position] = ctypes.cast(made, _P).value
        get = ctypes.CFUNCTYPE(_P, _U32)(lambda version: ctypes.addressof(table))
        self._functions.append(get)
        base = (_P * 2)(ctypes.cast(get, _P).value, None)
        register = ctypes.CDLL(path).RegisterCustomOps
        register.restype = _P
        self._check(register(None, ctypes.byref(base)))

    def run(
        self, name: str, provider: str, arrays: Sequence[np.ndarray], kinds: Sequence[Any], alpha: float | None = None
    ) -> list[np.ndarray]:
        """One node: its kernel is created, called once, and destroyed.

        Args:
            kinds: dtype of each output.
            alpha: the node's attribute, if it has one.

        Raises:
            StatusError: the op returned an error.
        """
        found = [i for i, op in enumerate(self.ops) if op == (name, provider) and self._takes(self._ops[i], arrays)]
        (op,) = [self._ops[i] for i in found]
        kernel = _P()
        self._alpha = alpha
        self._check(_function(op, "CreateKernelV2", _P, _P, _P, _P, _OUT)(op, None, None, ctypes.byref(kernel)))
        self._inputs = [self._handle(self._own(a)) for a in arrays]
        self._outputs: dict[int, int] = {}
        self._kinds = kinds
        try:
            self._check(_function(op, "KernelComputeV2", _P, _P, _P)(kernel, 1))
            return [self._held[self._outputs[i]] for i in range(len(kinds))]
        finally:
            _function(op, "KernelDestroy", None, _P)(kernel)

    def _takes(self, op: int, arrays: Sequence[np.ndarray]) -> bool:
        kind = _function(op, "GetInputType", _I, _P, _SIZE)
        return all(kind(op, i) == _TYPES[a.dtype.name] for i, a in enumerate(arrays))

    def _handle(self, value: Any) -> int:
        self._held[len(self._held) + 1] = value
        return len(self._held)

    def _check(self, status: int | None) -> None:
        if status:
            raise self._held.pop(status)

    # -- the table ---------------------------------------------------------------------------------------------------

    def _api(self) -> Mapping[int, tuple[Any, tuple[Any, ...], Any]]:
        """(result, arguments, function) by position."""
        return {
            0: (_P, (_I, ctypes.c_char_p), lambda code, text: self._handle(StatusError(code, text.decode()))),
            26: (_P, (ctypes.c_char_p, _OUT), lambda name, out: _set(out, 1)),
            27: (_P, (_P, _P), self._add),
            28: (_P, (_P, _P), lambda options, domain: None),
            51: (_P, (_P, _OUT), lambda value, out: _set(out, self._held[value].__array_interface__["data"][0])),
            61: (_P, (_P, ctypes.POINTER(_SIZE)), lambda info, out: _set(out, self._held[info].ndim)),
            62: (_P, (_P, ctypes.POINTER(ctypes.c_int64), _SIZE), self._dims),
            65: (_P, (_P, _OUT), lambda value, out: _set(out, value)),
            75: (_P, (_P, _SIZE, _OUT), lambda allocator, size, out: _set(out, self._allocate(size))),
            76: (_P, (_P, _P), lambda allocator, memory: None),
            78: (_P, (_OUT,), lambda out: _set(out, 1)),
            85: (_P, (_P, ctypes.c_char_p, ctypes.POINTER(ctypes.c_float)), self._attribute),
            88: (_P, (_P, ctypes.POINTER(_SIZE)), lambda context, out: _set(out, len(self._inputs))),
            90: (_P, (_P, _SIZE, _OUT), lambda context, index, out: _set(out, self._inputs[index])),
            91: (_P, (_P, _SIZE, ctypes.POINTER(ctypes.c_int64), _SIZE, _OUT), self._output),
            93: (None, (_P,), lambda status: None),
            99: (None, (_P,), lambda info: None),
            193: (_P, (_P, _OUT), lambda context, out: _set(out, self.stream)),
        }

    def _add(self, domain: int, op: int) -> None:
        texts = [_function(op, name, ctypes.c_char_p, _P)(op) for name in ("GetName", "GetExecutionProviderType")]
        self.ops.append((texts[0].decode(), (texts[1] or b"CPUExecutionProvider").decode()))
        self._ops.append(op)

    def _dims(self, info: int, out: Any, count: int) -> None:
        for axis in range(count):
            out[axis] = self._held[info].shape[axis]

    def _allocate(self, size: int) -> int:
        self._functions.append(memory := ctypes.create_string_buffer(size))
        return ctypes.addressof(memory)

    def _attribute(self, info: int, name: bytes, out: Any) -> int | None:
        if self._alpha is None:
            return self._handle(StatusError(1, "there is no such attribute"))
        out[0] = self._alpha
        return None

    def _output(self, context: int, index: int, dims: Any, rank: int, out: Any) -> None:
        shape = tuple(dims[axis] for axis in range(rank))
        if index not in self._outputs:
            self._outputs[index] = self._handle(self._own(np.zeros(shape, self._kinds[index])))
        _set(out, self._outputs[index])

    def _own(self, array: np.ndarray) -> np.ndarray:
        """A copy in memory of the GPU."""
        memory = guarded(array.nbytes + self.offset)[self.offset :]
        made = memory.view(array.dtype).reshape(array.shape)
        made[...] = array
        return made


#: ONNXTensorElementDataType.
_TYPES = {
    "float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "float64": 11, "bfloat16": 16
}  # fmt: skip


def _function(op: int, name: str, result: Any, *arguments: Any) -> Any:
    """A member of an OrtCustomOp, whose first is 32 bits and the others pointers."""
    place = _P.from_address(op + 8 * _MEMBERS.index(name)).value
    return ctypes.CFUNCTYPE(result, *arguments)(place)


def _set(out: Any, value: int) -> None:
    out[0] = value
