"""Failures on a real GPU: no memory, a kernel that does not compile, no device, a forked process, many threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import DeviceError


def swish(size: int | None = None, dtype: str = "f32") -> og.Graph:
    g = og.Graph()
    x = g.input("x", dtype, (size,))
    g.output(g.add_op("Swish", x, name="y"))
    return g


def test_torch_out_of_memory_error_leaks_nothing(torch: Any) -> None:
    """torch's own exception, which programs catch, with a note from opgraph; no memory is leaked."""
    f = og.compile(swish(), device="cuda")
    small = torch.randn(1000, device="cuda")
    f(x=small)
    free, _ = torch.cuda.mem_get_info()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    one = torch.zeros(1, device="cuda")
    vast = one.expand(free // 4 * 8)  # it has no memory itself; the result needs eight times the free memory
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        f(x=vast)
    assert any("opgraph: for a result of float32" in note and "GiB" in note for note in caught.value.__notes__)
    del caught, vast, one
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    torch.testing.assert_close(f(x=small), torch.nn.functional.silu(small))


def test_cupy_out_of_memory_error_leaks_nothing(cupy: Any) -> None:
    f = og.compile(swish(), device="cuda")
    small = cupy.ones(1000, "f4")
    f(x=small)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    used = pool.used_bytes()
    free, _ = cupy.cuda.runtime.memGetInfo()
    vast = cupy.broadcast_to(cupy.ones((), "f4"), (free // 4 * 8,))
    with pytest.raises(DeviceError, match=r"no memory for a result of float32 .* GiB are free\n  where: .*\n  fix: "):
        f(x=vast)
    del vast
    gc.collect()
    assert pool.used_bytes() <= used + 1024
    assert f(x=small).shape == (1000,)


def test_kernel_compile_error_shows_log_line_and_op(any_memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC's real log."""
    from opgraph.runtime import cuda_sources

    real = cuda_sources.cuda_source

    def broken(schedule: Any) -> Any:
        source = real(schedule)
        return replace(
            source,
            entry=source.entry + "_broken",
            code=source.code.replace("og::swish(", "og::swoosh(").replace(source.entry, source.entry + "_broken"),
        )

    monkeypatch.setattr(cuda_sources, "cuda_source", broken)
    with pytest.raises(DeviceError) as caught:
        og.compile(swish(1003), device="cuda")
    text = str(caught.value)
    assert "swoosh" in text and "// Swish #0" in text
    assert '\n  where: Swish "y"' in text or "\n  where: Swish" in text


def run(code: str, **environment: str) -> str:
    """The output of a new Python process."""
    # Python 3.12 warns of forking a process that has threads, as CUDA's are: this is tested here.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    return done.stdout + done.stderr


def test_missing_device_error_names_nvidia_smi(cupy: Any) -> None:
    """The real driver, set to show no GPU."""
    told = run("import opgraph as og; og.Engine('cuda')", CUDA_VISIBLE_DEVICES="")
    assert "there is no usable GPU" in told and "check `nvidia-smi`" in told


FORK = """
import os, numpy as np, cupy, opgraph as og
g = og.Graph()
x = g.input("x", "f32", (None,))
g.output(g.add_op("Swish", x))
f = og.compile(g, device="cuda")
f(x=cupy.ones(10, "f4"))
given = cupy.ones(10, "f4")
child = os.fork()
if child == 0:
    try:
        f(x=given)
    except og.errors.DeviceError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(float(f(x=given).sum()), flush=True)
"""


def test_forked_process_gets_an_error_and_its_parent_continues(cupy: Any) -> None:
    told = run(FORK)
    assert "this process was forked off" in told and told.strip().splitlines()[-1].startswith("7.31")


EARLY = """
import os, cupy, opgraph as og
g = og.Graph()
x = g.input("x", "f32", (None,))
g.output(g.add_op("Swish", x))
child = os.fork()
if child == 0:
    f = og.compile(g, device="cuda")
    print("child", float(f(x=cupy.ones(10, "f4")).sum()), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_process_forked_before_the_gpu_was_used_may_use_it(cupy: Any) -> None:
    told = run(EARLY)
    assert "child 7.31" in told, told


LOST = """
import sys, cupy, torch
sys.path.insert(0, {folder!r})
import as_they_come
from opgraph.bench.case import require_gpu_still
from opgraph.errors import DeviceError
torch.zeros(1, device="cuda")
require_gpu_still("before")
assert not as_they_come.gpu_is_lost()
cupy.RawKernel('extern "C" __global__ void f(int* p) {{ p[1LL << 40] = 1; }}', "f")((1,), (1,), (cupy.zeros(1, "i4"),))
try:
    require_gpu_still("swish, bf16")
except DeviceError as error:
    print(error)
print("lost", as_they_come.gpu_is_lost())
"""


def test_benchmark_and_test_worker_detect_a_lost_gpu(torch: Any) -> None:
    """After an illegal access all CUDA calls of the process fail."""
    told = run(LOST.format(folder=os.path.dirname(__file__)))
    assert "the GPU is lost to this process" in told and "where: swish, bf16" in told and "lost True" in told, told


def test_threads_call_one_executable_at_once(any_memory: Any) -> None:
    """With several partitions and a workspace of sums: calls share no state."""
    g = og.Graph()
    x, like = g.input("x", "f32", (None, 64)), g.input("like", "f32", (64,))
    y = g.add_op("Swish", x, name="y")
    g.output(y, g.add_op("SumTo", y, like, name="s"))
    f, wrong = og.compile(g, device="cuda"), []
    zero = any_memory.put(np.zeros(64, np.float32))

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            data = rng.normal(size=(int(rng.integers(1, 500)), 64)).astype(np.float32)
            got = f(x=any_memory.put(data), like=zero)
            wide = data.astype(np.float64)
            expected = (wide / (1 + np.exp(-wide))).sum(0)
            if not np.allclose(any_memory.get(got["s"]), expected, rtol=1e-4, atol=1e-4):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_empty_sums_on_another_gpu_are_zero(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    f = og.compile(og.parse("graph(x: f32[?,4], a: f32[4]) -> (s)\n  s = SumTo(x, a)"), device="cuda:1")
    with cupy.cuda.Device(1):
        x, a, out = cupy.ones((0, 4), "f4"), cupy.ones(4, "f4"), cupy.ones(4, "f4")
    f.bind(x=x, a=a, out=out)()
    assert cupy.asnumpy(out).tolist() == [0, 0, 0, 0] and cupy.cuda.runtime.getDevice() == 0


def test_call_on_another_gpu_restores_the_current_one(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    f = og.compile(swish(), device="cuda:1")
    with cupy.cuda.Device(1):
        given = cupy.ones(100, "f4")
    got = f(x=given)
    assert got.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
