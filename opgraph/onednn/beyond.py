"""Properties of an op that oneDNN does not have, from the list of differences: no file is written that it rejects."""

from __future__ import annotations

import re
from functools import cache

from opgraph.ir import dtypes
from opgraph.ir.op import Op
from opgraph.ir.opdef import OpDef
from opgraph.ops.onednn_differences import DIFFERENCES, UNSEEN, Listed


def own_attributes(record: OpDef) -> frozenset[str]:
    """The attributes that oneDNN does not have; they are omitted if they have their defaults."""
    return frozenset(name for listed in _listed(record.kind) for name in _named(listed, r"has attribute (\w+)"))


def beyond(op: Op, record: OpDef) -> str | None:
    """The part that oneDNN would reject of an op of one of its kinds, in words; None if it accepts the op."""
    given = dict(zip(record.input_names(len(op.inputs)), op.inputs, strict=True))
    for name in own_attributes(record):
        attr = record.attr(name)
        if attr is not None and op.attrs.get(name, attr.default) != attr.default:
            return f"{op.kind} with {name} = {op.attrs[name]}"
    for listed in _listed(record.kind):
        if listed.used_by is not None and listed.used_by(op):
            return f"this {op.kind}: {listed.reason}"
        for name in _named(listed, r"has input (\w+)"):
            if name in given:
                return f"the input {name} of {op.kind}"
        for name in _named(listed, r"attribute (\w+) is not required"):
            if name not in op.attrs:
                return f"{op.kind} without {name}"
        for most in _named(listed, r"takes any number of inputs, not (\d+)"):
            if len(op.inputs) > int(most):
                return f"{op.kind} of {len(op.inputs)} inputs"
    for port, tensor in (
        *zip(record.with_optional(len(op.inputs)), op.inputs, strict=True),
        *zip(record.outputs, op.outputs, strict=False),
    ):
        if (port.name, tensor.dtype) in _dtypes(record.kind):
            return f"{tensor.dtype} as {port.name} of {op.kind}"
    return None


@cache
def _listed(kind: str) -> tuple[Listed, ...]:
    return tuple(d for d in (*DIFFERENCES, *UNSEEN) if not d.is_onednn and kind in d.kinds)


@cache
def _dtypes(kind: str) -> frozenset[tuple[str, str]]:
    """Pairs of a port and a dtype that it may have only in opgraph."""
    pairs = (what.split(" may be ") for listed in _listed(kind) for what in listed.what if " may be " in what)
    return frozenset((port, dtype) for port, dtype in pairs if dtype in dtypes.BY_NAME)


def _named(listed: Listed, pattern: str) -> list[str]:
    return [found[1] for what in listed.what if (found := re.fullmatch(pattern, what))]
