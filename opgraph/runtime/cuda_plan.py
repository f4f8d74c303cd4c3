"""The plans of CUDA kernel calls, computed once for each combination of shapes, strides and alignments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opgraph.schedule.cuda_tiles import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a plan.

    Attributes:
        function: CuPy's compiled function.
        grid: the number of blocks.
        args: numbers, and structs as arrays of one element; None in the places of addresses.
        passed: the same, converted for CuPy.
        operands: (place among `args`, place among loads and stores) of each address that a call provides.
        work: place of the workspace's address among `args`, if it takes one.
        block: the number of threads per block.
        inside: (place among `args`, bytes from the start of the workspace) of operands that lie there.
    """

    function: Any
    grid: tuple[int]
    args: tuple[Any, ...]
    passed: tuple[Any, ...]
    operands: tuple[tuple[int, int], ...]
    work: int | None = None
    block: tuple[int] = (BLOCK_SIZE,)
    inside: tuple[tuple[int, int], ...] = ()

    def filled(self, addresses: Sequence[int], work: int) -> list[Any]:
        """Returns the arguments of a call, given the address of each load and store."""
        args = list(self.passed)
        for place, operand in self.operands:
            args[place] = addresses[operand]
        if self.work is not None:
            args[self.work] = work
        for place, offset in self.inside:
            args[place] = work + offset
        return args


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches for one combination of shapes, strides and alignments, computed once.

    Attributes:
        launches: in order; none if there is nothing to compute.
        fixed: address of each load and store that no call provides, 0 for the others.
        moving: the places of those that a call provides: reads, then results.
        results: shape of each result.
        work: elements of a workspace that the launches share, and their dtype.
        cleared: the results that are 0 because their sums have no elements.
        keep: the memory that `fixed` points to.
        packs: for each of `moving`, whether kernels read or write it in packs, which must be aligned.
        alignment: the largest power of two up to 16 that divides the addresses of those in packs.
    """

    launches: tuple[Launch, ...]
    fixed: tuple[int, ...]
    moving: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]
    work: tuple[int, np.dtype[Any]]
    cleared: tuple[int, ...] = ()
    keep: tuple[Any, ...] = ()
    packs: tuple[bool, ...] = ()
    alignment: int = 16


def struct_of(words: Sequence[int]) -> np.ndarray:
    """A struct of 64-bit words as a kernel argument."""
    return np.array(words, np.int64).view(np.dtype((np.void, 8 * len(words))))
