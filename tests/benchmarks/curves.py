"""Training curves: eager torch and opgraph on scikit-learn's digits, and their difference at each step.

    python tests/benchmarks/curves.py [--steps N] [--svg FILE] [--json FILE]

Four runs of each model start from the same parameters and use the same batches: eager torch in float32, in float64, in
float32 with the activations in another, equally valid order, and in float32 after `opgraph.torch.fuse(model)`. Rounding
differs between any two of them, and training makes differences grow, so "the same within rounding" needs a yardstick:
all are compared with the first. This command writes the picture in specs/images:

    python tests/benchmarks/curves.py --svg specs/images/training_curves.svg
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))
from digits_training import CASES, EAGER, EXACT, FUSED, OTHER_ORDER, Curve, trained

from opgraph.torch.memory.picture import with_light

WAYS = (EAGER, EXACT, OTHER_ORDER, FUSED)
#: Smaller differences are drawn at this value, and so are zeros: the resolution of an f32 loss is 6e-8.
FLOOR = 1e-8
#: Numbers of steps over which the largest differences are printed.
HORIZONS = (20, 100)

Points = list[tuple[float, float]]


def differences(curve: Curve, eager: Curve) -> list[float]:
    """|loss - eager's| / eager's of each step."""
    return [abs(a - b) / b for a, b in zip(curve.losses, eager.losses, strict=True)]


def told(name: str, curves: dict[str, Curve]) -> dict[str, object]:
    """Prints one model's figures and returns them."""
    eager = curves[EAGER]
    steps = len(eager.losses)
    horizons = [h for h in HORIZONS if h < steps] + [steps]
    moved = float((eager.end - eager.start).norm())
    print(f"\n{name}, {steps} steps, {len(eager.end)} parameters")
    heads = [f"first {h}" for h in horizons]
    print(f"{'':<26}{'last loss':>11}{'unseen':>9}  farthest from the first: {', '.join(heads)} steps; parameters")
    figures: dict[str, object] = {}
    for way, curve in curves.items():
        apart = differences(curve, eager)
        largest = [max(apart[:h]) for h in horizons]
        parameters = float((curve.end - eager.end).norm()) / moved
        print(
            f"{way:<26}{curve.losses[-1]:>11.6f}{curve.held_out:>9.4f}  "
            + ", ".join(f"{v:.1e}" for v in largest)
            + f"; {parameters:.1e}"
        )
        figures[way] = {
            "last_loss": curve.losses[-1],
            "held_out_loss": curve.held_out,
            "largest_difference": dict(zip(heads, largest, strict=True)),
            "parameters": parameters,
            "losses": curve.losses,
        }
    return figures


# -- the picture --

_STYLE = """
svg { --paper: #ffffff; --ink: #1f2733; --faint: #5a6675; --line: #d5dbe3; --w0: #3b7dc4; --w1: #8a94a3; --w2: #c9822b;
  --w3: #2f9e5f; }
@media (prefers-color-scheme: dark) { svg { --paper: #14181f; --ink: #e3e8ef; --faint: #9aa6b5; --line: #343c48;
  --w0: #5b9be0; --w1: #7a8594; --w2: #e0a050; --w3: #4cc483; } }
.paper { fill: var(--paper); } .grid { stroke: var(--line); }
text { font: 11px 'DejaVu Sans Mono', ui-monospace, Menlo, Consolas, monospace; fill: var(--ink); }
.head { font-weight: bold; } .faint { fill: var(--faint); }
polyline { fill: none; stroke-width: 1.3; stroke-linejoin: round; }
.w0 { stroke: var(--w0); stroke-width: 4; opacity: 0.45; } .w1 { stroke: var(--w1); }
.w2 { stroke: var(--w2); stroke-width: 2; stroke-dasharray: 5 3; } .w3 { stroke: var(--w3); }
"""
_WIDTH, _PANEL, _HEIGHT, _LEFT, _TOP, _ROW = 900, 360, 170, 66, 66, 250


@dataclass(frozen=True)
class Panel:
    """Axes: their position, the number of steps, and the values at bottom and top; logarithmic or not."""

    left: float
    top: float
    steps: int
    low: float
    high: float
    log: bool

    def place(self, step: float, value: float) -> tuple[float, float]:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, max(value, self.low)))
        return self.left + _PANEL * step / self.steps, self.top + _HEIGHT * (1 - (at - low) / (high - low))

    def ticks(self) -> list[float]:
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**n for n in range(first, last + 1, 2 if last - first > 5 else 1)]
        return [i / 2 for i in range(round(self.low * 2), round(self.high * 2) + 1)]


def picture(runs: dict[str, dict[str, Curve]]) -> str:
    """An SVG: for each model its losses, and the distances of three runs from the first."""
    height = _TOP + _ROW * len(runs)
    size = {"width": str(_WIDTH), "height": str(height)}
    svg = ElementTree.Element(
        "svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {_WIDTH} {height}", **size}
    )
    ElementTree.SubElement(svg, "style").text = with_light(_STYLE)
    ElementTree.SubElement(svg, "rect", {"class": "paper", **size})
    for index, way in enumerate(WAYS):
        x = 20 + 220 * index
        _line(svg, [(x, 20), (x + 28, 20)], index)
        _text(svg, x + 34, 24, way)
    for row, (name, curves) in enumerate(runs.items()):
        top = _TOP + _ROW * row
        steps = len(curves[EXACT].losses)
        highest = max(max(c.losses) for c in curves.values())
        losses = Panel(_LEFT, top, steps, 0.0, math.ceil(highest * 2) / 2, False)
        _axes(svg, losses, f"{name}: loss")
        apart = {way: differences(curves[way], curves[EAGER]) for way in WAYS[1:]}
        most = max(itertools.chain.from_iterable(apart.values()))
        high = 10.0 ** max(-3, math.ceil(math.log10(max(most, FLOOR))))
        distances = Panel(_LEFT + _PANEL + 90, top, steps, FLOOR, high, True)
        _axes(svg, distances, f"distance from the loss of {EAGER}, relative")
        for index, way in enumerate(WAYS):
            _line(svg, [losses.place(i, v) for i, v in enumerate(curves[way].losses)], index)
            if way in apart:
                _line(svg, [distances.place(i, v) for i, v in enumerate(_risen(apart[way]))], index)
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _risen(values: Sequence[float]) -> list[float]:
    """The running maximum: a difference that passes through zero is no agreement."""
    return list(itertools.accumulate(values, max))


def _axes(svg: ElementTree.Element, panel: Panel, title: str) -> None:
    _text(svg, panel.left, panel.top - 12, title, "head")
    for value in panel.ticks():
        _, y = panel.place(0, value)
        ends = {"x1": panel.left, "x2": panel.left + _PANEL, "y1": y, "y2": y}
        ElementTree.SubElement(svg, "line", {"class": "grid", **{k: f"{v:.1f}" for k, v in ends.items()}})
        label = f"1e{round(math.log10(value))}" if panel.log else f"{value:g}"
        _text(svg, panel.left - 8 - 6.7 * len(label), y + 4, label, "faint")
    for step in (0, panel.steps // 2, panel.steps):
        x, _ = panel.place(step, panel.low)
        _text(svg, x - 3.3 * len(str(step)), panel.top + _HEIGHT + 16, str(step), "faint")
    _text(svg, panel.left + _PANEL - 30, panel.top + _HEIGHT + 30, "step", "faint")


def _line(svg: ElementTree.Element, points: Points, kind: int) -> None:
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    ElementTree.SubElement(svg, "polyline", {"class": f"w{kind}", "points": drawn})


def _text(svg: ElementTree.Element, x: float, y: float, text: str, kind: str = "") -> None:
    ElementTree.SubElement(svg, "text", {"class": kind, "x": f"{x:.1f}", "y": f"{y:.1f}"}).text = text


def main() -> None:
    """Trains, prints, draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=280, help="of each run; 24 see every image once (default: 280)")
    parser.add_argument("--svg", help="write the picture to this file")
    parser.add_argument("--json", help="write losses and figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are small, and the sums of a product must not depend on the number of cores
    runs, figures = {}, {}
    for name, case in CASES.items():
        runs[name] = {way: trained(case, way, options.steps) for way in WAYS}
        figures[name] = told(name, runs[name])
    if options.svg:
        Path(options.svg).write_text(picture(runs))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
