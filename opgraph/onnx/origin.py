"""What a model is before it is trusted: its structure without the weights, and the weights, not yet read.

The structure goes to onnx's checker and inliner, which copy and serialize what they are given; a model of many
gigabytes passes through them in kilobytes this way. Initializers above a small size stand in it as typed inputs.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError

from opgraph.errors import InvalidArguments, ModelError
from opgraph.ir import dtypes
from opgraph.onnx.external import DataFolder, Extent
from opgraph.onnx.tensor_check import check_tensor

ModelLike: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model"

#: Initializers up to this many bytes stay in the structure: shape inference looks at them.
SMALL = 1024


@dataclass(slots=True)
class Origin:
    """One model, taken apart.

    Attributes:
        label: how messages call it: the file, or the kind of object.
        path: its file, if it has one.
        skeleton: the model; large initializers are inputs after the true ones.
        tensors: the initializers of the main graph, by name.
        inputs: the names of the true inputs.
        replaced: other values for some initializers, of their dtypes and shapes.
        folded: the model before functions of others were unfolded, if some were.
        headers: the initializers that lie in data files, as the model states them.
    """

    label: str
    path: Path | None
    skeleton: onnx.ModelProto
    tensors: dict[str, ir.TensorProtocol]
    inputs: list[str]
    replaced: dict[str, np.ndarray] = field(default_factory=dict)
    folded: onnx.ModelProto | None = None
    headers: dict[str, onnx.TensorProto] = field(default_factory=dict)
    _folders: dict[str, DataFolder] = field(default_factory=dict)

    def extent(self, name: str) -> Extent | None:
        """Where an initializer lies (or, replaced, lay) outside the model's own file."""
        tensor = self.tensors[name]
        if not isinstance(tensor, ir.ExternalTensor):
            return None
        return Extent(os.fspath(tensor.location), tensor.offset or 0, tensor.nbytes)

    def raw(self, name: str) -> np.ndarray:
        """The bytes of an initializer, as ONNX stores them: u8, mapped where it lies in a data file.

        Raises:
            ModelError: its file must not or cannot be read.
        """
        tensor, extent = self.tensors[name], self.extent(name)
        if name in self.replaced:
            return np.frombuffer(self.replaced[name].tobytes(), np.uint8)
        if extent is None:
            return np.frombuffer(tensor.tobytes(), np.uint8)
        assert isinstance(tensor, ir.ExternalTensor)
        base = os.fspath(tensor.base_dir)
        folder = self._folders.setdefault(base, DataFolder(Path(base), self.path))
        return folder.read(extent, f'initializer "{name}" of {self.label}')

    def data_folders(self) -> set[str]:
        """The folders, links resolved, from which data files are looked up."""
        tensors = [t for t in self.tensors.values() if isinstance(t, ir.ExternalTensor)]
        return {os.path.realpath(os.fspath(t.base_dir) or os.curdir) for t in tensors}

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
        if known is None:
            return self.raw(name)
        if known.name in ("s4", "u4"):
            return _unpacked(self.raw(name), int(np.prod(shape)), known.numpy).reshape(shape)
        raw = self.raw(name)
        if raw.ctypes.data % known.itemsize:
            raw = raw.copy()  # an offset that no element may start at
        return raw.view(known.numpy).reshape(shape)


def _unpacked(raw: np.ndarray, size: int, dtype: np.dtype[np.generic]) -> np.ndarray:
    pairs = np.stack((raw & 15, raw >> 4), axis=-1).reshape(-1)[:size]
    if dtype == np.dtype(ml_dtypes.int4):
        return ((pairs ^ 8).astype(np.int8) - 8).astype(dtype)
    return pairs.astype(dtype)


def taken_apart(model: ModelLike) -> Origin:
    """The structure and the weights of a model.

    Raises:
        ModelError: the file is missing, no file, empty, or no ONNX protobuf.
        InvalidArguments: `model` is neither a path, a ModelProto nor an onnx_ir.Model.
    """
    if isinstance(model, onnx.ModelProto):
        return _of_proto(model, "the ModelProto", None)
    if isinstance(model, ir.Model):
        return _of_ir(model)
    if isinstance(model, (str, os.PathLike)):
        path = Path(os.fsdecode(model))
        return _of_proto(_parsed(path), f"{str(path)!r}", path)
    raise InvalidArguments(
        f"a {type(model).__name__} is no model",
        where="opgraph.onnx",
        fix="pass a path, an onnx.ModelProto or an onnx_ir.Model",
    )


def _parsed(path: Path) -> onnx.ModelProto:
    where = f"{str(path)!r}"
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ModelError("this is no file", where=where, fix="give the path of an .onnx file")
        if found.st_size == 0:
            raise ModelError("the file is empty", where=where, fix="fetch or export the model again")
        if found.st_size >= 1 << 31:
            raise ModelError(
                f"the file has {found.st_size} bytes, and protobuf ends at 2 GiB",
                where=where,
                fix="export the model with external data",
            )
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"the file cannot be read: {reason}", where=where, fix="check the path") from None
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise ModelError(
            f"the file is no ONNX model: {error}", where=where, fix="fetch or export it again; it may be truncated"
        ) from None
    return proto


def _of_proto(proto: onnx.ModelProto, label: str, path: Path | None) -> Origin:
    skeleton = onnx.ModelProto()
    for descriptor, value in proto.ListFields():
        if descriptor.name != "graph":
            _copy_field(skeleton, descriptor.name, value, label)
    for descriptor, value in proto.graph.ListFields():
        if descriptor.name != "initializer":
            _copy_field(skeleton.graph, descriptor.name, value, label)
    inputs = [i.name for i in proto.graph.input]
    base = os.fspath(path.parent) if path is not None else ""
    tensors: dict[str, ir.TensorProtocol] = {}
    headers: dict[str, onnx.TensorProto] = {}
    for tensor in proto.graph.initializer:
        if not isinstance(tensor.name, str):  # protobuf hands over what is no UTF-8 as bytes
            raise ModelError(f"{tensor.name!r:.100} is no UTF-8 text", where=label, fix="fetch the model again")
        where = f'initializer "{tensor.name}" of {label}'
        if tensor.name in tensors:
            raise ModelError("two initializers have this name", where=where, fix="give each tensor its own name")
        check_tensor(tensor, where, external=True)
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if external and path is None:
            raise ModelError(
                "its data lie in a file, and a ModelProto does not say in which folder", where=where,
                fix="pass the model's path, or an onnx_ir.Model",
            )  # fmt: skip
        tensors[tensor.name] = _external(tensor, base, where) if external else ir.from_proto(tensor)
        if external:
            headers[tensor.name] = tensor
        if external or tensor.ByteSize() > SMALL:
            add_stand_in(skeleton, tensor.name, tensor.data_type, list(tensor.dims), inputs)
        else:
            skeleton.graph.initializer.append(tensor)
    return Origin(label, path, skeleton, tensors, inputs, headers=headers)


def _copy_field(target: onnx.ModelProto | onnx.GraphProto, name: str, value: object, label: str) -> None:
    if isinstance(value, bytes):  # the model has no field of bytes here: text that is no UTF-8
        raise ModelError(f"{name} is no UTF-8 text", where=label, fix="fetch or export the model again")
    if hasattr(value, "extend"):
        getattr(target, name).extend(value)
    elif hasattr(value, "CopyFrom"):
        getattr(target, name).CopyFrom(value)
    else:
        setattr(target, name, value)


def _external(tensor: onnx.TensorProto, base: str, where: str) -> ir.ExternalTensor:
    entries = {e.key: e.value for e in tensor.external_data}
    try:
        offset, length = int(entries.get("offset", "0")), int(entries["length"]) if "length" in entries else None
        result = ir.ExternalTensor(
            entries["location"],
            offset,
            length,
            ir.DataType(tensor.data_type),
            shape=ir.Shape(list(tensor.dims)),
            name=tensor.name,
            base_dir=base,
        )
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"its external data entry cannot be read: {error}", where=where, fix="export the model again"
        ) from None
    if length is not None and length != result.nbytes:
        raise ModelError(
            f"the data file holds {length} bytes for it, its shape needs {result.nbytes}",
            where=where,
            fix="export the model again: shape and data disagree",
        )
    return result


def add_stand_in(skeleton: onnx.ModelProto, name: str, element: int, dims: list[int], inputs: list[str]) -> None:
    """Adds the input that stands for a large initializer, unless it is an input already."""
    if name not in inputs:
        skeleton.graph.input.append(onnx.helper.make_tensor_value_info(name, element, dims))


def _of_ir(model: ir.Model) -> Origin:
    label = "the onnx_ir.Model"
    copy = model.clone()
    inputs = [v.name or "" for v in copy.graph.inputs]
    tensors: dict[str, ir.TensorProtocol] = {}
    for name, value in list(copy.graph.initializers.items()):
        if value.const_value is None:
            raise ModelError(
                f"initializer {name!r} has no value", where=label, fix="set its const_value, or make it an input"
            )
        tensors[name] = value.const_value
        if value.const_value.nbytes > SMALL or isinstance(value.const_value, ir.ExternalTensor):
            value.const_value, value.type = None, ir.TensorType(tensors[name].dtype)
            value.shape = ir.Shape(tensors[name].shape.numpy())
            del copy.graph.initializers[name]
            if name not in inputs:
                copy.graph.inputs.append(value)
    try:
        copy.graph.sort()
        skeleton = ir.to_proto(copy)
    except (ValueError, EncodeError) as error:
        raise ModelError(f"the model cannot be serialized: {error}", where=label, fix="repair the model") from None
    return Origin(label, None, skeleton, tensors, inputs)
