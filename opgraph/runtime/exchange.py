"""Arrays of other libraries in and out of the CPU engine, on the same memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from opgraph.errors import InvalidArguments

_PLAIN = (np.ndarray, np.generic, bool, int, float)


def imported(
    feeds: Mapping[Any, Any] | None, named: dict[str, Any]
) -> tuple[Mapping[Any, Any] | None, dict[str, Any], str | None]:
    """The same arguments with foreign arrays seen as NumPy arrays, and the kind to give back (None: NumPy).

    Raises:
        InvalidArguments: an array on a GPU, or one that NumPy cannot see.
    """
    kind = None
    for value in named.values():
        if not isinstance(value, _PLAIN):
            kind = _kind(value)
            break
    if feeds is not None and isinstance(feeds, Mapping):
        for value in feeds.values():
            if not isinstance(value, _PLAIN):
                kind = kind or _kind(value)
                break
    if kind is None:
        return feeds, named, None
    seen = None if feeds is None else {k: _as_numpy(v, str(k)) for k, v in feeds.items()}
    return seen, {k: _as_numpy(v, k) for k, v in named.items()}, kind


def exported(array: np.ndarray, kind: str) -> Any:
    """A result in the kind that the arguments had."""
    if kind == "torch":
        from opgraph.runtime.providers.torch import from_numpy

        return from_numpy(array)
    return array


def _kind(value: Any) -> str:
    torch = sys.modules.get("torch")
    return "torch" if torch is not None and isinstance(value, torch.Tensor) else "dlpack"


def _as_numpy(value: Any, name: str) -> Any:
    if isinstance(value, _PLAIN):
        return value
    try:
        if _kind(value) == "torch":
            from opgraph.runtime.providers.torch import to_numpy

            return to_numpy(value)
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
    except (RuntimeError, TypeError, BufferError, ValueError) as error:
        raise InvalidArguments(
            f"an array of {type(value).__module__} cannot be read on the CPU: {error}",
            where=f'input "{name}"',
            fix="move it to the CPU, or compile for its device",
        ) from None
    return value  # refused, with its type, where it is bound
