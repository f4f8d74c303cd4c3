"""How a call goes over its elements: decided once, for the kernel that is compiled ahead and for the call itself."""

from __future__ import annotations

from dataclasses import dataclass

from opgraph.loops.at_once import walked
from opgraph.loops.column_sums import column_sums
from opgraph.loops.layout import Layout
from opgraph.loops.loop import Loop
from opgraph.runtime.boxed import Boxed, BoxedRows, boxed_reductions, boxed_rows


@dataclass(frozen=True, slots=True)
class Walk:
    """What runs over what.

    Attributes:
        loop: the loop, or one of the same results whose sums go down columns.
        layout: the layout that the kernel is told.
        rows: how rows that are reduced are cut; None without such rows, and without elements.
        boxed: how a space with sums is cut; None where any piece of it will do.
    """

    loop: Loop
    layout: Layout
    rows: BoxedRows | None
    boxed: Boxed | None

    @property
    def in_boxes(self) -> bool:
        """Whether the kernel is told of the boxes."""
        return self.boxed is not None or (self.rows is not None and self.rows.boxes.are_pieces)


def walk_of(loop: Loop, layout: Layout, *, lanes: bool, plainly: bool = False) -> Walk:
    """The walk of a loop over a layout.

    Args:
        lanes: whether the machine has vectors of 16 floats.
        plainly: rows one after the other, whatever their length.
    """
    loop, layout = column_sums(loop, layout) or (loop, layout)
    if layout.row_rank:
        layout = layout if plainly else walked(loop, layout, lanes=lanes)
        return Walk(loop, layout, boxed_reductions(loop, layout) if layout.size else None, None)
    wide, boxed = boxed_rows(loop, layout)
    return Walk(loop, wide, None, boxed)
