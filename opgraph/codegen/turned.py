"""Operands on the CPU whose neighbours lie in the next row: what `kernels/host.h` must know of them to copy them."""

from __future__ import annotations

from opgraph.codegen.emitter import Emitter
from opgraph.ir import dtypes
from opgraph.loops.layout import STRIDED


def put_turned(emitter: Emitter) -> None:
    """Adds `strided_bytes`: how large the elements of operand k are, where it is read and they lie apart, else 0."""
    if emitter.sums:
        return  # their skeleton walks boxes
    strided = [x for x in emitter.element_loads() if emitter.kinds[x.name] == STRIDED and not x.is_position]
    if strided:
        places = [f"k == {emitter.positions[x.name]} ? {dtypes.BY_NAME[x.dtype].itemsize} : " for x in strided]
        emitter.put(f"  static constexpr int strided_bytes(int k) {{ return {''.join(places)}0; }}")
