"""Compares two results: they agree if they are equal, or both equally near to the float64 truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opgraph.cli.compare import NO_ELEMENTS, Distance, distance, refuse_empty, same_bits
from opgraph.cli.feeds import Port
from opgraph.errors import OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.runtime.foreign_nodes import check_onnx
from opgraph.runtime.reference import evaluate

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One output of two runs.

    Attributes:
        apart: the distance of the second from the first.
        same_bits: True if they are equal bit by bit. 0 and -0, or two kinds of nan, differ in bits at distance 0.
        first, second: the distance of each from the truth; None if no output of the two differs.
    """

    name: str
    dtype: str
    apart: Distance
    same_bits: bool
    first: Distance | None
    second: Distance | None

    @property
    def difference(self) -> str:
        """The distance of the second from the first, as text."""
        if not self.apart.count:
            return NO_ELEMENTS
        if self.apart.absolute:
            return str(self.apart)
        return "none: the same bits" if self.same_bits else "none but in signs of zeros, or in kinds of nan"

    @property
    def agrees(self) -> bool:
        """True if no value differs, or the second is at most twice as far from the truth as the first, plus one ulp."""
        if self.first is None or self.second is None:
            return self.apart.absolute == 0
        return self.second.is_within(self.first)


def judged(outputs: Sequence[Port], first: Arrays, second: Arrays, truth: Callable[[], Arrays] | None) -> list[Judged]:
    """Compares two runs.

    Args:
        truth: computes the outputs in float64; only called if values differ. None: differing values disagree.

    Raises:
        OpGraphError: an output has another shape in the second run.
        InvalidArguments: no output has an element.
    """
    for port in outputs:
        shapes = [list(way[port.name].shape) for way in (first, second)]
        if shapes[0] != shapes[1]:
            raise OpGraphError(
                f"it has shape {shapes[0]} in one file and {shapes[1]} in the other",
                where=f'output "{port.name}"',
                fix="compare two files of one model",
            )
    apart = {p.name: distance(second[p.name], first[p.name], p.dtype) for p in outputs}
    refuse_empty(apart.values(), "both models")
    exact = truth() if truth is not None and any(d.absolute for d in apart.values()) else None
    rows = []
    for port in outputs:
        ways = (first, second) if exact is not None else ()
        found = [distance(way[port.name], exact[port.name], port.dtype) for way in ways if exact is not None]
        first_off, second_off = found or (None, None)
        rows.append(
            Judged(
                name=port.name,
                dtype=port.dtype,
                apart=apart[port.name],
                same_bits=same_bits(first[port.name], second[port.name]),
                first=first_off,
                second=second_off,
            )
        )
    return rows


def true_outputs(graph: Graph, feeds: Arrays) -> dict[str, np.ndarray]:
    """The float64 reference of a graph, by output name. onnx's evaluator runs ONNX nodes, also in float64."""
    return _by_name(graph, evaluate(graph, dict(feeds), foreign=foreign_of(graph)))


def numpy_outputs(graph: Graph, feeds: Arrays) -> dict[str, np.ndarray]:
    """The same formulas in NumPy, each in its own dtype."""
    return _by_name(graph, evaluate(graph, dict(feeds), dtype=None, foreign=same_dtype_foreign))


def _by_name(graph: Graph, results: Any) -> dict[str, np.ndarray]:
    if len(graph.outputs) == 1:
        results = {graph.outputs[0].name: results}
    return {str(name): np.asarray(array) for name, array in results.items()}


def foreign_of(graph: Graph) -> Any:
    """The function that runs a graph's Wildcards in float64; None if it has none, so that onnx is not needed."""
    carried = [op for op in graph.ops if op.kind == "Wildcard"]
    if not carried:
        return None
    check_onnx(carried[0])
    from opgraph.runtime.providers.onnx_evaluator import reference_foreign

    return reference_foreign


def same_dtype_foreign(op: Op, arrays: Sequence[np.ndarray]) -> list[Any]:
    """Computes a Wildcard in its own precision (f16 and bf16 in f32), and rounds results to the declared dtypes.

    `evaluate(dtype=None)` does the same with native ops.
    """
    from opgraph.runtime.providers.onnx_evaluator import reference_foreign

    wide = np.float64 if any(t.dtype == "f64" for t in (*op.inputs, *op.outputs)) else np.float32
    results = reference_foreign(op, arrays, wide)
    return [_declared(result, tensor) for result, tensor in zip(results, op.outputs, strict=True)]


def _declared(result: Any, tensor: LogicalTensor) -> Any:
    record = dtypes.BY_NAME.get(tensor.dtype)
    return np.asarray(result).astype(record.numpy) if record is not None and record.is_float else result


def port_of(tensor: LogicalTensor) -> Port:
    """A graph's input or output as a Port."""
    return Port(tensor.name or str(tensor.id), tensor.dtype, tensor.dims)
