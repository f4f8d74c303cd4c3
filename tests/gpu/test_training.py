"""Training on a GPU: gradients, sums, dropout and fused torch functions, against the CPU and against autograd."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from agreement import agree

import opgraph as og
from opgraph.ir import dtypes

#: Sums: shape of the data, shapes of the results (tests/cuda/test_sums.py has them on the CPU).
SUMS = {
    "one number": ((70_001,), [(1,)]),
    "channels of images": ((6, 5, 31, 31), [(5, 1, 1)]),
    "columns": ((2000, 1000), [(1000,)]),
    "rows": ((300, 3000), [(300, 1)]),
    "rows and columns": ((1300, 1400), [(1300, 1), (1400,)]),
    "two kinds of columns": ((90, 10, 64), [(10, 64), (64,)]),
    "more than one tile of everything": ((64, 3, 9000), [(3, 1), ()]),
}


def random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    made = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(made).astype(dtypes.get(dtype).numpy)


def sums(shape: tuple[int, ...], targets: list[tuple[int, ...]], dtype: str) -> og.Graph:
    g = og.Graph()
    x, z = g.input("x", dtype, shape), g.input("z", dtype, shape)
    product = g.add_op("Multiply", x, z, name="y")
    g.output(product)
    for i, target in enumerate(targets):
        g.output(g.add_op("SumTo", product, g.input(f"like{i}", dtype, target), name=f"s{i}"))
    return g


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_agree_with_float64_and_repeat_their_bits(any_memory: Any, name: str, dtype: str) -> None:
    shape, targets = SUMS[name]
    g = sums(shape, targets, dtype)
    feeds = {str(t.name): random(t.shape, dtype, i) for i, t in enumerate(g.inputs)}
    f, given = og.compile(g, device="cuda"), {k: any_memory.put(v) for k, v in feeds.items()}
    got = {k: any_memory.get(v) for k, v in f(given).items()}
    truth = og.evaluate(g, feeds)
    unit = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11, "f64": 2.0**-53}[dtype]
    for key, value in truth.items():
        error = np.abs(got[key].astype(np.float64) - value)
        added = np.abs(feeds["x"].astype(np.float64) * feeds["z"].astype(np.float64)).sum() / max(value.size, 1)
        assert (error <= unit * np.abs(value) + 4 * min(unit, 2.0**-24) * max(added, 1)).all(), (key, error.max())
    for _ in range(3):
        again = {k: any_memory.get(v) for k, v in f(given).items()}
        assert all(again[k].tobytes() == got[k].tobytes() for k in got)


SWISH = "graph(x: {0}[n,c], a: {0}[c]) -> (y)\n  %0 = Multiply(a, x)\n  %1 = Sigmoid(%0)\n  y = Multiply(x, %1)"


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
def test_vjp_agrees_with_the_cpu(memory: Any, dtype: str) -> None:
    graph = og.parse(SWISH.format(dtype))
    f, host = og.compile(graph, device="cuda", wrt=["x", "a"]), og.compile(graph, wrt=["x", "a"])
    x, a, d = random((300, 96), dtype), random((96,), dtype, 1), random((300, 96), dtype, 2)
    y, back = f.vjp(x=memory.put(x), a=memory.put(a))
    y_host, back_host = host.vjp(x=x, a=a)
    assert agree(memory.get(y), y_host)
    for _ in range(2):  # saved tensors are not overwritten
        got, expected = back(memory.put(d)), back_host(d)
        for name in ("x", "a"):
            wide = expected[name].astype(np.float64)
            unit = {"f32": 2.0**-22, "f64": 2.0**-50, "bf16": 2.0**-7, "f16": 2.0**-10}[dtype]
            np.testing.assert_allclose(
                memory.get(got[name]).astype(np.float64), wide, rtol=unit, atol=unit * max(1.0, np.abs(wide).max())
            )


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("shape", [(4096,), (33, 257), (5, 6, 7, 8)])
def test_dropout_equals_the_cpu(any_memory: Any, shape: tuple[int, ...], dtype: str) -> None:
    g = og.Graph()
    x, seed, offset = g.input("x", dtype, shape), g.input("seed", "s64", (1,)), g.input("offset", "s64", ())
    g.output(*g.add_op("Dropout", x, seed, offset, 0.4, name="y", outputs=2))
    feeds = {
        "x": np.random.default_rng(0).uniform(1, 2, shape).astype(dtypes.get(dtype).numpy),
        "seed": np.array([-(2**61) + 12345]),
        "offset": np.array(2**40 + 7),
    }
    got = og.compile(g, device="cuda")({k: any_memory.put(v) for k, v in feeds.items()})
    expected = og.compile(g)(feeds)
    for mine, host in zip(got.values(), expected.values(), strict=True):
        assert agree(any_memory.get(mine), host)
        np.testing.assert_array_equal(any_memory.get(mine) == 0, np.asarray(host) == 0)


# -- fused torch functions ---------------------------------------------------------------------------------------------


def gated(x: Any, a: Any) -> Any:
    return x * (a * x).sigmoid()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_fused_function_gradients_agree_with_autograd(torch: Any, dtype: str) -> None:
    import opgraph.torch as ogt

    kind = getattr(torch, dtype)
    x = torch.randn(64, 96, 8, device="cuda", dtype=kind, requires_grad=True)
    a = torch.randn(96, 1, device="cuda", dtype=kind, requires_grad=True)
    d = torch.randn(64, 96, 8, device="cuda", dtype=kind)
    y = ogt.fuse(gated)(x, a)
    got = torch.autograd.grad(y, (x, a), d)
    wide = [t.detach().double().requires_grad_() for t in (x, a)]
    truth = gated(*wide)
    expected = torch.autograd.grad(truth, wide, d.double())
    eps = torch.finfo(kind).eps
    for mine, right in ((y, truth), *zip(got, expected, strict=True)):
        assert mine.dtype == kind and mine.is_cuda
        error = (mine.double() - right).abs().max().item()
        assert error <= 4 * eps * max(1.0, right.abs().max().item()), (dtype, error)


def test_fused_function_saves_only_its_inputs(torch: Any) -> None:
    import opgraph.torch as ogt

    fused = ogt.fuse(gated)
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    a = torch.ones((), device="cuda", requires_grad=True)
    fused(x, a).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = fused(x, a)
    assert torch.cuda.memory_allocated() - before <= x.nbytes + 4096  # the result, and no saved tensors
    del y


def test_fused_function_passes_gradgradcheck(torch: Any) -> None:
    import opgraph.torch as ogt

    fused = ogt.fuse(gated)
    x = torch.randn(50, device="cuda", dtype=torch.float64, requires_grad=True)
    a = torch.randn(50, device="cuda", dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fused, (x, a)) and torch.autograd.gradgradcheck(fused, (x, a))


def test_naf1_gradients_agree_with_eager(torch: Any) -> None:
    import opgraph.torch as ogt
    from opgraph.torch.naf1 import NAF1

    torch.manual_seed(0)
    x = torch.randn(4000, device="cuda", requires_grad=True)
    module = NAF1().cuda()
    expected = torch.autograd.grad(module(x).square().sum(), (x, module.frac_order))
    fused = ogt.fuse(module.forward)
    got = torch.autograd.grad(fused(x).square().sum(), (x, module.frac_order))
    for mine, right in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-3, atol=1e-4)


def test_backward_runs_on_the_stream_of_its_forward(torch: Any) -> None:
    """Autograd's thread chooses no stream itself; the engine restores the forward's."""
    import opgraph.torch as ogt

    fused, side = ogt.fuse(gated), torch.cuda.Stream()
    x = torch.full((1 << 20,), 3.0, device="cuda", requires_grad=True)
    a = torch.ones((), device="cuda", requires_grad=True)
    fused(x, a).sum().backward()  # so that it is compiled and loaded
    x.grad = a.grad = None
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        m = torch.randn(4096, 4096, device="cuda")
        for _ in range(6):
            m = m @ m / 64
        scale = m.isnan().sum() * 0 + 2.0
        (fused(x * scale, a)).sum().backward()
    side.synchronize()
    z = x.detach().double().mul(2.0).requires_grad_()
    expected = torch.autograd.grad(gated(z, a.detach().double()).sum(), z)[0] * 2
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_threads_train_one_fused_function_concurrently(torch: Any) -> None:
    import opgraph.torch as ogt

    fused, wrong = ogt.fuse(gated), []

    def work(seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for size in range(900, 940):
                x = torch.randn(size, device="cuda", generator=generator, requires_grad=True)
                a = torch.randn((), device="cuda", generator=generator, requires_grad=True)
                got = torch.autograd.grad(fused(x, a).sum(), (x, a))
                expected = torch.autograd.grad(gated(x, a).sum(), (x, a))
                if not all(torch.allclose(g, e, rtol=1e-4, atol=1e-4) for g, e in zip(got, expected, strict=True)):
                    wrong.append((seed, size))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_training_step_is_captured_in_a_cuda_graph(torch: Any) -> None:
    import opgraph.torch as ogt

    fused = ogt.fuse(gated)
    x = torch.randn(512, 96, device="cuda", requires_grad=True)
    a = torch.ones(96, device="cuda", requires_grad=True)

    def step() -> None:
        fused(x, a).square().sum().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = a.grad = None
            step()
    torch.cuda.current_stream().wait_stream(side)
    x.grad = a.grad = None
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        step()
    with torch.no_grad():
        x.normal_()
    recorded.replay()
    torch.cuda.synchronize()
    captured = x.grad.clone(), a.grad.clone()
    expected = torch.autograd.grad(gated(x, a).square().sum(), (x, a))
    for mine, right in zip(captured, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-3)
