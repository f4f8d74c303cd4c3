"""Writes a diagram as SVG, or as one self-contained HTML page.

ElementTree escapes every text; `printable` has already removed characters that XML does not allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from opgraph.cli.diagram import diagram
from opgraph.cli.figure import Box, Diagram, Edge, Node
from opgraph.cli.layered import Point
from opgraph.cli.main import UsageError
from opgraph.ir.graph import Graph
from opgraph.ir.whole_file import write_whole
from opgraph.partition.partition import Partition

_MARGIN, _HEAD = 24.0, 64.0

_STYLE = """
text { font-family: 'DejaVu Sans Mono', ui-monospace, Menlo, Consolas, monospace; fill: #1f2733; }
.kind { font-size: 12px; } .small { font-size: 9px; fill: #5a6675; } .head { font-size: 9px; font-weight: bold; }
.halo { paint-order: stroke; stroke: #ffffff; stroke-width: 3px; stroke-linejoin: round; }
.title { font-size: 15px; font-weight: bold; } .sum { font-size: 11px; fill: #48525f; }
.box { stroke-width: 1.4; rx: 8px; } .fused { fill: #e3f4ea; stroke: #2f9e5f; }
.library { fill: #eef1f5; stroke: #9aa7b8; }
.unsupported { fill: #fdeceb; stroke: #d23b30; }
.on-fused { stroke: #e3f4ea; } .on-library { stroke: #eef1f5; } .on-unsupported { stroke: #fdeceb; }
.node { fill: #ffffff; stroke: #b7c0cc; rx: 5px; } .unit { fill: #c9ecd7; stroke: #2f9e5f; }
.input, .output { fill: #fff7df; stroke: #c9a227; rx: 16px; }
.kept { fill: #ffdfb8; stroke: #d9730d; stroke-width: 2; rx: 16px; }
.edge { fill: none; stroke: #66717f; stroke-width: 1.1; } .inner { stroke: #9aa5b1; }
.keeps { stroke: #d9730d; stroke-width: 2; } .keeps-tip { fill: #d9730d; }
.edge:hover { stroke: #d2691e; stroke-width: 3; } .tip { fill: #66717f; }
"""

_PAGE_STYLE = """
body { margin: 0; font-family: sans-serif; } svg { display: block; }
#view { width: 100vw; height: 100vh; overflow: hidden; cursor: grab; touch-action: none; }
"""

#: Wheel: zoom at the pointer; drag: move.
_SCRIPT = """
const svg = document.querySelector('svg'), view = document.getElementById('view');
let [x, y, w, h] = svg.getAttribute('viewBox').split(' ').map(Number);
function show() { svg.setAttribute('viewBox', [x, y, w, h].join(' ')); }
function fit() { const r = view.clientWidth / view.clientHeight; svg.setAttribute('width', '100%');
  svg.setAttribute('height', '100%'); svg.setAttribute('preserveAspectRatio', 'xMinYMin meet');
  const scale = Math.max(1, w / view.clientWidth); w = view.clientWidth * scale; h = w / r; show(); }
view.addEventListener('wheel', e => { e.preventDefault(); const k = Math.exp(e.deltaY * 0.0015);
  const px = x + w * e.clientX / view.clientWidth, py = y + h * e.clientY / view.clientHeight;
  x = px - (px - x) * k; y = py - (py - y) * k; w *= k; h *= k; show(); }, { passive: false });
let last = null;
view.addEventListener('pointerdown', e => { last = e; view.setPointerCapture(e.pointerId); });
view.addEventListener('pointermove', e => { if (!last) return; x -= (e.clientX - last.clientX) * w / view.clientWidth;
  y -= (e.clientY - last.clientY) * h / view.clientHeight; last = e; show(); });
view.addEventListener('pointerup', () => { last = null; });
fit();
"""


def draw(graph: Graph, partitions: Sequence[Partition], path: str, title: str, summary: str) -> None:
    """Writes a picture of a partitioned graph; the file appears whole or not at all.

    Args:
        path: ends in .svg or .html.
        title, summary: two lines above the picture.

    Raises:
        UsageError: another ending.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".svg", ".html"):
        raise UsageError(f"cannot draw to {suffix or 'a file without ending'}", where=path, fix="use .svg or .html")
    svg = svg_of(diagram(graph, partitions), title, summary)
    text = ElementTree.tostring(svg if suffix == ".svg" else _page(svg, title), encoding="unicode")
    if suffix == ".html":
        # The script contains no text of the graph. XML would escape its < and &, but HTML requires them unescaped.
        text = "<!DOCTYPE html>\n" + text.replace("<script />", f"<script>{_SCRIPT}</script>")
    write_whole(path, text)


def svg_of(picture: Diagram, title: str, summary: str) -> ElementTree.Element:
    """The <svg> element of a diagram."""
    width = max(picture.width, 9.2 * len(title), 6.8 * len(summary)) + 2 * _MARGIN
    height = picture.height + _HEAD + _MARGIN
    svg = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width:.0f} {height:.0f}",
            "width": f"{width:.0f}",
            "height": f"{height:.0f}",
        },
    )
    ElementTree.SubElement(svg, "style").text = _STYLE
    ElementTree.SubElement(svg, "rect", {"width": f"{width:.0f}", "height": f"{height:.0f}", "fill": "#ffffff"})
    _text(svg, (_MARGIN, 26), title, "title")
    _text(svg, (_MARGIN, 44), summary, "sum")
    shift = f"translate({_MARGIN + (width - 2 * _MARGIN - picture.width) / 2:.1f} {_HEAD:.1f})"
    group = ElementTree.SubElement(svg, "g", {"transform": shift})
    for box in picture.boxes:
        _box(group, box)
    for edge in picture.edges:
        _edge(group, edge)
    for node in picture.nodes:
        _node(group, node)
    # Drawn last, with a halo: edges may pass behind these.
    for box in picture.boxes:
        _text(group, (box.corner[0] + 8, box.corner[1] + 13), box.header, f"head halo on-{box.kind}")
    for edge in picture.edges:
        if edge.label is not None:
            _text(group, *edge.label, "small halo", middle=True)
    return svg


def _page(svg: ElementTree.Element, title: str) -> ElementTree.Element:
    html = ElementTree.Element("html", {"lang": "en"})
    head = ElementTree.SubElement(html, "head")
    ElementTree.SubElement(head, "meta", {"charset": "utf-8"})
    ElementTree.SubElement(head, "title").text = title
    ElementTree.SubElement(head, "style").text = _PAGE_STYLE
    body = ElementTree.SubElement(html, "body")
    view = ElementTree.SubElement(body, "div", {"id": "view"})
    view.append(svg)
    ElementTree.SubElement(body, "script")
    return html


def _box(parent: ElementTree.Element, box: Box) -> None:
    group = ElementTree.SubElement(parent, "g")
    ElementTree.SubElement(group, "title").text = box.details
    _rect(group, box.corner, box.size, f"box {box.kind}", radius=8)


def _node(parent: ElementTree.Element, node: Node) -> None:
    group = ElementTree.SubElement(parent, "g")
    ElementTree.SubElement(group, "title").text = node.details
    (x, y), (w, h) = node.centre, node.size
    pill = node.role in ("input", "output", "kept")
    kind = node.role if pill else f"node {node.role}"
    _rect(group, (x - w / 2, y - h / 2), node.size, kind, radius=16 if pill else 5)
    _text(group, (x, y - 1 if node.subtitle else y + 4), node.title, "kind", middle=True)
    if node.subtitle:
        _text(group, (x, y + 11), node.subtitle, "small", middle=True)


def _edge(parent: ElementTree.Element, edge: Edge) -> None:
    path = ElementTree.SubElement(parent, "path", {"class": f"edge {edge.kind}".strip(), "d": _curve(edge.points)})
    ElementTree.SubElement(path, "title").text = edge.details
    x, y = edge.points[-1]
    tip = f"M{x:.1f} {y:.1f} l-3.2 -6 h6.4 z"
    ElementTree.SubElement(parent, "path", {"class": f"{edge.kind}-tip" if edge.kind else "tip", "d": tip})


def _curve(points: Sequence[Point]) -> str:
    """A line that leaves and enters each point vertically."""
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        if abs(x0 - x1) < 0.5:
            parts.append(f"L{x1:.1f} {y1:.1f}")
        else:
            middle = (y0 + y1) / 2
            parts.append(f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}")
    return " ".join(parts)


def _rect(parent: ElementTree.Element, corner: Point, size: tuple[float, float], kind: str, radius: int) -> None:
    ElementTree.SubElement(
        parent,
        "rect",
        {
            "class": kind, "x": f"{corner[0]:.1f}", "y": f"{corner[1]:.1f}", "width": f"{size[0]:.1f}",
            "height": f"{size[1]:.1f}", "rx": str(radius),
        },
    )  # fmt: skip


def _text(parent: ElementTree.Element, at: Point, text: str, kind: str, *, middle: bool = False) -> None:
    attributes = {"class": kind, "x": f"{at[0]:.1f}", "y": f"{at[1]:.1f}"}
    if middle:
        attributes["text-anchor"] = "middle"
    ElementTree.SubElement(parent, "text", attributes).text = text
