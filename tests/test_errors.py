"""Every error has a message, a place and a fix, in three lines, and can be copied and pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph import errors
from opgraph.errors import OpGraphError

CLASSES = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, OpGraphError)]
BUILT_INS: dict[str, type[Exception]] = {
    "OpGraphError": Exception,
    "InvalidGraph": ValueError,
    "InvalidGraphOp": ValueError,
    "InvalidShape": ValueError,
    "InvalidDataType": TypeError,
    "InvalidArguments": ValueError,
    "Unimplemented": NotImplementedError,
    "ModelError": ValueError,
    "DeviceError": RuntimeError,
}


def test_each_status_has_one_error_class() -> None:
    assert [c.__name__ for c in CLASSES] == list(BUILT_INS)
    assert og.errors is errors


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_error_has_three_lines_and_subclasses_a_builtin(cls: type[OpGraphError]) -> None:
    error = cls("what is wrong", where="the place", fix="the way out")
    assert str(error) == "what is wrong\n  where: the place\n  fix:   the way out"
    assert (error.what, error.where, error.fix) == ("what is wrong", "the place", "the way out")
    assert isinstance(error, BUILT_INS[cls.__name__])
    assert cls.__doc__


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_survives_copying_and_pickling(cls: type[OpGraphError], again: Callable[[Any], Any]) -> None:
    error = cls("what", where="where", fix="fix")
    error.where = "somewhere else"
    twin = again(error)
    assert type(twin) is cls and str(twin) == str(error)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_where_and_fix_are_required(cls: type[OpGraphError]) -> None:
    with pytest.raises(TypeError):
        cls("what")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        cls("what", "where", "fix")  # type: ignore[misc]


def graph() -> tuple[og.Graph, og.LogicalTensor]:
    g = og.Graph()
    return g, g.input("x", shape=(2, 3))


def cycle() -> None:
    x, y = og.LogicalTensor(0, "f32", (2,)), og.LogicalTensor(1, "f32", (2,))
    g = og.Graph()
    g.add_op(og.Op(0, "Abs", [x], [y]))
    g.add_op(og.Op(1, "Exp", [y], [x], name="back"))
    g.finalize()


def contradiction() -> None:
    g = og.Graph()
    g.add_op(og.Op(0, "Abs", [og.LogicalTensor(0, "f32", (2,))], [og.LogicalTensor(1, "f32", (3,))]))
    g.finalize()


def late() -> None:
    g, x = graph()
    g.finalize()
    g.add_op("Abs", x)


def other_graph() -> None:
    _, x = graph()
    h = og.Graph()
    h.input("y", shape=(5,))
    h.add_op("Abs", x)


def with_x(call: Callable[[og.Graph, og.LogicalTensor], object]) -> Callable[[], object]:
    def run() -> object:
        return call(*graph())

    return run


CASES: list[tuple[str, type[OpGraphError], Callable[[], object], str, str, str]] = [
    ("cycle", errors.InvalidGraph, cycle, "the graph has a cycle", 'Abs "Abs_0", Exp "back"', "no op may depend"),
    ("late", errors.InvalidGraph, late, "is finalized and cannot be changed", "Abs", "build a new Graph"),
    ("other graph", errors.InvalidGraph, other_graph, "this one is graph(y)", "Abs", "that this graph's"),
    ("kind", errors.InvalidGraphOp, with_x(lambda g, x: g.add_op("Sigmoyd", x)), "unknown op kind 'Sigmoyd'",
     "Sigmoyd", "did you mean Sigmoid"),
    ("strange kind", errors.InvalidGraphOp, with_x(lambda g, x: g.add_op("@", x)), "unknown op kind", "@",
     "`opgraph ops`"),
    ("arity", errors.InvalidGraphOp, with_x(lambda g, x: g.add_op("Add", x, name="s")), "takes 2 inputs, got 1",
     'Add "s"', "src_0, src_1"),
    ("attribute", errors.InvalidGraphOp, with_x(lambda g, x: g.add_op("Elu", x, alhpa=1.0)), "no attribute 'alhpa'",
     "Elu", "alpha"),
    ("required", errors.InvalidGraphOp, with_x(lambda g, x: g.add_op("Elu", x)), "needs attribute 'alpha'", "Elu",
     "set alpha (f32)"),
    ("type", errors.InvalidGraphOp, with_x(lambda g, x: g.add_op("Elu", x, alpha="1")), "alpha='1' is not f32", "Elu",
     "type f32"),
    ("choice", errors.InvalidGraphOp, with_x(lambda g, x: g.add_op("GELU", x, mode="quick")), "not a choice", "GELU",
     "gelu_tanh"),
    ("no tensor", errors.InvalidGraphOp, with_x(lambda g, x: g.add_op("Abs", "x")), "an input is str", "Abs",
     "LogicalTensors or numbers"),
    ("list of tensors", errors.InvalidGraphOp, with_x(lambda g, x: g.add_op("Concat", [x, x], axis=0)),
     "an input is list", "Concat", "one by one"),
    ("broadcast", errors.InvalidShape,
     with_x(lambda g, x: g.add_op("Add", x, g.input("skip", shape=(4,)), name="residual")),
     "shapes [2,3] and [4] do not broadcast", 'Add "residual" (inputs: x f32[2,3], skip f32[4])',
     "each axis equal or 1"),
    ("declared", errors.InvalidShape, contradiction, "declared [3], but its op makes [2]", "Abs_0", "unknown (None)"),
    ("dtype", errors.InvalidDataType, with_x(lambda g, x: g.input("y", "float32")), "unknown dtype 'float32'", "y",
     "f32"),
    ("op dtype", errors.InvalidDataType, with_x(lambda g, x: g.add_op("Not", x)), "does not take f32", "Not",
     "boolean"),
    ("array", errors.InvalidDataType, with_x(lambda g, x: g.constant("c", np.zeros(2, complex))), "complex128",
     'constant "c"', "convert the array"),
    ("name", errors.InvalidArguments, with_x(lambda g, x: g.input("")), "'' is no name", "Graph.input", "non-empty"),
    ("engine", errors.InvalidArguments, lambda: og.Graph(engine="gpu"), "unknown engine kind 'gpu'", "Graph",
     "cpu, cuda"),
    ("tensor", errors.InvalidArguments, with_x(lambda g, x: g.tensor(99)), "no tensor 99", "Graph.tensor",
     "id of this graph"),
    ("text", errors.ModelError, lambda: og.parse("grph()"), "expected 'graph'", "line 1", "str(graph)"),
    ("unsupported", errors.Unimplemented, with_x(lambda g, x: (g.add_op("Wildcard", x, dtype="f32"), og.compile(g))),
     "nothing runs partition 0", "Wildcard", "graph.explain()"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "call", "what", "where", "fix"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_message_names_what_where_and_fix(
    cls: type[OpGraphError], call: Callable[[], object], what: str, where: str, fix: str
) -> None:
    with pytest.raises(cls) as caught:
        call()
    lines = str(caught.value).split("\n")
    assert len(lines) == 3
    assert what in lines[0]
    assert lines[1].startswith("  where: ") and where in lines[1]
    assert lines[2].startswith("  fix:   ") and fix in lines[2]


def test_suggested_kinds_exist() -> None:
    with pytest.raises(errors.InvalidGraphOp, match="did you mean ReLU"):
        with_x(lambda g, x: g.add_op("Relu", x))()


def test_control_characters_in_errors_are_escaped() -> None:
    error = og.errors.ModelError("a\x1b[2Jb\nc", where='node "\u2028\x85\u202e\ud800"', fix="ü stays")
    assert str(error).splitlines() == [
        r"a\x1b[2Jb\nc", r'  where: node "\u2028\x85\u202e\ud800"', "  fix:   ü stays",
    ]  # fmt: skip
    assert error.what == "a\x1b[2Jb\nc"
    log = og.errors.DeviceError("refused:\nline 1\r\nline 2", where="here", fix="there")
    assert str(log).split("\n")[:3] == ["refused:", r"line 1\r", "line 2"]
