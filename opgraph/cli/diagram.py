"""Lays out the picture of a partitioned graph: a box for each partition, with its ops inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opgraph.cli.figure import Box, Diagram, Edge, Node
from opgraph.cli.labels import (
    about,
    about_op,
    about_tensor,
    header,
    name_text,
    small_width,
    subtitle_of,
    text_width,
    type_text,
)  # fmt: skip
from opgraph.cli.layered import Point, layered
from opgraph.cli.terminal import printable
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.partition.partition import Partition

#: Graphs with more ops are drawn with their partitions closed.
MAX_OPS_OPEN = 1500

_OP_HEIGHT, _PORT_HEIGHT, _HEADER, _PADDING, _PILL_HEIGHT = 34.0, 13.0, 22.0, 10.0, 28.0
_GAP, _RANK_GAP, _BOX_GAP, _BOX_RANK_GAP = 14.0, 20.0, 26.0, 46.0


@dataclass(frozen=True, slots=True)
class _Inside:
    """The layout of one partition; coordinates are relative to its box's upper left corner."""

    size: tuple[float, float]
    nodes: list[Node]
    edges: list[Edge]
    enters: dict[int, float]
    leaves: dict[int, float]


def diagram(graph: Graph, partitions: Sequence[Partition], *, kept: Mapping[str, str] | None = None) -> Diagram:
    """The picture of a finalized graph.

    Args:
        kept: name of an input or output that is kept for backward -> text next to its type. If given, all inputs are
            at the top and all outputs at the bottom.

    Long names are shortened, and characters that cannot be printed are escaped; `details` hold longer names.
    """
    open_boxes = len(graph.ops) <= MAX_OPS_OPEN
    insides = [_inside(part) if open_boxes else _closed(part) for part in partitions]
    pills = [(t, "input") for t in graph.inputs] + [(t, "output") for t in graph.outputs]
    told = [_told(tensor, kept or {}) for tensor, _ in pills]
    sizes = [inside.size for inside in insides]
    sizes += [
        (max(text_width(name_text(t)), small_width(text)) + 24, _PILL_HEIGHT + 8)
        for (t, _), text in zip(pills, told, strict=True)
    ]
    ends = range(len(insides) + len(graph.inputs), len(sizes))
    links = _links(partitions, pills)
    placed = layered(
        sizes,
        [(a, b) for a, b, _ in links],
        gap=_BOX_GAP,
        rank_gap=_BOX_RANK_GAP,
        first=() if kept is None else range(len(insides), ends.start),
        last=() if kept is None else ends,
        bundles=[t.id for _, _, t in links],
    )
    corners = [(x - w / 2, y - h / 2) for (x, y), (w, h) in zip(placed.centres, sizes, strict=True)]
    made = Diagram(width=placed.width, height=placed.height, boxes=[], nodes=[], edges=[])
    for part, inside, corner in zip(partitions, insides, corners, strict=False):
        made.boxes.append(
            Box(corner=corner, size=inside.size, header=header(part), kind=part.kind, details=about(part))
        )
        made.nodes.extend(_moved_node(n, corner) for n in inside.nodes)
        made.edges.extend(_moved_edge(e, corner) for e in inside.edges)
    for index, (tensor, role) in enumerate(pills, start=len(partitions)):
        made.nodes.append(
            Node(
                centre=placed.centres[index], size=sizes[index], title=name_text(tensor),
                subtitle=told[index - len(partitions)],
                details=f"{role} {printable(tensor.name or str(tensor.id), 500)}: {type_text(tensor)}",
                role="kept" if kept and _name(tensor) in kept else role,
            )
        )  # fmt: skip
    labelled: set[int] = set()
    for (a, b, tensor), route in zip(links, placed.routes, strict=True):
        start, end = _border(a, insides, corners, sizes, tensor, up=False), _border(b, insides, corners, sizes, tensor)
        label = None
        if a < len(partitions) and b < len(partitions) and tensor.id not in labelled:
            labelled.add(tensor.id)
            label = ((start[0], start[1] + 14), type_text(tensor))
        made.edges.append(Edge(points=[start, *route[1:-1], end], details=about_tensor(tensor), label=label))
    return made


def _name(tensor: LogicalTensor) -> str:
    return tensor.name or f"t{tensor.id}"


def _told(tensor: LogicalTensor, kept: Mapping[str, str]) -> str:
    """The text below the name of an input or output."""
    name = _name(tensor)
    return f"{type_text(tensor)} · {kept[name]}" if name in kept else type_text(tensor)


def _links(
    partitions: Sequence[Partition], pills: Sequence[tuple[LogicalTensor, str]]
) -> list[tuple[int, int, LogicalTensor]]:
    """(from, to, tensor) between partitions, inputs and outputs, each once."""
    maker: dict[int, int] = {t.id: i for i, part in enumerate(partitions) for t in part.output_ports}
    maker.update((t.id, i) for i, (t, role) in enumerate(pills, start=len(partitions)) if role == "input")
    links = [(maker[t.id], i, t) for i, part in enumerate(partitions) for t in part.input_ports if t.id in maker]
    links += [
        (maker[t.id], i, t)
        for i, (t, role) in enumerate(pills, start=len(partitions))
        if role == "output" and t.id in maker
    ]
    return links


def _inside(part: Partition) -> _Inside:
    ins, outs, ops = part.input_ports, part.output_ports, part.ops
    unit_ops = {op.id for unit in part.unit_matches for op in unit.ops}
    nodes = [_op_node(op, (0.0, 0.0), in_unit=op.id in unit_ops) for op in ops]
    sizes = [n.size for n in nodes]
    sizes += [(8.0, 0.0)] * len(ins) + [(small_width(type_text(t)), 0.0) for t in outs]
    maker = {t.id: i for i, op in enumerate(ops) for t in op.outputs}
    maker.update((t.id, i) for i, t in enumerate(ins, start=len(ops)))
    last = range(len(ops) + len(ins), len(sizes))
    links = [(maker[t.id], i, t) for i, op in enumerate(ops) for t in _distinct(op.inputs) if t.id in maker]
    links += [(maker[t.id], i, t) for i, t in zip(last, outs, strict=True)]
    placed = layered(
        sizes,
        [(a, b) for a, b, _ in links],
        gap=_GAP,
        rank_gap=_RANK_GAP,
        first=range(len(ops), len(ops) + len(ins)),
        last=last,
        bundles=[t.id for _, _, t in links],
    )
    width = max(placed.width, small_width(header(part)) + 12) + 2 * _PADDING
    shift, top = (width - placed.width) / 2, _HEADER - (_RANK_GAP / 2 if ins else 0.0)
    height = top + placed.height + (0.0 if outs else _PADDING)
    centres = [(x + shift, y + top) for x, y in placed.centres]
    edges = []
    for (a, b, tensor), route in zip(links, placed.routes, strict=True):
        points = [(x + shift, y + top) for x, y in route]
        start = (points[0][0], 0.0 if len(ops) <= a else points[0][1] + sizes[a][1] / 2)
        end = (points[-1][0], height if b >= last.start else points[-1][1] - sizes[b][1] / 2)
        edges.append(Edge(points=[start, *points[1:-1], end], details=about_tensor(tensor)))
    return _Inside(
        size=(width, height),
        nodes=[_moved_node(n, c) for n, c in zip(nodes, centres, strict=False)],
        edges=edges,
        enters={t.id: centres[len(ops) + i][0] for i, t in enumerate(ins)},
        leaves={t.id: centres[i][0] for i, t in zip(last, outs, strict=True)},
    )


def _closed(part: Partition) -> _Inside:
    """A closed partition: only its outside is drawn."""
    counts = Counter(str(op.attrs.get("onnx_op", op.kind)) for op in part.ops)
    text = ", ".join(f"{kind} {n}" if n > 1 else kind for kind, n in counts.most_common(3))
    text = printable(text + (" ..." if len(counts) > 3 else ""), 40)
    width = max(text_width(text), small_width(header(part))) + 2 * _PADDING + 12
    node = Node(
        centre=(width / 2, _HEADER + 14), size=(width - 2 * _PADDING, 24.0), title=text, subtitle="",
        details=about(part), role="op",
    )  # fmt: skip
    middle = {t.id: width / 2 for t in (*part.input_ports, *part.output_ports)}
    return _Inside(size=(width, _HEADER + 34), nodes=[node], edges=[], enters=middle, leaves=middle)


def _op_node(op: Op, centre: Point, *, in_unit: bool) -> Node:
    title, subtitle = printable(str(op.attrs.get("onnx_op", op.kind)), 30), printable(subtitle_of(op), 26)
    width = max(text_width(title), small_width(subtitle)) + 16
    return Node(
        centre=centre, size=(width, _OP_HEIGHT), title=title, subtitle=subtitle, details=about_op(op),
        role="unit" if in_unit else "op",
    )  # fmt: skip


def _border(
    node: int,
    insides: Sequence[_Inside],
    corners: Sequence[Point],
    sizes: Sequence[tuple[float, float]],
    tensor: LogicalTensor,
    *,
    up: bool = True,
) -> Point:
    """The point where a tensor crosses the border of a box or pill: at its top, or else at its bottom."""
    x, y = corners[node]
    width, height = sizes[node]
    offset = width / 2
    if node < len(insides):
        offset = (insides[node].enters if up else insides[node].leaves)[tensor.id]
    return (x + offset, y if up else y + height)


def _distinct(tensors: Sequence[LogicalTensor]) -> list[LogicalTensor]:
    return list({t.id: t for t in tensors}.values())


def _moved_node(node: Node, by: Point) -> Node:
    centre = (node.centre[0] + by[0], node.centre[1] + by[1])
    return Node(
        centre=centre, size=node.size, title=node.title, subtitle=node.subtitle, details=node.details, role=node.role
    )


def _moved_edge(edge: Edge, by: Point) -> Edge:
    return Edge(points=[(x + by[0], y + by[1]) for x, y in edge.points], details=edge.details)
