"""Named units written in smaller ops: the example of every row of the units' table, in any float dtype; its truth."""

from __future__ import annotations

import re

import numpy as np
import points

import opgraph as og
from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.partition.rules import RULES, Rule, find_units


def spelled_rules() -> list[tuple[str, Rule]]:
    """Every row with its name and number: "swish 3"."""
    found: list[tuple[str, Rule]] = []
    for rule in RULES:
        count = sum(r.name == rule.name for _, r in found)
        found.append((f"{rule.name} {count + 1}", rule))
    return found


def graph_in(rule: Rule, dtype: str) -> og.Graph:
    """The rule's example graph, one-dimensional and in another dtype."""
    g = og.parse(re.sub(r"f(32|64)\[[0-9,]+\]", f"{dtype}[n]", rule.takes))
    assert isinstance(g, og.Graph)
    return g.finalize()


def feeds_of(graph: og.Graph) -> dict[str, np.ndarray]:
    """All values of a narrow dtype, or the comb through f32; special and random values for several inputs."""
    names = [t.name for t in graph.inputs]
    dtype = graph.inputs[0].dtype
    like = opdef.get("Multiply" if len(names) > 1 else "Swish", where="test")
    if len(names) > 1:
        columns = points.grid(like, like.inputs, dtype, 200_000)
    elif dtype == "f32":
        columns = [points.f32_line(like, {})]
    else:
        columns = [points.every_16_bit_value(dtypes.get(dtype).numpy)]
    return dict(zip(names, columns, strict=True))


def truth_of(graph: og.Graph, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The truth of a unit in float64, and a mask of the elements where it holds.

    The truth is that of the op that the unit stands for (with its constants as the rule folds them), because the
    written formula cancels and overflows in float64 too. A gated unit is a product with such a value, which is rounded
    in between: it is compared only where that value is a normal number.
    """
    units = {u.root.id: u for u in find_units(graph) if u.kind}
    values: dict[int, np.ndarray] = {t.id: feeds[t.name].astype(np.float64) for t in graph.inputs}
    sound = np.ones(len(next(iter(feeds.values()))), bool)
    smallest = float(np.finfo(np.float32).smallest_normal)
    with np.errstate(all="ignore"):
        for op in graph.ops:
            unit = units.get(op.id)
            kind, inputs, attrs = (
                (op.kind, op.inputs, op.attrs) if unit is None else (unit.kind, unit.inputs, unit.attrs)
            )
            record = opdef.get(kind, where="test")
            assert record.reference is not None
            arrays = [_value(t, values) for t in inputs]
            values[op.outputs[0].id] = np.asarray(record.reference(*arrays, **{**record.default_attrs(), **attrs}))
            if unit is not None and op is not graph.ops[-1]:
                size = np.abs(values[op.outputs[0].id])
                sound = (size >= smallest) & (size <= float(np.finfo(np.float32).max)) | np.isinf(size) | np.isnan(size)
    return values[graph.outputs[0].id], sound if graph.ops[-1].id not in units else np.ones_like(sound)


def _value(tensor: LogicalTensor, values: dict[int, np.ndarray]) -> np.ndarray:
    return opdef.array_of(tensor).astype(np.float64) if tensor.is_constant else values[tensor.id]
