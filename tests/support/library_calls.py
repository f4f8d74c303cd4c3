"""Ways to call each library op: shapes of its inputs and attributes; the registry says which kinds there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.opdef import OpDef, all_ops

LIBRARY = tuple(r for r in all_ops() if r.family in ("reduction", "linear", "shape"))
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call: the shapes of its inputs, and its attributes."""

    shapes: Sequence[Shape]
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{list(self.shapes)} {dict(self.attrs)}"


_REDUCTIONS = [
    Call([(3, 4, 5)], {"axes": (1,)}),
    Call([(3, 4, 5)], {"axes": (-1, 0)}),
    Call([(3, 4, 5)], {"axes": (-1, 0), "keep_dims": True}),
    Call([(3, 4, 5)], {"axes": (0, 1, 2)}),
    Call([(3, 4, 5)], {"axes": ()}),
    Call([(3, 0, 5)], {"axes": (0,)}),
    Call([(1,)], {"axes": (0,)}),
]
_MATMULS = [
    Call([(3, 4), (4, 5)]),
    Call([(4, 3), (4, 5)], {"transpose_a": True}),
    Call([(3, 4), (5, 4)], {"transpose_b": True}),
    Call([(4, 3), (5, 4)], {"transpose_a": True, "transpose_b": True}),
    Call([(2, 1, 3, 4), (6, 4, 5)]),
    Call([(6, 4, 3), (2, 1, 5, 4)], {"transpose_a": True, "transpose_b": True}),
    Call([(2, 3, 4), (4, 5), (5,)]),
    Call([(3, 4), (5, 4), (3, 1)], {"transpose_b": True}),
    Call([(2, 3, 4), (2, 4, 5), (2, 1, 5)]),
    Call([(4,), (4, 5)]),
    Call([(4,), (2, 5, 4)], {"transpose_a": True, "transpose_b": True}),
    Call([(2, 3, 4), (4,)]),
    Call([(2, 4, 3), (4,)], {"transpose_a": True}),
    Call([(4,), (4,)]),
    Call([(3, 0), (0, 5)]),
]
_SLICES: list[tuple[Shape, dict[str, Any]]] = [
    ((5, 6), {"starts": (1,), "ends": (4,), "axes": (0,)}),
    ((5, 6), {"starts": (-3, 0), "ends": (100, -1), "axes": (-1, 0)}),
    ((5, 6), {"starts": (0,), "ends": (6,), "axes": (1,), "steps": (4,)}),
    ((5, 6), {"starts": (-1, 4), "ends": (-100, 0), "axes": (1, 0), "steps": (-2, -1)}),
    ((5, 6), {"starts": (-100, 2), "ends": (3, 100), "axes": (0, 1)}),
    ((5, 6), {"starts": (3,), "ends": (2,), "axes": (0,)}),
    ((0, 6), {"starts": (0,), "ends": (2,), "axes": (0,)}),
]


def _sliced(shape: Shape, attrs: Mapping[str, Any]) -> Shape:
    record = next(r for r in LIBRARY if r.kind == "Slice")
    assert record.reference is not None
    return tuple(record.reference(np.zeros(shape), **attrs).shape)


CALLS: dict[str, list[Call]] = {
    **{r.kind: _REDUCTIONS for r in LIBRARY if r.family == "reduction"},
    "MatMul": _MATMULS,
    "StaticReshape": [
        Call([(2, 3, 4)], {"shape": (4, 6), "special_zero": False}),
        Call([(2, 3, 4)], {"shape": (0, -1), "special_zero": True}),
        Call([(2, 3, 4)], {"shape": (-1,), "special_zero": False}),
        Call([(0, 3)], {"shape": (5, 0), "special_zero": False}),
        Call([(1, 1)], {"shape": (), "special_zero": True}),
    ],
    "ReshapeTo": [Call([(2, 3, 4), (4, 6)]), Call([(1,), ()])],
    "StaticTranspose": [
        Call([(2, 3, 4)], {"order": (2, 0, 1)}),
        Call([(2, 3, 4)], {"order": (0, -1, -2)}),
        Call([()], {"order": ()}),
    ],
    "Unsqueeze": [Call([(3, 4)], {"axes": (0, -1)}), Call([()], {"axes": (0, 1)}), Call([(3,)], {"axes": ()})],
    "Squeeze": [Call([(1, 3, 1)], {"axes": (-1, 0)}), Call([(1, 3, 1)], {"axes": (2,)}), Call([(3,)], {"axes": ()})],
    "Concat": [
        Call([(2, 3), (2, 1), (2, 4)], {"axis": 1}),
        Call([(2, 3), (5, 3)], {"axis": -2}),
        Call([(2, 3)], {"axis": 0}),
        Call([(2, 0), (2, 3)], {"axis": 1}),
    ],
    "ConcatBackward": [
        Call([(2, 8), (2, 3), (2, 1), (2, 4)], {"axis": 1, "index": 2}),
        Call([(2, 8), (2, 3), (2, 5)], {"axis": -1, "index": 0}),
    ],
    "Slice": [Call([shape], attrs) for shape, attrs in _SLICES],
    "SliceBackward": [Call([_sliced(shape, attrs), shape], attrs) for shape, attrs in _SLICES],
}


def graph_of(record: OpDef, call: Call, dtype: str, unknown: str = "") -> og.Graph:
    """The op alone: inputs x0, x1, ..., output y.

    Args:
        unknown: "sizes", "symbols" or "rank": what is not declared of the inputs.
    """
    g = og.Graph()
    inputs = []
    for number, (port, shape) in enumerate(zip(record.with_optional(len(call.shapes)), call.shapes)):
        dims: Any = shape
        if unknown:
            dims = {
                "sizes": (None,) * len(shape),
                "symbols": tuple(f"n{s}" if s > 1 else s for s in shape),
                "rank": None,
            }[unknown]
        inputs.append(g.input(f"x{number}", dtype if port.type in record.types else port.type, dims))
    g.add_op(record.kind, *inputs, name="y", **call.attrs)
    return g.finalize()


def arrays_of(call: Call, dtype: str, seed: int = 0) -> list[np.ndarray]:
    """Arrays with ties, zeros and numbers of either sign, exact in every dtype; products of them stay small."""
    rng = np.random.default_rng(seed)
    target = dtypes.get(dtype)
    low = 0 if dtype in ("u8", "boolean") else -4
    steps = [np.asarray(rng.integers(low, 5, shape)) for shape in call.shapes]
    return [np.asarray(s / 2 if target.is_float else s).astype(target.numpy) for s in steps]


def feeds(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by the names of `graph_of`."""
    return {f"x{i}": a for i, a in enumerate(arrays)}
