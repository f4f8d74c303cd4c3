"""Writes a Graph as an ONNX model that stock runtimes run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

from opgraph.errors import InvalidArguments, Unimplemented
from opgraph.ir.graph import Graph
from opgraph.onnx.atomic_write import checked_place, commit, file_path
from opgraph.onnx.draft import Draft, Summary
from opgraph.onnx.export import composed
from opgraph.onnx.library.build import NATIVE, library_place, pending_library
from opgraph.onnx.load import imported, load
from opgraph.onnx.nodes import with_inner
from opgraph.onnx.request import DEFAULT_TARGET, Request, checked_cuda, checked_keep
from opgraph.onnx.rewrite import rewritten
from opgraph.onnx.source import Source
from opgraph.onnx.target import NEWEST, Target, checked_form, checked_opset, target_of
from opgraph.onnx.weights import with_weights
from opgraph.onnx.write import write

__all__ = ["DEFAULT_TARGET", "fuse", "save", "to_model", "written"]

#: First IR versions with defaults of function attributes (9), and with overloads and metadata of nodes (10).
_IR_OF_DEFAULTS, _IR_OF_OVERLOADS = 9, 10

AnyPath = str | os.PathLike[str]
AnyModel = TypeVar("AnyModel", str, os.PathLike[str], onnx.ModelProto, ir.Model)


def save(
    graph: Graph,
    path: AnyPath,
    form: str = "auto",
    target: str = DEFAULT_TARGET,
    functions: bool = False,
    opset: int | None = None,
    weights: Mapping[str, Any] | None = None,
    *,
    ort_library: AnyPath | None = None,
    march: str = NATIVE,
    cuda: bool = False,
    keep: Collection[str] = (),
) -> None:
    """Writes a graph as an ONNX model.

    A graph that was loaded from ONNX is written as its own model with the units replaced. Names, metadata,
    initializers, external data, opset imports and symbolic dimensions stay. Any other graph becomes a new model, with
    its units replaced in the same way.

    Args:
        graph: finalized by this call if necessary.
        path: the file. Tensors from data files stay in a data file: the same one if `path` is in its folder, otherwise
            `<path>.data`.
        form: how units are written. "decomposed": as they are, Swish ops as Mul and Sigmoid. "function": Swish as a
            node of domain opgraph with a function body in the model, so that a stock runtime runs it; other units as
            for "auto". "standard": as ai.onnx ops (Swish: opset 24). "contrib": as com.microsoft ops. "auto": in the
            form that `target` runs fastest, or as they are.
        target: the runtime, such as "onnxruntime==1.31". Newer format and opset versions than it reads are not written.
        functions: if True, every other fused partition becomes a function, too.
        opset: of ai.onnx. Default: that of the source, or 22.
        weights: other values for constants, by name: arrays of their dtypes and shapes (NumPy, torch, DLPack). With
            form="decomposed" nothing else changes in a model that was loaded.
        ort_library: path of a shared library to write in addition. If it is registered
            (`SessionOptions.register_custom_ops_library`), onnxruntime 1.17 or newer runs every fused partition and
            every swish as one compiled op. Partitions that reduce rows are included only where that is faster. Without
            the library, the functions in the model run instead.
        march: the processors that the library supports, by the C++ compiler's name.
        cuda: if True, the library also serves onnxruntime's CUDA provider (sm_80 and newer; needs NVRTC). It then
            holds the ops that both providers can run: partitions that reduce rows stay as they are.
        keep: names of units that keep their spelling: "swish", "gelu", "rms_norm" ..., "fused" for partitions, "rows"
            for partitions that reduce rows.

    Raises:
        Unimplemented: an op or type has no ONNX form, or none that the target reads; the message names it.
        ModelError: a file cannot be written, or the library would overwrite one of the model's files. Then nothing has
            changed on the disk.
        InvalidArguments: unknown form or target; weights of a name that no constant has; no op for a library to run;
            no path.
        InvalidDataType, InvalidShape: weights of another dtype or shape.
        DeviceError: there is no C++ compiler for the library, or no NVRTC for its CUDA kernels.
    """
    changed = with_weights(graph, weights) if weights and isinstance(graph, Graph) else graph
    request = _request(form, target, functions, opset, ort_library, keep, cuda)
    written(changed, path, request, ort_library=ort_library, march=march)


def written(
    graph: Graph,
    path: AnyPath,
    request: Request | None = None,
    *,
    ort_library: AnyPath | None = None,
    march: str = NATIVE,
) -> Summary:
    """Like `save`, but takes a request and returns a summary of the changes."""
    draft = drafted(graph, request or Request())
    put(draft, path, ort_library, march)
    return draft.summary


def put(draft: Draft, path: AnyPath, ort_library: AnyPath | None = None, march: str = NATIVE) -> None:
    """Writes a model and its library: both, or neither."""
    final = file_path(path, "path")
    if ort_library is None:
        write(draft, final)
        return
    checked_place(final, "model")  # checked first, because compiling takes seconds
    with pending_library(library_place(ort_library, final, draft.origin), draft.library, march) as library:
        write(draft, final, library)


def library_written(draft: Draft, path: AnyPath, march: str = NATIVE) -> None:
    """Writes only the library of a model.

    Raises:
        InvalidArguments: the library would have no ops, or `path` is not a path.
        DeviceError: there is no C++ compiler.
        ModelError: it cannot be written.
    """
    with pending_library(library_place(path, None, draft.origin), draft.library, march) as library:
        commit([library])


def to_model(
    graph: Graph,
    form: str = "auto",
    target: str = DEFAULT_TARGET,
    functions: bool = False,
    opset: int | None = None,
    *,
    keep: Collection[str] = (),
) -> onnx.ModelProto:
    """The model that `save` would write, in memory with all its data."""
    return drafted(graph, _request(form, target, functions, opset, None, keep)).proto()


def fuse(
    model: AnyModel,
    output: AnyPath | None = None,
    *,
    form: str = "auto",
    target: str = DEFAULT_TARGET,
    functions: bool = False,
    opset: int | None = None,
    ort_library: AnyPath | None = None,
    march: str = NATIVE,
    cuda: bool = False,
    keep: Collection[str] = (),
) -> AnyModel:
    """Loads a model, replaces its units, and returns the same kind of object.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        output: for a path: the file to write. Default: `name.fused.onnx` next to `name.onnx`.
        form, target, functions, opset, ort_library, march, cuda, keep: as for `save`.

    Returns: the path written, or a new model.

    Raises:
        OpGraphError: as `load` and `save`.
    """
    request = _request(form, target, functions, opset, ort_library, keep, cuda)
    draft = drafted(load(model), request)
    if isinstance(model, (onnx.ModelProto, ir.Model)):
        result = draft.proto() if isinstance(model, onnx.ModelProto) else draft.ir_model()
        if ort_library is not None:
            library_written(draft, ort_library, march)
        return result
    source = Path(os.fsdecode(model))
    path = file_path(output, "output") if output is not None else source.with_suffix(".fused" + source.suffix)
    put(draft, path, ort_library, march)
    return str(path) if isinstance(model, str) else path  # type: ignore[return-value]  # the caller's type of path


def _request(
    form: str,
    target: str,
    functions: bool,
    opset: int | None,
    library: object | None,
    keep: Collection[str],
    cuda: bool = False,
) -> Request:
    return Request(
        form=form,
        target=target,
        functions=functions,
        opset=checked_opset(opset),
        library=library is not None,
        cuda=checked_cuda(cuda, library),
        keep=checked_keep(keep),
    )


def drafted(graph: Graph, request: Request) -> Draft:
    """Returns the checked model of a graph; nothing is written yet."""
    reader = target_of(request.target)
    summary = Summary(checked_form(request.form), request.target)
    if not isinstance(graph, Graph):
        raise InvalidArguments(f"a {type(graph).__name__} is no Graph", where="save", fix="pass a graph")
    graph.finalize()
    plain = request.form == "decomposed" and not (request.functions or request.library)
    if not isinstance(graph.source, Source) and not plain:
        # Units and partitions are replaced in an ONNX model, so any other graph is converted to one first.
        graph = imported(composed(graph, request, reader, summary).as_origin())
        summary = Summary(request.form, request.target)
    if isinstance(graph.source, Source):
        draft = rewritten(graph, graph.source, request, reader, summary)
    else:
        draft = composed(graph, request, reader, summary)
    if reader.version > NEWEST:
        newest = f"onnxruntime=={NEWEST[0]}.{NEWEST[1]}"
        summary.notes.append(f"{request.target} is newer than all that was measured: taken to read what {newest} reads")
    _stamp(draft, reader)
    draft.check()
    summary.nodes_after = len(draft.skeleton.graph.node)
    return draft


def _stamp(draft: Draft, target: Target) -> None:
    """Sets ir_version: that of the source, raised to what the model needs, lowered to what the target reads."""
    model, summary = draft.skeleton, draft.summary
    nodes = with_inner([*model.graph.node, *(node for function in model.functions for node in function.node)])
    needed = 4
    if any(function.attribute_proto for function in model.functions):
        needed = _IR_OF_DEFAULTS
    if any(node.overload for node in nodes):
        needed = _IR_OF_OVERLOADS
    if needed > target.ir_version:
        raise Unimplemented(
            f"{target.name} reads ir_version {target.ir_version}, the functions need {needed}",
            where="save",
            fix='use form="decomposed", or a newer target',
        )
    summary.opset = next((e.version for e in model.opset_import if e.domain == ""), 0)
    if summary.opset > target.opset:
        raise Unimplemented(
            f"the model is of opset {summary.opset}, {target.name} reads up to {target.opset}",
            where="save",
            fix="name a newer target, or export the model for an older opset",
        )
    if model.ir_version > target.ir_version:
        summary.notes.append(f"ir_version {model.ir_version} was lowered to {target.ir_version} for {target.name}")
    model.ir_version = min(max(model.ir_version, needed), target.ir_version)
    summary.ir_version = model.ir_version
