"""Binds the arrays of an execution to the ports of a compiled partition: by id, checked, never converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes
from opgraph.ir.constants import check_unmasked
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.runtime import array_exchange
from opgraph.runtime.engine import Engine
from opgraph.runtime.graph_arguments import fits


def bound(given: Mapping[int, Any], wanted: Mapping[int, LogicalTensor], what: str, engine: Engine) -> list[Any]:
    """Returns the arrays in the order of their ports.

    Raises:
        InvalidArguments: `given` is no dict, an id is missing or not that of a port, or an array does not fit.
    """
    if not isinstance(given, Mapping):
        raise InvalidArguments(
            f"got {type(given).__name__} where a dict is expected",
            where=f"execute {what}",
            fix="bind arrays by tensor id: {0: array}",
        )
    for id in given:
        if id not in wanted:
            raise InvalidArguments(
                f"no port has id {id}", where=f"execute {what}", fix=f"bind {', '.join(map(str, wanted))}"
            )
    arrays = []
    for id, tensor in wanted.items():
        if id not in given:
            raise InvalidArguments(
                f"tensor {id} is not bound",
                where=f"execute {what}",
                fix=f"give an array for id {id} ({tensor.type_text})",
            )
        if engine.kind == "cuda":
            from opgraph.runtime.cuda_arrays import seen

            array = seen(given[id], engine.index, f"{tensor.label} in {what}")
        else:
            array = _seen_on_host(given[id], tensor)
        arrays.append(_checked(array, tensor, what))
    return arrays


def _seen_on_host(array: Any, tensor: LogicalTensor) -> Any:
    seen = array_exchange.imported({tensor.id: array}, {})[0]
    return array if seen is None else seen[tensor.id]


def _checked(array: Any, tensor: LogicalTensor, what: str) -> Any:
    dtype = dtypes.get(tensor.dtype).numpy
    check_unmasked(array, f"{tensor.label} in {what}")
    is_array = hasattr(array, "dtype") and hasattr(array, "shape") and not isinstance(array, np.generic)
    # A shape that only a library infers may be unknown until it has run.
    if not is_array or array.dtype != dtype or not (tensor.dims is None or fits(array.shape, tensor.dims)):
        got = f"{array.dtype}{list(array.shape)}" if is_array else type(array).__name__
        raise InvalidArguments(
            f"got {got} for {tensor.type_text}",
            where=f"{tensor.label} in {what}",
            fix="give an array of this dtype and shape",
        )
    return array
