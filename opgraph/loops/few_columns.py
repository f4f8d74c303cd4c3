"""Few long rows that lie side by side and are reduced once: threads share them in pieces.

The largest of each column of a [4M,8] are 8 rows of 4M elements; whole, they would be one thread's. What pieces make is
joined in their order (`kernels/host_beside_pieces.h`). Sums down columns have a way of their own
(`opgraph.loops.column_sums`), which is the faster one; here is what that leaves: extremes, products, sums that
something else is reduced beside, or that waits for them.
"""

from __future__ import annotations

from math import prod

from opgraph.loops.beside import LANES, joins
from opgraph.loops.boxes import ENOUGH, ONE_BOX, Boxes, boxes_beside, boxes_of_few
from opgraph.loops.layout import ADDED, KEPT, TURNED, Layout
from opgraph.loops.loop import Loop
from opgraph.loops.passes import pass_counts

#: Strips of LANES columns of so many elements are not walked one after the other: their lines lie far apart in memory.
LONG = 256
#: Neighbours in a box (kernels/host_beside_pieces.h).
MOST_LANES = 4 * LANES


def boxes_of_columns(loop: Loop, layout: Layout) -> Boxes:
    """The cut of a layout whose rows lie side by side: whole rows where there are enough of them, else pieces."""
    whole = boxes_beside(layout, LANES)
    length = prod(layout.dims[-1 - layout.row_rank : -1])
    apart = layout.dims[-1] > LANES and length >= LONG
    if (whole.count >= ENOUGH and not apart) or layout.size <= ONE_BOX or not joins(loop):
        return whole
    if pass_counts(loop)[0] > 1 or any(kind in (ADDED, KEPT, TURNED) for kind in layout.variant.operands):
        return whole
    pieces = boxes_of_few(layout, MOST_LANES)
    return pieces if pieces.count > 2 * whole.count else whole
