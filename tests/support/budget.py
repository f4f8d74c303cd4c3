"""The cost of a kernel on a multiprocessor, relative to the time of its memory accesses: derived from machine code.

An H200 copies 4.3 TB/s (measured on one, counting bytes read and written). Each of its 132 multiprocessors, at 1.98
GHz, starts 128 lane-instructions per clock. Of these, 64 may go to the units for comparisons, selections, integers and
conversions, 64 to those for f64 and 16 to the special functions (CUDA C++ Programming Guide, throughput of native
arithmetic instructions, compute capability 9.0). For one bf16 in and one out, 4 bytes, that is 31 instructions, 15.6 of
the second kind and 3.9 special ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sass import Instruction

BYTES_A_SECOND = 4.3e12
CLOCKS_A_SECOND = 132 * 1.98e9
THREADS, REGISTERS, BLOCKS, WARP = 2048, 65536, 32, 32
#: Lanes per clock of one multiprocessor. "issue" is every instruction.
LANES = {"issue": 128, "compare": 64, "f64": 64, "special": 16}
_COMPARE = frozenset(
    ["FMNMX", "FSETP", "FSEL", "FSET", "SEL", "ISETP", "IADD3", "IADD", "IMNMX", "VIMNMX", "IABS", "LEA", "LOP", "LOP3",
     "SHF", "SHL", "SHR", "PRMT", "PLOP3", "POPC", "BFE", "BFI", "F2FP", "P2R", "R2P"]
)  # fmt: skip
_F64 = frozenset(["DADD", "DMUL", "DFMA", "DSETP", "DMNMX"])
_SPECIAL = frozenset(["MUFU", "F2F", "F2I", "I2F", "FRND"])


def unit(instruction: Instruction) -> str:
    """The narrower unit that an instruction occupies, besides the issue; "" for none."""
    kind = instruction.kind
    return "compare" if kind in _COMPARE else "f64" if kind in _F64 else "special" if kind in _SPECIAL else ""


@dataclass(frozen=True, slots=True)
class Share:
    """The time of the arithmetic relative to that of memory, and the unit that limits it."""

    of_memory: float
    limit: str


def share(path: Sequence[Instruction], elements: int, bytes_an_element: float) -> Share:
    """The slowest unit's time for a path that does `elements`, divided by the time of their bytes."""
    units = [unit(x) for x in path]
    counts = {name: units.count(name) for name in LANES} | {"issue": len(path)}
    allowed = {name: CLOCKS_A_SECOND * lanes / BYTES_A_SECOND * bytes_an_element for name, lanes in LANES.items()}
    ratios = {name: counts[name] / elements / allowed[name] for name in LANES}
    limit = max(ratios, key=lambda name: ratios[name])
    return Share(ratios[limit], limit)


def resident_blocks(registers: int, block: int, shared: int = 0) -> int:
    """Blocks that a multiprocessor of compute capability 9.0 holds: registers go by 8 per thread, warps to 4 parts."""
    warps = 4 * (REGISTERS // 4 // (-(-registers // 8) * 8 * WARP))
    by_shared = (227 * 1024) // (shared + 1024) if shared else BLOCKS
    return min(warps // (block // WARP), THREADS // block, BLOCKS, by_shared)
