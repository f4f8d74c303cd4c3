"""Splits a model into structure and weights, from a path, a ModelProto or an onnx_ir.Model."""

from __future__ import annotations

import os
import stat
from collections.abc import Container
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError

from opgraph.errors import InvalidArguments, ModelError
from opgraph.onnx.origin import SMALL, ModelLike, Origin, add_stand_in
from opgraph.onnx.sparse import Room, checked_dense
from opgraph.onnx.tensor_check import check_tensor

#: Fields of the graph that are not copied: their items are checked one by one.
_TAKEN = ("initializer", "sparse_initializer")


def taken_apart(model: ModelLike) -> Origin:
    """The structure and the weights of a model.

    Raises:
        ModelError: the file is missing, not a regular file, empty, or no ONNX protobuf.
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
        if descriptor.name not in _TAKEN:
            _copy_field(skeleton.graph, descriptor.name, value, label)
    inputs = [i.name for i in proto.graph.input]
    path = None if path is None else Path.cwd() / path  # read again later, perhaps from another working directory
    base = os.fspath(path.parent) if path is not None else ""
    tensors: dict[str, ir.TensorProtocol] = {}
    headers: dict[str, onnx.TensorProto] = {}
    for tensor in proto.graph.initializer:
        where = _place(tensor.name, tensors, label)
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
    room, sparse = Room(), dict[str, onnx.SparseTensorProto]()
    for stated in proto.graph.sparse_initializer:
        name, where = stated.values.name, _place(stated.values.name, tensors, label)
        array = checked_dense(stated, where, room)
        tensors[name], sparse[name] = ir.tensor(array, ir.DataType(stated.values.data_type), name=name), stated
        if array.nbytes > SMALL:
            add_stand_in(skeleton, name, stated.values.data_type, list(stated.dims), inputs)
        else:
            skeleton.graph.initializer.append(ir.to_proto(tensors[name]))
    return Origin(label, path, skeleton, tensors, inputs, headers=headers, sparse=sparse)


def _place(name: object, known: Container[object], label: str) -> str:
    """Describes an initializer for messages. Its name must be text, and not yet used."""
    if not isinstance(name, str):  # protobuf returns text that is no UTF-8 as bytes
        raise ModelError(f"{name!r:.100} is no UTF-8 text", where=label, fix="fetch the model again")
    where = f'initializer "{name}" of {label}'
    if name in known:
        raise ModelError("two initializers have this name", where=where, fix="give each tensor its own name")
    return where


def _copy_field(target: onnx.ModelProto | onnx.GraphProto, name: str, value: object, label: str) -> None:
    if isinstance(value, bytes):  # no field here has the type bytes, so this is text that is no UTF-8
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
            doc_string=tensor.doc_string,
            metadata_props={entry.key: entry.value for entry in tensor.metadata_props},
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
        tensors[name] = _found_from_anywhere(value.const_value)
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


def _found_from_anywhere(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The tensor, with an absolute path to the folder of its data file: the working directory may change."""
    if not isinstance(tensor, ir.ExternalTensor) or os.path.isabs(tensor.base_dir):
        return tensor
    return ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name or "",
        doc_string=tensor.doc_string,
        metadata_props=tensor.metadata_props,
        base_dir=os.path.join(os.getcwd(), tensor.base_dir),
    )
