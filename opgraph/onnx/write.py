"""Writes a model and its data file: both completely, or neither."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import TensorProto

from opgraph.errors import ModelError
from opgraph.onnx.atomic_write import Pending, checked_place, commit, reported
from opgraph.onnx.draft import Draft
from opgraph.onnx.external import Extent
from opgraph.runtime.providers.onnx_region import tensor_proto

#: protobuf is limited to 2 GiB; if data exceed this many bytes, large tensors move to a data file.
_INLINE_BYTES = 1 << 30
#: Tensors up to this size stay in the model's own file in any case.
_INLINE_TENSOR = 1024
#: Page size, so that a runtime can map each large tensor.
_ALIGNMENT = 4096


def write(draft: Draft, path: Path, library: Pending | None = None) -> None:
    """Writes a model. Tensors go to a data file next to it if they were in one before, or would not fit otherwise.

    The model refers to the source's data files if a runtime can find them from the new path, they are still the files
    that were loaded, and the model's own data file is not one of them. Otherwise `<name>.data` holds the data. Replaced
    values are in `<name>.data` in any case.
    All files are complete before any file gets its final name.

    Args:
        library: the file that is renamed together with the model.

    Raises:
        ModelError: it cannot be written, or would overwrite a file of the source; then nothing has changed.
    """
    final = checked_place(path, "model")
    with reported("model", path):
        proto = draft.structure()
        outside = _outside(draft)
        data_name = data_place(path).name
        old = draft.origin.data_files() if draft.origin is not None else {}
        sources = set[str]().union(*old.values())
        anew = any(_old_place(draft, name) is None for name in outside)
        current = draft.origin is None or draft.origin.files_are_current()
        stay = current and _found_beside(old, path) and not (anew and os.path.realpath(data_place(path)) in sources)
        _check_sources_stay(draft, path, final, sources, writes_data=bool(outside) and (anew or not stay))
        with contextlib.ExitStack() as stack:
            data_file, end, placed = None, 0, dict[Extent, tuple[str, int]]()
            for name in (*draft.kept, *draft.arrays):
                extent = _old_place(draft, name)
                if name not in outside:
                    draft.add_to(proto.graph, name)
                    continue
                if extent is not None and stay:
                    location, offset, size = extent.location, extent.offset, extent.nbytes
                elif extent is not None and extent in placed:
                    location, offset = placed[extent]
                    size = extent.nbytes
                else:
                    if data_file is None:
                        data_file = stack.enter_context(Pending(data_place(path)))
                    raw = _raw(draft, name)
                    offset = end if raw.nbytes < _ALIGNMENT else -(-end // _ALIGNMENT) * _ALIGNMENT
                    data_file.write_at(offset, raw)
                    location, size, end = data_name, raw.nbytes, offset + raw.nbytes
                    if extent is not None:
                        placed[extent] = (location, offset)
                proto.graph.initializer.append(_reference(draft, name, location, offset, size))
            model_file = stack.enter_context(Pending(path))
            model_file.write_at(0, np.frombuffer(proto.SerializeToString(), np.uint8))
            commit([f for f in (data_file, model_file, library) if f is not None])


def data_place(path: Path) -> Path:
    """The path of the data file of a model at `path`."""
    return path.with_name(f"{path.name}.data")


def _outside(draft: Draft) -> set[str]:
    """The initializers for a data file: those that came from one, and all large ones if the total is too large."""
    origin = draft.origin
    result = {n for n in draft.kept if origin is not None and origin.extent(n) is not None}
    dense = [n for n in draft.kept if n not in result and draft.sparse(n) is None]
    sizes = {n: origin.tensors[n].nbytes for n in dense if origin is not None}
    sizes.update((n, a.nbytes) for n, a in draft.arrays.items())
    if sum(sizes.values()) > _INLINE_BYTES:
        result |= {n for n, size in sizes.items() if size > _INLINE_TENSOR}
    return result


def _found_beside(old: Mapping[str, set[str]], path: Path) -> bool:
    """True if a runtime that loads `path` can find and may read the source's data files at their locations.

    Args:
        old: the source's data files, by location.
    """
    allowed = [os.path.realpath(path.parent), os.path.dirname(os.path.realpath(path))]
    for location, files in old.items():
        found = os.path.realpath(path.parent / location)
        inside = any(Path(found).is_relative_to(folder) for folder in allowed)
        if files != {found} or not inside or not os.path.isfile(found):
            return False
    return bool(old)


def _check_sources_stay(draft: Draft, path: Path, final: str, sources: set[str], *, writes_data: bool) -> None:
    """Raises ModelError if a file to be written would overwrite one that the source needs.

    A model may be saved over itself, with a new data file that replaces its old one.
    """
    own = draft.origin.path if draft.origin is not None else None
    data = os.path.realpath(data_place(path))
    itself = own is None or os.path.realpath(own) == final
    taken = {*sources, *([os.path.realpath(own)] if own is not None else [])}
    if final in sources:
        what = "it would take the place of the source's data"
    elif writes_data and data in taken and not itself:
        what = f"its data file {os.path.basename(data)!r} would take the place of a file of the source"
    else:
        return
    raise ModelError(f"the model cannot be written: {what}", where=f"{str(path)!r}", fix="give another file name")


def _old_place(draft: Draft, name: str) -> Extent | None:
    """The current location of a tensor's data in a data file, if any."""
    if draft.origin is None or name in draft.arrays or name in draft.origin.replaced:
        return None
    return draft.origin.extent(name)


def _raw(draft: Draft, name: str) -> np.ndarray:
    if name in draft.arrays:
        return np.frombuffer(tensor_proto(name, draft.arrays[name]).raw_data, np.uint8)
    assert draft.origin is not None
    return draft.origin.raw(name)


def _reference(draft: Draft, name: str, location: str, offset: int, size: int) -> TensorProto:
    said = {"location": location, "offset": str(offset), "length": str(size)}
    if name in draft.arrays:
        proto = tensor_proto(name, draft.arrays[name])
        proto.ClearField("raw_data")
    elif draft.origin is not None and name in draft.origin.headers:
        proto = TensorProto()
        proto.CopyFrom(draft.origin.headers[name])
        if _old_place(draft, name) == Extent(location, offset, size):
            return proto
        kept = [e for e in proto.external_data if e.key not in said and name not in draft.origin.replaced]
        del proto.external_data[:]
        for key, value in said.items():
            proto.external_data.add(key=key, value=value)
        proto.external_data.extend(kept)  # such as a checksum
        return proto
    else:
        assert draft.origin is not None
        tensor = draft.origin.tensors[name]
        proto = TensorProto(name=name, dims=[int(d) for d in tensor.shape.numpy()], data_type=int(tensor.dtype))
    proto.data_location = TensorProto.EXTERNAL
    for key, value in said.items():
        proto.external_data.add(key=key, value=value)
    return proto
