"""What reductions of rows are called in C++, on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opgraph.ir import opdef
from opgraph.loops.loop import Statement
from opgraph.loops.passes import Pass


def row_of(s: Statement) -> opdef.Row:
    """How a statement reduces."""
    row = opdef.get(s.kind, where="emit").row
    assert row is not None
    return row


def reduction_members(passes: Sequence[Pass], ways: Mapping[str, str] | None = None) -> Iterator[str]:
    """The members of a functor that say how many reductions each pass makes, and how.

    Args:
        ways: how some results are made (og::How), where it is not as their records say.
    """
    ways = ways or {}
    chosen = "".join(f"pass == {number} ? {len(p.reductions)} : " for number, p in enumerate(passes))
    yield f"  static constexpr int reductions(int pass) {{ return {chosen}0; }}"
    hows = {
        (number, k): ways.get(s.result, row_of(s).how)
        for number, p in enumerate(passes)
        for k, s in enumerate(p.reductions)
    }
    chosen = "".join(
        f"pass == {number} && k == {k} ? og::How::{how} : " for (number, k), how in hows.items() if how != "add"
    )
    yield f"  static constexpr og::How how(int pass, int k) {{ return {chosen}og::How::add; }}"
