"""What a call of a CUDA kernel needs, worked out once for each combination of shapes, strides and alignments."""

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
        grid: blocks.
        args: numbers, and structs as arrays of one element; None where an address goes.
        passed: the same as CuPy takes them.
        operands: (place among `args`, place among loads and stores) of each address that a call brings.
        work: place of the workspace's address among `args`, if it takes one.
        block: threads of a block.
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
        """The arguments of a call, given the address of each load and store."""
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
    """What one combination of shapes, strides and alignments needs, worked out once.

    Attributes:
        launches: in order; none where there is nothing to compute.
        fixed: address of each load and store that no call brings, 0 for the others.
        moving: the places of those that a call brings: reads, then results.
        results: shape of each result.
        work: elements of a workspace that the launches share, and their dtype.
        cleared: the results that are 0 because nothing is added up.
        keep: the memory that `fixed` names.
        packs: for each of `moving`, whether kernels read or write it in packs, which must be aligned.
        alignment: the power of two up to 16 that divides the addresses of those.
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
