"""Example inputs and attributes of an op, generated from its record for tests and `opgraph check`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from opgraph.errors import OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.ir.opdef import OpDef, Port


def input_dtypes(record: OpDef, dtype: str) -> tuple[str, ...] | None:
    """The dtype of each input where every dtype symbol of the inputs stands for `dtype`; None if one cannot."""
    found = []
    for port in record.inputs:
        allowed = record.types.get(port.type)
        if allowed is not None and dtype not in allowed:
            return None
        found.append(dtype if allowed is not None else port.type)
    return tuple(found)


def dtypes_of(record: OpDef) -> tuple[str, ...]:
    """The dtypes that all inputs with a free dtype may have at once."""
    return tuple(d for d in dtypes.ARITHMETIC if input_dtypes(record, d) is not None)


def forms(record: OpDef, dtype: str) -> list[tuple[tuple[Port, ...], dict[str, AttrValue]]]:
    """Ways to call the op on inputs of a dtype: the inputs that are given, and attributes.

    Optional values are given once as attributes, once as inputs. Then each attribute takes values other than its
    default, and each optional attribute is given alone, negative. Forms that the record's check rejects are left out.
    """
    required = tuple(p for p in record.inputs if not p.optional)
    attrs = record.example_attrs()
    optional = [a.name for a in record.attrs if a.optional and a.type == "f32"]
    attrs.update((name, float(i) if len(optional) > 1 else 2.0) for i, name in enumerate(optional))
    found = [(required, attrs)]
    if len(required) < len(record.inputs):
        found.append((record.inputs, record.default_attrs()))
    for attr in record.attrs:
        others: Sequence[AttrValue] = {"f32": (0.75, 2.5, -1.5), "bool": (not attr.default,), "s64": (1,)}.get(
            attr.type, ()
        )
        found += [(required, {**attrs, attr.name: v}) for v in (*others, *attr.choices) if v != attrs[attr.name]]
    if len(optional) > 1:
        rest = {name: value for name, value in attrs.items() if name not in optional}
        found += [(required, {**rest, name: -1.5}) for name in optional]
    return [(ports, chosen) for ports, chosen in found if _accepted(record, ports, chosen, dtype)]


def _accepted(record: OpDef, ports: Sequence[Port], attrs: dict[str, AttrValue], dtype: str) -> bool:
    if record.check is None:
        return True
    tensors = tuple(LogicalTensor(i, dtype if p.type in record.types else p.type, ()) for i, p in enumerate(ports))
    try:
        record.check(Op.locked(0, record.kind, tensors, (), "", attrs))
    except OpGraphError:
        return False
    return True


def arrays(
    record: OpDef, ports: Sequence[Port], dtype: str, shapes: Sequence[tuple[int, ...]], seed: int = 0
) -> list[np.ndarray]:
    """One array for each port, from the op's domain.

    Args:
        ports: the inputs that are given.
        dtype: the dtype for all symbols.
        shapes: one for each port.
    """
    rng = np.random.default_rng(seed)
    result = []
    for index, (port, shape) in enumerate(zip(ports, shapes, strict=True)):
        low, high = record.domain[index] if len(record.domain) > 1 else record.domain[0]
        target = dtypes.get(dtype if port.type in record.types else port.type)
        result.append(_array(rng, target, low, high, shape))
    return result


def _array(
    rng: np.random.Generator, target: dtypes.DType, low: float, high: float, shape: tuple[int, ...]
) -> np.ndarray:
    if target.category == "bool":
        return rng.random(shape) < 0.5
    if target.category == "int":
        info: Any = np.iinfo(target.numpy)
        first, last = (min(max(bound, info.min), info.max) for bound in (math.ceil(low), math.floor(high)))
        return np.asarray(rng.integers(first, last + 1, shape)).astype(target.numpy)
    return np.asarray(rng.uniform(low, high, shape)).astype(target.numpy)
