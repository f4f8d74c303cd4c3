"""The gain by huge pages and kept memory: filling memory, and training steps, with and without; interleaved ratios.

python tests/benchmarks/pages.py
"""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

import opgraph.torch as ogt
from opgraph.bench.machine import machine
from opgraph.bench.timing import compare
from opgraph.runtime import huge_pages, memory_pool
from opgraph.torch.naf1 import with_order

SIZES = (4, 8, 16, 32, 128)


def filled(mebibytes: int) -> dict[str, float]:
    """Maps so much memory, writes it once and frees it."""

    def fill(advised: bool) -> Callable[[], None]:
        def call() -> None:
            memory = mmap.mmap(-1, mebibytes << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            handle = ctypes.c_char.from_buffer(memory)
            if advised:
                huge_pages.advise(ctypes.addressof(handle), mebibytes << 20)
            del handle
            array = np.frombuffer(memory, np.float32)
            array.fill(1.0)
            del array
            memory.close()

        return call

    return found(fill(True), fill(False), rounds=21)


def naf1(elements: int) -> dict[str, float]:
    """Forward and backward with and without huge pages: two results of that many f32."""
    step = _step(with_order(0.9).forward, elements, kept=False)

    def without() -> object:
        with mock.patch.object(huge_pages, "_madvise", lambda: None):
            return step()

    return found(step, without, rounds=15)


def kept(forward: Callable[[torch.Tensor], torch.Tensor], elements: int) -> dict[str, float]:
    """Forward and backward on kept memory, against new memory on huge pages."""
    return found(_step(forward, elements, kept=True), _step(forward, elements, kept=False), rounds=15)


def _step(forward: Callable[[torch.Tensor], torch.Tensor], elements: int, *, kept: bool) -> Callable[[], object]:
    x, d = torch.randn(elements, requires_grad=True), torch.ones(elements)
    fused = ogt.fuse(forward)

    def step() -> object:
        return torch.autograd.grad(fused(x), x, d)

    with mock.patch.object(memory_pool, "is_kept", memory_pool.is_kept if kept else lambda size: False):
        step()  # the first call plans the memory of the results
    return step


def found(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> dict[str, float]:
    """Times of both, and the page faults of one call each, which other work on the machine does not change."""
    return compare(ours, theirs, rounds) | {"faults": faults(ours), "theirs_faults": faults(theirs)}


def faults(call: Callable[[], object]) -> float:
    """Page faults of one call."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def main() -> None:
    """Runs everything and prints it."""
    print("machine:", ", ".join(f"{k} {v}" for k, v in machine().items()))
    print(f"\n{'case':<32}{'with us':>12}{'without us':>12}{'ratio':>8}  {'quartiles':<16}{'faults':>8}{'without':>8}")
    cases = {f"filling {size} MiB": filled(size) for size in SIZES}
    cases[f"NAF1, {8 << 20} f32"] = naf1(8 << 20)
    for n in (8 << 20, 32 << 20):
        cases[f"kept: NAF1, {n} f32"] = kept(with_order(0.9).forward, n)
        cases[f"kept: x * sigmoid(x), {n} f32"] = kept(lambda x: x * torch.sigmoid(x), n)
    for name, r in cases.items():
        times = f"{r['ours_us']:>12.1f}{r['theirs_us']:>12.1f}{r['ratio']:>8.3f}"
        spread = f"{r['low']:.3f} to {r['high']:.3f}"
        print(f"{name:<32}{times}  {spread:<16}{r['faults']:>8.0f}{r['theirs_faults']:>8.0f}")


if __name__ == "__main__":
    main()
