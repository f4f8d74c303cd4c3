"""Captured networks on a GPU, by CPU tensors that pose as its own: emulated kernels, launched by the native loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from emulator import FakeCupy
from libcuda import FakeDriver

torch = pytest.importorskip("torch")

from random_forward import RandomForward  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import opgraph.torch as ogt  # noqa: E402
from opgraph.runtime import host  # noqa: E402
from opgraph.torch.graph import backend  # noqa: E402
from opgraph.torch.graph.decompositions import decompositions  # noqa: E402
from opgraph.torch.graph.program import Program  # noqa: E402


class Block(nn.Module):
    """Norm, gate by halves (views at offsets), softmax over rows; biases are column sums in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.out = nn.LayerNorm(24), nn.Linear(24, 46), nn.Linear(23, 24)

    def forward(self, x):
        left, right = self.wide(self.norm(x)).chunk(2, -1)
        gated = self.out(F.silu(left) * right)
        return torch.softmax(x + gated, -1) * gated


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.linspace(-1, 1, 40))

    def forward(self, x):
        return torch.tanh(x + self.b)


def both(model, *given):
    """Result, gradients of what is given and of parameters, buffers."""
    given = [g.detach().requires_grad_() for g in given]
    y = model(*given)
    y.square().sum().backward()
    found = [y.detach(), *(g.grad for g in given), *(p.grad for p in model.parameters()), *model.buffers()]
    model.zero_grad()
    return found


def same(found, wanted) -> None:
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w)


def shifted(tensor):
    """The same values, 4 bytes off a multiple of 16."""
    memory = tensor.new_empty(tensor.numel() + 1)
    assert memory.data_ptr() % 16 == 0
    return memory[1:].view(tensor.shape).copy_(tensor)


@pytest.fixture
def captured() -> Iterator[list[backend.Captured]]:
    found: list[backend.Captured] = []
    with backend.observed(found.append):
        yield found


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def test_neighbouring_kernels_are_one_native_call(
    driver: FakeDriver, cupy: FakeCupy, block: Block, captured: list[backend.Captured]
) -> None:
    x = torch.randn(7, 5, 24)
    wanted = both(block, x)
    same(both(ogt.fuse(block), x), wanted)
    assert all(launch.stream is None for launch in driver.launches()) and not cupy.launches
    ((forward, backward),) = [(c.forward, c.backward) for c in captured]
    for program in (forward, backward):
        calls = [line for line in program.source.splitlines() if "recover_" in line]
        # Between two of them stands a library call.
        assert len(calls) <= len(program.library_calls) + 1
    assert len(backward.launches) > backward.source.count("recover_")


def test_tensors_begin_anywhere(driver: FakeDriver, block: Block) -> None:
    """The emulator refuses a pack that does not lie at a multiple of its size."""
    x = torch.randn(7, 5, 24)
    wanted = both(block, x)
    f = ogt.fuse(copy.deepcopy(block))
    for given in (x, shifted(x), x):
        same(both(f, given), wanted)
    for parameter in f.parameters():
        parameter.data = shifted(parameter.data)
    same(both(f, x), wanted)


def test_what_is_copied_keeps_its_strides(driver: FakeDriver) -> None:
    x, row = torch.randn(6, 8, 4), torch.randn(4)
    model = ogt.fuse(nn.SiLU())
    for given in (shifted(x).transpose(0, 1), shifted(x)[:, ::2], shifted(row).expand(6, 8, 4)):
        same([model(given)], [F.silu(given)])


def test_buffers_are_written_in_place_wherever_they_begin(driver: FakeDriver) -> None:
    x = torch.randn(4, 8, 5, 5)
    results = []
    for fuse in (False, True):
        model = nn.Sequential(nn.BatchNorm2d(8), nn.SiLU())
        model[0].running_mean = mean = shifted(torch.zeros(8))
        model = ogt.fuse(model) if fuse else model
        results.append(both(model, x) + both(model, x))
        assert model[0].running_mean is mean
    same(results[1], results[0])


def test_large_sums_bring_a_workspace(driver: FakeDriver, captured: list[backend.Captured]) -> None:
    x = torch.linspace(-2, 2, 3000 * 40).reshape(3000, 40)
    wanted = both(Bias(), x)
    same(both(ogt.fuse(Bias()), x), wanted)
    assert "work_" in captured[0].backward.source and "work_" not in captured[0].forward.source


def test_kernels_go_to_the_stream_of_the_moment_and_another_current_gpu_is_given_back(
    driver: FakeDriver, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opgraph.runtime.providers import torch_cuda_prepared

    stream = [5]
    monkeypatch.setattr(torch_cuda_prepared, "current_stream", lambda device: stream[0])
    model, x = ogt.fuse(Bias()), torch.randn(3, 40)
    used = []
    make_current = cupy.cuda.runtime.setDevice
    cupy.cuda.runtime.setDevice = lambda device: (used.append(device), make_current(device))
    for stream[0], cupy.device in ((5, 0), (0, 1), (7, 1)):
        before = cupy.device
        model(x)
        assert cupy.device == before
    assert [launch.stream or 0 for launch in driver.launches()] == [5, 0, 7]
    assert used == [0, 1, 0, 1]


def test_without_a_compiler_cupy_launches(driver: FakeDriver, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "is_available", lambda: False)
    x = torch.randn(3, 40)
    same(both(ogt.fuse(Bias()), x), both(Bias(), x))
    assert len(cupy.launches) == 2 and not driver.launches()


def test_branches_on_parameters(driver: FakeDriver) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return torch.exp(self.a * x) if self.a > 0 else self.a * x

    eager, x = Branch(), torch.randn(16)
    fused = ogt.fuse(copy.deepcopy(eager))
    for value in (0.5, 0.7, -0.5):
        for model in (eager, fused):
            with torch.no_grad():
                model.a.fill_(value)
        same(both(fused, x), both(eager, x))


@torch.library.custom_op("opgraph_test::second_half", mutates_args=())
def second_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])[x.numel() :]


@second_half.register_fake
def _(x):
    return torch.empty_like(x)


def test_results_of_library_calls_that_begin_elsewhere_are_copied(driver: FakeDriver) -> None:
    model = nn.SiLU()
    x = torch.randn(33)
    fused = torch.compile(lambda x: model(second_half(x)), backend="opgraph")
    for _ in range(2):
        same([fused(x)], [model(x)])


@pytest.mark.parametrize("seed", [3, 8])
def test_random_forwards(driver: FakeDriver, seed: int) -> None:
    results = []
    for fuse in (False, True):
        model = RandomForward(seed)
        x, y = (torch.randn(2, 4, 6)).requires_grad_()
        last, total = (ogt.fuse(model) if fuse else model)(x, y)
        (total.square().mean() + last.sum()).backward()
        results.append([last, total, *(p.grad for p in model.parameters() if p.grad is not None)])
        driver.launches()
    same(results[1], results[0])


# -- graphs of a GPU's own tensors -------------------------------------------------------------------------------------


def program(function, *given) -> Program:
    """The program of a function of tensors that have devices and no data."""
    with FakeTensorMode():
        args = [torch.empty(shape, device=device) for shape, device in given]
        return Program(make_fx(function, decomposition_table=decompositions())(*args))


def test_a_number_of_the_cpu_is_part_of_a_kernel(driver: FakeDriver) -> None:
    def filled(x):
        return torch.where(x > 0, x, torch.full((), 0.25)) * 2, torch.full((), 0.25).expand(3)

    made = program(filled, ((8, 16), "cuda:0"))
    assert len(made.launches) == 1
    x = torch.randn(8, 16)
    same(made.run([x])[:1], filled(x)[:1])


def test_a_tensor_of_the_cpu_beside_data_of_a_gpu_is_left_to_torch(driver: FakeDriver) -> None:
    made = program(lambda x, a: torch.exp(x * a), ((8, 16), "cuda:0"), ((), "cpu"))
    assert [str(n.target) for n in made.library_calls] == ["aten.mul.Tensor"]
    assert len(made.launches) == 1
    x, a = torch.randn(8, 16), torch.tensor(0.3)
    same(made.run([x, a]), [torch.exp(x * a)])
