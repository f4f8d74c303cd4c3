"""Runs the nodes of an ONNX model with onnxruntime: one session for each region of Wildcards."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opgraph.errors import DeviceError
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.runtime.io_binding import UnboundError
from opgraph.runtime.providers.onnx_bound import BoundRegion
from opgraph.runtime.providers.onnx_evaluator import as_declared, reference_foreign
from opgraph.runtime.providers.onnx_region import region_model
from opgraph.runtime.providers.onnx_session import (
    BITS,
    CUDA,
    array_of,
    one_line,
    onnxruntime_module,
    ort_value,
    run_session,
    session_of,
)
from opgraph.runtime.runner import NO_SOURCES, Repeated
from opgraph.runtime.threads import limit

if TYPE_CHECKING:
    from opgraph.partition.partition import Partition

__all__ = ["OnnxRuntimeRegion", "array_of", "onnxruntime_module", "ort_value", "reference_foreign"]


class OnnxRuntimeRegion:
    """One region, compiled.

    Args:
        partition: a library partition whose ops all carry an ONNX node.
        gpu: index of the GPU that onnxruntime should run it on.
        lone: whether no other part of the graph runs in turns with it: its threads may spin then.

    Raises:
        DeviceError: onnxruntime is not installed, or neither it nor onnx's evaluator accepts the region.

    If onnxruntime has no kernel for a node (most ops in bf16), onnx's own evaluator, written in NumPy, runs the region
    instead, with one RuntimeWarning.
    """

    sources = NO_SOURCES

    def __init__(self, partition: Partition, gpu: int | None = None, *, lone: bool = False) -> None:
        self._inputs = tuple(partition.input_ports)
        self._outputs = tuple(partition.output_ports)
        self._where = f"region of {len(partition.ops)} ONNX nodes, first {partition.ops[0].label}"
        self._ops, self._gpu = partition.ops, gpu
        self._model = region_model(self._ops, self._inputs, self._outputs, symbols=True)
        self._equal = _equal_sizes(self._inputs)
        self._evaluator: Any = None
        self._session: Any = None
        self.spins = lone
        onnxruntime_module()
        try:
            self._session = self._opened()
        except Exception as error:  # onnxruntime's error classes share no base
            self._evaluator = self._evaluator_for(error)
            self._notice(error)

    @property
    def runs_in(self) -> str:
        """ "onnxruntime", or "onnx" if onnx's evaluator runs the region."""
        return "onnx" if self._session is None else "onnxruntime"

    @property
    def is_on_gpu(self) -> bool:
        """True if onnxruntime uses its CUDA kernels: they may fail to load even if they were requested."""
        return self._gpu is not None and self._session is not None and CUDA in self._session.get_providers()

    def bound_to(self, memory: str, device: int) -> BoundRegion:
        """Returns an empty binding of the session.

        Args:
            memory, device: onnxruntime's name of the memory that holds the arrays, and its index.
        """
        inputs, outputs = zip(self._model.inputs, self._inputs), zip(self._model.outputs, self._outputs)
        return BoundRegion(onnxruntime_module(), self._session, list(inputs), list(outputs), memory, device)

    def __call__(self, arrays: Sequence[Any], outs: Sequence[Any] | None = None) -> list[Any]:
        """Runs the region; copies the results to `outs` if given."""
        results = self.run(arrays)
        if outs is None:
            return results
        for out, result in zip(outs, results, strict=True):
            out[...] = result
        return list(outs)

    def repeated(self, arrays: Sequence[Any], outs: Sequence[Any]) -> Repeated | None:
        """See Runner; None where onnx's evaluator runs it."""
        if self._session is None:
            return None
        found = self.bound(arrays, outs)
        return found.launch, found

    def bound(self, arrays: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> BoundRegion:
        """Returns the region bound to these arrays, which the caller keeps alive.

        Raises:
            UnboundError: onnx's evaluator, which allocates its results itself, runs the region.
        """
        self.check_sizes(arrays)
        if self._session is None:
            raise UnboundError(self._where)
        bound = self.bound_to("cpu", 0)
        for index, array in enumerate(arrays):
            bound.read(index, array)
        for index, array in enumerate(outs):
            bound.write(index, array)
        return bound

    def names(self, reads: Sequence[int], makes: Sequence[int]) -> tuple[list[str], list[str]] | None:
        """The session's names of inputs and outputs, given by id; None if not all of them are plain arrays."""
        if any(t.dtype in BITS or t.dtype == dtypes.UNDEF for t in (*self._inputs, *self._outputs)):
            return None
        inputs = {t.id: name for t, name in zip(self._inputs, self._model.inputs, strict=True)}
        outputs = {t.id: name for t, name in zip(self._outputs, self._model.outputs, strict=True)}
        return [inputs[i] for i in reads], [outputs[i] for i in makes]

    def feed(self, arrays: Mapping[str, np.ndarray], outputs: list[str]) -> list[np.ndarray]:
        """Runs the session on arrays by its names; their types and sizes must have been checked.

        Raises:
            Exception: any error of the session, or there is no session (any more).
        """
        found: list[np.ndarray] = self._session._sess.run(outputs, arrays, None)
        return found

    def may_write_over(self, arrays: Sequence[Any], outs: Sequence[Any]) -> list[list[int]]:
        """See BoundRunner: onnxruntime does not specify what it reads after it has written."""
        return [[] for _ in outs]

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Runs the region.

        Args:
            arrays: one array for each input port, in that order.

        Returns: one new array for each output port.

        Raises:
            DeviceError: a node failed; the message is the runtime's.
        """
        self.check_sizes(arrays)
        if self._session is None:
            return self._evaluated(arrays)
        try:
            return run_session(self._session, self._model, arrays, self._inputs, self._outputs)
        except Exception as error:  # as above
            # Some nodes that onnxruntime accepts fail in every run (RotaryEmbedding-23); others fail for these arrays.
            self._evaluator = self._evaluator_for(error)
            try:
                results = self._evaluated(arrays)
            except DeviceError:
                raise DeviceError(
                    f"onnxruntime failed: {one_line(error)}", where=self._where, fix="check the model and its inputs"
                ) from error
            self._session = None
            self._notice(error)
            return results

    def _opened(self) -> Any:
        return session_of(onnxruntime_module(), self._model, limit(), self._gpu, spins=self.spins)

    def check_sizes(self, arrays: Sequence[Any]) -> None:
        """Drops the symbols if one does not hold for these arrays.

        Symbols of a graph's inputs have been checked. Those of values between partitions may come from a model file,
        and onnxruntime never checks sizes that are declared equal.
        """
        for first, second in self._equal:
            if arrays[first[0]].shape[first[1]] != arrays[second[0]].shape[second[1]]:
                self._equal = []
                self._model = region_model(self._ops, self._inputs, self._outputs)
                if self._session is not None:
                    self._session = self._opened()
                return

    def _evaluated(self, arrays: Sequence[Any]) -> list[Any]:
        """Runs onnx's evaluator.

        Raises:
            DeviceError: the evaluator failed.
        """
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # overflows are normal results
                results = self._evaluator.run(None, dict(zip(self._model.inputs, arrays, strict=True)))
        except Exception as error:  # the evaluator raises any error of NumPy
            raise DeviceError(
                f"onnx's evaluator failed: {one_line(error)}", where=self._where, fix="check the model and its inputs"
            ) from error
        return [as_declared(r, t) for r, t in zip(results, self._outputs, strict=True)]

    def _evaluator_for(self, refusal: Exception) -> Any:
        """onnx's evaluator for the region that onnxruntime refused.

        Raises:
            DeviceError: the evaluator refuses it, too.
        """
        from opgraph.runtime.providers.onnx_loop import evaluator

        try:
            return evaluator(self._model.with_data())
        except Exception as error:  # the evaluator has several error classes
            raise DeviceError(
                f"onnxruntime refuses it: {one_line(refusal)}; onnx's evaluator too: {one_line(error)}",
                where=self._where,
                fix="replace the node that the message names",
            ) from refusal

    def _notice(self, refusal: Exception) -> None:
        _warn_once(
            f"onnxruntime cannot run a {self._where}; onnx's NumPy evaluator runs it, slowly, and others like it. "
            f"onnxruntime says: {one_line(refusal)}"
        )


def _equal_sizes(tensors: Sequence[LogicalTensor]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of (tensor, axis) that are declared to be equal."""
    first: dict[str, tuple[int, int]] = {}
    pairs = []
    for index, tensor in enumerate(tensors):
        for axis, size in enumerate(tensor.dims or () if tensor.dtype != dtypes.UNDEF else ()):
            if isinstance(size, str) and first.setdefault(size, (index, axis)) != (index, axis):
                pairs.append((first[size], (index, axis)))
    return pairs


_noticed = False


def _warn_once(text: str) -> None:
    """Warns once in a process: a model in bf16 has dozens of such regions."""
    global _noticed
    if not _noticed:
        _noticed = True
        warnings.warn(text, RuntimeWarning, stacklevel=5)
