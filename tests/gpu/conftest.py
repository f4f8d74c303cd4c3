"""Tests on a GPU: `pytest tests/gpu` needs CuPy and a GPU; tests of tensors need torch with CUDA as well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import pytest
from agreement import as_on_a_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.filterwarnings("default"))  # other libraries warn


@pytest.fixture(scope="module", autouse=True)
def forms_of_a_gpu() -> Iterator[None]:
    """Avoids the CPU engine's tables, whose last bits differ. (Other folders' tests run in the same process.)"""
    with as_on_a_gpu():
        yield


def missing(request: pytest.FixtureRequest, reason: str) -> NoReturn:
    """Skips; fails if a GPU is required (`-p as_they_come --gpu`)."""
    if request.config.getoption("--gpu", default=False):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cupy(request: pytest.FixtureRequest) -> Any:
    """CuPy on a machine with a GPU."""
    try:
        import cupy as module
    except ImportError as error:
        missing(request, f"CuPy is missing: pip install 'opgraph[cuda13]' ({error})")
    try:
        count = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        missing(request, f"no GPU: {error}")
    if count == 0:
        missing(request, "no GPU")
    return module


@pytest.fixture(scope="session")
def torch(request: pytest.FixtureRequest, cupy: Any) -> Any:
    """Torch with CUDA."""
    try:
        import torch as module
    except ImportError as error:
        missing(request, f"torch is missing: {error}")
    if not module.cuda.is_available():
        missing(request, "this torch has no CUDA")
    return module


class Memory:
    """Arrays of one library on GPU 0."""

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self.module = module

    def put(self, array: np.ndarray) -> Any:
        if self.name == "cupy":
            return self.module.asarray(array)
        from opgraph.runtime.providers.torch import from_numpy

        return from_numpy(np.require(array, requirements=("C", "W"))).cuda()

    def get(self, array: Any) -> np.ndarray:
        if self.name == "cupy":
            return self.module.asnumpy(array)
        from opgraph.runtime.providers.torch import to_numpy

        return to_numpy(array.cpu())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self.put(np.zeros(shape, dtype))


@pytest.fixture(params=["cupy", "torch"])
def memory(request: pytest.FixtureRequest) -> Memory:
    """Each library in turn."""
    return Memory(request.param, request.getfixturevalue(request.param))


@pytest.fixture
def any_memory(cupy: Any) -> Memory:
    """Torch if it is available, else CuPy."""
    try:
        import torch

        return Memory("torch", torch) if torch.cuda.is_available() else Memory("cupy", cupy)
    except ImportError:
        return Memory("cupy", cupy)


@contextmanager
def flushing(dtype: str) -> Iterator[None]:
    """Makes the CPU treat f32 subnormals as the GPU does (-ftz=true), for results that are computed in f32.

    f16 is left out: its subnormals are f32 subnormals when they enter the CPU's arithmetic, but not the GPU's.
    """
    if dtype not in ("f32", "bf16"):
        yield
        return
    torch = pytest.importorskip("torch", reason="only torch can make the CPU flush subnormals")
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.fixture
def flush() -> Any:
    """`with flush(dtype):` the CPU flushes subnormals in this thread."""
    return flushing
