"""The picture of a training plan: the forward graph, the kept tensors, and the backward graph, from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from opgraph.cli.diagram import diagram
from opgraph.cli.draw import svg_of
from opgraph.cli.figure import Box, Diagram, Edge, Node
from opgraph.cli.labels import NAME_WIDTH
from opgraph.cli.main import UsageError
from opgraph.cli.terminal import printable
from opgraph.ir import dtypes
from opgraph.ir.whole_file import write_whole
from opgraph.transforms.saved import Saved, TrainingPlan

_GAP = 70.0
#: Space at the left for the line of an input past the forward graph, and between two such lines.
_LANE = 14.0


def draw_plan(plan: TrainingPlan, path: str, title: str, extents: Mapping[str, int] | None = None) -> None:
    """Writes the picture; the file appears whole or not at all.

    Args:
        extents: of symbolic dimensions, where they are known.

    Raises:
        UsageError: the path does not end in .svg.
    """
    if Path(path).suffix.lower() != ".svg":
        raise UsageError("the picture is an SVG file", where=path, fix="give a name that ends in .svg")
    extents = extents or {}
    kept = [f"{printable(s.name, 30)} {_bytes(s, extents)}" for s in plan.saved if s.role != "shape" and s.shape != ()]
    scalars = sum(s.shape == () and s.role != "shape" for s in plan.saved)
    if scalars:
        kept.append(f"{scalars} scalar{'s' if scalars > 1 else ''}")
    svg = svg_of(joint(plan, extents), title, f"kept for backward: {', '.join(kept) or 'nothing'}")
    write_whole(path, ElementTree.tostring(svg, encoding="unicode"))


def joint(plan: TrainingPlan, extents: Mapping[str, int]) -> Diagram:
    """Both graphs in one diagram: kept tensors are marked, and edges connect the two graphs."""
    kept = {saved.name: _bytes(saved, extents) for saved in plan.saved}
    # Scalars are kept too, but lines for a dozen of them would hide the tensors that take memory.
    large = {printable(saved.name, NAME_WIDTH) for saved in plan.saved if saved.shape != ()}
    lanes = sum(s.role in ("input", "shape") and s.shape != () for s in plan.saved) * _LANE + _LANE
    above = diagram(plan.forward, plan.forward.get_partitions(), kept=kept)
    below = diagram(plan.backward, plan.backward.get_partitions(), kept=kept)
    width = max(above.width, below.width)
    upper = _moved(above, (lanes + (width - above.width) / 2, 0.0))
    lower = _moved(below, (lanes + (width - below.width) / 2, above.height + _GAP))
    ends = {node.title: node for node in lower.nodes if node.role == "kept"}
    made = Diagram(
        width=lanes + width, height=above.height + _GAP + below.height, boxes=[*upper.boxes, *lower.boxes],
        nodes=[*upper.nodes, *lower.nodes], edges=[*upper.edges, *lower.edges],
    )  # fmt: skip
    lane = 0.0
    for node in upper.nodes:
        end = ends.get(node.title)
        if node.role != "kept" or end is None or node.title not in large:
            continue
        start, goal = _edge_of(node, 1), _edge_of(end, -1)
        if start[1] > above.height - 1:
            points = [start, goal]
        else:  # an input: past the forward graph, on its left
            lane += _LANE
            points = [start, (lane, start[1] + 30), (lane, above.height), goal]
        made.edges.append(Edge(points=points, details=node.details, kind="keeps"))
    return made


def _bytes(saved: Saved, extents: Mapping[str, int]) -> str:
    if saved.role == "shape":
        return "its shape alone"
    count = saved.bytes
    if count is None:
        dims = [extents.get(d) if isinstance(d, str) else d for d in saved.shape or (None,)]
        if any(d is None for d in dims):
            return "kept"
        count = dtypes.get(saved.dtype).itemsize * math.prod(d for d in dims if d is not None)
    if count < 1024:
        return f"{count} B"
    return f"{count / 2**10:.1f} KiB" if count < 2**20 else f"{count / 2**20:.1f} MiB"


def _edge_of(node: Node, side: int) -> tuple[float, float]:
    return node.centre[0], node.centre[1] + side * node.size[1] / 2


def _moved(picture: Diagram, by: tuple[float, float]) -> Diagram:
    def at(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(x + by[0], y + by[1]) for x, y in points]

    boxes: list[Box] = [replace(box, corner=at([box.corner])[0]) for box in picture.boxes]
    nodes: list[Node] = [replace(node, centre=at([node.centre])[0]) for node in picture.nodes]
    edges = [
        replace(e, points=at(e.points), label=None if e.label is None else (at([e.label[0]])[0], e.label[1]))
        for e in picture.edges
    ]
    return replace(picture, boxes=boxes, nodes=nodes, edges=edges)
