"""Large results of fused calls lie on huge pages, where the system has them; other memory is unchanged."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch

import opgraph.torch as ogt
from opgraph.runtime import huge_pages

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_advice = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not SYSTEM.exists() or not Path("/proc/self/smaps").exists(),
    reason="the system has no huge pages to ask for",
)


def is_advised(address: int) -> bool:
    """True if huge pages were requested (madvise) for the mapping of an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            first, end = (int(part, 16) for part in head.split("-"))
            inside = first <= address < end
        elif inside and head == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"nothing is mapped at {address:#x}")


def middle(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes // 2


@needs_advice
def test_large_results_and_gradients_of_one_kernel_lie_on_huge_pages() -> None:
    fused = ogt.fuse(lambda x, a: x * torch.sigmoid(a * x))
    # New memory: the allocator may return memory that was advised before, for another tensor.
    x = torch.frombuffer(mmap.mmap(-1, 36 << 20), dtype=torch.float32).normal_().requires_grad_()
    a = torch.ones(1, requires_grad=True)
    y = fused(x, a)
    (gradient,) = torch.autograd.grad(y, x, torch.randn(9 << 20))
    assert is_advised(middle(y)) and is_advised(middle(gradient))
    assert not is_advised(middle(x)), "memory that opgraph did not allocate is left alone"


@needs_advice
def test_large_results_of_several_partitions_lie_on_huge_pages() -> None:
    fused = ogt.fuse(lambda x, y: (torch.exp(x) - 1, torch.exp(y) - 1))
    x = torch.randn(9 << 20)
    apart, small = fused(x, torch.randn(3))
    assert is_advised(middle(apart)) and small.shape == (3,)


@needs_advice
def test_only_whole_pages_inside_the_range_are_advised() -> None:
    memory = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = mmap.PAGESIZE
    huge_pages.advise(start + page + 1, (8 << 20) - 2)
    assert [is_advised(start + k * page) for k in (0, 1, 2)] == [False, False, True]
    last = (page + (8 << 20) - 1) // page  # the page of the last byte
    assert [is_advised(start + k * page) for k in (last - 1, last, last + 1)] == [True, False, False]


@needs_advice
def test_small_memory_is_not_advised() -> None:
    memory = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    huge_pages.advise(start, huge_pages.LARGE - 1)
    assert not is_advised(start)
    huge_pages.advise(start, huge_pages.LARGE)
    assert is_advised(start)


def test_system_without_huge_pages_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    huge_pages._madvise.cache_clear()
    try:
        x = torch.randn(2 << 20)
        torch.testing.assert_close(ogt.fuse(lambda x: torch.exp(x) - 1)(x), torch.exp(x) - 1)
    finally:
        huge_pages._madvise.cache_clear()
