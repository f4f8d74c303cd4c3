"""The stages of a fused partition: the result of each as text, and the first one with a wrong value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np

from opgraph.cli.compare import distance
from opgraph.cli.sources import kernel_schedule, sources_of
from opgraph.errors import OpGraphError
from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.loops.axis_splits import cut_shapes, spread
from opgraph.loops.interpret import interpret
from opgraph.loops.loop import Load, Loop
from opgraph.loops.lower import Lowered, changed, lowerings
from opgraph.loops.steps import steps_of
from opgraph.ops.conversion import cast
from opgraph.partition.partition import Partition, graph_of
from opgraph.partition.report import counted
from opgraph.runtime import cpu_compiler
from opgraph.runtime.reference import by_reference
from opgraph.schedule.schedule import LoopFission
from opgraph.schedule.table import reason, rewritten_loops

Arrays: TypeAlias = Sequence[np.ndarray]


def stage_texts(part: Partition, device: str) -> list[str]:
    """The result of each stage of a fused partition: its ops, its loops, the schedule and its reason, kernel names.

    Args:
        device: "cpu" or "cuda".
    """
    made = changed(lowerings(part))
    units = f"; units: {', '.join(part.units)}" if part.units else ""
    texts = [f"partition {part.id}: {counted(len(part.ops), 'op')}{units}", str(graph_of(part))]
    for name, lowered in made:
        texts += [f"loop after {name}", str(lowered.loop)]
    schedule = kernel_schedule(part, device)
    if schedule is None:
        return [*texts, f"schedule ({device}): follows from the shapes of a call"]
    texts += [f"schedule ({device}): {schedule}", reason(schedule)]
    rewritten = rewritten_loops(schedule, made[-1][1].loop)
    if rewritten:
        texts += [f"loop after {schedule.name}", rewritten]
    return [*texts, f"kernel ({device}): {', '.join(source.entry for source in sources_of(schedule))}"]


def first_wrong_stage(
    part: Partition, inputs: Mapping[int, np.ndarray], exact: Arrays, peer: Arrays, device: str
) -> str:
    """The first stage with a wrong value, in a fused partition whose last stage, the kernel, has one.

    Args:
        inputs: by tensor id, in the dtypes of the partition's inputs.
        exact, peer: the partition's outputs for `inputs` by the reference, in float64 and in their own dtypes.
        device: "cpu" or "cuda".
    """
    for name, values in _values(part, inputs, device):
        try:
            if is_wrong(part.output_ports, values(), exact, peer):
                return name
        except (OpGraphError, ValueError) as error:  # shapes that do not fit together
            return f"{name} ({str(error).splitlines()[0]})"
    schedule = kernel_schedule(part, device, [inputs[t.id].shape for t in part.input_ports])
    if device == "cpu" and not cpu_compiler.is_available():
        return "the statements of the loop, which run one by one where there is no compiler"
    if schedule is None:
        return "kernel"
    return f"kernel {', '.join(source.entry for source in sources_of(schedule))} ({schedule.name})"


def is_wrong(tensors: Sequence[LogicalTensor], values: Arrays, exact: Arrays, peer: Arrays) -> bool:
    """True if a tensor is farther from its float64 value than the slack rule allows, compared with a peer."""
    for tensor, value, want, other in zip(tensors, values, exact, peer, strict=True):
        if tensor.dtype in dtypes.BY_NAME:
            found = distance(cast(value, tensor.dtype).reshape(np.shape(want)), want, tensor.dtype)
            if not found.is_within(distance(np.asarray(other), want, tensor.dtype)):
                return True
    return False


def _values(
    part: Partition, inputs: Mapping[int, np.ndarray], device: str
) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    """The name of each stage between the partition and its kernels, and a function that computes its outputs."""
    made = changed(lowerings(part))
    lowered = made[0][1]
    yield "ops of the partition: units and decompositions", partial(_by_ops, part, lowered, inputs)
    for name, lowered in made:
        yield f"loop after {name}", partial(interpret, lowered.loop, _loads(lowered, inputs))
    schedule = kernel_schedule(part, device, [inputs[t.id].shape for t in part.input_ports])
    if isinstance(schedule, LoopFission):
        yield f"loop after {schedule.name}", partial(_by_loops, schedule, _loads(lowered, inputs))


def _loads(lowered: Lowered, inputs: Mapping[int, np.ndarray]) -> list[np.ndarray | None]:
    """The array of each load of a loop."""
    return [None if t is None else inputs[t.id] if t.id in inputs else opdef.array_of(t) for t in lowered.loads]


def _cut(loop: Loop, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """The arrays, reshaped to the axes that the loop uses for them."""
    shapes = cut_shapes(loop, [(1,) if a is None else a.shape for a in arrays])
    return [None if a is None else a.reshape(s) for a, s in zip(arrays, shapes, strict=True)]


def _by_ops(part: Partition, lowered: Lowered, inputs: Mapping[int, np.ndarray]) -> Arrays:
    """Computes the outputs in float64, by the reference of each op that a loop is made from.

    Such an op may use pieces of axes (`opgraph.partition.reshape_fusion`), so its inputs have the loop's axes.
    """
    steps, loop = steps_of(part, part.unit_matches), lowered.loop
    known = {t.id for t in lowered.loads if t is not None}
    others = [t for t in (*part.input_ports, *part.constants) if t.id not in known]  # not read by the loop
    loads = [Load(name="", dtype=t.dtype, cut=part.rows.cuts.get(t.id, ())) for t in others]
    whole = replace(lowered, loop=replace(loop, loads=(*loop.loads, *loads)), loads=(*lowered.loads, *others))
    values = {t.id: opdef.array_of(t) for step in steps for t in step.inputs if t.is_constant}
    cut = _cut(whole.loop, _loads(whole, inputs))
    values.update((t.id, array) for t, array in zip(whole.loads, cut) if t is not None and array is not None)
    for id, array in values.items():
        if array.dtype in [dtypes.get(name).numpy for name in dtypes.FLOATS]:
            values[id] = array.astype(np.float64)
    for step in steps:
        op = Op.locked(0, step.kind, step.inputs, (step.output,), "", step.attrs)
        working = "f64" if step.output.dtype in dtypes.FLOATS else step.output.dtype
        with np.errstate(all="ignore"):
            made = by_reference(op, step.record, [values[t.id] for t in step.inputs], [working])
        values[step.output.id] = made[0]
    return [values[t.id] for t in part.output_ports]


def _by_loops(schedule: LoopFission, arrays: Sequence[np.ndarray | None]) -> Arrays:
    """Runs the parts of a split loop in NumPy: the row values, the sums that read them, the rest."""
    cut = _cut(schedule.loop, arrays)
    whole = [None if a is None else a.reshape(spread(x, a.shape)) for x, a in zip(schedule.loop.loads, cut)]
    row_values = [] if schedule.values is None else interpret(_with_its_axes(schedule.values.loop), whole)
    results: dict[int, np.ndarray] = {}
    for part in schedule.sums:
        results.update(zip(part.stores, interpret(_with_its_axes(part.schedule.loop), [*whole, *row_values])))
    if schedule.rest is not None:
        rest = schedule.rest
        results.update(zip(rest.stores, interpret(_with_its_axes(rest.schedule.loop), whole)))
    return [results[place] for place in range(len(schedule.loop.stores))]


def _with_its_axes(loop: Loop) -> Loop:
    """The loop for operands that already have its axes."""
    loads = [replace(x, cut=(), rows=(), align="right" if x.align == "rows" else x.align) for x in loop.loads]
    return replace(loop, loads=tuple(loads), stores=tuple(replace(s, cut=()) for s in loop.stores))
