"""Schedule: how one kernel iterates over a loop at the sizes of one call.

`opgraph.schedule.table.choose_schedule` creates one. Source text, launches and printed output depend only on it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from opgraph.loops.layout import Layout
from opgraph.loops.loop import Loop
from opgraph.schedule.cpu_tiles import Boxes
from opgraph.schedule.cuda_row_tiles import RowTiles
from opgraph.schedule.cuda_tiles import Tiling
from opgraph.schedule.merged_axes import MergedAxes

# The names; opgraph.schedule.table defines when each applies.
POINTWISE = "pointwise"
POINTWISE_TILED = "pointwise tiled"
POINTWISE_SCALAR = "pointwise scalar"
POINTWISE_UNROLLED = "pointwise partly unrolled"
TILED_SUM = "tiled sum"
SPLIT_COLUMN_SUM = "split column sum"
INNER = "inner reduction"
PERSISTENT_INNER = "persistent inner reduction"
SPLIT_INNER = "split inner reduction"
TRANSPOSED_INNER = "transposed inner reduction"
OUTER = "outer reduction"
PERSISTENT_OUTER = "persistent outer reduction"
SPLIT_OUTER = "split outer reduction"
GROUPED = "grouped reduction"
SPLIT_GROUPED = "split grouped reduction"
LOOP_FISSION = "loop fission"

#: CPU schedules whose groups of neighbouring lanes are one row, and all CPU schedules whose lanes are rows.
GROUPS = frozenset({GROUPED, SPLIT_GROUPED})
INTERLEAVED = GROUPS | {TRANSPOSED_INNER, OUTER, SPLIT_OUTER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How one kernel iterates.

    Attributes:
        name: its row of `opgraph.schedule.table`.
        loop: the loop that the kernel computes: the given loop, or another one with the same results.
        layout: the axes in the order in which the kernel walks them.
    """

    name: str
    loop: Loop
    layout: Layout

    def details(self) -> list[str]:
        """The numbers of this schedule, in words."""
        return []

    def loops(self) -> list[Loop]:
        """The loops that its kernels compute, in order."""
        return [self.loop]

    def __str__(self) -> str:
        extents = " x ".join(map(str, self.layout.dims))
        rank = self.layout.row_rank
        row = f", rows of the last {'axis' if rank == 1 else f'{rank} axes'}" if rank else ""
        return "; ".join([f"{self.name} over {extents}{row}", *self.details()])


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSchedule(Schedule):
    """A kernel of the CPU.

    Attributes:
        boxes: the tiles that threads take; None if a tile may have any number of elements.
        merged: two axes that are walked as one, with the operands that are spread for it.
        vectors: vectors of 16 floats in a whole row, if its elements stay in registers; else 0.
        stages: the number of runs over all boxes, one after the other.
        fits: true if all values of a row that are kept for a later pass fit (rows one after the other, or neighbouring
            rows as lanes). The source text for this case compiles in 0.6 times the time.
    """

    boxes: Boxes | None = None
    merged: MergedAxes | None = None
    vectors: int = 0
    stages: int = 1
    fits: bool = False

    @property
    def key(self) -> Hashable:
        """The properties besides the loop that the source text depends on: calls of other sizes share it."""
        return self.name, self.layout.variant, self.vectors, self.layout.row_rank > 1, self.fits

    def details(self) -> list[str]:
        """See Schedule."""
        found = [f"{self.vectors} vectors of 16 floats"] if self.vectors else []
        if self.boxes is not None:
            found.append(f"{self.boxes.count} tiles of {' x '.join(map(str, self.boxes.box))}")
        return [*found, *([f"{self.stages} stages"] if self.stages > 1 else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaPointwise(Schedule):
    """A CUDA kernel that computes elements.

    Attributes:
        vector: elements of a pack, which a thread moves in one access.
        unroll: packs of a thread.
        narrow: true if rows are found in 32-bit arithmetic; flat positions always have 64 bits.
        group: elements of a pack whose arithmetic is in the source text, in a loop; 0: those of all packs.
        tile: elements of a flat space, or packs of rows, that one block computes.
    """

    vector: int
    unroll: int
    narrow: bool
    group: int
    tile: int

    def details(self) -> list[str]:
        """See Schedule."""
        return [f"packs of {self.vector}, {self.unroll} for each thread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSums(Schedule):
    """A CUDA kernel that adds up in tiles, and a second one for the partial sums of the tiles.

    Attributes:
        tiling: the tiles.
        vector, unroll, group: as in CudaPointwise.
        narrow: true if tiles are found in 32-bit arithmetic.
        blocks: blocks on a multiprocessor for which the compiler makes room; 0: the compiler chooses.
    """

    tiling: Tiling
    vector: int
    unroll: int
    group: int
    narrow: bool
    blocks: int

    def details(self) -> list[str]:
        """See Schedule."""
        tiling = self.tiling
        stages = ["2 stages"] if tiling.work else []
        return [f"{tiling.blocks} tiles of {tiling.row_chunk} x {tiling.column_chunk}", *stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaRows(Schedule):
    """A CUDA kernel that reduces rows.

    Attributes:
        tiles: how threads share a row.
        rows: rows that a group of threads takes one after the other.
        stages: consecutive kernels, if blocks share a row.
    """

    tiles: RowTiles
    rows: int
    stages: int

    def details(self) -> list[str]:
        """See Schedule."""
        tiles = self.tiles
        found = [f"{tiles.threads} threads a row", f"packs of {tiles.vector}, {tiles.packs} for each thread"]
        return [*found, *([f"{tiles.pieces} blocks a row, {self.stages} stages"] if tiles.pieces > 1 else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the loops into which a loop was split.

    Attributes:
        schedule: the schedule of this loop.
        stores: indices of the whole loop's stores that it computes.
    """

    schedule: Schedule
    stores: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFission(Schedule):
    """Several kernels, each for some results of the loop.

    Attributes:
        values: the loop that writes the row values that sums need; None if they need none.
        count: the number of such row values.
        sums: the loops that add up.
        rest: the loop of the other results; it runs last, since they may alias operands.
    """

    values: Schedule | None = None
    count: int = 0
    sums: tuple[Part, ...] = ()
    rest: Part | None = None

    def details(self) -> list[str]:
        """See Schedule."""
        return [f"({one})" for one in self._parts()]

    def loops(self) -> list[Loop]:
        """See Schedule."""
        return [one.loop for one in self._parts()]

    def _parts(self) -> list[Schedule]:
        made = [*([self.values] if self.values else []), *(part.schedule for part in self.sums)]
        return [*made, *([self.rest.schedule] if self.rest else [])]
