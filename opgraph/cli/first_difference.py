"""Finds where two ONNX files diverge: the first value of the same name that differs, and the first that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from opgraph.cli.agreement import foreign_of
from opgraph.cli.compare import Distance, distance, number, whole_number
from opgraph.cli.feeds import Port
from opgraph.cli.models import load_model
from opgraph.cli.onnx_file import OnnxFile
from opgraph.cli.terminal import printable
from opgraph.errors import OpGraphError
from opgraph.runtime.reference import evaluate


@dataclass(frozen=True, slots=True)
class Difference:
    """A value of both files, and the distance of B's from A's."""

    name: str
    dtype: str
    off: Distance

    def __str__(self) -> str:
        at = f"element {list(self.off.index)}: {whole_number(self.off.values[1])} in A, "
        at += f"{whole_number(self.off.values[0])} in B"
        return f"{printable(self.name, 80)} ({self.dtype}): {number(self.off.ulp)} ulp, {at}"


def first_differences(
    a: str, b: str, feeds: Mapping[str, np.ndarray], library: str | None, *, judge: bool
) -> tuple[Difference | None, Difference | None]:
    """The first value that differs, and the first that is at least twice as far from float64 as in A.

    Values of the same name are compared in A's topological order. Both files run with all of them as outputs, which
    may prevent onnxruntime from fusing the nodes in between.

    Args:
        library: of custom ops, for B.
        judge: if True, also finds the second value, for which the float64 reference is run.

    Raises:
        OpGraphError: a value has another dtype or shape in B.
    """
    from opgraph.onnx.probe import value_names, with_outputs

    shared = set(value_names(b))
    names = [name for name in value_names(a) if name in shared]
    left, right = OnnxFile(a, with_outputs(a, names)), OnnxFile(b, with_outputs(b, names), library)
    ports: dict[str, Port] = {p.name: p for p in left.outputs}
    values, others = left.run(feeds), right.run(feeds)
    truth = _truth(a, feeds) if judge else {}
    first = None
    for name in names:
        value, other, dtype = values[name], others[name], ports[name].dtype
        if value.shape != other.shape or value.dtype != other.dtype:
            raise OpGraphError(
                f"it is {value.dtype}{list(value.shape)} in A and {other.dtype}{list(other.shape)} in B",
                where=f'value "{printable(name, 60)}"',
                fix="compare two files of one model",
            )
        off = distance(other, value, dtype)
        if not off.absolute:
            continue
        first = first or Difference(name, dtype, off)
        if not judge:
            break
        exact = truth.get(name)
        if exact is None or exact.shape != value.shape:
            continue
        if not distance(other, exact, dtype).is_within(distance(value, exact, dtype)):
            return first, Difference(name, dtype, off)
    return first, None


def _truth(path: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every value of a model in float64, by name."""
    from opgraph.onnx.source import Source

    graph = load_model(path)
    assert isinstance(graph.source, Source)
    name_of = graph.source.value_of
    found: dict[str, np.ndarray] = {}

    def watch(tensor: object, array: object) -> None:
        name = name_of.get(tensor.id)  # type: ignore[attr-defined]
        if name is not None:
            found[name] = np.asarray(array)

    evaluate(graph, dict(feeds), foreign=foreign_of(graph), watch=watch)
    return found
