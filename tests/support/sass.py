"""Reads the output of nvdisasm: the kernels of a cubin, and the path that one of their warps usually executes.

The path of a warp is guessed from the text alone: it does not call functions (the slow path of a division), and of two
branches it takes the one that stores more packs of 16 bytes (the whole tile, not the last one).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_SECTION = re.compile(r"^\t\.section\t\.text\.(\S+?),", re.MULTILINE)
_ITEM = re.compile(
    r"^(?P<label>[.\w$]+):\s*$"
    r"|^\s*/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P[\dT]+\s+)?(?P<op>[A-Z][\w.]*)(?P<rest>[^;\n]*);",
    re.MULTILINE,
)
_REGISTER = re.compile(r"\bR(\d+)\b")
_TARGET = re.compile(r"`\(([^)]+)\)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction: its opcode with suffixes, its operands, the target first, and its predicate."""

    op: str
    operands: tuple[str, ...]
    guard: str = ""
    to: str = ""

    @property
    def kind(self) -> str:
        """The opcode without suffixes."""
        return self.op.split(".", 1)[0]

    @property
    def is_load(self) -> bool:
        return self.kind == "LDG"

    @property
    def bytes_moved(self) -> int:
        """Bytes that one thread moves in an access to global memory."""
        width = {"128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1, "8": 1}
        return next((width[p] for p in self.op.split(".") if p in width), 4)

    def writes(self) -> set[int]:
        """The registers that a load fills."""
        first = _REGISTER.search(self.operands[0])
        return set() if first is None else set(range(int(first[1]), int(first[1]) + max(self.bytes_moved // 4, 1)))

    def reads(self) -> set[int]:
        """Registers among the operands after the target; for a store, all of them."""
        given = self.operands if self.kind == "STG" else self.operands[1:]
        return {int(r) for text in given for r in _REGISTER.findall(text)}


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel.

    Attributes:
        registers: of each thread.
        frame: bytes of local memory of each thread.
        instructions: those of out-of-line functions at the end.
        labels: name -> the instruction after it.
    """

    entry: str
    registers: int
    frame: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def main_path(self, turns: Sequence[int] = ()) -> list[Instruction]:
        """The instructions of a warp from the start to the end: each loop once, or, for nested loops, the outermost
        first, as often as `turns` says. A loop of one turn is no loop.

        Raises:
            ValueError: there are other loops.
        """
        return self._turned(self._walk(0, len(self.instructions)), turns)

    def _turned(self, places: Sequence[int], turns: Sequence[int]) -> list[Instruction]:
        path = [self.instructions[i] for i in places]
        if not turns:
            return path
        loops = sorted(self._loops(places), key=lambda loop: loop[1] - loop[0])
        many = [n for n in reversed(turns) if n > 1]
        if len(loops) != len(many):
            raise ValueError(f"{self.entry}: {len(loops)} loops, {len(many)} expected")
        grown = 0
        for (start, end), count in zip(loops, many, strict=True):
            turn = path[start : end + 1 + grown]
            path[start : end + 1 + grown] = turn * count
            grown += len(turn) * (count - 1)
        return path

    def _loops(self, places: Sequence[int]) -> Iterator[tuple[int, int]]:
        """First and last place that each backward jump covers."""
        at = {place: k for k, place in enumerate(places)}
        for k, place in enumerate(places):
            x = self.instructions[place]
            start = at.get(self.labels.get(x.to, -1), k) if x.kind == "BRA" else k
            if start < k:
                yield start, k

    def main_loop(self, turns: Sequence[int] = ()) -> list[Instruction]:
        """One turn of the innermost loop that moves most 16-byte packs; empty if no loop moves any.

        `turns` are those of the loops inside it, as in `main_path`.
        """
        best: tuple[int, int, int, int] = (0, 0, 0, 0)
        for at, x in enumerate(self.instructions):
            start = self.labels.get(x.to, at) if x.kind == "BRA" else at
            if start < at:
                wide = sum(y.is_load and y.bytes_moved == 16 for y in self.instructions[start:at])
                best = max(best, (wide, start - at, start, at))
        wide, _, start, end = best
        if not wide:
            return []
        *places, back = self._walk(start, end + 1)
        return [*self._turned(places, turns), self.instructions[back]]

    def _walk(self, at: int, end: int) -> list[int]:
        path: list[int] = []
        seen: set[int] = set()
        while at < end and at not in seen:
            seen.add(at)
            x = self.instructions[at]
            path.append(at)
            if x.kind in ("EXIT", "RET") and not x.guard:
                break
            to = self.labels.get(x.to, -1) if x.kind == "BRA" else -1
            if to > at and (not x.guard or self._goes(at, to, end)):
                at = to
            elif to >= 0 and not x.guard:
                break  # backwards: where the walk began
            else:
                at += 1
        return path

    def _goes(self, at: int, to: int, end: int) -> bool:
        """True if a warp takes a conditional branch."""
        if to >= end:
            return False
        skipped, there = self.instructions[at + 1 : to], self._until_branch(to)
        if _is_narrow(skipped) != _is_narrow(self._block(to)):
            return _is_narrow(skipped)
        if _is_rare(skipped) or _is_rare(there):
            return _is_rare(skipped)
        return _stores(self._until_exit(to)) > _stores(self._until_exit(at + 1))

    def _block(self, at: int) -> list[Instruction]:
        end = next((i for i in range(at, len(self.instructions)) if self.instructions[i].kind in ("BRA", "EXIT")), None)
        return list(self.instructions[at:end])

    def _until_branch(self, at: int) -> list[Instruction]:
        found = []
        for x in self.instructions[at:]:
            found.append(x)
            if x.kind in ("BRA", "EXIT", "RET") and not x.guard:
                break
        return found

    def _until_exit(self, at: int) -> list[Instruction]:
        found = []
        for x in self.instructions[at:]:
            found.append(x)
            if x.kind in ("EXIT", "RET") and not x.guard:
                break
        return found


def asked_first(path: Iterable[Instruction]) -> int:
    """Bytes in 16-byte packs that a thread loads before any instruction waits for one of them."""
    pending: set[int] = set()
    asked = 0
    for x in path:
        if pending & x.reads():
            break
        if x.is_load and x.bytes_moved == 16:
            pending |= x.writes()
            asked += 16
    return asked


def _is_rare(part: Iterable[Instruction]) -> bool:
    """A part that calls a function and stores nothing, or ends the kernel in an impossible case."""
    listed = list(part)
    return any(x.kind in ("CALL", "BPT") for x in listed) and not _stores(listed)


def _is_narrow(part: Iterable[Instruction]) -> bool:
    """A part that moves single elements: for a last tile, while others move packs."""
    sizes = [x.bytes_moved for x in part if x.kind in ("LDG", "STG")]
    return bool(sizes) and max(sizes) < 16


def _stores(part: Iterable[Instruction]) -> int:
    return sum(x.kind == "STG" and x.bytes_moved == 16 for x in part)


def programs(listing: str) -> dict[str, Program]:
    """The kernels of a listing, by entry."""
    starts = list(_SECTION.finditer(listing))
    found = {}
    for match in starts:
        entry = match[1]
        end = listing.find("\n//--------------------- ", match.end())
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        for item in _ITEM.finditer(listing, match.end(), end if end > 0 else len(listing)):
            if item["label"]:
                labels[item["label"]] = len(instructions)
                continue
            to = _TARGET.search(item["rest"])
            operands = tuple(x.strip() for x in item["rest"].split(","))
            instructions.append(Instruction(item["op"], operands, (item["guard"] or "").strip(), to[1] if to else ""))
        found[entry] = Program(
            entry, _word(listing, "REGCOUNT", entry), _word(listing, "FRAME_SIZE", entry), tuple(instructions), labels
        )
    return found


def _word(listing: str, attribute: str, entry: str) -> int:
    match = re.search(
        rf"EIATTR_{attribute}(?:(?!EIATTR_).)*?index@\({re.escape(entry)}\)\s+/\*[0-9a-f]+\*/\s+\.word\s+0x([0-9a-f]+)",
        listing,
        re.DOTALL,
    )
    return int(match[1], 16) if match else 0
