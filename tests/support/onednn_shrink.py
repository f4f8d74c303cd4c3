"""oneDNN's graph files with smaller tensors: benchdnn's --in-shapes, chosen by trial.

A size is reduced wherever it occurs, and inner shapes are inferred again; a change after which the file no longer loads
is dropped. Everything else stays: ops, attributes, dtypes, layouts in the order of their strides, broadcasting.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opgraph as og
from opgraph.errors import OpGraphError
from opgraph.onednn.document import UNKNOWN

#: Attributes that contain sizes of tensors.
_SHAPES = ("shape", "sizes", "src_shape", "dst_shape", "weights_shape")
_HEAVY = ("MatMul", "Conv")


def work_of(graph: og.Graph) -> int:
    """Elements of all tensors, and a hundredth of the multiplications."""
    tensors = {t.id: t for op in graph.ops for t in (*op.inputs, *op.outputs)}
    elements = sum(math.prod(t.shape) for t in tensors.values() if t.has_known_shape)
    return elements + sum(_products(op) for op in graph.ops if op.kind.startswith(_HEAVY)) // 100


def _products(op: og.Op) -> int:
    shapes = [t.shape for t in (*op.inputs[:2], op.outputs[0]) if t.has_known_shape]
    if len(shapes) < 3:
        return 0
    sizes = [math.prod(s) for s in shapes]
    if op.kind == "MatMul":
        return math.isqrt(math.prod(sizes))
    return sizes[2] * sizes[1] // max(min(shapes[1]), 1)


def shrunk(content: Any, limit: int) -> Any:
    """A document whose graph needs work of at most `limit`, as far as that can be reached."""
    work = _work(content)
    while work is not None and work > limit:
        for change in _changes(content):
            smaller = _changed(content, change)
            less = _work(smaller)
            if less is not None and less < work:
                content, work = smaller, less
                break
        else:
            return content
    return content


def _work(content: Any) -> int | None:
    """None if it does not load."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        path.write_text(json.dumps(content))
        try:
            return work_of(og.onednn.load(path, engine="cpu"))
        except OpGraphError:
            return None


def _external(content: Any) -> list[Any]:
    made = {t["id"] for op in content["graph"] for t in op["outputs"]}
    return [t for op in content["graph"] for t in op["inputs"] if t["id"] not in made]


def _changes(content: Any) -> list[Callable[[int, int], int]]:
    """Ways to reduce sizes: functions of (axis, size). Whole batches first, then any large size."""
    shapes = [t["shape"] for t in _external(content)]
    batches = sorted({s[0] for s in shapes if len(s) > 1 and s[0] > 2}, reverse=True)
    attrs = [op["attrs"][n]["value"] for op in content["graph"] for n in _SHAPES if n in op.get("attrs", {})]
    sizes = sorted({d for s in [*shapes, *attrs] for d in s if d > 8}, reverse=True)
    found: list[Callable[[int, int], int]] = []
    for old in batches:
        found += [_only_batch(old, 2), _only_batch(old, 1)]
    for old in sizes:
        found += [_everywhere(old, old // by) for by in (8, 4, 2) if old % by == 0 and old // by >= 4]
    found += [_all_above(bound, by) for bound in (16, 32, 64, 128) for by in (8, 4, 2)]
    found += [_both(a, b, by) for a in sizes for b in sizes if a > b and a % b == 0 for by in (8, 2) if b // by >= 4]
    found += [_less(bound, by) for bound in (96, 48, 24) for by in (bound - 12, bound - 20) if by > 0]
    return found


def _only_batch(old: int, new: int) -> Callable[[int, int], int]:
    return lambda axis, size: new if axis == 0 and size == old else size


def _everywhere(old: int, new: int) -> Callable[[int, int], int]:
    return lambda axis, size: new if size == old else size


def _all_above(bound: int, by: int) -> Callable[[int, int], int]:
    return lambda axis, size: size // by if size >= bound and size % by == 0 else size


def _both(a: int, b: int, by: int) -> Callable[[int, int], int]:
    return lambda axis, size: size // by if size in (a, b) and size % by == 0 else size


def _less(bound: int, by: int) -> Callable[[int, int], int]:
    return lambda axis, size: size - by if size >= bound else size


def _changed(content: Any, change: Callable[[int, int], int]) -> Any:
    copy = json.loads(json.dumps(content))
    inputs = {t["id"] for t in _external(content)}
    for op in copy["graph"]:
        for name, attr in op.get("attrs", {}).items():
            if name in _SHAPES:
                attr["value"] = [change(axis, size) for axis, size in enumerate(attr["value"])]
        for tensor in op["inputs"] + op["outputs"]:
            if tensor["id"] in inputs:
                _resize(tensor, [change(axis, size) for axis, size in enumerate(tensor["shape"])])
            elif tensor["shape"]:
                tensor["shape"] = tensor["stride"] = [UNKNOWN]
    return copy


def _resize(tensor: Any, shape: list[int]) -> None:
    """Sets another shape, with the axes in memory in the same order."""
    if UNKNOWN not in tensor["stride"]:
        order = sorted(range(len(shape)), key=lambda axis: (-tensor["stride"][axis], axis))
        strides, step = [0] * len(shape), 1
        for axis in reversed(order):
            strides[axis] = step
            step *= max(shape[axis], 1)
        tensor["stride"] = strides
    tensor["shape"] = shape
