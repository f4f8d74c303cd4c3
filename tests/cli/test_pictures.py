"""Pictures of graphs: every op in its box, no overlaps, and names shown as plain text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opgraph as og
from opgraph.cli import main
from opgraph.cli.diagram import MAX_OPS_OPEN, diagram
from opgraph.cli.layered import layered

SVG = "{http://www.w3.org/2000/svg}"
NASTY = "a\x1b[31m</title><script>alert(1)</script>&\"'\u202e\r\n\x00]]>" + "n" * 10_000


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[tuple[float, float]], list[tuple[int, int]]]:
    count = draw(st.integers(1, 30))
    sizes = draw(st.lists(st.tuples(st.floats(4, 90), st.floats(4, 60)), min_size=count, max_size=count))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda p: p[0] < p[1])
    edges = draw(st.lists(pairs, max_size=60, unique=True)) if count > 1 else []
    return sizes, edges


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_layered_layout_points_down_without_overlaps(
    graph: tuple[list[tuple[float, float]], list[tuple[int, int]]],
) -> None:
    sizes, edges = graph
    placed = layered(sizes, edges, gap=5, rank_gap=9)
    for (x, y), (w, h) in zip(placed.centres, sizes, strict=True):
        assert w / 2 - 1e-6 <= x <= placed.width - w / 2 + 1e-6
        assert h / 2 - 1e-6 <= y <= placed.height - h / 2 + 1e-6
    for (a, b), route in zip(edges, placed.routes, strict=True):
        assert route[0] == placed.centres[a] and route[-1] == placed.centres[b]
        assert all(upper[1] <= lower[1] + 1e-6 for upper, lower in pairwise(route))
        assert placed.centres[a][1] < placed.centres[b][1]
    assert not overlapping(placed.centres, sizes)


def overlapping(centres: list[tuple[float, float]], sizes: list[tuple[float, float]]) -> list[tuple[int, int]]:
    found = []
    for i, ((x, y), (w, h)) in enumerate(zip(centres, sizes, strict=True)):
        for j in range(i):
            (u, v), (p, q) = centres[j], sizes[j]
            if abs(x - u) < (w + p) / 2 - 1e-6 and abs(y - v) < (h + q) / 2 - 1e-6:
                found.append((j, i))
    return found


def chain(blocks: int, name: str = "x") -> og.Graph:
    """Swishes with foreign ops between them, and an edge past each."""
    g = og.Graph()
    h = g.input(name, shape=("batch", 64))
    for i in range(blocks):
        y = g.add_op("Multiply", h, g.add_op("Sigmoid", h, name=f"{name}/{i}"))
        z = g.add_op("Wildcard", y, dtype="f32", outputs=1, onnx_op=f"Conv{name}", name=f"conv {i} {name}")
        h = g.add_op("Add", z, h)
    g.output(h)
    return g.finalize()


@pytest.mark.parametrize("blocks", [1, 5, 125])
def test_every_op_is_inside_its_partition_box_without_overlaps(blocks: int) -> None:
    g = chain(blocks)
    partitions = g.get_partitions()
    picture = diagram(g, partitions)
    ops = [n for n in picture.nodes if n.role in ("op", "unit")]
    assert len(ops) == len(g.ops) and sum(n.role == "unit" for n in ops) == 2 * blocks
    boxes = [((b.corner[0] + b.size[0] / 2, b.corner[1] + b.size[1] / 2), b.size) for b in picture.boxes]
    assert not overlapping([c for c, _ in boxes], [s for _, s in boxes])
    assert not overlapping([n.centre for n in ops], [n.size for n in ops])
    for part, box in zip(partitions, picture.boxes, strict=True):
        inside = [n for n in ops if contains(box.corner, box.size, n.centre, n.size)]
        assert len(inside) == len(part.ops)


def test_parallel_ops_do_not_overlap() -> None:
    g = og.Graph()
    x = g.input("x", shape=(8,))
    h = [g.add_op(kind, x) for kind in ("Sin", "Cos", "Tanh", "Sigmoid", "Exp")]
    for kind in ("Add", "Multiply", "Maximum"):
        h = [g.add_op(kind, a, b, name=f"{kind} {i}") for i, (a, b) in enumerate(pairwise(h))]
    picture = diagram(g.finalize(), g.get_partitions())
    ops = [n for n in picture.nodes if n.role == "op"]
    assert len(ops) == len(g.ops) == 14 and len({n.centre[1] for n in ops}) == 4
    assert not overlapping([n.centre for n in ops], [n.size for n in ops])


def contains(
    corner: tuple[float, float], size: tuple[float, float], centre: tuple[float, float], inner: tuple[float, float]
) -> bool:
    return all(
        c <= m - i / 2 + 1e-6 and m + i / 2 <= c + s + 1e-6
        for c, s, m, i in zip(corner, size, centre, inner, strict=True)
    )


def test_large_graph_is_drawn_with_collapsed_partitions() -> None:
    g = chain(MAX_OPS_OPEN // 4 + 1)
    partitions = g.get_partitions()
    picture = diagram(g, partitions)
    assert len(picture.nodes) == len(partitions) + 2


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_names_are_escaped_in_pictures(tmp_path: Path, suffix: str) -> None:
    model, target = tmp_path / "g.txt", tmp_path / f"g.{suffix}"
    model.write_text(str(chain(2, NASTY)))
    assert main(["show", str(model), "--draw", str(target)]) == 0
    text = target.read_text()
    assert text.count("<script") == (1 if suffix == "html" else 0)
    assert not any(ord(c) < 32 and c != "\n" for c in text) and "\u202e" not in text
    svg = text[text.index("<svg") : text.index("</svg>") + 6]
    root = ElementTree.fromstring(svg)
    assert {element.tag for element in root.iter()} == {
        f"{SVG}{tag}" for tag in ("svg", "style", "rect", "text", "g", "title", "path")
    }
    assert all(len(element.text or "") < 1500 for element in root.iter(f"{SVG}text"))


def test_picture_is_deterministic(tmp_path: Path) -> None:
    model = tmp_path / "g.txt"
    model.write_text(str(chain(6)))
    for target in ("a.svg", "b.svg"):
        assert main(["show", str(model), "--draw", str(tmp_path / target)]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_other_picture_format_is_refused_without_a_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "g.txt"
    model.write_text(str(chain(1)))
    assert main(["show", str(model), "--draw", str(tmp_path / "g.png")]) == 2
    assert "use .svg or .html" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["g.txt"]
