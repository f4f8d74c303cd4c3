"""Exact numbers in C++ source: the only place where a value of a model becomes source text."""

from __future__ import annotations

import math
import struct


def literal(value: bool | int | float, compute: str) -> str:
    """A C++ literal of type `compute` with exactly this value.

    Args:
        value: rounded to the type if it is not exactly representable in it.
        compute: "float", "double", "bool" or one of og::i64, i32, i8, u8.

    Floats are hexadecimal, which every compiler reads exactly; inf, nan and -0.0 are spelled by name.
    """
    if isinstance(value, bool) or compute == "bool":
        return "true" if value else "false"
    if compute in ("float", "double"):
        return _float_literal(float(value), compute)
    return _int_literal(int(value), compute)


def _float_literal(value: float, compute: str) -> str:
    if compute == "float":
        try:
            value = struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            value = math.copysign(math.inf, value)
    if math.isnan(value):
        return f"og::quiet_nan<{compute}>()"
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}og::infinity<{compute}>()"
    suffix = "f" if compute == "float" else ""
    short = value == int(value) and abs(value) < 1e6  # 1.0f reads better than 0x1p+0f
    text = f"{value:.1f}{suffix}" if short else f"{_short_hex(value)}{suffix}"
    return f"({text})" if text.startswith("-") else text


def _short_hex(value: float) -> str:
    mantissa, exponent = value.hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}"


def _int_literal(value: int, compute: str) -> str:
    if compute == "og::i64" and value == -(2**63):
        return "og::i64(-9223372036854775807LL - 1)"  # the positive literal would not fit
    return f"{compute}({value}{'LL' if compute == 'og::i64' else ''})"
