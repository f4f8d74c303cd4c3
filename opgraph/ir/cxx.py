"""C++ for one element in the notation of records: "og::elu({src}, {alpha})", or "{src}" for an unchanged input."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_CALL = re.compile(r"og::(?P<function>\w+)\((?P<arguments>[^()]+)\)|\{[\w/]+\}")


@dataclass(frozen=True, slots=True)
class CxxCall:
    """A call of a function of `kernels/`; its text is C++.

    Attributes:
        function: its name within namespace og; "" for no function: the value is the argument.
        arguments: a C++ expression each.
    """

    function: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"og::{self.function}({', '.join(self.arguments)})" if self.function else self.arguments[0]


def cxx_call(template: str, values: Mapping[str, str]) -> CxxCall:
    """A record's expression with C++ filled in for the names in braces.

    Raises:
        ValueError: the expression is not a call of one function.
        KeyError: the expression has a name that `values` lacks.
    """
    found = _CALL.fullmatch(template)
    if found is None:
        raise ValueError(f"no call of one function of og: {template}")
    arguments = (found["arguments"] or template).split(", ")
    return CxxCall(found["function"] or "", tuple(a.format_map(values) for a in arguments))
