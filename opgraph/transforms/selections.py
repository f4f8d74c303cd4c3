"""Comparisons of a value with elements selected from it, as `v == v.amax(0)`: both must come from one computation.

Kernels may round differently within an op's bounds: a divisor of a row may become a factor, and a norm in small ops is
one unit. So a value that is recomputed in another kernel may differ in its last bit. Then no element of it equals its
own maximum. The gradient of ReduceMax, in equal parts to all largest elements, is then 0 / 0, and `sqrt(max(v) - v)` is
NaN.

This module finds the values that reach one operand of a comparison element by element, and also another operand through
a selection. A difference or quotient of such operands counts as a comparison if a function with a jump or an edge
(Sign, Sqrt) reads it. `Origins` finds them in any graph, `comparisons` in a graph of ops.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import numpy as np

from opgraph.ir import dtypes, opdef
from opgraph.ir.graph import Graph
from opgraph.ir.op import Op
from opgraph.ops.shape import VIEWS

Key = TypeVar("Key", bound=Hashable)


class Role:
    """An op's use of the elements of its operands: flags of one bit each.

    Attributes:
        OPAQUE: none of the following.
        POINTWISE: it computes each element from one element of each operand.
        MOVES: its results are elements of all operands, at other positions or chosen at each position.
        SELECTS: its results are elements of its operands, or follow from single ones.
        EXACT: its results have the bits of its first operand, or determine them, in every kernel.
        MEETS: its result is zero, one or an operand itself where its operands are equal.
        KEEPS_SIDES: zeros, ones and their neighbours stay on the same side.
        EDGED: it jumps, or its domain ends, at zero or one.
    """

    OPAQUE = 0
    POINTWISE = 1
    MOVES = 2
    SELECTS = 4
    EXACT = 8
    MEETS = 16
    KEEPS_SIDES = 32
    EDGED = 64


COMPARISON = Role.MEETS | Role.EDGED
VIEW = Role.POINTWISE | Role.EXACT | Role.KEEPS_SIDES

_CHOICE = Role.POINTWISE | Role.MOVES
_EDGED = Role.POINTWISE | Role.EDGED
_ROLES: dict[str, int] = {
    **dict.fromkeys(("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessOrEqual"), COMPARISON),
    **dict.fromkeys((*VIEWS, "TypeCast", "StopGradient", "Identity", "Abs", "Neg"), VIEW),
    **dict.fromkeys(("StaticTranspose", "BroadcastTo"), Role.MOVES | Role.EXACT | Role.KEEPS_SIDES),
    **dict.fromkeys(("Slice", "SliceBackward", "Concat", "ConcatBackward"), Role.MOVES | Role.KEEPS_SIDES),
    "Interpolate": Role.MOVES,
    **dict.fromkeys(("Clamp", "ReLU", "Select"), _CHOICE | Role.KEEPS_SIDES),
    **dict.fromkeys(("Celu", "Elu", "LeakyReLU", "PReLU", "ThresholdedRelu"), _CHOICE),
    **dict.fromkeys(("Maximum", "Minimum"), _CHOICE | Role.MEETS),
    "MaxPool": Role.SELECTS,
    "MaxPoolTake": Role.SELECTS,
    **dict.fromkeys(("Subtract", "SquaredDifference"), Role.POINTWISE | Role.MEETS),
    "Divide": Role.POINTWISE | Role.MEETS | Role.KEEPS_SIDES,
    **dict.fromkeys(("Multiply", "Square"), Role.POINTWISE | Role.KEEPS_SIDES),
    "Mod": _EDGED | Role.MEETS,
    **dict.fromkeys(
        (
            "AbsBackward", "Acos", "Acosh", "Asin", "Atanh", "Ceil", "ClampBackward", "EluBackward", "Erfinv", "Floor",
            "HardSigmoidBackward", "HardSwishBackward", "Log", "Log1p", "Ndtri", "Pow", "PowBackward", "ReLUBackward",
            "Reciprocal", "Rsqrt", "Shrink", "Sign", "Sqrt", "SqrtBackward", "Trunc",
        ),
        _EDGED,
    ),
}  # fmt: skip

#: Kinds with the same bits in every kernel, if no operand or result has 16 bits: kernels round these when they store
#: them. Named units, such as HardSwish, are already single ops when this is used.
_SAME_BITS = frozenset(
    (
        "Add", "Subtract", "Multiply", "Square", "Select", "ReLU", "Clamp", "Maximum", "Minimum", "And", "Or", "Not",
        *(kind for kind, role in _ROLES.items() if role & Role.EXACT or role == COMPARISON),
    )
)  # fmt: skip


@dataclass(slots=True)
class _Origin:
    """The values from which a value is computed, as sets with a bit for each.

    Attributes:
        own: the value itself.
        direct: values from which it is computed by pointwise ops alone, itself included.
        moved: the same, if an element may come from another position.
        selected: values from which it is computed through a selection.
        met: values whose elements are combined with selected ones, in a difference that is zero where they are equal.
    """

    own: int = 0
    direct: int = 0
    moved: int = 0
    selected: int = 0
    met: int = 0


class Origins(Generic[Key]):
    """The origins of the values of a graph. Values are added in the order of the graph."""

    def __init__(self) -> None:
        self._of: dict[Key, _Origin] = {}
        self._keys: list[Key] = []
        self._sources: dict[Key, Sequence[Key]] = {}
        self._exact: dict[Key, Key] = {}

    def add(self, key: Key, role: int, sources: Sequence[Key]) -> list[Key]:
        """Records the origin of a value.

        Args:
            sources: the values from which it is computed; for a selection only its data.

        Returns: the values that it compares with their own elements.
        """
        known = [s for s in sources if s in self._of]
        given = [self._of[s] for s in known]
        made = _joined(given)
        meeting = _meeting(given) if role & Role.MEETS and len(given) > 1 else 0
        compared = made.met | meeting if role & Role.EDGED else 0
        if role & Role.SELECTS:
            made = _Origin(selected=made.direct | made.selected)
        elif role & (Role.POINTWISE | Role.MOVES):
            made.met = meeting | (made.met if role & Role.KEEPS_SIDES else 0)
            if role & Role.MOVES:
                made.moved = made.direct
            if role & Role.EXACT and known:
                self._exact[key] = known[0]
        else:
            made = _Origin()
        made.own = 1 << len(self._keys)
        made.direct |= made.own
        self._keys.append(key)
        self._of[key], self._sources[key] = made, known
        return self._last(compared) if compared else []

    def between(self, value: Key, comparison: Key) -> list[Key]:
        """The values from which a comparison is computed, itself included, and which are computed from `value`."""
        bit = self._of[value].own
        seen: dict[Key, None] = {}
        waiting = [comparison]
        while waiting:
            key = waiting.pop()
            origin = self._of[key]
            if key != value and key not in seen and (key == comparison or (origin.direct | origin.selected) & bit):
                seen[key] = None
                waiting += self._sources[key]
        return list(seen)

    def _last(self, values: int) -> list[Key]:
        """The values of a set from which no other one is computed, before casts and changes of sign."""
        found: dict[Key, None] = {}
        while values:
            key = self._keys[values.bit_length() - 1]
            values &= ~self._of[key].direct
            while key in self._exact:
                key = self._exact[key]
            found[key] = None
        return list(found)


def _joined(origins: Sequence[_Origin]) -> _Origin:
    made = _Origin()
    for origin in origins:
        made.direct |= origin.direct
        made.moved |= origin.moved
        made.selected |= origin.selected
        made.met |= origin.met
    return made


def _meeting(origins: Sequence[_Origin]) -> int:
    """The values that one operand has in place, and another operand has selected or moved.

    Two parts of a value have no common element: an element is combined with itself if one operand has it in place.
    """
    met = 0
    for place, one in enumerate(origins):
        for other in (*origins[:place], *origins[place + 1 :]):
            met |= one.direct & other.selected | one.direct & ~one.moved & other.moved
    return met


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a value with elements that were selected from it, by ids.

    Attributes:
        value: the value.
        result: the result of the comparison.
        between: the values computed from the value and read by the comparison, directly or not; with `result`.
    """

    value: int
    result: int
    between: frozenset[int]


def comparisons(graph: Graph) -> list[Comparison]:
    """The comparisons of a graph of ops, in which equal ops are one op."""
    roles = [(op, _role(op)) for op in graph.ops]
    if not any(role & (Role.SELECTS | Role.MOVES) for _, role in roles):
        return []
    found: list[Comparison] = []
    origins: Origins[int] = Origins()
    for op, role in roles:
        read = [t.id for t in opdef.of(op).read_inputs(op)]
        sources = read[1:] if op.kind == "MaxPoolTake" else read
        for tensor in op.outputs:
            for value in origins.add(tensor.id, role, sources):
                if graph.tensor(value).dtype in dtypes.FLOATS:  # integers are exact, as positions are
                    found.append(Comparison(value, tensor.id, frozenset(origins.between(value, tensor.id))))
    return found


def has_same_bits(op: Op) -> bool:
    """True if an op has the same result in every kernel."""
    return op.kind in _SAME_BITS and not any(t.dtype in ("f16", "bf16") for t in (*op.inputs, *op.outputs))


def selects(op: Op) -> bool:
    """True if an op finds the largest or smallest elements of its first input."""
    row = opdef.of(op).row
    return row is not None and row.how in ("largest", "smallest")


@cache
def role_of(kind: str, dtype: str) -> int:
    """The role of ops of a kind with results of a dtype, for any attributes and operands."""
    record = opdef.get(kind, where="a selection")
    if record.foreign or (record.row is not None and record.row.how in ("largest", "smallest")):
        return Role.SELECTS
    if record.is_cast and dtype not in dtypes.FLOATS:
        return _EDGED
    return _ROLES.get(kind, Role.POINTWISE if record.is_pointwise else Role.OPAQUE)


def _role(op: Op) -> int:
    role = role_of(op.kind, op.outputs[0].dtype if op.outputs else dtypes.UNDEF)
    if op.kind in ("Add", "Subtract") and any(_is_zero_or_one(t.data) for t in op.inputs):
        return role | Role.KEEPS_SIDES
    return role


def _is_zero_or_one(number: np.ndarray | None) -> bool:
    """True if a difference from a number is on a known side of 0 or 1 where its other operand is."""
    return number is not None and number.size == 1 and abs(float(number.item())) in (0.0, 1.0)
