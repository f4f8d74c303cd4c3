"""Which torch calls write into tensors that are there: the one answer, for all that must not lose or reorder them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Without an underscore, and yet they write into arguments: running statistics, observers, attributes.
_WRITERS = frozenset(
    (
        "batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats",
        "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "instance_norm",
        "fused_moving_avg_obs_fake_quant", "module_load", "backward", "__set__", "__delete__",
        "__setitem__", "__setstate__",
    )
)  # fmt: skip
#: They give a tensor's memory away, and whoever has it may write there without a call of torch.
_GIVERS = frozenset(("numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "data_ptr"))
#: They begin as in-place arithmetic does, and read.
_READERS = frozenset(("__invert__", "__index__", "__int__", "__iter__"))


def writes(func: Callable[..., Any]) -> bool:
    """Whether a torch function writes into a tensor whatever else it is given.

    A function of `torch.ops` is asked for its schema; any overload counts. Of the others torch says it in the name.
    """
    if hasattr(func, "overloads"):  # torch.ops.library.name
        return any(getattr(func, overload)._schema.is_mutable for overload in func.overloads())
    if hasattr(func, "_schema"):
        return bool(func._schema.is_mutable)
    name = getattr(func, "__name__", "")
    if name.startswith("__i"):
        return name not in _READERS
    return name in _WRITERS or (name.endswith("_") and not name.endswith("__"))


def gives_memory(func: Callable[..., Any]) -> bool:
    """Whether a torch function gives memory of a tensor to somebody who may write there unseen."""
    return getattr(func, "__name__", "") in _GIVERS


def told_to_write(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is told to write by an argument: `out=`, `inplace=True`, `max_norm=` of an embedding.

    torch.nn.functional hands its arguments on by name, however the user gave them.
    """
    return bool(kwargs.get("inplace")) or kwargs.get("out") is not None or kwargs.get("max_norm") is not None
