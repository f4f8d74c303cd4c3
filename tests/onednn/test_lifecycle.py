"""The life of a graph as oneDNN's API tests have it: graph, partitions, compiled partitions, execution.

Names follow the behaviours of oneDNN's `tests/gtests/graph/api`; where opgraph is stricter, specs/onednn.md
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidArguments, InvalidDataType, InvalidGraph, InvalidGraphOp, InvalidShape, OpGraphError
from opgraph.ir.opdef import all_ops

ENGINE = og.Engine("cpu", 0)
STREAM = og.Stream(ENGINE)


def lt(id: int, dims: Any = (4, 8), dtype: str = "f32", **keywords: Any) -> og.LogicalTensor:
    return og.LogicalTensor(id, dtype, dims, **keywords)


def swish(dims: Any = (4, 8), engine: str = "cpu") -> og.Graph:
    """x = tensor 0, y = tensor 2."""
    g = og.Graph(engine=engine)
    g.add_op(og.Op(0, "Sigmoid", [lt(0, dims)], [lt(1, dims)], name="s"))
    g.add_op(og.Op(1, "Multiply", [lt(0, dims), lt(1, dims)], [lt(2, dims)], name="m"))
    return g.finalize()


def only(g: og.Graph) -> og.Partition:
    (p,) = g.get_partitions()
    return p


def add_relu() -> og.Graph:
    g = og.Graph()
    g.add_op(og.Op(0, "Add", [lt(0, None), lt(1, None)], [lt(2, None)]))
    g.add_op(og.Op(1, "ReLU", [lt(2, None)], [lt(3, None)]))
    return g.finalize()


def wildcard_and_end() -> og.Graph:
    g = og.Graph()
    y = g.add_op("Wildcard", g.input("x", shape=(2,)), dtype="f32")
    g.add_op("End", y)
    return g.finalize()


# -- op (6) ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [op.kind for op in all_ops()])
def test_06_every_kind_can_be_made_and_has_a_default_name(kind: str) -> None:
    op = og.Op(3, kind)
    assert (op.id, op.kind, op.name, op.inputs, op.outputs) == (3, kind, f"{kind}_3", (), ())


def test_06_lists_of_tensors_and_appending_give_the_same_op() -> None:
    a = og.Op(0, "Add", [lt(0), lt(1)], [lt(2)], "a")
    b = og.Op(0, "Add", name="a").add_input(lt(0)).add_input(lt(1)).add_output(lt(2))
    c = og.Op(0, "Add", name="a").add_inputs([lt(0), lt(1)]).add_outputs([lt(2)])
    assert (a.inputs, a.outputs) == (b.inputs, b.outputs) == (c.inputs, c.outputs)


def test_06_attributes_of_all_six_types_are_set_read_and_overwritten() -> None:
    op = og.Op(0, "Wildcard")
    values = {"s64": 1, "f32": 0.5, "bool": True, "string": "s", "s64s": (1, 2), "f32s": (0.5, 1.0)}
    for name, value in values.items():
        assert op.set_attr(name, "old").set_attr(name, list(value) if isinstance(value, tuple) else value) is op
    assert op.attrs == values and op.attr("s64s") == (1, 2)
    with pytest.raises(InvalidArguments, match="not set"):
        op.attr("missing")


# -- add_op (7, 8) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "error"),
    [
        (og.Op(0, "Add", [lt(0)], [lt(1)]), InvalidGraphOp),
        (og.Op(0, "Add", [lt(0), lt(1)], []), InvalidGraphOp),
        (og.Op(0, "Elu", [lt(0)], [lt(1)]), InvalidGraphOp),
        (og.Op(0, "Elu", [lt(0)], [lt(1)]).set_attr("alpha", "1"), InvalidGraphOp),
        (og.Op(0, "GELU", [lt(0)], [lt(1)]).set_attr("mode", "gelu"), InvalidGraphOp),
        (og.Op(0, "Abs", [lt(0)], [lt(1)]).set_attr("alpha", 1.0), InvalidGraphOp),
        (og.Op(0, "Nothing", [lt(0)], [lt(1)]), InvalidGraphOp),
        (og.Op(0, "Add", [lt(0), lt(1, dtype="s32")], [lt(2)]), InvalidDataType),
        (og.Op(0, "Abs", [lt(0)], [lt(1, dtype="f16")]), InvalidDataType),
    ],
    ids=("inputs", "outputs", "attribute", "type", "value", "unknown attribute", "kind", "dtypes", "output dtype"),
)
def test_07_add_op_refuses_ops_that_violate_the_schema(op: og.Op, error: type[OpGraphError]) -> None:
    g = og.Graph()
    with pytest.raises(error):
        g.add_op(op)
    assert len(g) == 0 and g.inputs == ()


def test_07_add_op_after_finalize_is_refused() -> None:
    g = swish()
    for call in (
        lambda: g.add_op(og.Op(9, "Abs", [lt(2)], [lt(9)])),
        lambda: g.add_op("Abs", lt(2)),
        lambda: g.input("late"),
        lambda: g.constant("late", 1.0),
        lambda: g.output(lt(2)),
        lambda: g.set_outputs([lt(2)]),
    ):
        with pytest.raises(InvalidGraph, match="finalized"):
            call()


def test_08_softplus_takes_beta_and_is_supported() -> None:
    g = og.Graph()
    g.add_op("SoftPlus", g.input("x", shape=(2,)), beta=2.0)
    assert only(g.finalize()).supported


# -- finalize and partitions (9, 11, 12) ----------------------------------------------------------------------------


def test_09_one_id_with_two_layouts_is_refused_by_finalize() -> None:
    g = og.Graph()
    g.add_op(og.Op(0, "Multiply", [lt(0), lt(0, layout="any")], [lt(2)]))
    with pytest.raises(InvalidGraph, match="in one place"):
        g.finalize()


def test_09_partitions_before_finalize_are_refused() -> None:
    with pytest.raises(InvalidGraph, match="not finalized"):
        og.Graph().get_partitions()


def test_09_finalize_twice_does_nothing_and_returns_the_graph() -> None:
    g = swish()
    ops = g.ops
    assert g.finalize() is g and g.ops is ops and g.is_finalized


def test_09_explain_finalizes_an_open_graph() -> None:
    g = og.Graph()
    g.add_op("Abs", g.input("x", shape=(2,)))
    assert "1 op in 1 partition" in str(g.explain()) and g.is_finalized


def test_11_policies_are_reentrant() -> None:
    g = swish()
    counts = [len(g.get_partitions(policy)) for policy in ("fusion", "debug", "fusion")]
    assert counts == [1, 2, 1]
    with pytest.raises(InvalidArguments, match="policy"):
        g.get_partitions("max")


def test_12_partition_has_ops_ports_and_engine() -> None:
    p = only(swish(engine="cuda"))
    assert [op.id for op in p.ops] == [0, 1] and p.supported and p.kind == "fused" and p.units == ("swish",)
    assert [t.id for t in p.input_ports] == [0] and [t.id for t in p.output_ports] == [2]
    assert p.engine == "cuda"


def test_12_partition_ops_are_in_topological_order() -> None:
    g = og.Graph()
    g.add_op(og.Op(1, "Exp", [lt(1)], [lt(2)]))
    g.add_op(og.Op(0, "Abs", [lt(0)], [lt(1)]))
    assert [op.id for op in only(g.finalize()).ops] == [0, 1]


def test_12_wildcard_is_unsupported_and_end_is_in_no_partition() -> None:
    p = only(wildcard_and_end())
    assert [op.kind for op in p.ops] == ["Wildcard"] and not p.supported
    with pytest.raises(InvalidArguments, match="not supported"):
        p.compile(p.input_ports, p.output_ports, ENGINE)


# -- compile (13) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([lt(0)], [lt(2)]),
        ([lt(0), lt(0)], [lt(2)]),
        ([lt(77, None), lt(0)], [lt(78, None), lt(2)]),
        ([lt(0)], [lt(2, None)]),
        ([lt(0)], [lt(2, (None, None))]),
        ([lt(0)], [lt(2, (4, None))]),
        ([lt(0)], [lt(2, layout="any")]),
        ([lt(0, strides=(1, 4))], [lt(2)]),
        ([lt(0, strides=(0, 1))], [lt(2)]),
        ([lt(0, layout="any")], [lt(2)]),
    ],
    ids=("plain", "input twice", "extra ids", "unknown ndims", "unknown dims", "partly known", "layout any",
         "transposed", "stride 0", "input any"),
)  # fmt: skip
def test_13_compiled_partition_has_the_inferred_shape(
    inputs: list[og.LogicalTensor], outputs: list[og.LogicalTensor]
) -> None:
    cp = only(swish()).compile(inputs, outputs, ENGINE)
    y = cp.query_logical_tensor(2)
    assert (y.dims, y.get_strides(), y.layout, y.dtype) == ((4, 8), (8, 1), "strided", "f32")
    assert cp.query_logical_tensor(0).dims == (4, 8)


@pytest.mark.parametrize(
    ("inputs", "outputs", "error"),
    [
        ([], [lt(2)], InvalidArguments),
        ([lt(0)], [], InvalidArguments),
        ([lt(0, layout="undef")], [lt(2)], InvalidArguments),
        ([lt(0)], [lt(2, layout="undef")], InvalidArguments),
        ([lt(0, layout="opaque")], [lt(2)], InvalidArguments),
        ([lt(0, (None, 8))], [lt(2)], InvalidArguments),
        ([lt(0, None)], [lt(2)], InvalidArguments),
        ([lt(0, dtype="undef")], [lt(2)], InvalidArguments),
        ([lt(0)], [lt(2, dtype="undef")], InvalidArguments),
        ([lt(0)], [lt(2, dtype="bf16")], InvalidArguments),
        ([lt(0), lt(0, (2, 8))], [lt(2)], InvalidArguments),
        ([0], [lt(2)], InvalidArguments),
        ([lt(0)], [lt(2, (8, 4))], InvalidShape),
        ([lt(0, (2, 3))], [lt(2, (2, 3))], InvalidShape),
        ([lt(0, ())], [lt(2, ())], InvalidShape),
        ([lt(0, (1, 8))], [lt(2)], InvalidShape),
    ],
    ids=("no input", "no output", "input undef", "output undef", "opaque", "unknown dim", "unknown ndims",
         "input dtype undef", "output dtype undef", "output dtype", "input twice", "no tensor", "output shape",
         "declared shape", "0-d", "narrower than declared"),
)  # fmt: skip
def test_13_invalid_ports_do_not_compile(
    inputs: list[og.LogicalTensor], outputs: list[og.LogicalTensor], error: type[OpGraphError]
) -> None:
    with pytest.raises(error) as caught:
        only(swish()).compile(inputs, outputs, ENGINE)
    assert caught.value.fix


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 5), (7,), (), (0, 3)], ids=str)
def test_13_one_partition_of_unknown_shape_compiles_for_every_shape(shape: tuple[int, ...]) -> None:
    cp = only(swish(None)).compile([lt(0, shape)], [lt(2, None)], ENGINE)
    x = np.linspace(-3, 3, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    y = np.empty(shape, np.float32)
    cp.execute(STREAM, {0: x}, {2: y})
    np.testing.assert_allclose(y, x / (1 + np.exp(-x)), rtol=1e-6)
    assert cp.query_logical_tensor(2).dims == shape


@pytest.mark.parametrize(("a", "b"), [((4, 8), (8,)), ((4, 1), (1, 8)), ((4, 8), ())], ids=str)
def test_13_operands_of_unknown_shape_broadcast_when_compiled(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    cp = only(add_relu()).compile([lt(1, b), lt(0, a)], [lt(3, None)], ENGINE)
    y = np.empty((4, 8), np.float32)
    cp.execute(STREAM, {0: np.full(a, 2, np.float32), 1: np.full(b, -1, np.float32)}, {3: y})
    assert cp.query_logical_tensor(3).dims == (4, 8) and (y == 1).all()


def test_13_operands_that_cannot_broadcast_are_refused_when_compiled() -> None:
    with pytest.raises(InvalidShape, match="do not broadcast"):
        only(add_relu()).compile([lt(0), lt(1, (3, 8))], [lt(3, None)], ENGINE)


def test_13_equal_symbols_must_have_equal_sizes() -> None:
    g = og.Graph()
    g.add_op("Add", g.input("x", shape=("n", 1)), g.input("y", shape=(1, "n")))
    p = only(g.finalize())
    out = p.output_ports[0].id
    assert p.compile([lt(0, (3, 1)), lt(1, (1, 3))], [lt(out, None)], ENGINE).query_logical_tensor(out).dims == (3, 3)
    with pytest.raises(InvalidShape, match='"n" is 3 and 4'):
        p.compile([lt(0, (3, 1)), lt(1, (1, 4))], [lt(out, None)], ENGINE)


def test_13_partition_may_be_compiled_twice() -> None:
    p = only(swish())
    for _ in range(2):
        y = np.empty((4, 8), np.float32)
        p.compile([lt(0)], [lt(2)], ENGINE).execute(STREAM, {0: np.zeros((4, 8), np.float32)}, {2: y})
        assert (y == 0).all()


@pytest.mark.parametrize("id", [1, 99, -1, "x"], ids=repr)
def test_13_query_of_an_unknown_port_raises(id: Any) -> None:
    cp = only(swish()).compile([lt(0)], [lt(2)], ENGINE)
    with pytest.raises(InvalidArguments, match="no port has id"):
        cp.query_logical_tensor(id)


@pytest.mark.parametrize("engine", [None, "cpu"], ids=repr)
def test_13_engine_must_match_the_graphs_kind(engine: Any) -> None:
    with pytest.raises(InvalidArguments, match="no Engine"):
        only(swish()).compile([lt(0)], [lt(2)], engine)
    with pytest.raises(InvalidArguments, match="the graph is for cuda"):
        only(swish(engine="cuda")).compile([lt(0)], [lt(2)], ENGINE)


# -- in place (14) --------------------------------------------------------------------------------------------------


def test_14_in_place_pairs_name_ids_of_equal_memory() -> None:
    assert only(swish()).compile([lt(0)], [lt(2)], ENGINE).inplace_ports() == [(0, 2)]
    relu = only(add_relu())
    assert relu.compile([lt(0), lt(1, (8,))], [lt(3, None)], ENGINE).inplace_ports() == [(0, 3)]
    assert relu.compile([lt(0, (4, 1)), lt(1, (1, 8))], [lt(3, None)], ENGINE).inplace_ports() == []
    assert relu.compile([lt(0, strides=(0, 1)), lt(1, (8,))], [lt(3, None)], ENGINE).inplace_ports() == []
    assert relu.compile([lt(0, strides=(1, 4)), lt(1, (8,))], [lt(3, None)], ENGINE).inplace_ports() == []


def test_14_an_in_place_pair_may_share_its_memory() -> None:
    x = np.linspace(-3, 3, 32, dtype=np.float32).reshape(4, 8)
    expected = x / (1 + np.exp(-x))
    only(swish()).compile([lt(0)], [lt(2)], ENGINE).execute(STREAM, {0: x}, {2: x})
    np.testing.assert_allclose(x, expected, rtol=1e-6)


# -- execute: bound by id and checked -------------------------------------------------------------------------------

X = np.linspace(-3, 3, 32, dtype=np.float32).reshape(4, 8)


def zeros(shape: tuple[int, ...] = (4, 8), dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


BUFFER = np.zeros(64, np.float32)


@pytest.mark.parametrize(
    ("ins", "outs", "message"),
    [
        ({}, {2: zeros()}, "tensor 0 is not bound"),
        ({0: X}, {}, "tensor 2 is not bound"),
        ({0: X, 1: X}, {2: zeros()}, "no port has id 1"),
        ({0: X}, {2: zeros(), 0: zeros()}, "no port has id 0"),
        ([X], {2: zeros()}, "list where a dict"),
        ({0: None}, {2: zeros()}, "NoneType for f32"),
        ({0: X.tolist()}, {2: zeros()}, "list for f32"),
        ({0: 1.0}, {2: zeros()}, "float for f32"),
        ({0: X.astype(np.float64)}, {2: zeros()}, "float64"),
        ({0: X.astype(">f4")}, {2: zeros()}, ">f4"),
        ({0: X.T}, {2: zeros()}, r"\[8, 4\]"),
        ({0: X[:1]}, {2: zeros()}, r"\[1, 8\]"),
        ({0: X}, {2: zeros((8, 4))}, r"\[8, 4\]"),
        ({0: X}, {2: zeros(dtype=np.float16)}, "float16"),
        ({0: X}, {2: read_only(zeros())}, "read-only"),
        ({0: X}, {2: np.broadcast_to(zeros((8,)), (4, 8))}, "read-only|overlaps itself"),
        ({0: X}, {2: np.lib.stride_tricks.as_strided(zeros((8,)), (4, 8), (0, 4))}, "overlaps itself"),
        ({0: BUFFER[:32].reshape(4, 8)}, {2: BUFFER[8:40].reshape(4, 8)}, "overlaps an input"),
    ],
    ids=("no input", "no output", "inner id", "input id as output", "no dict", "none", "list", "number", "dtype",
         "byte order", "transposed", "narrower", "output shape", "output dtype", "read-only", "broadcast output",
         "overlapping itself", "overlapping the input"),
)  # fmt: skip
def test_execute_refuses_invalid_arrays_without_a_write(ins: Any, outs: Any, message: str) -> None:
    cp = only(swish()).compile([lt(0)], [lt(2)], ENGINE)
    with pytest.raises(InvalidArguments, match=message):
        cp.execute(STREAM, ins, outs)
    assert all((o == 0).all() for o in outs.values())


def test_two_outputs_may_not_overlap() -> None:
    g = og.Graph()
    x = g.input("x", shape=(4, 8))
    g.output(g.add_op("Sigmoid", x))
    g.add_op("Exp", g.outputs[0])
    p = only(g.finalize())
    a, b = (t.id for t in p.output_ports)
    cp = p.compile([lt(0)], [lt(a), lt(b)], ENGINE)
    y = zeros()
    with pytest.raises(InvalidArguments, match="overlaps"):
        cp.execute(STREAM, {0: X}, {a: y, b: y})


def test_operands_are_bound_by_id_and_not_by_position() -> None:
    g = og.Graph()
    g.add_op(og.Op(0, "Subtract", [lt(5), lt(3)], [lt(9)]))
    cp = only(g.finalize()).compile([lt(3), lt(5)], [lt(9)], ENGINE)
    y = zeros()
    cp.execute(STREAM, {3: np.full((4, 8), 4, np.float32), 5: np.full((4, 8), 1, np.float32)}, {9: y})
    assert (y == -3).all()


@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: np.asfortranarray(x), lambda x: np.repeat(x, 2, 1)[:, ::2], lambda x: x[::-1]],
    ids=("dense", "transposed", "every second", "backwards"),
)
def test_arrays_of_any_strides_are_accepted(view: Callable[[np.ndarray], np.ndarray]) -> None:
    x, out = view(X), np.zeros((8, 4), np.float32).T
    only(swish()).compile([lt(0)], [lt(2)], ENGINE).execute(STREAM, {0: x}, {2: out})
    np.testing.assert_allclose(out, x / (1 + np.exp(-x)), rtol=1e-6)


# -- engines and streams (19, 20) -----------------------------------------------------------------------------------


def test_19_two_compiled_partitions_run_interleaved() -> None:
    first = only(swish()).compile([lt(0)], [lt(2)], og.Engine("cpu", 0))
    second = only(add_relu()).compile([lt(0), lt(1)], [lt(3)], og.Engine("cpu", 0))
    y, z = zeros(), zeros()
    for _ in range(3):
        first.execute(STREAM, {0: X}, {2: y})
        second.execute(STREAM, {0: y, 1: y}, {3: z})
    np.testing.assert_array_equal(z, np.maximum(y + y, 0))


def test_19_a_stream_of_another_engine_is_refused() -> None:
    cp = only(swish()).compile([lt(0)], [lt(2)], ENGINE)
    cuda = object.__new__(og.Engine)  # no GPU is needed for the refusal
    object.__setattr__(cuda, "kind", "cuda")
    object.__setattr__(cuda, "index", 0)
    for stream in (og.Stream(cuda), ENGINE, None):
        with pytest.raises(InvalidArguments, match="cannot run a partition compiled for cpu"):
            cp.execute(stream, {0: X}, {2: zeros()})  # type: ignore[arg-type]


def test_19_engines_compare_by_value() -> None:
    assert og.Engine("cpu", 0) == og.Engine() and hash(og.Engine()) == hash(ENGINE) and str(ENGINE) == "cpu"


@pytest.mark.parametrize(
    ("kind", "index"), [("gpu", 0), ("cpu", 1), ("cpu", -1), ("cpu", True), ("cpu", "0"), (None, 0), ("cuda", -1)]
)
def test_20_invalid_engine_is_refused(kind: Any, index: Any) -> None:
    with pytest.raises(InvalidArguments):
        og.Engine(kind, index)


def test_20_a_stream_needs_an_engine_and_no_handle_on_the_cpu() -> None:
    og.Stream(ENGINE).wait()
    for arguments in ((None,), ("cpu",), (ENGINE, 1234)):
        with pytest.raises(InvalidArguments):
            og.Stream(*arguments)  # type: ignore[arg-type]


_PART, _GRAPH = only(swish()), swish()
_COMPILED = _PART.compile(_PART.input_ports, _PART.output_ports, ENGINE)
NULLS: dict[str, Callable[[], Any]] = {
    "kind of an op": lambda: og.Op(0, None, [], []),
    "tensors of an op": lambda: og.Op(0, "Abs", None, None),
    "a tensor of an op": lambda: og.Op(0, "Abs").add_input(None),
    "name of an op": lambda: og.Op(0, "Abs", [], [], name=None),
    "id of a tensor": lambda: og.LogicalTensor(None, "f32", ()),
    "property": lambda: lt(0, property=None),
    "output of a graph": lambda: og.Graph().output(None),
    "engine of a graph": lambda: og.Graph(None),
    "tensors to compile for": lambda: _PART.compile(None, None, ENGINE),
    "a tensor where several are expected": lambda: _PART.compile(_PART.input_ports[0], _PART.output_ports[0], ENGINE),
    "engine to compile for": lambda: _PART.compile(_PART.input_ports, _PART.output_ports, None),
    "a tensor to compile for": lambda: _PART.compile([None], [None], ENGINE),
    "query": lambda: _COMPILED.query_logical_tensor(None),
    "query by a list": lambda: _COMPILED.query_logical_tensor([0]),
    "stream": lambda: _COMPILED.execute(None, {}, {}),
    "arrays": lambda: _COMPILED.execute(STREAM, None, None),
    "an array": lambda: _COMPILED.execute(STREAM, {0: None}, {2: None}),
    "policy": lambda: _GRAPH.get_partitions(None),
    "rules": lambda: _GRAPH.get_partitions(disable=None),
    "graph to compile": lambda: og.compile(None),
    "graph to evaluate": lambda: og.evaluate(None),
    "graph to differentiate": lambda: og.gradient(None, wrt=("x",)),
    "wrt": lambda: og.gradient(_GRAPH, wrt=None),
    "path to load": lambda: og.onednn.load(None),
    "path to dump to": lambda: og.onednn.dump(_GRAPH, None),
    "graph to dump": lambda: og.onednn.dump(None, "never written"),
    "text": lambda: og.parse(None),
    "capacity": lambda: og.onednn.set_compiled_partition_cache_capacity(None),
}  # type: ignore[dict-item]


@pytest.mark.parametrize("what", NULLS)
def test_20_missing_arguments_raise_invalid_arguments(what: str) -> None:
    with pytest.raises(InvalidArguments) as caught:
        NULLS[what]()
    assert len(str(caught.value).splitlines()) == 3


def test_sizes_must_fit_64_bits() -> None:
    assert og.LogicalTensor(0, "f32", (2**63 - 1,)).shape == (2**63 - 1,)
    for wrong in ((2**63,), (np.uint64(2**63),), (10**5000,)):
        with pytest.raises(InvalidArguments, match="is not a size"):
            og.LogicalTensor(0, "f32", wrong)
    for text in ("graph(x: f32[9223372036854775808]) -> (y)\n y = Abs(x)",
                 "graph(x: f32[9223372036854775807]) -> (y)\n y = Concat(x, x, axis=0)"):  # fmt: skip
        with pytest.raises(og.errors.OpGraphError, match="is not a size"):
            og.parse(text).finalize()
