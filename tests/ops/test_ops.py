"""Every record of the op set: the inferred shapes and dtypes equal the computed ones, in every form and broadcast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.opdef import OpDef, all_ops
from opgraph.ops import samples

POINTWISE = [r for r in all_ops() if r.is_pointwise]
COMPUTING = [r for r in all_ops() if r.family != "structural"]


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


def test_inferred_shape_and_dtype_match_the_reference(record: OpDef) -> None:
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


def test_float64_evaluation_returns_float64(record: OpDef) -> None:
    for dtype, _, attrs, arrays in calls(record):
        g = graph_of(record, arrays, attrs, dtype)
        result = og.evaluate(g, {f"x{i}": a for i, a in enumerate(arrays)})
        declared = dtypes.get(g.outputs[0].dtype)
        assert result.dtype == (np.float64 if declared.is_float else declared.numpy)


def test_cxx_expression_is_complete_for_every_form(record: OpDef) -> None:
    for dtype in samples.dtypes_of(record):
        for ports, attrs in samples.forms(record, dtype):
            text = str(record.cxx({p.name: p.name for p in ports}, attrs, repr))
            assert "{" not in text
            assert record.index_of or any(p.name in text for p in ports)


@pytest.mark.parametrize("record", [r for r in POINTWISE if r.commutative], ids=lambda r: r.kind)
def test_commutative_ops_commute(record: OpDef) -> None:
    for _, _, attrs, arrays in calls(record):
        a, b = arrays
        np.testing.assert_array_equal(record.reference(a, b, **attrs), record.reference(b, a, **attrs))


def test_kinds_have_distinct_cxx_expressions() -> None:
    made = [r.cxx({p.name: f"x{i}" for i, p in enumerate(r.inputs)}, r.default_attrs(), repr) for r in POINTWISE]
    texts = [str(call) for call in made]
    shared = {t for t in texts if texts.count(t) > 1}
    # BiasAdd is Add with another alignment rule; casts and indices have no expression except the loop's operands.
    assert shared == {"og::add(x0, x1)", "x0"}
