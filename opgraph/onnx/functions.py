"""Model-local functions: recognizes opgraph's own functions, and unfolds all others.

A function in domain `opgraph` is read as the op of its name only if its body equals, node by node, the body that
opgraph writes for that op. The name alone is no proof. Every other function is unfolded into its caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx.inliner
from onnx import FunctionProto, ModelProto, NodeProto

from opgraph.errors import OpGraphError, Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue
from opgraph.ir.opdef import OpDef
from opgraph.onnx.bodies import function_of
from opgraph.onnx.function_check import MAX_NODES
from opgraph.onnx.nodes import since, subgraphs, with_inner
from opgraph.onnx.signature import DOMAIN, Signature
from opgraph.onnx.to_ops import Native
from opgraph.onnx.validate import opsets
from opgraph.onnx.value_types import dtype_and_dims, value_types
from opgraph.runtime.providers.onnx_node import plain_value

Key = tuple[str, str]


def trusted_call(
    node: NodeProto, function: FunctionProto, operands: Sequence[LogicalTensor], output: str, opset: int
) -> Native | None:
    """Returns the op that a function call stands for if the function's body matches it; else None.

    Args:
        operands: of the call; their dtypes and numbers of dimensions are compared.
        output: dtype of the call's output; "undef" if unknown.
    """
    record = opdef.find(node.op_type)
    if node.domain != DOMAIN or record is None or record.family == "structural" or not all(node.input):
        return None
    attrs = attributes_of(record, node)
    if attrs is None or not len(function.input) == len(operands) <= len(record.inputs):
        return None
    names = [p.name for p in record.inputs][: len(operands)]
    found = canonical(function)
    for dtype in dict.fromkeys((output, *(t.dtype for t in operands), "boolean")):
        inputs = tuple((n, t.dtype, t.ndim) for n, t in zip(names, operands))
        if dtype == dtypes.UNDEF or any(d == dtypes.UNDEF for _, d, _ in inputs):
            continue
        for wide in (inputs, *_same_meaning(inputs, dtype)):
            try:
                own = function_of(record, Signature(wide, dtype if wide is inputs else wide[0][1], attrs, opset))
            except OpGraphError:
                continue
            if canonical(own) == found:
                return record.kind, list(operands), attrs
    return None


def _same_meaning(
    inputs: tuple[tuple[str, str, int | None], ...], output: str
) -> list[tuple[tuple[str, str, int | None], ...]]:
    """The same call in other float types. A body for another type rounds at other points, but means the same op."""
    kinds = {d for _, d, _ in inputs} | {output}
    if not kinds <= set(dtypes.FLOATS):
        return []
    return [tuple((n, dtype, ndim) for n, _, ndim in inputs) for dtype in dtypes.FLOATS]


def attributes_of(record: OpDef, node: NodeProto) -> dict[str, AttrValue] | None:
    """Converts the attributes of a call of an op's function to the op's attributes; None if they do not match."""
    attrs = {a.name: a.default for a in record.attrs if a.default is not None}
    result: dict[str, AttrValue] = {n: v for n, v in attrs.items() if v is not None}
    for attribute in node.attribute:
        attr = record.attr(attribute.name)
        if attr is None or attribute.ref_attr_name:
            return None
        value = plain_value(attribute)
        result[attr.name] = bool(value) if attr.type == "bool" else tuple(value) if attr.type.endswith("[]") else value
    missing = any(a.required and a.name not in result for a in record.attrs)
    return None if missing else result


def canonical(function: FunctionProto) -> bytes:
    """A body without names: values numbered in order of appearance, nodes without names and doc strings."""
    number = {"": "", **{name: f"in{i}" for i, name in enumerate(function.input)}}
    plain = FunctionProto(input=[number[n] for n in function.input])
    for node in function.node:
        copy = plain.node.add(op_type=node.op_type, domain=node.domain)
        copy.input.extend(number.get(name, "?") for name in node.input)
        for name in node.output:
            copy.output.append(number.setdefault(name, f"t{len(number)}"))
        for attribute in sorted(node.attribute, key=lambda a: a.name):
            added = copy.attribute.add()
            added.CopyFrom(attribute)
            added.ClearField("doc_string")
            added.t.ClearField("name")
            if not attribute.HasField("t"):
                added.ClearField("t")
    plain.output.extend(number.get(name, "?") for name in function.output)
    plain.attribute.extend(sorted(function.attribute))
    plain.attribute_proto.extend(sorted(function.attribute_proto, key=lambda a: a.name))  # the defaults count
    plain.opset_import.extend(sorted(function.opset_import, key=lambda o: o.domain))
    return bytes(plain.SerializeToString(deterministic=True))


def unfolded(model: ModelProto, label: str) -> tuple[ModelProto, list[str]]:
    """Unfolds every function that is not opgraph's own. Returns the model, and notes for `explain`.

    Raises:
        Unimplemented: the unfolded model would be too large, or have nodes of two opsets.
    """
    if not model.functions:
        return model, []
    ours = {(f.domain, f.name) for f in model.functions if f.domain == DOMAIN and opdef.find(f.name) is not None}
    result = _without(_of_one_opset(model, label), ours)
    trusted = ours - _doubtful(result, ours, value_types(result))
    if trusted != ours:
        result = _without(result, trusted)
    if len(result.graph.node) > MAX_NODES:
        raise Unimplemented(f"it has {len(result.graph.node)} nodes", where=label, fix="export a smaller model")
    gone = sorted({f"{f.domain}::{f.name}" for f in model.functions} - {f"{d}::{n}" for d, n in trusted})
    return result, [f"functions unfolded: {', '.join(gone[:5])}{' ...' if len(gone) > 5 else ''}"] if gone else []


def _type_by_inference(model: ModelProto, stated: set[str]) -> None:
    """Removes the functions' declarations of unfolded values, except types that cannot be inferred.

    onnx's inliner copies them, and another call may have had other types and shapes. Shapes are always removed.

    Args:
        stated: the values that the model itself declares.
    """
    copied = [value for value in model.graph.value_info if value.name not in stated]
    if not copied:
        return
    kept = [value for value in model.graph.value_info if value.name in stated]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    inferred = value_types(model)
    for value in copied:
        if value.name not in inferred:
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
            model.graph.value_info.append(value)


def _of_one_opset(model: ModelProto, label: str) -> ModelProto:
    """The model with its functions in its own opset of ai.onnx, as onnx's inliner requires.

    Raises:
        Unimplemented: a function's node is defined differently in the model's opset.
    """
    opset = opsets(model).get("", 0)
    result = ModelProto()
    result.CopyFrom(model)
    changed = False
    for function in result.functions:
        for entry in function.opset_import:
            if entry.domain != "" or entry.version == opset or not opset:
                continue
            for node in with_inner(function.node):
                if node.domain == "" and since(node, entry.version) != since(node, opset):
                    raise Unimplemented(
                        f"it is of opset {entry.version}, the model of {opset}, where {node.op_type} is defined anew",
                        where=f'function "{function.domain}::{function.name}" of {label}',
                        fix=f"convert the function to opset {opset}",
                    )
            entry.version, changed = opset, True
    return result if changed else model


def _without(model: ModelProto, kept: set[Key]) -> ModelProto:
    """The model with all functions inlined except these."""
    stated = {value.name for value in model.graph.value_info}
    while others := {(f.domain, f.name) for f in model.functions} - kept:
        model = _with_defaults_written(model, others)
        now = _outermost(model, others) if _may_lose_defaults(model) else others
        result = onnx.inliner.inline_selected_functions(model, sorted(now), exclude=False)
        # Calls of undefined overloads would remain as unknown ops; the checker has already refused them.
        for index in reversed(range(len(result.functions))):
            if (result.functions[index].domain, result.functions[index].name) in now:
                del result.functions[index]
        model = result
    _type_by_inference(model, stated)
    return model


def _may_lose_defaults(model: ModelProto) -> bool:
    """True if a call inside a function passes on an attribute that the function's own caller may leave out.

    The callee's default then applies, but such calls can be identified only after the outer function is inlined.
    """
    defaults = {(f.domain, f.name, f.overload): {a.name for a in f.attribute_proto} for f in model.functions}
    return any(
        attribute.ref_attr_name in function.attribute
        and attribute.name in defaults.get((node.domain, node.op_type, node.overload), ())
        for function in model.functions
        if function.attribute
        for node in with_inner(function.node)
        for attribute in node.attribute
    )


def _outermost(model: ModelProto, keys: set[Key]) -> set[Key]:
    """The functions in `keys` that no other of them calls; all, if overloads of one name call each other."""
    inner = {
        (node.domain, node.op_type)
        for function in model.functions
        if (function.domain, function.name) in keys
        for node in with_inner(function.node)
        if (node.domain, node.op_type) != (function.domain, function.name)
    }
    return keys - inner or keys


def _with_defaults_written(model: ModelProto, keys: set[Key]) -> ModelProto:
    """Writes all attributes of calls of these functions, because onnx's inliner (1.23) ignores their defaults."""
    defaults = {
        (f.domain, f.name, f.overload): f.attribute_proto
        for f in model.functions
        if f.attribute_proto and (f.domain, f.name) in keys
    }
    if not defaults:
        return model
    result = ModelProto()
    result.CopyFrom(model)
    for node in with_inner([*result.graph.node, *(n for f in result.functions for n in f.node)]):
        stated = {a.name for a in node.attribute}
        for attribute in defaults.get((node.domain, node.op_type, node.overload), ()):
            if attribute.name not in stated:
                node.attribute.append(attribute)
    return result


def _doubtful(model: ModelProto, candidates: set[Key], types: Mapping[str, onnx.TypeProto]) -> set[Key]:
    """Candidates that are called where the body cannot be compared, or whose body differs."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    result = {(n.domain, n.op_type) for f in model.functions for n in with_inner(f.node)} & candidates
    opset = opsets(model).get("", 1)
    for node in model.graph.node:
        key = (node.domain, node.op_type)
        result |= {(n.domain, n.op_type) for g in subgraphs(node) for n in with_inner(g.node)} & candidates
        function = functions.get((*key, node.overload))
        if key in candidates and key not in result:
            operands = [_described(types.get(name)) for name in node.input if name]
            output = _described(types.get(node.output[0])).dtype if node.output else dtypes.UNDEF
            if function is None or trusted_call(node, function, operands, output, opset) is None:
                result.add(key)
    return result


def _described(proto: onnx.TypeProto | None) -> LogicalTensor:
    """A tensor of that dtype and number of dimensions."""
    dtype, dims = dtype_and_dims(proto)
    return LogicalTensor(0, dtype, None if dims is None else (None,) * len(dims))
