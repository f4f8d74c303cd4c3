"""Large results on the CPU reuse the memory of earlier results that no object holds any more."""

from __future__ import annotations

import gc
import mmap
import pickle
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import opgraph.torch as ogt
from opgraph.runtime import memory_pool

pytestmark = pytest.mark.skipif(
    not memory_pool.is_kept(memory_pool.SMALLEST), reason="the system has no memory that can be lent to it"
)

N = memory_pool.SMALLEST // 4


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    gc.collect()
    ogt.empty_cache()
    yield
    gc.collect()
    ogt.empty_cache()


def scaled() -> Callable[..., torch.Tensor]:
    return ogt.fuse(lambda x, a: x * a + 1)


def test_freed_result_memory_is_reused_without_page_faults() -> None:
    f, x, a = scaled(), torch.ones(N), torch.tensor(2.0)
    y = f(x, a)
    place = y.data_ptr()
    assert ogt.empty_cache() == 0, "what somebody holds does not wait"
    del y
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    y = f(x, torch.tensor(3.0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 64  # of 8192 pages
    assert y.data_ptr() == place and y.min() == y.max() == 4.0
    del y
    assert ogt.empty_cache() == memory_pool.SMALLEST and ogt.empty_cache() == 0


@pytest.mark.parametrize(
    "held",
    [
        lambda y: y[5:7],
        lambda y: y.detach(),
        lambda y: y.numpy()[3:],
        lambda y: y.untyped_storage(),
        lambda y: y.view(2, -1),
    ],
    ids=["slice", "detached", "numpy", "storage", "view"],
)
def test_memory_with_a_live_view_is_not_reused(held: Callable[[torch.Tensor], Any]) -> None:
    f, x = scaled(), torch.ones(N)
    y = f(x, torch.tensor(2.0))
    look = held(y)
    place = y.data_ptr()
    del y
    other = f(x, torch.tensor(9.0))
    assert other.data_ptr() != place
    values = torch.as_tensor(look if not isinstance(look, torch.UntypedStorage) else torch.tensor([]).set_(look))
    assert values.min() == values.max() == 3.0


def test_memory_saved_by_autograd_is_not_reused() -> None:
    f = ogt.fuse(lambda x: torch.where(x > 0, x, 0.1 * x) * 2)
    x = torch.linspace(-1, 1, N, requires_grad=True)
    y = f(x)
    z = y.square()  # keeps y
    place = y.data_ptr()
    del y
    other = f(x.detach())
    assert other.data_ptr() != place
    (gradient,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(gradient, torch.where(x > 0, 8 * x, 0.08 * x).detach())


def test_pooled_results_behave_as_ordinary_tensors() -> None:
    f = scaled()
    x = torch.ones(4, N // 4).t().requires_grad_()
    y = f(x, torch.tensor(2.0))
    assert y.stride() == x.stride() and not y._is_view() and y.untyped_storage().nbytes() == memory_pool.SMALLEST
    y.mul_(2)  # in place, under autograd
    y.sum().backward()
    assert x.grad is not None and (x.grad == 4).all()
    assert torch.equal(pickle.loads(pickle.dumps(y.detach())), y)
    assert y.detach().clone().untyped_storage().resizable()
    with pytest.raises(RuntimeError, match="not resizable"):
        y.detach().untyped_storage().resize_(0)
    shared = y.detach()
    shared.share_memory_()  # moves it to shared memory
    assert shared.is_shared() and (shared == 6).all()


def test_pool_is_limited_and_evicts_the_oldest_first() -> None:
    many = [memory_pool.array(memory_pool.SMALLEST + k * (2 << 20)) for k in range(9)]
    many.reverse()  # so that the smallest is freed first
    while many:
        many.pop()
    sizes = [len(m) for m in memory_pool._waiting]
    assert sum(sizes) <= memory_pool.MOST and sizes == sorted(sizes) and sizes[-1] == memory_pool.SMALLEST + (16 << 20)
    too_large = memory_pool.array(memory_pool.MOST + 1)
    assert too_large.size == memory_pool.MOST + 1
    del too_large
    assert [len(m) for m in memory_pool._waiting] == sizes, "larger than all that may wait: given back at once"


def test_sizes_are_rounded_to_whole_huge_pages_for_reuse() -> None:
    made = memory_pool.array(memory_pool.SMALLEST + 5)
    place = made.ctypes.data
    assert made.size == memory_pool.SMALLEST + 5 and place % mmap.PAGESIZE == 0
    del made
    assert memory_pool.array(memory_pool.SMALLEST + (2 << 20)).ctypes.data == place


def test_torch_allocates_if_mmap_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x = scaled(), torch.ones(N)
    f(x, torch.tensor(2.0))

    def refuse(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    larger = torch.ones(N + (1 << 20))
    monkeypatch.setattr(memory_pool.mmap, "mmap", refuse)
    y = f(larger, torch.tensor(2.0))
    assert (y == 3).all() and y.untyped_storage().resizable()
    assert not memory_pool._waiting, "what waited was given back before torch was asked"


def test_threads_never_share_memory() -> None:
    f, x = scaled(), torch.ones(N)
    started = threading.Barrier(3)

    def work(k: int) -> bool:
        started.wait()
        return all(bool((f(x, torch.tensor(float(k))) == k + 1).all()) for _ in range(6))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(3)))


def test_results_of_several_partitions_use_the_pool() -> None:
    f = ogt.fuse(lambda x, y: (torch.exp(x) - 1, torch.exp(y) - 1))
    apart, _ = f(torch.zeros(N), torch.zeros(3))
    place = apart.data_ptr()
    del apart
    apart, small = f(torch.zeros(N), torch.zeros(3))
    assert apart.data_ptr() == place and (apart == 0).all() and small.shape == (3,)
