"""Repairs attributes in files that are wrong for each op alone, if their intended meaning is known. Repairs are noted.

One case is known: scales for the weights of a grouped ConvTranspose. oneDNN writes one scale for each output channel of
all groups, along the axis of output channels, but this axis has only the channels of one group. If a group has one
output channel, the same scales along the axis of input channels are meant, each repeated for a group's input channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opgraph.onednn.document import UNKNOWN, Entry

#: More input channels than any weights have: a file may claim any number, and each takes a scale.
_MOST_CHANNELS = 1 << 20
#: By weights_format: the axes of input and output channels in the weights (negative: from the end).
_CHANNELS = {"IOX": (0, 1), "XOI": (-1, -2)}


def repaired(ops: Sequence[Entry]) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Attributes to use in place of the file's, and notes about them.

    Args:
        ops: the ops of a checked document.

    Returns: by op id, the attributes that differ; one sentence for each op.
    """
    suspects = {t["id"]: entry for entry in ops if _has_scales_to_spare(entry) for t in entry["outputs"]}
    changed: dict[int, dict[str, Any]] = {}
    notes = []
    for entry in ops if suspects else ():
        weights = entry["inputs"][1]["id"] if len(entry["inputs"]) > 1 else None
        scaled = suspects.get(weights) if entry["kind"] == "ConvTranspose" else None
        found = _by_input_channel(scaled, entry) if scaled is not None else None
        if scaled is not None and found is not None:
            changed[scaled["id"]] = found
            notes.append(
                f'{scaled["kind"]} "{scaled["name"]}": its scales are one for each of the groups of '
                f'{entry["kind"]} "{entry["name"]}"; taken along axis {found["axis"]} of the weights'
            )
    return changed, notes


def _value(entry: Entry, name: str, kind: str, default: Any) -> Any:
    """The value of an attribute; the default if it is missing or has another type, which is rejected later."""
    attr = entry.get("attrs", {}).get(name)
    return attr["value"] if attr is not None and attr["type"] == kind else default


def _has_scales_to_spare(entry: Entry) -> bool:
    if entry["kind"] != "Dequantize" or not entry["inputs"] or _value(entry, "qtype", "string", "") != "per_channel":
        return False
    shape, scales = entry["inputs"][0]["shape"], _value(entry, "scales", "f32[]", [])
    axis = _value(entry, "axis", "s64", 1)
    return bool(-len(shape) <= axis < len(shape) and shape[axis] == 1 < len(scales))


def _by_input_channel(scaled: Entry, user: Entry) -> dict[str, Any] | None:
    shape, scales = scaled["inputs"][0]["shape"], _value(scaled, "scales", "f32[]", [])
    axes = _CHANNELS.get(_value(user, "weights_format", "string", "XOI"))
    groups = _value(user, "groups", "s64", 1)
    if axes is None or len(shape) < 3 or groups != len(scales):
        return None
    if axes[1] % len(shape) != _value(scaled, "axis", "s64", 1) % len(shape):
        return None
    ins = shape[axes[0]]
    if ins == UNKNOWN or ins > _MOST_CHANNELS or ins % groups:
        return None
    zps = _value(scaled, "zps", "s64[]", [])
    found = {"axis": axes[0] % len(shape), "scales": _each(scales, ins // groups)}
    return {**found, "zps": _each(zps, ins // groups)} if zps else found


def _each(values: Sequence[Any], times: int) -> tuple[Any, ...]:
    return tuple(v for v in values for _ in range(times))
