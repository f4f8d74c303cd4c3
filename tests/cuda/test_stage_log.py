"""Each call of a CUDA kernel is logged, for every kind of launch."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
from cuda_calls import moved, random
from emulator import FakeCupy
from libcuda import FakeDriver

import opgraph as og


@pytest.fixture
def texts(stage_records: list[logging.LogRecord]) -> Callable[[], list[str]]:
    """The texts logged for calls so far."""
    return lambda: [r.getMessage() for r in stage_records if r.name == "opgraph.run"]


def names(texts: list[str]) -> list[str]:
    """The kernel names in texts."""
    return [text.partition(":")[0] for text in texts]


def test_each_kernel_of_a_call_is_logged(cupy: FakeCupy, texts: Callable[[], list[str]]) -> None:
    """A sum in tiles is two kernels."""
    f = og.compile(og.parse("graph(x: f32[300,40], w: f32[40]) -> (y)\n  y = SumTo(x, w)"), device="cuda")
    data = random((300, 40), "f32")
    x, w, out = moved(cupy, data), cupy.empty((40,), "f4"), cupy.empty((40,), "f4")
    got = f(x=x, w=w)
    assert names(texts()) == list(f.kernels) and len(f.kernels) == 2
    assert texts()[-1].startswith(f"{list(f.kernels)[1]}: [300,40] [40] -> [40], ")
    assert all(text.endswith(" threads") and " blocks of " in text for text in texts())
    again = f.bind(x=x, w=w, out=out)
    again()
    again()
    assert names(texts()) == list(f.kernels) * 3
    for found in (got, out):
        np.testing.assert_allclose(found.host, data.astype(np.float64).sum(0), rtol=1e-4, atol=1e-4)


def test_logged_torch_calls_launch_from_python(
    driver: FakeDriver, cupy: FakeCupy, texts: Callable[[], list[str]]
) -> None:
    torch = pytest.importorskip("torch")
    import opgraph.torch as ogt

    f, x = ogt.fuse(lambda x: x * torch.sigmoid(x)), torch.linspace(-4, 4, 512)
    for times in range(1, 4):
        cupy.launches.clear()
        assert torch.allclose(f(x), x * torch.sigmoid(x), rtol=1e-5, atol=1e-6)
        assert len(names(texts())) == times and len(cupy.launches) == 1
    assert not driver.launches()  # none by the native loop
