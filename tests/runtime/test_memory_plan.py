"""Planned memory: values that are needed at the same time share no byte, and memory is reused where possible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opgraph as og
from opgraph.runtime.memory_plan import ALIGNMENT, Buffer, MemoryPlan, Value, planned

MODELS = Path(__file__).resolve().parents[3] / "shared" / "data" / "onnx-models"


def value(id: int, size: int, first: int, last: int, over: tuple[int, ...] = ()) -> Value:
    return Value(id=id, name=f"v{id}", size=size, first=first, last=last, may_lie_over=over)


@st.composite
def values(draw: st.DrawFn) -> list[Value]:
    """Up to 30 values of a few sizes and any lifetimes; each may lie over any value that ends where it begins."""
    made: list[Value] = []
    for id in range(draw(st.integers(1, 30))):
        first = draw(st.integers(0, 12))
        last = first + draw(st.integers(0, 6))
        over = tuple(v.id for v in made if v.last == first and v.first < first and draw(st.booleans()))
        made.append(value(id, draw(st.sampled_from((0, 1, 64, 100, 4096))), first, last, over))
    return made


@settings(max_examples=200, deadline=None)
@given(values())
def test_values_alive_at_the_same_time_share_no_byte(given: list[Value]) -> None:
    plan = planned(given)
    assert plan.clashes() == []
    assert sorted(b.value.id for b in plan.buffers) == sorted(v.id for v in given)
    assert all(b.offset % ALIGNMENT == 0 and b.end <= plan.size for b in plan.buffers)
    assert plan.size <= plan.size_apart


def test_plan_check_detects_a_clash() -> None:
    a, b = value(0, 100, 0, 2), value(1, 100, 1, 3)
    wrong = MemoryPlan((Buffer(value=a, offset=0, over=None), Buffer(value=b, offset=64, over=None)), 256)
    assert wrong.clashes() == [(0, 1)]
    taken_too_early = MemoryPlan((Buffer(value=a, offset=0, over=None), Buffer(value=b, offset=0, over=0)), 128)
    assert taken_too_early.clashes() == [(0, 1)]


def test_memory_is_reused_after_the_last_read() -> None:
    chain = [value(i, 1000, i, i + 1) for i in range(10)]
    assert planned(chain).size == 2 * 1024
    in_place = [value(i, 1000, i, i + 1, (i - 1,)) for i in range(10)]
    assert planned(in_place).size == 1024


def test_value_still_to_be_read_is_not_overwritten() -> None:
    plan = planned([value(0, 64, 0, 5), value(1, 64, 1, 2, (0,))])
    assert [b.over for b in plan.buffers] == [None, None]


def test_plan_prints_as_a_table() -> None:
    text = str(planned([value(0, 100, 0, 1), value(1, 100, 1, 2, (0,))]))
    assert text.splitlines()[0] == "2 values in 128 bytes (256 side by side)"
    assert text.splitlines()[-1].split() == ["v1", "100", "0", "1-2", "v0"]


def test_only_kernels_write_in_place_and_never_over_inputs_or_outputs() -> None:
    g = og.Graph()
    x, d = g.input("x", shape=("n", 8)), g.input("d", shape=("m", 8))
    # Two kernels in sequence: they are not merged because their shapes are not known to be equal.
    h = g.add_op("Add", g.add_op("Sigmoid", x, name="s"), d, name="h")
    g.add_op("Multiply", h, g.add_op("Exp", d), name="y")
    f = og.compile(g)
    feeds = {"x": np.ones((4, 8), np.float32), "d": np.full((4, 8), 2, np.float32)}
    before = {k: v.copy() for k, v in feeds.items()}
    first = f(feeds)
    kept = first.copy()
    for _ in range(3):
        assert f(feeds) is not first
    np.testing.assert_array_equal(first, kept)
    assert all((feeds[k] == before[k]).all() for k in feeds)
    plan = f.memory_plan(feeds)
    assert plan.clashes() == []
    assert not {b.value.name for b in plan.buffers} & {"y"}


@pytest.mark.skipif(not MODELS.is_dir(), reason="the exported models are not beside this checkout")
@pytest.mark.parametrize("name", ["efficientnet", "gpt2", "llama", "qwen3"])
def test_plans_of_exported_models_have_no_clashes_and_save_memory(name: str) -> None:
    pytest.importorskip("onnx_ir")
    pytest.importorskip("onnxruntime")
    f = og.compile(og.onnx.load(MODELS / f"{name}.onnx"))
    with np.load(MODELS / f"{name}_io.npz") as data:
        plan = f.memory_plan({f.graph.inputs[0].id: data["x"]})
    assert plan.clashes() == []
    if len(f._chain.main) > 2:
        assert plan.size < plan.size_apart / 2
