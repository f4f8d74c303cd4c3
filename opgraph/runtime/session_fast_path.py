"""Fast path for a graph that is one region of a library: calls like earlier ones go directly to the library.

A prepared call still takes about 5000 instructions of Python and of onnxruntime's bindings. After a model that has
filled the caches, they are read from memory again: measured with an EfficientNet of 1.7 ms, this takes 100 us. The fast
path only does what the library's own interface does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor, port_name
from opgraph.runtime.bounded_dict import Bounded

#: The number of shape sets that are cached.
_MAX_SHAPES = 64
#: Above this many bytes of outputs, writing directly to their targets is faster: on this path the library copies them.
_FEW_BYTES = 64 * 1024


@runtime_checkable
class Feedable(Protocol):
    """A runner that takes arrays by name."""

    def names(self, reads: Sequence[int], makes: Sequence[int]) -> tuple[list[str], list[str]] | None:
        """Its names for inputs and outputs, given by id; None if it needs them checked or wrapped."""

    def feed(self, arrays: Mapping[str, np.ndarray], outputs: list[str]) -> list[np.ndarray]:
        """Runs the partition; returns its outputs. A failure raises the library's error."""


class WholeGraph:
    """A graph whose only partition takes arrays by name.

    Args:
        run: the partition's runner.
        inputs, outputs: the graph's.
        names: of the partition's inputs and outputs, in this order.
    """

    def __init__(self, run: Feedable, inputs: Sequence[LogicalTensor], names: tuple[list[str], list[str]]) -> None:
        self._run = run
        self._ports = [
            (port_name(t), dtypes.get(t.dtype).numpy, name) for t, name in zip(inputs, names[0], strict=True)
        ]
        self._outputs = names[1]
        self._seen: Bounded[tuple[tuple[int, ...], ...], None] = Bounded(_MAX_SHAPES)

    def __call__(self, given: Any) -> list[np.ndarray] | None:
        """Returns the outputs; None if the normal path must handle the call: new types or shapes, or an error."""
        if type(given) is not dict or len(given) != len(self._ports):
            return None
        feeds: dict[str, np.ndarray] = {}
        shapes: tuple[tuple[int, ...], ...] = ()
        for name, dtype, inner in self._ports:
            array = given.get(name)
            if type(array) is not np.ndarray or array.dtype is not dtype:
                return None
            feeds[inner] = array
            shapes += (array.shape,)
        if shapes not in self._seen:
            return None
        try:
            return self._run.feed(feeds, self._outputs)
        except Exception:  # the normal path raises it again, with its own message
            self._seen.pop(shapes, None)
            return None

    def learn(self, arrays: Sequence[Any], results: Sequence[Any]) -> None:
        """Stores the shapes of a successful call."""
        if sum(r.nbytes for r in results) <= _FEW_BYTES:
            self._seen[tuple([a.shape for a in arrays])] = None


def whole_graph(
    steps: Sequence[Any], inputs: Sequence[LogicalTensor], outputs: Sequence[LogicalTensor]
) -> WholeGraph | None:
    """Returns the fast path of a graph that is exactly one partition of a library; None for other graphs."""
    if len(steps) != 1 or not isinstance(steps[0].run, Feedable):
        return None
    (step,) = steps
    reads, makes = [t.id for t in inputs], [t.id for t in outputs]
    if set(reads) != set(step.reads) or set(makes) != set(step.makes):
        return None
    names = step.run.names(reads, makes)
    return None if names is None else WholeGraph(step.run, inputs, names)
