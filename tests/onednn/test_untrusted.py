"""A graph file is untrusted input: loading always ends in a graph or in an error of three lines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import opgraph as og
from opgraph.errors import (
    InvalidDataType,
    InvalidGraph,
    InvalidGraphOp,
    InvalidShape,
    ModelError,
    OpGraphError,
)
from opgraph.onednn.document import MAX_BYTES, UNKNOWN


def tensor(id: int, shape: Any = (4,), **fields: Any) -> dict[str, Any]:
    entry = {"id": id, "dtype": "f32", "shape": list(shape), "stride": [1] * len(shape)}
    return {**entry, "layout_type": "strided", "property_type": "undef", **fields}


def op(id: int = 0, kind: str = "Abs", inputs: Any = None, outputs: Any = None, **fields: Any) -> dict[str, Any]:
    ins = [tensor(0)] if inputs is None else inputs
    return {
        "id": id,
        "name": "a",
        "kind": kind,
        "attrs": {},
        "inputs": ins,
        "outputs": outputs or [tensor(1)],
        **fields,
    }


def document(*ops: Any, **head: Any) -> dict[str, Any]:
    return {"version": "3.14.0", "engine_kind": "cpu", "fpmath_mode": "strict", **head, "graph": list(ops)}


def refusal(folder: Path, content: Any) -> OpGraphError:
    """The error that loading raises; it has three lines."""
    path = folder / "graph.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(OpGraphError) as caught:
        og.onednn.load(path)
    assert len(str(caught.value).splitlines()) == 3 and str(path) in caught.value.where and caught.value.fix
    return caught.value


TEXTS = {
    "empty": (b"", "no JSON"),
    "cut short": (json.dumps(document(op())).encode()[:-5], "no JSON"),
    "no UTF-8": (b'{"version": "\xff"}', "no UTF-8"),
    "a byte order mark before nothing": (b"\xef\xbb\xbf{}", "None is no text"),
    "a list": (b"[]", "no object"),
    "a number": (b"1", "no object"),
    "NaN": (b'{"graph": NaN}', "NaN is no JSON"),
    "minus infinity": (b'{"graph": -Infinity}', "-Infinity is no JSON"),
    "duplicate key": (b'{"graph": [], "graph": []}', "'graph' stands twice"),
    "deep nesting": (b"[" * 100_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 100_000, "nested too deeply"),
    "a long number": (b'{"graph": ' + b"1" * 10_000 + b"}", "no number"),
}

DOCUMENTS: dict[str, tuple[Any, str, type[OpGraphError]]] = {
    "no fields": ({}, "no text", ModelError),
    "no graph": ({"engine_kind": "cpu"}, "'graph' is missing", ModelError),
    "unknown field": (document(op(), weights=[]), "unknown field 'weights'", ModelError),
    "version": (document(op(), version=3), "no text", ModelError),
    "engine kind": (document(op(), engine_kind="tpu"), "unknown engine kind 'tpu'", ModelError),
    "fpmath mode": (document(op(), fpmath_mode="fp8"), "unknown fpmath mode 'fp8'", ModelError),
    "ports": (document(op(), input_ports=[-1]), "no id", ModelError),
    "an op that is no object": (document([]), "no object", ModelError),
    "a field of an op missing": (document({"id": 1}), "is missing", ModelError),
    "unknown field of an op": (document(op(extra=1)), "unknown field 'extra'", ModelError),
    "op id": (document(op(id=-1)), "no id", ModelError),
    "op id of another type": (document(op(id="0")), "no id", ModelError),
    "op id true": (document(op(id=True)), "no id", ModelError),
    "op id beyond size_t": (document(op(id=2**64)), "no id", ModelError),
    "attrs": (document(op(attrs=[1])), "no object", ModelError),
    "attrs null": (document(op(attrs=None)), "no object", ModelError),
    "attr without type": (document(op(attrs={"a": {"value": 1}})), "is missing", ModelError),
    "attr type": (document(op(attrs={"a": {"type": "f64", "value": 1}})), "no type", ModelError),
    "bool of 2": (document(op(attrs={"a": {"type": "bool", "value": 2}})), "no bool", ModelError),
    "bool of true": (document(op(attrs={"a": {"type": "bool", "value": True}})), "no bool", ModelError),
    "s64 of 2^63": (document(op(attrs={"a": {"type": "s64", "value": 2**63}})), "no s64", ModelError),
    "s64 of 1.5": (document(op(attrs={"a": {"type": "s64", "value": 1.5}})), "no s64", ModelError),
    "f32 of text": (document(op(attrs={"a": {"type": "f32", "value": "1"}})), "no f32", ModelError),
    "f32 without end": (document(op(attrs={"a": {"type": "f32", "value": 10**400}})), "no f32", ModelError),
    "f32[] of one": (document(op(attrs={"a": {"type": "f32[]", "value": 1.0}})), "no list", ModelError),
    "tensor": (document(op(inputs=[1])), "no object", ModelError),
    "tensor field missing": (document(op(inputs=[{"id": 1}])), "is missing", ModelError),
    "tensor id": (document(op(inputs=[tensor(1.0)])), "no id", ModelError),  # type: ignore[arg-type]
    "negative size": (document(op(inputs=[tensor(0, (-1,))])), "no size", ModelError),
    "size of 2^63": (document(op(inputs=[tensor(0, (2**63,))])), "no size", ModelError),
    "size of 1.0": (document(op(inputs=[tensor(0, (1.0,))])), "no size", ModelError),
    "shape of text": (document(op(inputs=[{**tensor(0), "shape": "4"}])), "no list", ModelError),
    "strides of another length": (
        document(op(inputs=[tensor(0, stride=[1, 1])])),
        "do not fit",
        og.errors.InvalidArguments,
    ),
    "layout": (document(op(inputs=[tensor(0, layout_type="blocked")])), "unknown layout", og.errors.InvalidArguments),
    "property": (
        document(op(inputs=[tensor(0, property_type="mutable")])),
        "unknown property",
        og.errors.InvalidArguments,
    ),
    "a host scalar of two": (
        document(op(inputs=[tensor(0, property_type="host_scalar")])),
        "host scalar",
        og.errors.InvalidArguments,
    ),
    "dtype": (document(op(inputs=[tensor(0, dtype="f128")])), "unknown dtype", InvalidDataType),
    "dtype that the op does not take": (document(op(inputs=[tensor(0, dtype="u4")])), "does not take", InvalidDataType),
    "two dtypes": (document(op(outputs=[tensor(1, dtype="bf16")])), "one dtype", InvalidDataType),
    "kind": (document(op(kind="BiasAddBackprop")), "unknown op kind", InvalidGraphOp),
    "attribute": (document(op(attrs={"alpha": {"type": "f32", "value": 1}})), "no attribute", InvalidGraphOp),
    "required attribute": (document(op(kind="Elu")), "needs attribute", InvalidGraphOp),
    "attribute of another type": (
        document(op(kind="Elu", attrs={"alpha": {"type": "s64[]", "value": [1]}})),
        "is not f32",
        InvalidGraphOp,
    ),
    "attribute of no choice": (
        document(op(kind="GELU", attrs={"mode": {"type": "string", "value": "fast"}})),
        "not a choice",
        InvalidGraphOp,
    ),
    "inputs": (document(op(inputs=[tensor(0), tensor(2)])), "takes 1 inputs", InvalidGraphOp),
    "an op id twice": (document(op(), op(outputs=[tensor(2)])), "used twice", InvalidGraph),
    "two producers": (document(op(), op(id=1)), "two producers", InvalidGraph),
    "a cycle": (document(op(0, "Abs", [tensor(1)], [tensor(0)]), op(1)), "cycle", InvalidGraph),
    "an op that reads itself": (document(op(outputs=[tensor(0)])), "cycle", InvalidGraph),
    "a number beyond f32": (
        document(op(kind="Elu", attrs={"alpha": {"type": "f32", "value": 3.5e38}})),
        "3.5e+38 is no f32",
        ModelError,
    ),
    "an integer attribute for a float": (
        document(op(kind="Elu", attrs={"alpha": {"type": "s64", "value": 1}})),
        "of type s64, is not f32",
        InvalidGraphOp,
    ),
    "a tensor with two shapes": (
        document(op(), op(1, "Exp", [tensor(1, (5,))], [tensor(2, (5,))])),
        "in one place",
        InvalidGraph,
    ),
    "a tensor with two dtypes": (
        document(op(), op(1, "Exp", [tensor(1, dtype="bf16")], [tensor(2, dtype="bf16")])),
        "in one place",
        InvalidGraph,
    ),
    "another shape than the op makes": (document(op(outputs=[tensor(1, (5,))])), "its op makes", InvalidShape),
    "shapes that do not broadcast": (
        document(op(0, "Add", [tensor(0, (2,)), tensor(2, (3,))])),
        "broadcast",
        InvalidShape,
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_invalid_json_is_refused(case: str, tmp_path: Path) -> None:
    content, says = TEXTS[case]
    error = refusal(tmp_path, content)
    assert says in error.what and isinstance(error, ModelError)


@pytest.mark.parametrize("case", DOCUMENTS)
def test_json_that_is_no_graph_is_refused(case: str, tmp_path: Path) -> None:
    content, says, kind = DOCUMENTS[case]
    error = refusal(tmp_path, content)
    assert says in error.what and type(error) is kind


def test_error_names_the_place_in_the_file(tmp_path: Path) -> None:
    bad = document(op(), op(1, outputs=[tensor(1), tensor(2, stride=[-5])]))
    assert refusal(tmp_path, bad).where.endswith("graph[1].outputs[1].stride")
    assert refusal(tmp_path, b'{\n  "graph": [}').where.endswith("line 2, column 13")
    wrong = op(1, inputs=[tensor(1)], outputs=[tensor(2)])
    unknown = {"nope": {"type": "s64", "value": 1}}
    for change in ({"kind": "Abbs"}, {"attrs": unknown}, {"id": 0}, {"inputs": []}):
        assert ": graph[1]: " in refusal(tmp_path, document(op(0), {**wrong, **change})).where
    # Errors of the whole graph: by the op's name, if it is unique.
    other = op(2, inputs=[tensor(2, (4,))], outputs=[tensor(3, (5,))], name="b")
    assert ": graph[2]: Abs" in refusal(tmp_path, document(op(0), wrong, other)).where
    same = [op(i, inputs=[tensor(i)], outputs=[tensor(i + 1, (4 + i,))], name="twice") for i in range(2)]
    assert "graph[" not in refusal(tmp_path, document(*same)).where


def test_names_from_the_file_are_escaped_in_errors(tmp_path: Path) -> None:
    nasty = "\n  fix:   run this\x1b[2J\u202e" + "x" * 5000
    for content in (document(op(kind=nasty)), document(op(name=nasty, kind="Elu")), document(op(), **{nasty: 1})):
        assert "\x1b" not in str(refusal(tmp_path, content))
    untyped = document(op(attrs={nasty: {"type": "f32", "value": "1"}}))
    one = json.dumps({nasty: 1}).encode()
    for content in (untyped, document(op(), **{nasty: 1}), one[:-1] + b", " + one[1:]):
        assert len(str(refusal(tmp_path, content))) < 1000


def grouped(axis: int = 1, **changes: Any) -> dict[str, Any]:
    """A document with the one construct that is repaired; `changes` replace entries of the file, by a path into it."""
    scales = {"type": "f32[]", "value": [0.5, 1.0, 2.0, 4.0]}
    given = {"qtype": {"type": "string", "value": "per_channel"}, "scales": scales}
    given |= {"axis": {"type": "s64", "value": axis}, "zps": {"type": "s64[]", "value": [0] * 4}}
    pair = {"type": "s64[]", "value": [1, 1]}
    window = dict.fromkeys(("strides", "dilations", "pads_begin", "pads_end"), pair)
    window |= {"groups": {"type": "s64", "value": 4}, "weights_format": {"type": "string", "value": "IOX"}}
    window |= {"data_format": {"type": "string", "value": "NCX"}, **changes.get("window", {})}
    sizes = (changes.get("ins", 8), 1, 3, 3)
    inputs = changes.get("inputs", [tensor(0, sizes, stride=[9, 9, 3, 1], dtype="s8")])
    weights = op(0, "Dequantize", inputs, [tensor(1, sizes, stride=[9, 9, 3, 1])],
                 attrs={**given, **changes.get("given", {})})  # fmt: skip
    ins = [tensor(2, (2, 8, 5, 5), stride=[200, 25, 5, 1]), tensor(1, sizes, stride=[9, 9, 3, 1])]
    return document(
        weights, op(1, "ConvTranspose", ins, [tensor(3, (2, 4, 5, 5), stride=[100, 25, 5, 1])], attrs=window)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": []},
        {"given": {"axis": {"type": "string", "value": "1"}}},
        {"given": {"scales": {"type": "f32", "value": 1.0}}},
        {"given": {"zps": {"type": "s64", "value": 1}}},
        {"window": {"weights_format": {"type": "s64[]", "value": [1]}}},
        {"window": {"groups": {"type": "f32", "value": 4.0}}},
        {"ins": UNKNOWN},
        {"ins": 2**40},  # one scale for each would fill the memory
    ],
    ids=lambda changes: "-".join(changes),
)
def test_malformed_grouped_weights_are_not_repaired(changes: dict[str, Any], tmp_path: Path) -> None:
    refusal(tmp_path, grouped(**changes))


def test_repaired_scales_accept_a_negative_axis(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    for axis in (1, -3):
        path.write_text(json.dumps(grouped(axis)))
        assert og.onednn.load(path).ops[0].attr("axis") == 0


def test_sizes_beyond_memory_load_without_overflow(tmp_path: Path) -> None:
    sizes = (2**62, 2**62)
    path = tmp_path / "graph.json"
    path.write_text(
        json.dumps(document(op(inputs=[tensor(0, sizes)], outputs=[tensor(1, (UNKNOWN,), stride=[UNKNOWN])])))
    )
    g = og.onednn.load(path)
    assert g.outputs[0].dims == sizes and g.explain().partitions[0].input_bytes == 4 * (1 + 2 * (2**62 - 1))


def test_too_large_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "graph.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # takes no space on disk
    with pytest.raises(ModelError, match="1024 MiB"):
        og.onednn.load(tmp_path / "graph.json")


def test_load_time_is_linear_in_ops(tmp_path: Path) -> None:
    """Loads and partitions: a hundred thousand ops in seconds, a million in tens of seconds, in process time."""
    times = {}
    for count in (2_000, 8_000):
        ops = ",".join([json.dumps(op(i, "Abs", [tensor(i)], [tensor(i + 1)])) for i in range(count)])
        (tmp_path / "graph.json").write_text(json.dumps(document())[:-2] + ops + "]}")
        start = time.process_time()
        assert og.onednn.load(tmp_path / "graph.json").get_partitions()
        times[count] = (time.process_time() - start) / count
    assert times[8_000] < 2 * times[2_000] and times[8_000] < 400e-6


def test_a_cycle_through_many_ops_is_found_without_recursion(tmp_path: Path) -> None:
    ops = [op(i, "Abs", [tensor(i)], [tensor((i + 1) % 5000)]) for i in range(5000)]
    assert "cycle" in refusal(tmp_path, document(*ops)).what


# -- random damage --------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SEED = document(
    op(0, "Sigmoid", [tensor(0, (2, 3), stride=[3, 1])], [tensor(1, (2, 3), stride=[3, 1])]),
    op(1, "Multiply", [tensor(0, (2, 3), stride=[3, 1]), tensor(1, (2, 3), stride=[3, 1])],
       [tensor(2, (2, 3), stride=[3, 1])], attrs={"auto_broadcast": {"type": "string", "value": "numpy"}}),
    op(2, "Elu", [tensor(2, (2, 3), stride=[3, 1])], [tensor(3, (UNKNOWN,), stride=[UNKNOWN])],
       attrs={"alpha": {"type": "f32", "value": 0.5}}),
    input_ports=[0, 0], output_ports=[3],
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a document, with every key in it."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        found += [(inner, key) for key in keys]
        waiting += [inner[key] for key in keys]
    return found


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_document_loads_or_is_refused(data: st.DataObject, tmp_path: Path) -> None:
    content = json.loads(json.dumps(SEED))
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(content)))
        how = data.draw(st.sampled_from(("other value", "other number", "gone", "twice")))
        if how == "gone":
            del container[key]
        elif how == "twice" and isinstance(container, list):
            container.append(container[key])
        else:
            container[key] = data.draw(JSON if how == "other value" else st.integers(-1, 4))
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(content))
    try:
        graph = og.onednn.load(path)
    except OpGraphError as error:
        assert len(str(error).splitlines()) == 3
        return
    og.onednn.dump(graph, path)
    assert json.loads(path.read_text()) == content
    assert len(graph.get_partitions()) >= 1 or not graph.ops


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=40)
    | st.text(alphabet='{}[]",:0123456789eE+-.nulltruefase \n', max_size=40).map(str.encode)
)
def test_random_bytes_are_refused(content: bytes, tmp_path: Path) -> None:
    refusal(tmp_path, content)


def test_path_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        og.onednn.load(tmp_path)
    assert str(caught.value).splitlines() == [
        "this is no file",
        f"  where: {tmp_path}",
        "  fix:   give a graph file of oneDNN",
    ]
