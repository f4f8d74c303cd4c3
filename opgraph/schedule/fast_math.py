"""Selects the statements of a loop that need no more accuracy than 16 bits: a GPU computes them with approximate
instructions (kernels/cuda/fast_math.h), a CPU with shorter polynomials (kernels/math/reduced_precision.h).

Only loops qualify whose floats are f16 or bf16 wherever they are stored to memory or loaded from it element by element.
(A number for the whole call may be f32, as parameters often are.) In these loops only statements qualify whose small
errors stay small: arguments of functions with jumps, such as a comparison or Floor, are computed exactly.
"""

from __future__ import annotations

from opgraph.ir import dtypes
from opgraph.loops.layout import UNIFORM, Variant
from opgraph.loops.loop import Loop, Statement

_NARROW = 2  # bytes


def approximate(loop: Loop, variant: Variant) -> frozenset[str]:
    """Results of the statements that may be approximate in a kernel variant."""
    types = loop.dtype_of()
    read = loop.reads()
    memory = [x.dtype for x, kind in zip(loop.loads, variant.operands) if x.name in read and kind != UNIFORM]
    memory += [s.dtype for s in loop.stores]
    if any(dtypes.BY_NAME[d].is_float and dtypes.BY_NAME[d].itemsize > _NARROW for d in memory):
        return frozenset()
    if any(dtypes.BY_NAME[s.dtype].compute == "double" for s in loop.statements):
        return frozenset()
    exact: set[str] = set()
    for statement in reversed(loop.statements):
        if statement.result in exact:
            exact.update(a for a in statement.args if isinstance(a, str))
        else:
            exact.update(_decides_by(statement, types))
    return frozenset(s.result for s in loop.statements if s.result not in exact and dtypes.BY_NAME[s.dtype].is_float)


def _decides_by(statement: Statement, types: dict[str, str]) -> list[str]:
    """The arguments in which the result jumps: its derivative by them is 0, or the result is not a float."""
    record = statement.record
    args = statement.args[:-1] if record.by_position else statement.args
    floats = [isinstance(a, str) and dtypes.BY_NAME[types[a]].is_float for a in args]
    if not dtypes.BY_NAME[statement.dtype].is_float:
        return [str(a) for a, is_float in zip(args, floats, strict=True) if is_float]
    names, found = record.input_names(len(args)), []
    for arg, name, is_float in zip(args, names, floats, strict=True):
        gradient = record.gradient.get(name) if isinstance(record.gradient, dict) else None
        if is_float and isinstance(gradient, str) and gradient == "0":
            found.append(str(arg))
    return found
