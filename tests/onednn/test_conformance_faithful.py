"""Properties of a faithful oneDNN Graph library that no other test checks; specs/onednn.md lists all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidArguments, InvalidGraph
from opgraph.ir.opdef import all_ops, find
from opgraph.onednn.entries import is_onednn

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "specs" / "onednn.md"


def lt(id: int, dims: Any = (4, 8), dtype: str = "f32", **keywords: Any) -> og.LogicalTensor:
    return og.LogicalTensor(id, dtype, dims, **keywords)


def test_02_logical_tensors_are_immutable_with_user_ids() -> None:
    t = lt(2**40, None, layout="opaque", property="constant")
    assert (t.id, t.dims, t.layout, t.property) == (2**40, None, "opaque", "constant")
    with pytest.raises(AttributeError):
        t.id = 3  # type: ignore[misc]


def test_03_op_and_tensor_ids_are_separate_and_tensors_connect() -> None:
    g = og.Graph()
    g.add_op(og.Op(1, "Exp", [lt(1)], [lt(0)]))
    g.add_op(og.Op(0, "Abs", [lt(0)], [lt(5)]))
    assert [op.id for op in g.finalize().ops] == [1, 0] and [t.id for t in g.outputs] == [5]


@pytest.mark.parametrize(
    "other",
    [lt(1, (8, 4)), lt(1, dtype="bf16"), lt(1, layout="any"), lt(1, property="constant"), lt(1, strides=(1, 4))],
    ids=("dims", "dtype", "layout", "property", "strides"),
)  # fmt: skip
def test_03_all_mentions_of_an_id_must_agree(other: og.LogicalTensor) -> None:
    g = og.Graph()
    g.add_op(og.Op(0, "Abs", [lt(0)], [lt(1)]))
    out = lt(2, other.dims, other.dtype)
    g.add_op(og.Op(1, "Exp", [other], [out]))
    with pytest.raises(InvalidGraph, match="in one place"):
        g.finalize()


def test_06_every_op_is_in_one_partition_and_order_is_topological() -> None:
    g = og.Graph()
    x, w = g.input("x", shape=(4, 4)), g.input("w", shape=(4, 4))
    a = g.add_op("ReLU", x)
    b = g.add_op("Add", g.add_op("MatMul", a, w), a)
    g.add_op("End", g.add_op("MatMul", b, g.add_op("Exp", a)))
    parts = g.finalize().get_partitions()
    assert sorted(op.id for p in parts for op in p.ops) == [op.id for op in g.ops if op.kind != "End"]
    made = {x.id, w.id}
    for part in parts:
        assert {t.id for t in part.input_ports} <= made
        made |= {t.id for t in part.output_ports}


def test_09_a_compiled_partition_runs_on_a_stream_of_its_engine() -> None:
    engine = og.Engine("cpu")
    cp = og.Partition.of(og.Op(0, "Abs", [lt(0)], [lt(1)])).compile([lt(0)], [lt(1)], engine)
    y = np.empty((4, 8), np.float32)
    stream = og.Stream(engine)
    cp.execute(stream, {0: np.full((4, 8), -2, np.float32)}, {1: y})
    stream.wait()
    assert (y == 2).all() and cp.query_logical_tensor(1).get_strides() == (8, 1)


FIRST_TWO = {
    record.kind: tuple(port.name for port in record.inputs[:2])
    for record in all_ops()
    if is_onednn(record) and record.kind.endswith("Backward")
}


@pytest.mark.parametrize("kind", sorted(FIRST_TWO))
def test_14_backward_kinds_take_their_arguments_in_onednns_order(kind: str) -> None:
    names = FIRST_TWO[kind]
    if kind in ("SoftMaxBackward", "LogSoftmaxBackward"):
        assert names == ("diff_dst", "dst")
    elif kind == "BiasAddBackward":
        assert names == ("diff_dst",)
    elif kind == "AvgPoolBackward":
        assert names[0] == "diff_dst"  # the shape of src is an attribute, or a second input
    elif kind == "PReLUBackward":
        assert names == ("src", "slope")
    else:
        assert names[0] in ("src", "src_dst", "src/dst") and names[1] == "diff_dst"


@pytest.mark.parametrize(
    "kind", [k for k in FIRST_TWO if (record := find(k)) is not None and record.attr("use_dst") is not None]
)
def test_14_both_variants_of_use_dst_give_the_same_gradient(kind: str) -> None:
    x = np.linspace(0.1, 2, 32, dtype=np.float32).reshape(4, 8)
    record = find(kind)
    assert record is not None
    made = {}
    for use_dst in (False, True):
        g = og.Graph()
        required = {a.name: 0.5 if a.name != "max" else 1.5 for a in record.attrs if a.required}
        forward = g.add_op(kind.removesuffix("Backward"), g.input("x", shape=(4, 8)), **required)
        given = forward if use_dst else g.inputs[0]
        y = g.add_op(kind, given, g.input("d", shape=(4, 8)), use_dst=use_dst, **required)
        g.set_outputs([y])
        made[use_dst] = og.compile(g)(x=x, d=np.ones_like(x))
    np.testing.assert_allclose(made[True], made[False], rtol=1e-5, atol=1e-6)


def test_unknown_sizes_need_no_second_kernel() -> None:
    g = og.Graph()
    x = g.input("x", shape=(None, None))
    g.add_op("Multiply", x, g.add_op("Sigmoid", x))
    f = og.compile(g)
    for shape in ((4, 8), (3, 5), (1, 7)):
        f(x=np.ones(shape, np.float32))
    assert len(f.kernels) == 1


# -- the page ---------------------------------------------------------------------------------------------------------


def test_every_test_named_in_specs_onednn_exists() -> None:
    named = re.findall(r"`(?:(tests/)?([\w/]+\.py))?(?:::(\w+))?`", PAGE.read_text())
    file: Path | None = None
    count = 0
    for rooted, path, function in named:
        if path:
            file = ROOT / "tests" / path if rooted else Path(__file__).parent / path
            assert file.is_file(), path
        if function:
            assert file is not None and f"def {function}(" in file.read_text(), (file, function)
            count += 1
    assert count >= 30


def test_strides_of_an_opaque_layout_raise() -> None:
    with pytest.raises(InvalidArguments):
        og.LogicalTensor(0, "f32", (2,), layout="opaque").get_strides()
