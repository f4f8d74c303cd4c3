"""Type checks of arguments that callers pass."""

from __future__ import annotations

import os
from typing import Any

from opgraph.errors import InvalidArguments
from opgraph.ir.graph import Graph


def given_graph(graph: Any, where: str) -> Graph:
    """Returns the graph, finalized by this call if needed.

    Raises:
        InvalidArguments: `graph` is not a Graph.
    """
    if not isinstance(graph, Graph):
        raise InvalidArguments(f"got {type(graph).__name__} where a Graph is expected", where=where, fix="give a Graph")
    return graph.finalize()


def given_path(path: Any, where: str) -> str:
    """The text of a path.

    Raises:
        InvalidArguments: `path` is not a str or a path of text.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(text := os.fspath(path), str):
        raise InvalidArguments(
            f"got {type(path).__name__} where a path is expected", where=where, fix="give a str or a pathlib.Path"
        )
    return text
