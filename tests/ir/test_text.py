"""The text form: `parse(str(g)) == g` for every graph; unreadable texts are refused with the line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from any_graph import NASTY, graphs
from hypothesis import HealthCheck, Phase, given, settings

import opgraph as og
from opgraph.errors import InvalidArguments, InvalidDataType, InvalidGraphOp, ModelError, OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.equality import constant_digest
from opgraph.ir.text import number_text

#: What a text needs besides itself: constants that printed as a hash, by what the text calls them.
RELAXED = settings(
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def large_constants(g: og.Graph) -> dict[str, np.ndarray]:
    """The constants that the text prints as a hash, by their names in the text. A text is read with them."""
    by_hash = {f"sha256:{constant_digest(t)}": t.data for t in g.constants if t.data is not None}
    lines = [line.split(" = ") for line in str(g).split("\n") if line.endswith(tuple(by_hash))]
    called = [(re.match(r'  const ("(?:[^"\\]|\\.)*"|[^:]+):', line[0]), line[-1]) for line in lines]
    own = {match[1]: by_hash[value] for match, value in called if match is not None}
    return {json.loads(name) if name.startswith('"') else name: data for name, data in own.items()}


def read_back(g: og.Graph) -> og.Graph:
    return og.parse(str(g), constants=large_constants(g))


@RELAXED
@given(graphs())
def test_a_graph_reads_back_equal(g: og.Graph) -> None:
    assert "\n\n" not in str(g)
    h = read_back(g)
    assert h == g
    assert [(t.name, t.type_text) for t in h.inputs] == [(t.name, t.type_text) for t in g.inputs]
    assert [(t.name, t.type_text) for t in h.outputs] == [(t.name, t.type_text) for t in g.outputs]


@RELAXED
@given(graphs())
def test_printing_a_parsed_graph_is_a_fixed_point(g: og.Graph) -> None:
    h = read_back(g)
    assert str(read_back(h)) == str(h)


def test_text_form_equals_the_readme_example() -> None:
    g = og.Graph()
    x = g.input("x", shape=(None, 4096))
    g.add_op("Multiply", x, g.add_op("Sigmoid", g.add_op("Multiply", x, g.constant("a", 1.5)), name="act"), name="y")
    assert str(g) == (
        "graph(x: f32[?,4096]) -> (y)\n"
        "  const a: f32[] = 1.5\n"
        "  %0 = Multiply(x, a)\n"
        "  act = Sigmoid(%0)\n"
        "  y = Multiply(x, act)"
    )


@pytest.mark.parametrize("name", NASTY, ids=lambda n: ascii(n)[:12])
def test_any_name_survives_as_input_output_constant_and_symbol(name: str) -> None:
    g = og.Graph()
    x = g.input(name, shape=(name, 2))
    c = g.constant(name, np.ones(2, np.float32))
    g.add_op("Abs", g.add_op("Add", x, c, name=name), name=name)
    h = og.parse(str(g.finalize()))
    assert h == g
    assert (h.inputs[0].name, h.outputs[0].name, h.inputs[0].dims) == (name, name, (name, 2))
    assert all(line.isprintable() for line in str(g).split("\n"))


@pytest.mark.parametrize("dtype", list(dtypes.BY_NAME))
def test_every_bit_pattern_of_a_constant_reads_back(dtype: str) -> None:
    numpy = dtypes.get(dtype).numpy
    if dtype == "boolean":
        values = np.array([True, False])
    elif dtype in ("s4", "u4"):
        values = np.arange(16).astype(np.int8).astype(numpy)
    elif numpy.itemsize <= 2:
        values = np.arange(2 ** (8 * numpy.itemsize), dtype=f"u{numpy.itemsize}").view(numpy)
    else:
        rng = np.random.default_rng(0)
        values = np.frombuffer(rng.bytes(numpy.itemsize * 20000), numpy)
    for start in range(0, len(values), 64 * 50):
        g = og.Graph()
        parts = [values[i : i + 64] for i in range(start, min(start + 64 * 50, len(values)), 64)]
        g.add_op("Wildcard", *[g.constant(f"c{i}", part) for i, part in enumerate(parts)], outputs=0)
        assert og.parse(str(g.finalize())) == g


def test_shortest_f32_digits_read_back_exactly() -> None:
    # 1 + 2**-24 is the middle of two f32 numbers: digits just above it, read as f64, may round to it.
    values = [np.float32(v) for v in (0.1, 16777216.0, 1e-45, 3.4028235e38, 7.038531e-26)]
    values += [np.float32(math.ldexp(8388609 + 2 * i, e)) for i in range(200) for e in range(-149, 104, 23)]
    assert all(np.float32(float(number_text(v))) == v for v in values)


def test_attributes_of_every_type_read_back() -> None:
    attrs: dict[str, Any] = {
        "i": -(2**63), "f": math.nan, "minus": -0.0, "tiny": 1e-45, "inf": math.inf, "b": True, "s": '"\n#*/é',
        "is": [1, 2], "fs": [0.1, -0.0, math.nan, -math.inf], "ss": ["", "a\\b"], "bs": [True, False], "none": [],
        "a b": 1, "x=1": 2, "é": 3, "const": 4, "nan": 5, '"': 6,
    }  # fmt: skip
    g = og.Graph()
    op = og.Op(0, "Wildcard", [og.LogicalTensor(0, "f8_e4m3", None, name="x")], [])
    for name, value in attrs.items():
        op.set_attr(name, value)
    g.add_op(op)
    h = og.parse(str(g.finalize()))
    assert h == g
    assert repr(h.ops[0].attrs) == repr(g.ops[0].attrs)


def test_default_attributes_are_omitted_except_negative_zero() -> None:
    g = og.Graph()
    x = g.input("x", shape=(2,))
    g.add_op("Swish", x, alpha=1.0, name="a")
    assert "alpha" not in str(g)
    minus = og.parse("graph(x: f32[2]) -> (y)\n  y = Shrink(x, bias=-0.0)")
    assert "bias=-0.0" in str(minus) and og.parse(str(minus)) == minus
    plus = og.parse("graph(x: f32[2]) -> (y)\n  y = Shrink(x, bias=0.0)")
    assert "bias" not in str(plus) and minus != plus


def test_unnamed_number_is_printed_inline_or_declared_if_shared() -> None:
    g = og.Graph()
    x, c = g.input("x", shape=(2,)), g.constant("", 0.5)
    g.add_op("Add", x, 1.5, name="a")
    g.add_op("Add", x, c, name="b")
    g.add_op("Multiply", x, c, name="c")
    assert str(g) == (
        "graph(x: f32[2]) -> (a, b, c)\n  const %0: f32[] = 0.5\n"
        "  a = Add(x, 1.5)\n  b = Add(x, %0)\n  c = Multiply(x, %0)"
    )
    assert og.parse(str(g.finalize())) == g


def test_layout_property_and_strides_are_kept() -> None:
    g = og.Graph()
    x = og.LogicalTensor(0, "f32", (2, 3), strides=(1, 2), name="x")
    y = og.LogicalTensor(1, "f32", (2, 3), layout="any", property="constant", name="y")
    g.add_op(og.Op(0, "Abs", [x], [y]))
    assert str(g.finalize()) == (
        "graph(x: f32[2,3](strides=[1,2])) -> (y)\n  y: f32[2,3](layout=any, property=constant) = Abs(x)"
    )
    assert og.parse(str(g)) == g


@pytest.mark.parametrize(
    "form", [{"property": "host_scalar"}, {"property": "undef"}, {"layout": "any"}, {"strides": (1, 2)}]
)
@pytest.mark.parametrize("name", ["c", None])
def test_layout_property_and_strides_of_a_constant_are_kept(form: dict[str, Any], name: str | None) -> None:
    data = np.arange(6, dtype=np.int32).reshape(2, 3) if "strides" in form else np.array(5, np.int32)
    c = og.LogicalTensor(0, "s32", data.shape, name=name, data=data, **form)
    x, y = (og.LogicalTensor(i, "s32", (2, 3), name="xy"[i - 1]) for i in (1, 2))
    g = og.Graph()
    g.add_op(og.Op(0, "Add", [x, c], [y]))
    g.output(y)
    (read,) = read_back(g.finalize()).constants
    assert (read.layout, read.property, read.strides) == (c.layout, c.property, c.strides)
    g = og.Graph()
    g.add_op(og.Op(0, "Add", [x, c], [y]))
    g.output(y, c)  # outputs are compared between two graphs
    assert read_back(g.finalize()) == g


def test_generated_names_do_not_collide() -> None:
    text = "graph(x: f32[2], t0: f32[2]) -> (%0, t1, t2)\n  %0 = Sin(x)\n  t1 = Sin(%0)\n  t2 = Exp(t0)"
    read = og.parse(text)
    assert len(og.evaluate(read, x=np.ones(2, np.float32), t0=np.ones(2, np.float32))) == 3
    assert read_back(read) == read


def test_input_and_output_may_share_a_name() -> None:
    g = og.Graph()
    g.add_op("Abs", g.input("x", shape=(2,)), name="x")
    h = og.parse(str(g.finalize()))
    assert h == g and h.inputs[0].name == h.outputs[0].name == "x"


def test_several_outputs_unknown_rank_and_end_read_back() -> None:
    g = og.Graph()
    x = g.input("x", shape=None)
    a, b = g.add_op("Wildcard", x, outputs=2, name="a")
    g.add_op("End", a)
    g.output(b)
    g.finalize()
    assert str(g) == ("graph(x: f32[*]) -> (%0, a)\n  a: undef[*], %0: undef[*] = Wildcard(x)\n  End(a)")
    assert og.parse(str(g)) == g


def test_large_constant_prints_as_hash_and_needs_its_data() -> None:
    g = og.Graph()
    big = np.arange(65, dtype=np.float32)
    g.add_op("Add", g.input("x", shape=(65,)), g.constant("w", big))
    text = str(g.finalize())
    assert "sha256:" in text and "64.0" not in text
    assert og.parse(text, constants={"w": big}) == g
    with pytest.raises(ModelError, match="constants="):
        og.parse(text)
    with pytest.raises(ModelError, match="not the one that was printed"):
        og.parse(text, constants={"w": big + 1})
    with pytest.raises(InvalidArguments, match="asks for no constant 'v'"):
        og.parse(text, constants={"w": big, "v": big})


def test_a_constant_of_64_elements_prints_in_full() -> None:
    g = og.Graph()
    g.add_op("Add", g.input("x", shape=(64,)), g.constant("w", np.arange(64, dtype=np.float32)))
    assert "63.0]" in str(g.finalize())
    assert og.parse(str(g)) == g


def test_unread_constant_is_not_printed() -> None:
    g = og.Graph()
    g.constant("unused", 1.5)
    g.add_op("Abs", g.input("x", shape=()))
    assert "unused" not in str(g)
    assert og.parse(str(g.finalize())) == g


def test_an_open_graph_prints_in_an_order_that_reads_back() -> None:
    x, y, z = (og.LogicalTensor(i, "f32", (2,), name=n) for i, n in enumerate("xyz"))
    g = og.Graph()
    g.add_op(og.Op(0, "Exp", [y], [z]))
    g.add_op(og.Op(1, "Abs", [x], [y]))
    assert og.parse(str(g)) == g


HEAD = "graph(x: f32[2]) -> (y)\n"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ModelError, "there is no graph"),
        ("nonsense", ModelError, "expected 'graph'"),
        ("graph(x: f32[2]", ModelError, "line 1"),
        ("graph(x f32[2]) -> ()", ModelError, "expected ':'"),
        ("graph(x: f33[2]) -> (x)", InvalidDataType, "line 1"),
        ("graph(x: f32[-2]) -> (x)", ModelError, "not a dimension"),
        ("graph(x: f32[2.0]) -> (x)", ModelError, "not a dimension"),
        ("graph(x: f32[2], x: f32[2]) -> (x)", ModelError, "made twice"),
        ("graph(x: f32[2]) -> (y)", ModelError, "output .* is never made"),
        (HEAD + "  y = Nope(x)", InvalidGraphOp, "line 2"),
        (HEAD + "  y = Abs(z)", ModelError, "used before it is made"),
        (HEAD + "  y = Elu(x, alpha=1.0, alpha=2.0)", ModelError, "attribute alpha is given twice"),
        (HEAD + "  y = Abs(x) x", ModelError, "unexpected 'x'"),
        (HEAD + "  y = Abs(x\n", ModelError, "line 2"),
        (HEAD + "  y = Abs(x x)", ModelError, "expected ','"),
        (HEAD + "  y = Abs(x)\n  y = Abs(x)", ModelError, "line 3"),
        (HEAD + "  y, z = Abs(x)", InvalidGraphOp, "takes 1 outputs"),
        (HEAD + "  y = Elu(x, alpha=)", ModelError, "expected a value"),
        (HEAD + "  y = Elu(x, alpha=[1.0)", ModelError, "line 2"),
        (HEAD + '  y = Abs("\\q")', ModelError, "cannot read"),
        (HEAD + "  y = Abs(x) \x07", ModelError, "cannot read"),
        (HEAD + "  const c: f32[2] = [1.0]", ModelError, "1 values for shape"),
        (HEAD + "  const c: s8[] = 300", InvalidDataType, "line 2"),
        (HEAD + '  const c: f32[] = "a"', InvalidDataType, "line 2"),
        (HEAD + "  const c: f32[?] = [1.0]", InvalidArguments, "line 2"),
        (HEAD + "  const c: f32[4294967296,4294967296,0] = [1.0]", ModelError, "1 values"),
        (HEAD + f"  const c: f32[{2**62},{2**62},0] = []", ModelError, "cannot be an array"),
        (HEAD + f"  const c: s64[] = {'9' * 5000}", ModelError, "cannot read a number"),
        (HEAD + "  y: f32[2](colour=red) = Abs(x)", ModelError, "unknown word 'colour'"),
        (HEAD + "  y: f32[3] = Abs(x)", OpGraphError, "declared"),
        ("graph(x: f32[2]) -> (x)\ngraph(x: f32[2]) -> (x)", ModelError, "line 2"),
        ("(" * 100_000, ModelError, "line 1"),
    ],
)  # fmt: skip
def test_unreadable_text_is_refused_with_its_line(text: str, error: type[OpGraphError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        og.parse(text)
    assert caught.value.fix


@pytest.mark.parametrize("text", [None, b"graph() -> ()", 3])
def test_parse_refuses_values_that_are_no_string(text: Any) -> None:
    with pytest.raises(InvalidArguments, match="got "):
        og.parse(text)


def test_truncated_text_is_parsed_or_refused() -> None:
    g = og.Graph()
    x = g.input('x"', shape=(None, "seq + 1"))
    g.add_op("Elu", g.add_op("Add", x, g.constant("c", [[1.5]], "f32")), alpha=0.5, name="y")
    text = str(g.finalize())
    for end in range(len(text)):
        try:
            og.parse(text[:end])
        except OpGraphError as error:
            assert len(str(error).splitlines()) == 3


def test_example_in_specs_text_reads_back() -> None:
    page = (Path(__file__).parents[2] / "specs" / "text.md").read_text(encoding="utf-8")
    example = page.split("```text\n")[1].split("```")[0]
    graph = og.parse(example)
    assert [op.kind for op in graph.ops] == re.findall(r"= (\w+)\(", example)
    assert og.parse(str(graph)) == graph
