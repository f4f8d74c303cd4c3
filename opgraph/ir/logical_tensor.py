"""LogicalTensor: what an edge of the graph carries, without the memory behind it.

A value, as in oneDNN Graph: never edited, a new one with the same id takes its place. A constant is a LogicalTensor
with data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from opgraph.errors import InvalidArguments, InvalidDataType
from opgraph.ir import dtypes

#: One dimension: a size, a symbol ("batch", "seq + 1") whose uses must agree at run time, or None: unknown.
Dim: TypeAlias = int | str | None
#: All dimensions; None where not even their number is known.
Dims: TypeAlias = tuple[Dim, ...] | None

getter = property  # the class has a field called property, oneDNN's word

LAYOUTS = ("strided", "any", "undef", "opaque")
PROPERTIES = ("variable", "constant", "host_scalar", "undef")
_HOST_SCALAR_DTYPES = ("s32", "s64", "f32")


@dataclass(frozen=True, slots=True, eq=False)
class LogicalTensor:
    """One edge: an id, a dtype and dimensions.

    Args:
        id: unique in its graph; two mentions of one id must be equal.
        dtype: a name of `opgraph.ir.dtypes`, or "undef".
        dims: one entry per dimension: int, symbol or None (unknown); `None` for an unknown number of dimensions,
            `()` for a scalar.
        layout: "strided" (default), "any", "undef" or "opaque".
        property: "variable" (default), "constant", "host_scalar" or "undef".
        strides: in elements, for layout "strided"; row-major when left out.
        name: optional; names of inputs and outputs are how arrays are bound.
        data: the value of a constant; read-only.

    Raises:
        InvalidDataType: unknown dtype; a host scalar that is not s32, s64 or f32.
        InvalidArguments: negative id or dimension, unknown layout or property, strides that do not fit.

    Source: oneDNN Graph `logical_tensor`.
    """

    id: int
    dtype: str
    dims: Dims
    layout: str = "strided"
    property: str = "variable"
    strides: tuple[int, ...] | None = None
    name: str | None = None
    data: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.dtype != dtypes.UNDEF:
            dtypes.get(self.dtype, where=self.label)
        if type(self.id) is not int or self.id < 0:
            raise InvalidArguments(
                f"tensor id {self.id!r} is not a non-negative int", where=self.label, fix="use 0, 1, ..."
            )
        if self.dims is not None:
            object.__setattr__(self, "dims", tuple(_checked_dim(d, self.label) for d in self.dims))
        for value, known, what in ((self.layout, LAYOUTS, "layout"), (self.property, PROPERTIES, "property")):
            if value not in known:
                raise InvalidArguments(
                    f"unknown {what} {value!r}", where=self.label, fix=f"use one of {', '.join(known)}"
                )
        if self.property == "host_scalar" and (self.dims != () or self.dtype not in _HOST_SCALAR_DTYPES):
            raise InvalidDataType(
                f"a host scalar cannot be {self.type_text}",
                where=self.label,
                fix=f"use dims=() and one of {', '.join(_HOST_SCALAR_DTYPES)}",
            )
        if self.strides is not None:
            object.__setattr__(self, "strides", tuple(int(s) for s in self.strides))
            self._check_strides()
        if self.data is not None and self.data.flags.writeable:
            frozen = self.data.view()
            frozen.flags.writeable = False
            object.__setattr__(self, "data", frozen)

    def _check_strides(self) -> None:
        assert self.strides is not None
        if self.layout != "strided" or self.dims is None or len(self.strides) != len(self.dims):
            raise InvalidArguments(
                f"strides {self.strides} do not fit {self.type_text} with layout {self.layout!r}",
                where=self.label,
                fix="give one stride per dimension and layout='strided'",
            )
        if any(s < 0 for s in self.strides):
            raise InvalidArguments("negative strides", where=self.label, fix="strides are non-negative element counts")

    @getter
    def label(self) -> str:
        """How messages call this tensor."""
        return f'tensor "{self.name}"' if self.name else f"tensor {self.id}"

    @getter
    def type_text(self) -> str:
        """dtype and dimensions, as the graph's text form writes them: f32[8,?,batch]; f32[*] for unknown rank."""
        return self.dtype + dims_text(self.dims)

    @getter
    def ndim(self) -> int | None:
        return None if self.dims is None else len(self.dims)

    @getter
    def is_constant(self) -> bool:
        """Whether it has data."""
        return self.data is not None

    @getter
    def is_scalar_constant(self) -> bool:
        return self.data is not None and self.data.ndim == 0

    @getter
    def has_known_shape(self) -> bool:
        return self.dims is not None and all(type(d) is int for d in self.dims)

    def get_dims(self) -> tuple[Dim, ...]:
        """The dimensions.

        Raises:
            InvalidArguments: their number is unknown.
        """
        if self.dims is None:
            raise InvalidArguments(
                "the number of dimensions is unknown", where=self.label, fix="give dims, or compile first"
            )
        return self.dims

    def get_strides(self) -> tuple[int, ...]:
        """Strides in elements; row-major where none were given (a 0 dimension counts as 1, as in oneDNN).

        Raises:
            InvalidArguments: the layout is not strided, or a dimension is unknown.
        """
        if self.layout != "strided" or not self.has_known_shape:
            raise InvalidArguments("strides are unknown", where=self.label, fix="use layout='strided' and known dims")
        if self.strides is not None:
            return self.strides
        return row_major(self.shape)

    @getter
    def shape(self) -> tuple[int, ...]:
        """The dimensions of a tensor whose shape is known.

        Raises:
            InvalidArguments: a dimension is unknown.
        """
        if not self.has_known_shape:
            raise InvalidArguments(f"the shape {self.type_text} is not known", where=self.label, fix="give int dims")
        return self.dims  # type: ignore[return-value]  # every entry was just seen to be an int

    @getter
    def mem_size(self) -> int:
        """Bytes that the tensor spans, by its strides; s4 and u4 count half a byte, rounded up.

        Raises:
            InvalidArguments: dtype, shape or layout is unknown.
        """
        dtype = dtypes.get(self.dtype, where=self.label)
        if 0 in self.shape:
            return 0
        span = 1 + sum((d - 1) * s for d, s in zip(self.shape, self.get_strides(), strict=True))
        return (span + 1) // 2 if dtype.name in ("s4", "u4") else span * dtype.itemsize

    def is_equal(self, other: LogicalTensor) -> bool:
        """Whether all fields agree, ids included; data compare by bits, the name does not count."""
        return (
            (self.id, self.dtype, self.dims, self.layout, self.property, self.strides)
            == (other.id, other.dtype, other.dims, other.layout, other.property, other.strides)
        ) and same_bits(self.data, other.data)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogicalTensor):
            return NotImplemented
        return self is other or (self.is_equal(other) and self.name == other.name)

    def __hash__(self) -> int:
        return hash((self.id, self.dtype, self.dims))

    def with_(self, **changes: object) -> LogicalTensor:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]  # field names are checked by replace itself

    def __repr__(self) -> str:
        extra = "" if self.name is None else f", name={self.name!r}"
        return f"LogicalTensor({self.id}, {self.type_text}{extra}{', constant' if self.is_constant else ''})"


def _checked_dim(dim: Dim, where: str) -> Dim:
    if dim is None or (isinstance(dim, str) and dim):
        return dim
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or dim < 0:
        raise InvalidArguments(
            f"dimension {dim!r} is not a size", where=where, fix="use an int >= 0, a symbol (str) or None for unknown"
        )
    return int(dim)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def dims_text(dims: Dims) -> str:
    """[8,?,batch,"seq + 1"], or [*] for an unknown number of dimensions."""
    return "[*]" if dims is None else "[" + ",".join(_dim_text(d) for d in dims) + "]"


def _dim_text(dim: Dim) -> str:
    if dim is None:
        return "?"
    if isinstance(dim, int) or dim.isidentifier():
        return str(dim)
    return quoted(dim)


def quoted(text: str) -> str:
    """`text` as a JSON string: how names that are no identifiers, and string attributes, are printed."""
    import json  # costs a millisecond of `import opgraph`, and is rarely needed

    return json.dumps(text)


def same_bits(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Whether two constants have the same dtype, shape and bits (nan equals nan, 0.0 is not -0.0)."""
    if a is None or b is None or a is b:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and canonical_bytes(a) == canonical_bytes(b)


def canonical_bytes(a: np.ndarray) -> bytes:
    """The bits of an array in row-major order."""
    return np.ascontiguousarray(a).tobytes()


def size_of(shape: tuple[int, ...]) -> int:
    """Number of elements."""
    return math.prod(shape)
