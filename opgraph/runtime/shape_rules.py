"""What ops ask of shapes beyond broadcasting, where sizes are first known in a call."""

from __future__ import annotations

from collections.abc import Sequence

from opgraph.ir import opdef
from opgraph.ops.families import broadcast_rule
from opgraph.partition.partition import Partition
from opgraph.runtime.matching import inferred


class ShapeRules:
    """The shape rules of a fused partition.

    A kernel broadcasts whatever fits, and would take a bias of one element where the op wants one for each channel.
    What was known when the graph was finalized was checked then.
    """

    def __init__(self, partition: Partition) -> None:
        open_ = [
            place
            for place, op in enumerate(partition.ops, start=1)
            if opdef.of(op).infer is not broadcast_rule and not all(t.has_known_shape for t in op.inputs)
        ]
        self._ops = partition.ops[: open_[-1]] if open_ else ()
        self._ports = partition.input_ports
        self._accepted: Sequence[tuple[int, ...]] | None = None

    def check(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raises InvalidShape, with the op, where arrays of these shapes, one for each port, break a rule."""
        if self._ops and shapes != self._accepted:
            given = {p.id: p.with_(dims=s, strides=None) for p, s in zip(self._ports, shapes, strict=True)}
            inferred(self._ops, given)
            self._accepted = shapes
