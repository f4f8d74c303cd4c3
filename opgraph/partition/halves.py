"""A piece of pattern that GELU and swish share."""

from __future__ import annotations


def half_of(value: str) -> str:
    """x (1 + value) / 2 in every association, and multiplied out: x / 2 + x value / 2."""
    one = f"Add(1, {value})"
    half = "OneOf(Multiply(0.5, x), Divide(x, 2))"
    part = f"OneOf(Multiply(0.5, x, {value}), Divide(Multiply(x, {value}), 2), Multiply(Divide(x, 2), {value}))"
    both = f"Add(x, Multiply(x, {value}))"
    return (
        f"OneOf(Multiply(0.5, x, {one}), Divide(Multiply(x, {one}), 2), Multiply(Divide(x, 2), {one}), "
        f"Multiply(x, Divide({one}, 2)), Add({half}, {part}), Multiply(0.5, {both}), Divide({both}, 2))"
    )
