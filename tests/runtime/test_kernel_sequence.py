"""Sequences of CPU kernels give the same bits as one call after the other, for kernels of all kinds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidArguments
from opgraph.runtime import threads
from opgraph.runtime.cpu_kernel import HostKernel
from opgraph.runtime.kernel_sequence import KernelLaunch, KernelSequence

SWISH = "graph(x: f32[?,?]) -> (y)\n  s = Sigmoid(x)\n  y = Multiply(x, s)"
SCALED = "graph(x: f32[?,?], a: f32[?]) -> (y)\n  y = Multiply(x, a)"
COLUMNS = "graph(x: f32[?,?]) -> (y)\n  y = ReduceSum(x, axes=[0], keep_dims=false)"
SOFTMAX = "graph(x: f32[?,?]) -> (y)\n  y = SoftMax(x, axis=-1)"


def kernel_of(graph: og.Graph | str) -> HostKernel:
    alone = og.compile(og.parse(graph) if isinstance(graph, str) else graph).alone()
    assert alone is not None and isinstance(alone[0], HostKernel)
    return alone[0]


@pytest.fixture(scope="module")
def kernels() -> dict[str, HostKernel]:
    return {
        "swish": kernel_of(SWISH),
        "scaled": kernel_of(SCALED),
        "columns": kernel_of(COLUMNS),
        "soft": kernel_of(SOFTMAX),
    }


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def chain(kernels: dict[str, HostKernel], x: np.ndarray, a: np.ndarray) -> tuple[KernelSequence, Any, list[np.ndarray]]:
    """swish -> times a -> softmax -> column sums: the sequence, its arrays, and the results of single calls."""
    y, z, p = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    total = np.empty(x.shape[1], x.dtype)
    steps = [
        (kernels["swish"], [x], y, ((0, 0), (2, 0))),
        (kernels["scaled"], [y, a], z, ((2, 0), (1, 0), (3, 0))),
        (kernels["soft"], [z], p, ((3, 0), (4, 0))),
        (kernels["columns"], [p], total, ((4, 0), (5, 0))),
    ]
    launches = [KernelLaunch(kernel.plan(ins, [out]), operands) for kernel, ins, out, operands in steps]
    wanted: list[np.ndarray] = []
    for (kernel, _, _, _), more in zip(steps, ([], [a], [], [])):
        wanted += kernel([wanted[-1] if wanted else x, *more])
    return KernelSequence(launches, 6), [x, a, y, z, p, total], wanted


@pytest.mark.parametrize("shape", [(4, 7), (64, 48), (2048, 100)])
def test_sequence_gives_the_bits_of_single_calls(kernels: dict[str, HostKernel], shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x, a = rng.standard_normal(shape, np.float32), rng.standard_normal(shape[1], np.float32)
    sequence, arrays, wanted = chain(kernels, x, a)
    for _ in range(2):
        for array in arrays[2:]:
            array.fill(np.nan)
        sequence(*map(address, arrays))
        for found, want in zip(arrays[2:], wanted, strict=True):
            np.testing.assert_array_equal(found, want)


def test_large_sums_allocate_a_workspace(kernels: dict[str, HostKernel]) -> None:
    x = np.random.default_rng(1).standard_normal((2048, 100), np.float32)
    out = np.empty(100, np.float32)
    plan = kernels["columns"].plan([x], [out])
    assert plan.workspace
    KernelSequence([KernelLaunch(plan, ((0, 0), (1, 0)))], 2)(address(x), address(out))
    np.testing.assert_array_equal(out, kernels["columns"]([x])[0])


def test_without_openmp_python_threads_share_the_work(
    kernels: dict[str, HostKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(2).standard_normal((2048, 100), np.float32)
    sequence, arrays, wanted = chain(kernels, x, np.ones(100, np.float32))
    monkeypatch.setattr(threads, "team", lambda size: (2, None) if size >= threads.SINGLE_THREADED else (1, None))
    sequence(*map(address, arrays))
    np.testing.assert_array_equal(arrays[-1], wanted[-1])


def test_sequence_takes_strided_and_offset_operands_and_constants(kernels: dict[str, HostKernel]) -> None:
    whole = np.random.default_rng(3).standard_normal((8, 9), np.float32)
    left, right, out = whole[:, :3], whole[:, 3:6], np.empty((8, 9), np.float32)
    g = og.Graph()
    g.add_op("Add", g.input("x", shape=(None, 3)), g.constant("c", np.array([1, 2, 3], np.float32)))
    added = kernel_of(g)
    targets = out[:, 3:6], out[:, :3]
    launches = [
        KernelLaunch(kernels["swish"].plan([right], [targets[0]]), ((0, 12), (1, 12))),
        KernelLaunch(added.plan([left], [targets[1]]), ((0, 0), (1, 0))),
    ]
    KernelSequence(launches, 2)(address(whole), address(out))
    np.testing.assert_array_equal(targets[0], kernels["swish"]([right])[0])
    np.testing.assert_array_equal(targets[1], left + np.array([1, 2, 3], np.float32))


def test_concurrent_sequence_calls_do_not_interfere(kernels: dict[str, HostKernel]) -> None:
    rng = np.random.default_rng(4)
    a = np.ones(48, np.float32)
    sequence = chain(kernels, np.ones((64, 48), np.float32), a)[0]
    given = [chain(kernels, rng.standard_normal((64, 48), np.float32), a)[1:] for _ in range(64)]
    with ThreadPoolExecutor(4) as pool:  # each call writes to its own arrays
        list(pool.map(lambda one: sequence(*map(address, one[0])), given))
    for arrays, wanted in given:
        np.testing.assert_array_equal(arrays[-1], wanted[-1])


@pytest.mark.parametrize(
    ("shape", "operands", "words"),
    [
        ((2, 3), ((0, 0),), "got 1 operands for 2 arrays"),
        ((2, 3), ((0, 0), (2, 0)), "there is no address 2 among 2"),
        ((0, 3), ((0, 0), (1, 0)), "it has no elements"),
    ],
)
def test_invalid_launch_is_refused(
    kernels: dict[str, HostKernel], shape: tuple[int, int], operands: Any, words: str
) -> None:
    x = np.ones(shape, np.float32)
    plan = kernels["swish"].plan([x], [np.empty_like(x)])
    with pytest.raises(InvalidArguments, match=words):
        KernelSequence([KernelLaunch(plan, operands)], 2)
