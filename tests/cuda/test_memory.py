"""Device memory that opgraph allocates: its uploads, its lifetime, and the GPU on which it is written."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
from cuda_calls import gated, moved, random
from emulator import FakeArray, FakeCupy, FakeStream

import opgraph as og
from opgraph.errors import DeviceError
from opgraph.ir import dtypes

POSITIONS = "graph(x: f32[?]) -> (y)\n  %0 = GenIndex(x, axis=0)\n  %1: f32[?] = TypeCast(%0)\n  y = Add(x, %1)"


def scaled(columns: int) -> og.Graph:
    """x * [0, 1, 2, ...]"""
    g = og.Graph()
    x = g.input("x", dtype="f32", shape=(None, columns))
    g.output(g.add_op("Multiply", x, g.constant("table", np.arange(columns, dtype=np.float32)), name="y"))
    return g


def summed() -> og.Graph:
    """The sum of 70,001 elements, with a workspace."""
    g = og.Graph()
    g.output(g.add_op("SumTo", g.input("x", "f32", (70_001,)), g.input("like", "f32", (1,)), name="s"))
    return g


def test_position_uploads_are_bounded_for_many_shapes(cupy: FakeCupy) -> None:
    """Each upload allocates from the driver and waits for the whole device."""
    functions = [
        og.compile(og.parse(text), device="cuda") for text in (POSITIONS, POSITIONS.replace("Add", "Subtract"))
    ]
    for size in range(1, 4000, 97):
        data = random((size,), "f32")
        for f, sign in zip(functions, (1, -1), strict=True):
            np.testing.assert_array_equal(f(x=moved(cupy, data)).host, data + sign * np.arange(size, dtype=np.float32))
    assert cupy.uploads == 3 and cupy.freed == []  # 1024, 2048 and 4096 positions, for both functions


def test_memory_of_a_collected_function_is_freed_by_the_next_upload(cupy: FakeCupy) -> None:
    """A collection may occur at any time, also while another thread captures a graph, which freeing would break."""
    f = og.compile(scaled(6), device="cuda")
    f(x=moved(cupy, random((3, 6), "f32")))
    del f
    gc.collect()
    assert cupy.uploads == 1 and cupy.freed == []
    og.compile(scaled(7), device="cuda")(x=moved(cupy, random((3, 7), "f32")))
    assert cupy.uploads == 2 and len(cupy.freed) == 1


@pytest.mark.parametrize("bound", [False, True], ids=["call", "bind"])
def test_constants_read_by_a_cuda_graph_outlive_the_function(cupy: FakeCupy, bound: bool) -> None:
    f, x, out = og.compile(scaled(6), device="cuda"), moved(cupy, random((3, 6), "f32")), cupy.empty((3, 6), "f4")
    call: Any = f.bind(x=x, out=out) if bound else partial(f, x=x, out=out)
    call()
    cupy.stream, cupy.capturing = FakeStream(7), {7}
    call()
    cupy.stream, cupy.capturing = FakeStream(0), set()
    del f, call
    gc.collect()
    og.compile(scaled(7), device="cuda")(x=moved(cupy, random((3, 7), "f32")))
    assert cupy.freed == []


def test_workspace_of_a_captured_call_is_not_reused(cupy: FakeCupy) -> None:
    """CuPy's pool has no support for captures (torch's allocator has)."""
    f = og.compile(summed(), device="cuda")
    x, like, out = (moved(cupy, random(s, "f32")) for s in ((70_001,), (1,), (1,)))
    made: list[weakref.ref[FakeArray]] = []
    real = cupy.empty

    def empty(shape: tuple[int, ...], dtype: Any) -> FakeArray:
        array = real(shape, dtype)
        made.append(weakref.ref(array))
        return array

    cupy.empty = empty  # type: ignore[method-assign]
    cupy.stream = FakeStream(7)
    f(x=x, like=like, out=out)
    cupy.capturing = {7}
    f(x=x, like=like, out=out)
    before, captured = made
    assert before() is None and captured() is not None


def test_upload_during_stream_capture_is_refused(cupy: FakeCupy) -> None:
    """CuPy itself refuses the copy, without a CUDA error: memory may be allocated in a capture of its streams."""
    f, x = og.compile(scaled(6), device="cuda"), moved(cupy, random((3, 6), "f32"))
    cupy.stream, cupy.capturing = FakeStream(7), {7}
    with pytest.raises(
        DeviceError, match=r"a constant of float32 \(6,\): .*\n.*\n  fix:   make the same call once before"
    ):
        f(x=x)


def test_empty_sums_are_written_on_their_own_gpu(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    f = og.compile(og.parse("graph(x: f32[?,4], a: f32[4]) -> (s)\n  s = SumTo(x, a)"), device="cuda:1")
    x, a, out = (FakeArray(np.ones(s, np.float32), device=1) for s in ((0, 4), (4,), (4,)))
    where: list[int] = []
    real = FakeArray.__setitem__
    monkeypatch.setattr(FakeArray, "__setitem__", lambda *args: (where.append(cupy.device), real(*args))[1])
    call = f.bind(x=x, a=a, out=out)
    for run in (call, lambda: f(x=x, a=a, out=out)):
        out.host[...] = 1
        run()
        assert (out.host == 0).all() and where == [1] and cupy.device == 0
        where.clear()


def test_defaults_are_uploaded_before_any_stream_reads_them(cupy: FakeCupy) -> None:
    g = og.Graph()
    x, a = g.input("x", "f32", (None,)), g.input("a", "f32", (3,))
    g.output(g.add_op("Multiply", x, a))
    g.defaults["a"] = np.arange(3, dtype=np.float32)
    before = cupy.waits
    f = og.compile(g, device="cuda")
    assert cupy.waits == before + 1
    np.testing.assert_array_equal(f(x=moved(cupy, np.ones(3, np.float32))).host, [0, 1, 2])


def test_pullback_zeros_are_written_on_the_device(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from the host is not allowed while a graph is captured."""
    text = "graph(x: f32[n], a: f32[1]) -> (y, z)\n  y = Add(x, a)\n  z = Add(a, a)"
    f = og.compile(og.parse(text), device="cuda", wrt=["x", "a"])
    assert "shape" in {s.role for s in f.saved_tensors()}
    x, a, d = (moved(cupy, random(s, "f32")) for s in ((9,), (1,), (9,)))
    from opgraph.runtime.cuda import CUPY

    monkeypatch.setattr(CUPY, "from_host", None)
    _, back = f.vjp(x=x, a=a)
    got = back({"y": d})
    np.testing.assert_array_equal(got["x"].host, d.host)
    assert cupy.uploads == 0
    np.testing.assert_allclose(got["a"].host, d.host.sum(dtype=np.float64), rtol=1e-6)


def test_shape_only_operand_is_passed_through_the_host(cupy: FakeCupy) -> None:
    text = "graph(x: f32[n,c], y: f32[n,k]) -> (z)\n  z = Concat(x, y, axis=1)"
    with pytest.warns(RuntimeWarning, match=r"1 op of this graph \(Concat\) left to the CPU"):
        f = og.compile(og.parse(text), device="cuda", wrt=["x", "y"])
    assert {s.role for s in f.saved_tensors()} == {"shape"}
    x, y, d = (random(s, "f32") for s in ((4, 3), (4, 2), (4, 5)))
    _, back = f.vjp(x=moved(cupy, x), y=moved(cupy, y))
    with pytest.warns(RuntimeWarning, match="ConcatBackward"):
        got = back(moved(cupy, d))
    np.testing.assert_array_equal(got["x"].host, d[:, :3])
    np.testing.assert_array_equal(got["y"].host, d[:, 3:])


def test_kernels_are_loaded_at_compile_time(cupy: FakeCupy) -> None:
    """CUDA loads code lazily: a kernel's first launch inside a capture would load it during the capture."""
    f = og.compile(gated("f32", (64,), ()), device="cuda")
    assert len(cupy.loaded) == len(f.kernels) == 1 and cupy.launches == []


def test_foreign_bf16_arrays_keep_their_dtype(cupy: FakeCupy) -> None:
    """Example: torch's tensors. `__cuda_array_interface__` gives bf16 as two untyped bytes, DLPack by its name."""
    bf16 = dtypes.get("bf16").numpy

    class Tensor:
        def __init__(self, array: np.ndarray) -> None:
            self.host = array
            self.__cuda_array_interface__ = {"typestr": "<V2"}

        def __dlpack__(self, **_: object) -> None:
            raise AssertionError("CuPy's from_dlpack asks for it")

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    x, a = random((64,), "bf16"), random((), "bf16")
    got = og.compile(gated("bf16", (64,), ()), device="cuda")(x=Tensor(x), a=moved(cupy, a))
    assert got.dtype == bf16
    np.testing.assert_array_equal(got.host, og.compile(gated("bf16", (64,), ()))(x=x, a=a))
