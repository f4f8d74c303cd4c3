"""A graph is a differentiable torch function: gradients of any order are right, and only the announced tensors kept."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from fused_graphs import COMPOSED, Composed  # noqa: E402

import opgraph as og  # noqa: E402
import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import InvalidArguments, InvalidDataType, InvalidShape, OpGraphError, Unimplemented  # noqa: E402
from opgraph.ir.opdef import all_ops  # noqa: E402
from opgraph.runtime.providers.torch import torch_dtype  # noqa: E402
from opgraph.torch.fused.composite import composite  # noqa: E402
from opgraph.torch.fused.op import FusedOp  # noqa: E402

SWISH = COMPOSED["swish"]


def inputs(composed: Composed, dtype: Any = torch.float64, *, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    spread = composed.high - composed.low
    made = [torch.rand(s, generator=generator, dtype=torch.float64) * spread + composed.low for s in composed.shapes]
    return [t.to(dtype).requires_grad_() for t in made]


def by_torch(graph: og.Graph, tensors: list[Any]) -> list[Any]:
    """The same function, with torch's own op for each op."""
    return composite(graph, tensors, "store")


@pytest.fixture(params=COMPOSED, ids=lambda name: name.replace(" ", "-"))
def composed(request: Any) -> Composed:
    return COMPOSED[request.param]


def test_values_and_gradients_agree_with_torch_ops(composed: Composed) -> None:
    op, given = FusedOp(composed.graph()), inputs(composed)
    results, expected = op(*given), by_torch(op.graph, given)
    torch.testing.assert_close(results, tuple(expected))
    weights = [torch.rand_like(y) for y in results]
    got = torch.autograd.grad(results, given, weights)
    torch.testing.assert_close(got, torch.autograd.grad(expected, given, weights))


def test_gradients_pass_gradcheck(composed: Composed) -> None:
    op = FusedOp(composed.graph())
    assert torch.autograd.gradcheck(op, tuple(inputs(composed)))


@pytest.mark.slow
def test_second_derivatives_pass_gradgradcheck(composed: Composed) -> None:
    op = FusedOp(composed.graph())
    fast = len(composed.shapes) > 6  # with 25 parameters: a random direction instead of every pair
    assert torch.autograd.gradgradcheck(
        op, tuple(inputs(composed)), fast_mode=fast, check_undefined_grad=not fast, atol=1e-4 if fast else 1e-5
    )


def test_saved_intermediate_value_passes_second_gradients() -> None:
    composed = COMPOSED["rational"]
    op, given = FusedOp(composed.graph()), inputs(composed)
    given[0].requires_grad_(False)  # then only a product of several inputs has to be kept of them
    assert any(s.role == "value" for s in op.saved(tuple(t.requires_grad for t in given)))
    found = []
    for results in (op(*given), by_torch(op.graph, given)):
        first = torch.autograd.grad(results[0].sum(), given[1:], create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), given[1:], retain_graph=True))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_rounding_each_equals_eager_16_bit_results(dtype: str) -> None:
    graph = og.parse(
        f"graph(x: {dtype}[n], a: {dtype}[n]) -> (y)\n  t = Multiply(x, a)\n  s = Add(t, x)\n  y = Multiply(s, a)"
    )
    op = FusedOp(graph, rounding="each")
    torch.manual_seed(0)
    x, a = (torch.randn(1000).to(torch_dtype(dtype)).requires_grad_() for _ in range(2))
    assert torch.equal(op(x, a)[0], (x * a + x) * a)
    grads = torch.autograd.grad(op(x, a)[0].sum(), (x, a))
    wanted = torch.autograd.grad(((x * a + x) * a).sum(), (x, a))
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(grads, wanted, rtol=4 * eps, atol=4 * eps)


def test_a_gradient_penalty_trains_as_in_eager_torch(composed: Composed) -> None:
    op, given = FusedOp(composed.graph()), inputs(composed)

    def penalty(results: Any) -> Any:
        (slope,) = torch.autograd.grad(sum(y.square().sum() for y in results), given[:1], create_graph=True)
        return torch.autograd.grad((slope.square().sum() - 1).square(), given, allow_unused=True)

    torch.testing.assert_close(penalty(op(*given)), penalty(by_torch(op.graph, given)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_keep_narrow_dtypes(dtype: Any) -> None:
    name = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    op, given = FusedOp(SWISH.graph(name)), inputs(SWISH, dtype)
    (y,) = op(*given)
    grads = torch.autograd.grad(y.sum(), given)
    assert y.dtype == dtype and [g.dtype for g in grads] == [dtype, dtype]
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = torch.autograd.grad(by_torch(SWISH.graph(), exact)[0].sum(), exact)
    eps = torch.finfo(dtype).eps
    for got, true in zip(grads, expected, strict=True):
        torch.testing.assert_close(got.double(), true, rtol=2 * eps, atol=2 * eps)


# -- saved tensors -----------------------------------------------------------------------------------------------------


def kept_by(op: FusedOp, tensors: list[Any]) -> tuple[Any, list[Any]]:
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        results = op(*tensors)
    return results, kept


@pytest.mark.parametrize("which", ["all", "first", "others"])
def test_autograd_saves_exactly_the_planned_tensors(composed: Composed, which: str) -> None:
    op, given = FusedOp(composed.graph()), inputs(composed)
    for i, tensor in enumerate(given):
        tensor.requires_grad_(which == "all" or (i == 0) == (which == "first"))
    results, kept = kept_by(op, given)
    plan = op.saved(tuple(t.requires_grad for t in given))
    by_name = {t.name: v for t, v in (*zip(op.graph.inputs, given), *zip(op.graph.outputs, results))}
    wanted = [s for s in plan if s.role != "shape"]
    assert len(kept) == len(wanted)
    for tensor, entry in zip(kept, wanted, strict=True):
        if entry.role != "value":
            assert tensor.data_ptr() == by_name[entry.name].data_ptr()
    assert len({t.data_ptr() for t in kept}) == len(kept)


def test_autograd_node_holds_only_saved_tensors(composed: Composed) -> None:
    op, given = FusedOp(composed.graph()), inputs(composed)
    results = op(*given)
    node = next(y.grad_fn for y in results if y.grad_fn is not None)
    held = [value for value in vars(node).values() if isinstance(value, (torch.Tensor, list, tuple))]
    assert not any(
        isinstance(v, torch.Tensor) for value in held for v in (value if isinstance(value, list) else [value])
    )


def test_only_saved_tensors_stay_alive() -> None:
    op = FusedOp(
        og.parse(
            "graph(x: f32[n], b: f32[n], s: f32[]) -> (y)\n  %0 = Exp(x)\n  %1 = Multiply(%0, b)\n  y = Add(%1, s)"
        )
    )
    arrays = [np.ones(100, np.float32), np.ones(100, np.float32)]
    alive = [weakref.ref(a) for a in arrays]
    s = torch.ones((), requires_grad=True)
    (y,) = op(*map(torch.from_numpy, arrays), s)  # the gradient of s depends only on the shape of the results
    del arrays
    gc.collect()
    assert [r() is not None for r in alive] == [False, False]
    y.sum().backward()
    assert s.grad == 100
    arrays = [np.ones(100, np.float32), np.ones(100, np.float32)]
    alive = [weakref.ref(a) for a in arrays]
    x, b = map(torch.from_numpy, arrays)
    (y,) = op(x, b.requires_grad_(), s)
    del arrays, x
    gc.collect()
    assert alive[0]() is not None  # the gradient of b is exp(x)
    del y
    gc.collect()
    assert alive[0]() is None and alive[1]() is not None


def test_backward_frees_saved_tensors_and_a_second_one_raises() -> None:
    op, given = FusedOp(SWISH.graph()), inputs(SWISH)
    (y,) = op(*given)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()


def test_a_second_backward_gives_the_same_bits(composed: Composed) -> None:
    op, given = FusedOp(composed.graph()), inputs(composed)
    results = op(*given)
    weights = [torch.rand_like(y) for y in results]
    first = torch.autograd.grad(results, given, weights, retain_graph=True)
    second = torch.autograd.grad(results, given, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_in_place_change_of_saved_tensor_raises() -> None:
    op, given = FusedOp(SWISH.graph()), inputs(SWISH)
    x = given[0] * 1
    (y,) = op(x, given[1])
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_change_of_unsaved_tensor_is_allowed() -> None:
    op, given = FusedOp(COMPOSED["bias"].graph()), inputs(COMPOSED["bias"])
    x = given[0] * 1
    (y,) = op(x, given[1])
    x.mul_(2)
    y.sum().backward()
    assert torch.equal(given[1].grad, torch.full((4,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("asked", [("x",), ("a",), ("x", "a")], ids=" ".join)
def test_only_requested_gradients_are_computed(asked: tuple[str, ...]) -> None:
    op, (leaf, a) = FusedOp(SWISH.graph()), inputs(SWISH)
    x = leaf * 1
    (y,) = op(x, a)
    got = torch.autograd.grad(y.sum(), [{"x": x, "a": a}[name] for name in asked], retain_graph=True)
    ran = [b for b in op.training((True, True))._backwards.values() if b is not None]
    assert [tuple(t.name for t in b.op.graph.outputs) for b in ran] == [tuple(f"d_{name}" for name in asked)]
    expected = by_torch(op.graph, [x, a])[0].sum()
    torch.testing.assert_close(got, torch.autograd.grad(expected, [{"x": x, "a": a}[name] for name in asked]))


def test_input_gradient_alone_computes_no_parameter_gradient() -> None:
    op, given = FusedOp(SWISH.graph()), inputs(SWISH)
    torch.autograd.grad(op(*given)[0].sum(), given[:1])  # leaves, as in a gradient penalty
    ran = [b for b in op.training((True, True))._backwards.values() if b is not None]
    assert [len(b.op.graph.outputs) for b in ran] == [1]


def test_unused_result_adds_no_backward_work() -> None:
    composed = COMPOSED["two results"]
    op, given = FusedOp(composed.graph()), inputs(composed)
    y, z = op(*given)
    got = torch.autograd.grad(z.sum(), given, retain_graph=True)
    expected = by_torch(op.graph, given)
    torch.testing.assert_close(got, torch.autograd.grad(expected[1].sum(), given))
    ran = [b for b in op.training((True, True))._backwards.values() if b is not None]
    assert not any(t.name == "d_y" for b in ran for t in b.op.graph.inputs)
    assert y.requires_grad


def test_integers_and_booleans_have_no_gradient() -> None:
    op = FusedOp(og.parse("graph(x: f64[n]) -> (y, m)\n  m = Greater(x, 0.0)\n  y = Select(m, x, 0.0)"))
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    y, mask = op(x)
    assert y.requires_grad and not mask.requires_grad
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, (x > 0).double())


def test_result_of_inputs_without_grad_requires_no_grad() -> None:
    op = FusedOp(og.parse("graph(x: f64[n], b: f64[n]) -> (y, z)\n  y = Exp(x)\n  z = Exp(b)"))
    y, z = op(torch.ones(3, dtype=torch.float64, requires_grad=True), torch.ones(3, dtype=torch.float64))
    assert y.requires_grad and not z.requires_grad


def test_an_output_that_is_an_input_is_a_copy() -> None:
    graph = og.Graph()
    x = graph.input("x", "f64", ("n",))
    y = graph.add_op("Exp", x, name="y")
    graph.set_outputs([x, y])
    given = torch.randn(4, dtype=torch.float64, requires_grad=True)
    a, b = FusedOp(graph)(given)
    assert len({t.data_ptr() for t in (given, a, b)}) == 3
    assert torch.equal(a, given)
    (grad,) = torch.autograd.grad((a + b).sum(), given)
    torch.testing.assert_close(grad, 1 + given.exp())


# -- layouts -----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "every second": lambda t: t.repeat_interleave(2, 3)[..., ::2],
    "spread out": lambda t: t[:, :, :1].expand_as(t),
    "unaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def test_any_strides_give_torchs_values_and_layout(layout: str) -> None:
    op = FusedOp(og.parse("graph(x: f32[n,c,h,w], a: f32[c,1,1]) -> (y)\n  %0 = Multiply(x, a)\n  y = Tanh(%0)"))
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(2, 3, 4, 5)).detach().requires_grad_()
    a = torch.rand(3, 1, 1).requires_grad_()
    (y,) = op(x, a)
    expected = torch.tanh(x * a)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected)
    weight = LAYOUTS[layout](torch.randn(2, 3, 4, 5))
    got, wanted = (torch.autograd.grad(r, (x, a), weight) for r in (y, expected))
    torch.testing.assert_close(got, wanted)
    assert got[0].is_contiguous(memory_format=torch.channels_last) == x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("copy", [torch.clone, lambda x: x.to(x.dtype, copy=True)])
def test_copy_of_expanded_tensor_has_memory_for_each_element(copy) -> None:
    x = torch.randn(2, 5).t().expand(3, 5, 2)
    expected, found = copy(x), ogt.fuse(copy)(x)
    assert found.stride() == expected.stride()
    found[0].zero_()
    assert torch.equal(found[1:], expected[1:])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2)], ids=str)
def test_scalar_and_empty_tensors_have_gradients(shape: tuple[int, ...]) -> None:
    dims = ",".join(f"d{i}" for i in range(len(shape)))
    op = FusedOp(og.parse(f"graph(x: f64[{dims}], a: f64[]) -> (y)\n  %0 = Multiply(x, a)\n  y = Exp(%0)"))
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    a = torch.ones((), dtype=torch.float64, requires_grad=True)
    (y,) = op(x, a)
    grads = torch.autograd.grad(y.sum(), (x, a))
    expected = torch.autograd.grad((x * a).exp().sum(), (x, a))
    assert y.shape == shape
    torch.testing.assert_close(grads, expected)


def test_multithreaded_results_equal_single_threaded_bits() -> None:
    composed = COMPOSED["swish"]
    op = FusedOp(composed.graph("f32"))
    torch.manual_seed(0)
    x, a = torch.randn(300_000, requires_grad=True), torch.tensor(1.3, requires_grad=True)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            (y,) = op(x, a)
            found.append(torch.autograd.grad(y.sum(), (x, a)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


def test_concurrent_calls_do_not_interfere() -> None:
    op = FusedOp(SWISH.graph())
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for turn in range(30):
            x, a = inputs(SWISH, seed=seed + turn)
            x = torch.cat([x.detach()] * (1 + turn % 3)).requires_grad_()
            got = torch.autograd.grad(op(x, a)[0].sum(), (x, a))
            expected = torch.autograd.grad((x * torch.sigmoid(a * x)).sum(), (x, a))
            if not all(torch.allclose(p, q) for p, q in zip(got, expected, strict=True)):
                wrong.append((seed, turn))

    workers = [threading.Thread(target=work, args=(1000 * i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


# -- mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[Any, type[OpGraphError], str]] = {
    "dtype": (lambda x, a: (x.float(), a), InvalidDataType, "float32"),
    "rank": (lambda x, a: (x.view(1, -1), a), InvalidShape, "got shape"),
    "count": (lambda x, a: (x,), InvalidArguments, "1 tensors for 2"),
    "sparse": (lambda x, a: (x.to_sparse(), a), InvalidArguments, "layout torch.sparse_coo"),
    "no tensor": (lambda x, a: (x, 1.0), InvalidArguments, "float"),
    "devices": (lambda x, a: (x.to("meta"), a), InvalidArguments, "meta and cpu"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda name: name.replace(" ", "-"))
def test_invalid_tensors_raise_errors_with_location_and_fix(mistake: str) -> None:
    change, error, words = MISTAKES[mistake]
    x, a = (t.detach() for t in inputs(SWISH))
    with pytest.raises(error, match=words) as raised:
        FusedOp(SWISH.graph())(*change(x, a))
    assert raised.value.where and raised.value.fix


def test_conflicting_symbolic_sizes_raise() -> None:
    op = FusedOp(og.parse("graph(x: f32[n], z: f32[n]) -> (y)\n  y = Add(x, z)"))
    with pytest.raises(InvalidShape, match='"n" is 3 and 1'):
        op(torch.ones(3), torch.ones(1))


def test_op_without_gradient_is_refused_if_grad_is_required() -> None:
    kind = next(r for r in all_ops() if r.is_pointwise and isinstance(r.gradient, str) and len(r.inputs) == 1)
    graph = og.Graph()
    graph.output(graph.add_op(kind.kind, graph.input("x", "f64", ("n",)), name="y"))
    op, x = FusedOp(graph), torch.rand(3, dtype=torch.float64)
    op(x)
    if graph.outputs[0].dtype != "f64":
        pytest.skip("its result is no float")
    with pytest.raises(Unimplemented, match=kind.kind):
        op(x.requires_grad_())


def test_graph_with_matmul_has_values_and_gradients() -> None:
    graph = og.parse(
        "graph(x: f64[n,k], w: f64[k,m], b: f64[m]) -> (y)\n  %0 = MatMul(x, w)\n  %1 = Add(%0, b)\n  y = Tanh(%1)"
    )
    op = FusedOp(graph)
    torch.manual_seed(0)
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (3, 4), (4,))]
    torch.testing.assert_close(op(*given)[0], torch.tanh(given[0] @ given[1] + given[2]))
    assert torch.autograd.gradcheck(op, tuple(given)) and torch.autograd.gradgradcheck(op, tuple(given))


# -- without a compiler and with forks ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:there is no C")
def test_gradients_without_a_c_compiler_are_the_same(composed: Composed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraph.runtime.cpu_compiler.is_available", lambda: False)
    op, given = FusedOp(composed.graph()), inputs(composed)
    results, expected = op(*given), by_torch(op.graph, given)
    torch.testing.assert_close(results, tuple(expected))
    got = torch.autograd.grad(sum(y.sum() for y in results), given, create_graph=True)
    wanted = torch.autograd.grad(sum(y.sum() for y in expected), given, create_graph=True)
    torch.testing.assert_close(got, wanted)
    if got[0].requires_grad:
        torch.testing.assert_close(
            torch.autograd.grad(got[0].square().sum(), given[0]),
            torch.autograd.grad(wanted[0].square().sum(), given[0]),
        )


def test_a_forked_child_trains_on() -> None:
    op = FusedOp(SWISH.graph("f32"))
    x, a = torch.ones(200_000, requires_grad=True), torch.tensor(1.3, requires_grad=True)
    ones = torch.ones(()).expand(200_000)
    (expected,) = torch.autograd.grad(op(x, a)[0], a, ones)  # the parent has run threads
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is tested here
        child = os.fork()
    if child == 0:  # pragma: no cover
        (grad,) = torch.autograd.grad(op(x, a)[0], a, ones)
        os._exit(0 if torch.equal(grad, expected) else 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")
