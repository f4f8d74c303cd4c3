"""Running a graph file as benchdnn does: partition by partition, each compared with its ops on the same inputs.

Every partition gets what the ones before it made. Its ops are computed in float64, one by one; between ops that a
library runs, values are rounded to their dtypes, as they are there (benchdnn does that around softmax).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onednn_files import content_of
from onednn_fill import with_scales_of_two
from onednn_rule import EPSILON, wrong
from onednn_shrink import shrunk

import opgraph as og
from opgraph.ir import dtypes

ENGINE = og.Engine("cpu")
STREAM = og.Stream(ENGINE)
#: Ops whose results are sums, in which the order of adding shows; linear in each input.
_SUMS = ("MatMul", "Conv", "ReduceSum", "ReduceMean", "AvgPool")
#: Ops that change no value.
_MOVES = ("StaticReshape", "StaticTranspose", "Reorder")


def prepared(name: str, limit: int | None) -> og.Graph:
    """The graph of a file for the CPU, with scales of powers of two, and small where a limit of work is given."""
    content = with_scales_of_two(content_of(name))
    if limit is not None:
        content = shrunk(content, limit)
    return loaded(content)


def loaded(content: Any) -> og.Graph:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        path.write_text(json.dumps(content))
        return og.onednn.load(path, engine="cpu")


def executed(graph: og.Graph, feeds: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Every value at the border of a partition, by tensor id."""
    values = dict(feeds)
    for part in graph.get_partitions():
        ports = [t.with_(layout="strided", strides=None, dims=values[t.id].shape) for t in part.input_ports]
        compiled = part.compile(ports, [t.with_(layout="strided", strides=None) for t in part.output_ports], ENGINE)
        outs = {}
        for port in part.output_ports:
            made = compiled.query_logical_tensor(port.id)
            outs[port.id] = np.empty(made.shape, dtypes.get(made.dtype).numpy)
        compiled.execute(STREAM, {t.id: values[t.id] for t in part.input_ports}, outs)
        values.update(outs)
    return values


def mistakes(graph: og.Graph, feeds: Mapping[int, np.ndarray]) -> list[str]:
    """What is wrong with the values that partitions make, by benchdnn's rule; one line each."""
    values = executed(graph, feeds)
    found = []
    for part in graph.get_partitions():
        exact = _truth(part, {t.id: values[t.id] for t in part.input_ports})
        ports = {t.id for t in part.output_ports}
        maker = {t.id: op for op in part.ops for t in op.outputs}
        for op in part.ops:
            for index, tensor in enumerate(op.outputs):
                if tensor.id in ports:
                    says = _judged(part, op, index, maker, values, exact)
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
    moves = []  # what only moves values about is judged by the op that made them
    while op.kind.startswith(_MOVES) and op.inputs[0].id in maker:
        moves.append(op)
        op, index = maker[op.inputs[0].id], 0
    before = part.ops if part.kind == "fused" else ()
    says = wrong(got, truth, op, index, part.ops, before)
    if says and op.kind.startswith(_SUMS):
        slack = _slack(op, {**values, **exact})
        for move in reversed(moves):
            into: dict[int, np.ndarray] = {}
            _evaluated([_in_f32(move)], {move.inputs[0].id: slack.astype(np.float32)}, into)
            slack = into[move.outputs[0].id]
        says = wrong(got, truth, op, index, part.ops, before, slack)
    return says


def _in_f32(op: og.Op) -> og.Op:
    tensors = [t.with_(dtype="f32") for t in (*op.inputs, *op.outputs)]
    copy = og.Op(0, op.kind, tensors[: len(op.inputs)], tensors[len(op.inputs) :])
    for name, value in op.attrs.items():
        copy.set_attr(name, value)
    return copy


def _truth(part: og.Partition, inputs: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Every value that a partition makes, in float64."""
    exact: dict[int, np.ndarray] = {}
    if part.kind == "fused":
        _evaluated(part.ops, inputs, exact)
        return exact
    stored = dict(inputs)
    for op in part.ops:
        made: dict[int, np.ndarray] = {}
        _evaluated([op], {t.id: stored[t.id] for t in op.inputs}, made)
        exact.update(made)
        stored.update((t.id, made[t.id].astype(dtypes.get(t.dtype).numpy)) for t in op.outputs)
    return exact


def _evaluated(ops: Sequence[og.Op], feeds: Mapping[int, np.ndarray], into: dict[int, np.ndarray]) -> None:
    g = og.Graph()
    for op in ops:
        g.add_op(op)
    g.finalize()
    og.evaluate(g, {t.id: feeds[t.id] for t in g.inputs}, watch=lambda t, a: into.update({t.id: np.array(a)}))


def _slack(op: og.Op, values: Mapping[int, np.ndarray]) -> np.ndarray:
    """What rounding each term and partial sum of n in f32 may add up to: n epsilon times the sum of magnitudes.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1.
    """
    magnitudes: dict[int, np.ndarray] = {}
    _evaluated([op], {t.id: np.abs(values[t.id]).astype(dtypes.get(t.dtype).numpy) for t in op.inputs}, magnitudes)
    made = op.outputs[0]
    terms = values[op.inputs[0].id].size / max(values[made.id].size, 1)
    if len(op.inputs) > 1:  # of a product: those along the axes that it sums over
        sizes = [values[t.id].size for t in (*op.inputs[:2], made)]
        terms = math.sqrt(sizes[0] * sizes[1] / max(sizes[2], 1))
    return terms * EPSILON["f32"] * magnitudes[made.id]
