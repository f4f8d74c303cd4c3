"""Writes a Graph to a graph file of oneDNN, completely or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from opgraph.errors import InvalidArguments, Unimplemented
from opgraph.ir.argument_checks import given_graph, given_path
from opgraph.ir.graph import Graph
from opgraph.ir.op import Op
from opgraph.ir.whole_file import write_whole
from opgraph.onednn.document import Entry
from opgraph.onednn.entries import head_entry, op_entry
from opgraph.onednn.record import FileRecord


def dump(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Writes a graph as oneDNN does, for oneDNN's tools and for `load`.

    For a graph from `load`, the file equals the original one, as JSON. Any other graph is written with all attributes.
    Floats have the fewest digits that read back as the same f32 (oneDNN writes 6), and symbols become unknown sizes.
    The file format has no names of tensors: after `load` they are t<id>.

    Args:
        graph: finalized by this call if need be.
        path: the file to write; an existing file is replaced after everything is written.

    Raises:
        InvalidGraph, InvalidShape: the graph cannot be finalized.
        Unimplemented: oneDNN cannot represent a part of the graph: a kind that it lacks, f64, a constant with data.
        InvalidArguments: no graph, no path, or a path that cannot be written. Nothing is changed in this case.
    """
    text = "".join(_lines(given_graph(graph, "opgraph.onednn.dump")))
    target = given_path(path, "opgraph.onednn.dump")
    try:
        write_whole(target, text)
    except (OSError, ValueError) as error:
        raise InvalidArguments(
            f"the file cannot be written: {error}", where=target, fix="choose another path"
        ) from None


def _lines(graph: Graph) -> Iterator[str]:
    """The text: one line for each field, attribute and tensor."""
    record = graph.source if isinstance(graph.source, FileRecord) else None
    head = record.head if record is not None else head_entry(graph)
    yield "{\n"
    for name, value in head.items():
        yield f"  {_json(name)}: {_json(value)},\n"
    yield '  "graph": ['
    separator = "\n"
    for entry in _entries(graph, record):
        yield separator + _op_text(entry)
        separator = ",\n"
    yield "\n  ]\n}\n"


def _entries(graph: Graph, record: FileRecord | None) -> Iterator[Entry]:
    if record is None:
        yield from (op_entry(op) for op in graph.ops)
        yield from _ends(graph)
        return
    by_id = {op.id: op for op in graph.ops}
    for id in record.order if record.order is not None else by_id:
        yield record.entries[id] if id in record.entries else op_entry(by_id[id])


def _ends(graph: Graph) -> list[Entry]:
    """An End for each output that an op also reads, or that is an input: the files have no other form for these.

    Raises:
        Unimplemented: a value without a reader is not an output of the graph; in a file it would be one.
    """
    outputs = {t.id for t in graph.outputs}
    read = {t.id for op in graph.ops for t in op.inputs}
    ended = {t.id for op in graph.ops if op.kind == "End" for t in op.inputs}
    for op in graph.ops:
        for tensor in op.outputs:
            if tensor.id not in read and tensor.id not in outputs:
                raise Unimplemented(
                    f"nobody reads {tensor.label}, and it is no output: oneDNN's files cannot say that",
                    where=op.label,
                    fix="build the graph without set_outputs",
                )
    first = max([op.id for op in graph.ops], default=-1) + 1
    made = {t.id for op in graph.ops for t in op.outputs}
    waiting = [t for t in graph.outputs if (t.id in read or t.id not in made) and t.id not in ended]
    return [op_entry(Op(first + i, "End", [t])) for i, t in enumerate(waiting)]


def _op_text(entry: Entry) -> str:
    fields = []
    for name, value in entry.items():
        if name in ("inputs", "outputs"):
            tensors = ",".join(f"\n        {_json(t)}" for t in value)
            fields.append(f'"{name}": [{tensors}\n      ]' if tensors else f'"{name}": []')
        else:
            fields.append(f"{_json(name)}: {_json(value)}")
    return "    {" + ",\n      ".join(fields) + "}"


def _json(value: object) -> str:
    """JSON without escapes where possible: oneDNN's reader decodes none of them correctly."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isprintable() else json.dumps(value)
