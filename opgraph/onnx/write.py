"""Files: a model and its data file, both complete or neither there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from google.protobuf.message import EncodeError
from onnx import TensorProto

from opgraph.errors import ModelError
from opgraph.onnx.draft import Draft
from opgraph.onnx.external import Extent
from opgraph.runtime.providers.onnx_region import tensor_proto

#: protobuf ends at 2 GiB; data beyond this many bytes leaves the model's own file.
_INLINE_BYTES = 1 << 30
#: Tensors up to this size stay in the model's own file in any case.
_INLINE_TENSOR = 1024
#: Page size, so that a reader may map each large tensor.
_ALIGNMENT = 4096


def write(draft: Draft, path: Path) -> None:
    """Writes a model, with tensors in a data file beside it where they lay in one before, or would not fit.

    Data files of the source are referred to where they are, if the model is written into their folder and its own
    data file is not one of them; otherwise `<name>.data` holds the data, and the values that were replaced in any
    case. Both files are complete before either takes its name.

    Raises:
        ModelError: it cannot be written; then nothing has changed.
    """
    with _reported(path):
        if not path.parent.is_dir() or (path.exists() and not path.is_file()):
            kind = "a folder" if path.is_dir() else "no file"
            reason = f"that is {kind}" if path.exists() else f"there is no folder {str(path.parent)!r}"
            raise ModelError(f"the model cannot be written: {reason}", where=f"{str(path)!r}", fix="give a file's path")
        proto = draft.structure()
        outside = _outside(draft)
        data_name = f"{path.name}.data"
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
                        data_file = stack.enter_context(_Pending(path.with_name(data_name)))
                    raw = _raw(draft, name)
                    offset = end if raw.nbytes < _ALIGNMENT else -(-end // _ALIGNMENT) * _ALIGNMENT
                    data_file.write_at(offset, raw)
                    location, size, end = data_name, raw.nbytes, offset + raw.nbytes
                    if extent is not None:
                        placed[extent] = (location, offset)
                proto.graph.initializer.append(_reference(draft, name, location, offset, size))
            model_file = stack.enter_context(_Pending(path))
            model_file.write_at(0, np.frombuffer(proto.SerializeToString(), np.uint8))
            _commit([f for f in (data_file, model_file) if f is not None])


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EncodeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ModelError(
            f"the model cannot be written: {reason}", where=f"{str(path)!r}", fix="check folder, rights and free space"
        ) from error


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


class _Pending:
    """A file under a temporary name in the folder where it is to be; gone at the end unless it took its name."""

    def __init__(self, final: Path) -> None:
        # A symbolic link stays one: the file that it points to is replaced.
        self.final = Path(os.path.realpath(final))
        self.backup: Path | None = None

    def __enter__(self) -> _Pending:
        handle, name = tempfile.mkstemp(prefix=f".{self.final.name[:100]}.", suffix=".tmp", dir=self.final.parent)
        self.temporary = Path(name)
        self._file = os.fdopen(handle, "wb")
        return self

    def write_at(self, offset: int, data: np.ndarray) -> None:
        """Writes bytes; a gap before them reads as zeros."""
        self._file.seek(offset)
        self._file.write(np.ascontiguousarray(data).data)

    def close(self) -> None:
        """Puts everything on the disk, with the mode that a new file (or the old one) has."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        mask = os.umask(0)
        os.umask(mask)
        mode = self.final.stat().st_mode & 0o777 if self.final.exists() else 0o666 & ~mask
        os.chmod(self.temporary, mode)

    def take_name(self) -> None:
        """Replaces the final file; the old one is kept until the end, for `give_back`."""
        if self.final.exists():
            self.backup = self.temporary.with_suffix(".old")
            os.link(self.final, self.backup)
        os.replace(self.temporary, self.final)

    def give_back(self) -> None:
        """Undoes `take_name`."""
        if self.backup is not None:
            os.replace(self.backup, self.final)
            self.backup = None
        else:
            self.final.unlink()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # it writes what is left first, and fails again on a full disk
            self._file.close()
        for leftover in (self.temporary, self.backup):
            if leftover is not None:
                leftover.unlink(missing_ok=True)


def _commit(files: list[_Pending]) -> None:
    for file in files:
        file.close()
    done: list[_Pending] = []
    try:
        for file in files:
            file.take_name()
            done.append(file)
    except OSError:
        for file in reversed(done):
            file.give_back()
        raise
