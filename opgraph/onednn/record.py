"""What a graph file says and a Graph cannot hold, kept beside the graph so that `dump` gives the file back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opgraph.onednn.document import Entry


@dataclass(frozen=True, slots=True, eq=False)
class FileRecord:
    """The `Graph.source` of a graph that `opgraph.onednn.load` made.

    Attributes:
        head: the fields before the ops: version, engine kind, fpmath mode, ports as they were listed.
        entries: by op id, the ops that would be written differently without this record, as the file has them:
            attributes left at their defaults, strides of unknown layouts, shapes that the file left unknown ...
        order: the ids of the ops in the file's order where it is not the graph's; None otherwise.
    """

    head: dict[str, Any]
    entries: dict[int, Entry]
    order: tuple[int, ...] | None
