"""What reductions of rows are called in C++, on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from opgraph.ir import opdef
from opgraph.loops.loop import Statement
from opgraph.loops.passes import Pass


def row_of(s: Statement) -> opdef.Row:
    """How a statement reduces."""
    row = opdef.get(s.kind, where="emit").row
    assert row is not None
    return row


def reduction_members(passes: Sequence[Pass], peaks: Collection[str] = ()) -> Iterator[str]:
    """The members of a functor that say how many reductions each pass makes, and how.

    Args:
        peaks: largest elements of which it counts whether all others are near.
    """
    chosen = "".join(f"pass == {number} ? {len(p.reductions)} : " for number, p in enumerate(passes))
    yield f"  static constexpr int reductions(int pass) {{ return {chosen}0; }}"
    chosen = "".join(
        f"pass == {number} && k == {k} ? og::How::{'peak' if s.result in peaks else row_of(s).how} : "
        for number, p in enumerate(passes)
        for k, s in enumerate(p.reductions)
        if row_of(s).how != "add"
    )
    yield f"  static constexpr og::How how(int pass, int k) {{ return {chosen}og::How::add; }}"
