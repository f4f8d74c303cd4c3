"""Kernels bound to arrays: only the launch remains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from opgraph.runtime.cpu_kernel import HostKernel
    from opgraph.runtime.cpu_plan import Plan


class Bound(Protocol):
    """A partition bound to arrays of fixed shapes and strides, whose addresses may change.

    Attributes:
        launch: runs it; takes no arguments, checks nothing, and holds only addresses of arrays that this object keeps.
    """

    launch: Callable[[], None]

    def read(self, index: int, array: np.ndarray) -> None:
        """Makes the partition read an input from `array`; the caller keeps the array alive."""

    def write(self, index: int, array: np.ndarray) -> None:
        """Makes the partition write an output to `array`."""


#: Shape and dtype of a value.
Looks: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]


class UnboundError(Exception):
    """A step does not run on bound buffers; in this case the steps run one by one."""


@runtime_checkable
class BoundRunner(Protocol):
    """A runner that can be bound to arrays."""

    def bound(self, arrays: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> Bound:
        """Returns the partition bound to these arrays.

        Raises:
            UnboundError: it does not run on given memory (any more).
        """

    def may_write_over(self, arrays: Sequence[Looks], outs: Sequence[Looks]) -> list[list[int]]:
        """For each output, the inputs that it may overwrite, given row-major arrays of these shapes and dtypes."""


class BoundKernel:
    """A kernel of the CPU engine, bound to arrays that the caller keeps alive."""

    def __init__(
        self, kernel: HostKernel, plan: Plan, arrays: Sequence[np.ndarray], outs: Sequence[np.ndarray]
    ) -> None:
        self._base = kernel.pointers(plan, arrays, outs)
        self._arrays = (
            [] if plan.size else list(arrays)
        )  # a launch needs addresses only, and must not keep arrays alive
        self._outs = [] if plan.size else list(outs)
        self._inputs: list[list[int]] = [[] for _ in arrays]
        for position, source in kernel.given:
            self._inputs[source].append(position)
        self._first_store = len(kernel.lowered.loads)
        self._keep = plan  # the launch holds addresses only
        of_nothing = partial(kernel.of_nothing, self._arrays, self._outs)
        self.launch: Callable[[], None] = plan.launch_on(self._base) if plan.size else of_nothing

    def read(self, index: int, array: np.ndarray) -> None:
        """See Bound."""
        if self._arrays:
            self._arrays[index] = array
        address = array.__array_interface__["data"][0]
        for position in self._inputs[index]:
            self._base[position] = address

    def write(self, index: int, array: np.ndarray) -> None:
        """See Bound."""
        if self._outs:
            self._outs[index] = array
        self._base[self._first_store + index] = array.__array_interface__["data"][0]
