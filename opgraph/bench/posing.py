"""CPU tensors that pose as GPU tensors: everything in a call except the driver runs, on a machine without a GPU.

This measures the host's cost of a call (`python -m opgraph.bench.posing SECONDS`), and serves tests. CuPy is replaced
by `StubCupy`, or by a module of the test.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opgraph.bench.timing import Call, in_turns, once

SIZE = 1024
#: Calls in one run: few, so that a busy machine interrupts few runs.
CALLS = 20
_DRIVER = 'extern "C" int cuLaunchKernel() { return 0; }\n'


class StubCupy(types.ModuleType):
    """The part of CuPy that the engine uses to launch kernels: one GPU, and functions that do nothing."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.ndarray = type("ndarray", (), {})
        error = type("CUDARuntimeError", (RuntimeError,), {})
        runtime = types.SimpleNamespace(
            getDeviceCount=lambda: 1, getDevice=lambda: 0, setDevice=lambda device: None, CUDARuntimeError=error,
            streamIsCapturing=lambda stream: False,
        )  # fmt: skip
        driver = types.SimpleNamespace(
            CUDADriverError=type("CUDADriverError", (RuntimeError,), {}), CU_FUNC_ATTRIBUTE_NUM_REGS=4,
            funcGetAttribute=lambda attribute, function: 0,
        )  # fmt: skip
        compiler = types.SimpleNamespace(CompileException=type("CompileException", (Exception,), {}))
        self.cuda = types.SimpleNamespace(
            runtime=runtime, driver=driver, compiler=compiler, function=types.SimpleNamespace()
        )

    def RawKernel(self, code: str, name: str, options: tuple[str, ...]) -> Any:  # noqa: N802 (as CuPy has it)
        """A kernel that does nothing."""

        class Function:
            ptr = 1

            def __call__(self, *_: object) -> None:
                pass

        return types.SimpleNamespace(kernel=Function())


@contextlib.contextmanager
def posing(driver: str) -> Iterator[None]:
    """Runs fused calls and captured models on CPU tensors as if on GPU 0, with the library at this path as driver."""
    import torch

    from opgraph.runtime import cuda, cuda_arrays, cuda_sequence
    from opgraph.runtime.device_array import RawStream
    from opgraph.runtime.providers import torch_cuda, torch_cuda_prepared, torch_internals
    from opgraph.torch.fused import op
    from opgraph.torch.graph import device_targets, program

    class Library(torch_cuda.TorchLibrary):
        def view(self, owner: Any) -> Any:
            found = super().view(owner)
            found.device = 0
            return found

        def empty(self, shape: tuple[int, ...], dtype: Any, device: int) -> tuple[Any, int]:
            made = torch.empty(shape, dtype=torch_cuda._TORCH[dtype])
            return made, made.data_ptr()

        def stream(self, device: int) -> Any:
            return RawStream(ptr=0)

    replaced = [
        (op, "device_of", lambda tensors: torch.device("cuda", 0)),
        (program, "target_of", lambda device: device_targets.CudaTarget(0)),
        (torch_internals, "empty_cuda", torch_internals.empty_cpu),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch_internals, "current_stream", lambda device: 0),
        (torch_internals, "current_gpu", cuda.current_device()[0]),
        (torch_cuda_prepared, "on_gpu", cuda.OnDevice),
        (torch_cuda, "TORCH", Library()),
        (cuda_sequence, "LIBCUDA", driver),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    cuda_arrays._torch_library.cache_clear()
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        cuda_arrays._torch_library.cache_clear()


def driver_of_nothing(folder: Path) -> str:
    """A driver whose launches do nothing, built in a folder; "" without a compiler."""
    from opgraph.runtime.cpu_compiler import find_compiler

    compiler = find_compiler()
    if compiler is None:
        return ""
    source, made = folder / "libcuda.cpp", folder / "libcuda.so"
    source.write_text(_DRIVER, encoding="utf-8")
    subprocess.run([*compiler.command, "-fPIC", "-shared", "-o", str(made), str(source)], check=True)
    return str(made)


class _Clock:
    def repeats(self, seconds: float) -> int:
        return CALLS

    def run(self, call: Call, repeats: int) -> float:
        return once(call, repeats)


def _ways() -> dict[str, Call]:
    import torch

    import opgraph as og
    import opgraph.torch as ogt

    t = torch.rand(SIZE)
    leaf, d_y = torch.rand(SIZE, requires_grad=True), torch.ones(SIZE)
    a = torch.ones((), requires_grad=True)
    gradient = torch.autograd.grad

    @ogt.fuse
    def swish(x: Any) -> Any:
        return x * torch.sigmoid(x)

    @ogt.fuse
    def swish_alpha(x: Any, a: Any) -> Any:
        return x * torch.sigmoid(a * x)

    g = og.parse(f"graph(x: f32[{SIZE}]) -> (y)\n  s = Sigmoid(x)\n  y = Multiply(x, s)")
    f = og.compile(g, device="cuda")
    return {
        "opgraph, f(x=x)": lambda: f(x=t),
        "@ogt.fuse x*sigmoid(x)": lambda: swish(t),
        "@ogt.fuse x*sigmoid(x), needs grad": lambda: swish(leaf),
        "@ogt.fuse x*sigmoid(x), forward and backward": lambda: gradient(swish(leaf), leaf, d_y),
        "@ogt.fuse x*sigmoid(a*x), needs grad": lambda: swish_alpha(leaf, a),
        "@ogt.fuse x*sigmoid(a*x), forward and backward": lambda: gradient(swish_alpha(leaf, a), (leaf, a), d_y),
    }


def measured(seconds: float) -> dict[str, float]:
    """Microseconds of each way, and of torch itself on the CPU; the median of many short runs in turns."""
    import torch

    silu = torch.nn.functional.silu
    leaf, d_y = torch.rand(SIZE, requires_grad=True), torch.ones(SIZE)
    a = torch.ones((), requires_grad=True)
    peers: dict[str, Call] = {
        "F.silu, on the CPU, needs grad": lambda: silu(leaf),
        "F.silu, on the CPU, forward and backward": lambda: torch.autograd.grad(silu(leaf), leaf, d_y),
        "eager x*sigmoid(a*x), on the CPU, forward and backward": lambda: torch.autograd.grad(
            leaf * torch.sigmoid(a * leaf), (leaf, a), d_y
        ),
    }
    sys.modules["cupy"] = StubCupy()
    with tempfile.TemporaryDirectory(prefix="opgraph-") as folder, posing(driver_of_nothing(Path(folder))):
        ways = {**_ways(), **peers}
        for call in ways.values():
            call(), call(), call()
        times = in_turns(ways, _Clock(), seconds)
    return {name: 1e6 * statistics.median(t for t in found if t is not None) for name, found in times.items()}


if __name__ == "__main__":
    print(json.dumps(measured(float(sys.argv[1]))))
