"""Sizes that are first known in a call must satisfy the rules of the ops, not only broadcasting."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest

import opgraph as og
from opgraph.runtime import cpu_compiler

_STATISTICS = "g: f32[?], b: f32[?], m: f32[?], v: f32[?]"

#: Graphs of unknown sizes, with input shapes that fit, and shapes that broadcast but that the op does not take.
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
    "equal shapes": (
        'graph(x: f32[?,?], y: f32[?,?]) -> (z)\n  z = Multiply(x, y, auto_broadcast="none")',
        [(4, 3), (4, 3)],
        [(4, 3), (4, 1)],
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
        monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
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
            with pytest.raises(
                og.errors.InvalidShape, match=r"\n  where: (BiasAdd|PReLU|BatchNormInference|Multiply) "
            ):
                call(feeds)


@pytest.mark.parametrize("without", ["nothing", "a compiler"])
def test_sum_target_larger_than_its_operand_is_refused(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "a compiler":
        monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f = og.compile(og.parse("graph(x: f32[?,3], like: f32[n,3]) -> (y)\n  t = Exp(x)\n  y = SumTo(t, like)"))
    like = np.ones((4, 3), np.float32)
    assert f(x=like, like=like).shape == (4, 3)
    with pytest.raises(og.errors.InvalidShape, match=r"does not broadcast to that of the values\n  where: SumTo "):
        f(x=like[:1], like=like)
    # A shape that another value has, too.
    f = og.compile(og.parse("graph(c: f32[], like: f32[n,3]) -> (y)\n  b = BroadcastTo(c, like)\n  y = SumTo(b, like)"))
    np.testing.assert_array_equal(f(c=np.float32(2), like=like), 2 * like)


#: Ops with an input that holds a shape: arguments, the shape that fits them, and shapes that do not.
TOLD = {
    "ConvolutionBackwardData": (
        "x: f32{0}, w: f32{1}, s: s32[4]",
        "(x, w, s, strides=[2, 2], pads_begin=[0, 0], pads_end=[0, 0], dilations=[1, 1], "
        'data_format="NCX", weights_format="OIX")',
        [(1, 3, 3, 3), (3, 2, 2, 3)],
        [1, 2, 6, 7],
        [[1, 2, 5, 7], [1, 3, 6, 7], [2, 2, 6, 7]],
    ),
    "ConvolutionBackwardWeights": (
        "x: f32{0}, w: f32{1}, s: s32[3]",
        '(x, w, s, strides=[1], pads_begin=[0], pads_end=[0], dilations=[1], data_format="NCX", weights_format="OIX")',
        [(2, 3, 8), (2, 4, 6)],
        [4, 3, 3],
        [[4, 3, 2], [4, 2, 3]],
    ),
    "AvgPoolBackward": (
        "x: f32{0}, s: s32[3]",
        '(x, s, strides=[2], pads_begin=[0], pads_end=[0], exclude_pad=false, kernel=[2], data_format="NCX")',
        [(2, 3, 4)],
        [2, 3, 8],
        [[2, 3, 11], [2, 2, 8]],
    ),
    "InterpolateBackward": (
        "x: f32{0}, d: f32{1}, s: s32[1]",
        '(x, d, s, mode="linear", data_format="NCX")',
        [(2, 3, 4), (2, 3, 8)],
        [8],
        [[7], [-1]],
    ),
    "ReduceSum": ("x: f32{0}, s: s32[1]", "(x, s, keep_dims=true)", [(2, 3)], [1], [[2], [-3]]),
}


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("name", TOLD)
def test_shape_operand_known_at_run_time_must_fit(name: str, declared: bool) -> None:
    inputs, arguments, shapes, fitting, others = TOLD[name]
    dims = [list(s) if declared else "[" + ",".join("?" * len(s)) + "]" for s in shapes]
    graph = og.parse(f"graph({inputs.format(*dims)}) -> (y)\n  y = {name}{arguments}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f = og.compile(graph)
    arrays = [np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in shapes]
    for numbers in fitting, *others, fitting:
        feeds = {str(t.name): a for t, a in zip(graph.inputs, [*arrays, np.array(numbers, np.int32)], strict=True)}
        if numbers == fitting:
            np.testing.assert_allclose(f(feeds), og.evaluate(graph, feeds), rtol=1e-5, atol=1e-5)
            continue
        for call in f, partial(og.evaluate, graph):
            with pytest.raises(og.errors.InvalidShape, match=rf"\n  where: {name} "):
                call(feeds)


def test_invalid_shape_is_refused_before_any_write() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = "graph(x: f32[2,3], s: s32[1]) -> (y, z)\n  y = Exp(x)\n  z = ReduceSum(y, s, keep_dims=true)"
        f = og.compile(og.parse(text), donate=("x",))
    x = np.ones((2, 3), np.float32)
    with pytest.raises(og.errors.InvalidShape):
        f(x=x, s=np.array([2], np.int32))
    assert (x == 1).all()
    assert f(x=x, s=np.array([1], np.int32))["z"].shape == (2, 1)


def test_unused_op_with_invalid_shapes_refuses_no_call() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = "graph(x: f32[n], w: f32[8]) -> (y)\n  d = Add(x, w)\n  e = Exp(x)\n  s = MatMul(w, w)\n  y = Add(e, s)"
        f = og.compile(og.parse(text))
    x, w = np.ones(5, np.float32), np.ones(8, np.float32)
    out = np.empty(5, np.float32)
    np.testing.assert_array_equal(f(x=x, w=w, out=out), f(x=x, w=w))
