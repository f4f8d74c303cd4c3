"""Modes of a graph: the engine kind, and the precision of float computations."""

from __future__ import annotations

from opgraph.errors import InvalidArguments, Unimplemented

ENGINE_KINDS = ("cpu", "cuda")
#: oneDNN's fpmath modes. Every op is computed in its own dtypes, which every mode allows.
FPMATH_MODES = ("strict", "bf16", "f16", "tf32", "any")


def checked_modes(engine: object, fpmath: object) -> str:
    """The engine kind of a graph, from a kind or from an engine of that kind.

    Raises:
        InvalidArguments: unknown engine kind or fpmath mode.
        Unimplemented: a fpmath mode other than "strict".
    """
    kind = getattr(engine, "kind", engine)
    if not isinstance(kind, str) or kind not in ENGINE_KINDS:
        raise InvalidArguments(
            f"unknown engine kind {engine!r}", where="Graph", fix=f"use one of {', '.join(ENGINE_KINDS)}"
        )
    if fpmath not in FPMATH_MODES:
        raise InvalidArguments(
            f"unknown fpmath mode {fpmath!r}", where="Graph", fix=f"use one of {', '.join(FPMATH_MODES)}"
        )
    if fpmath != "strict":
        raise Unimplemented(
            f"fpmath mode {fpmath!r}: every op is computed as precisely as its dtypes say",
            where="Graph",
            fix='use "strict", and cast to the dtype that is precise enough',
        )
    return kind
