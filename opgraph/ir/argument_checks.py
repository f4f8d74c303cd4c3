"""What a caller gives to a function, checked to be the kind of thing that it must be."""

from __future__ import annotations

import os
from typing import Any

from opgraph.errors import InvalidArguments
from opgraph.ir.graph import Graph


def given_graph(graph: Any, where: str) -> Graph:
    """A graph, finalized by this call if need be.

    Raises:
        InvalidArguments: something else.
    """
    if not isinstance(graph, Graph):
        raise InvalidArguments(f"got {type(graph).__name__} where a Graph is expected", where=where, fix="give a Graph")
    return graph.finalize()


def given_path(path: Any, where: str) -> str:
    """The text of a path.

    Raises:
        InvalidArguments: something else.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(text := os.fspath(path), str):
        raise InvalidArguments(
            f"got {type(path).__name__} where a path is expected", where=where, fix="give a str or a pathlib.Path"
        )
    return text
