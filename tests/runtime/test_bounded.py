"""Values cached from call to call are bounded in number, and the oldest is removed first."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.runtime import cpu_kernel
from opgraph.runtime.bounded_dict import Bounded


def test_oldest_entry_is_evicted_and_updates_evict_nothing() -> None:
    kept: Bounded[str, int] = Bounded(3)
    for number, key in enumerate("abcbd"):
        kept[key] = number
    assert list(kept.items()) == [("b", 3), ("c", 2), ("d", 4)]
    assert copy.deepcopy(kept) == {} == pickle.loads(pickle.dumps(kept)) and copy.copy(kept).bound == 3


def test_threads_may_add_entries_concurrently() -> None:
    kept: Bounded[int, int] = Bounded(8)
    failed: list[BaseException] = []

    def add(first: int) -> None:
        try:
            for key in range(first, 20000, 4):
                kept[key] = key
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=add, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and 8 <= len(kept) <= 8 + len(threads)


def test_extra_shape_evicts_only_the_oldest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernel, "MAX_PLANS", 3)
    f = og.compile(og.parse("graph(x: f32[?]) -> (y)\n  y = Square(x)"))
    plans: dict[Any, Any] = f._steps[0].run._plans
    found = []
    for n in (1, 2, 3, 4, 1):
        assert f(x=np.full(n, 3, np.float32)).tolist() == [9] * n
        found.append(list(plans.values()))
    assert [len(p) for p in found] == [1, 2, 3, 3, 3]
    assert found[3][:2] == found[2][1:] and found[4][:2] == found[3][1:]


def test_extra_shape_evicts_the_oldest_graph_of_a_fused_function(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import opgraph.torch as ogt
    from opgraph.torch.fused import op
    from opgraph.torch.tracing import plan_builder, trace

    for module, name in (op, "MAX_CALLS"), (plan_builder, "MOST_SHAPES"), (trace, "MOST_SHAPES"):
        monkeypatch.setattr(module, name, 3)
    square = ogt.fuse(lambda x: x * x + 1)
    for n in (1, 2, 3, 4, 2):
        assert square(torch.full((n, n), 3.0)).tolist() == [[10.0] * n] * n
    (plan,) = square.plans
    assert [shapes[0][0] for shapes in plan.graphs] == [2, 3, 4]
    assert {len(traced.op._calls) for traced in plan.graphs.values()} <= {1, 2, 3}
