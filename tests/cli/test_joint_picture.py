"""The picture of a training plan: both graphs, one below the other, and lines for saved tensors."""

from __future__ import annotations

from opgraph.cli.training_diagram import joint
from opgraph.ir.parse import parse
from opgraph.transforms.saved import training_plan

SWIGLU = """\
graph(x: f32[batch,256], w: f32[256,512], u: f32[256,512], a: f32[]) -> (y)
  h = MatMul(x, w)
  v = MatMul(x, u)
  t = Multiply(h, a)
  s = Sigmoid(t)
  g = Multiply(h, s)
  y = Multiply(g, v)
"""


def test_saved_tensors_are_lines_from_forward_to_backward() -> None:
    plan = training_plan(parse(SWIGLU), ["x", "w", "u", "a"])
    picture = joint(plan, {"batch": 128})
    kept = [node for node in picture.nodes if node.role == "kept"]
    names = {saved.name for saved in plan.saved}
    assert sorted(node.title for node in kept) == sorted([*names, *names])
    assert {node.subtitle for node in kept if node.title == "x"} == {"f32[batch,256] · 128.0 KiB"}
    lines = [edge for edge in picture.edges if edge.kind == "keeps"]
    assert len(lines) == len(names - {"a"})  # a scalar has no line
    tops = {node.title: node.centre[1] for node in reversed(kept)}
    for line in lines:
        assert line.points[0][1] < line.points[-1][1]
        assert any(abs(line.points[0][1] - top) < 30 for top in tops.values())


def test_joint_picture_has_no_overlaps_and_fits() -> None:
    picture = joint(training_plan(parse(SWIGLU), ["x", "w", "u", "a"]), {})
    places = [(n.centre, n.size) for n in picture.nodes if n.role in ("kept", "input", "output")]
    places += [((b.corner[0] + b.size[0] / 2, b.corner[1] + b.size[1] / 2), b.size) for b in picture.boxes]
    for i, ((x, y), (w, h)) in enumerate(places):
        assert w / 2 <= x <= picture.width - w / 2 + 1e-6 and h / 2 - 1e-6 <= y <= picture.height - h / 2 + 1e-6
        for (u, v), (p, q) in places[:i]:
            assert abs(x - u) >= (w + p) / 2 - 1e-6 or abs(y - v) >= (h + q) / 2 - 1e-6
    leftmost = min([b.corner[0] for b in picture.boxes] + [n.centre[0] - n.size[0] / 2 for n in picture.nodes])
    past = [edge for edge in picture.edges if edge.kind == "keeps" and len(edge.points) == 4]
    assert past and all(0 < edge.points[1][0] < leftmost for edge in past)
    assert len({edge.points[1][0] for edge in past}) == len(past)
    assert all(0 <= x <= picture.width for edge in picture.edges for x, _ in edge.points)
