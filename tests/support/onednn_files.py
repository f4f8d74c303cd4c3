"""oneDNN's own graph files, if they are in the checkout's shared folder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import opgraph as og

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "onednn-graphs"
NAMES = sorted(str(p.relative_to(FOLDER)) for p in FOLDER.rglob("*.json") if not p.name.startswith("partitions-"))
needs_files = pytest.mark.skipif(not NAMES, reason="oneDNN's graph files are not beside this checkout")

#: Files that cannot run: one of the pads is -1, which oneDNN refuses as well.
REFUSED = {"pattern/f32/avgpool_3d_chain_fusion.json"}
RUNNABLE = [name for name in NAMES if name not in REFUSED]


def path_of(name: str) -> Path:
    return FOLDER / name


def content_of(name: str) -> Any:
    return json.loads(path_of(name).read_text())


@cache
def graph_of(name: str) -> og.Graph:
    """The graph of a file, for the CPU."""
    return og.onednn.load(path_of(name), engine="cpu")


@cache
def real_partitions(engine: str) -> dict[str, Any]:
    """The real library's result for each file, by name: the number of partitions, and their sizes."""
    found: dict[str, Any] = json.loads((FOLDER / f"partitions-{engine}.json").read_text())
    return found
