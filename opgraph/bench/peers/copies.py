"""The yardstick: the time to move as many bytes as an entry reads and writes, by the best available copy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

import opgraph as og
from opgraph.bench.case import Case


def copies(case: Case) -> Mapping[str, Callable[[], object]]:
    """Ways to copy half of the case's bytes, so that as many bytes are read and written as in the case."""
    count = max(case.bytes // 2 // 4, 1)
    return _of_device(case.device, count)


def _of_device(device: str, count: int) -> dict[str, Callable[[], object]]:
    """The copies by name. Their memory is kept from one case to the next."""
    if device == "cuda":
        source, target = _on_gpu(count)
        return {"copy (torch)": lambda: target.copy_(source)}
    a, b = _on_host(count)
    found: dict[str, Callable[[], object]] = {"copy (memcpy)": lambda: np.copyto(b, a)}
    own = _own_copy().bind(x=a, out=b)
    found["copy (opgraph)"] = own
    torch = sys.modules.get("torch")
    if torch is None:  # absent, or excluded from this run: loading it now would change the threads of all peers
        return found
    source, target = torch.from_numpy(a), torch.from_numpy(b)
    found["copy (torch)"] = lambda: target.copy_(source)
    return found


_host: list[np.ndarray] = []
_gpu: list[Any] = []


def _on_host(count: int) -> tuple[np.ndarray, np.ndarray]:
    if not _host or len(_host[0]) < count:
        _host[:] = [np.ones(count, np.float32), np.zeros(count, np.float32)]
    return _host[0][:count], _host[1][:count]


def _on_gpu(count: int) -> tuple[Any, Any]:
    import torch

    if not _gpu or len(_gpu[0]) < count:
        _gpu.clear()  # frees the old tensors before the new ones are allocated
        _gpu[:] = [torch.ones(count, device="cuda"), torch.zeros(count, device="cuda")]
    return _gpu[0][:count], _gpu[1][:count]


@cache
def _own_copy() -> og.Executable:
    """The identity as a kernel, with the same loop as every other kernel."""
    g = og.Graph()
    g.output(g.add_op("Identity", g.input("x", shape=(None,)), name="y"))
    return og.compile(g)
