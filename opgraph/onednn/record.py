"""The contents of a graph file that a Graph cannot hold, kept next to it so that `dump` can write an equal file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opgraph.onednn.document import Entry


@dataclass(frozen=True, slots=True, eq=False)
class FileRecord:
    """The `Graph.source` of a graph from `opgraph.onednn.load`.

    Attributes:
        head: the fields before the ops: version, engine kind, fpmath mode, ports as they were listed.
        entries: by op id, the file's entries of ops that would be written differently without this record:
            attributes left at their defaults, strides of unknown layouts, shapes that the file left unknown ...
        order: the ids of the ops in the file's order if it differs from the graph's; None otherwise.
    """

    head: dict[str, Any]
    entries: dict[int, Entry]
    order: tuple[int, ...] | None
