"""Named units as single ops, and unknown dimensions as symbols: the form of a graph before it is differentiated.

A unit is differentiated as one op: the derivative of Swish is one accurate function, but the derivative of its parts
loses digits and is NaN where a part is infinite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from opgraph.ir import opdef
from opgraph.ir.copy_graph import needed_ops, rebuilt
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor, port_name
from opgraph.ir.op import Op
from opgraph.ops.families import broadcast_rule
from opgraph.partition.rules import find_units
from opgraph.partition.symbols import Shape, is_private, symbolic_shapes


def freed(graph: Graph, names: Collection[str]) -> Graph:
    """The same graph with the constants of these names as inputs, after the others; an input comes before a constant
    of its name."""
    wanted = set(names) - {port_name(t) for t in graph.inputs}
    free = {t.id: t.with_(data=None, property="variable") for t in graph.constants if port_name(t) in wanted}
    return _rebuilt(graph, graph.ops, free) if free else graph


def with_constants(graph: Graph, arrays: Mapping[int, np.ndarray]) -> Graph:
    """The same graph with other values for some constants.

    Args:
        arrays: arrays by tensor id, with the dtypes and shapes of the constants.
    """
    return _rebuilt(graph, graph.ops, {id: graph.tensor(id).with_(data=array) for id, array in arrays.items()})


def named(graph: Graph) -> Graph:
    """The same graph with its named units as single ops, without ops that no output needs."""
    units = {u.root.id: u for u in find_units(graph) if u.kind and u.kind != u.root.kind}
    ops = []
    for op in graph.ops:
        unit = units.get(op.id)
        ops.append(
            op if unit is None else Op.locked(op.id, unit.kind, unit.inputs, op.outputs, op.name, dict(unit.attrs))
        )
    return _rebuilt(graph, needed_ops(ops, (t.id for t in graph.outputs))[0], {})


def needed(graph: Graph, ids: Collection[int]) -> Graph:
    """The same graph without the ops that are needed by no output and none of these values."""
    return _rebuilt(graph, needed_ops(graph.ops, {*ids, *(t.id for t in graph.outputs)})[0], {})


def with_symbols(graph: Graph) -> Graph:
    """The same graph with a symbol for every unknown dimension; dimensions that must be equal get the same one."""
    shapes = symbolic_shapes(graph)
    _make_equal(graph.ops, shapes)
    taken = {d for s in shapes.values() if not isinstance(s, str) for d in s if isinstance(d, str)}
    taken |= {d for t in graph.inputs for d in t.dims or () if isinstance(d, str)}  # also of inputs that no op reads
    names: dict[str, str] = {}
    tensors = {}
    for id, shape in shapes.items():
        tensor = graph.tensor(id)
        if tensor.dims is not None and not isinstance(shape, str) and None in tensor.dims:
            for known, dim in zip(tensor.dims, shape, strict=True):
                if known is None and is_private(dim) and isinstance(dim, str) and dim not in names:
                    names[dim] = _fresh(names, taken)
            tensors[id] = tensor.with_(dims=tuple(names.get(d, d) if isinstance(d, str) else d for d in shape))
    return _rebuilt(graph, graph.ops, tensors) if tensors else graph


def _make_equal(ops: Iterable[Op], shapes: dict[int, Shape]) -> None:
    """Gives unknown dimensions one name if an op takes only inputs of equal shape: it rejects sizes that differ."""
    for op in ops:
        if opdef.of(op).infer is not broadcast_rule or op.attrs.get("auto_broadcast") != "none":
            continue
        own = [s for t in (*op.inputs, *op.outputs) if not isinstance(s := shapes[t.id], str)]
        same: dict[int | str, int | str] = {}
        for dims in zip(*own, strict=False):
            # A known size is preferred, then a symbol of the graph; names that symbolic_shapes created come last.
            first = min((same.get(d, d) for d in dims), key=lambda d: (isinstance(d, str), is_private(d)))
            same = {d: first if now in dims else now for d, now in same.items()}
            same |= {d: first for d in dims if is_private(d)}
        if any(d != now for d, now in same.items()):
            shapes.update(
                (id, s if isinstance(s, str) else tuple(same.get(d, d) for d in s)) for id, s in shapes.items()
            )


def _rebuilt(graph: Graph, ops: Iterable[Op], changed: Mapping[int, LogicalTensor]) -> Graph:
    """The graph with these ops and changed tensors, and with its notes and defaults."""
    result = rebuilt(graph, ops, changed)
    result.set_outputs(changed.get(t.id, t) for t in graph.outputs)
    result.notes, result.defaults = list(graph.notes), dict(graph.defaults)
    return result.finalize()


def _fresh(names: Mapping[str, str], taken: Collection[str]) -> str:
    number = len(names)
    while f"n{number}" in taken or f"n{number}" in names.values():
        number += 1
    return f"n{number}"
