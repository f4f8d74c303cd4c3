"""Sizes that are first known in a call are held to the rules of the ops, not to broadcasting alone."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest

import opgraph as og
from opgraph.runtime import host

_STATISTICS = "g: f32[?], b: f32[?], m: f32[?], v: f32[?]"

#: Graphs of unknown sizes, a shape for each input that fits, and one that broadcasts but that the op does not take.
PARAMETERS = {
    "a bias": (
        'graph(x: f32[?,?,?], b: f32[?]) -> (y)\n  s = Exp(x)\n  y = BiasAdd(s, b, data_format="NCX")',
        [(4, 3, 2), (3,)],
        [(4, 3, 2), (1,)],
    ),
    "a bias of one channel": (
        "graph(x: f32[?,?], b: f32[?]) -> (y)\n  y = BiasAdd(x, b)",
        [(4, 3), (3,)],
        [(4, 1), (3,)],
    ),
    "a bias that an op makes": (
        "graph(x: f32[?,?], b: f32[?]) -> (y)\n  e = Exp(b)\n  y = BiasAdd(x, e)",
        [(4, 3), (3,)],
        [(4, 3), (1,)],
    ),
    "a slope": (
        "graph(x: f32[?,?], b: f32[?]) -> (y)\n  y = PReLU(x, b)",
        [(4, 3), (3,)],
        [(4, 1), (3,)],
    ),
    "statistics": (
        f"graph(x: f32[?,?], {_STATISTICS}) -> (y)\n  s = Exp(x)\n  y = BatchNormInference(s, g, b, m, v, epsilon=0.1)",
        [(4, 3), (3,), (3,), (3,), (3,)],
        [(4, 3), (1,), (3,), (3,), (3,)],
    ),
    "statistics of one channel": (
        f"graph(x: f32[?,?], {_STATISTICS}) -> (y)\n  y = BatchNormInference(x, g, b, m, v, epsilon=0.1)",
        [(4, 1), (1,), (1,), (1,), (1,)],
        [(4, 1), (3,), (3,), (3,), (3,)],
    ),
}


@pytest.mark.parametrize("without", ["nothing", "a compiler"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_unknown_size_must_fit_their_op(name: str, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "a compiler":
        monkeypatch.setattr(host, "find_compiler", lambda: None)
    text, fitting, broadcasting = PARAMETERS[name]
    graph = og.parse(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f = og.compile(graph)
    for shapes in fitting, broadcasting, fitting:
        feeds = {str(t.name): np.ones(s, np.float32) for t, s in zip(graph.inputs, shapes, strict=True)}
        if shapes is fitting:
            np.testing.assert_allclose(f(feeds), og.evaluate(graph, feeds), rtol=1e-6)
            continue
        for call in f, partial(og.evaluate, graph):
            with pytest.raises(og.errors.InvalidShape, match=r"\n  where: (BiasAdd|PReLU|BatchNormInference) "):
                call(feeds)


@pytest.mark.parametrize("without", ["nothing", "a compiler"])
def test_a_sum_is_no_larger_than_what_it_adds_up(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "a compiler":
        monkeypatch.setattr(host, "find_compiler", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f = og.compile(og.parse("graph(x: f32[?,3], like: f32[n,3]) -> (y)\n  t = Exp(x)\n  y = SumTo(t, like)"))
    like = np.ones((4, 3), np.float32)
    assert f(x=like, like=like).shape == (4, 3)
    with pytest.raises(og.errors.InvalidShape, match=r"does not broadcast to that of the values\n  where: SumTo "):
        f(x=like[:1], like=like)
    # A shape that something else has, too.
    f = og.compile(og.parse("graph(c: f32[], like: f32[n,3]) -> (y)\n  b = BroadcastTo(c, like)\n  y = SumTo(b, like)"))
    np.testing.assert_array_equal(f(c=np.float32(2), like=like), 2 * like)
