"""Rows of the table of units: gated units, which are names only, for a product with an activation unit inside."""

from __future__ import annotations

from opgraph.partition.examples import graph_of
from opgraph.partition.search import Match
from opgraph.partition.units import Rule


def _is_gate(match: Match) -> bool:
    """True if u is a gate: not the activation's own input, not the activation itself, and not a single number."""
    u = match.tensors["u"]
    both = {t.id for t in match.root.inputs}
    return u.id != match.tensors["x"].id and len(both) == 2 and not (u.data is not None and u.data.size == 1)


GATES: tuple[Rule, ...] = (
    Rule(
        name="swiglu",
        pattern="Multiply(OneOf(Swish(x, alpha=$a), Swish(x, f, alpha=$a)), u)",
        condition=_is_gate,
        takes=graph_of("Multiply(Multiply(x, Sigmoid(x)), u)"),
        leaves=graph_of("Multiply(Multiply(x, Sigmoid(x)), x)"),
        why="a gated linear unit (Shazeer, GLU variants improve transformer) without its matrix products",
    ),
    Rule(
        name="geglu",
        pattern="Multiply(GELU(x, mode=$m), u)",
        condition=_is_gate,
        takes=graph_of("Multiply(u, GELU(x))"),
        leaves=graph_of("Multiply(2, GELU(x))"),
        why="the same with GELU",
    ),
)
