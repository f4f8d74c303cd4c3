"""Compiled graphs against the float64 reference: every layout, the calling conventions, and bad input."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import opgraph as og

rng = np.random.default_rng(7)


def swish_add() -> og.Graph:
    """x * sigmoid(a x) + b, with a and b of any broadcastable shape."""
    g = og.Graph()
    x, a, b = (g.input(n, shape=None) for n in "xab")
    y = g.add_op("Multiply", x, g.add_op("Sigmoid", g.add_op("Multiply", x, a)))
    g.add_op("Add", y, b, name="y")
    return g


def arrays(*shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in zip("xab", shapes, strict=True)}


def assert_right(f: og.Executable, feeds: dict[str, np.ndarray]) -> None:
    got = f(feeds)
    exact = og.evaluate(f.graph, feeds)
    assert got.shape == exact.shape
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-6)


SHAPES = {
    "contiguous": ((4, 5, 6), (4, 5, 6), (4, 5, 6)),
    "row": ((4, 5, 64), (64,), (1, 64)),
    "channel": ((4, 5, 64), (5, 1), (1, 5, 1)),
    "scalar": ((33,), (), (1,)),
    "general": ((4, 1, 6), (5, 1), (4, 5, 6)),
    "outer product": ((7, 1), (1, 9), (7, 9)),
    "0-d": ((), (), ()),
    "0 elements": ((0, 5), (5,), ()),
    "five axes": ((2, 3, 4, 5, 6), (3, 1, 5, 1), (2, 1, 4, 1, 6)),
    "large": ((300, 1000), (1000,), ()),
}


@pytest.fixture(scope="module")
def compiled() -> og.Executable:
    return og.compile(swish_add())


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_every_broadcast_layout_agrees_with_the_reference(
    compiled: og.Executable, shapes: tuple[tuple[int, ...], ...]
) -> None:
    assert_right(compiled, arrays(*shapes))


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda x: x.T,
    "every other column": lambda x: x[:, ::2],
    "every other row": lambda x: x[::2],
    "reversed": lambda x: x[::-1, ::-1],
    "offset": lambda x: x.reshape(-1)[1:].reshape(-1),
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "fortran": np.asfortranarray,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_are_read_in_place(compiled: og.Executable, view: Callable[[np.ndarray], np.ndarray]) -> None:
    x = view(rng.standard_normal((64, 64)).astype(np.float32))
    assert_right(compiled, {"x": x, "a": np.float32(1.5), "b": x})


def test_unaligned_memory_is_read_right(compiled: og.Executable) -> None:
    raw = np.zeros(4 * 100 + 1, np.uint8)
    x = raw[1:].view(np.float32)
    x[:] = rng.standard_normal(100)
    assert not x.flags.aligned
    assert_right(compiled, {"x": x, "a": np.ones(100, np.float32), "b": x})


def test_kernels_refuse_strides_that_are_no_multiple_of_element_size() -> None:
    """Example: the field of a record, whose stride is no whole number of elements."""
    records = np.zeros((3, 4), np.dtype([("tag", "u1"), ("v", "f4")]))
    records["v"] = rng.standard_normal((3, 4))
    dense, field = records["v"].copy(), records["v"]
    f = og.compile(og.parse("graph(x: f32[?,?]) -> (y)\n  y = Tanh(x)"))
    for call in (lambda: f(x=field), lambda: f(x=dense, out=field), lambda: f.bind(x=field, out=dense.copy())):
        with pytest.raises(og.errors.InvalidArguments, match=r"4 bytes lie 20, 5 bytes apart.*\n  where: .*\n  fix: "):
            call()
    assert f(x=field[:1, :1]).shape == (1, 1)  # a single element may have any strides
    product = og.compile(og.parse("graph(x: f32[?,4], w: f32[4,4]) -> (y)\n  y = MatMul(x, w)"))
    np.testing.assert_allclose(product(x=field, w=np.eye(4, dtype=np.float32)), dense)


@pytest.mark.parametrize(
    "op",
    [
        'BiasAdd(x, b, data_format="NCX")',
        'PReLU(x, b, data_format="NCX", per_channel_broadcast=true)',
        'SumTo(x, b, data_format="NCX", per_channel_broadcast=true)',
    ],
)
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_channel_operand_of_wrong_size_is_refused(op: str, channels: int) -> None:
    """Sizes are known only when arrays are given; a kernel would read or write beyond the operand."""
    graph = og.parse(f"graph(x: f32[?,?,?], b: f32[?]) -> (y)\n  y = {op}")
    f = og.compile(graph)
    b = np.linspace(0, 1, 4, dtype=np.float32)
    fits = {"x": rng.standard_normal((2, 4, 3)).astype(np.float32), "b": b}
    np.testing.assert_allclose(f(fits), og.evaluate(graph, fits), rtol=1e-6)
    for call in (f, lambda feeds: og.evaluate(graph, feeds)):
        with pytest.raises(og.errors.InvalidShape, match=r"\n  where: .*\n  fix: "):
            call({"x": np.ones((2, channels, 3), np.float32), "b": b})


def test_channel_operand_broadcasts_along_a_channel_axis_of_size_one() -> None:
    graph = og.parse(
        "graph(x: f32[?], like: f32[?,?,?]) -> (y)\n  t = Tanh(x)\n  y = BroadcastTo(t, like, "
        'data_format="NCX", per_channel_broadcast=true)'
    )
    feeds = {"x": np.ones(3, np.float32), "like": np.ones((2, 1, 2), np.float32)}
    assert og.compile(graph)(feeds).shape == og.evaluate(graph, feeds).shape == (2, 3, 2)


def test_results_do_not_depend_on_the_number_of_threads(
    compiled: og.Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opgraph.runtime import threads

    feeds = arrays((1000, 1003), (1003,), (1000, 1))
    several = compiled(feeds)
    monkeypatch.setattr(threads, "team", lambda size: (1, None))
    np.testing.assert_array_equal(several.view(np.uint32), compiled(feeds).view(np.uint32))


def test_two_threads_may_call_at_once(compiled: og.Executable) -> None:
    feeds = [arrays((100, 1000), (1000,), ()) for _ in range(4)]
    wanted = [compiled(f) for f in feeds]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not np.array_equal(compiled(feeds[index]), wanted[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_a_forked_child_runs() -> None:
    code = """
import os, warnings, numpy as np, opgraph as og
g = og.Graph(); x = g.input("x", shape=(None,)); g.add_op("Sigmoid", x)
f = og.compile(g); x = np.ones(1 << 20, np.float32); f(x=x)
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    os._exit(0 if np.allclose(f(x=x), 0.7310586) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "0"


# -- calling ----------------------------------------------------------------------------------------------------------


def test_names_that_are_no_identifiers_are_passed_in_a_dict() -> None:
    g = og.Graph()
    x, out = g.input('a "b"\n*/', shape=(3,)), g.input("out", shape=(3,))
    g.add_op("Add", x, out, name="y; int main() {")
    f = og.compile(g)
    one = np.ones(3, np.float32)
    np.testing.assert_array_equal(f({'a "b"\n*/': one, "out": one}), 2 * one)
    assert "main" not in "".join(f.kernels.values())


def test_several_outputs_are_a_dict_in_declaration_order() -> None:
    g = og.Graph()
    x = g.input("x", shape=(3,))
    s = g.add_op("Sigmoid", x, name="s")
    g.add_op("Multiply", x, s, name="y")
    g.output(s)
    f = og.compile(g)
    x = np.ones(3, np.float32)
    got = f(x=x)
    assert list(got) == ["s", "y"]
    buffers = {"y": np.empty(3, np.float32), "s": np.empty(3, np.float32)}
    assert f(x=x, out=buffers) is buffers
    np.testing.assert_array_equal(buffers["s"], got["s"])


@pytest.mark.parametrize(
    ("dtype", "taken", "refused"),
    [
        ("s32", {3: 3, True: 1, -0.0: 0}, (2.7, 1 << 40, float("nan"), float("inf"))),
        ("u8", {200: 200, 7.0: 7}, (300, -1, 0.5)),
        ("boolean", {False: False, 1: True}, (2, 0.5, float("nan"))),
        ("f16", {0.1: np.float16(0.1), True: 1}, (10**400,)),
    ],
)
def test_python_numbers_are_converted_to_the_input_dtype_or_refused(
    dtype: str, taken: dict[float, object], refused: tuple[float, ...]
) -> None:
    """Floats are rounded; 2.7 is refused for an integer."""
    f = og.compile(og.parse(f"graph(k: {dtype}[]) -> (y)\n  y = Identity(k)"))
    for given, made in taken.items():
        assert f(k=given) == made
    for given in refused:
        with pytest.raises(og.errors.InvalidDataType, match=rf'^got {given!r} for {dtype}\[\]\n  where: input "k"'):
            f(k=given)


def test_default_returned_as_output_is_read_only() -> None:
    g = og.Graph()
    x, d = g.input("x", "f32", (3,)), g.input("d", "f32", (3,))
    g.output(g.add_op("Multiply", x, d, name="y"))
    g.output(d)
    g.defaults["d"] = np.full(3, 2, np.float32)
    f, ones = og.compile(g), np.ones(3, np.float32)
    for call in f, partial(og.evaluate, g, dtype=None):
        with pytest.raises(ValueError, match="read-only"):
            call(x=ones)["d"][:] = 0
        np.testing.assert_array_equal(call(x=ones)["y"], 2 * ones)


def test_out_may_be_the_input_itself(compiled: og.Executable) -> None:
    feeds = arrays((100,), (), ())
    wanted = compiled(feeds)
    compiled(feeds, out=feeds["x"])
    np.testing.assert_array_equal(feeds["x"], wanted)


def test_bind_repeats_a_call_on_the_same_arrays(compiled: og.Executable) -> None:
    feeds, out = arrays((100,), (), ()), np.empty(100, np.float32)
    call = compiled.bind(feeds, out=out)
    feeds["x"][:] = 2
    assert call() is out
    np.testing.assert_array_equal(out, compiled(feeds))


def test_donated_memory_holds_the_output() -> None:
    g = og.Graph()
    x = g.input("x", shape=(1000,))
    g.add_op("Sigmoid", x)
    f = og.compile(g, donate=("x",))
    x = np.ones(1000, np.float32)
    assert f(x=x) is x
    np.testing.assert_allclose(x, 0.7310586, rtol=1e-6)


def test_inputs_and_constants_may_be_outputs() -> None:
    g = og.Graph()
    x, c = g.input("x", shape=(2,)), g.constant("c", np.ones(2, np.float32))
    y = g.add_op("Add", x, c, name="y")
    g.output(x, c, y)
    got = og.compile(g)(x=np.zeros(2, np.float32))
    assert list(got) == ["x", "c", "y"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_values_are_rounded_once(dtype: type) -> None:
    name = "f16" if dtype is np.float16 else "bf16"
    g = og.Graph()
    x = g.input("x", name, (None,))
    g.add_op("Subtract", g.add_op("Add", x, 1.0), 1.0)
    x = np.array([2.0**-12], np.float32).astype(dtype)
    assert og.compile(g)(x=x).astype(np.float64)[0] == float(x[0])
    assert og.compile(g, rounding="each")(x=x).astype(np.float64)[0] == 0.0


QUESTIONS = {
    "IsInf(h)": np.isinf,
    "IsNaN(h)": np.isnan,
    "Equal(h, 0)": lambda h: h == 0,
    "NotEqual(1, h)": lambda h: h != 1,
    "Less(h, 1)": lambda h: h < 1,
    "GreaterEqual(h, 3)": lambda h: h >= 3,
    "TypeCast(h)": lambda h: h != 0,
}


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_comparisons_see_16_bit_values_rounded(question: str, dtype: str) -> None:
    """Checks values beyond the range, below the smallest number, and where rounding makes two values equal."""
    kind = np.float16 if dtype == "f16" else ml_dtypes.bfloat16
    text = f"graph(x: {dtype}[7], y: {dtype}[7]) -> (h, chosen)\n  h = Multiply(x, y)\n  c: boolean[7] = {question}\n"
    f = og.compile(og.parse(f"{text}  chosen = Select(c, x, y)"))
    assert len(f.partitions) == 1
    limits = ml_dtypes.finfo(kind)
    top, tiny, eps = float(limits.max), float(limits.smallest_subnormal), float(limits.eps)
    x = np.array([top, -top, tiny, 1 + eps, 3 * (1 - eps), np.inf, 5]).astype(kind)
    y = np.array([2, 2, 0.25, 1 - eps / 2, 1 + eps, 0, 0.25]).astype(kind)
    made = f(x=x, y=y)
    answer = QUESTIONS[question](made["h"].astype(np.float64))
    np.testing.assert_array_equal(made["chosen"], np.where(answer, x, y))


def test_rounding_each_also_rounds_inside_fused_units() -> None:
    """As in eager torch: the sigmoid of a swish is rounded before the product."""
    g = og.parse("graph(x: bf16[?]) -> (y)\n  %0 = Sigmoid(x)\n  y = Multiply(x, %0)")
    x = rng.standard_normal(1000).astype(np.float32).astype(ml_dtypes.bfloat16)
    each = og.compile(g, rounding="each")(x=x)
    np.testing.assert_array_equal(each.view(np.uint16), og.evaluate(g, x=x, dtype=None).view(np.uint16))
    assert (each != og.compile(g)(x=x)).any()


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("data_format", ["NXC", "NCX"])
@pytest.mark.parametrize("slope", [(3,), (4,), (1,), (3, 1), (2, 3, 4), ()], ids=str)
@pytest.mark.parametrize("declared", [True, False], ids=["known rank", "unknown rank"])
def test_prelu_slope_axis_follows_its_attributes(
    slope: tuple[int, ...], data_format: str, per_channel: bool, declared: bool
) -> None:
    g = og.Graph()
    x = g.input("x", shape=(2, 3, 4) if declared else None)
    s = g.input("s", shape=slope)
    feeds = {"x": -np.ones((2, 3, 4), np.float32), "s": np.asarray(rng.random(slope), np.float32)}
    try:
        g.add_op("PReLU", x, s, data_format=data_format, per_channel_broadcast=per_channel)
        exact = og.evaluate(g, feeds)
    except og.errors.InvalidShape:
        return  # refused by the shape rule, which the reference also applies
    np.testing.assert_array_equal(og.compile(g)(feeds), exact)


def test_prelu_slope_of_a_vector_lies_along_the_vector() -> None:
    g = og.Graph()
    g.add_op("PReLU", g.input("x", shape=None), g.input("slope", shape=(5,)), data_format="NCX")
    f = og.compile(g)
    slope = rng.standard_normal(5).astype(np.float32)
    x = rng.standard_normal(5).astype(np.float32)
    np.testing.assert_array_equal(f(x=x, slope=slope), np.where(x > 0, x, slope * x))
    x = rng.standard_normal((2, 5, 3)).astype(np.float32)
    np.testing.assert_array_equal(f(x=x, slope=slope), np.where(x > 0, x, slope[:, None] * x))


def test_typecast_inside_a_fused_loop_rounds() -> None:
    g = og.Graph()
    x = g.input("x", shape=(None,))
    half = g.add_op("TypeCast", x, dtype="bf16")
    g.add_op("Multiply", g.add_op("TypeCast", half, dtype="f32"), 1.0)
    f = og.compile(g)
    assert len(f.partitions) == 1
    x = rng.standard_normal(100).astype(np.float32)
    np.testing.assert_array_equal(f(x=x), x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_torch_inputs_give_torch_results() -> None:
    torch = pytest.importorskip("torch")
    g = og.Graph()
    x = g.input("x", "bf16", (None,))
    g.add_op("Multiply", x, g.add_op("Sigmoid", x))
    got = og.compile(g)(x=torch.ones(5, dtype=torch.bfloat16))
    assert isinstance(got, torch.Tensor) and got.dtype is torch.bfloat16
    out = torch.zeros(5, dtype=torch.bfloat16)
    og.compile(g)(x=torch.ones(5, dtype=torch.bfloat16), out=out)
    assert torch.equal(out, got)


@pytest.mark.parametrize("dtype", ["f8_e4m3", "f8_e5m2"])
def test_torch_tensors_of_8_bit_floats_are_arguments_and_results(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    of_torch = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}[dtype]
    to_steps, from_steps = og.Graph(), og.Graph()
    for graph, kind, given, made in ((to_steps, "Quantize", "f32", dtype), (from_steps, "Dequantize", dtype, "f32")):
        op = og.Op(0, kind, [og.LogicalTensor(0, given, (4,))], [og.LogicalTensor(1, made, (4,))], name="op")
        op.set_attr("scales", [0.5])
        graph.add_op(op)
        graph.finalize()
    steps = og.compile(to_steps)({0: torch.tensor([1.0, 2, 3, 4])})
    assert steps.dtype is of_torch and steps.float().tolist() == [2, 4, 6, 8]
    values = og.compile(from_steps)({0: steps})
    assert values.dtype is torch.float32 and values.tolist() == [1, 2, 3, 4]


def test_returned_constant_is_a_copy_for_torch_callers() -> None:
    torch = pytest.importorskip("torch")
    f = og.compile(og.parse("graph(x: f32[2]) -> (y, k)\n  const k: f32[2] = [1, 2]\n  y = Add(x, k)"))
    f(x=torch.zeros(2))["k"].fill_(9)
    made = f(x=torch.zeros(2))
    assert made["k"].tolist() == made["y"].tolist() == [1, 2]


def test_ops_without_effect_on_outputs_are_not_run() -> None:
    f = og.compile(og.parse("graph(x: f32[4]) -> (y)\n  %0 = Exp(x)\n  y = Sigmoid(x)"))
    assert len(f.partitions) == 1


# -- bad input --------------------------------------------------------------------------------------------------------

F32 = np.float32
BAD_CALLS: dict[str, tuple[type[Exception], Callable[[og.Executable], object]]] = {
    "missing": (og.errors.InvalidArguments, lambda f: f(x=np.ones(4, F32))),
    "unknown": (og.errors.InvalidArguments, lambda f: f(x=np.ones(4, F32), y=np.ones(4, F32), z=1)),
    "twice": (og.errors.InvalidArguments, lambda f: f({"x": np.ones(4, F32)}, x=np.ones(4, F32))),
    "by name and by id": (
        og.errors.InvalidArguments,
        lambda f: f(
            {"x": np.ones((1, 4), F32), f.graph.inputs[0].id: np.zeros((1, 4), F32), "y": np.ones((1, 4), F32)}
        ),
    ),
    "no array": (og.errors.InvalidArguments, lambda f: f(x=[1, 2], y=np.ones(4, F32))),
    "dtype": (og.errors.InvalidDataType, lambda f: f(x=np.ones(4), y=np.ones(4, F32))),
    "shape": (og.errors.InvalidShape, lambda f: f(x=np.ones(5, F32), y=np.ones(4, F32))),
    "symbol": (og.errors.InvalidShape, lambda f: f(x=np.ones((2, 4), F32), y=np.ones((3, 4), F32))),
    "out dtype": (
        og.errors.InvalidDataType,
        lambda f: f(x=np.ones((2, 4), F32), y=np.ones((2, 4), F32), out=np.ones((2, 4))),
    ),
    "out shape": (
        og.errors.InvalidShape,
        lambda f: f(x=np.ones((2, 4), F32), y=np.ones((2, 4), F32), out=np.ones((3, 4), F32)),
    ),
    "out read-only": (
        og.errors.InvalidArguments,
        lambda f: f(x=np.ones((2, 4), F32), y=np.ones((2, 4), F32), out=np.broadcast_to(np.ones(4, F32), (2, 4))),
    ),
}


@pytest.fixture(scope="module")
def add() -> og.Executable:
    g = og.Graph()
    x, y = g.input("x", shape=("n", 4)), g.input("y", shape=("n", 4))
    g.add_op("Add", x, y)
    return og.compile(g)


@pytest.mark.parametrize(("error", "call"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_invalid_calls_raise_three_line_errors(
    add: og.Executable, error: type[Exception], call: Callable[[og.Executable], object]
) -> None:
    with pytest.raises(error) as caught:
        call(add)
    assert isinstance(caught.value, og.errors.OpGraphError)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and lines[1].startswith("  where: ") and lines[2].startswith("  fix:   ")


def test_output_overlapping_an_input_is_refused(add: og.Executable) -> None:
    memory = np.zeros((3, 4), F32)
    with pytest.raises(og.errors.InvalidArguments, match="overlaps"):
        add(x=memory[:2], y=np.ones((2, 4), F32), out=memory[1:])


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/meminfo")
@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    n = (1 << 31) + 1000
    if free < 3 * n:
        pytest.skip(f"needs {3 * n >> 30} GiB of memory, {free >> 30} are free")
    g = og.Graph()
    x = g.input("x", "u8", (None,))
    g.add_op("Add", x, 1)
    x = np.zeros(n, np.uint8)
    x[-1] = 41
    og.compile(g)(x=x, out=x)
    assert x[0] == 1 and x[1 << 31] == 1 and x[-1] == 42


def test_inputs_used_in_another_order_than_declared_are_not_mixed_up() -> None:
    g = og.Graph()
    a, b, _, c = (g.input(n, shape=(None,)) for n in ("a", "b", "unused", "c"))
    g.add_op("Subtract", g.add_op("Divide", c, b), a, name="y")
    f = og.compile(g)
    feeds = {n: rng.uniform(1, 2, 5).astype(np.float32) for n in ("a", "b", "unused", "c")}
    expected = og.evaluate(g, feeds)
    out = np.empty(5, np.float32)
    np.testing.assert_allclose(f(feeds), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(f.bind(feeds, out=out)(), expected, rtol=1e-5, atol=1e-6)
