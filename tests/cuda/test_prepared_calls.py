"""Fused functions on a GPU, with CPU tensors that pose as its own: emulated kernels, launched by the native loop."""

from __future__ import annotations

import sys

import pytest
from emulator import FakeCupy
from libcuda import FakeDriver

torch = pytest.importorskip("torch")

import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import DeviceError  # noqa: E402
from opgraph.runtime import cpu_compiler  # noqa: E402


def function():
    return ogt.fuse(lambda x, a: x * torch.sigmoid(a * x))


def both(f, x, a):
    x, a = x.detach().requires_grad_(), a.detach().requires_grad_()
    y = f(x, a)
    return y, *torch.autograd.grad(y.sum(), (x, a))


def same(found, wanted) -> bool:
    return all(torch.allclose(f, w, rtol=1e-5, atol=1e-6) for f, w in zip(found, wanted, strict=True))


WHOLE = torch.linspace(-4, 4, 4 * 50).reshape(4, 50)
VIEWS = {
    "dense": lambda: WHOLE,
    "misaligned": lambda: WHOLE.reshape(-1)[1:101].reshape(4, 25),
    "strided": lambda: WHOLE[:, ::2],
    "transposed": lambda: WHOLE.t(),
    "broadcast": lambda: WHOLE[0].expand(4, 50),
    "empty": lambda: WHOLE[:0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_layout_agrees_with_eager(driver: FakeDriver, view: str) -> None:
    f, eager, x, a = function(), lambda x, a: x * torch.sigmoid(a * x), VIEWS[view](), torch.tensor(0.7)
    for _ in range(3):
        assert same([f(x, a)], [eager(x, a)])
        assert same(both(f, x, a), both(eager, x, a))


def test_one_function_serves_aligned_and_misaligned_tensors_of_one_shape(driver: FakeDriver, cupy: FakeCupy) -> None:
    f, a = function(), torch.tensor(0.7)
    lines = torch.linspace(-4, 4, 1 << 10)
    cupy.launches.clear()
    for shift in (1, 0, 1, 2, 0):
        x = lines[shift : shift + 256]
        assert same([f(x, a)], [x * torch.sigmoid(a * x)])
    assert len(driver.launches()) == 2  # the aligned ones
    assert len(cupy.launches) == 3  # each by the kernel for its alignment


def test_calls_launch_on_the_current_stream(
    driver: FakeDriver, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opgraph.runtime.providers import torch_internals

    stream = [5]
    monkeypatch.setattr(torch_internals, "current_stream", lambda device: stream[0])
    f, x, a = function(), torch.rand(64), torch.tensor(0.7)
    for stream[0] in (5, 0, 7):
        f(x, a)
    assert [launch.stream or 0 for launch in driver.launches()] == [5, 0, 7]
    assert not cupy.launches


def test_launch_restores_another_current_gpu(driver: FakeDriver, cupy: FakeCupy) -> None:
    f, x, a = function(), torch.rand(64), torch.tensor(0.7)
    f(x, a)
    cupy.device = 1
    assert same([f(x, a)], [x * torch.sigmoid(a * x)])
    assert cupy.device == 1 and len(cupy.launches) == 1


def test_results_are_right_if_torchs_current_gpu_differs(
    driver: FakeDriver, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `with torch.cuda.device(1):` in a process that used only GPU 1, torch allocates on GPU 0 again, and the
    runtime stays on GPU 1 until torch uses GPU 0."""
    from opgraph.runtime.providers import torch_internals

    allocated = []
    monkeypatch.setattr(torch_internals, "current_gpu", lambda: 1)  # the runtime reports 0, the kernel's
    monkeypatch.setattr(torch_internals, "empty_cuda", lambda *look: allocated.append(look))
    f, x, a = function(), torch.rand(64), torch.tensor(0.7)
    for _ in range(2):
        assert same([f(x, a)], [x * torch.sigmoid(a * x)])
    assert allocated == []


def test_forked_process_is_refused_before_any_cuda_call(
    driver: FakeDriver, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, every CUDA call returns cudaErrorInitializationError."""
    from opgraph.runtime import cuda
    from opgraph.runtime.providers import torch_internals

    def asked() -> int:
        assert not cuda.forked
        return 0

    monkeypatch.setattr(torch_internals, "current_gpu", asked)
    f, x, a = function(), torch.rand(64), torch.tensor(0.7)
    f(x, a)
    monkeypatch.setattr(cuda, "forked", True)
    with pytest.raises(DeviceError, match="this process was forked off one that had used the GPU"):
        f(x, a)


def test_second_derivatives_agree_with_eager(driver: FakeDriver) -> None:
    x, a = torch.rand(64, requires_grad=True), torch.tensor(0.7, requires_grad=True)

    def second(f):
        (slope,) = torch.autograd.grad(f(x, a).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.sum(), (x, a))

    f = function()
    for _ in range(3):
        assert same(second(f), second(lambda x, a: x * torch.sigmoid(a * x)))


def test_large_sums_allocate_a_workspace(driver: FakeDriver) -> None:
    f = ogt.fuse(lambda x, b: torch.tanh(x + b))
    x, b = torch.linspace(-2, 2, 3000 * 40).reshape(3000, 40), torch.rand(40)
    for _ in range(2):
        assert same(both(f, x, b)[2:], both(lambda x, b: torch.tanh(x + b), x, b)[2:])


def test_cupy_launches_kernels_without_a_compiler(
    driver: FakeDriver, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_compiler, "is_available", lambda: False)
    f, x, a = function(), torch.rand(64), torch.tensor(0.7)
    for _ in range(2):
        assert same(both(f, x, a), both(lambda x, a: x * torch.sigmoid(a * x), x, a))
    assert len(cupy.launches) == 4 and not driver.launches()


def python_functions(call) -> list[str]:
    names = []

    def note(frame, event, _):
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def test_prepared_call_runs_few_python_functions(driver: FakeDriver) -> None:
    """Times would vary from day to day. `<lambda>` is the stand-in for the current GPU and its stream."""
    f, x, a = function(), torch.rand(64), torch.tensor(0.7)
    leaf = x.clone().requires_grad_()
    for _ in range(3):
        f(x, a), f(leaf, a).sum().backward()
    stand_ins = ["<lambda>", "<lambda>"]
    assert python_functions(lambda: f(x, a))[1:] == ["__call__", "is_dynamo_compiling", "plan", "prepared", *stand_ins]
    assert python_functions(lambda: f(leaf, a))[1:] == [
        "__call__",
        "is_dynamo_compiling",
        "plan",
        "forward",
        *stand_ins,
    ]
