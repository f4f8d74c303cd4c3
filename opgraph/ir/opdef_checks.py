"""Checks of op records. They run when a record is defined, so that a mistake does not reach users."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from opgraph.ir import dtypes
from opgraph.ir.expression import Call, Expr, Param, Var, parse_expression

if TYPE_CHECKING:
    from opgraph.ir.opdef import Onnx, OpDef

#: Kinds that formulas of records use -> the kind of the first record that uses it.
_NAMED: dict[str, str] = {}


def find_mistake(record: OpDef) -> str | None:
    """The first mistake found in a record, or None."""
    names = [p.name for p in (*record.inputs, *record.outputs)] + [a.name for a in record.attrs]
    attrs = {a.name for a in record.attrs}
    inputs = [p.name for p in record.inputs]
    if record.family != "pointwise":  # oneDNN gives axes or sizes one name as input and attribute; no formula uses it
        either = {p.name for p in record.inputs if p.optional}
        names = names[: len(inputs) + len(record.outputs)] + [a.name for a in record.attrs if a.name not in either]
    if len(set(names)) != len(names):
        return f"a name is used twice in {names}"
    for port in (*record.inputs, *record.outputs):
        if port.type not in record.types and port.type not in dtypes.BY_NAME:
            return f"port {port.name} has unknown type {port.type!r}"
    for symbol, allowed in record.types.items():
        if not set(allowed) <= {*dtypes.BY_NAME, dtypes.UNDEF}:
            return f"type {symbol} may be an unknown dtype: {allowed}"
    optional = [p.optional or p.variadic for p in record.inputs]
    if optional != sorted(optional) or any(p.variadic for p in record.inputs[:-1]):
        return "optional and variadic inputs come last"
    if len(record.domain) not in (1, len(inputs)) or not all(low <= high for low, high in record.domain):
        return f"domain {record.domain} is neither one (low, high) nor one for each input"
    if not all(0 <= i < len(inputs) for i in record.channel_inputs):
        return f"channel_inputs {record.channel_inputs} are no inputs"
    if record.channel_inputs and "data_format" not in attrs:
        return "channel_inputs need the attribute data_format"
    if record.index_of is not None and record.index_of not in attrs:
        return f"index_of names {record.index_of!r}, which is no attribute"
    if record.family == "pointwise" and (mistake := _mistake_in_outputs(record, inputs)):
        return mistake
    if record.spelled is not None and record.family in ("pointwise", "sum", "structural"):
        return "only what a library runs is spelled in smaller ops"
    if record.commutative and len(inputs) < 2:
        return "a commutative op has two inputs"
    if isinstance(record.gradient, Mapping) and not set(record.gradient) <= set(inputs):
        return f"its gradient names unknown inputs: {sorted(set(record.gradient) - set(inputs))}"
    if record.gradient_from_output is not None and len(inputs) != 1:
        return "gradient_from_output is for ops with one input"
    if record.family != "structural":
        for what in ("reference", "torch", *(["expression"] if record.family == "pointwise" else [])):
            if getattr(record, what) is None:
                return f"a {record.family} op needs {what}"
        if not record.onnx and record.decomposition is None:
            return "give its onnx form, a decomposition, or the reason why there is none"
    for form in record.onnx if isinstance(record.onnx, tuple) else ():
        named = {
            *form.attrs,
            *form.when,
            *(n for names in form.joined.values() for n in names),
            *(w[1:] for w in _words(form) if w.startswith("$")),
        }
        if not named <= attrs:
            return f"its onnx form names unknown attributes: {', '.join(sorted(named - attrs))}"
        if not {*form.scalars, *(w.lstrip("@") for w in _words(form) if not w.startswith("$"))} <= set(inputs):
            return f"its onnx form names unknown inputs: {form.inputs or ()} {form.scalars}"
        if not set(form.dtypes or ()) <= {*dtypes.BY_NAME}:
            return f"its onnx form has unknown dtypes: {form.dtypes}"
    return None


def find_mistake_in_formulas(record: OpDef) -> str | None:
    """The first mistake in a formula of a record: a name that the op does not have; or None.

    Raises:
        KeyError: the C++ expression uses a name that the op does not have.
        ValueError: the C++ expression is not a call of one function.
    """
    required = [p.name for p in record.inputs if not p.optional]
    made = [*(p.name for p in record.outputs), "d"]
    attrs = [a.name for a in record.attrs]
    trees: list[tuple[str, Expr | None, list[str]]] = []
    # Optional values are given either as attributes or as inputs.
    forms = [(required, record.example_attrs()), ([p.name for p in record.inputs], record.default_attrs())]
    for given, values in forms if len(required) < len(record.inputs) else forms[:1]:
        if record.expression is not None:
            record.cxx({name: name for name in given}, values, str)
        trees.append(("decomposition", record.decompose(values, given), given))
        for name in given if isinstance(record.gradient, Mapping) else ():
            trees.append(("gradient", record.gradient_of(name, values, given), [*given, *made]))
    if record.gradient_from_output is not None:
        trees.append(("gradient", record.gradient_of(None, record.default_attrs(), required), made))
    for what, tree, names in trees:
        unknown = unknown_name(tree, names, attrs)
        if unknown:
            return f"its {what} names {unknown}, which it does not have"
        for kind in _kinds_in(tree):
            _NAMED.setdefault(kind, record.kind)
    return None


def find_undefined_kind(defined: Collection[str]) -> str | None:
    """A message about a kind that a formula uses and no record defines, or None; all records must be registered."""
    return next(
        (f"{by}: a formula names {kind}, which is no op" for kind, by in _NAMED.items() if kind not in defined), None
    )


def _mistake_in_outputs(record: OpDef, inputs: Collection[str]) -> str | None:
    further = [p.name for p in record.outputs[1:]]
    if list(record.also) != further:
        return f"its outputs after the first are {further}, `also` makes {list(record.also)}"
    for name, text in record.also.items():
        call = parse_expression(text)
        if not isinstance(call, Call) or any(not isinstance(a, Var) or a.name not in inputs for a in call.args):
            return f"its output {name} is not one op over its inputs: {text}"
    return None


def _words(form: Onnx) -> list[str]:
    return [word for entry in form.inputs or () for word in entry.split("|")]


def unknown_name(tree: Expr | None, inputs: Collection[str], attrs: Collection[str]) -> str | None:
    """A value or parameter of a formula that is neither an input nor an attribute, or None."""
    waiting: list[Any] = [] if tree is None else [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Var) and node.name not in inputs:
            return node.name
        if isinstance(node, Param) and node.name not in attrs:
            return f"${node.name}"
        if isinstance(node, Call):
            waiting += [*node.args, *(value for _, value in node.attrs)]
    return None


def _kinds_in(tree: Expr | None) -> set[str]:
    found: set[str] = set()
    waiting: list[Any] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Call):
            found.add(node.kind)
            waiting += node.args
    return found
