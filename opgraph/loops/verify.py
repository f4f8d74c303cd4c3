"""The invariants of a loop, on which every stage after lowering relies."""

from __future__ import annotations

from opgraph.ir import dtypes, opdef
from opgraph.loops.loop import ALIGNMENTS, PER_ROW, Loop


def verify_loop(loop: Loop) -> Loop:
    """Checks the invariants: definitions before uses, known kinds, stores of existing values, sums to the shapes of
    loads.

    Raises:
        AssertionError: the loop is invalid, which is a bug of opgraph.
    """
    known: dict[str, str] = {}
    rows = loop.row_axes
    assert all(a < 0 for a in rows) and list(rows) == sorted(set(rows)), f"axes {rows}"
    for load in loop.loads:
        assert load.align in ALIGNMENTS and load.name not in known, load
        assert load.rows == (rows if load.align == "rows" else ()), load
        assert load.dtype == "s64" or not load.is_position, load
        known[load.name] = dtypes.get(load.dtype).name
    for statement in loop.statements:
        record = opdef.find(statement.kind)
        assert record is not None, f"{statement.kind} is no op"
        assert record.is_pointwise or statement.reduces, f"{statement.kind} is neither pointwise nor a reduction"
        assert not statement.reduces or (rows and statement.dtype in dtypes.FLOATS), f"{statement} has no row of floats"
        assert all(a in known for a in statement.args if isinstance(a, str)), f"{statement} uses what is not there yet"
        assert statement.result not in known, f"{statement.result} is defined twice"
        known[statement.result] = dtypes.get(statement.dtype).name
    loads = {load.name: load for load in loop.loads}
    for store in loop.stores:
        assert store.value in known, f"{store} stores nothing"
        shaped = all(name in loads and loads[name].align in ("right", "channel", "rows") for name in store.to or ())
        assert shaped, f"{store} has no shape"
        assert store.to is None or store.dtype in dtypes.FLOATS, f"{store} adds what is no float"
        assert store.per_row in PER_ROW and not (store.per_row and (store.to or not rows)), f"{store} has no rows"
    assert loop.stores, "a loop without a result"
    return loop
