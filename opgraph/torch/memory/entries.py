"""From what was recorded to the entries of the report: whose memory it is, and what is one storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opgraph.runtime.providers.torch_dtypes import NAMES
from opgraph.runtime.providers.torch_internals import tree_iter
from opgraph.torch.memory.saved_recording import Attribute, Packed, Recorder
from opgraph.torch.memory.storage_trace import Watch, storage_of
from opgraph.torch.memory.sums import COSTS, INPUT, MADE, OUTSIDE, WEIGHT, Kept

_DTYPE_NAMES = {**NAMES, torch.float8_e4m3fn: "f8_e4m3", torch.float8_e5m2: "f8_e5m2"}


class Roles:
    """Whose memory a storage is.

    Args:
        model: its parameters and buffers are weights.
        inputs: what it is called with.
        existing: key -> storage of everything that existed before the run.
    """

    def __init__(self, model: object, inputs: Sequence[torch.Tensor], existing: Mapping[int, object]) -> None:
        self.existing = existing
        self._named: dict[int, tuple[str, str]] = {}
        self.input_bytes = 0
        for position, tensor in enumerate(inputs):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in self._named:
                self._named[storage._cdata] = (INPUT, f"input {position}")
                self.input_bytes += storage.nbytes()
        if isinstance(model, torch.nn.Module):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                storage = storage_of(tensor)
                if storage is not None:
                    self._named[storage._cdata] = (WEIGHT, name)

    def of(self, key: int, watch: Watch) -> tuple[str, str]:
        """The role of a storage and its name."""
        if key in self._named:
            return self._named[key]
        if key in self.existing:
            return OUTSIDE, ""
        birth = watch.births.get(key)
        return MADE, "" if birth is None else f"{birth.module}: {birth.op}" if birth.module else birth.op


def kept_entries(recorder: Recorder, roles: Roles, watch: Watch, outputs: Any) -> tuple[tuple[Kept, ...], int]:
    """The entries, and the bytes that are alive though neither kept nor an output.

    The recorder forgets the tensors that it holds, so that backward frees them as it would without it.
    """
    found: list[Packed | Attribute] = [*recorder.kept(), *recorder.attributes]
    recorder.attributes.clear()
    numbers: dict[object, int] = {}
    entries = []
    for saved in found:
        tensor, place = saved.tensor, saved.place
        storage = storage_of(tensor)
        key = id(tensor) if storage is None else storage._cdata
        size = tensor.numel() * tensor.element_size()
        whole = size if storage is None else storage.nbytes()
        role, name = roles.of(key, watch)
        first = key not in numbers
        entries.append(
            Kept(
                module=place.module, module_class=place.module_class, call=place.call, op=saved.op, slot=saved.slot,
                shape=tuple(tensor.shape), dtype=_DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), bytes=size,
                storage=numbers.setdefault(key, len(numbers)), storage_bytes=whole, role=role, name=name,
                counted=whole if first and role in COSTS else 0, hooked=isinstance(saved, Packed),
                where=saved.line[0], code=saved.line[1],
            )
        )  # fmt: skip
    known = set(numbers)
    for value in tree_iter(outputs):
        storage = storage_of(value) if isinstance(value, torch.Tensor) else None
        if storage is not None:
            known.add(storage._cdata)
    return tuple(entries), sum(size for key, size in watch.alive().items() if key not in known)
