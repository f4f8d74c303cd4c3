"""Reads the model of a command: an ONNX file, a graph file of oneDNN, or opgraph's text form."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import TYPE_CHECKING

from opgraph.errors import ModelError

if TYPE_CHECKING:
    from opgraph.ir.graph import Graph

ONNX, ONEDNN, TEXT = "ONNX", "oneDNN", "text"

#: A text form is read whole; one written by hand or with `str(graph)` is not larger than this.
MAX_TEXT_BYTES = 256 << 20


def form_of(path: str) -> str:
    """Returns ONNX, ONEDNN or TEXT, by content.

    Raises:
        ModelError: no such file, or an empty one.
    """
    file = Path(path)
    if not file.is_file():
        what = (
            "is a folder"
            if file.is_dir()
            else "is no file, but a device or a pipe"
            if file.exists()
            else "is not there"
        )
        raise ModelError(
            f"the model {what}", where=path, fix="give an ONNX file, a graph file of oneDNN or opgraph's text form"
        )
    with file.open("rb") as opened:
        head = opened.read(4096)
        text = _without_remarks(head.removeprefix(codecs.BOM_UTF8))
        while (not text or text.startswith(b"#")) and (more := opened.read(4096)):  # the last remark may go on
            text = _without_remarks(text + more)
    if not head:
        raise ModelError("the file is empty", where=path, fix="write it again")
    if text.startswith(b"{"):
        return ONEDNN
    return TEXT if text.startswith(b"graph(") else ONNX


def _without_remarks(head: bytes) -> bytes:
    lines = head.lstrip().split(b"\n")
    while len(lines) > 1 and (lines[0].lstrip().startswith(b"#") or not lines[0].strip()):
        lines.pop(0)
    return b"\n".join(lines).lstrip()


def files_of(graph: Graph) -> set[str]:
    """The files that a graph was read from and may still read: an ONNX file and its data files."""
    origin = getattr(graph.source, "origin", None)
    return origin.files() if origin is not None else set()


def load_model(path: str) -> Graph:
    """The finalized graph of a model file.

    Raises:
        ModelError: the file cannot be read, or must not be trusted.
        Unimplemented: it contains something that opgraph cannot represent.
    """
    form = form_of(path)
    if form == ONNX:
        import opgraph

        return opgraph.onnx.load(path)
    if form == ONEDNN:
        from opgraph.onednn import load

        return load(path)
    from opgraph.ir.parse import parse

    file = Path(path)
    if file.stat().st_size > MAX_TEXT_BYTES:
        raise ModelError("the text is too long", where=path, fix=f"at most {MAX_TEXT_BYTES >> 20} MiB are read")
    try:
        return parse(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ModelError(f"no UTF-8: {error.reason} at byte {error.start}", where=path, fix="write it again") from None
