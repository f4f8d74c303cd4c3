"""Schedule: how one kernel iterates over a loop at the sizes of one call.

`opgraph.schedule.table.choose_schedule` makes one; source text, launches and what is printed follow from it alone.
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

# The names; opgraph.schedule.table says when each applies.
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

#: Those of the CPU whose groups of neighbouring lanes are one row, and all whose lanes are rows.
GROUPS = frozenset({GROUPED, SPLIT_GROUPED})
INTERLEAVED = GROUPS | {TRANSPOSED_INNER, OUTER, SPLIT_OUTER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How one kernel iterates.

    Attributes:
        name: its row of `opgraph.schedule.table`.
        loop: what the kernel computes: the loop that was given, or another one of the same results.
        layout: the axes in the order in which the kernel walks them.
    """

    name: str
    loop: Loop
    layout: Layout

    def details(self) -> list[str]:
        """The numbers of this schedule, in words."""
        return []

    def loops(self) -> list[Loop]:
        """What its kernels compute, one loop after the other."""
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
        boxes: the tiles that threads take; None where any number of elements may be one.
        merged: two axes that are walked as one, with the operands that are spread for it.
        vectors: of 16 floats that a whole row is, where its elements stay in registers; else 0.
        stages: how often all boxes are done, one after the other.
        fits: whether there is room for all values of a row that wait for a later pass (rows one after the other, or
            neighbouring ones as lanes). The text for it takes three fifths of the time to compile.
    """

    boxes: Boxes | None = None
    merged: MergedAxes | None = None
    vectors: int = 0
    stages: int = 1
    fits: bool = False

    @property
    def key(self) -> Hashable:
        """What the source text depends on besides the loop: calls of other sizes share it."""
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
        narrow: rows are found in 32-bit arithmetic; flat positions always have 64 bits.
        group: elements of a pack whose arithmetic the text has, in a loop; 0: those of all packs.
        tile: elements of a flat space, or packs of rows, that one block does.
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
    """A CUDA kernel that adds up in tiles, and a second one for what the tiles leave.

    Attributes:
        tiling: the tiles.
        vector, unroll, group: as those of CudaPointwise.
        narrow: tiles are found in 32-bit arithmetic.
        blocks: that the compiler makes room for on a multiprocessor; 0: its own choice.
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
        rows: that a group of threads takes one after the other.
        stages: kernels that follow each other, where blocks share a row.
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
    """One loop of several that were one.

    Attributes:
        schedule: of this loop.
        stores: which stores of the whole loop it makes.
    """

    schedule: Schedule
    stores: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFission(Schedule):
    """Several kernels, each for some results of the loop.

    Attributes:
        values: the loop that writes down what sums need of each row; None where they need nothing.
        count: how many such row values there are.
        sums: the loops that add up.
        rest: the loop of the other results; it runs last, since they may lie over operands.
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
