"""A few seeds of `tests/accuracy/random_graphs.py`, and tests that the tool finds wrong results."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import random_truth
from random_graphs import CHECKS, problems
from random_known import found_once
from random_large import large_scenario
from random_scenario import Scenario, scenario
from random_shrink import shrunk
from random_together import Together
from random_truth import problem, truths

import opgraph as og
from opgraph.ir.opdef import all_ops
from opgraph.runtime import cpu_compiler, executable, threads
from opgraph.runtime.training import Pullback

#: Few seeds, because kernels must be compiled; files need no kernels.
SEEDS = {
    "calls": range(4),
    "gradients": range(3),
    "files": range(60),
    "torch": range(4),
    "written": range(3),
    "again": range(1),
}


@pytest.mark.parametrize(("check", "seed"), [(c, s) for c, seeds in SEEDS.items() for s in seeds])
def test_random_graph_agrees_with_the_reference(check: str, seed: int) -> None:
    assert problems(scenario(seed), CHECKS[check], seed) == []


@pytest.mark.parametrize(("check", "seed"), [("teams", 0), ("teams", 3), ("calls", 1), ("gradients", 2)])
def test_random_graph_over_large_arrays_agrees_with_the_reference(check: str, seed: int) -> None:
    assert problems(large_scenario(seed), CHECKS[check], seed) == []


def test_large_sizes_cover_both_sides_of_schedule_limits() -> None:
    elements, lengths = set(), set()
    for seed in range(400):
        for feeds in large_scenario(seed).feeds:
            elements |= {array.size for array in feeds.values()}
            lengths |= {size for array in feeds.values() for size in array.shape}
    assert max(elements) <= 400_000
    for found, numbers in ((elements, (32_768, 65_536)), (lengths, (8, 16, 64, 128, 4096))):
        assert all({n, n + 1} <= found and any(n // 2 < m < n for m in found) for n in numbers)


@pytest.mark.parametrize("planted", [False, True])
def test_piece_omitted_by_a_thread_is_detected(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_last(work: Any, size: int, count: int) -> None:
        work(0, max(size - planted, 1))

    monkeypatch.setattr(threads, "run_in_pool", without_the_last)
    graph = og.parse("graph(x: f32[n,5]) -> (y)\n  y = Sin(x)").finalize()
    found = Scenario(graph, [{"x": np.linspace(1, 2, 5 * n, dtype=np.float32).reshape(n, 5)} for n in (1, 4)], True)
    assert bool(problems(found, CHECKS["teams"], 0)) == planted


def test_other_sizes_create_no_value_beyond_memory() -> None:
    """[n,1] and [n] broadcast to [n,n] there, where a later n was 99,999."""
    assert len(scenario(5128454).feeds) == 2


def test_random_graphs_contain_every_executable_op_kind() -> None:
    left = {r.kind for r in all_ops() if r.reference is not None}
    for seed in range(1500):
        left -= {op.kind for op in scenario(seed).graph.ops}
        if not left:
            return
    raise AssertionError(f"never drawn: {sorted(left)}")


def one_truth(text: str, **feeds: np.ndarray) -> object:
    (truth,) = truths(og.parse(text).finalize(), feeds)
    return truth


def test_wrong_result_is_detected_and_rounding_accepted() -> None:
    x = np.linspace(-3, 3, 50, dtype=np.float32)
    truth = one_truth("graph(x: f32[50]) -> (y)\n  a = Exp(x)\n  y = Sin(a)", x=x)
    right = np.sin(np.exp(x))
    assert problem(right, truth) == ""
    assert "1 of 50" in problem(np.where(np.arange(50) == 7, right + np.float32(1e-4), right), truth)
    assert "1 of 50" in problem(np.where(np.arange(50) == 7, np.float32("nan"), right), truth)
    assert "float64" in problem(right.astype(np.float64), truth)
    assert "[25, 2]" in problem(right.reshape(25, 2), truth)


def test_results_decided_by_rounding_are_not_judged() -> None:
    x = np.array([1.25, 2.0], np.float32)
    truth = one_truth("graph(x: f32[2]) -> (y)\n  a = Multiply(x, 3.1)\n  b = Divide(a, 3.1)\n  y = Floor(b)", x=x)
    for second in (1, 2):  # 2, or slightly less
        assert problem(np.array([1, second], np.float32), truth) == ""
    assert problem(np.array([2, 2], np.float32), truth)


def test_cancelling_f64_errors_are_sampled_again() -> None:
    x = np.random.default_rng(0).uniform(-4, 4, (17, 64, 16))
    truth = one_truth("graph(x: f64[17,64,16]) -> (y)\n  a = LogSoftmax(x, axis=1)\n  y = Trigamma(a)", x=x)
    first = og.evaluate(og.parse("graph(x: f64[17,64,16]) -> (a)\n  a = LogSoftmax(x, axis=1)").finalize(), {"x": x})
    second = og.parse("graph(a: f64[17,64,16]) -> (y)\n  y = Trigamma(a)").finalize()
    moved = og.evaluate(second, {"a": np.nextafter(np.nextafter(first, 0), 0)})
    assert problem(moved, truth) == ""
    assert problem(np.where(moved > 41, moved * (1 + 1e-9), moved), truth)


def test_subnormal_f16_values_may_or_may_not_be_stored() -> None:
    """If stored, they are 0 and 2e-5 - s is 2e-5, which shows in y; y itself is not stored."""
    text = """graph(x: f64[4000]) -> (y)
      a: f16[4000] = TypeCast(x)
      q = Multiply(a, 0.0001)
      s = ReduceSum(q, axes=[0], keep_dims=true)
      t = Subtract(0.00002, s)
      u = Multiply(t, 0.0001)
      y: f64[1] = TypeCast(u)"""
    truth = one_truth(text, x=np.full(4000, 5e-5))
    assert problem(np.array([2e-9]), truth) == ""
    assert problem(np.array([2e-6]), truth)


def test_gradient_of_a_maximum_has_an_error_bound() -> None:
    x = np.random.default_rng(0).uniform(-4, 4, (5, 7)).astype(np.float32)
    graph = og.parse("graph(x: f32[5,7]) -> (y)\n  a = Mish(x)\n  y = ReduceMax(a, axes=[1])").finalize()
    slope = og.gradient(graph, ["x"])
    given = {"x": x, "d_y": np.ones(5, np.float32)}
    truth = truths(slope, {str(t.name): given[str(t.name)] for t in slope.inputs})[0]
    right = truth.value.astype(np.float32)
    assert problem(right, truth) == ""
    assert problem(right[:, ::-1], truth)
    assert problem(right * np.float32(1.001), truth)


def test_scenario_shrinks_to_the_faulty_op() -> None:
    text = "graph(x: f32[3]) -> (y, z)\n  a = Exp(x)\n  b = Tan(a)\n  c = Abs(b)\n  y = Neg(c)\n  z = Sin(a)"
    found = Scenario(og.parse(text).finalize(), [{"x": np.ones(3, np.float32)}], True)
    small = shrunk(found, lambda s: any(op.kind == "Tan" for op in s.graph.ops))
    assert [op.kind for op in small.graph.ops] == ["Tan"]


def test_exception_in_a_check_is_a_problem() -> None:
    def check(found: Scenario, rng: random.Random) -> Iterator[str]:
        yield "first"
        raise ValueError("then this")

    told = problems(scenario(0), check, 0)
    assert told[0] == "first" and "ValueError: then this (test_random_graphs.py" in told[1]


@pytest.mark.parametrize("planted", [False, True])
def test_pullback_reading_a_later_calls_tensors_is_detected(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, last = Pullback.__init__, {}

    def begin_with_shared(self: Pullback, owner: Any, kept: dict[str, Any], *rest: Any) -> None:
        begin(self, owner, kept, *rest)
        self._kept = last.setdefault(id(owner), kept)
        last[id(owner)].update(kept)

    if planted:
        monkeypatch.setattr(Pullback, "__init__", begin_with_shared)
    graph = og.parse("graph(x: f32[2,5]) -> (y)\n  y = Sin(x)").finalize()
    found = Scenario(graph, [{"x": np.linspace(-1, 1, 10, dtype=np.float32).reshape(2, 5)}], True)
    assert bool(problems(found, CHECKS["again"], 0)) == planted


def test_rounding_of_a_sum_inside_log_softmax_is_allowed() -> None:
    """ln(1 + a little) in LogSoftmax has the error of the sum, as in NumPy. 40 digits show how large it is."""
    mpmath = pytest.importorskip("mpmath")
    x = np.array([0.0, -8.0])
    truth = one_truth("graph(x: f64[2]) -> (y)\n  y = LogSoftmax(x, axis=0)", x=x)
    with mpmath.workdps(40):
        exact = float(-mpmath.log(sum(mpmath.exp(v) for v in x)))
    assert problem(np.array([exact, *truth.value[1:]]), truth) == ""
    assert abs(truth.value[0] - exact) > 8 * 2.0**-52 * abs(exact)  # the reference itself is off by more than 8 ulp
    assert problem(np.array([exact + 1e-13, *truth.value[1:]]), truth)


def test_last_bit_of_x_is_allowed_near_a_zero_of_a_derivative() -> None:
    x = np.array([-1.1924312])  # the derivative of Mish crosses 0 here
    text = "graph(x: f64[1]) -> (y)\n  y = MishBackward(x, 1.0)"
    truth = one_truth(text, x=x)
    near = [one_truth(text, x=np.nextafter(x, side)).value for side in (-2, 0)]
    assert all(problem(value, truth) == "" for value in near) and abs(near[0] - near[1]) > 8 * 2.0**-52 * truth.value
    assert problem(truth.value + 1e-13, truth)


def test_selected_value_may_be_unrounded() -> None:
    """In 16 bits: a kernel has the negated product in f32 where a TypeCast rounds it."""
    text = (
        "graph(x: f16[40], w: f16[40]) -> (y)\n  p = Multiply(x, w)\n  q = Maximum(p, -9.0)\n  n = Neg(q)\n"
        "  f: f32[40] = TypeCast(n)\n  c: f16[40] = TypeCast(f)\n  y = Add(q, c)"
    )
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(40).astype(np.float16) for _ in range(2))
    truth = one_truth(text, x=x, w=w)
    exact = x.astype(np.float32) * w
    assert problem((exact - exact.astype(np.float16)).astype(np.float16), truth) == ""
    assert problem(np.full(40, 1.0, np.float16), truth)


def test_fused_unit_may_be_finite_where_its_parts_give_nan() -> None:
    x = np.array([-np.inf, 1.0], np.float32)
    truth = one_truth("graph(x: f32[2]) -> (y)\n  s = Sigmoid(x)\n  y = Multiply(x, s)", x=x)
    right = np.float32(truth.value[1])
    for first in (np.nan, -0.0):
        assert problem(np.array([first, right], np.float32), truth) == ""
    for wrong in ([1.0, right], [np.nan, -0.0], [-0.0, np.nan]):
        assert problem(np.array(wrong, np.float32), truth)


def test_sum_near_the_largest_number_may_overflow() -> None:
    """It depends on whether a kernel moves a factor out of the sum."""
    x = np.array([[3e38, -1.0], [3.0, -1.0]], np.float32)
    text = "graph(x: f32[2,2]) -> (y)\n  m = ReduceMean(x, axes=[1], keep_dims=true)\n  y = Multiply(m, 1e-3)"
    truth = one_truth(text, x=x)
    for first in (np.inf, 1.5e35):
        assert problem(np.array([[first], [1e-3]], np.float32), truth) == ""
    assert problem(np.array([[1.5e35], [np.inf]], np.float32), truth)
    assert problem(np.array([[1.5e35], [1.1e-3]], np.float32), truth)


def test_gradient_of_a_clamp_is_judged() -> None:
    x = np.array([-3.0, 0.3, 1.7], np.float32)
    graph = og.parse("graph(x: f32[3]) -> (y)\n  e = Exp(x)\n  y = Clamp(e, min=0.1, max=4.0)").finalize()
    slope = og.gradient(graph, ("x",))
    (truth,) = truths(slope, {"x": x, "d_y": np.ones(3, np.float32)})
    assert problem(np.exp(x) * np.array([0, 1, 0], np.float32), truth) == ""
    assert "1 of 3" in problem(np.exp(x) * np.array([0, 1.001, 0], np.float32), truth)


def test_tiny_torch_result_may_be_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """GELU(-6) is -6e-9, whose sign is -1. torch computes half of -6 times (1 + erf(-4.2)), which is 0."""
    x = np.array([-6.0, 6.0, -2.0], np.float32)
    text = "graph(x: f32[3]) -> (y)\n  a = GELU(x)\n  y = Sign(a)"
    torchs = np.array([0, 1, -1], np.float32)
    assert "1 of 3" in problem(torchs, one_truth(text, x=x))
    monkeypatch.setattr("random_truth.COARSE", 64.0)
    assert problem(torchs, one_truth(text, x=x)) == ""
    assert "1 of 3" in problem(np.array([0, 1, 0], np.float32), one_truth(text, x=x))
    assert "1 of 3" in problem(np.array([0, 0, -1], np.float32), one_truth(text, x=x))


def test_torch_result_of_infinity_may_be_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """HardSwish(-inf) is -0; torch computes -inf times 0."""
    x = np.array([-np.inf, 1.0], np.float32)
    text = "graph(x: f32[2]) -> (y)\n  y = HardSwish(x)"
    torchs, wrong = (np.array(a, np.float32) for a in ([np.nan, 2 / 3], [-np.inf, np.nan]))
    assert "1 of 2" in problem(torchs, one_truth(text, x=x))
    monkeypatch.setattr("random_truth.COARSE", 64.0)
    assert problem(torchs, one_truth(text, x=x)) == ""
    assert "1 of 2" in problem(wrong, one_truth(text, x=x))


def test_jointly_compiled_graphs_give_the_results_of_separate_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compiler, "GCC_LEVEL", ("-O0",))
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    texts = [
        "graph(x: f32[4,6]) -> (y)\n  y = Tanh(x)",
        "graph(x: f32[4,6]) -> (y)\n  y = SoftMax(x, axis=1)",
        "graph(x: f32[4,6]) -> (y, z)\n  y = Exp(x)\n  z = ReduceSum(y, axes=[0], keep_dims=false)",
        "graph(x: f32[4,6]) -> (z)\n  y = MatMul(x, x, transpose_b=true)\n  a = Exp(y)\n  z = Neg(a)",
    ]
    made: dict[str, list[np.ndarray]] = {}

    def call(text: str) -> None:
        f = og.compile(og.parse(text))
        first = f(x=x)
        f.bind(
            x=x[:, ::-1], out={n: np.empty_like(a) for n, a in first.items()} if isinstance(first, dict) else first
        )()
        made[text] = list(first.values()) if isinstance(first, dict) else [first]

    together = Together(len(texts))
    together.run(lambda text=text: call(text) for text in texts)
    assert together.kernels >= 2 * together.runs > 0
    found = {text: [array.copy() for array in arrays] for text, arrays in made.items()}
    for text in texts:
        call(text)
        for one, other in zip(found[text], made[text], strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


def test_wrong_kernel_is_reported_for_its_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of several seeds are compiled as one text. Each seed gets its own kernel, and its own global settings."""
    monkeypatch.setattr(cpu_compiler, "GCC_LEVEL", ("-O0",))
    kinds, told = ("Tanh", "Sinh", "Cosh"), {}
    usual = Together._compile

    def with_wrong_sinh(self: Together, wanted: dict[str, Any]) -> None:
        changed = {n: replace(s, own=s.own.replace("og::sinh(", "og::cosh(")) for n, s in wanted.items()}
        usual(self, changed)

    monkeypatch.setattr(Together, "_compile", with_wrong_sinh)

    def check(kind: str) -> None:
        graph = og.parse(f"graph(x: f64[5]) -> (y)\n  y = {kind}(x)").finalize()
        found = Scenario(graph, [{"x": np.linspace(-1, 1, 5)}], True)
        before = og.onednn.get_compiled_partition_cache_capacity()
        og.onednn.set_compiled_partition_cache_capacity(kinds.index(kind))
        told[kind] = problems(found, lambda s, rng: iter([p for p in map(problem, *_results(s)) if p]), 0)
        assert og.onednn.get_compiled_partition_cache_capacity() == kinds.index(kind)
        og.onednn.set_compiled_partition_cache_capacity(before)

    Together(len(kinds)).run(lambda kind=kind: check(kind) for kind in kinds)
    assert {kind: bool(lines) for kind, lines in told.items()} == {"Tanh": False, "Sinh": True, "Cosh": False}


def _results(found: Scenario) -> tuple[list[np.ndarray], list[Any]]:
    (feeds,) = found.feeds
    return [og.compile(found.graph)(feeds)], truths(found.graph, feeds)


def test_refusal_of_an_unused_op_by_the_reference_is_no_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "graph(x: f32[n], z: f32[m]) -> (y)\n  s = ReduceSum(x, axes=[0])\n  y = Add(x, s)\n  d = Add(x, z)"
    graph = og.parse(text).finalize()
    found = Scenario(graph, [{"x": np.ones(3, np.float32), "z": np.ones(5, np.float32)}], True)
    monkeypatch.setattr("random_calls.differing", lambda *args: iter(["other bits"]))  # so that the truth is computed
    assert problems(found, CHECKS["written"], 0) == []


@pytest.mark.filterwarnings("ignore:there is no C")
def test_gradient_of_a_maximum_of_recomputed_values_is_no_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backward compares Mish(x) with the maximum, which is kept in f32; in f64 no element is equal to it."""
    monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
    x = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    graph = og.parse("graph(x: f32[n,4]) -> (y)\n  m = Mish(x)\n  y = ReduceMax(m, axes=[0])").finalize()
    found = Scenario(graph, [{"x": x}], False)
    assert problems(found, CHECKS["gradients"], 0) == []


def test_exception_in_a_task_ends_the_run() -> None:
    def fails() -> None:
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        Together(2).run([fails, fails])


def test_graph_is_partitioned_once_and_judged_by_its_own_values() -> None:
    graph = og.parse("graph(x: f32[2]) -> (y)\n  y = Sin(x)").finalize()
    with found_once():
        one, other = (og.compile(graph, wrt=("x",)) for _ in range(2))
        assert one._partitioning is other._partitioning and one._plan is other._plan
        assert one._plan is not og.compile(graph, wrt=("x",), rounding="each")._plan
    assert executable.partition(graph) is not one._partitioning
    (zero,), (one_,) = (truths(graph, {"x": np.full(2, number, np.float32)}) for number in (0, 1))
    assert zero.value[0] == 0 and abs(one_.value[0] - np.sin(1)) < 1e-15


def test_shape_only_operand_adds_no_tolerance() -> None:
    """The backward of a product counts zeros in ones of the operand's shape, and multiplies the others."""
    forward = og.parse("graph(x: f16[3]) -> (y)\n  z = Sin(x)\n  y = ReduceProd(z, axes=[0])")
    (truth,) = truths(og.gradient(forward, wrt=["x"]), {"x": np.array([1, 0, 2], np.float16), "d_y": np.float16(1)})
    wanted = np.sin(1) * np.sin(2)
    assert problem(np.array([0, wanted, 0], np.float16), truth) == ""
    assert problem(np.array([0, 0, 0], np.float16), truth)


def test_convolution_may_be_nan_where_torchs_is() -> None:
    """In bf16, oneDNN's result next to an infinity may be NaN though no product of its sum is."""
    torch = pytest.importorskip("torch")
    x, w = np.ones((1, 3, 5), ml_dtypes.bfloat16), np.ones((4, 3, 3), ml_dtypes.bfloat16)
    x[0, 2, 4] = np.inf
    own = torch.nn.functional.conv1d(*(torch.from_numpy(a.astype(np.float32)).bfloat16() for a in (x, w))).float()
    text = "Convolution(x, w, strides=[1], pads_begin=[0], pads_end=[0], dilations=[1])"
    truth = one_truth(f"graph(x: bf16[1,5,3], w: bf16[3,3,4]) -> (y)\n  y = {text}", x=x.transpose(0, 2, 1), w=w.T)
    assert problem(own.numpy().astype(x.dtype).transpose(0, 2, 1), truth) == ""
    assert problem(np.full((1, 3, 4), np.nan, x.dtype), truth)


def test_some_samples_round_16_bit_values_for_all_readers() -> None:
    """The derivative of a Clamp compares its result with its operand, which differ if each is rounded separately."""
    forward = og.parse("graph(x: f16[3]) -> (y)\n  z = Sin(x)\n  y = Clamp(z, min=-2.0, max=2.0)")
    graph, x = og.gradient(forward, wrt=["x"]), np.array([1, 0.5, 2], np.float16)
    ways = set()
    for run in range(10):
        errors = random_truth.Errors(0, run, 1.0, further=True)
        (d_x,) = random_truth.perturbed(graph, {"x": x, "d_y": np.ones(3, np.float16)}, errors)
        assert np.allclose(d_x, np.cos(x.astype(np.float64)), atol=0.01) != errors.apart
        ways.add(errors.apart)
    assert ways == {True, False}


def test_comparison_of_an_overflowing_sum_may_differ() -> None:
    """The sum of 3e38 twice may be inf in f32, and so is the square: the kernel compares 0 with it, f64 4 with 4."""
    text = """graph(x: f32[66]) -> (y)
  m = ReduceMean(x, axes=[0], keep_dims=true)
  d = Subtract(x, m)
  s = Square(d)
  v = ReduceMean(s, axes=[0], keep_dims=true)
  r = Rsqrt(v)
  z = Multiply(d, r)
  a = Clamp(z, min=-4.0, max=4.0)
  b = Clamp(v, min=-4.0, max=4.0)
  y = Less(a, b)"""
    x = np.zeros(66, np.float32)
    x[[5, 40]] = 3e38
    truth = one_truth(text, x=x)
    assert not truth.value[5] and problem(np.ones(66, bool), truth) == ""


def test_product_whose_overflow_depends_on_order_is_not_judged() -> None:
    """1e100 four times and then 0: NaN, or 0 where the zero comes first."""
    x = np.array([[1e100, 1e100, 1e100, 1e100, 0.0], [1.0, 2.0, 3.0, 4.0, 0.0], [1e-100, 1e-200, 1e100, 1e100, 1e100]])
    text = "graph(x: f64[3,5]) -> (y)\n  y = ReduceProd(x, axes=[1], keep_dims=true)"
    truth = one_truth(text, x=x)
    for first in (np.nan, 0.0):
        assert problem(np.array([[first], [0.0], [1.0]]), truth) == ""
    assert problem(np.array([[0.0], [np.nan], [1.0]]), truth)
    assert problem(np.array([[0.0], [0.0], [1.1]]), truth)


def test_product_beside_an_infinity_may_overflow_midway() -> None:
    """1e200 twice and then -1e-100: -1e300 or -inf, depending on the order, for any values of the other rows."""
    x = np.array([[1e200, 1e200, -1e-100], [np.inf, 2.0, 1.0], [np.inf, 0.0, 1.0]])
    truth = one_truth("graph(x: f64[3,3]) -> (y)\n  y = ReduceProd(x, axes=[1], keep_dims=true)", x=x)
    for first in (-1e300, -np.inf):
        assert problem(np.array([[first], [np.inf], [np.nan]]), truth) == ""
    assert problem(np.array([[-1e300], [1.0], [np.nan]]), truth)
    assert problem(np.array([[-1e300], [np.inf], [0.0]]), truth)


def test_product_that_underflows_in_part_may_meet_an_infinity() -> None:
    """1e-310 twice and inf: NaN in torch, inf in NumPy; with one 1e-310 the product does not vanish."""
    x = np.array([[1e-310, 1e-310, np.inf], [1e-310, np.inf, -1.0], [2.0, -np.inf, 2.0]])
    for order in ([0, 1, 2], [2, 0, 1]):
        truth = one_truth("graph(x: f64[3,3]) -> (y)\n  y = ReduceProd(x, axes=[1], keep_dims=true)", x=x[:, order])
        for first in (np.nan, np.inf):
            assert problem(np.array([[first], [-np.inf], [-np.inf]]), truth) == ""
        assert problem(np.array([[np.inf], [np.nan], [-np.inf]]), truth)
        assert problem(np.array([[np.inf], [-np.inf], [np.nan]]), truth)


def test_product_may_underflow_or_lose_digits_midway() -> None:
    """A row that ends in 1e200 after 1e-200 twice is 1e-200, or 0; after 1e-160 and 1e-155, 7 digits may be left."""
    x = np.array([[1e200, 1e-200, 1e-200], [1e100, 1e-160, 1e-155], [1e100, 1e-150, 1e-150]])
    truth = one_truth("graph(x: f64[3,3]) -> (y)\n  y = ReduceProd(x, axes=[1], keep_dims=true)", x=x)
    for first, second in ((0.0, 1.0000001e-215), (1e-200, 1e-215)):
        assert problem(np.array([[first], [second], [1e-200]]), truth) == ""
    assert problem(np.array([[0.0], [1e-215], [1.0000001e-200]]), truth)


def test_product_may_underflow_in_one_part_and_overflow_in_another() -> None:
    """Rows of 1e-2 and 1e3: the product of columns is NaN, that of elements in their order is inf."""
    x = np.stack([np.tile([1e-2, 1e3], 200), np.tile([1.0, 1e3], 200), np.tile([1e-2, 1.0], 200)])
    truth = one_truth("graph(x: f64[3,400]) -> (y)\n  y = ReduceProd(x, axes=[1], keep_dims=true)", x=x)
    for first in (np.nan, np.inf):
        assert problem(np.array([[first], [np.inf], [0.0]]), truth) == ""
    assert problem(np.array([[np.inf], [np.nan], [0.0]]), truth)
    assert problem(np.array([[np.inf], [np.inf], [np.nan]]), truth)
