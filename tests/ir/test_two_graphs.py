"""A tensor of one graph is refused by another, whatever their origin; copies of a graph share their tensors."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidGraph
from opgraph.ir.copy_graph import rebuilt


def composed(name: str = "x") -> og.Graph:
    """`y = (x + c)^2`, with ids 0 to 3: those of every graph of this form."""
    g = og.Graph()
    x, c = g.input(name, shape=(2,)), g.constant("c", np.float32([1, 2]))
    g.add_op("Square", g.add_op("Add", x, c), name="y")
    return g


#: The original of the copies; it must stay alive, or messages cannot name it.
ORIGINAL = composed()


def unpickled() -> og.Graph:
    return pickle.loads(pickle.dumps(composed()))


def numbered() -> og.Graph:
    """The same graph, built as in oneDNN."""
    g = og.Graph()
    tensors = [og.LogicalTensor(i, "f32", (2,)) for i in range(4)]
    g.add_op(og.Op(0, "Add", tensors[:2], [tensors[2]]))
    g.add_op(og.Op(1, "Square", [tensors[2]], [tensors[3]]))
    return g


def with_outputs_set() -> og.Graph:
    g = rebuilt(copy.copy(ORIGINAL).finalize())
    g.set_outputs([g.ops[-1].outputs[0]])
    return g


#: Origins of a tensor.
SOURCES: dict[str, Callable[[], og.Graph]] = {
    "composed": composed,
    "finalized": lambda: composed().finalize(),
    "parsed": lambda: og.parse(
        "graph(x: f32[2]) -> (y)\n const c: f32[2] = [1.0, 2.0]\n a = Add(x, c)\n y = Square(a)"
    ),
    "unpickled": unpickled,
    "a deep copy": lambda: copy.deepcopy(ORIGINAL),
    "a copy": lambda: copy.copy(ORIGINAL),
    "rebuilt": with_outputs_set,
    "by ids": numbered,
    "a gradient": lambda: og.gradient(copy.copy(ORIGINAL), wrt=("x",)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_tensor_of_another_graph_is_refused_naming_both_graphs(source: str) -> None:
    other, g = SOURCES[source](), composed("z")
    text = str(g)
    for tensor in (*other.inputs, *(t for op in other.ops for t in op.outputs), *other.constants):
        for use in (lambda t: g.add_op("Abs", t), lambda t: g.add_op("Add", g.inputs[0], t), g.output):
            with pytest.raises(InvalidGraph) as caught:
                use(tensor)
            message = str(caught.value)
            assert re.search(
                r"of another graph: graph\((x|t0, t1|x, d_y)\) -> \((y|t3|d_x)\); this one|a graph that is gone",
                message,
            ), message
            assert "this one is graph(z) -> (y)" in message and len(message.splitlines()) == 3
    with pytest.raises(InvalidGraph, match="another graph"):
        g.set_outputs(other.outputs)
    assert str(g) == text


def test_foreign_tensor_with_unknown_id_is_refused() -> None:
    g = og.Graph()
    with pytest.raises(InvalidGraph, match=r"this one is graph\(\) -> \(\)"):
        g.add_op("Abs", composed().ops[-1].outputs[0])
    assert not g.inputs


def test_tensor_of_a_deleted_graph_is_refused() -> None:
    left = composed().ops[-1].outputs[0]
    gc.collect()
    with pytest.raises(InvalidGraph, match="a graph that is gone"):
        composed().add_op("Abs", left)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "rebuilt": lambda pair: (rebuilt(pair[0].finalize()), *pair[1:]),
}


@pytest.mark.parametrize("way", COPIES)
def test_copied_graph_accepts_shared_and_refuses_later_tensors(way: str) -> None:
    g = composed()
    y = g.ops[-1].outputs[0]
    if way == "copy":
        twin = copy.copy(g)
    else:
        twin, y = COPIES[way]((g, y))
    assert twin == g and not twin.is_finalized
    later = twin.add_op("Abs", y, name="later")
    assert twin != g and len(twin) == len(g) + 1
    if not g.is_finalized:
        own = g.add_op("Exp", g.ops[-1].outputs[0], name="own")
        with pytest.raises(InvalidGraph, match="another graph"):
            g.add_op("Abs", later)
        with pytest.raises(InvalidGraph, match="another graph"):
            twin.add_op("Abs", own)
    assert og.evaluate(twin, x=np.float32([1, -4])).tolist() == [4, 4]


def test_caller_numbered_tensors_connect_by_id_in_any_graph() -> None:
    a, b = numbered(), numbered()
    of_a = a.ops[-1].outputs[0]
    b.add_op(og.Op(2, "Abs", [of_a], [og.LogicalTensor(9, "f32", (2,))]))  # tensor 3 of b, by its id as in oneDNN
    assert b.ops[-1].inputs[0].id == 3 and len(b.inputs) == 2
    new = og.LogicalTensor(7, "f32", (2,))
    assert b.add_op("Exp", new).dims == (2,) and b.inputs[-1].id == 7
    assert b.add_op("Exp", og.LogicalTensor(3, "f32", (2,))).dims == (2,)


def test_copied_constants_keep_identity_and_read_only_data() -> None:
    constant = composed().constants[0]
    assert copy.copy(constant) is constant and copy.deepcopy([constant])[0] is constant
    again = pickle.loads(pickle.dumps(constant))
    assert again == constant and not again.data.flags.writeable
    for make in (unpickled, SOURCES["a deep copy"]):
        assert not make().constants[0].data.flags.writeable
