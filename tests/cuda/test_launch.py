"""The path from a bound call to the driver, and errors where a GPU or its memory is missing."""

from __future__ import annotations

import os
import sys
import traceback
import types
from typing import Any

import numpy as np
import pytest
from cuda_calls import gated, moved, random
from emulator import CUDADriverError, CUDARuntimeError, FakeArray, FakeCupy

import opgraph as og
from opgraph.errors import DeviceError


def python_calls(call: Any) -> list[str]:
    """Names of the Python functions that a call enters, except those of the stand-in for CuPy."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and not frame.f_code.co_filename.endswith(("emulator.py", "ctypes/__init__.py")):
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def test_bound_call_enters_three_functions_and_allocates_nothing(cupy: FakeCupy) -> None:
    """They are the call, the launch, and the library's function for the current stream; then comes the driver."""
    f = og.compile(gated("f32", (None,), ()), device="cuda")
    x, a = moved(cupy, random((512,), "f32")), moved(cupy, random((), "f32"))
    call = f.bind(x=x, a=a, out=cupy.empty((512,), "f4"))
    call()
    before = cupy.allocated
    assert python_calls(call) == ["call", "launch", "stream"]
    assert cupy.allocated == before


def test_bound_call_on_another_gpu_restores_the_current_device(cupy: FakeCupy) -> None:
    f = og.compile(gated("f32", (None,), ()), device="cuda:1")
    x, a, out = (FakeArray(random(s, "f32"), device=1) for s in ((9,), (), (9,)))
    switched: list[int] = []
    real = cupy.cuda.runtime.setDevice
    cupy.cuda.runtime.setDevice = lambda device: (switched.append(device), real(device))
    call = f.bind(x=x, a=a, out=out)
    switched.clear()
    call()
    assert switched == [1, 0] and cupy.device == 0


def test_sums_are_bound_with_their_workspace(cupy: FakeCupy) -> None:
    g = og.Graph()
    x, like = g.input("x", "f32", (300, 40)), g.input("like", "f32", (40,))
    g.output(g.add_op("SumTo", g.add_op("Multiply", x, x), like, name="s"))
    data, out = random((300, 40), "f32"), cupy.empty((40,), "f4")
    call = og.compile(g, device="cuda").bind(x=moved(cupy, data), like=cupy.empty((40,), "f4"), out=out)
    before = cupy.allocated
    for _ in range(2):
        out.host[...] = 0
        call()
        np.testing.assert_allclose(out.host, (data.astype(np.float64) ** 2).sum(0), rtol=1e-5)
    assert cupy.allocated == before


def test_bound_kernels_allocate_intermediates_once(cupy: FakeCupy) -> None:
    g = og.Graph()
    x, like = g.input("x", "f32", (300, 40)), g.input("like", "f32", (40,))
    g.output(g.add_op("Multiply", x, g.add_op("SumTo", g.add_op("Exp", x), like), name="y"))
    f = og.compile(g, device="cuda")
    assert len(f.partitions) > 1
    given, out = moved(cupy, random((300, 40), "f32")), cupy.empty((300, 40), "f4")
    call = f.bind(x=given, like=cupy.empty((40,), "f4"), out=out)
    before = cupy.allocated
    for seed in (1, 2):
        given.host[...] = random((300, 40), "f32", seed)
        assert call() is out
        wide = given.host.astype(np.float64)
        np.testing.assert_allclose(out.host, wide * np.exp(wide).sum(0), rtol=1e-5)
    assert cupy.allocated == before
    assert set(python_calls(call)) == {"call", "launch", "stream"}


# -- failures ----------------------------------------------------------------------------------------------------------


def test_forked_process_gets_a_clear_error(cupy: FakeCupy) -> None:
    """A real fork. CUDA itself would fail in the child with an error that names no cause, or hang."""
    f = og.compile(gated("f32", (None,), ()), device="cuda")
    x, a, out = moved(cupy, random((9,), "f32")), moved(cupy, random((), "f32")), cupy.empty((9,), "f4")
    bound = f.bind(x=x, a=a, out=out)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        try:
            for call in (lambda: f(x=x, a=a), bound, lambda: og.Engine("cuda")):
                try:
                    call()
                except DeviceError as error:
                    told.append(str(error))
            os.write(writing, "\0".join(told).encode())
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read().split("\0")
    os.waitpid(child, 0)
    assert len(told) == 3
    for text in told:
        assert text.startswith("this process was forked off") and "\n  where: engine" in text and "'spawn'" in text
    f(x=x, a=a)  # the parent still works


def test_out_of_memory_error_names_value_and_size(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    f = og.compile(gated("f32", (None,), ()), device="cuda")
    x, a = moved(cupy, random((1024,), "f32")), moved(cupy, random((), "f32"))
    real = cupy.empty

    def full(shape: tuple[int, ...], dtype: Any) -> FakeArray:
        raise MemoryError("Out of memory allocating 4096 bytes")

    cupy.cuda.runtime.memGetInfo = lambda: (2**29, 2**34)
    monkeypatch.setattr(cupy, "empty", full)
    with pytest.raises(
        DeviceError,
        match=r"no memory for a result of float32 \(1024,\): it takes 0.00 GiB, 0.50 of 16.00 GiB are free\n  where: ",
    ):
        f(x=x, a=a)
    monkeypatch.setattr(cupy, "empty", real)
    assert f(x=x, a=a).shape == (1024,)  # the failed call left no state


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (2, r"the GPU has no memory for a constant of float32 \(6,\): it takes .* GiB are free\n  .*\n  fix:   free"),
        (
            900,
            r"CUDA refused a constant of float32 \(6,\): told\n  .*\n  fix:   make the same call once before the cap",
        ),
        (700, r"CUDA refused a constant of float32 \(6,\): told\n  .*\n  fix:   start a new process"),
        (999, r"CUDA refused a constant of float32 \(6,\): told\n  .*\n  fix:   check `nvidia-smi`"),
    ],
    ids=["memory", "capture", "fault", "unknown"],
)
def test_failed_constant_upload_reports_its_cause(cupy: FakeCupy, status: int, text: str) -> None:
    g = og.Graph()
    g.output(g.add_op("Multiply", g.input("x", "f32", (6,)), g.constant("c", np.arange(6, dtype=np.float32))))
    f = og.compile(g, device="cuda")

    def refuse(size: int) -> Any:
        raise CUDARuntimeError(status, "told")

    cupy.cuda.runtime.memGetInfo = lambda: (2**29, 2**34)
    cupy.cuda.Memory = refuse
    with pytest.raises(DeviceError, match=text):
        f(x=moved(cupy, random((6,), "f32")))


def test_kernel_load_failure_after_a_fault_names_the_cuda_error(cupy: FakeCupy) -> None:
    def refuse(attribute: int, function: int) -> int:
        raise CUDADriverError(700, "CUDA_ERROR_ILLEGAL_ADDRESS")

    cupy.cuda.driver.funcGetAttribute = refuse
    with pytest.raises(
        DeviceError, match=r"CUDA refused kernel og_\w+: CUDA_ERROR_ILLEGAL_ADDRESS\n  .*\n  fix:   start a new process"
    ):
        og.compile(gated("f32", (4,), ()), device="cuda")


def test_gpu_with_an_earlier_fault_is_not_reported_missing(cupy: FakeCupy) -> None:
    def refuse() -> int:
        raise CUDARuntimeError(700, "cudaErrorIllegalAddress")

    cupy.cuda.runtime.getDeviceCount = refuse
    with pytest.raises(DeviceError, match=r"CUDA refused the GPU: cudaErrorIllegalAddress\n  .*\n  fix:   start a new"):
        og.Engine("cuda")


def test_too_old_gpu_is_reported_with_its_compute_capability(cupy: FakeCupy) -> None:
    """bf16 conversions use instructions of compute capability 8.0."""

    def refuse(code: str, name: str, options: tuple[str, ...]) -> object:
        raise cupy.cuda.compiler.CompileException("name.cu(7): error: feature requires .target sm_80 or higher")

    cupy.RawKernel = refuse  # type: ignore[method-assign]
    cupy.cuda.Device = lambda index: types.SimpleNamespace(compute_capability="75")
    with pytest.raises(
        DeviceError, match=r"GPU 0 has compute capability 7\.5, and kernel og_\w+ needs 8\.0\n  .*\n  fix:   use a GPU"
    ):
        og.compile(gated("bf16", (4,), ()), device="cuda")


def test_missing_or_old_driver_raises_device_error() -> None:
    """Uses CuPy itself on a machine without a GPU, to check what such a user sees."""
    real = pytest.importorskip("cupy", exc_type=ImportError)
    try:
        if real.cuda.runtime.getDeviceCount():
            pytest.skip("there is a GPU")
    except real.cuda.runtime.CUDARuntimeError:
        pass
    for name in [n for n in sys.modules if n == "opgraph.runtime.cuda"]:
        del sys.modules[name]
    with pytest.raises(DeviceError, match=r"no usable GPU: .*\n  where: engine \"cuda\"\n  fix:   check `nvidia-smi`"):
        og.Engine("cuda")


def test_exception_in_a_launch_restores_the_current_device(cupy: FakeCupy) -> None:
    f = og.compile(gated("f32", (None,), ()), device="cuda:1")
    x, a, out = (FakeArray(random(s, "f32"), device=1) for s in ((9,), (), (9,)))
    call = f.bind(x=x, a=a, out=out)

    def broken(device: int) -> Any:
        raise RuntimeError("the driver is gone")

    cupy.cuda.get_current_stream = broken
    for run in (call, lambda: f(x=x, a=a)):
        with pytest.raises(RuntimeError, match="the driver is gone"):
            run()
        assert cupy.device == 0


@pytest.mark.parametrize("handle", [7])
def test_threads_launch_on_their_own_streams(cupy: FakeCupy, handle: int) -> None:
    """Launches share no state: two threads, each with its stream, use one executable."""
    import threading

    from emulator import FakeStream

    f = og.compile(gated("f32", (None,), ()), device="cuda")
    x, a = moved(cupy, random((64,), "f32")), moved(cupy, random((), "f32"))
    f(x=x, a=a)
    own = threading.local()
    cupy.cuda.get_current_stream = lambda device: FakeStream(own.address)
    seen: dict[int, list[int]] = {}

    def work(address: int) -> None:
        own.address = address
        call = f.bind(x=x, a=a, out=cupy.empty((64,), "f4"))
        for _ in range(20):
            call()
            f(x=x, a=a)
        seen[address] = [s for _, _, s in list(cupy.launches) if s == address]

    threads = [threading.Thread(target=work, args=(n,)) for n in (handle, handle + 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: len(v) for n, v in seen.items()} == {handle: 40, handle + 4: 40}
