"""The checks most likely to fail at a first run on a GPU, each in a few lines. They also run on a CPU, as a self-test.

On a CPU a captured call is called again, a side stream does nothing, and the fault of another process is a null
pointer. Checks that need CuPy run on emulated kernels in tests/cuda.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_calls import gated

torch = pytest.importorskip("torch", reason="torch is missing")

import opgraph as og  # noqa: E402
import opgraph.torch as ogt  # noqa: E402
from opgraph.torch.dynamo import backend  # noqa: E402
from opgraph.torch.fused.op import FusedOp  # noqa: E402


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        request.getfixturevalue("torch")  # it skips, or fails if a GPU is required
    return str(request.param)


# -- helpers for both devices ------------------------------------------------------------------------------------------


def settle(device: str) -> None:
    """Waits for all work on the device."""
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def side_stream(device: str) -> Iterator[None]:
    """A separate stream, which starts after the current one's work and which the current one then waits for."""
    if device == "cpu":
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def late(device: str, value: float, *shape: int) -> Any:
    """A tensor that is filled milliseconds later: a reader on an unsynchronized stream gets other values."""
    size = 4096 if device == "cuda" else 8
    m = torch.zeros(size, size, device=device)
    for _ in range(20):
        m = m @ m
    return torch.full(shape, value, device=device) + m.sum()


def captured(device: str, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """The result of a call in a CUDA graph (a tensor, or several), and a function that runs it again in place."""
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        graph.replay()
        return result, graph.replay
    result = call()

    def again() -> None:
        for old, new in zip(tensors(result), tensors(call()), strict=True):
            old.detach().copy_(new.detach())

    return result, again


def tensors(result: Any) -> tuple[Any, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected)


# -- checks ------------------------------------------------------------------------------------------------------------


def act(x: Any, a: Any) -> Any:
    return torch.where(x > 0, x * torch.sigmoid(a * x), torch.expm1(x))


class Net(torch.nn.Module):
    """Matrix products in torch with arithmetic between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.a = torch.nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Any) -> Any:
        h = self.up(x)
        return self.down(act(h, self.a) * 0.5 + h)


def gradients(function: Callable[..., Any], model: Any, x: Any) -> list[Any]:
    found = torch.autograd.grad(function(x).square().mean(), list(model.parameters()))
    return list(found)


def nets(device: str) -> tuple[Any, Any, Any]:
    """A fused model, the same model unfused, and an input."""
    plain, fused = Net().to(device), Net().to(device)
    return ogt.fuse(fused), plain, torch.linspace(-2, 2, 4 * 16, device=device).view(4, 16)


def a_function_trains_on_a_side_stream(device: str) -> None:
    fused = ogt.fuse(act)
    a = torch.tensor(1.3, device=device, requires_grad=True)
    for size in (64, 1000):
        with side_stream(device):
            x = late(device, 0.7, size).requires_grad_()
            got = torch.autograd.grad(fused(x, a).sum(), (x, a))
        y = torch.full((size,), 0.7, device=device, requires_grad=True)
        close(got, torch.autograd.grad(act(y, a).sum(), (y, a)))


class Wanders(torch.nn.Module):
    """Starts on one stream and continues on another; deferred ops must run on the stream where they were written."""

    def forward(self, x: Any) -> Any:
        begun = x * 2 + 1
        with side_stream(x.device.type):
            return begun * torch.sigmoid(begun) + torch.tanh(begun)


def a_model_enters_a_side_stream(device: str) -> None:
    fused, plain = ogt.fuse(Wanders()), Wanders()
    for value in (0.3, -0.6):
        got = fused(late(device, value, 1 << 16))
        close(got, plain(torch.full((1 << 16,), value, device=device)))


def a_bound_call_is_captured_before_it_ever_ran(device: str) -> None:
    """Kernels are compiled and loaded when the function is made, constants uploaded when it is bound."""
    g = og.Graph()
    x = g.input("x", "f32", (64, 96))
    g.output(
        g.add_op("Swish", g.add_op("Multiply", x, g.constant("c", np.arange(96, dtype=np.float32) / 96)), name="y")
    )
    given, out = torch.randn(64, 96, device=device), torch.empty(64, 96, device=device)
    f = og.compile(g, device=device)
    call = f.bind(x=given, out=out)
    _, again = captured(device, call)
    del f, call  # the captured graph still reads the constant
    given.normal_()
    again()
    close(out, torch.nn.functional.silu(given * torch.arange(96, device=device) / 96))


def a_training_step_is_captured(device: str) -> None:
    fused, plain, x = nets(device)
    with side_stream(device):
        gradients(fused, fused, x)
    got, again = captured(device, lambda: gradients(fused, fused, x))
    x.mul_(0.5)
    again()
    close(list(got), gradients(plain, plain, x))


def torch_captures_a_model(device: str) -> None:
    fused, plain, x = nets(device)
    if device == "cuda":
        fused = torch.cuda.make_graphed_callables(fused, (x.clone(),))
    close(gradients(fused, fused, x), gradients(plain, plain, x))


def a_pullback_is_captured(device: str) -> None:
    """A bias of one element keeps only its shape, as zeros that must not be copied from the host."""
    f = og.compile(og.parse("graph(x: f32[n], a: f32[1]) -> (y)\n  y = Add(x, a)"), device=device, wrt=["x", "a"])
    x, a, d = (torch.linspace(0, 1, n, device=device) for n in (999, 1, 999))
    step = lambda: [*f.vjp(x=x, a=a)[1](d).values()]  # noqa: E731
    step()
    (dx, da), again = captured(device, step)
    d.mul_(3)
    again()
    close((dx, da), (d, d.sum().view(1)))


def compiled_around_functions(device: str) -> None:
    torch._dynamo.reset()
    a, x = torch.tensor(1.3, device=device), torch.linspace(-2, 2, 1000, device=device)
    op = FusedOp(gated("f32", (None,), ()))
    around = torch.compile(lambda x: op(x * 2, a)[0] + 1, backend="inductor" if device == "cuda" else "aot_eager")
    close(around(x), op(x * 2, a)[0] + 1)


def compiled_by_the_backend(device: str) -> None:
    torch._dynamo.reset()
    _, plain, x = nets(device)
    compiled = torch.compile(plain, backend=backend)
    close(gradients(compiled, plain, x), gradients(plain, plain, x))


def autocast_to_bf16(device: str) -> None:
    fused, plain, x = nets(device)
    with torch.autocast(device, torch.bfloat16):
        got, expected = fused(x), plain(x)
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=2.0**-6, atol=2.0**-6)


def vmap_and_grad_of_func(device: str) -> None:
    fused = ogt.fuse(act)
    x, a = torch.linspace(-2, 2, 60, device=device).view(5, 12), torch.linspace(0.5, 1.5, 5, device=device)
    close(torch.vmap(fused)(x, a), torch.vmap(act)(x, a))
    slope = lambda f: torch.vmap(torch.func.grad(lambda x, a: f(x, a).sum(), argnums=(0, 1)))(x, a)  # noqa: E731
    close(slope(fused), slope(act))


def data_parallel_of_one_rank(device: str) -> None:
    import torch.distributed as dist

    fused, plain, x = nets(device)
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/meet"
        dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=where, rank=0, world_size=1)
        try:
            parallel = torch.nn.parallel.DistributedDataParallel(fused)
            parallel(x).square().mean().backward()
        finally:
            dist.destroy_process_group()
    close([p.grad for p in fused.parameters()], gradients(plain, plain, x))


def an_onnx_model(device: str) -> None:
    pytest.importorskip("onnx", reason="onnx is missing")
    from onnx import parser

    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,16] x, float[16,8] w) => (float[n,8] y) {
      h = MatMul(x, w)  s = Sigmoid(h)  y = Mul(h, s) }"""
    graph = og.onnx.load(parser.parse_model(text))
    x, w = torch.linspace(-1, 1, 48, device=device).view(3, 16), torch.linspace(0, 1, 128, device=device).view(16, 8)
    got = og.compile(graph, device=device)(x=x, w=w)
    torch.testing.assert_close(got, torch.nn.functional.silu(x @ w), rtol=1e-5, atol=1e-5)
    assert got.device == x.device


def bf16_and_f16(device: str) -> None:
    for kind in (torch.bfloat16, torch.float16):
        x = torch.linspace(-4, 4, 4099, device=device).to(kind).requires_grad_()
        a = torch.tensor(1.3, device=device, dtype=kind, requires_grad=True)
        wide = [t.detach().double().requires_grad_() for t in (x, a)]
        got, truth = ogt.fuse(act)(x, a), act(*wide)
        eps = torch.finfo(kind).eps
        torch.testing.assert_close(got.double(), truth, rtol=eps, atol=eps)
        (slope,), (right,) = torch.autograd.grad(got.sum(), x), torch.autograd.grad(truth.sum(), wide[0])
        torch.testing.assert_close(slope.double(), right, rtol=eps, atol=2 * eps)


CHECKS: tuple[Callable[[str], None], ...] = (
    a_function_trains_on_a_side_stream,
    a_model_enters_a_side_stream,
    a_bound_call_is_captured_before_it_ever_ran,
    a_training_step_is_captured,
    torch_captures_a_model,
    a_pullback_is_captured,
    compiled_around_functions,
    compiled_by_the_backend,
    autocast_to_bf16,
    vmap_and_grad_of_func,
    data_parallel_of_one_rank,
    an_onnx_model,
    bf16_and_f16,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: str(check.__name__))
def test_smoke_check(device: str, check: Callable[[str], None]) -> None:
    check(device)
    settle(device)


FAULTS = {
    "cpu": "import ctypes; ctypes.string_at(0)",
    "cuda": """
import cupy, opgraph as og
write = cupy.RawKernel('extern "C" __global__ void f(int* p) { p[1LL << 40] = 1; }', "f")
write((1,), (1,), (cupy.zeros(1, "i4"),))
try:
    cupy.cuda.runtime.deviceSynchronize()
except cupy.cuda.runtime.CUDARuntimeError:
    og.compile(og.parse("graph(x: f32[7]) -> (y)\\n  y = Swish(x)"), device="cuda")
""",
}


def test_smoke_checks_pass_after_a_fault_in_another_process(device: str) -> None:
    """An illegal address ends its own process, with an error message, and no other."""
    command = [sys.executable, "-c", FAULTS[device]]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=90
    )
    assert done.returncode != 0
    if device == "cuda":
        assert "CUDA refused " in done.stderr and "fix:   start a new process" in done.stderr, done.stderr
    for check in CHECKS:
        check(device)
    settle(device)


# -- CuPy --------------------------------------------------------------------------------------------------------------


def test_explicit_cupy_streams_order_their_work(cupy: Any) -> None:
    """A partition on an explicit stream, and a plain call on the current one, with work queued before both."""
    g = og.Graph(engine="cuda")
    x = g.input("x", dtype="f32", shape=(1 << 16,))
    y = g.add_op("Swish", x, name="y")
    g.finalize()
    engine, side = og.Engine("cuda", 0), cupy.cuda.Stream(non_blocking=True)
    compiled = g.get_partitions()[0].compile([x], [y], engine)
    with side:
        given, out = cupy.zeros(1 << 16, "f4"), cupy.empty(1 << 16, "f4")
        given += 2
    compiled.execute(og.Stream(engine, side), {x.id: given}, {y.id: out})
    og.Stream(engine, side).wait()
    np.testing.assert_allclose(cupy.asnumpy(out), 2.0 / (1 + np.exp(-2.0)), rtol=1e-6)
    f = og.compile(gated("f32", (None,), ()), device="cuda")
    with side:
        got = f(x=given, a=cupy.ones((), "f4"))
    side.synchronize()
    np.testing.assert_allclose(cupy.asnumpy(got), 2.0 / (1 + np.exp(-2.0)) + 1, rtol=1e-6)


def test_cupy_capture_keeps_the_workspace(cupy: Any) -> None:
    """Its memory is not reused while the graph may run."""
    g = og.Graph()
    g.output(g.add_op("SumTo", g.input("x", "f32", (70_001,)), g.input("like", "f32", (1,)), name="s"))
    f, side = og.compile(g, device="cuda"), cupy.cuda.Stream(non_blocking=True)
    with side:
        x, like, out = cupy.ones(70_001, "f4"), cupy.zeros(1, "f4"), cupy.zeros(1, "f4")
        f(x=x, like=like, out=out)
        side.begin_capture()
        f(x=x, like=like, out=out)
        graph = side.end_capture()
        del f
        others = [cupy.ones(n, "f4") for n in (64, 512, 4096, 70_001)]
        x += 1
        graph.launch(side)
        side.synchronize()
    assert cupy.asnumpy(out)[0] == 140_002 and all((cupy.asnumpy(o) == 1).all() for o in others)
