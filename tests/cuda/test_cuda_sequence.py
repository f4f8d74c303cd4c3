"""Sequences of CUDA kernels, launched by the native loop through a small custom driver."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from cuda_calls import moved, random
from emulator import FakeCupy
from libcuda import FakeDriver

import opgraph as og
from opgraph.errors import DeviceError, InvalidArguments
from opgraph.runtime import cpu_compiler
from opgraph.runtime.kernel_sequence import KernelLaunch

SWISH = "graph(x: f32[?,?]) -> (y)\n  s = Sigmoid(x)\n  y = Multiply(x, s)"
SCALED = "graph(x: f32[?,?], a: f32[?]) -> (y)\n  y = Multiply(x, a)"
SOFTMAX = "graph(x: f32[?,?]) -> (y)\n  y = SoftMax(x, axis=-1)"
COLUMNS = "graph(x: f32[?,?]) -> (y)\n  y = ReduceSum(x, axes=[0], keep_dims=false)"


@pytest.fixture
def driver(cupy: FakeCupy, built: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    from opgraph.runtime import cuda_sequence

    monkeypatch.setattr(cuda_sequence, "LIBCUDA", built.path)
    built.launches()
    return built


class Chain:
    """swish -> times a -> softmax -> column sums, each with its arrays; x begins `shift` elements into its memory."""

    def __init__(self, cupy: FakeCupy, shape: tuple[int, int], shift: int = 0, step: int = 1) -> None:
        values = random(shape, "f32")
        x = cupy.empty((shape[0], shift + step * shape[1]), "f4")[:, shift::step]
        x.host[...] = values
        a = moved(cupy, random(shape[1:], "f32", 1))
        y, z, p, total = (cupy.empty(s, "f4") for s in (shape, shape, shape, shape[1:]))
        self.arrays = [x, a, y, z, p, total]
        steps = [(SWISH, (0, 2)), (SCALED, (2, 1, 3)), (SOFTMAX, (3, 4)), (COLUMNS, (4, 5))]
        self.wanted, self.launches = [], []
        given: list[Any] = [x, a, None, None, None, None]
        for text, places in steps:
            f = og.compile(og.parse(text), device="cuda")
            kernel: Any = f._steps[0].run
            *ins, out = places
            given[out] = kernel([given[i] for i in ins])[0]
            plan = kernel.plan([self.arrays[i] for i in ins], [self.arrays[out]])
            self.launches.append(KernelLaunch(plan, tuple((i, 0) for i in places)))
        self.wanted = [array.host for array in given[2:]]

    def addresses(self) -> list[int]:
        return [array.data.ptr for array in self.arrays]

    def sequence(self, device: int = 0) -> Any:
        from opgraph.runtime.cuda_sequence import CudaSequence

        return CudaSequence(self.launches, len(self.arrays), device)

    def run(self, cupy: FakeCupy, sequence: Any, stream: int) -> None:
        for array in self.arrays[2:]:
            array.host.fill(np.nan)
        work = cupy.empty((sequence.workspace,), "u1")
        sequence(stream, *self.addresses(), *([work.data.ptr] if sequence.workspace else []))

    def check(self) -> None:
        for found, wanted in zip(self.arrays[2:], self.wanted, strict=True):
            np.testing.assert_array_equal(found.host, wanted)


@pytest.mark.parametrize(
    ("shape", "shift", "step"), [((4, 7), 0, 1), ((300, 40), 0, 1), ((3000, 40), 1, 1), ((33, 24), 0, 2)]
)
def test_sequence_gives_the_bits_of_single_calls_on_its_stream(
    cupy: FakeCupy, driver: FakeDriver, shape: tuple[int, int], shift: int, step: int
) -> None:
    chain = Chain(cupy, shape, shift, step)
    sequence = chain.sequence()
    assert bool(sequence.workspace) == (shape[0] == 3000)  # small sums need none
    cupy.launches.clear()
    for stream in (7, 0):
        chain.run(cupy, sequence, stream)
        chain.check()
        found = driver.launches()
        assert len(found) == sum(len(item.plan.launches) for item in chain.launches)
        assert {launch.stream or 0 for launch in found} == {stream}
    assert not cupy.launches


def test_misaligned_arrays_get_separate_plans(cupy: FakeCupy, driver: FakeDriver) -> None:
    assert Chain(cupy, (300, 40)).launches[0].plan.alignment == 16
    assert Chain(cupy, (300, 40), shift=1).launches[0].plan.alignment == 4


def test_cupy_launches_the_sequence_without_a_compiler(
    cupy: FakeCupy, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(cupy, (300, 40))
    monkeypatch.setattr(cpu_compiler, "is_available", lambda: False)
    sequence = chain.sequence()
    cupy.launches.clear()
    chain.run(cupy, sequence, 9)
    chain.check()
    assert {stream for _, _, stream in cupy.launches} == {9} and not driver.launches()


@pytest.mark.parametrize("number", [0, 2])
def test_thread_without_a_cuda_context_gets_one_and_continues(cupy: FakeCupy, driver: FakeDriver, number: int) -> None:
    chain = Chain(cupy, (300, 40))
    sequence = chain.sequence(device=1)
    made: list[int] = []
    cupy.cuda.runtime.memGetInfo = lambda: made.append(cupy.device)  # cudaFree would end a capture
    driver.refuse(number, 201)
    chain.run(cupy, sequence, 9)
    chain.check()
    assert made == [1]
    assert len(driver.launches()) == sum(len(item.plan.launches) for item in chain.launches)


def test_driver_error_names_the_kernel(cupy: FakeCupy, driver: FakeDriver) -> None:
    chain = Chain(cupy, (300, 40))
    sequence = chain.sequence()
    driver.refuse(2, 1)
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_INVALID_VALUE \(1\)\n  where: kernel 2 of a sequence on cuda:0"):
        chain.run(cupy, sequence, 9)


def test_missing_driver_library_is_named(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    from opgraph.runtime import cuda_sequence

    monkeypatch.setattr(cuda_sequence, "LIBCUDA", "libcuda-that-is-not-there.so")
    with pytest.raises(DeviceError, match=r"the driver cannot be loaded: .*not-there"):
        Chain(cupy, (4, 7)).sequence()


def test_invalid_launch_is_refused(cupy: FakeCupy, driver: FakeDriver) -> None:
    from opgraph.runtime.cuda_sequence import CudaSequence

    chain = Chain(cupy, (4, 7))
    with pytest.raises(InvalidArguments, match="there is no address 5 among 5"):
        CudaSequence(chain.launches, 5, 0)
    empty = Chain(cupy, (0, 7))
    with pytest.raises(InvalidArguments, match="it has no elements"):
        empty.sequence()


def test_plan_keeps_its_constants_alive(cupy: FakeCupy, driver: FakeDriver) -> None:
    kernel, sequence, x, y = plus_constant(cupy)
    plan = sequence.launches[0].plan
    assert {memory.ptr for memory in plan.keep} == set(plan.fixed) - {0} != set()
    kernel._constants.clear()
    sequence(0, x.data.ptr, y.data.ptr)
    np.testing.assert_array_equal(y.host, x.host + np.array([1, 2, 3], np.float32))


def test_constants_outlive_a_captured_sequence(cupy: FakeCupy, driver: FakeDriver) -> None:
    kernel, sequence, x, y = plus_constant(cupy)
    memory = weakref.ref(sequence.launches[0].plan.keep[0])
    assert sequence.direct is None  # a direct launch would not check for a capture
    cupy.capturing = {7}
    sequence(7, x.data.ptr, y.data.ptr)
    del kernel, sequence
    gc.collect()
    assert memory() is not None


def plus_constant(cupy: FakeCupy) -> tuple[Any, Any, Any, Any]:
    """A kernel that adds a constant, a sequence of only this kernel, its argument and its result."""
    from opgraph.runtime.cuda_sequence import CudaSequence

    g = og.Graph()
    g.add_op("Add", g.input("x", shape=(None, 3)), g.constant("c", np.array([1, 2, 3], np.float32)))
    kernel: Any = og.compile(g, device="cuda")._steps[0].run
    x, y = moved(cupy, random((5, 3), "f32")), cupy.empty((5, 3), "f4")
    return kernel, CudaSequence([KernelLaunch(kernel.plan([x], [y]), ((0, 0), (1, 0)))], 2, 0), x, y
