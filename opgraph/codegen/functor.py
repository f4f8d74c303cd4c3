"""What is emitted for one kernel alone: the text of a functor, and what compiling it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Form(Enum):
    """How a kernel of the CPU goes over its elements, which tells how it is compiled."""

    LOOP = "one loop"
    BRANCHES = "two branches, of which each element takes one"  # opgraph.codegen.branches
    STRIPS = "statement by statement"  # opgraph.codegen.strips
    LANE_STRIPS = "statement by statement, 16 floats at a time"


@dataclass(frozen=True, slots=True)
class Functor:
    """Emitted text.

    Attributes:
        code: `struct Fused {...};`
        tags: line number within `code`, from 1 -> tag of the op that the line came from.
        form: how it goes over elements.
    """

    code: str
    tags: Mapping[int, int]
    form: Form
