"""Import and export of arrays for the CUDA engine: `opgraph.runtime.array_exchange`, for CuPy arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from opgraph.errors import InvalidArguments
from opgraph.runtime import cuda
from opgraph.runtime.array_exchange import counted, donation_refused, outputs_refused, overlap_refused, written
from opgraph.runtime.cuda_arrays import library_of, raw_stream, seen
from opgraph.runtime.device_array import DeviceArray, Library
from opgraph.runtime.engine import Stream
from opgraph.runtime.runner import NO_SOURCES, Runner


class CudaExchange:
    """Exchanges arrays of any library on one GPU, viewed in place.

    Args:
        device: index of the GPU.
    """

    def __init__(self, device: int) -> None:
        self.device = device

    def imported(
        self, feeds: Mapping[Any, Any] | None, named: dict[str, Any]
    ) -> tuple[Mapping[Any, Any] | None, dict[str, Any], Library]:
        """Returns the arguments as DeviceArrays, and the library for the results.

        Raises:
            InvalidArguments: an array is not on this GPU; nothing is copied there silently.
        """
        views = {k: seen(v, self.device, "input", k) for k, v in named.items()}
        if not isinstance(feeds, Mapping):  # None, or refused by binding
            return feeds, views, library_of(views.values())
        fed = {k: seen(v, self.device, "input", k) for k, v in feeds.items()}
        return fed, views, library_of([*views.values(), *fed.values()])

    def exported(self, result: Any, library: Library) -> Any:
        """Returns a result for the caller: an input that is an output unchanged, a constant on the device."""
        if type(result) is DeviceArray:
            return result.owner
        return library.from_host(result, self.device) if isinstance(result, np.ndarray) else result

    def assign(self, target: DeviceArray, result: Any) -> None:
        """Copies a result that is not in `target` yet."""
        if result is target.owner:
            return
        if isinstance(result, np.ndarray):
            target.owner[...] = target.library.from_host(result, self.device)
            return
        source = seen(result, self.device, "a result")
        if source.library is target.library:
            target.owner[...] = source.owner
        else:
            target.owner[...] = target.library.from_host(source.library.to_host(source.owner), self.device)

    def check_donated(self, name: str, array: DeviceArray, others: Sequence[Any]) -> None:
        """Raises InvalidArguments if writing to a donated input would destroy data that is still read."""
        if array.overlaps_itself:
            raise donation_refused(name, "its array overlaps itself")
        if self.overlaps(array, others):
            raise donation_refused(name, "its array overlaps that of another input")

    def overlaps(self, array: DeviceArray, others: Iterable[Any]) -> bool:
        """True if an array may share memory with one of others."""
        return any(array.may_share(seen(other, self.device, "an array")) for other in others)

    def counted(self, arrays: Iterable[Any], where: str) -> list[Any]:
        """See `array_exchange.counted`."""
        return counted(arrays, where)

    def written(self, tensors: Iterable[Any]) -> None:
        """See `array_exchange.written`."""
        written(tensors)

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any], like: Any) -> DeviceArray:
        """Returns zeros in memory of `like`'s library; all elements share one address."""
        library = seen(like, self.device, "an array").library
        with cuda.OnDevice(self.device):
            owner, _ = library.empty((), dtype, self.device)
            owner[...] = 0  # a kernel, which a capture allows, unlike a copy from the host
        one = library.view(owner)
        return DeviceArray(one.owner, one.pointer, one.dtype, tuple(shape), (0,) * len(shape), one.device, library)

    def check_out(
        self, name: str, array: DeviceArray, inputs: Sequence[Any], outs: Sequence[Any], *, over: Collection[int] = ()
    ) -> None:
        """See `array_exchange.check_out`."""
        where = f'output "{name}"'
        if array.overlaps_itself:
            raise InvalidArguments(
                "the output array overlaps itself", where=where, fix="give an array without broadcast axes"
            )
        for place, other in enumerate(inputs):
            if array.may_share(other) and not (place in over and array.is_same(other)):
                raise overlap_refused(where, over)
        if any(array.may_share(other) for other in outs):
            raise outputs_refused(where)


class Hosted:
    """Runs a library's partition of the GPU engine through host memory: its provider takes NumPy arrays.

    Args:
        inputs: the number of inputs that it reads; an array after them only determines the stream of a call.
    """

    sources = NO_SOURCES
    spins = False

    def __init__(self, run: Runner, device: int, inputs: int) -> None:
        self._run = run
        self._inputs = inputs
        self._exchange = CudaExchange(device)

    @property
    def runs_in(self) -> str:
        """The name of the provider's library."""
        return self._run.runs_in

    def repeated(self, arrays: Sequence[Any], outs: Sequence[Any]) -> None:
        """See Runner; None, since every call allocates."""

    def __call__(
        self, arrays: Sequence[Any], outs: Sequence[Any] | None = None, stream: Stream | None = None
    ) -> list[Any]:
        """Waits for the inputs, runs the provider and copies the results back; arguments as for CudaKernel."""
        device = self._exchange.device
        views = [seen(a, device, "an input") for a in arrays]
        library = library_of(views)
        cuda.wait(device, library.stream(device) if stream is None else raw_stream(stream))
        with cuda.OnDevice(device):
            # An operand that only provides its shape is one broadcast element (CudaExchange.zeros).
            made = self._run([np.broadcast_to(v.library.to_host(v.owner), v.shape) for v in views[: self._inputs]])
            results = []
            for position, result in enumerate(made):
                target = None if outs is None else outs[position]
                if target is None:
                    results.append(library.from_host(result, device))
                else:
                    view = seen(target, device, "an output")
                    self._exchange.assign(view, result)
                    results.append(view.owner)
        return results
