"""The registry of op records, by kind.

It starts empty; the first lookup imports `opgraph.ops`, which fills it. Nothing else in opgraph lists op names: tests,
spec pages, the command line, ONNX and torch all iterate over this registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opgraph.errors import InvalidGraphOp

if TYPE_CHECKING:
    from opgraph.ir.op import Op
    from opgraph.ir.opdef import OpDef

_REGISTRY: dict[str, OpDef] = {}


def register(opdef: OpDef) -> OpDef:
    """Adds a record; raises ValueError if its kind is registered already."""
    if opdef.kind in _REGISTRY:
        raise ValueError(f"op kind {opdef.kind} is defined twice")
    _REGISTRY[opdef.kind] = opdef
    return opdef


def all_ops() -> tuple[OpDef, ...]:
    """Every record, by name."""
    _fill()
    return tuple(_REGISTRY[kind] for kind in sorted(_REGISTRY))


def find(kind: str) -> OpDef | None:
    """The record of a kind, or None."""
    return _REGISTRY.get(kind) or _missed(kind)


def get(kind: str, *, where: str) -> OpDef:
    """The record of a kind.

    Raises:
        InvalidGraphOp: no such kind; the message names the nearest ones.
    """
    found = find(kind) if isinstance(kind, str) else None
    if found is None:
        import difflib  # only for the message

        by_lower = {k.lower(): k for k in _REGISTRY}
        close = difflib.get_close_matches(str(kind).lower(), by_lower, n=3, cutoff=0.5)
        near = [by_lower[c] for c in ([str(kind).lower()] if str(kind).lower() in by_lower else close)]
        nearest = f"did you mean {' or '.join(near)}? " if near else ""
        raise InvalidGraphOp(f"unknown op kind {kind!r}", where=where, fix=f"{nearest}`opgraph ops` lists the kinds")
    return found


def of(op: Op) -> OpDef:
    """The record of an op.

    Raises:
        InvalidGraphOp: no such kind; this cannot happen for an op of a graph.
    """
    found = _REGISTRY.get(op.kind)
    return found if found is not None else get(op.kind, where=op.label)


def _missed(kind: str) -> OpDef | None:
    _fill()
    return _REGISTRY.get(kind)


def _fill() -> None:
    import opgraph.ops  # noqa: F401  # imported late: a later stage
