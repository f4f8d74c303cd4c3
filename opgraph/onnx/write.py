"""Files: a model and its data file, both complete or neither there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
from onnx import TensorProto

from opgraph.onnx.draft import Draft
from opgraph.onnx.external import Extent
from opgraph.onnx.pending import Pending, checked_place, commit, reported
from opgraph.runtime.providers.onnx_region import tensor_proto

#: protobuf ends at 2 GiB; data beyond this many bytes leaves the model's own file.
_INLINE_BYTES = 1 << 30
#: Tensors up to this size stay in the model's own file in any case.
_INLINE_TENSOR = 1024
#: Page size, so that a reader may map each large tensor.
_ALIGNMENT = 4096


def write(draft: Draft, path: Path, library: Pending | None = None) -> None:
    """Writes a model, with tensors in a data file beside it where they lay in one before, or would not fit.

    Data files of the source are referred to where they are, if the model is written into their folder and its own
    data file is not one of them; otherwise `<name>.data` holds the data, and the values that were replaced in any
    case. Every file is complete before any takes its name.

    Args:
        library: what is to take its name together with the model.

    Raises:
        ModelError: it cannot be written; then nothing has changed.
    """
    checked_place(path, "model")
    with reported("model", path):
        proto = draft.structure()
        outside = _outside(draft)
        data_name = data_place(path).name
        stay = _same_folder(draft, path) and not _rewrites(draft, outside, data_name)
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
    """The data file that a model at `path` has, if it needs one."""
    return path.with_name(f"{path.name}.data")


def _outside(draft: Draft) -> set[str]:
    """The initializers that go to a data file: those that came from one, and all large ones if it gets too much."""
    origin = draft.origin
    result = {n for n in draft.kept if origin is not None and origin.extent(n) is not None}
    dense = [n for n in draft.kept if n not in result and draft.sparse(n) is None]
    sizes = {n: origin.tensors[n].nbytes for n in dense if origin is not None}
    sizes.update((n, a.nbytes) for n, a in draft.arrays.items())
    if sum(sizes.values()) > _INLINE_BYTES:
        result |= {n for n, size in sizes.items() if size > _INLINE_TENSOR}
    return result


def _same_folder(draft: Draft, path: Path) -> bool:
    """Whether the source's data files lie where the new model will look for them."""
    folders = draft.origin.data_folders() if draft.origin is not None else set()
    return folders == {os.path.realpath(path.parent)}


def _old_place(draft: Draft, name: str) -> Extent | None:
    """Where a tensor's data lie already."""
    if draft.origin is None or name in draft.arrays or name in draft.origin.replaced:
        return None
    return draft.origin.extent(name)


def _rewrites(draft: Draft, outside: set[str], data_name: str) -> bool:
    """Whether a new data file would take the name of one that some tensors lie in."""
    places = {name: _old_place(draft, name) for name in outside}
    anew = any(place is None for place in places.values())
    return anew and any(place is not None and Path(place.location) == Path(data_name) for place in places.values())


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
        proto.external_data.extend(kept)  # a checksum, say
        return proto
    else:
        assert draft.origin is not None
        tensor = draft.origin.tensors[name]
        proto = TensorProto(name=name, dims=[int(d) for d in tensor.shape.numpy()], data_type=int(tensor.dtype))
    proto.data_location = TensorProto.EXTERNAL
    for key, value in said.items():
        proto.external_data.add(key=key, value=value)
    return proto
