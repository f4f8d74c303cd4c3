"""The cost of a call besides its kernels, in Python function calls, because times vary from day to day."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import opgraph as og


def python_calls(call: Callable[[], Any]) -> list[str]:
    """The Python functions that a call runs, itself included, after everything has been prepared."""
    call()
    call()
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names


@pytest.fixture(scope="module")
def swish() -> og.Executable:
    return og.compile(og.parse("graph(x: f32[?]) -> (y)\n  s = Sigmoid(x)\n  y = Multiply(x, s)"))


def test_bound_call_only_launches(swish: og.Executable) -> None:
    x, out = np.ones(1000, np.float32), np.empty(1000, np.float32)
    assert python_calls(swish.bind(x=x, out=out)) == ["call"]


def test_large_bound_call_only_adds_a_thread_lookup(swish: og.Executable) -> None:
    x, out = np.ones(1 << 20, np.float32), np.empty(1 << 20, np.float32)
    assert python_calls(swish.bind(x=x, out=out)) == ["call", "launch", "team"]


def test_bound_call_of_many_partitions_runs_a_prepared_list() -> None:
    g = og.Graph()
    for k in range(8):  # they share no input, so each is a kernel
        g.add_op("Sigmoid", g.input(f"x{k}", shape=(None,)), name=f"y{k}")
    f = og.compile(g)
    assert len(f.partitions) == 8
    feeds = {f"x{k}": np.ones(1000 + k, np.float32) for k in range(8)}
    out = {f"y{k}": np.empty(1000 + k, np.float32) for k in range(8)}
    assert python_calls(f.bind(feeds, out=out)) == ["call", "run"]
    assert len(python_calls(lambda: f(feeds))) <= 48


def test_an_unbound_call_validates_and_stays_under_its_budget(swish: og.Executable) -> None:
    x, out = np.ones(1000, np.float32), np.empty(1000, np.float32)
    assert len(python_calls(lambda: swish(x=x))) <= 12
    assert len(python_calls(lambda: swish(x=x, out=out))) <= 24  # four of them check that `out` overlaps no input
