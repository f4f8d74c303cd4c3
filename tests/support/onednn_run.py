"""Runs a graph file as benchdnn does: partition by partition, each compared with its ops on the same inputs.

Every partition receives the results of the ones before it. Its ops are computed in float64, one by one. Between ops
that a library runs, values are rounded to their dtypes, as they are there (benchdnn does that around softmax).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from onednn_files import content_of
from onednn_fill import with_scales_of_two
from onednn_rule import EPSILON, wrong
from onednn_shrink import shrunk

import opgraph as og
from opgraph.ir import dtypes, opdef
from opgraph.partition.partition import NATIVE
from opgraph.runtime.library_partition import NativePartition, NumpyOps, Program
from opgraph.runtime.reference import by_reference

ENGINE = og.Engine("cpu")
STREAM = og.Stream(ENGINE)
#: Ops whose results are sums and depend on the order of additions; linear in each input.
_SUMS = ("MatMul", "Conv", "ReduceSum", "ReduceMean", "AvgPool", "Interpolate")
#: Ops that change no value.
_MOVES = ("StaticReshape", "StaticTranspose", "Reorder")


@cache
def prepared(name: str, limit: int | None) -> og.Graph:
    """The graph of a file for the CPU, with scales of powers of two; a smaller one if there is a limit of work."""
    content = with_scales_of_two(content_of(name))
    if limit is not None:
        content = shrunk(content, limit)
    return loaded(content)


def loaded(content: Any) -> og.Graph:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        path.write_text(json.dumps(content))
        return og.onednn.load(path, engine="cpu")


def executed(graph: og.Graph, feeds: Mapping[int, np.ndarray], *, numpy: bool = False) -> dict[int, np.ndarray]:
    """Every value at the border of a partition, by tensor id.

    Args:
        numpy: library ops run in NumPy, as without torch.
    """
    values = dict(feeds)
    for part in graph.get_partitions():
        if numpy and part.provider == NATIVE:
            made = NativePartition(Program(part), NumpyOps())([values[t.id] for t in part.input_ports])
            values.update(zip((t.id for t in part.output_ports), made, strict=True))
            continue
        ports = [t.with_(layout="strided", strides=None, dims=values[t.id].shape) for t in part.input_ports]
        compiled = part.compile(ports, [t.with_(layout="strided", strides=None) for t in part.output_ports], ENGINE)
        outs = {}
        for port in part.output_ports:
            found = compiled.query_logical_tensor(port.id)
            outs[port.id] = np.empty(found.shape, dtypes.get(found.dtype).numpy)
        compiled.execute(STREAM, {t.id: values[t.id] for t in part.input_ports}, outs)
        values.update(outs)
    return values


def mistakes(graph: og.Graph, feeds: Mapping[int, np.ndarray], *, numpy: bool = False) -> list[str]:
    """The errors in the values of partitions, by benchdnn's rule; one line each.

    A kernel may keep a value of bf16 or f16 in f32 until it is stored, or round it before a TypeCast widens it. One of
    the two must be right.
    """
    values = executed(graph, feeds, numpy=numpy)
    found = []
    for part in graph.get_partitions():
        inputs = {t.id: values[t.id] for t in part.input_ports}
        wrong_ways = []
        for at_casts in (False, True) if part.kind == "fused" else (True,):
            wrong_ways.append(_wrong_ports(part, values, _truth(part, inputs, at_casts=at_casts)))
            if not wrong_ways[-1]:
                break
        found += wrong_ways[-1]
    return found


def _wrong_ports(part: og.Partition, values: Mapping[int, np.ndarray], exact: Mapping[int, np.ndarray]) -> list[str]:
    ports = {t.id for t in part.output_ports}
    maker = {t.id: op for op in part.ops for t in op.outputs}
    found = []
    for op in part.ops:
        for index, tensor in enumerate(op.outputs):
            says = _judged(part, op, index, maker, values, exact) if tensor.id in ports else ""
            if says:
                found.append(f"partition {part.id} ({part.kind}), {op.label}, tensor {tensor.id}: {says}")
    return found


def _judged(
    part: og.Partition,
    op: og.Op,
    index: int,
    maker: Mapping[int, og.Op],
    values: Mapping[int, np.ndarray],
    exact: Mapping[int, np.ndarray],
) -> str:
    id = op.outputs[index].id
    got, truth = values[id], exact[id]
    op, moves = _moved(op, maker)  # moved values are compared by the rule of the op that made them
    index = 0 if moves else index
    before = part.ops if part.kind == "fused" else ()
    says = wrong(got, truth, op, index, part.ops, before)
    if says and op.kind.startswith(_SUMS):
        known = {**values, **exact}
        slack = _slack(op, known)
        within, inner_moves = _moved(maker.get(op.inputs[0].id, op), maker)
        if op.kind.startswith("Reduce") and within is not op and within.kind.startswith(_SUMS):
            slack = slack + _along(op, _along_all(inner_moves, _slack(within, known)))  # of sums that it adds up
        says = wrong(got, truth, op, index, part.ops, before, _along_all(moves, slack))
    return says


def _moved(op: og.Op, maker: Mapping[int, og.Op]) -> tuple[og.Op, list[og.Op]]:
    """The op that computed the values of `op`'s result, and the ops that only moved them, the last one first."""
    moves = []
    while op.kind.startswith(_MOVES) and op.inputs[0].id in maker:
        moves.append(op)
        op = maker[op.inputs[0].id]
    return op, moves


def _along_all(moves: Sequence[og.Op], slack: np.ndarray) -> np.ndarray:
    for move in reversed(moves):
        slack = _along(move, slack)
    return slack


def _along(op: og.Op, slack: np.ndarray) -> np.ndarray:
    """The largest errors in the output of a linear op for these errors of its input."""
    return in_float64(op, [slack])[0]


def _truth(part: og.Partition, inputs: Mapping[int, np.ndarray], *, at_casts: bool) -> dict[int, np.ndarray]:
    """The outputs of a partition, and the operands and results of its sums, in float64.

    Args:
        at_casts: the operand of a TypeCast is rounded to its dtype, within a kernel too.
    """
    exact: dict[int, np.ndarray] = {}
    stored: dict[int, np.ndarray] = {}
    kept = {t.id for t in part.output_ports}
    kept |= {t.id for op in part.ops if op.kind.startswith(_SUMS) for t in (*op.inputs, *op.outputs)}
    last = {t.id: op.id for op in part.ops for t in (*op.outputs, *op.inputs)}
    for op in part.ops:
        given = [stored[t.id] if t.id in stored else _wide(inputs[t.id]) for t in op.inputs]
        if op.kind == "TypeCast" and at_casts:
            given = [_rounded(given[0], op.inputs[0])]
        for tensor, made in zip(op.outputs, in_float64(op, given), strict=True):
            exact[tensor.id] = made
            last_inside = part.rows.inside.get(op.id, (op,))[-1]  # of one that runs as smaller ops: a cast to its dtype
            is_stored = part.kind != "fused" or last_inside.kind == "TypeCast"
            stored[tensor.id] = _rounded(made, tensor) if is_stored else made
        for tensor in (*op.inputs, *op.outputs):  # the largest files take many GB
            if last[tensor.id] == op.id:
                stored.pop(tensor.id, None)
                if tensor.id not in kept:
                    exact.pop(tensor.id, None)
    return exact


def in_float64(op: og.Op, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of one op, floats as float64."""
    record = opdef.get(op.kind, where=op.label)
    by_id = dict(zip((t.id for t in op.inputs), values, strict=True))
    found: list[np.ndarray] = []
    with np.errstate(all="ignore"):
        for part in record.parts(op):
            wanted = ["f64" if t.dtype in dtypes.FLOATS else t.dtype for t in part.outputs]
            given = [by_id[t.id] for t in part.inputs]
            found += by_reference(part, opdef.get(part.kind, where=op.label), given, wanted)
    return found


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if dtypes.BY_NUMPY[array.dtype].is_float else array


def _rounded(array: np.ndarray, tensor: og.LogicalTensor) -> np.ndarray:
    record = dtypes.get(tensor.dtype)
    with np.errstate(over="ignore"):
        return array.astype(record.numpy).astype(np.float64) if record.is_float else array


def _slack(op: og.Op, values: Mapping[int, np.ndarray]) -> np.ndarray:
    """The most that rounding each term and partial sum of n in f32 adds up to: n epsilon times the sum of magnitudes.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1.
    """
    (magnitudes,) = in_float64(op, [np.abs(_wide(values[t.id])) for t in op.inputs])[:1]
    made = op.outputs[0]
    terms = values[op.inputs[0].id].size / max(values[made.id].size, 1)
    if len(op.inputs) > 1:  # for a product: the terms along the axes that it sums over
        sizes = [values[t.id].size for t in (*op.inputs[:2], made)]
        terms = math.sqrt(sizes[0] * sizes[1] / max(sizes[2], 1))
    return np.asarray(terms * EPSILON["f32"] * magnitudes)
