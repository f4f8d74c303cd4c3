"""Parts of patterns that several units share, in every spelling."""

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


def inverse_of(value: str) -> str:
    """1 / value."""
    return f"OneOf(Reciprocal({value}), Divide(1, {value}))"


def sigmoid_of_minus(value: str) -> str:
    """1 / (1 + exp(value)), spelled out."""
    return inverse_of(f"Add(1, Exp({value}))")
