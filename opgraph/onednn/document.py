"""Strict reader of a graph file's text: it must be JSON of oneDNN's form, each field with its type, and nothing else.

Source: the writer of oneDNN, src/graph/interface/{graph.cpp,op.hpp,value.hpp}. Files are untrusted: duplicate keys,
NaN tokens, numbers out of range, unknown fields and deep nesting are rejected, each with its place in the file.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from opgraph.errors import ModelError

#: One JSON object.
Entry: TypeAlias = dict[str, Any]

#: oneDNN writes this for a wholly unknown shape or stride, and for one unknown size among others.
UNKNOWN = -(2**63)
#: From this number on, f32 rounds to infinity.
_TOO_LARGE = 2**128 - 2**103
#: A million ops take 300 MB; larger files than this are not read.
MAX_BYTES = 1 << 30

_HEAD = ("version", "engine_kind", "fpmath_mode", "fpmath_mode_apply_to_int", "input_ports", "output_ports", "graph")
_OP = frozenset(("id", "name", "kind", "attrs", "inputs", "outputs"))
_TENSOR = frozenset(("id", "dtype", "shape", "stride", "layout_type", "property_type"))
_ATTR_TYPES = ("string", "bool", "s64", "s64[]", "f32", "f32[]")
_FIX = "write it with oneDNN (ONEDNN_GRAPH_DUMP=graph) or opgraph.onednn.dump"


class BadFile(Exception):  # noqa: N818 - `load` turns it into a ModelError that names the file
    """An error message with its place in the document."""

    def __init__(self, what: str, place: str) -> None:
        super().__init__(what, place)
        self.what = what
        self.place = place


def read_document(path: str | os.PathLike[str]) -> Entry:
    """The checked content of a file.

    Raises:
        ModelError: the file is missing, too long, not UTF-8, not JSON, or not in oneDNN's form; with the place.
    """
    label = os.fspath(path)
    try:
        return checked_document(_parsed(_text(Path(label), label)))
    except BadFile as bad:
        raise ModelError(bad.what, where=f"{label}: {bad.place}", fix=_FIX) from None


def _text(path: Path, label: str) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError("this is no file", where=label, fix="give a graph file of oneDNN")
        if status.st_size > MAX_BYTES:
            raise ModelError(
                f"the file has {status.st_size >> 20} MiB", where=label, fix=f"at most {MAX_BYTES >> 20} MiB are read"
            )
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFile(f"no UTF-8: {error.reason}", f"byte {error.start}") from None
    except ModelError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(f"the file cannot be read: {reason}", where=label, fix="check the path") from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise BadFile(f"no JSON: {error.msg}", f"line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise BadFile("the JSON is nested too deeply", "somewhere") from None
    except ValueError as error:  # an int of more digits than Python reads
        raise BadFile(f"no number: {error}", "somewhere") from None


def _unique(pairs: list[tuple[str, Any]]) -> Entry:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadFile(f"the key {twice!r:.40} stands twice in one object", "somewhere")
    return found


def _no_number(token: str) -> NoReturn:
    raise BadFile(f"{token} is no JSON", "somewhere")


# -- required form of each part -------------------------------------------------------------------------------------


def checked_document(found: Any) -> Entry:
    """Returns the document if it has oneDNN's form. The meaning of its ops is checked by the graph.

    Raises:
        BadFile: it does not have this form.
    """
    document = _object(found, "the top level")
    for key in document:
        if key not in _HEAD:
            raise BadFile(f"unknown field {key!r:.40}", "the top level")
    for key in ("version", "engine_kind", "fpmath_mode", "fpmath_mode_apply_to_int"):
        if key in document or key == "engine_kind":
            _string(document.get(key), key)
    for key in ("input_ports", "output_ports"):
        if key in document:
            for index, port in enumerate(_list(document[key], key)):
                _id(port, f"{key}[{index}]")
    if "graph" not in document:
        raise BadFile("the field 'graph' is missing", "the top level")
    for index, op in enumerate(_list(document["graph"], "graph")):
        _check_op(op, f"graph[{index}]")
    return document


def _check_op(op: Any, place: str) -> None:
    _object(op, place)
    if not op.keys() <= _OP or not op.keys() >= _OP - {"attrs"}:
        _refuse_fields(op, _OP, place)
    _id(op["id"], place)
    _string(op["name"], f"{place}.name")
    _string(op["kind"], f"{place}.kind")
    attrs = op.get("attrs")
    if attrs:
        for name, attr in _object(attrs, f"{place}.attrs").items():
            _check_attr(attr, f"{place}.attrs.{name:.40}")
    elif "attrs" in op and attrs != {}:
        raise BadFile(f"{attrs!r:.40} is no object", f"{place}.attrs")
    for side in ("inputs", "outputs"):
        for index, tensor in enumerate(_list(op[side], f"{place}.{side}")):
            _check_tensor(tensor, place, side, index)


def _check_tensor(tensor: Any, place: str, side: str, index: int) -> None:
    if type(tensor) is not dict or tensor.keys() != _TENSOR:
        where = f"{place}.{side}[{index}]"
        _refuse_fields(_object(tensor, where), _TENSOR, where)
    _id(tensor["id"], place)
    for key in ("dtype", "layout_type", "property_type"):
        if type(tensor[key]) is not str:
            _string(tensor[key], f"{place}.{side}[{index}].{key}")
    for key in ("shape", "stride"):
        sizes = tensor[key]
        if type(sizes) is not list:
            _list(sizes, f"{place}.{side}[{index}].{key}")
        for size in sizes:
            if type(size) is not int or not (0 <= size < 2**63 or size == UNKNOWN):
                raise BadFile(f"{size!r:.40} is no size", f"{place}.{side}[{index}].{key}")


def _check_attr(attr: Any, place: str) -> None:
    _object(attr, place)
    if attr.keys() != {"type", "value"}:
        _refuse_fields(attr, frozenset(("type", "value")), place)
    kind, value = attr["type"], attr["value"]
    if kind not in _ATTR_TYPES:
        raise BadFile(f"{kind!r:.40} is no type of attributes", place)
    for single in _list(value, place) if kind.endswith("[]") else (value,):
        if not _fits(kind.removesuffix("[]"), single):
            raise BadFile(f"{single!r:.40} is no {kind.removesuffix('[]')}", place)


def _fits(kind: str, value: Any) -> bool:
    if kind == "string":
        return type(value) is str
    if kind == "bool":
        return type(value) is int and value in (0, 1)
    if kind == "s64":
        return type(value) is int and -(2**63) <= value < 2**63
    return type(value) in (int, float) and abs(value) < _TOO_LARGE  # excludes 1e999, which Python reads as infinity


def _refuse_fields(entry: Mapping[str, Any], known: frozenset[str], place: str) -> NoReturn:
    for name in entry:
        if name not in known:
            raise BadFile(f"unknown field {name!r:.40}", place)
    raise BadFile(f"the field {min(known - entry.keys())!r} is missing", place)


def _object(value: Any, place: str) -> Entry:
    if type(value) is not dict:
        raise BadFile(f"{value!r:.40} is no object", place)
    return value


def _list(value: Any, place: str) -> Sequence[Any]:
    if type(value) is not list:
        raise BadFile(f"{value!r:.40} is no list", place)
    return value


def _string(value: Any, place: str) -> None:
    if type(value) is not str:
        raise BadFile(f"{value!r:.40} is no text", place)


def _id(value: Any, place: str) -> None:
    if type(value) is not int or not 0 <= value < 2**64:
        raise BadFile(f"{value!r:.40} is no id", place)
