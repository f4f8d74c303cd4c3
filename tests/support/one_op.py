"""Graphs of one op, in every form and dtype that its record allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.opdef import OpDef, Port, all_ops
from opgraph.ops import samples

#: Every op that becomes part of a generated kernel.
POINTWISE = tuple(record for record in all_ops() if record.is_pointwise)


@dataclass(frozen=True)
class OneOp:
    """One way to call an op.

    Attributes:
        dtype: the dtype for the dtype symbols of its inputs.
        ports: the inputs that are given.
        target: dtype of the output if only the caller can choose it (TypeCast).
    """

    record: OpDef
    dtype: str
    ports: tuple[Port, ...]
    attrs: dict[str, Any]
    target: str | None

    def shapes(self, whole: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes of its inputs for a result of shape `whole`. Its last axis, the second, is that of channels."""
        channels = self.record.channel_inputs
        return [whole[1:2] if i in channels else whole for i in range(len(self.ports))]

    def graph(self, shapes: Sequence[tuple[int | None, ...] | None]) -> og.Graph:
        """The op on inputs x0, x1, ... of these shapes; its output is y."""
        g = og.Graph()
        inputs = [
            g.input(f"x{i}", dtype=self.dtype if port.type in self.record.types else port.type, shape=shape)
            for i, (port, shape) in enumerate(zip(self.ports, shapes, strict=True))
        ]
        g.output(g.add_op(self.record.kind, *inputs, name="y", dtype=self.target, **self.attrs))
        return g

    def __str__(self) -> str:
        text = ",".join(f"{k}={v}" for k, v in self.attrs.items())
        return f"{self.record.kind}({self.dtype}x{len(self.ports)}{'->' + self.target if self.target else ''} {text})"


def calls(record: OpDef, dtype: str | None = None) -> Iterator[OneOp]:
    """Every form of an op, for one dtype or for all that it supports."""
    for name in samples.dtypes_of(record) if dtype is None else (dtype,):
        for ports, attrs in samples.forms(record, name):
            for target in dtypes.ARITHMETIC if record.is_cast else (None,):
                yield OneOp(record, name, ports, attrs, target)
