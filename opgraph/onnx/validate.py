"""Validates a model before its nodes are read: runs onnx's checker, and checks for defects that the checker accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto

from opgraph.errors import ModelError, Unimplemented
from opgraph.onnx.checker import run_checker
from opgraph.onnx.function_check import MAX_NODES, check_functions
from opgraph.onnx.nodes import subgraphs
from opgraph.onnx.origin import DEFAULTS_SINCE, Origin
from opgraph.onnx.sparse import refuse_in_subgraph
from opgraph.onnx.tensor_check import check_tensor
from opgraph.onnx.training_info import check_training

#: The oldest opset that the op records cover. Older ops that have changed since become Wildcards, not native ops.
OLDEST_OPSET = 13
#: The characters of an Einsum equation; some other characters make onnx 1.23 loop forever.
_EQUATION = re.compile(rb"[A-Za-z.,> -]*")


def validate(origin: Origin) -> None:
    """Checks a model as untrusted input; also writes the domain "ai.onnx" as "" throughout.

    Raises:
        ModelError: it is malformed; the message names the file and the node or tensor.
        Unimplemented: it is well-formed, but contains something that opgraph cannot represent.
    """
    skeleton = origin.skeleton
    _check_header(skeleton, origin.label)
    _write_plain_domains(skeleton)
    functions = {(f.domain, f.name, f.overload) for f in skeleton.functions}
    for scope in _scopes(skeleton, origin.label):
        for node in scope.nodes:
            _check_node(node, scope)
            if node.overload and (node.domain, node.op_type, node.overload) not in functions:
                raise ModelError(
                    f"no function has the overload {node.overload!r}",
                    where=f'{node.op_type} "{node.name}" of {scope.place}',
                    fix="repair or export the model again",
                )
        if scope.graph is not None:
            _check_graph(scope.graph, scope.place, main=scope.graph is skeleton.graph)
    _forget_listed_constants(origin)
    check_functions(skeleton, origin.label)
    try:
        run_checker(skeleton)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(
            f"onnx's checker refuses it: {_first_lines(error)}", where=origin.label, fix="repair or export it again"
        ) from None
    origin.map_files()


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500]


def _check_header(model: ModelProto, where: str) -> None:
    if not model.HasField("graph") or not model.opset_import:
        raise ModelError(
            "this is no ONNX model: it has no graph or no opset", where=where, fix="give the path of an .onnx file"
        )
    if not 3 <= model.ir_version <= onnx.IR_VERSION:
        raise ModelError(
            f"its ir_version is {model.ir_version}; the installed onnx knows 3 to {onnx.IR_VERSION}",
            where=where,
            fix="upgrade onnx, or export the model for an older version",
        )
    check_training(model, where)
    seen: set[str] = set()
    for entry in model.opset_import:
        _check_text(where, entry.domain)
        _write_plainly(entry)
        if entry.domain in seen:
            raise ModelError(
                f"it imports domain {entry.domain!r} twice", where=where, fix="keep one opset_import for each domain"
            )
        seen.add(entry.domain)
        newest = onnx.defs.onnx_opset_version()
        if entry.domain == "" and not 1 <= entry.version <= newest:
            raise ModelError(
                f"its opset is {entry.version}; the installed onnx knows 1 to {newest}",
                where=where,
                fix="upgrade onnx, or export the model for an older opset",
            )


def _write_plain_domains(model: ModelProto) -> None:
    for function in model.functions:
        _write_plainly(function)
        for entry in function.opset_import:
            _write_plainly(entry)


def _write_plainly(named: NodeProto | FunctionProto | OperatorSetIdProto) -> None:
    """Writes the domain ai.onnx as ""; an unset field stays unset."""
    if named.domain == "ai.onnx":
        named.domain = ""


@dataclass(frozen=True, slots=True)
class _Scope:
    """A list of nodes: the main graph, a subgraph, or the body of a function."""

    nodes: Sequence[NodeProto]
    place: str
    graph: GraphProto | None
    in_function: bool = False


def _scopes(model: ModelProto, label: str) -> Iterator[_Scope]:
    """Every body of a model, subgraphs and functions included."""
    waiting = [_Scope(model.graph.node, label, model.graph)]
    for function in model.functions:
        _check_text(label, function.domain, function.name, function.overload, *function.input, *function.output)
        name = f'{label}, function "{function.domain}::{function.name}"'
        waiting.append(_Scope(function.node, name, None, in_function=True))
    while waiting:
        scope = waiting.pop()
        yield scope
        for node in scope.nodes:
            for graph in subgraphs(node):
                place = f'{label}, inside {node.op_type} "{node.name}"'
                waiting.append(_Scope(graph.node, place, graph, scope.in_function))


def _check_text(where: str, *texts: object) -> None:
    """Refuses strings that are no UTF-8; protobuf returns these as bytes."""
    for text in texts:
        if not isinstance(text, str):
            raise ModelError(f"{text!r:.100} is no UTF-8 text", where=where, fix="fetch or export the model again")


def _check_node(node: NodeProto, scope: _Scope) -> None:
    _check_text(scope.place, node.op_type, node.domain, node.name, node.overload, *node.input, *node.output)
    _check_text(scope.place, *(a.name for a in node.attribute), *(a.ref_attr_name for a in node.attribute))
    _check_text(scope.place, node.doc_string, *(t for p in node.metadata_props for t in (p.key, p.value)))
    _write_plainly(node)
    where = f'{node.op_type} "{node.name}" of {scope.place}'
    for attribute in node.attribute:
        if node.op_type == "Einsum" and attribute.name == "equation" and not _EQUATION.fullmatch(attribute.s):
            raise ModelError(
                f"its equation {attribute.s!r:.100} is none", where=where, fix='write it as in "ij, jk -> ik"'
            )
        if attribute.ref_attr_name and not scope.in_function:
            raise ModelError(
                f"attribute {attribute.name} refers to an attribute of a function, outside one",
                where=where,
                fix="give the attribute a value",
            )
        for tensor in (attribute.t, *attribute.tensors) if attribute.HasField("t") or attribute.tensors else ():
            check_tensor(tensor, f"attribute {attribute.name} of {where}", external=False)


def _check_graph(graph: GraphProto, place: str, *, main: bool) -> None:
    if len(graph.node) > MAX_NODES:
        raise Unimplemented(f"it has {len(graph.node)} nodes", where=place, fix=f"opgraph reads up to {MAX_NODES:,}")
    refuse_in_subgraph(graph.sparse_initializer, place)  # those of the main graph were already removed
    for value in (*graph.input, *graph.output, *graph.value_info):
        _check_text(place, value.name, *(d.dim_param for d in value.type.tensor_type.shape.dim))
        if not value.type.HasField("tensor_type"):
            continue
        if any(d.dim_value < 0 for d in value.type.tensor_type.shape.dim):
            raise ModelError(
                "a dimension is negative",
                where=f'value "{value.name}" of {place}',
                fix="leave unknown dimensions open, or give them a dim_param",
            )
    names: set[str] = set()
    for tensor in () if main else graph.initializer:  # those of the main graph were already checked
        where = f'initializer "{tensor.name}" of {place}'
        check_tensor(tensor, where, external=False)
        if tensor.name in names:
            raise ModelError("two initializers have this name", where=where, fix="give each tensor its own name")
        names.add(tensor.name)


def _forget_listed_constants(origin: Origin) -> None:
    """Removes initializers from the inputs below IR 4, where the format required them there without any meaning.

    Since IR 4, a listed initializer is a default that a caller may override.
    """
    if origin.skeleton.ir_version < DEFAULTS_SINCE:
        origin.inputs[:] = [name for name in origin.inputs if name not in origin.tensors]


def opsets(model: ModelProto) -> dict[str, int]:
    """The opset version of each domain."""
    return {entry.domain: entry.version for entry in model.opset_import}


def is_unchanged(op_type: str, version: int) -> bool:
    """True if an op of ai.onnx has the same meaning in an old opset as in the oldest one that the records cover."""
    return version >= OLDEST_OPSET or _since(op_type, version) == _since(op_type, OLDEST_OPSET)


def _since(op_type: str, version: int) -> int:
    try:
        return onnx.defs.get_schema(op_type, version, "").since_version
    except onnx.defs.SchemaError:
        return 0
