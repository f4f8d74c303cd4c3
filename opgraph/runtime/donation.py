"""Chooses the results that overwrite donated inputs: each choice is proved before anything runs, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opgraph.errors import InvalidArguments
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor, port_name
from opgraph.partition.partition import FUSED, Partition
from opgraph.partition.symbols import Shape, symbolic_shapes
from opgraph.runtime.runner import KernelRunner, Runner


def donations(
    graph: Graph, partitions: Sequence[Partition], runs: Sequence[Runner], names: Sequence[str]
) -> dict[int, int]:
    """For each donated input, the result that a kernel writes over it.

    A kernel reads each element of most operands before it writes a result's element in its place. So a result of the
    same dtype and shape may overwrite such an input if no partition reads the input afterwards. Only the arrays of a
    call show if the input shares memory with another one; `exchange.check_donated` checks that.

    Args:
        graph: finalized.
        partitions: those of the graph, in the order in which they run.
        runs: their runners.
        names: names of inputs.

    Returns: ids of results by ids of inputs.

    Raises:
        InvalidArguments: an input does not exist, or cannot be overwritten, with the reason.
    """
    inputs = {port_name(t): t for t in graph.inputs}
    last = {t.id: part for part in partitions for t in part.input_ports}
    shapes = symbolic_shapes(graph) if names else {}
    found: dict[int, int] = {}
    for name in dict.fromkeys(names):
        if name not in inputs:
            raise InvalidArguments(
                f"there is no input {name!r} to donate", where="donate", fix=f"the inputs are {', '.join(inputs)}"
            )
        tensor = inputs[name]
        part = _last_reader(graph, tensor, last)
        fits = [t for t in part.output_ports if _fits(t, tensor, shapes)]
        if fits and not (fits := [t for t in fits if _lies_over(part, runs[partitions.index(part)], tensor, t)]):
            reason = "rows that come later, or kernels, read it where an earlier one's result would be"
            raise _refused(name, reason, "leave it out")
        free = [t for t in fits if t.id not in found.values()]
        if not free:
            raise _refused(name, *_why_none_fits(tensor, part, fits))
        found[tensor.id] = free[0].id
    return found


def _last_reader(graph: Graph, tensor: LogicalTensor, last: Mapping[int, Partition]) -> Partition:
    """The kernel that is the last to read an input."""
    name = port_name(tensor)
    if any(t.id == tensor.id for t in graph.outputs):
        raise _refused(name, "it is an output of the graph, too", "leave it out")
    if name in graph.defaults:
        raise _refused(name, "it has a default, which further calls read", "leave it out")
    part = last.get(tensor.id)
    if part is None:
        raise _refused(name, "nothing reads its data", "leave it out")
    if part.kind != FUSED:
        reader = next(op.label for op in part.ops if any(t.id == tensor.id for t in op.inputs))
        raise _refused(name, f"{reader} reads it last, in a library that allocates its results itself", "leave it out")
    return part


def _lies_over(part: Partition, run: Runner, tensor: LogicalTensor, result: LogicalTensor) -> bool:
    source = next(i for i, t in enumerate(part.input_ports) if t.id == tensor.id)
    place = next(i for i, t in enumerate(part.output_ports) if t.id == result.id)
    return isinstance(run, KernelRunner) and run.operands.lies_over(source, place)


def _fits(result: LogicalTensor, tensor: LogicalTensor, shapes: Mapping[int, Shape]) -> bool:
    if result.dtype != tensor.dtype:
        return False
    return (result.has_known_shape and result.dims == tensor.dims) or (
        result.id in shapes and shapes[result.id] == shapes.get(tensor.id)
    )


def _why_none_fits(tensor: LogicalTensor, part: Partition, fits: Sequence[LogicalTensor]) -> tuple[str, str]:
    if fits:
        return f"{fits[0].label}, which fits, lies over another donated input already", "donate one of them"
    made = ", ".join(f"{t.label} {t.type_text}" for t in part.output_ports)
    reason = f"what the last kernel to read it makes does not fit: {made} over {tensor.type_text}"
    unknown = any(d is None for t in (tensor, *part.output_ports) for d in (t.dims or (None,)))
    return reason, 'name unknown dimensions: "n" stands for one size wherever it is' if unknown else "leave it out"


def _refused(name: str, reason: str, fix: str) -> InvalidArguments:
    return InvalidArguments(f'input "{name}" cannot be donated: {reason}', where="donate", fix=fix)
