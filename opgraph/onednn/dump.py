"""From a Graph to a graph file of oneDNN, written whole or not at all."""

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
    """Writes a graph as oneDNN does, for its own tools and for `load`.

    A graph that `load` made gives back a file equal to the one that it came from, as JSON. Any other is written with
    all attributes, floats with the fewest digits that read back as the same f32 (oneDNN writes 6), and symbols as
    unknown sizes. Names of tensors have no place in the file: after `load` they are t<id>.

    Args:
        graph: finalized by this call if need be.
        path: where to write; what is there is replaced when everything is written.

    Raises:
        InvalidGraph, InvalidShape: the graph cannot be finalized.
        Unimplemented: the graph holds what oneDNN has no word for: a kind beyond its own, f64, a constant with data.
        InvalidArguments: no graph, no path, or one that cannot be written. Nothing has changed then.
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
    """An End for each output that is read inside as well, or is an input: the files have no other way to say that.

    Raises:
        Unimplemented: a value that nobody reads is no output of the graph; in a file it would be.
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
    """Without escapes where that is possible: oneDNN's reader decodes none of them rightly."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isprintable() else json.dumps(value)
