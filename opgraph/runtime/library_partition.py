"""Runs library partitions whose op kinds have records: with torch if installed, else with the reference."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from opgraph.ir import opdef
from opgraph.ir.op import Op
from opgraph.ir.opdef import OpDef, array_of
from opgraph.partition.partition import Partition
from opgraph.runtime.engine import Engine
from opgraph.runtime.foreign_nodes import check_foreign
from opgraph.runtime.operands import copied_into
from opgraph.runtime.reference import by_reference, check_shapes, told_numbers
from opgraph.runtime.runner import NO_SOURCES

if TYPE_CHECKING:
    from opgraph.runtime.runner import Runner


class OpLibrary(Protocol):
    """A library that runs single ops, on values of its own type."""

    def enter(self, array: np.ndarray) -> Any:
        """Converts an array to the library's type, on the same memory where possible."""

    def run(self, op: Op, record: OpDef, values: Sequence[Any]) -> Sequence[Any]:
        """Returns the results of an op, in the dtypes that the op declares; they may be views of values."""

    def leave(self, value: Any) -> np.ndarray:
        """Converts a value to a dense array, on the same memory where possible."""


def torch_on_gpu() -> bool:
    """True if torch is installed and runs on GPUs."""
    if importlib.util.find_spec("torch") is None:
        return False
    from opgraph.runtime.providers.torch_ops import sees_gpus  # needs torch

    return sees_gpus()


def native_runner(partition: Partition, engine: Engine, sizes: Collection[int] = ()) -> Runner:
    """Returns the runner of a partition of library ops on an engine: torch on the caller's memory, or NumPy.

    Args:
        sizes: ids of the values that stay on the host where the engine is a GPU.

    Raises:
        Unimplemented: torch does not run the gradient of an ONNX node, or is missing.
    """
    check_foreign(partition.ops)
    program = Program(partition)
    if engine.kind == "cuda" and torch_on_gpu():
        from opgraph.runtime.providers.torch_partition import CudaPartition  # needs CuPy, too

        return CudaPartition(program, engine.index, sizes)
    library: OpLibrary = NumpyOps()
    if importlib.util.find_spec("torch") is not None:
        from opgraph.runtime.providers.torch_ops import TorchOps  # needs torch

        library = TorchOps()
    run = NativePartition(program, library)
    if engine.kind == "cuda":
        from opgraph.runtime.cuda_exchange import Hosted  # needs CuPy

        return Hosted(run, engine.index, len(partition.input_ports))
    return run


@dataclass(slots=True)
class _Step:
    op: Op
    record: OpDef
    frees: tuple[int, ...]
    known: bool
    checked: tuple[Any, ...] | None = None


class Program:
    """The ops of a partition in order, and the last reader of each value."""

    def __init__(self, partition: Partition) -> None:
        self.inputs = [t.id for t in partition.input_ports]
        self.outputs = [t.id for t in partition.output_ports]
        self.constants = {t.id: array_of(t) for t in partition.constants}
        last = {t.id: op.id for op in partition.ops for t in op.inputs}
        kept = {*self.outputs, *self.constants}
        self.steps = []
        for op in partition.ops:
            record = opdef.get(op.kind, where=op.label)
            frees = tuple({t.id for t in op.inputs if last[t.id] == op.id and t.id not in kept})
            known = all(t.has_known_shape for t in op.inputs) and not record.inputs_that_say_shapes(op)
            self.steps.append(_Step(op, record, frees, known))

    def run(self, library: OpLibrary, values: dict[int, Any]) -> list[Any]:
        """Runs the ops; returns the values of the outputs.

        Args:
            values: those of inputs and constants, by tensor id; the dict is modified.

        Raises:
            InvalidShape: shapes that were unknown before, or differ from the declared ones, do not fit together.
        """
        for step in self.steps:
            given = [values[t.id] for t in step.op.inputs]
            if not step.known:
                numbers = told_numbers(step.op, step.record, given)
                found = (*(v.shape for v in given), *(n.tobytes() for n in numbers.values()))
                if step.checked != found:
                    check_shapes(step.op, step.record, given)
                    step.checked = found
            try:
                made = library.run(step.op, step.record, given)
            except RuntimeError:
                check_shapes(step.op, step.record, given)  # shapes that a model declares need not be correct
                raise
            values.update(zip((t.id for t in step.op.outputs), made, strict=True))
            for id in step.frees:
                del values[id]
        return [values[id] for id in self.outputs]


class NativePartition:
    """A partition on the CPU.

    Args:
        library: runs its ops.
    """

    sources = NO_SOURCES
    spins = False

    def __init__(self, program: Program, library: OpLibrary) -> None:
        self._program = program
        self._library = library
        self._constants = {id: library.enter(array) for id, array in program.constants.items()}

    @property
    def runs_in(self) -> str:
        """The library whose ops run: "torch" or "NumPy"."""
        return "NumPy" if isinstance(self._library, NumpyOps) else "torch"

    def repeated(self, arrays: Sequence[Any], outs: Sequence[Any]) -> None:
        """See Runner; None, since every call allocates."""

    def __call__(self, arrays: Sequence[np.ndarray], outs: Sequence[Any] | None = None) -> list[np.ndarray]:
        """Runs the ops.

        Args:
            arrays: one for each input port; any strides.
            outs: arrays to write to, one for each output port, or None for those that are to be allocated.

        Returns: one array for each output port, row-major and in separate memory.

        Raises:
            InvalidShape: the arrays do not fit together, or one of `outs` does not have its result's shape.
        """
        values = dict(self._constants)
        values.update((id, self._library.enter(a)) for id, a in zip(self._program.inputs, arrays, strict=True))
        made = [self._library.leave(v) for v in self._program.run(self._library, values)]
        # A reshape is a view: a result must not share memory with an input or another result.
        taken = [*arrays, *self._program.constants.values()]
        for index, array in enumerate(made):
            if any(np.may_share_memory(array, other) for other in taken):
                made[index] = array.copy()
            taken.append(made[index])
        if outs is None:
            return made
        return [m if out is None else copied_into(out, m) for out, m in zip(outs, made, strict=True)]


class NumpyOps:
    """The definitions of the ops, in NumPy."""

    def enter(self, array: np.ndarray) -> np.ndarray:
        """Returns the array."""
        return array

    def run(self, op: Op, record: OpDef, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See OpLibrary."""
        return by_reference(op, record, values, [t.dtype for t in op.outputs])

    def leave(self, value: np.ndarray) -> np.ndarray:
        """Returns the array, dense."""
        return np.asarray(value, order="C")
