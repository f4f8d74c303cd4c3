"""Random graphs over the whole registry, and the same graph again with other ids in another order.

`graphs()` is a hypothesis strategy. Every `add_op` that fails must leave the graph unchanged. This is checked here,
because no test calls add_op wrongly in more ways.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import strategies as st

import opgraph as og
from opgraph.errors import OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import port_name
from opgraph.ir.op_validation import checked_op
from opgraph.ir.opdef import Attr, OpDef, all_ops

#: Names that break careless printing or code generation.
NASTY = (
    'a"b', "a\nb", "*/ #", "# x", "%0", "const", "graph", "inf", "nan", "true", "a b", "α", "\u2028", "\x85", "\x00",
    "->", "int", "for", "x" * 10_000, "'", "\\", "\ud800", "1x", "?", "[*]", "sha256:" + "0" * 64,
)  # fmt: skip
NAMES = st.one_of(st.sampled_from(NASTY), st.text(min_size=1, max_size=4), st.sampled_from(("x", "y", "z")))
SHAPES: tuple[tuple[Any, ...] | None, ...] = (
    (), (2,), (2, 3), (1, 3), (4, 2, 3), (None, 3), ("n", 3), ("seq + 1", 3), (0, 3), ("α", 3), ("nan", 1), None,
)  # fmt: skip
FLOATS = st.one_of(
    st.sampled_from((0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 1e-310, 0.1, 1e300)),
    st.floats(),
)


def constant_array(draw: Any, dtype: str) -> np.ndarray:
    """A few values of a dtype, or one array too large to print."""
    numpy = dtypes.get(dtype).numpy
    shape = draw(st.sampled_from([(), (2,), (1, 3), (0,), (66,)]))
    count = int(np.prod(shape))
    bits = draw(st.binary(min_size=8 * count, max_size=8 * count)) if count < 10 else bytes(range(256)) * 8
    if dtype == "boolean":
        return (np.frombuffer(bits, np.uint8)[:count] > 127).reshape(shape)
    if dtype in ("s4", "u4"):
        low = -8 if dtype == "s4" else 0
        return (np.frombuffer(bits, np.uint8)[:count].astype(np.int8) % 16 + low).astype(numpy).reshape(shape)
    return np.frombuffer(bits, numpy)[:count].reshape(shape)


def attr_value(draw: Any, attr: Attr) -> Any:
    """A value for an attribute, sometimes one of a wrong type."""
    kind = attr.type if draw(st.integers(0, 19)) else "string"
    if attr.choices and kind == attr.type:
        return draw(st.sampled_from(attr.choices))
    lists = st.lists(st.integers(-3, 3), max_size=3)
    known = {
        "f32": FLOATS,
        "s64": st.integers(-3, 3),
        "bool": st.booleans(),
        "string": NAMES,
        "s64[]": lists,
        "f32[]": st.lists(FLOATS, max_size=3),
    }
    return draw(known[kind])


WILD_ATTRS = st.dictionaries(
    st.one_of(NAMES, st.sampled_from(("axis", "name", "dtype"))),
    st.one_of(
        FLOATS, st.integers(-(2**63), 2**63 - 1), st.booleans(), NAMES, st.lists(FLOATS, max_size=3),
        st.lists(st.integers(-9, 9), max_size=3), st.lists(NAMES, max_size=2), st.lists(st.booleans(), max_size=2),
    ),
    max_size=3,
)  # fmt: skip


@st.composite
def graphs(draw: Any, *, named: bool = False) -> og.Graph:
    """A finalized graph.

    Args:
        named: every input has a name; otherwise some have none, as in oneDNN.
    """
    g = og.Graph()
    values: list[og.LogicalTensor] = []
    for _ in range(draw(st.integers(1, 8))):
        record = draw(st.sampled_from(all_ops()))
        values += _grown(draw, g, record, values, named)
    unused = [t for t in g.inputs if t.id not in {i.id for op in g.ops for i in op.inputs}]
    if unused or not g.ops:
        g.add_op("Wildcard", *unused)
    if draw(st.booleans()) and values:
        for _ in range(draw(st.integers(1, 2))):
            g.output(draw(st.sampled_from(values)))
    try:
        return g.finalize()
    except OpGraphError as error:  # two outputs of one name
        assert "outputs are called" in str(error)
        g.set_outputs(list({port_name(t): t for t in g.outputs}.values()))
        return g.finalize()


def _grown(
    draw: Any, g: og.Graph, record: OpDef, values: list[og.LogicalTensor], named: bool
) -> list[og.LogicalTensor]:
    """Adds one more op, with new inputs and constants where it needs them, and returns its values."""
    bound = {symbol: draw(st.sampled_from(allowed)) for symbol, allowed in record.types.items()}
    if set(bound) > {"T1", "T2"} and draw(st.integers(0, 3)):
        bound = dict.fromkeys(bound, bound["T1"])
    count = draw(st.integers(0, 3)) if record.inputs and record.inputs[-1].variadic else len(record.inputs)
    if not any(p.variadic for p in record.inputs):
        count -= draw(st.integers(0, sum(p.optional for p in record.inputs)))
    inputs = [_operand(draw, g, bound.get(p.type, p.type), values, named) for p in record.with_optional(count)]
    if record.kind == "Wildcard":
        made = draw(st.integers(0, 2))
        attrs = draw(WILD_ATTRS)
    else:
        made = len(record.outputs)
        attrs = {a.name: attr_value(draw, a) for a in record.attrs if a.required or draw(st.booleans())}
    names = [draw(st.one_of(st.none(), NAMES)) for _ in range(made)]
    if draw(st.booleans()):  # the short form
        keywords = {k: v for k, v in attrs.items() if k not in ("name", "dtype", "outputs", "op")}
        dtype = draw(st.sampled_from(("f32", "f16", "s4"))) if draw(st.booleans()) else None
        name = (names[0] if names else None) or ""
        _attempt(g, lambda: g.add_op(record.kind, *inputs, name=name, dtype=dtype, outputs=made, **keywords))
        return list(g.ops[-1].outputs) if g.ops else []
    first = g._next_tensor
    outs = [
        og.LogicalTensor(
            first + 7 * i,
            draw(st.sampled_from([bound.get(p.type, p.type), "undef"])) if record.kind != "Wildcard" else "f8_e5m2",
            draw(st.sampled_from([None, (2, 3), ("n", 3)])) if record.kind == "Wildcard" else None,
            layout=draw(st.sampled_from(("strided", "any"))),
            property=draw(st.sampled_from(("variable", "constant"))),
            name=name,
        )
        for i, (p, name) in enumerate(zip(record.outputs * 2, names, strict=False))
    ]
    op_id, op_name = g._next_op + draw(st.integers(0, 3)), draw(NAMES)

    def add() -> None:
        # finalize checks the shapes of ops added this way. They must fit here, so they are inferred before.
        inferred = checked_op(g._tables, op_id, record.kind, tuple(inputs), tuple(outs), op_name, attrs, infer=True)
        op = og.Op(op_id, record.kind, inputs, inferred.outputs, name=op_name)
        for key, value in attrs.items():
            op.set_attr(key, value)
        g.add_op(op)

    _attempt(g, add)
    return list(g.ops[-1].outputs) if g.ops else []


def _attempt(g: og.Graph, add: Any) -> None:
    before = str(g), len(g), g.inputs, g.constants
    try:
        add()
    except OpGraphError as error:
        assert (str(g), len(g), g.inputs, g.constants) == before
        assert len(str(error).split("\n  fix:   ")) == 2


def _operand(draw: Any, g: og.Graph, dtype: str, values: list[og.LogicalTensor], named: bool) -> Any:
    fitting = [v for v in values if v.dtype == dtype]
    if fitting and draw(st.integers(0, 3)):
        return draw(st.sampled_from(fitting))
    if dtype == "undef":
        dtype = "f32"
    kind = draw(st.sampled_from(("input", "input", "constant", "number", "nameless")))
    if kind == "constant":
        return g.constant(draw(st.one_of(st.just(""), NAMES)), constant_array(draw, dtype))
    if kind == "number":
        value = draw(st.booleans()) if dtype == "boolean" else draw(st.integers(0, 7) if dtype[0] in "su" else FLOATS)
        return g.constant("", value)
    shape = draw(st.sampled_from(SHAPES))
    if kind == "nameless" and not named:
        tensor = g._add_input(og.LogicalTensor(g._next_tensor, dtype, shape))
    else:
        taken = {t.name for t in g.inputs}
        tensor = g.input(draw(NAMES.filter(lambda n: n not in taken)), dtype, shape)
    values.append(tensor)
    return tensor


def renumbered(g: og.Graph, seed: int) -> og.Graph:
    """The same content in oneDNN's form: other ids, ops added in another order and with other names."""
    chance = random.Random(seed)
    ids = sorted({t.id for op in g.ops for t in (*op.inputs, *op.outputs)} | {t.id for t in (*g.inputs, *g.outputs)})
    fresh = dict(zip(ids, chance.sample(range(3 * len(ids) + 1), len(ids)), strict=True))
    op_ids = chance.sample(range(3 * len(g.ops) + 1), len(g.ops))
    ops = list(zip(g.ops, op_ids, strict=True))
    chance.shuffle(ops)
    h = og.Graph()
    for op, op_id in ops:
        copy = og.Op(
            op_id,
            op.kind,
            [t.with_(id=fresh[t.id]) for t in op.inputs],
            [t.with_(id=fresh[t.id]) for t in op.outputs],
            name=f"other {op_id}",
        )
        for name, value in op.attrs.items():
            copy.set_attr(name, value)
        h.add_op(copy)
    h.set_outputs(chance.sample([h.tensor(fresh[t.id]) for t in g.outputs], len(g.outputs)))
    return h.finalize()
