"""Memory, streams, threads and CUDA graphs on a real GPU."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from agreement import agree
from cuda_calls import gated, random
from layouts import CASES, Case

import opgraph as og
from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes

# -- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_equals_the_cpu(memory: Any, case: Case, dtype: str) -> None:
    x, a = random(case.x, dtype), random(case.a, dtype, 1)
    host = case.views(x, a)
    graph = gated(dtype, host[0].shape, host[1].shape)
    gx, ga = case.views(memory.put(x), memory.put(a))
    got = og.compile(graph, device="cuda")(x=gx, a=ga)
    assert type(got) is type(gx)
    assert agree(memory.get(got), og.compile(graph)(x=host[0], a=host[1]))


@pytest.mark.parametrize("dtype", ["s8", "u8", "boolean", "s32", "s64"])
@pytest.mark.parametrize("size", [1, 15, 16, 4096, 4099, 100_003])
def test_narrow_dtypes_in_packs_are_right(memory: Any, dtype: str, size: int) -> None:
    """16 one-byte elements at once: compilers have had bugs there."""
    g = og.Graph()
    x, y = g.input("x", dtype=dtype, shape=(None,)), g.input("y", dtype=dtype, shape=(None,))
    g.output(g.add_op("Equal", x, y))
    rng = np.random.default_rng(size)
    a, b = (rng.integers(0, 2, size).astype(dtypes.get(dtype).numpy) for _ in range(2))
    got = og.compile(g, device="cuda")(x=memory.put(a), y=memory.put(b))
    np.testing.assert_array_equal(memory.get(got), a == b)


def test_outputs_are_written_in_place_and_nothing_else(memory: Any) -> None:
    x, a = random((40, 33), "f32"), random((33,), "f32", 1)
    graph = gated("f32", (40, 33), (33,))
    f, expected = og.compile(graph, device="cuda"), og.compile(graph)(x=x, a=a)
    for rows, columns in ((slice(0, 40), slice(0, 66, 2)), (slice(1, 80, 2), slice(5, 38))):
        around = memory.put(np.full((80, 66), 7.0, np.float32))
        out = around[rows, columns]
        assert f(x=memory.put(x), a=memory.put(a), out=out) is out
        wanted = np.full((80, 66), 7.0, np.float32)
        wanted[rows, columns] = expected
        assert agree(memory.get(around), wanted)


def test_in_place_call_equals_the_cpu(memory: Any) -> None:
    x, a = random((100_001,), "bf16"), random((), "bf16", 1)
    graph = gated("bf16", (None,), ())
    given = memory.put(x)
    og.compile(graph, device="cuda")(x=given, a=memory.put(a), out=given)
    assert agree(memory.get(given), og.compile(graph)(x=x, a=a))


def test_a_constant_operand_and_an_output_that_is_an_input(memory: Any) -> None:
    g = og.Graph()
    x = g.input("x", dtype="f32", shape=(None, 6))
    table = g.constant("table", np.arange(6, dtype=np.float32))
    g.output(g.add_op("Multiply", x, table, name="y"))
    g.output(x)
    data = random((50, 6), "f32")
    given = memory.put(data)
    got = og.compile(g, device="cuda")(x=given)
    assert got["x"] is given
    np.testing.assert_array_equal(memory.get(got["y"]), data * np.arange(6, dtype=np.float32))


# -- streams, threads, graphs ----------------------------------------------------------------------------------------


def slow_work(torch: Any, n: int = 4096) -> Any:
    """A computation that keeps a stream busy for milliseconds."""
    m = torch.randn(n, n, device="cuda")
    for _ in range(6):
        m = m @ m / 64
    return m


def test_torch_tensors_on_a_side_stream(torch: Any) -> None:
    """The kernel runs after its stream's earlier work; on any other stream it would read too early."""
    f = og.compile(gated("f32", (None,), ()), device="cuda")
    x, a = torch.zeros(1 << 20, device="cuda"), torch.ones((), device="cuda")
    f(x=x, a=a)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.fill_(slow_work(torch).isnan().sum() * 0 + 3.0)
        y = f(x=x, a=a)
        total = y.sum()
    side.synchronize()
    expected = 3.0 / (1 + np.exp(-3.0)) + 1
    assert abs(total.item() / (1 << 20) - expected) < 1e-4


def test_cupy_arrays_on_a_side_stream(cupy: Any) -> None:
    f = og.compile(gated("f32", (None,), ()), device="cuda")
    with cupy.cuda.Stream(non_blocking=True) as side:
        x = cupy.full(1 << 22, 3.0, "f4")
        y = f(x=x, a=cupy.ones((), "f4"))
        side.synchronize()
    np.testing.assert_allclose(cupy.asnumpy(y), 3.0 / (1 + np.exp(-3.0)) + 1, rtol=1e-6)


def test_partition_executes_on_the_given_stream(torch: Any) -> None:
    g = og.Graph(engine="cuda")
    x = g.input("x", dtype="f32", shape=(1 << 20,))
    y = g.add_op("Swish", x, name="y")
    g.finalize()
    engine, side = og.Engine("cuda", 0), torch.cuda.Stream()
    compiled = g.get_partitions()[0].compile([x], [y], engine)
    given, out = torch.zeros(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    with torch.cuda.stream(side):
        given.fill_(slow_work(torch).isnan().sum() * 0 + 2.0)
    compiled.execute(og.Stream(engine, side), {x.id: given}, {y.id: out})
    og.Stream(engine, side).wait()
    np.testing.assert_allclose(out.cpu().numpy(), 2.0 / (1 + np.exp(-2.0)), rtol=1e-6)


def test_two_threads_call_one_executable(memory: Any) -> None:
    graph = gated("f32", (None,), ())
    f, wrong = og.compile(graph, device="cuda"), []

    def work(seed: int) -> None:
        for size in range(1000, 1200):
            x, a = random((size,), "f32", seed), random((), "f32", seed + 1)
            if not agree(memory.get(f(x=memory.put(x), a=memory.put(a))), og.compile(graph)(x=x, a=a)):
                wrong.append((seed, size))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_bound_call_is_captured_in_a_cuda_graph(torch: Any) -> None:
    f = og.compile(gated("bf16", (None, None), (None,)), device="cuda")
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    a, out = torch.randn(512, device="cuda", dtype=torch.bfloat16), torch.empty_like(x)
    call = f.bind(x=x, a=a, out=out)
    call()
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        call()
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(64, 512))
        out.zero_()
        recorded.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, f(x=x, a=a))


def test_a_plain_call_is_captured_in_a_cuda_graph(torch: Any) -> None:
    """Its result comes from the graph's own pool in torch's allocator."""
    f = og.compile(gated("f32", (None,), ()), device="cuda")
    x, a = torch.randn(10_000, device="cuda"), torch.ones((), device="cuda")
    f(x=x, a=a)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        y = f(x=x, a=a)
    x.normal_()
    recorded.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, f(x=x, a=a))


def test_several_kernels_bound_together_are_captured_in_a_cuda_graph(torch: Any) -> None:
    """A whole executable, including the values between its kernels."""
    g = og.Graph()
    x, like = g.input("x", "f32", (300, 40)), g.input("like", "f32", (40,))
    g.output(g.add_op("Multiply", x, g.add_op("SumTo", g.add_op("Exp", x), like), name="y"))
    f = og.compile(g, device="cuda")
    assert len(f.partitions) > 1
    given, out = torch.randn(300, 40, device="cuda"), torch.empty(300, 40, device="cuda")
    call = f.bind(x=given, like=torch.zeros(40, device="cuda"), out=out)
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        call()
    assert torch.cuda.memory_allocated() <= before  # capturing collects garbage
    given.normal_()
    recorded.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, given * given.exp().sum(0), rtol=1e-5, atol=1e-5)


def test_torch_calls_allocate_nothing_from_cupys_pool(cupy: Any, torch: Any) -> None:
    g = og.Graph()
    x = g.input("x", dtype="f32", shape=(None, 1000))
    g.output(g.add_op("Multiply", g.add_op("Sigmoid", x), g.constant("c", np.arange(1000, dtype=np.float32))))
    pool = cupy.get_default_memory_pool()
    before = pool.total_bytes()
    f = og.compile(g, device="cuda")
    for rows in (10, 10_000, 33):
        f(x=torch.randn(rows, 1000, device="cuda"))
    assert pool.total_bytes() == before


# -- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_more_than_2_31_elements(any_memory: Any, cupy: Any) -> None:
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 12 << 30 or any_memory.name != "torch":
        pytest.skip("needs torch and 12 GiB of free GPU memory")
    torch, n = any_memory.module, 2**31 + 1001
    g = og.Graph()
    x = g.input("x", dtype="u8", shape=(None,))
    g.output(g.add_op("Add", x, 1))
    given = torch.arange(251, dtype=torch.uint8, device="cuda").repeat(n // 251 + 1)[:n]
    got = og.compile(g, device="cuda")(x=given)
    assert got.shape == (n,) and torch.equal(got, given + 1)


@pytest.mark.slow
def test_more_than_2_31_elements_in_rows(any_memory: Any, cupy: Any) -> None:
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 12 << 30 or any_memory.name != "torch":
        pytest.skip("needs torch and 12 GiB of free GPU memory")
    torch, rows, columns = any_memory.module, 2**16 + 3, 2**15 + 16
    g = og.Graph()
    x, b = g.input("x", dtype="u8", shape=(None, None)), g.input("b", dtype="u8", shape=(None,))
    g.output(g.add_op("Add", x, b))
    given = torch.arange(251, dtype=torch.uint8, device="cuda").repeat(rows * columns // 251 + 1)[: rows * columns]
    given = given.view(rows, columns)
    bias = torch.arange(columns, device="cuda").to(torch.uint8)
    got = og.compile(g, device="cuda")(x=given, b=bias)
    assert torch.equal(got, given + bias)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_arrays_that_are_not_on_the_gpu_are_refused(memory: Any) -> None:
    f = og.compile(gated("f32", (None,), ()), device="cuda")
    a = memory.put(random((), "f32"))
    with pytest.raises(InvalidArguments, match='where: input "x"\n  fix: '):
        f(x=np.zeros(3, np.float32), a=a)
    if memory.name == "torch":
        with pytest.raises(InvalidArguments, match='on the CPU, the kernel on cuda:0\n  where: input "x"'):
            f(x=memory.module.zeros(3), a=a)


def test_arrays_on_the_gpu_are_refused_by_the_cpu_engine(memory: Any) -> None:
    f = og.compile(gated("f32", (None,), ()))
    with pytest.raises(InvalidArguments, match=r"\n  where: .*\n  fix: "):
        f(x=memory.put(random((3,), "f32")), a=memory.put(random((), "f32")))


def test_cuda_array_interface_and_dlpack_objects_are_read_in_place(cupy: Any) -> None:
    data = random((1000,), "f32")

    class Interface:
        def __init__(self, array: Any) -> None:
            self.array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    class Capsule:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    graph = gated("f32", (None,), ())
    f, a = og.compile(graph, device="cuda"), random((), "f32")
    expected = og.compile(graph)(x=data, a=a)
    for wrap in (Interface, Capsule):
        got = f(x=wrap(cupy.asarray(data)), a=cupy.asarray(a))
        assert agree(cupy.asnumpy(got), expected)
