"""The op set: importing this package fills the registry of `opgraph.ir.opdef`."""

from opgraph.ops import (
    activation,
    arithmetic,
    bitwise,
    bounds,
    broadcasting,
    comparison,
    conversion,
    elementary,
    power,
    rectifiers,
    rounding,
    structural,
    trigonometry,
)

__all__ = [
    "activation",
    "arithmetic",
    "bitwise",
    "bounds",
    "broadcasting",
    "comparison",
    "conversion",
    "elementary",
    "power",
    "rectifiers",
    "rounding",
    "structural",
    "trigonometry",
]
