"""The elements of a graph's picture: nodes, boxes around them, and edges, each with its position."""

from __future__ import annotations

from dataclasses import dataclass

from opgraph.cli.layered import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An op, or an input or output of the graph: its position, its text, and its tooltip (`details`)."""

    centre: Point
    size: tuple[float, float]
    title: str
    subtitle: str
    details: str
    role: str  # "op", "unit" (an op of a named unit), "input", "output", "kept" (for backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A partition."""

    corner: Point
    size: tuple[float, float]
    header: str
    kind: str
    details: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The path of a tensor; `label` is centred below the point where it leaves a partition."""

    points: list[Point]
    details: str
    label: tuple[Point, str] | None = None
    kind: str = ""  # "keeps": from forward to backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagram:
    """A picture, ready to be written in any vector format."""

    width: float
    height: float
    boxes: list[Box]
    nodes: list[Node]
    edges: list[Edge]
