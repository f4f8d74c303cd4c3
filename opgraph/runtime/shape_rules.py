"""What ops ask of shapes beyond broadcasting, where sizes are first known in a call."""

from __future__ import annotations

from collections.abc import Sequence

from opgraph.ir import opdef
from opgraph.ir.schema import inferred_dims
from opgraph.ops.families import broadcast_rule
from opgraph.partition.partition import Partition


class ShapeRules:
    """The shape rules of a fused partition.

    A kernel broadcasts whatever fits, and would take a bias of one element where the op wants one for each channel.
    What was known when the graph was finalized was checked then. What is declared of values in between does not count:
    models state sizes there that hold for one batch alone.
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
        if not self._ops or shapes == self._accepted:
            return
        known = {p.id: p.with_(dims=s, strides=None) for p, s in zip(self._ports, shapes, strict=True)}
        for op in self._ops:
            inputs = tuple(known.get(t.id, t) for t in op.inputs)
            made = inferred_dims(opdef.of(op), inputs, op.attrs, op)
            known.update((t.id, t.with_(dims=d, strides=None)) for t, d in zip(op.outputs, made))
        self._accepted = shapes
