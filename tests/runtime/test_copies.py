"""An executable is copied and pickled by compiling it again; objects that are no arrays are refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidArguments

TEXT = """graph(x: f32[n], a: f32[]) -> (y)
  s = Sigmoid(x)
  p = Multiply(x, s)
  const c: f32[] = 2.5
  q = Add(p, c)
  y = Multiply(q, a)"""
FEEDS = {"x": np.float32([-1, 0, 2]), "a": np.asarray(3, np.float32)}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda f: pickle.loads(pickle.dumps(f)),
}


@pytest.mark.parametrize("way", COPIES)
def test_copied_executable_runs_and_trains_equally(way: str) -> None:
    f = og.compile(og.parse(TEXT), donate=("x",), rounding="each")
    again = COPIES[way](f)
    assert again is not f and again.graph == f.graph
    feeds = [{name: array.copy() for name, array in FEEDS.items()} for _ in range(2)]
    np.testing.assert_array_equal(again(feeds[0]), f(feeds[1]))
    np.testing.assert_array_equal(feeds[0]["x"], feeds[1]["x"])  # donated in both
    g = og.compile(og.parse(TEXT), wrt=("x", "c"))
    again = COPIES[way](g)
    assert again.saved_tensors() == g.saved_tensors()
    given = {**FEEDS, "c": np.asarray(2, np.float32)}
    for one, other in zip(again.vjp(given), g.vjp(given), strict=True):
        taken = [v(np.ones(3, np.float32)) if callable(v) else {"": v} for v in (one, other)]
        assert taken[0].keys() == taken[1].keys()
        for name in taken[0]:
            np.testing.assert_array_equal(taken[0][name], taken[1][name])


def test_executable_compiled_without_wrt_has_no_vjp() -> None:
    f = og.compile(og.parse(TEXT))
    for name in ("vjp", "saved_tensors", "backward_graph"):
        with pytest.raises(InvalidArguments, match=rf"no {name}: it was compiled without wrt[^$]*wrt=\(\"x\",\)"):
            getattr(f, name)
        assert not hasattr(f, name)
    with pytest.raises(AttributeError, match="no attribute 'vpj'"):
        f.vpj  # type: ignore[attr-defined]  # noqa: B018


MASKED = np.ma.masked_array(np.float32([1, 2]), mask=[True, False])


@pytest.mark.parametrize(
    "call",
    [
        lambda g: og.compile(g)(x=MASKED),
        lambda g: og.compile(g)(x=MASKED.data, out=MASKED.copy()),
        lambda g: og.compile(g).bind(x=MASKED, out=MASKED.data),
        lambda g: og.evaluate(g, x=MASKED),
        lambda g: og.Graph().constant("c", MASKED),
        lambda g: og.Graph().constant("c", MASKED, dtype="f16"),
        lambda g: og.LogicalTensor(0, "f32", (2,), data=MASKED),
        lambda g: g.get_partitions()[0].compile([t.with_(dims=(2,)) for t in g.inputs], g.outputs, og.Engine())
        .execute(og.Stream(og.Engine()), {g.inputs[0].id: MASKED}, {g.outputs[0].id: MASKED.data.copy()}),
    ],
    ids=["a call", "out", "bind", "evaluate", "constant", "converted", "data", "execute"],
)  # fmt: skip
def test_masked_arrays_are_refused(call: Callable[[og.Graph], object]) -> None:
    with pytest.raises(InvalidArguments, match=r"lose its mask[^$]*filled"):
        call(og.parse("graph(x: f32[n]) -> (y)\n y = Exp(x)").finalize())


@pytest.mark.parametrize("names", [3, [[]], [{}], [3], [np.zeros(2)]], ids=str)
def test_input_names_must_be_strings(names: Any) -> None:
    graph = og.parse(TEXT)
    for call in (
        lambda: og.compile(graph, donate=names),
        lambda: og.compile(graph, wrt=names),
        lambda: og.gradient(graph, wrt=names),
    ):
        with pytest.raises(InvalidArguments, match=r"names of inputs|choose among"):
            call()
