"""Reads a graph file of oneDNN into a finalized Graph, and the rest of the file into a record next to the graph."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from opgraph.errors import InvalidGraphOp, ModelError, OpGraphError, Unimplemented
from opgraph.ir.argument_checks import given_path
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import Dims, LogicalTensor, row_major
from opgraph.ir.modes import FPMATH_MODES
from opgraph.ir.opdef import find
from opgraph.ir.pause_gc import no_collector
from opgraph.onednn.document import UNKNOWN, Entry, read_document
from opgraph.onednn.entries import ENGINE_OF, KIND_OF, op_entry
from opgraph.onednn.record import FileRecord
from opgraph.onednn.repair import repaired

#: Attributes that oneDNN's dump of a partitioned graph adds to ops. The record keeps them; nothing else reads them.
_MARKS = frozenset(("partition_id", "backend"))


def load(path: str | os.PathLike[str], *, engine: str | None = None) -> Graph:
    """Reads a graph file in the form that oneDNN writes (ONEDNN_GRAPH_DUMP=graph) and that benchdnn's inputs have.

    Tensors keep their ids and are named t<id>, also inputs and outputs for binding. `dump` writes an equal file again:
    data that a Graph does not hold (version, ports as listed, attributes left at defaults ...) is in `Graph.source`.

    Args:
        path: path of the file.
        engine: the engine kind of the graph, "cpu" or "cuda"; None: the file's, where oneDNN's "gpu" is "cuda".

    Returns: a finalized graph. `explain` notes everything that was not taken literally: a fpmath mode other than
        strict, which allows less precision than opgraph uses; scales with another axis than the one in the file (see
        `opgraph.onednn.repair`).

    Raises:
        ModelError: the file cannot be read, or is not in oneDNN's form.
        InvalidGraphOp, InvalidDataType, InvalidShape, InvalidGraph: its graph is wrong: an unknown kind or attribute, a
            tensor with two shapes, a cycle; `where` names the file and the op.
        InvalidArguments: an unknown engine kind; no path.

    Source: oneDNN src/graph/interface/graph.cpp, serialize.
    """
    with no_collector():
        return _load(path, engine)


def _load(path: str | os.PathLike[str], engine: str | None) -> Graph:
    label = given_path(path, "opgraph.onednn.load")
    document = read_document(path)
    kind = document["engine_kind"]
    if kind not in ENGINE_OF:
        raise ModelError(f"unknown engine kind {_line(kind)!r}", where=label, fix="use cpu or gpu")
    mode = document.get("fpmath_mode", "strict")
    if mode not in FPMATH_MODES:
        raise ModelError(
            f"unknown fpmath mode {_line(mode)!r}", where=label, fix=f"use one of {', '.join(FPMATH_MODES)}"
        )
    graph = Graph(engine or ENGINE_OF[kind])
    try:
        repairs, notes = repaired(document["graph"])
        _fill(graph, document["graph"], repairs)
        _order_outputs(graph, document.get("output_ports", ()))
        graph.finalize()
    except OpGraphError as error:
        where = f"{_line(label)}: {_line(_placed(error.where, document['graph']))}"
        raise type(error)(_line(error.what), where=where, fix=_line(error.fix)) from None
    graph.notes += [_line(note) for note in notes]
    if mode != "strict":
        graph.notes.append(
            f"fpmath mode {mode} allows less precision than the dtypes of the file; every op is computed as strict"
        )
    graph.source = _record(graph, document)
    return graph


def _fill(graph: Graph, ops: Sequence[Entry], repairs: Mapping[int, Mapping[str, Any]]) -> None:
    known: dict[int, tuple[Entry, LogicalTensor]] = {}
    for index, entry in enumerate(ops):
        try:
            attrs = {n: _attr_value(n, a, entry) for n, a in entry.get("attrs", {}).items() if n not in _MARKS}
            attrs.update(repairs.get(entry["id"], {}))
            inputs = tuple([_tensor(t, known) for t in entry["inputs"]])
            outputs = tuple([_tensor(t, known) for t in entry["outputs"]])
            graph._add(entry["id"], entry["kind"], inputs, outputs, _line(entry["name"]), attrs)
        except OpGraphError as error:
            raise type(error)(error.what, where=f"graph[{index}]: {error.where}", fix=error.fix) from None


def _placed(where: str, ops: Sequence[Entry]) -> str:
    """`where` with the place in the file, if it has none yet and exactly one op has this label."""
    if where.startswith("graph["):
        return where
    labels = [f'{op["kind"]} "{_line(op["name"]) or op["kind"] + "_" + str(op["id"])}"' for op in ops]
    found = [index for index, label in enumerate(labels) if where.startswith(label)]
    return f"graph[{found[0]}]: {where}" if len(found) == 1 else where


def _order_outputs(graph: Graph, ports: Sequence[int]) -> None:
    """Sets the outputs in the order of the file's list. A dumped partition also lists values that its ops read.

    An input is an output if an End reads it.
    """
    ended = {t.id for op in graph.ops if op.kind == "End" for t in op.inputs}
    known = [graph.producer(id) is not None or id in ended for id in ports]
    graph.output(*[graph.tensor(id) for id, is_known in zip(ports, known, strict=True) if is_known])
    astray = [id for id, is_known in zip(ports, known, strict=True) if not is_known]
    if astray:
        graph.notes.append(f"output_ports lists tensors that no op makes: {', '.join(map(str, astray))}")


def _tensor(entry: Entry, known: dict[int, tuple[Entry, LogicalTensor]]) -> LogicalTensor:
    """The logical tensor of a mention; the same object for equal mentions."""
    seen = known.get(entry["id"])
    if seen is not None and seen[0] == entry:
        return seen[1]
    dims, strides, layout = _dims(entry["shape"]), None, entry["layout_type"]
    if layout == "strided" and UNKNOWN not in entry["stride"]:
        strides = tuple(entry["stride"])
        if dims is not None and None not in dims and strides == row_major(dims):  # type: ignore[arg-type]
            strides = None
    tensor = LogicalTensor(
        entry["id"],
        entry["dtype"],
        dims,
        layout=layout,
        property=entry["property_type"],
        strides=strides,
        name=f"t{entry['id']}",
    )
    known[entry["id"]] = (entry, tensor)
    return tensor


def _dims(shape: Sequence[int]) -> Dims:
    if list(shape) == [UNKNOWN]:
        return None
    return tuple([None if d == UNKNOWN else d for d in shape])


def _attr_value(name: str, attr: Entry, op: Entry) -> Any:
    """The value of an attribute of an op.

    Raises:
        InvalidGraphOp: the op has an attribute of that name, but with another type than in the file.
    """
    value, record = attr["value"], find(op["kind"])
    own = None if record is None else record.attr(name)
    if own is not None and own.type != attr["type"]:
        raise InvalidGraphOp(
            f"attribute {name}, of type {attr['type']}, is not {own.type}",
            where=op["kind"],
            fix=f'write "type": "{own.type}"',
        )
    if attr["type"] == "bool":
        return bool(value)
    if attr["type"] == "f32":
        return float(value)
    if attr["type"] == "f32[]":
        return tuple([float(v) for v in value])
    return tuple(value) if isinstance(value, list) else value


def _record(graph: Graph, document: Entry) -> FileRecord:
    ops = document["graph"]
    head = {name: value for name, value in document.items() if name != "graph"}
    if graph.engine != ENGINE_OF[head["engine_kind"]]:  # the caller's, not the file's
        head["engine_kind"] = KIND_OF[graph.engine]
    entries = {}
    by_id = {op.id: op for op in graph.ops}
    for entry in ops:
        try:
            same = op_entry(by_id[entry["id"]]) == entry
        except Unimplemented:  # a kind that oneDNN does not have, from another writer
            same = False
        if not same:
            entries[entry["id"]] = entry
    order = tuple([entry["id"] for entry in ops])
    return FileRecord(
        head=head,
        entries=entries,
        order=order if order != tuple([op.id for op in graph.ops]) else None,
    )


def _line(text: str) -> str:
    """Text of a file on one line of at most 300 characters: a name must not overwrite the text around it."""
    if not text.isprintable():
        text = "".join([c if c.isprintable() else c.encode("unicode_escape").decode() for c in text])
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-90:]}"
