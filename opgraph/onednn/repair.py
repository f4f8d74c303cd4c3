"""What files say that no single op means, put right where it is known what was meant; each repair is noted.

One is known: scales for the weights of a grouped ConvTranspose. oneDNN writes one scale for each output channel of all
groups, along the axis of output channels, which holds those of one group only. The same scales along the axis of input
channels, each as often as a group has of them, are what is meant, where a group has one output channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opgraph.onednn.document import Entry

#: By weights_format: the axes of input and output channels among the weights' (negative: from the end).
_CHANNELS = {"IOX": (0, 1), "XOI": (-1, -2)}


def repaired(ops: Sequence[Entry]) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Attributes to use instead of a file's, and what there is to say about it.

    Args:
        ops: of a checked document.

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


def _value(entry: Entry, name: str, default: Any) -> Any:
    attrs: Mapping[str, Entry] = entry.get("attrs", {})
    return attrs[name]["value"] if name in attrs else default


def _has_scales_to_spare(entry: Entry) -> bool:
    if entry["kind"] != "Dequantize" or _value(entry, "qtype", "") != "per_channel":
        return False
    shape, axis, scales = entry["inputs"][0]["shape"], _value(entry, "axis", 1), _value(entry, "scales", [])
    return bool(-len(shape) <= axis < len(shape) and shape[axis] == 1 < len(scales))


def _by_input_channel(scaled: Entry, user: Entry) -> dict[str, Any] | None:
    shape, scales = scaled["inputs"][0]["shape"], _value(scaled, "scales", [])
    groups, axes = _value(user, "groups", 1), _CHANNELS.get(_value(user, "weights_format", "XOI"))
    if axes is None or len(shape) < 3 or groups != len(scales) or axes[1] % len(shape) != _value(scaled, "axis", 1):
        return None
    ins = shape[axes[0]]
    if ins % groups:
        return None
    zps = _value(scaled, "zps", [])
    found = {"axis": axes[0] % len(shape), "scales": _each(scales, ins // groups)}
    return {**found, "zps": _each(zps, ins // groups)} if zps else found


def _each(values: Sequence[Any], times: int) -> tuple[Any, ...]:
    return tuple(v for v in values for _ in range(times))
