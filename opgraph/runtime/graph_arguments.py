"""Binds a call's arrays to the inputs and outputs of a graph: by name, checked, never converted silently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from opgraph.errors import InvalidArguments, InvalidDataType, InvalidShape
from opgraph.ir import dtypes
from opgraph.ir.constants import check_unmasked
from opgraph.ir.logical_tensor import Dims, LogicalTensor, port_name
from opgraph.runtime.device_array import DeviceArray

_SCALARS = (bool, int, float, np.generic)


class Ports:
    """The inputs or outputs of a graph, prepared for checking many calls quickly.

    Args:
        tensors: in declaration order.
        what: "input" or "output", for messages.
        defaults: arrays for ports that a call gives nothing for, by name.
    """

    def __init__(self, tensors: Sequence[LogicalTensor], what: str, defaults: Mapping[str, Any] | None = None) -> None:
        self._defaults = {name: _read_only(array) for name, array in (defaults or {}).items()}
        self.tensors = tuple(tensors)
        self.names = tuple(port_name(t) for t in tensors)
        self.what = what
        self._by_id = {t.id: n for t, n in zip(self.tensors, self.names)}
        self._checks = tuple((name, _numpy_dtype(t), t.dims, t) for name, t in zip(self.names, self.tensors))
        self._symbolic = symbolic(self.tensors)

    def bind(self, feeds: Mapping[Any, Any] | None, named: Mapping[str, Any]) -> list[Any]:
        """Returns the arrays in declaration order.

        Args:
            feeds: by name or tensor id.
            named: by name.

        Raises:
            InvalidArguments: a name is missing or unknown, or a value is no array.
            InvalidDataType, InvalidShape: an array does not fit its declaration.
        """
        given = named if feeds is None else self.by_name(feeds, named)
        if self._defaults:
            given = {**self._defaults, **given}
        if len(given) != len(self.names):
            self._refuse_names(given)
        arrays = []
        for name, dtype, dims, tensor in self._checks:
            try:
                array = given[name]
            except KeyError:
                self._refuse_names(given)
            if dtype is None:
                arrays.append(array)
                continue
            if type(array) is not np.ndarray:
                array = self._array(array, tensor)
            if array.dtype is not dtype and array.dtype != dtype:
                raise InvalidDataType(
                    f"got an array of {array.dtype} for {tensor.type_text}",
                    where=f'{self.what} "{name}"',
                    fix=f"convert it: array.astype({dtype})",
                )
            if array.shape != dims and dims is not None and not fits(array.shape, dims):
                raise _refused(array.shape, dims, f'{self.what} "{name}"')
            arrays.append(array)
        if self._symbolic:
            check_symbols(self._symbolic, arrays, f"{self.what}s")
        return arrays

    def by_name(self, feeds: Mapping[Any, Any] | None, named: Mapping[str, Any]) -> Mapping[Any, Any]:
        """Returns the given arrays by name only.

        Raises:
            InvalidArguments: `feeds` is no dict, or a name is given twice.
        """
        if feeds is None:
            return named
        if not isinstance(feeds, Mapping):
            raise InvalidArguments(
                f"got {type(feeds).__name__} where a dict is expected",
                where=f"the {self.what}s",
                fix="pass arrays by name: f(x=array) or f({'x': array})",
            )
        merged = {self._by_id.get(k, k) if isinstance(k, int) else k: v for k, v in feeds.items()}
        twice = merged.keys() & named.keys()
        if len(merged) != len(feeds):  # by name and by id
            twice |= {name for id, name in self._by_id.items() if id in feeds and name in feeds}
        if twice:
            raise InvalidArguments(
                f"{', '.join(sorted(map(str, twice)))} is given twice",
                where=f"the {self.what}s",
                fix="give each array once",
            )
        return {**merged, **named}

    def _refuse_names(self, given: Mapping[Any, Any]) -> None:
        missing = [n for n in self.names if n not in given]
        unknown = [repr(n) for n in given if n not in self.names]
        wrong = (("missing", missing), ("unknown", unknown))
        raise InvalidArguments(
            "; ".join(f"{how} {self.what}s: {', '.join(names)}" for how, names in wrong if names),
            where=f"the {self.what}s of a call",
            fix=f"the graph's {self.what}s are {', '.join(self.names) or 'none'}",
        )

    def _array(self, value: Any, tensor: LogicalTensor) -> np.ndarray | DeviceArray:
        if type(value) is DeviceArray:
            return value
        if isinstance(value, np.ndarray):
            check_unmasked(value, f'{self.what} "{port_name(tensor)}"')
            return np.asarray(value)
        if isinstance(value, _SCALARS) and not tensor.dims and self.what != "output":
            return np.asarray(value) if isinstance(value, np.generic) else self._number(value, tensor)
        raise InvalidArguments(
            f"got {type(value).__name__} for {tensor.type_text}",
            where=f'{self.what} "{port_name(tensor)}"',
            fix="pass an array",
        )

    def _number(self, value: bool | int | float, tensor: LogicalTensor) -> np.ndarray:
        """Converts a Python number to a port's dtype: rounded for a float dtype; for any other, exact or refused."""
        dtype = dtypes.get(tensor.dtype)
        try:
            made = np.asarray(value, dtype.numpy)
        except (OverflowError, ValueError):  # too large, or NaN for an integer
            made = None
        if made is None or not (dtype.is_float or made == value):
            raise InvalidDataType(
                f"got {value!r} for {tensor.type_text}",
                where=f'{self.what} "{port_name(tensor)}"',
                fix="give a number that the dtype has",
            )
        return made


def _read_only(array: Any) -> Any:
    """A read-only view of a default: one that is also an output must not change for later calls."""
    if not isinstance(array, np.ndarray):
        return array
    seen = array.view()
    seen.flags.writeable = False
    return seen


def _numpy_dtype(tensor: LogicalTensor) -> np.dtype[Any] | None:
    """The dtype that arrays must have; None for types that only ONNX has (text, sequences, u16), and checks."""
    return None if tensor.dtype == dtypes.UNDEF else dtypes.get(tensor.dtype, where=tensor.label).numpy


def fits(shape: Sequence[int], dims: Sequence[int | str | None]) -> bool:
    """True if a shape has these dimensions, as far as they are numbers."""
    found = len(shape) == len(dims)
    for size, dim in zip(shape, dims):  # a generator would cost more than the comparisons
        found = found and (size == dim or not isinstance(dim, int))
    return found


#: Place and name of each port that has symbols, and its symbols: (axis, symbol).
Symbolic: TypeAlias = tuple[tuple[int, str, tuple[tuple[int, str], ...]], ...]


def symbolic(tensors: Sequence[LogicalTensor]) -> Symbolic:
    """The ports with symbols, for `check_symbols`; only those whose arrays are checked."""
    found = []
    for place, tensor in enumerate(tensors):
        axes = tuple((axis, dim) for axis, dim in enumerate(tensor.dims or ()) if isinstance(dim, str))
        if axes and tensor.dtype != dtypes.UNDEF:
            found.append((place, port_name(tensor), axes))
    return tuple(found)


def check_symbols(ports: Symbolic, arrays: Sequence[Any], what: str, of: str = "") -> None:
    """Raises InvalidShape if dimensions of one symbol differ; shapes must fit the declarations otherwise.

    Args:
        ports: the result of `symbolic`.
        arrays: one for each port, including those without symbols.
        what, of: text around the names in the message.
    """
    seen: dict[str, tuple[int, str]] = {}
    for place, name, axes in ports:
        shape = arrays[place].shape
        for axis, dim in axes:
            known, first = seen.setdefault(dim, (shape[axis], name))
            if known != shape[axis]:
                raise InvalidShape(
                    f'dimension "{dim}" is {known} and {shape[axis]}',
                    where=f'{what} "{first}" and "{name}"{of}',
                    fix="equal symbols must have equal sizes",
                )


def check_shape(shape: tuple[int, ...], dims: Dims, where: str) -> None:
    """Raises InvalidShape if an array's shape contradicts declared dimensions."""
    if dims is not None and not fits(shape, dims):
        raise _refused(shape, dims, where)


def _refused(shape: tuple[int, ...], dims: Dims, where: str) -> InvalidShape:
    declared = LogicalTensor(0, "f32", dims).type_text.removeprefix("f32")
    return InvalidShape(
        f"got shape {list(shape)} for {declared}",
        where=where,
        fix="arrays are never broadcast to a declared shape: reshape it, or declare other dims",
    )
