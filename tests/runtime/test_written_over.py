"""Results in the memory of inputs, or in given memory, are right, or refused before any write."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidArguments, InvalidShape
from opgraph.runtime import cpu_compiler

rng = np.random.default_rng(5)

#: Graphs over sizes N and M; if these are equal, results of rows have the same shape as operands along them.
GRAPHS = {
    "sums of rows": "graph(x: f32[N,M], w: f32[M]) -> (y)\n  p = Multiply(x, w)\n  y = ReduceSum(p, axes=[-1])",
    "sums of rows, kept": "graph(x: f32[N,M], w: f32[N,1]) -> (y, z)\n  p = Multiply(x, w)\n"
    "  y = ReduceSum(p, axes=[-1], keep_dims=true)\n  q = Divide(p, y)\n  z = Add(q, w)",
    "an operand for each row": "graph(x: f32[N,M], w: f32[N], u: f32[M]) -> (y, z)\n"
    "  k = Unsqueeze(w, axes=[-1])\n  p = Multiply(x, k)\n  q = Add(p, u)\n  y = ReduceSum(q, axes=[-1])\n"
    "  z = Multiply(q, k)",
    "a norm and its statistics": "graph(x: f32[N,M], g: f32[M], b: f32[M]) -> (y, m, v)\n"
    "  y, m, v = LayerNorm(x, g, b)",
    "a norm's gradient": "graph(x: f32[N,M], d: f32[N,M], m: f32[N], v: f32[N], g: f32[M], b: f32[M]) -> (dx, dg, db)\n"
    "  dx, dg, db = LayerNormBackward(x, d, m, v, g, b)",
    "softmax beside its operands": "graph(x: f32[N,M], w: f32[N,M]) -> (y, z)\n  p = Multiply(x, w)\n"
    "  s = SoftMax(p, axis=-1)\n  y = Add(s, w)\n  z = Subtract(s, x)",
    "sums of columns": "graph(x: f32[N,M], w: f32[M]) -> (y, z)\n  p = Multiply(x, w)\n  y = SumTo(p, w)\n"
    "  z = Add(p, w)",
    "an outer product's rows": "graph(x: f32[N], w: f32[N]) -> (y)\n  a = Unsqueeze(x, axes=[-1])\n"
    "  p = Multiply(a, w)\n  y = ReduceSum(p, axes=[-1])",
    "elements": "graph(x: f32[N,M], w: f32[N,M]) -> (y, z)\n  y = Subtract(x, w)\n  z = Multiply(w, y)",
}


def sized(text: str, n: int, m: int) -> og.Graph:
    return og.parse(text.replace("N,M", f"{n},{m}").replace("[N", f"[{n}").replace("[M", f"[{m}"))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(5, 5), (64, 64), (300, 300), (3, 40), (40, 3)], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_result_over_an_input_is_right_or_refused(name: str, size: tuple[int, int]) -> None:
    """Every result over every input of the same shape: by `out=`, as one partition, and donated."""
    graph = sized(GRAPHS[name], *size)
    f = og.compile(graph)
    (part,) = graph.get_partitions()
    engine = og.Engine("cpu")
    compiled = part.compile(graph.inputs, graph.outputs, engine)
    feeds = {str(t.name): (np.abs(rng.standard_normal(t.shape)) + 0.5).astype(np.float32) for t in graph.inputs}
    names = [str(t.name) for t in graph.outputs]
    expected = {n: a.copy() for n, a in zip(names, _listed(f({k: v.copy() for k, v in feeds.items()})), strict=True)}
    allowed = set(compiled.inplace_ports())
    ran = 0
    for given, made in itertools.product(graph.inputs, graph.outputs):
        if given.dims != made.dims:
            continue
        for way in ("out", "execute", "donate"):
            copies = {k: v.copy() for k, v in feeds.items()}
            outs = {n: np.empty_like(a) for n, a in expected.items()} | {str(made.name): copies[str(given.name)]}
            try:
                if way == "donate":
                    results = _listed(og.compile(graph, donate=(str(given.name),))(copies))
                    outs = dict(zip(names, results, strict=True))
                elif way == "out":
                    f(copies, out=outs if len(outs) > 1 else outs[names[0]])
                else:
                    ins = {t.id: copies[str(t.name)] for t in graph.inputs}
                    compiled.execute(og.Stream(engine), ins, {t.id: outs[str(t.name)] for t in graph.outputs})
            except InvalidArguments as error:
                assert "overlaps an input that is still read" in error.what or "rows that come later" in error.what
                assert (given.id, made.id) not in allowed
                for k, v in feeds.items():
                    np.testing.assert_array_equal(copies[k], v)
                continue
            ran += 1
            for n in names:
                np.testing.assert_array_equal(outs[n], expected[n])
    assert ran or name in ("sums of rows", "an outer product's rows")


def _listed(results: object) -> list[np.ndarray]:
    return list(results.values()) if isinstance(results, dict) else [np.asarray(results)]


def test_input_returned_as_output_is_not_overwritten() -> None:
    f = og.compile(og.parse("graph(x: f32[3]) -> (x, y)\n  y = Tanh(x)"))
    x = np.arange(3, dtype=np.float32)
    with pytest.raises(InvalidArguments, match="overlaps an input that is still read"):
        f(x=x, out={"x": np.zeros(3, np.float32), "y": x})
    made = f(x=x, out={"x": x, "y": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(made["x"], np.arange(3))
    np.testing.assert_array_equal(made["y"], np.tanh(made["x"]), strict=True)


def test_result_of_another_dtype_over_an_input_is_refused() -> None:
    """C++ assumes that memory of two types does not alias, and may write one before it reads the other."""
    graph = og.parse(
        "graph(x: f32[64], w: f32[64]) -> (y, z)\n  y: s32[64] = TypeCast(w)\n  t = Tanh(x)\n  z = Add(t, w)"
    )
    f, x, w = og.compile(graph), np.linspace(-2, 2, 64, dtype=np.float32), np.ones(64, np.float32)
    (part,) = graph.get_partitions()
    compiled = part.compile(graph.inputs, graph.outputs, og.Engine("cpu"))
    ids = {str(t.name): t.id for t in (*graph.inputs, *graph.outputs)}
    for over in x, w:
        before = over.copy()
        outs = {"y": over.view(np.int32), "z": np.zeros(64, np.float32)}
        with pytest.raises(InvalidArguments, match="overlaps an input that is still read"):
            f(x=x, w=w, out=outs)
        with pytest.raises(InvalidArguments, match="overlaps an input that is still read"):
            f.bind(x=x, w=w, out=outs)
        with pytest.raises(InvalidArguments, match="overlaps an input that is still read"):
            given = {ids["x"]: x, ids["w"]: w}
            compiled.execute(og.Stream(og.Engine("cpu")), given, {ids[n]: a for n, a in outs.items()})
        np.testing.assert_array_equal(over, before)


@pytest.mark.parametrize("out", [np.float32(5), 5.0, True], ids=repr)
def test_python_number_as_out_is_refused(out: object) -> None:
    f = og.compile(og.parse("graph(x: f32[3,4]) -> (y)\n  y = ReduceSum(x, axes=[0, 1])"))
    x = np.ones((3, 4), np.float32)
    for call in f, f.bind:
        with pytest.raises(InvalidArguments, match=r"^got \w+ for f32\[\]\n  where: output "):
            call(x=x, out=out)
    assert f(x=x, out=np.zeros((), np.float32)) == 12


_TWO = "graph(x: f32[n,m], w: f32[?,?]) -> (y, z)\n  y = Tanh(x)\n  z = {}"
#: Two steps, the second of which refuses: its op, and the shapes of w and of z's output array.
SECOND_STEPS = {
    "a product of other sizes": ("MatMul(y, w)", (5, 2), (3, 2)),
    "a product of another size": ("MatMul(y, w)", (4, 2), (3, 5)),
    "a shape of other elements": ("StaticReshape(y, shape=[3, 5], special_zero=false)", (1, 1), (3, 5)),
}


@pytest.mark.parametrize("without", ["nothing", "a compiler"])
@pytest.mark.parametrize("name", SECOND_STEPS)
def test_errors_of_later_steps_are_raised_before_any_write(
    name: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without == "a compiler":
        monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
    op, w, z = SECOND_STEPS[name]
    text = _TWO.format(op)
    x, weights = np.ones((3, 4), np.float32), np.ones(w, np.float32)
    outs = {"y": np.zeros((3, 4), np.float32), "z": np.zeros(z, np.float32)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f, donated = og.compile(og.parse(text)), og.compile(og.parse(text), donate=("x",))
    for call in f, f.bind:
        with pytest.raises(InvalidShape):
            call(x=x, w=weights, out=outs)
    assert not outs["y"].any()
    with pytest.raises(InvalidShape):
        donated(x=x, w=weights, out={"z": outs["z"], "y": np.zeros((3, 4), np.float32)})
    if w != (4, 2):
        with pytest.raises(InvalidShape):
            donated(x=x, w=weights)
    assert (x == 1).all()


def test_declared_sizes_of_another_batch_are_ignored() -> None:
    """A carried node infers no shape; the model's declared shape was that of the exported batch."""
    pytest.importorskip("onnxruntime", reason="it runs the node")
    text = """graph(x: f32[n,4]) -> (y)
      e: f32[3,4] = Wildcard(x, onnx_op="Erf", onnx_domain="", onnx_opset=20)
      t = Tanh(x)
      s = Add(e, t)
      y = ReduceSum(s, axes=[0])"""
    f, x = og.compile(og.parse(text)), np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(f(x=x, out=np.empty(4, np.float32)), f(x=x))


def test_invalid_names_and_tensors_are_refused() -> None:
    graph = og.parse("graph(x: f32[3]) -> (y)\n  y = Tanh(x)")
    for call in (
        lambda: og.compile(graph, wrt=3),  # type: ignore[call-overload]
        lambda: og.compile(graph, donate=None),  # type: ignore[call-overload]
        lambda: og.Graph().set_outputs(3),  # type: ignore[arg-type]
        lambda: og.parse(str(graph), constants=3),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArguments, match=r"^(got int |wrt=3 |donate=None )"):
            call()
