"""CPU tensors of torch that pose as GPU tensors: emulated kernels, launched by a custom driver."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from emulator import FakeCupy
from libcuda import FakeDriver


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def driver(cupy: FakeCupy, built: FakeDriver) -> Iterator[FakeDriver]:
    pytest.importorskip("torch")
    from opgraph.bench import posing
    from opgraph.runtime import providers as package

    def forget() -> None:  # that module keeps a reference to the module with this CuPy
        sys.modules.pop("opgraph.runtime.providers.torch_cuda_prepared", None)
        package.__dict__.pop("torch_cuda_prepared", None)

    forget()
    with posing.posing(built.path):
        built.launches()
        yield built
    forget()
