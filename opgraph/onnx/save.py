"""ONNX out: a Graph becomes a model that stock runtimes run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

from opgraph.errors import InvalidArguments, Unimplemented
from opgraph.ir.graph import Graph
from opgraph.onnx.compose import composed
from opgraph.onnx.draft import Draft, Summary
from opgraph.onnx.load import load
from opgraph.onnx.rewrite import rewritten
from opgraph.onnx.signature import DOMAIN
from opgraph.onnx.source import Source
from opgraph.onnx.target import Target, checked_form, target_of
from opgraph.onnx.weights import with_weights
from opgraph.onnx.write import write

DEFAULT_TARGET = "onnxruntime==1.31"
#: Defaults of function attributes exist from IR 9 on, overloads and metadata of nodes from IR 10.
_IR_OF_DEFAULTS, _IR_OF_OVERLOADS = 9, 10

AnyModel = TypeVar("AnyModel", str, os.PathLike[str], onnx.ModelProto, ir.Model)


def save(
    graph: Graph,
    path: str | os.PathLike[str],
    form: str = "auto",
    target: str = DEFAULT_TARGET,
    functions: bool = False,
    opset: int | None = None,
    weights: Mapping[str, Any] | None = None,
) -> None:
    """Writes a graph as an ONNX model.

    A graph that was loaded from ONNX is written as its own model with the units replaced: names, metadata,
    initializers, external data, opset imports and symbolic dimensions stay. Any other graph becomes a new model.

    Args:
        graph: finalized by this call if need be.
        path: the file. Tensors that lay in data files stay in one: the same, if `path` is in its folder, otherwise
            `<path>.data`.
        form: how Swish is written. "decomposed": as Mul and Sigmoid. "function": as node Swish of domain opgraph with
            its body beside it, so that a stock runtime runs it. "standard": as ai.onnx Swish (opset 24). "contrib": as
            com.microsoft QuickGelu. "auto": what `target` runs fastest.
        target: the reader: "onnxruntime==1.31". Newer versions of format and opset than it reads are not written.
        functions: whether every other fused partition becomes a function, too.
        opset: of ai.onnx; as the source has it, or 22, when left out.
        weights: other values for constants, by name: arrays of their dtypes and shapes (NumPy, torch, DLPack). With
            form="decomposed" nothing else changes in a model that was loaded.

    Raises:
        Unimplemented: an op or type has no ONNX form, or none that the target reads; names it.
        ModelError: the file cannot be written. Then nothing has changed on the disk.
        InvalidArguments: unknown form or target; weights of a name that no constant has.
        InvalidDataType, InvalidShape: weights of another dtype or shape.
    """
    changed = with_weights(graph, weights) if weights and isinstance(graph, Graph) else graph
    written(changed, path, form, target, functions, opset)


def written(
    graph: Graph,
    path: str | os.PathLike[str],
    form: str = "auto",
    target: str = DEFAULT_TARGET,
    functions: bool = False,
    opset: int | None = None,
) -> Summary:
    """`save`, telling what was done."""
    draft = drafted(graph, form, target, functions, opset)
    write(draft, Path(os.fsdecode(path)))
    return draft.summary


def to_model(
    graph: Graph,
    form: str = "auto",
    target: str = DEFAULT_TARGET,
    functions: bool = False,
    opset: int | None = None,
) -> onnx.ModelProto:
    """The model that `save` would write, in memory with all its data."""
    return drafted(graph, form, target, functions, opset).proto()


def fuse(
    model: AnyModel,
    output: str | os.PathLike[str] | None = None,
    *,
    form: str = "auto",
    target: str = DEFAULT_TARGET,
    functions: bool = False,
    opset: int | None = None,
) -> AnyModel:
    """Loads a model, replaces its units, and gives back the same kind of thing.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        output: for a path: where to write. `name.fused.onnx` beside `name.onnx` when left out.
        form, target, functions, opset: as for `save`.

    Returns: the path written, or a new model.

    Raises:
        OpGraphError: as `load` and `save`.
    """
    draft = drafted(load(model), form, target, functions, opset)
    if isinstance(model, onnx.ModelProto):
        return draft.proto()
    if isinstance(model, ir.Model):
        return draft.ir_model()  # type: ignore[return-value]  # one of the constrained types
    source = Path(os.fsdecode(model))
    path = Path(os.fsdecode(output)) if output is not None else source.with_suffix(".fused" + source.suffix)
    write(draft, path)
    return str(path) if isinstance(model, str) else path  # type: ignore[return-value]  # the path kind that was given


def drafted(graph: Graph, form: str, target: str, functions: bool, opset: int | None) -> Draft:
    """The model of a graph, checked, with nothing written yet."""
    reader = target_of(target)
    summary = Summary(checked_form(form), target)
    if not isinstance(graph, Graph):
        raise InvalidArguments(f"a {type(graph).__name__} is no Graph", where="save", fix="pass a graph")
    graph.finalize()
    if functions and not isinstance(graph.source, Source):
        # Partitions are folded in a model, so it takes one first.
        graph = load(drafted(graph, form, target, False, opset).proto())
    if isinstance(graph.source, Source):
        draft = rewritten(graph, graph.source, form, reader, opset, functions, summary)
    else:
        draft = composed(graph, "function" if form == "auto" else form, reader, opset, summary)
    _stamp(draft, reader)
    draft.check()
    summary.nodes_after = len(draft.skeleton.graph.node)
    return draft


def _stamp(draft: Draft, target: Target) -> None:
    """Sets ir_version: as the source has it, as new as what was written needs, as old as the target reads."""
    model, summary = draft.skeleton, draft.summary
    calls = [node for node in model.graph.node if node.domain == DOMAIN]
    needed = 4
    if any(function.attribute_proto for function in model.functions):
        needed = _IR_OF_DEFAULTS
    if any(node.overload for node in calls):
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
