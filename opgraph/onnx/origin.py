"""A model before it is trusted: its structure without the weights, and the weights, not yet read.

The structure is passed to onnx's checker and inliner, which copy and serialize their arguments. For a model of many
gigabytes, they thus process only kilobytes. In the structure, typed inputs stand for initializers above a small size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from opgraph.ir import dtypes
from opgraph.onnx.external import DataFolder, Extent
from opgraph.runtime.providers.onnx_region import tensor_proto

ModelLike: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model"

#: Initializers up to this many bytes stay in the structure: shape inference reads them.
SMALL = 1024
#: From this ir_version on, an initializer that is listed among the inputs is a default that a caller may override.
DEFAULTS_SINCE = 4


@dataclass(slots=True)
class Origin:
    """One model, split into structure and weights.

    Attributes:
        label: its name in messages: the file, or the kind of object.
        path: its file, if it has one.
        skeleton: the model; large initializers are inputs after the true ones.
        tensors: the initializers of the main graph, by name.
        inputs: the names of the true inputs.
        replaced: other values for some initializers, of the same dtypes and shapes.
        folded: the model before foreign functions were unfolded, if there were any.
        headers: the model's entries for the initializers in data files.
        sparse: the initializers that the model stores as sparse tensors; `tensors` holds them with their zeros.
    """

    label: str
    path: Path | None
    skeleton: onnx.ModelProto
    tensors: dict[str, ir.TensorProtocol]
    inputs: list[str]
    replaced: dict[str, np.ndarray] = field(default_factory=dict)
    folded: onnx.ModelProto | None = None
    headers: dict[str, onnx.TensorProto] = field(default_factory=dict)
    sparse: dict[str, onnx.SparseTensorProto] = field(default_factory=dict)
    _folders: dict[str, DataFolder] = field(default_factory=dict)

    def extent(self, name: str) -> Extent | None:
        """The location of an initializer in a data file (the former one, if it was replaced); else None."""
        tensor = self.tensors[name]
        if not isinstance(tensor, ir.ExternalTensor):
            return None
        return Extent(os.fspath(tensor.location), tensor.offset or 0, tensor.nbytes)

    def raw(self, name: str) -> np.ndarray:
        """The bytes of an initializer in ONNX's layout, as u8; memory-mapped if they are in a data file.

        Raises:
            ModelError: its file must not or cannot be read.
        """
        tensor, extent = self.tensors[name], self.extent(name)
        if name in self.replaced:
            return np.frombuffer(tensor_proto(name, self.replaced[name]).raw_data, np.uint8)  # two 4-bit items a byte
        if extent is None:
            return np.frombuffer(tensor.tobytes(), np.uint8)
        assert isinstance(tensor, ir.ExternalTensor)
        base = os.fspath(tensor.base_dir)
        folder = self._folders.setdefault(base, DataFolder(Path(base), self.path))
        return folder.read(extent, f'initializer "{name}" of {self.label}')

    def map_files(self) -> None:
        """Maps the data files and checks that they hold every initializer; reads nothing.

        Raises:
            ModelError: a file must not or cannot be read.
        """
        for name in self.tensors:
            if self.extent(name) is not None:
                self.raw(name)

    def files_are_current(self) -> bool:
        """True if no data file was replaced or written since it was mapped."""
        return all(folder.is_current() for folder in self._folders.values())

    def data_files(self) -> dict[str, set[str]]:
        """The data files of initializers, with links resolved, by the location in the model."""
        tensors = [t for t in self.tensors.values() if isinstance(t, ir.ExternalTensor)]
        found: dict[str, set[str]] = {}
        for base, location in {(os.fspath(t.base_dir), os.fspath(t.location)) for t in tensors}:
            found.setdefault(location, set()).add(os.path.realpath(os.path.join(base, location)))
        return found

    def files(self) -> set[str]:
        """The files of the model, with links resolved: its own, if it has one, and its data files."""
        own = {os.path.realpath(self.path)} if self.path is not None else set()
        return own.union(*self.data_files().values())

    def array(self, name: str) -> np.ndarray:
        """The value of an initializer, one element per item; read-only.

        Raises:
            ModelError: its file must not or cannot be read.
        """
        if name in self.replaced:
            return self.replaced[name]
        tensor = self.tensors[name]
        shape = tuple(int(d) for d in tensor.shape.numpy())
        if self.extent(name) is None:
            return np.asarray(tensor.numpy()).reshape(shape)
        known = dtypes.BY_ONNX.get(int(tensor.dtype))
        if known is None:  # onnx_ir has NumPy's dtype
            content = self.raw(name).tobytes()
            proto = onnx.TensorProto(dims=shape, data_type=int(tensor.dtype), raw_data=content)
            return np.asarray(ir.serde.deserialize_tensor(proto).numpy())
        if known.name in ("s4", "u4"):
            return _unpacked(self.raw(name), int(np.prod(shape)), known.numpy).reshape(shape)
        raw = self.raw(name)
        if raw.ctypes.data % known.itemsize:
            raw = raw.copy()  # the offset is not aligned for this dtype
        return raw.view(known.numpy).reshape(shape)


def header(name: str, tensor: ir.TensorProtocol) -> onnx.TensorProto:
    """The entry for a tensor without its data: name, type, doc string and metadata."""
    dims = [int(d) for d in tensor.shape.numpy()]
    doc_string = tensor.doc_string or None  # an empty field would be present, and compare unequal
    result = onnx.TensorProto(name=name, dims=dims, data_type=int(tensor.dtype), doc_string=doc_string)
    for key, value in tensor.metadata_props.items():
        result.metadata_props.add(key=key, value=value)
    return result


def with_data(stated: onnx.TensorProto, array: np.ndarray) -> onnx.TensorProto:
    """An entry with other data, of the same dtype and shape."""
    result = header(stated.name, ir.serde.deserialize_tensor(stated))
    result.raw_data = tensor_proto(stated.name, array).raw_data
    if not stated.HasField("name"):
        result.ClearField("name")
    return result


def _unpacked(raw: np.ndarray, size: int, dtype: np.dtype[np.generic]) -> np.ndarray:
    pairs = np.stack((raw & 15, raw >> 4), axis=-1).reshape(-1)[:size]
    if dtype == np.dtype(ml_dtypes.int4):
        return ((pairs ^ 8).astype(np.int8) - 8).astype(dtype)
    return pairs.astype(dtype)


def add_stand_in(skeleton: onnx.ModelProto, name: str, element: int, dims: list[int], inputs: list[str]) -> None:
    """Adds the input that stands for a large initializer, unless the input already exists."""
    if name not in inputs:
        skeleton.graph.input.append(onnx.helper.make_tensor_value_info(name, element, dims))
