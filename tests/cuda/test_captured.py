"""Captured networks on a GPU, with CPU tensors that pose as its own: emulated kernels, launched by the native loop."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator

import pytest
from emulator import FakeCupy
from libcuda import FakeDriver

torch = pytest.importorskip("torch")

from agreement import assert_close_enough  # noqa: E402
from random_forward import RandomForward  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import opgraph.torch as ogt  # noqa: E402
from opgraph.runtime import cpu_compiler  # noqa: E402
from opgraph.torch.graph import backend  # noqa: E402
from opgraph.torch.graph import program as graph_program  # noqa: E402
from opgraph.torch.graph.decompositions import decompositions  # noqa: E402
from opgraph.torch.graph.device_targets import target_of  # noqa: E402
from opgraph.torch.graph.dynamic_shapes import SizedPrograms  # noqa: E402
from opgraph.torch.graph.program import Program  # noqa: E402
from opgraph.torch.graph.symbolic_program import SizedProgram  # noqa: E402


class Block(nn.Module):
    """A norm, a gate of halves (views at offsets), softmax over rows; biases are column sums in backward."""

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


class Both(Bias):
    """A module with two results; with one it would run as a fused function."""

    def forward(self, x):
        return torch.tanh(x + self.b), x * self.b


def both(model, *given):
    """The result, gradients of inputs and parameters, and buffers."""
    given = [g.detach().requires_grad_() for g in given]
    y = model(*given)
    y.square().sum().backward()
    found = [y.detach(), *(g.grad for g in given), *(p.grad for p in model.parameters()), *model.buffers()]
    model.zero_grad()
    return found


def check(found, eager, *given) -> None:
    """Compares a fused model's `both` with its eager twin's."""
    exact = copy.deepcopy(eager).double()
    assert_close_enough(found, both(eager, *given), both(exact, *[g.double() for g in given]))


def shifted(tensor):
    """The same values, at an address 4 bytes after a multiple of 16."""
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
    fused = ogt.fuse(copy.deepcopy(block))
    check(both(fused, x), block, x)
    assert all(launch.stream is None for launch in driver.launches()) and not cupy.launches
    ((forward, backward),) = [(c.forward, c.backward) for c in captured]
    for program in (forward, backward):
        calls = [line for line in program.source.splitlines() if "recover_" in line]
        # A library call separates two of them.
        assert len(calls) <= len(program.library_calls) + 1
    assert len(backward.launches) > backward.source.count("recover_")


def test_tensors_may_be_misaligned(driver: FakeDriver, block: Block) -> None:
    """The emulator refuses a pack whose address is no multiple of its size."""
    x = torch.randn(7, 5, 24)
    fused = ogt.fuse(copy.deepcopy(block))
    for given in (x, shifted(x), x):
        check(both(fused, given), block, x)
    for parameter in fused.parameters():
        parameter.data = shifted(parameter.data)
    check(both(fused, x), block, x)


class Lengths(nn.Module):
    """Rows, sums, numbers, and views at offsets that depend on the sizes of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x):
        x = x * self.scale[: x.shape[1]].sum() / x.shape[0]
        neighbours = x[:, 1:] * torch.sigmoid(x[:, :-1])
        halves = torch.cat([-x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], 1)
        return torch.softmax(halves, -1) + x.mean(0), neighbours.sum(0), x.std(0).sum() * neighbours.amax(1)


@pytest.mark.parametrize("make", [Block, Lengths])
def test_one_program_serves_all_sizes(
    driver: FakeDriver, captured: list[backend.Captured], make: type[nn.Module]
) -> None:
    """Packs and a workspace are as large as the sizes of a call allow; inputs begin anywhere."""
    torch.manual_seed(0)
    eager = make()
    fused = ogt.fuse(copy.deepcopy(eager))

    def run(model, x):
        x = x.detach().requires_grad_()
        found = model(x)
        results = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad(sum(t.square().sum() for t in results), [x, *model.parameters()])
        return [*(t.detach() for t in results), *gradients]

    for sizes in [(4, 6), (5, 8), (7, 10), (900, 4), (300, 14), (5, 8)]:
        x = torch.randn(*sizes, 24) if make is Block else torch.randn(*sizes)
        for given in (x, shifted(x)):
            found = run(fused, given)
            assert driver.launches()
            assert_close_enough(found, run(eager, x), run(copy.deepcopy(eager).double(), x.double()))
    programs = [c.forward for c in captured if isinstance(c.forward, SizedPrograms)]
    assert any(isinstance(made, SizedProgram) for found in programs for made in found.programs.values())


def test_views_keep_their_storage_offset(driver: FakeDriver) -> None:
    made = program(lambda x: torch.exp(x[1:]), ((5, 6), "cpu"))
    assert made.launches[0].plan.alignment == 8
    x = torch.randn(5, 6)
    torch.testing.assert_close(made.run([x]), (torch.exp(x[1:]),))


def test_copied_inputs_keep_their_strides(driver: FakeDriver) -> None:
    x, row = torch.randn(6, 8, 4), torch.randn(4)
    model = ogt.fuse(nn.SiLU())
    for given in (shifted(x).transpose(0, 1), shifted(x)[:, ::2], shifted(row).expand(6, 8, 4)):
        torch.testing.assert_close(model(given), F.silu(given))


def test_misaligned_buffers_are_written_in_place(driver: FakeDriver) -> None:
    x = torch.randn(4, 8, 5, 5)
    eager = nn.Sequential(nn.BatchNorm2d(8), nn.SiLU())
    fused = copy.deepcopy(eager)
    fused[0].running_mean = mean = shifted(torch.zeros(8))
    ogt.fuse(fused)
    for _ in range(2):
        check(both(fused, x), eager, x)
    assert fused[0].running_mean is mean


def test_large_sums_allocate_a_workspace(driver: FakeDriver, captured: list[backend.Captured]) -> None:
    class Summed(Bias):
        """More than one activation, which would run as a fused function."""

        def forward(self, x):
            return torch.tanh(x + self.b).square().mean(1)

    x = torch.linspace(-2, 2, 3000 * 40).reshape(3000, 40)
    check(both(ogt.fuse(Summed()), x), Summed(), x)
    assert "work_" in captured[0].backward.source and "work_" not in captured[0].forward.source


def test_kernels_use_the_current_stream_and_restore_the_gpu(
    driver: FakeDriver, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opgraph.runtime.providers import torch_internals

    stream = [5]
    monkeypatch.setattr(torch_internals, "current_stream", lambda device: stream[0])
    model, x = ogt.fuse(Both()), torch.randn(3, 40)
    used = []
    make_current = cupy.cuda.runtime.setDevice
    cupy.cuda.runtime.setDevice = lambda device: (used.append(device), make_current(device))
    for stream[0], cupy.device in ((5, 0), (0, 1), (7, 1)):
        before = cupy.device
        model(x)
        assert cupy.device == before
    assert [launch.stream or 0 for launch in driver.launches()] == [5, 0, 7]
    assert used == [0, 1, 0, 1]


def test_cupy_launches_kernels_without_a_compiler(
    driver: FakeDriver, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_compiler, "is_available", lambda: False)
    x = torch.randn(3, 40)
    check(both(ogt.fuse(Bias()), x), Bias(), x)
    assert len(cupy.launches) == 2 and not driver.launches()


def test_branches_on_parameters_follow_their_values(driver: FakeDriver) -> None:
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
        check(both(fused, x), eager, x)


@torch.library.custom_op("opgraph_test::second_half", mutates_args=())
def second_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])[x.numel() :]


@second_half.register_fake
def _(x):
    return torch.empty_like(x)


def test_misaligned_library_results_are_copied(driver: FakeDriver) -> None:
    model = nn.SiLU()
    x = torch.randn(33)
    fused = torch.compile(lambda x: model(second_half(x)), backend="opgraph")
    for _ in range(2):
        torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize("seed", [9])
def test_random_forwards_agree_with_eager(driver: FakeDriver, seed: int) -> None:
    results = []
    for kind in ("eager", "fused", "exact"):
        model, (x, y) = RandomForward(seed), torch.linspace(-2, 2, 48).view(2, 4, 6)
        if kind == "fused":
            ogt.fuse(model)
        if kind == "exact":
            model, x, y = model.double(), x.double(), y.double()
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        last, total = model(x, y)
        (total.square().mean() + last.sum()).backward()
        results.append([last, total, *(p.grad for p in (x, y, *model.parameters()) if p.grad is not None)])
        driver.launches()
    eager, fused, exact = results
    assert_close_enough(fused, eager, exact)


# -- graphs of a GPU's own tensors -------------------------------------------------------------------------------------


def program(function, *given) -> Program:
    """The program of a function of tensors that have devices but no data."""
    with FakeTensorMode():
        args = [torch.empty(shape, device=device) for shape, device in given]
        traced = make_fx(function, decomposition_table=decompositions())(*args)
    return Program(traced)


def test_cuda_graph_keeps_its_programs_constants_alive(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x):
        return x * torch.arange(3.0)

    alive = []
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=capturing: answer)
        made = program(function, ((5, 3), "cpu"))
        (sequence,) = [value.__self__ for name, value in made.run.__globals__.items() if name.startswith("recover_")]
        x = torch.randn(5, 3)
        torch.testing.assert_close(made.run([x]), (function(x),))
        alive.append(weakref.ref(sequence))
        del made, sequence
        gc.collect()
    assert [reference() is not None for reference in alive] == [False, True]


@pytest.fixture
def with_devices(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each tensor report the device of its graph."""
    monkeypatch.setattr(graph_program, "target_of", target_of)


def test_cpu_scalar_is_passed_to_the_gpu_kernel(with_devices: None) -> None:
    def function(x):
        number = torch.full((), 0.25)
        return torch.where(x > 0, x, number) * 2, number.expand(3)

    made = program(function, ((8, 16), "cuda:0"))
    assert [(str(launch.target.engine), len(launch.reads)) for launch in made.launches] == [("cpu", 0), ("cuda:0", 1)]
    x = torch.randn(8, 16)
    torch.testing.assert_close(made.run([x]), function(x))


def test_cpu_tensor_with_gpu_data_is_left_to_torch(with_devices: None) -> None:
    made = program(lambda x, a: torch.exp(x * a), ((8, 16), "cuda:0"), ((), "cpu"))
    assert [str(n.target) for n in made.library_calls] == ["aten.mul.Tensor"]
    x, a = torch.randn(8, 16), torch.tensor(0.3)
    torch.testing.assert_close(made.run([x, a]), (torch.exp(x * a),))


def test_kernels_run_on_cpu_and_one_gpu_and_torch_runs_the_rest(with_devices: None, cupy: FakeCupy) -> None:
    def function(x, y, z):
        return torch.exp(x) + 1, torch.exp(y) + 1, torch.exp(z) + 1

    made = program(function, ((8,), "cpu"), ((8,), "cuda:1"), ((8,), "cuda:0"))
    assert [str(launch.target.engine) for launch in made.launches] == ["cpu", "cuda:1"]
    assert [str(n.target) for n in made.library_calls] == ["aten.exp.default", "aten.add.Tensor"]
    given = torch.randn(3, 8)
    torch.testing.assert_close(made.run([*given]), function(*given))
    assert cupy.device == 0
