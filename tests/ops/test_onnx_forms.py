"""The ONNX forms and decompositions of the records have the meaning of their ops."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.ir import dtypes, opdef
from opgraph.ir.expression import Call, Expr, Num, Param, Var
from opgraph.ir.opdef import Onnx, OpDef, Port, all_ops
from opgraph.ops import samples

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

POINTWISE = [r for r in all_ops() if r.is_pointwise]
WITH_FORMS = [r for r in POINTWISE if isinstance(r.onnx, tuple) and r.onnx and not r.is_cast]
#: The newest opset that onnxruntime 1.31 supports.
NEWEST = 26
#: The resolution of the next narrower float: formulas of one function agree to it, other functions do not.
RESOLUTION = {"f64": 2.0**-23, "f32": 2.0**-10, "f16": 2.0**-7, "bf16": 2.0**-4}


def applies(form: Onnx, ports: Sequence[Port], attrs: Mapping[str, Any]) -> bool:
    words = {w for entry in form.inputs or () for w in entry.split("|")}
    listed = form.inputs is None or all(p.name in words for p in ports)
    # A bound that is given as an attribute needs an attribute or an input in the form.
    placed = {*form.attrs, *form.when, *(w[1:] for w in words if w.startswith("$"))}
    wanted = {n for n in attrs if n not in ("auto_broadcast", "data_format", "per_channel_broadcast")}
    return listed and wanted <= placed | set(form.when) and all(attrs.get(k) == v for k, v in form.when.items())


def allowed(form: Onnx, opset: int, kinds: Sequence[str]) -> bool:
    """True if onnx.defs allows these dtypes for the inputs."""
    schema = onnx.defs.get_schema(form.op_type, opset)
    symbols = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    names = {
        1: "float",
        11: "double",
        10: "float16",
        16: "bfloat16",
        9: "bool",
        2: "uint8",
        3: "int8",
        6: "int32",
        7: "int64",
    }
    ports = list(schema.inputs)
    ports += [ports[-1]] * (len(kinds) - len(ports))  # variadic Max and Min
    return all(f"tensor({names[dtypes.get(k).onnx]})" in symbols[p.type_str] for k, p in zip(kinds, ports))


def model(
    record: OpDef, form: Onnx, ports: Sequence[Port], attrs: Mapping[str, Any], arrays: list[np.ndarray], opset: int
) -> Any:
    """A model of one node, operands already aligned."""
    helper = onnx.helper
    kinds = [dtypes.of_array(a.dtype, where="test") for a in arrays]
    given = {p.name: f"x{i}" for i, p in enumerate(ports)}
    initializers, names = [], []
    for entry in form.inputs or [p.name for p in ports]:
        word = next((w for w in entry.split("|") if w in given or w[1:] in attrs), None)
        if word is None:
            names.append("")
        elif word in given:
            names.append(given[word])
        else:
            names.append(word[1:])
            value = np.asarray(attrs[word[1:]]).astype(kinds[0].numpy)
            initializers.append(onnx.numpy_helper.from_array(value, word[1:]))
    node_attrs = dict(form.fixed)
    for ours, theirs in form.attrs.items():
        if ours in attrs:
            node_attrs[theirs] = int(attrs[ours]) if isinstance(attrs[ours], bool) else attrs[ours]
    graph = helper.make_graph(
        [helper.make_node(form.op_type, names, ["y"], **node_attrs)],
        "one",
        [helper.make_tensor_value_info(f"x{i}", k.onnx, a.shape) for i, (k, a) in enumerate(zip(kinds, arrays))],
        [helper.make_empty_tensor_value_info("y")],
        initializers,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(made)


def cases(record: OpDef) -> list[tuple[Onnx, str, tuple[Port, ...], dict[str, Any], list[np.ndarray]]]:
    found = []
    for dtype in samples.dtypes_of(record):
        for ports, attrs in samples.forms(record, dtype):
            for form in record.onnx:
                assert isinstance(form, Onnx)
                low, high = attrs.get("min", -math.inf), attrs.get("max", math.inf)
                crossed = form.until is not None and low > high  # Clip refuses crossed bounds
                fits = form.dtypes is None or dtype in form.dtypes
                if applies(form, ports, attrs) and fits and not crossed:
                    shapes = [(3, 5)] + [() if p.name in form.scalars else (5,) for p in ports[1:]]
                    found.append((form, dtype, ports, attrs, samples.arrays(record, ports, dtype, shapes)))
    return found


def assert_same_function(got: np.ndarray, expected: np.ndarray, dtype: str, where: object) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, where
    if dtypes.of_array(got.dtype, where="test").is_float:
        truth = expected.astype(np.float64)
        error = np.abs(got.astype(np.float64) - truth) / np.maximum(np.abs(truth), 1)
        assert error.max(initial=0) <= RESOLUTION[dtype], (where, got, expected)
    else:
        np.testing.assert_array_equal(got, expected, str(where))


@pytest.mark.parametrize("record", WITH_FORMS, ids=lambda r: r.kind)
def test_onnx_forms_agree_in_onnx_reference_and_onnxruntime(record: OpDef) -> None:
    ran = {"reference": 0, "onnxruntime": 0}
    for form, dtype, ports, attrs, arrays in cases(record):
        for opset in sorted({form.since, form.until or max(form.since, NEWEST)}):
            if not allowed(form, opset, [dtypes.of_array(a.dtype, where="test").name for a in arrays]):
                continue
            expected = record.reference(*arrays, **attrs)
            made = model(record, form, ports, attrs, arrays, opset)
            feeds = {f"x{i}": a for i, a in enumerate(arrays)}
            for runner in (run_reference, run_onnxruntime):
                got = runner(made, feeds, opset, dtype)
                if got is not None:
                    ran[runner.__name__.removeprefix("run_")] += 1
                    assert_same_function(got, expected, dtype, (runner.__name__, form.op_type, opset, dtype, attrs))
    assert ran["reference"], "no form was ever run"
    assert ran["onnxruntime"], "no form was ever run"


def run_reference(made: Any, feeds: dict[str, np.ndarray], opset: int, dtype: str) -> np.ndarray | None:
    from onnx.reference import ReferenceEvaluator

    if opset < 13:  # onnx's evaluator has only the newest definitions of most ops
        return None
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return np.asarray(ReferenceEvaluator(made).run(None, feeds)[0])


def run_onnxruntime(made: Any, feeds: dict[str, np.ndarray], opset: int, dtype: str) -> np.ndarray | None:
    if dtype == "bf16" or not 7 <= opset <= NEWEST:
        return None
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises several classes, all named after statuses
        if "NOT_IMPLEMENTED" in str(error) or "NotImplemented" in type(error).__name__:
            return None
        raise
    return np.asarray(session.run(None, feeds)[0])


@pytest.mark.parametrize("record", WITH_FORMS, ids=lambda r: r.kind)
def test_onnx_attributes_exist_at_both_ends_of_the_opset_range(record: OpDef) -> None:
    for form in record.onnx:
        assert isinstance(form, Onnx)
        for opset in (form.since, form.until or onnx.defs.onnx_opset_version()):
            schema = onnx.defs.get_schema(form.op_type, opset)
            assert {*form.attrs.values(), *form.fixed} <= set(schema.attributes)
            assert len(form.inputs or ()) <= len(schema.inputs)
        if form.since > 1:
            first = onnx.defs.get_schema(form.op_type, form.since)
            assert first.since_version == form.since, f"{form.op_type} is not redefined at {form.since}"


# -- decompositions ---------------------------------------------------------------------------------------------------


def build(g: og.Graph, tree: Expr, values: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    if isinstance(tree, Var):
        return values[tree.name]
    if isinstance(tree, Param):
        return attrs[tree.name]
    if isinstance(tree, Num):
        return tree.value
    args = [build(g, a, values, attrs) for a in tree.args]
    return g.add_op(tree.kind, *args, **{k: attrs[v.name] if isinstance(v, Param) else v for k, v in tree.attrs})


@pytest.mark.parametrize("record", [r for r in POINTWISE if r.decomposition], ids=lambda r: r.kind)
def test_decomposition_computes_the_same_function(record: OpDef) -> None:
    count = 0
    # Not in narrow floats: a constant is rounded to them even where everything else is float64.
    for dtype in [d for d in samples.dtypes_of(record) if d == "f64" or not dtypes.get(d).is_float]:
        for ports, attrs in samples.forms(record, dtype):
            tree = record.decompose(attrs, [p.name for p in ports])
            assert tree is not None
            arrays = samples.arrays(record, ports, dtype, [(6, 5)] + [(5,)] * (len(ports) - 1))
            g = og.Graph()
            names = {
                p.name: g.input(p.name, p.type if p.type not in record.types else dtype, a.shape)
                for p, a in zip(ports, arrays)
            }
            g.output(build(g, tree, names, attrs))
            got = og.evaluate(g, dict(zip(names, arrays)))
            expected = record.reference(
                *[a.astype(np.float64) if dtypes.get(dtype).is_float else a for a in arrays], **attrs
            )
            assert_same_function(got, expected, "f64", (dtype, attrs))
            count += 1
    assert count


def test_celu_decomposition_is_right_for_negative_alpha() -> None:
    record = opdef.get("Celu", where="test")
    x, attrs = np.linspace(-3, 3, 25), {"alpha": -1.5}
    tree = record.decompose(attrs, ["src"])
    assert tree is not None
    g = og.Graph()
    g.output(build(g, tree, {"src": g.input("src", "f64", x.shape)}, attrs))
    assert_same_function(og.evaluate(g, {"src": x}), record.reference(x, **attrs), "f64", attrs)


@pytest.mark.parametrize("record", POINTWISE, ids=lambda r: r.kind)
def test_every_op_has_an_onnx_form_or_a_reason(record: OpDef) -> None:
    """Decompositions always end in ops that have an ONNX form, for any attributes."""
    if isinstance(record.onnx, str) and record.onnx:
        assert record.onnx.startswith("none: ")
        return
    for ports, attrs in samples.forms(record, samples.dtypes_of(record)[0]):
        waiting: list[tuple[OpDef, tuple[str, ...], dict[str, Any], int]] = [
            (record, tuple(p.name for p in ports), attrs, 0)
        ]
        while waiting:
            current, given, chosen, depth = waiting.pop()
            assert depth < 5, f"{record.kind} decomposes for ever"
            named = [p for p in current.inputs if p.name in given]
            if isinstance(current.onnx, tuple) and any(applies(f, named, chosen) for f in current.onnx):
                continue
            tree = current.decompose(chosen, given)
            assert tree is not None, (current.kind, chosen)
            for call in calls_in(tree):
                inner = opdef.get(call.kind, where="test")
                values = {k: chosen[v.name] if isinstance(v, Param) else v for k, v in call.attrs}
                inner_ports = tuple(p.name for p in inner.inputs[: len(call.args)])
                waiting.append((inner, inner_ports, {**inner.default_attrs(), **values}, depth + 1))


def calls_in(tree: Expr) -> list[Call]:
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Call):
            found.append(node)
            waiting += node.args
    return found
