"""Every record of the op set: what it infers is what it computes, in every dtype, form and broadcast."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.opdef import OpDef, all_ops
from opgraph.ops import samples

POINTWISE = [r for r in all_ops() if r.is_pointwise]
COMPUTING = [r for r in all_ops() if r.family != "structural"]
SCHEMAS = Path(__file__).parent.parent.parent / "shared" / "data" / "onednn-opschema.json"


@pytest.fixture(params=POINTWISE, ids=lambda r: r.kind)
def record(request: pytest.FixtureRequest) -> OpDef:
    return request.param


def shapes_of(record: OpDef, count: int) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the inputs: equal, scalar, and broadcast against each other where the op broadcasts."""
    yield [(3, 4, 5)] * count
    yield [(0, 4, 5)] * count
    if record.channel_inputs:
        yield [(5,) if i in record.channel_inputs else (4, 5, 5) for i in range(count)]
    elif record.index_of is None:
        yield [()] * count
        if count > 1:
            yield [(2, 1, 5), (4, 1), (5,), ()][:count]
            yield [(5,), (2, 1, 1), (), (1,)][:count]


def calls(record: OpDef) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any], list[np.ndarray]]]:
    for dtype in samples.dtypes_of(record):
        for ports, attrs in samples.forms(record, dtype):
            for shapes in shapes_of(record, len(ports)):
                if attrs.get("auto_broadcast") == "none" and len(set(shapes)) > 1:
                    continue
                if any(len(shapes[i]) != 1 for i in record.channel_inputs):
                    channels = (shapes[0][1 if attrs["data_format"] == "NCX" else -1],)
                    shapes = [channels if i in record.channel_inputs else s for i, s in enumerate(shapes)]
                yield dtype, ports, attrs, samples.arrays(record, ports, dtype, shapes)


def graph_of(record: OpDef, arrays: list[np.ndarray], attrs: dict[str, Any], dtype: str) -> og.Graph:
    g = og.Graph()
    ins = [g.input(f"x{i}", dtypes.of_array(a.dtype, where="test").name, a.shape) for i, a in enumerate(arrays)]
    g.add_op(record.kind, *ins, name="y", dtype=dtype if record.is_cast else None, **attrs)
    return g.finalize()


def test_inferred_shape_and_dtype_are_what_the_reference_returns(record: OpDef) -> None:
    count = 0
    for dtype, _, attrs, arrays in calls(record):
        (out,) = graph_of(record, arrays, attrs, dtype).outputs
        result = record.reference(*arrays, **attrs)
        assert (result.shape, result.dtype) == (out.shape, dtypes.get(out.dtype).numpy), (dtype, attrs)
        count += 1
    assert count


def test_the_text_form_reads_back_for_every_form(record: OpDef) -> None:
    for dtype, _, attrs, arrays in calls(record):
        g = graph_of(record, arrays, attrs, dtype)
        assert og.parse(str(g)) == g, str(g)


def test_evaluate_agrees_with_the_reference_in_the_declared_dtype(record: OpDef) -> None:
    for dtype, _, attrs, arrays in calls(record):
        g = graph_of(record, arrays, attrs, dtype)
        result = og.evaluate(g, {f"x{i}": a for i, a in enumerate(arrays)}, dtype=None)
        expected = record.reference(*arrays, **attrs)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected, strict=True)


def test_the_float64_truth_is_float64(record: OpDef) -> None:
    for dtype, _, attrs, arrays in calls(record):
        g = graph_of(record, arrays, attrs, dtype)
        result = og.evaluate(g, {f"x{i}": a for i, a in enumerate(arrays)})
        declared = dtypes.get(g.outputs[0].dtype)
        assert result.dtype == (np.float64 if declared.is_float else declared.numpy)


def test_a_cxx_expression_fills_in_for_every_form(record: OpDef) -> None:
    for dtype in samples.dtypes_of(record):
        for ports, attrs in samples.forms(record, dtype):
            text = record.cxx({p.name: p.name for p in ports}, attrs, repr)
            assert "{" not in text
            assert record.index_of or any(p.name in text for p in ports)


@pytest.mark.parametrize("record", [r for r in POINTWISE if r.commutative], ids=lambda r: r.kind)
def test_commutative_ops_commute(record: OpDef) -> None:
    for _, _, attrs, arrays in calls(record):
        a, b = arrays
        np.testing.assert_array_equal(record.reference(a, b, **attrs), record.reference(b, a, **attrs))


def test_kinds_with_the_same_expression_do_not_exist() -> None:
    texts = [r.cxx({p.name: f"x{i}" for i, p in enumerate(r.inputs)}, r.default_attrs(), repr) for r in POINTWISE]
    shared = {t for t in texts if texts.count(t) > 1}
    # BiasAdd is Add with another rule of alignment; casts and indices are expressed by what the loop feeds them.
    assert shared == {"og::add(x0, x1)", "x0"}


# -- oneDNN's schema --------------------------------------------------------------------------------------------------

#: Where opgraph takes more than oneDNN: an attribute that is optional here, or one more.
MORE = {("Clamp", "min"), ("Clamp", "max"), ("Pow", "beta"), ("Sigmoid", "alpha"), ("SigmoidBackward", "alpha")}


def onednn_schemas() -> list[dict[str, Any]]:
    if not SCHEMAS.exists():
        return []
    return [s for s in json.loads(SCHEMAS.read_text()) if s["kind"] in {r.kind for r in COMPUTING}]


@pytest.mark.skipif(not SCHEMAS.exists(), reason="the table of oneDNN's schemas is not beside the checkout")
def test_there_are_oneDNNs_schemas_to_compare() -> None:
    assert len(onednn_schemas()) == 56


@pytest.mark.parametrize("schema", onednn_schemas(), ids=lambda s: s["kind"])
def test_the_schema_is_oneDNNs(schema: dict[str, Any]) -> None:
    record = next(r for r in COMPUTING if r.kind == schema["kind"])
    names = [p["name"].removesuffix("_i") for p in schema["inputs"]]  # Concat's src_i is any number of src
    assert [p.name for p in record.inputs][: len(names)] == names
    fewest = int(re.findall(r"\b\d+\b", schema["num_inputs"])[0])  # "2", or a set such as {1, 64}
    assert [p.name for p in record.inputs if not p.optional] == names[:fewest]
    assert [p.name for p in record.outputs] == [p["name"] for p in schema["outputs"]]
    theirs = dict.fromkeys(a.name for a in record.attrs if (record.kind, a.name) in MORE)
    theirs |= {name: None for name, *_ in schema["attributes"]}
    assert {a.name for a in record.attrs} == theirs.keys()
    for name, need, type_, default in schema["attributes"]:
        attr = record.attr(name)
        assert attr is not None
        assert attr.type == {"f": "f32", "s": "string", "i": "s64", "b": "bool", "is": "s64[]"}[type_]
        if (record.kind, name) not in MORE:
            assert attr.required == (need == "req")
        if default == "std::vector<int64_t>()":
            # Axes left out: an error here, where oneDNN says "identity" and then runs it nowhere.
            assert attr.optional and attr.default is None
        elif default:
            value, _, choices = default.partition(", {")
            literal = {"true": True, "false": False}.get(value, value.strip('"').removesuffix(".f"))
            assert attr.default == (float(literal) if type_ == "f" else literal)
            assert set(attr.choices) == {c.strip('" ') for c in choices.rstrip("}").split(",") if c}
    for port, described in zip((*record.inputs, *record.outputs), (*schema["inputs"], *schema["outputs"])):
        allowed = record.types.get(port.type, (port.type,))
        assert set(schema["types"][described["type"]].split(",")) <= set(allowed)
    if schema["commutative"] and record.kind != "Select":  # oneDNN says so of Select's branches, for its matcher
        assert record.commutative
