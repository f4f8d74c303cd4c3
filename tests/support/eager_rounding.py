"""The allowed distance of results from float64: that of eager torch, in any of the orders in which it adds.

A gradient of a scalar parameter is one long sum, which may nearly cancel. Its error in eager torch depends on the
number of threads that share the sums of convolutions and products: it varies by a factor of six in an EfficientNet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensors = Sequence[torch.Tensor]


def in_each_order(call: Callable[[], Tensors]) -> list[Tensors]:
    """The results of an eager call with all threads, at least two, and with one."""
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (max(threads, 2), 1):
            torch.set_num_threads(count)
            results.append(call())
    finally:
        torch.set_num_threads(threads)
    return results


def assert_as_exact(fused: Tensors, eager: Sequence[Tensors], exact: Tensors, *, least: float = 0.0) -> None:
    """In total at most twice as far from float64 as eager, no tensor farther than twice its worst; dtypes are equal.

    Args:
        eager: runs of `in_each_order`; the farthest of them counts.
        least: tensors whose norm is at most this part of the largest are skipped: their truth is 0.
    """
    eps = torch.finfo(torch.float32).eps
    own, theirs = [], []
    sizes = [truth.double().norm().item() for truth in exact]
    for f, size, truth, *runs in zip(fused, sizes, exact, *eager, strict=True):
        assert all(f.dtype == e.dtype for e in runs)
        if size > least * max(sizes):
            own.append((f.double() - truth).norm().item() / size)
            theirs.append(max((e.double() - truth).norm().item() / size for e in runs))
    assert sum(own) <= 2 * max(sum(theirs), len(theirs) * eps)
    assert max(own) <= 2 * max(*theirs, eps)
