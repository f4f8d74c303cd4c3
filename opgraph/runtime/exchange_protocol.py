"""The interface for importing arrays to an engine and exporting them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from opgraph.runtime import array_exchange
from opgraph.runtime.engine import Engine


class Exchange(Protocol):
    """Import and export of arrays: the module `array_exchange` for the CPU, a CudaExchange for a GPU.

    An array is a result of `imported`: a NumPy array, or a DeviceArray.
    """

    def imported(self, feeds: Mapping[Any, Any] | None, named: dict[str, Any], /) -> tuple[Any, dict[str, Any], Any]:
        """Returns the arguments as arrays, and the kind of the results; None: unconverted."""

    def exported(self, result: Any, kind: Any, /) -> Any:
        """Returns a result in that kind."""

    def assign(self, target: Any, result: Any, /) -> None:
        """Copies a result that is not in `target` yet."""

    def check_donated(self, name: str, array: Any, others: Sequence[Any], /) -> None:
        """Raises InvalidArguments if writing to a donated input would destroy data that is still read."""

    def overlaps(self, array: Any, others: Iterable[Any], /) -> bool:
        """True if an array may share memory with one of others."""

    def check_out(
        self, name: str, array: Any, inputs: Sequence[Any], outs: Sequence[Any], /, *, over: Collection[int] = ()
    ) -> None:
        """Raises InvalidArguments if an output is not writable, or writing would destroy data that is still read."""

    def counted(self, arrays: Iterable[Any], where: str, /) -> list[Any]:
        """Selects the torch tensors with a version counter."""

    def written(self, tensors: Iterable[Any], /) -> None:
        """Increments torch's version counters of written tensors."""

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any], like: Any, /) -> Any:
        """Returns zeros that take almost no memory, on the device of `like`."""


def exchange_of(engine: Engine) -> Exchange:
    """The Exchange of an engine."""
    if engine.kind == "cpu":
        return array_exchange
    from opgraph.runtime.cuda_exchange import CudaExchange  # needs CuPy

    return CudaExchange(engine.index)
