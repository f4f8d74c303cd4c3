"""A case: one entry, one direction, one dtype, one size, on one device, with the arrays that all peers share."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import opgraph as og
from opgraph.bench.entries import BACKWARD, LEFT, RIGHT, TURNED, Entry, Operand
from opgraph.errors import DeviceError, InvalidArguments
from opgraph.ir import dtypes

#: Values are drawn once and repeated. Their number is prime, so that no row length hides a wrong index.
_DRAWN = 262_139


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The computation for which a peer builds its call.

    Attributes:
        space: the dimensions of the formula's result.
        arrays: inputs by name; for backward also "d_y" and what forward saves. NumPy arrays, or torch tensors on a GPU,
            all in memory that was written before. Peers bind them without a copy where they can. They are never
            written to, except by in-place entries.
        outs: arrays for the results, by the names of the graph's outputs; shared by all peers, which run in turns.
        packed: the array that holds both halves, for entries that have halves; `packed_out` the same for results.
        threads: the number of threads that every peer may use.
    """

    entry: Entry
    direction: str
    dtype: str
    device: str
    space: tuple[int, ...]
    graph: og.Graph
    arrays: Mapping[str, Any]
    outs: Mapping[str, Any]
    packed: Any = None
    packed_out: Any = None
    threads: int = 1

    @property
    def is_backward(self) -> bool:
        """True if this is the gradient."""
        return self.direction == BACKWARD

    @property
    def elements(self) -> int:
        """The number of elements of the space."""
        return math.prod(self.space)

    @property
    def bytes(self) -> int:
        """The minimum of bytes read and written: every input that the graph reads and every output, once."""
        return sum(math.prod(t.shape) * dtypes.get(t.dtype).itemsize for t in (*self.graph.inputs, *self.graph.outputs))

    @property
    def kept(self) -> tuple[str, ...]:
        """The values computed by forward that the gradient reads; they may include its result."""
        given = {"d_y", *(o.name for o in self.entry.operands)}
        return tuple(t.name or "" for t in self.graph.inputs if t.name not in given)

    @property
    def feeds(self) -> dict[str, Any]:
        """The inputs that the graph reads; a gradient does not read all."""
        return {t.name or "": self.arrays[t.name or ""] for t in self.graph.inputs}

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The formula's inputs, in its order."""
        return tuple(self.arrays[o.name] for o in self.entry.operands)

    @property
    def out(self) -> Any:
        """The array for the result of a case with one output."""
        (found,) = self.outs.values()
        return found


def make(entry: Entry, direction: str, dtype: str, n: int, device: str = "cpu", threads: int = 1) -> Case:
    """Allocates and fills the arrays of a case of about `n` elements.

    Raises:
        OpGraphError: the formula has no graph (a kind is missing, a gradient is not written).
    """
    space = entry.dims(n)
    graph = entry.graph(space, dtype, direction)
    memory = _Memory(device, dtypes.get(dtype).numpy)
    packed = memory.filled("packed", (*space[:-1], 2 * space[-1]), 0.0) if _has_halves(entry) else None
    arrays = {o.name: _operand(memory, o, space, packed) for o in entry.operands}
    if direction == BACKWARD:
        arrays["d_y"] = memory.filled("d_y", space, 0.0)
        arrays |= _made_by_forward(entry, arrays, space, dtype, device)
    packed_out = memory.filled("out", (*space[:-1], 2 * space[-1]), 0.0) if packed is not None else None
    outs = {}
    for tensor in graph.outputs:
        name = tensor.name or ""
        half = next((o.view for o in entry.operands if name == f"d_{o.name}" and o.view in (LEFT, RIGHT)), "")
        outs[name] = _half(packed_out, half) if half else memory.filled(f"out {name}", tensor.shape, 0.0)
    if entry.in_place:
        outs = {"y": arrays[entry.operands[0].name]}
    return Case(
        entry=entry,
        direction=direction,
        dtype=dtype,
        device=device,
        space=space,
        graph=graph,
        arrays=arrays,
        outs=outs,
        packed=packed,
        packed_out=packed_out if direction == BACKWARD else None,
        threads=threads,
    )


def _made_by_forward(
    entry: Entry, arrays: Mapping[str, Any], space: tuple[int, ...], dtype: str, device: str
) -> dict[str, Any]:
    """The values that the gradient reads besides operands."""
    plan = entry.plan(space, dtype)
    kept = [t.name or "" for t in plan.backward.inputs if t.name not in arrays]
    if not kept:
        return {}
    made = og.compile(plan.forward, device=device)({t.name or "": arrays[t.name or ""] for t in plan.forward.inputs})
    return {name: made[name] if isinstance(made, dict) else made for name in kept}


def _has_halves(entry: Entry) -> bool:
    return any(o.view in (LEFT, RIGHT) for o in entry.operands)


def _half(packed: Any, side: str) -> Any:
    width = packed.shape[-1] // 2
    return packed[..., :width] if side == LEFT else packed[..., width:]


def _operand(memory: _Memory, operand: Operand, space: tuple[int, ...], packed: Any) -> Any:
    if operand.view in (LEFT, RIGHT):
        return _half(packed, operand.view)
    dims = operand.dims(space)
    if operand.view == TURNED:
        return memory.filled(operand.name, dims[::-1], operand.around).T
    return memory.filled(operand.name, dims, operand.around)


class _Memory:
    """Arrays on a device, filled with normally distributed values that depend on their name alone."""

    def __init__(self, device: str, dtype: np.dtype[Any]) -> None:
        self._device = device
        self._dtype = dtype

    def filled(self, name: str, dims: tuple[int, ...], around: float) -> Any:
        """An array, with every element written."""
        size = math.prod(dims)
        drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(min(size, _DRAWN))
        # A parameter stays near its usual value.
        values = (around + 0.1 * drawn if around else drawn).astype(self._dtype)
        if self._device == "cpu":
            return np.resize(values, size).reshape(dims)
        return _on_gpu(values, size).reshape(dims)


def _on_gpu(values: np.ndarray, size: int) -> Any:
    """The values repeated on the GPU."""
    import torch

    from opgraph.runtime.providers.torch import from_numpy

    block = from_numpy(values).to("cuda")
    out = torch.empty(size, dtype=block.dtype, device="cuda")
    whole = size // len(values) * len(values)
    if whole:
        out[:whole].view(-1, len(values)).copy_(block)
    out[whole:] = block[: size - whole]
    return out


def as_numpy(array: Any) -> np.ndarray:
    """An array of any library as a NumPy array, copied from a GPU."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "get"):  # CuPy's
        return np.asarray(array.get())
    from opgraph.runtime.providers.torch import to_numpy

    return to_numpy(array.cpu())


def require_gpu() -> None:
    """Raises InvalidArguments if no GPU can be measured; torch provides the arrays and the clock there."""
    try:
        import torch

        reason = "" if torch.cuda.is_available() else "torch sees no GPU"
        if not reason:
            cuda: Any = torch.cuda
            cuda.init()  # from here on the GPU's name is known
    except ImportError as error:
        reason = f"torch cannot be imported ({error})"
    if reason:
        raise InvalidArguments(f"nothing to measure on: {reason}", where="--device cuda", fix="use --device cpu")


def require_gpu_still(where: str) -> None:
    """Raises DeviceError if the GPU rejects all work of this process, as after an illegal access."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceError(
            f"the GPU is lost to this process: {str(error).splitlines()[0]}",
            where=where,
            fix="measure the rest in a new process (--suite, --entries), without the peer that did it (--without)",
        ) from None
