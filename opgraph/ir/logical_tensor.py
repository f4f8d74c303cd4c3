"""LogicalTensor: the description of one edge of the graph, without its memory.

It is an immutable value, as in oneDNN Graph: to change it, a new one with the same id replaces it. A constant is a
LogicalTensor with data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

import numpy as np

from opgraph.errors import InvalidArguments, InvalidDataType
from opgraph.ir import dtypes
from opgraph.ir.constants import check_unmasked, same_bits
from opgraph.ir.dims import Dim, Dims, checked_dims, checked_id, dims_text, row_major

__all__ = ["Dim", "Dims", "LogicalTensor", "dims_text", "port_name", "row_major"]

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
        dims: one entry per dimension: int, symbol or None (unknown); `None` if the number of dimensions is unknown,
            `()` for a scalar.
        layout: "strided" (default), "any", "undef" or "opaque".
        property: "variable" (default), "constant", "host_scalar" or "undef".
        strides: in elements, for layout "strided"; row-major if omitted.
        name: optional; arrays are bound to inputs and outputs by name.
        data: the value of a constant: a NumPy array, copied if it is writable; its property becomes "constant".

    Raises:
        InvalidDataType: unknown dtype; data of another dtype or shape.
        InvalidArguments: negative id or dimension, unknown layout or property, strides that do not fit, a host scalar
            that is not 0-d of s32, s64 or f32.

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
    #: The first graph that contained it (its `Tables`). The short form of `add_op` uses it to distinguish tensors of
    #: two graphs. Not part of the value.
    _owner: ReferenceType[object] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype.__class__ is not str or (self.dtype not in dtypes.BY_NAME and self.dtype != dtypes.UNDEF):
            dtypes.get(self.dtype, where=self.label)
        if type(self.id) is not int or self.id < 0:
            object.__setattr__(self, "id", checked_id(self.id, "tensor", f"tensor {self.id!r}"))
        if not self.name:
            object.__setattr__(self, "name", None)
        elif not isinstance(self.name, str):
            raise InvalidArguments(f"tensor name {self.name!r} is no text", where=f"tensor {self.id}", fix="give a str")
        if self.dims is not None:
            object.__setattr__(self, "dims", checked_dims(self.dims, self.label))
        if self.layout not in LAYOUTS:
            raise self._unknown("layout", self.layout, LAYOUTS)
        if self.property not in PROPERTIES:
            raise self._unknown("property", self.property, PROPERTIES)
        if self.property == "host_scalar" and (self.dims != () or self.dtype not in _HOST_SCALAR_DTYPES):
            raise InvalidArguments(
                f"a host scalar cannot be {self.type_text}",
                where=self.label,
                fix=f"use dims=() and one of {', '.join(_HOST_SCALAR_DTYPES)}",
            )
        if self.strides is not None:
            self._check_strides()
        if self.data is not None:
            self._check_data()

    def _unknown(self, what: str, value: object, known: tuple[str, ...]) -> InvalidArguments:
        return InvalidArguments(f"unknown {what} {value!r}", where=self.label, fix=f"use one of {', '.join(known)}")

    def _check_data(self) -> None:
        data = self.data
        if not isinstance(data, np.ndarray):
            raise InvalidArguments(
                f"the data of a constant are {type(data).__name__}", where=self.label, fix="give a NumPy array"
            )
        check_unmasked(data, self.label)
        wanted = None if self.dtype == dtypes.UNDEF else dtypes.get(self.dtype).numpy
        if data.shape != self.dims or (data.dtype != wanted if wanted is not None else data.ndim > 0):
            raise InvalidDataType(
                f"data of {data.dtype}{list(data.shape)} are no {self.type_text}",
                where=self.label,
                fix="give data of the declared dtype and dims",
            )
        if _may_change(data):
            # The caller keeps a writable array on that memory, so only a copy is sure to stay unchanged.
            data = data.copy()
            data.flags.writeable = False
            object.__setattr__(self, "data", data)
        if self.property == "variable":
            object.__setattr__(self, "property", "constant")

    def _check_strides(self) -> None:
        strides = self.strides
        if not isinstance(strides, (tuple, list)) or not all(
            isinstance(s, (int, np.integer)) and not isinstance(s, bool) and s >= 0 for s in strides
        ):
            raise InvalidArguments(
                f"strides {strides!r} are no element counts", where=self.label, fix="give one int >= 0 per dimension"
            )
        object.__setattr__(self, "strides", tuple(int(s) for s in strides))
        if self.layout != "strided" or self.dims is None or len(strides) != len(self.dims):
            raise InvalidArguments(
                f"strides {self.strides} do not fit {self.type_text} with layout {self.layout!r}",
                where=self.label,
                fix="give one stride per dimension and layout='strided'",
            )

    @getter
    def label(self) -> str:
        """The name of this tensor in messages."""
        return f'tensor "{self.name}"' if self.name else f"tensor {self.id}"

    @getter
    def type_text(self) -> str:
        """dtype and dimensions in the graph's text form: f32[8,?,batch]; f32[*] for unknown rank."""
        return self.dtype + dims_text(self.dims)

    @getter
    def ndim(self) -> int | None:
        """The number of dimensions, or None if unknown."""
        return None if self.dims is None else len(self.dims)

    @getter
    def is_constant(self) -> bool:
        """True if it has data."""
        return self.data is not None

    @getter
    def is_scalar_constant(self) -> bool:
        """True if it has data without dimensions."""
        return self.data is not None and self.data.ndim == 0

    @getter
    def has_known_shape(self) -> bool:
        """True if every dimension is an int."""
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
        """Strides in elements; row-major if none were given (a dimension of 0 counts as 1, as in oneDNN).

        Raises:
            InvalidArguments: the layout is not strided, or a dimension is unknown.
        """
        if self.layout != "strided" or not self.has_known_shape:
            raise InvalidArguments("strides are unknown", where=self.label, fix="use layout='strided' and known dims")
        if self.strides is not None:
            return self.strides
        return row_major(self.shape)

    @getter
    def odd_strides(self) -> tuple[int, ...] | None:
        """The strides if they are given and not row-major, else None."""
        if self.strides is None or (self.has_known_shape and self.strides == row_major(self.shape)):
            return None
        return self.strides

    @getter
    def shape(self) -> tuple[int, ...]:
        """The dimensions of a tensor whose shape is known.

        Raises:
            InvalidArguments: a dimension is unknown.
        """
        if not self.has_known_shape:
            raise InvalidArguments(f"the shape {self.type_text} is not known", where=self.label, fix="give int dims")
        return self.dims  # type: ignore[return-value]  # has_known_shape: every entry is an int

    @getter
    def mem_size(self) -> int:
        """Bytes that the tensor spans by its strides; s4 and u4 take half a byte, rounded up.

        Raises:
            InvalidArguments: the dtype, shape or layout is unknown.
        """
        if self.dtype == dtypes.UNDEF:
            raise InvalidArguments("the dtype is not known", where=self.label, fix="give a dtype")
        dtype = dtypes.get(self.dtype)
        if 0 in self.shape:
            return 0
        span = 1 + sum((d - 1) * s for d, s in zip(self.shape, self.get_strides(), strict=True))
        return (span + 1) // 2 if dtype.name in ("s4", "u4") else span * dtype.itemsize

    def is_equal(self, other: LogicalTensor) -> bool:
        """True if all fields except the name agree, ids included; data compare by bits.

        Row-major strides are equal to omitted strides.
        """
        return (
            (self.id, self.dtype, self.dims, self.layout, self.property, self.odd_strides)
            == (other.id, other.dtype, other.dims, other.layout, other.property, other.odd_strides)
        ) and same_bits(self.data, other.data)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogicalTensor):
            return NotImplemented
        return self is other or (self.is_equal(other) and self.name == other.name)

    def __hash__(self) -> int:
        return hash((self.id, self.dtype, self.dims))

    def with_(self, **changes: object) -> LogicalTensor:
        """A copy with some fields changed, checked like a new one."""
        if not changes.keys() <= _FIELDS:
            raise TypeError(f"a LogicalTensor has no {', '.join(changes.keys() - _FIELDS)}")
        copy = object.__new__(LogicalTensor)
        for name in self.__slots__:  # three times as fast as dataclasses.replace, noticeable in large graphs
            object.__setattr__(copy, name, changes[name] if name in changes else getattr(self, name))
        if "id" in changes:
            object.__setattr__(copy, "_owner", None)
        copy.__post_init__()
        return copy

    def __copy__(self) -> LogicalTensor:
        return self  # an immutable value

    def __deepcopy__(self, memo: object) -> LogicalTensor:
        return self

    def __reduce__(self) -> tuple[type[LogicalTensor], tuple[object, ...]]:
        return LogicalTensor, tuple(getattr(self, name) for name in self.__slots__ if name in _FIELDS)

    def __repr__(self) -> str:
        extra = "" if self.name is None else f", name={self.name!r}"
        return f"LogicalTensor({self.id}, {self.type_text}{extra}{', constant' if self.is_constant else ''})"


_FIELDS = frozenset(LogicalTensor.__slots__) - {"_owner"}


def _may_change(data: np.ndarray) -> bool:
    """True if the memory may be written: a read-only view may be of a writable array or buffer."""
    base: Any = data
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    while isinstance(base, memoryview) and base.readonly:
        base = base.obj
    if base is None or isinstance(base, bytes):
        return False
    try:
        return not memoryview(base).readonly
    except TypeError:  # a tensor of another library, which may write to it
        return True


def port_name(tensor: LogicalTensor) -> str:
    """The name by which arrays are bound: the tensor's name, or t<id>."""
    return tensor.name if tensor.name is not None else f"t{tensor.id}"
