"""torch streams by address, with a stand-in for torch's own functions: no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from opgraph.runtime.device_array import RawStream  # noqa: E402
from opgraph.runtime.providers import torch_internals  # noqa: E402
from opgraph.runtime.providers.torch_cuda import TORCH  # noqa: E402

SIDE = 77


@pytest.mark.parametrize("address", [0, 55])
def test_stream_address_becomes_the_torch_stream(address: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is the default stream. `torch.cuda.ExternalStream(0)` is another one, which does not wait for earlier work
    (pytorch issue 182960)."""
    current = [SIDE]

    @contextmanager
    def entered(stream: SimpleNamespace) -> Iterator[None]:
        current.append(stream.address)
        yield
        current.pop()

    def stream_of(address: int, device: object) -> SimpleNamespace:
        return SimpleNamespace(address=address)

    side = SimpleNamespace(address=SIDE, wait_stream=lambda other: None)
    monkeypatch.setattr(torch_internals, "current_stream", lambda index: current[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "get_stream_from_external", stream_of)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address, device: stream_of(address or 99, device))
    with TORCH.using(RawStream(ptr=address), 0):
        assert current == [SIDE, address]
    assert current == [SIDE]
