"""What an engine must do with arrays that come in and go out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from opgraph.runtime import array_exchange
from opgraph.runtime.engine import Engine


class Exchange(Protocol):
    """How arrays get in and out: the module `array_exchange` for the CPU, a CudaExchange for a GPU.

    An array is what `imported` makes: a NumPy array, a DeviceArray.
    """

    def imported(self, feeds: Mapping[Any, Any] | None, named: dict[str, Any], /) -> tuple[Any, dict[str, Any], Any]:
        """The same arguments as arrays, and the kind to give results back in; None: as they are."""

    def exported(self, result: Any, kind: Any, /) -> Any:
        """A result in that kind."""

    def assign(self, target: Any, result: Any, /) -> None:
        """Copies a result that is not in its place yet."""

    def check_donated(self, name: str, array: Any, others: Sequence[Any], /) -> None:
        """Raises InvalidArguments where writing to a donated input would destroy what is still read."""

    def overlaps(self, array: Any, others: Iterable[Any], /) -> bool:
        """Whether an array may share memory with one of others."""

    def check_out(
        self, name: str, array: Any, inputs: Sequence[Any], outs: Sequence[Any], /, *, over: Collection[int] = ()
    ) -> None:
        """Raises InvalidArguments where an output cannot be written to, or that would destroy what is still read."""

    def counted(self, arrays: Iterable[Any], where: str, /) -> list[Any]:
        """Those of the arrays that are tensors whose changes torch counts."""

    def written(self, tensors: Iterable[Any], /) -> None:
        """Tells torch of writes to tensors."""

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any], like: Any, /) -> Any:
        """Zeros that take no memory to speak of, where `like` is."""


def exchange_of(engine: Engine) -> Exchange:
    """How arrays get in and out of an engine."""
    if engine.kind == "cpu":
        return array_exchange
    from opgraph.runtime.cuda_exchange import CudaExchange  # needs CuPy

    return CudaExchange(engine.index)
