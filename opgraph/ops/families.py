"""Families own the rules; records only differ.

`pointwise(...)` supplies broadcasting and dtype rules, so that a new pointwise op writes neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.opdef import Attr, Attrs, Onnx, OpDef, Port, ShapeRule, register
from opgraph.ir.shapes import ShapeMismatch, broadcast

FLOAT = dtypes.FLOATS
NUMERIC = (*dtypes.FLOATS, *dtypes.INTS)
SIGNED = (*dtypes.FLOATS, "s64", "s32", "s8")
INTEGER = dtypes.INTS
ANY = dtypes.ARITHMETIC
BOOLEAN = ("boolean",)

#: oneDNN's attribute of every broadcasting op.
AUTO_BROADCAST = Attr(name="auto_broadcast", type="string", default="numpy", choices=("numpy", "none"))


def broadcast_rule(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """NumPy broadcasting of all inputs; identical shapes where auto_broadcast is "none"."""
    shapes = [t.dims for t in inputs]
    if attrs.get("auto_broadcast") == "none" and any(s != shapes[0] for s in shapes):
        raise ShapeMismatch(
            "shapes differ and auto_broadcast is none", "give inputs of one shape, or auto_broadcast='numpy'"
        )
    return (broadcast(shapes),)


def pointwise(
    kind: str,
    doc: str,
    *,
    inputs: Sequence[str | Port] = ("src",),
    outputs: Sequence[str | Port] = ("dst",),
    types: Mapping[str, tuple[str, ...]] | tuple[str, ...] = FLOAT,
    attrs: Sequence[Attr] = (),
    reference: Callable[..., Any],
    expression: str | Callable[[Attrs], str],
    torch: Callable[..., Any],
    onnx: tuple[Onnx, ...] | str = (),
    decomposition: str | None = None,
    cost: int = 1,
    commutative: bool = False,
    domain: tuple[tuple[float, float], ...] = ((-4.0, 4.0),),
    infer: ShapeRule = broadcast_rule,
    source: str = "",
) -> OpDef:
    """Registers one pointwise op; see OpDef for the arguments.

    `types` may be the dtypes of the one symbol T, which ports given by name alone have.
    """
    return register(
        OpDef(
            kind=kind,
            doc=doc,
            family="pointwise",
            inputs=tuple(Port(name=p) if isinstance(p, str) else p for p in inputs),
            outputs=tuple(Port(name=p) if isinstance(p, str) else p for p in outputs),
            types=types if isinstance(types, Mapping) else {"T": types},
            attrs=tuple(attrs),
            infer=infer,
            reference=reference,
            expression=expression,
            torch=torch,
            onnx=onnx,
            decomposition=decomposition,
            cost=cost,
            commutative=commutative,
            domain=domain,
            source=source,
        )
    )
