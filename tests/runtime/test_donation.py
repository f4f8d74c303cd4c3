"""Donated or given memory is written only if that is proven safe; else it is refused, with the reason, before a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import opgraph as og
from opgraph.errors import InvalidArguments

EXP = "graph(x: f32[8]) -> (y)\n  y = Exp(x)"
TWO = "graph(x: f32[8], z: f32[8]) -> (y, w)\n  y = Add(x, z)\n  w = Subtract(x, z)"
#: x is read by the first kernel, z by the last one.
THREE_STEPS = (
    "graph(x: f32[4,4], z: f32[4,4], w: f32[4,4]) -> (y, q)\n  y = Exp(x)\n  %1 = MatMul(y, w)\n  q = Add(%1, z)"
)

#: Graphs with an input that cannot be donated, and the reason.
REFUSED = {
    "a result of another dtype": (
        "graph(x: f32[4]) -> (y)\n  y: f16[4] = TypeCast(x)",
        "x",
        'what the last kernel to read it makes does not fit: tensor "y" f16[4] over f32[4]',
    ),
    "a result of another shape": (
        "graph(x: f32[4], z: f32[3,4]) -> (y)\n  y = Add(x, z)",
        "x",
        'what the last kernel to read it makes does not fit: tensor "y" f32[3,4] over f32[4]',
    ),
    "sizes that may differ": (
        "graph(x: f32[?], z: f32[?]) -> (y)\n  y = Add(x, z)",
        "x",
        'fix:   name unknown dimensions: "n" stands for one size wherever it is',
    ),
    "an output of the graph": ("graph(x: f32[4]) -> (x, y)\n  y = Exp(x)", "x", "it is an output of the graph, too"),
    "a library": (
        "graph(x: f32[4,4], w: f32[4,4]) -> (y)\n  y = MatMul(x, w)",
        "x",
        "MatMul .* reads it last, in a library that allocates its results itself",
    ),
    "nothing to read": ("graph(x: f32[4], z: f32[4]) -> (y)\n  y = Exp(z)", "x", "nothing reads its data"),
    "no such input": (EXP, "z", "there is no input 'z' to donate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsafe_donation_is_refused_at_compile_time(case: str) -> None:
    text, name, reason = REFUSED[case]
    with pytest.raises(InvalidArguments, match=reason.replace("[", r"\[")):
        og.compile(og.parse(text), donate=(name,))


def test_each_donated_input_holds_one_result() -> None:
    g = og.parse("graph(x: f32[8], z: f32[8]) -> (y)\n  y = Add(x, z)")
    with pytest.raises(InvalidArguments, match='"y", which fits, lies over another donated input already'):
        og.compile(g, donate=("x", "z"))
    x, z = np.ones(8, np.float32), np.full(8, 2, np.float32)
    results = og.compile(og.parse(TWO), donate=("x", "z"))(x=x, z=z)
    assert results["y"] is x and results["w"] is z
    assert (x == 3).all() and (z == -1).all()


def test_input_with_a_default_cannot_be_donated() -> None:
    g = og.parse(EXP)
    g.defaults = {"x": np.ones(8, np.float32)}
    with pytest.raises(InvalidArguments, match="it has a default, which further calls read"):
        og.compile(g, donate="x")


@pytest.mark.parametrize("dims", [(None, 4), ("n", 4), None], ids=str)
def test_donation_accepts_equal_unknown_sizes(dims: Any) -> None:
    g = og.Graph()
    g.add_op("Multiply", g.add_op("Exp", g.input("x", shape=dims)), 2.0)
    x = np.zeros((3, 4), np.float32)
    assert og.compile(g, donate="x")(x=x) is x
    assert (x == 2).all()


class Exported:
    """An array of an unknown library, through DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **more: Any) -> Any:
        return self._array.__dlpack__(**more)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def _torch(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(array)


KINDS: dict[str, Callable[[np.ndarray], Any]] = {"NumPy": lambda a: a, "torch": _torch, "DLPack": Exported}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(k, v) for k in KINDS for v in ("dense", "every third", "backwards") if (k, v) != ("torch", "backwards")],
)
def test_donated_array_of_any_layout_holds_the_result(kind: str, layout: str) -> None:
    base = np.zeros(24, np.float32)
    x = {"dense": base[8:16], "every third": base[::3], "backwards": base[15:7:-1]}[layout]
    x[:] = np.linspace(-1, 1, 8)
    expected, untouched = np.exp(x.astype(np.float64)), (base == 0).sum()
    got = og.compile(og.parse(EXP), donate="x")(x=KINDS[kind](x))
    np.testing.assert_allclose(x, expected, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(got), x)
    assert (base == 0).sum() == untouched


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("windows", ["one number", "windows of a row"])
def test_array_overlapping_itself_is_not_overwritten(kind: str, windows: str) -> None:
    """A kernel would write 8 numbers to the place of one, and destroy the memory after it."""
    base = np.zeros(64, np.float32)
    g, x = (
        (og.parse(EXP), as_strided(base[32:33], (8,), (0,)))
        if windows == "one number"
        else (og.parse("graph(x: f32[4,4]) -> (y)\n  y = Exp(x)"), as_strided(base, (4, 4), (4, 4)))
    )
    with pytest.raises(InvalidArguments, match="cannot be donated: its array overlaps itself"):
        og.compile(g, donate="x")(x=KINDS[kind](x))
    with pytest.raises(InvalidArguments, match="the output array overlaps itself"):
        og.compile(g)(x=np.ones(x.shape, np.float32), out=KINDS[kind](x))
    assert not base.any()


def test_read_only_array_cannot_be_donated() -> None:
    f = og.compile(og.parse(EXP), donate="x")
    with pytest.raises(InvalidArguments, match="cannot be donated: its array is read-only"):
        f(x=np.broadcast_to(np.float32(1), (8,)))
    x = np.ones(8, np.float32)
    x.flags.writeable = False
    with pytest.raises(InvalidArguments, match="cannot be donated: its array is read-only"):
        f(x=x)


@pytest.mark.parametrize("kind", KINDS)
def test_array_shared_with_another_input_cannot_be_donated(kind: str) -> None:
    make, base = KINDS[kind], np.ones(12, np.float32)
    f = og.compile(og.parse(TWO), donate="x")
    for x, z in ((base[:8], base[:8]), (base[:8], base[4:])):
        with pytest.raises(InvalidArguments, match="its array overlaps that of another input"):
            f(x=make(x), z=make(z))
    assert (base == 1).all()


def test_alias_read_by_a_later_step_cannot_be_donated() -> None:
    f = og.compile(og.parse(THREE_STEPS), donate="x")
    assert len(f.partitions) == 3
    x, w = np.ones((4, 4), np.float32), np.eye(4, dtype=np.float32)
    with pytest.raises(InvalidArguments, match="its array overlaps that of another input"):
        f(x=x, z=x, w=w)
    assert (x == 1).all()
    assert f(x=x, z=x.copy(), w=w)["y"] is x


def test_alias_read_by_backward_cannot_be_donated() -> None:
    f = og.compile(og.parse(THREE_STEPS), wrt="w", donate="z")
    assert "x" not in {s.name for s in f.saved_tensors()}
    x = np.ones((4, 4), np.float32)
    with pytest.raises(InvalidArguments, match="its array overlaps that of another input"):
        f.vjp(x=x, z=x, w=np.eye(4, dtype=np.float32))


def test_interleaved_halves_of_one_array_may_be_donated() -> None:
    """Example: gate and value of a packed projection. Their address ranges overlap, but they share no element."""
    packed = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    gate, up = packed[:, :8], packed[:, 8:]
    g = og.parse("graph(x: f32[5,8], z: f32[5,8]) -> (y)\n  %0 = Swish(x)\n  y = Multiply(%0, z)")
    expected, before = og.compile(g)(x=gate.copy(), z=up.copy()), up.copy()
    result = og.compile(g, donate="x")(x=gate, z=up)
    assert result is gate
    np.testing.assert_array_equal(gate, expected)
    np.testing.assert_array_equal(up, before)
    other = np.empty((5, 16), np.float32)
    og.compile(og.parse(TWO.replace("[8]", "[5,8]")))(x=gate, z=up, out={"y": other[:, :8], "w": other[:, 8:]})
    np.testing.assert_array_equal(other, np.hstack([gate + up, gate - up]))


def test_outputs_may_not_overlap_each_other() -> None:
    f, base = og.compile(og.parse(TWO)), np.zeros(12, np.float32)
    feeds = {"x": np.ones(8, np.float32), "z": np.ones(8, np.float32)}
    for y, w in ((base[:8], base[:8]), (base[:8], base[4:])):
        with pytest.raises(InvalidArguments, match="the output array overlaps another output"):
            f(feeds, out={"y": y, "w": w})
        with pytest.raises(InvalidArguments, match="the output array overlaps another output"):
            f.bind(feeds, out={"y": y, "w": w})
    assert not base.any()


def test_donated_array_is_untouched_if_out_is_given() -> None:
    f = og.compile(og.parse(EXP), donate="x")
    x, out = np.ones(8, np.float32), np.empty(8, np.float32)
    call = f.bind(x=x, out=out)
    call()
    call()
    f(x=np.broadcast_to(np.float32(1), (8,)), out=out)
    assert (x == 1).all() and (out == np.float32(np.e)).all()


def test_out_in_the_donated_array_holds_only_that_result() -> None:
    """`s` would lie over `k`, although it is no output and belongs to the kernel that makes `b`."""
    graph = og.parse(
        "graph(x: f32[n], z: f32[n], k: f32[1]) -> (b)\n  e = Subtract(x, k)\n  s = SumTo(e, k)\n"
        "  t = SumTo(z, s)\n  b = ReduceMin(e, axes=[0], keep_dims=true)"
    )
    x, k = np.arange(5, dtype=np.float32), np.array([1.5], np.float32)
    og.compile(graph, donate=["k"])({"x": x, "z": x, "k": k}, out=k)
    assert k == -1.5


@pytest.mark.parametrize("way", ["donate", "out", "bind", "execute", "vjp"])
def test_autograd_detects_kernel_writes_into_saved_tensors(way: str) -> None:
    torch = pytest.importorskip("torch")
    kept = torch.ones(8, requires_grad=True).exp()  # its backward reads the result
    target, ones, g = kept.detach(), torch.ones(8), og.parse(EXP)
    if way == "donate":
        og.compile(g, donate="x")({"x": target})
    elif way == "out":
        og.compile(g)(x=ones, out=target)
    elif way == "bind":
        og.compile(g).bind(x=ones, out={"y": target})()
    elif way == "vjp":
        og.compile(g, wrt="x", donate="x").vjp(x=target)
    else:
        (part,) = g.finalize().get_partitions()
        (x,), (y,), engine = part.input_ports, part.output_ports, og.Engine("cpu")
        part.compile([x], [y], engine).execute(og.Stream(engine), {x.id: ones}, {y.id: target})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_leaf_requiring_grad_is_not_overwritten() -> None:
    torch = pytest.importorskip("torch")
    leaf = torch.ones(8, requires_grad=True)
    with pytest.raises(InvalidArguments, match="requires a gradient would be written to"):
        og.compile(og.parse(EXP), donate="x")(x=leaf)
    with pytest.raises(InvalidArguments, match="requires a gradient would be written to"):
        og.compile(og.parse(EXP))(x=torch.ones(8), out=leaf)
    assert (leaf == 1).all()
    with torch.no_grad():
        og.compile(og.parse(EXP), donate="x")(x=leaf)
    assert (leaf != 1).all()
