"""What the checker of in-place mistakes says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class InplaceFinding:
    """One mistake.

    Attributes:
        kind: "operand": an expression reads a value that it overwrites itself, or under two names. "saved": a value
            kept for backward was overwritten. "hidden": a value with a gradient was changed where autograd does not
            look. "function": a custom autograd.Function writes in place what its backward needs. "backward": a
            backward overwrites what a second one needs. "argument": an argument that the caller still holds changed.
        file, line, code: the statement that overwrites.
        value: which value it changed, and where that value was made or kept.
        what: what is wrong.
        fix: what to write instead.
        silent: False where torch itself raises an error in backward.
    """

    kind: str
    file: str
    line: int
    code: str
    value: str
    what: str
    fix: str
    silent: bool = True

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line}: {self.what}\n    {self.code}\n"
            f"  value: {self.value}\n  fix:   {self.fix}"
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class InplaceReport:
    """All mistakes of one run, in the order of the statements that make them."""

    findings: tuple[InplaceFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __iter__(self) -> Iterator[InplaceFinding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) if self.findings else "no in-place mistake was found"

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"ok": self.ok, "findings": [asdict(f) for f in self.findings]}
