"""Dimensions (sizes, symbols and unknowns): their checks, text form and row-major strides."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from opgraph.errors import InvalidArguments

#: Sizes are s64, as oneDNN's dims are.
MAX_SIZE = 2**63 - 1
#: One dimension: a size, a symbol ("batch", "seq + 1") whose uses must agree at run time, or None if unknown.
Dim: TypeAlias = int | str | None
#: All dimensions; None if their number is unknown.
Dims: TypeAlias = tuple[Dim, ...] | None

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Words that the text form does not read as names.
_WORDS = frozenset({"const", "inf", "nan", "true", "false"})


def checked_dims(dims: Any, where: str) -> Dims:
    """Dimensions as a tuple; NumPy integers become ints.

    Raises:
        InvalidArguments: not a sequence of sizes, symbols and None.
    """
    if dims is None:
        return None
    if isinstance(dims, (str, bytes)) or not isinstance(dims, Iterable):
        raise InvalidArguments(
            f"dimensions {dims!r} are no sequence", where=where, fix="give one entry per dimension: (8, None)"
        )
    return tuple([d if type(d) is int and 0 <= d <= MAX_SIZE else _checked_dim(d, where) for d in dims])


def _checked_dim(dim: Any, where: str) -> Dim:
    if dim is None or (isinstance(dim, str) and dim):
        return dim
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or not 0 <= dim <= MAX_SIZE:
        shown = f"of {int(dim).bit_length()} bits" if isinstance(dim, int) and dim > MAX_SIZE else repr(dim)
        raise InvalidArguments(
            f"dimension {shown} is not a size",
            where=where,
            fix="use an int from 0 to 2^63 - 1, a symbol (str) or None for unknown",
        )
    return int(dim)


def checked_id(id: Any, what: str, where: str) -> int:
    """An id as an int.

    Raises:
        InvalidArguments: `id` is not a non-negative integer.
    """
    if isinstance(id, bool) or not isinstance(id, (int, np.integer)) or id < 0:
        raise InvalidArguments(f"{what} id {id!r} is not a non-negative int", where=where, fix="use 0, 1, ...")
    return int(id)


def dims_text(dims: Dims) -> str:
    """[8,?,batch,"seq + 1"], or [*] for an unknown number of dimensions."""
    return "[*]" if dims is None else "[" + ",".join([_dim_text(d) for d in dims]) + "]"


def _dim_text(dim: Dim) -> str:
    if dim is None:
        return "?"
    return str(dim) if isinstance(dim, int) else word(dim)


def word(name: str) -> str:
    """A name in the text form: unquoted if that reads back as a name, else quoted."""
    return name if _PLAIN.fullmatch(name) and name not in _WORDS else quoted(name)


def quoted(text: str) -> str:
    """`text` as a JSON string: the form of string attributes and of names that are not identifiers."""
    import json  # would add a millisecond to `import opgraph`, and is rarely needed

    return json.dumps(text)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements; a dimension of 0 counts as 1, as in oneDNN."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)
