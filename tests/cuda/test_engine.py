"""The CUDA engine without a GPU: kernels run on the host (tests/support/emulator.py), with the CPU engine's bits."""

from __future__ import annotations

import ctypes
import sys
import types

import numpy as np
import pytest
from agreement import agree, as_on_a_gpu
from cuda_calls import gated, moved, random
from emulator import FakeArray, FakeCupy, FakeStream, _argument
from layouts import CASES, Case

import opgraph as og
from opgraph.errors import DeviceError, InvalidArguments, InvalidDataType, InvalidShape
from opgraph.ir import dtypes
from opgraph.runtime import processor
from opgraph.runtime.partition_cache import CACHE, DEFAULT_CAPACITY


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_agrees_with_the_cpu_engine(cupy: FakeCupy, case: Case, dtype: str) -> None:
    x, a = random(case.x, dtype), random(case.a, dtype, 1)
    host = case.views(x, a)
    expected = og.compile(gated(dtype, host[0].shape, host[1].shape))(x=host[0], a=host[1])
    given = case.views(moved(cupy, x), moved(cupy, a))
    f = og.compile(gated(dtype, host[0].shape, host[1].shape), device="cuda")
    got = f(x=given[0], a=given[1])
    assert isinstance(got, FakeArray) and got.shape == expected.shape
    assert agree(got.host, expected)
    assert len(cupy.launches) == (expected.size > 0)


def test_table_functions_equal_cpu_bits_without_tables(cupy: FakeCupy) -> None:
    """tests/gpu compares them in the same way."""
    text = "graph(x: f32[n], d: f32[n]) -> (a, b, c, e, f, g)\n  a = GELU(x)\n  b = Mish(x)\n  c = SoftPlus(x)\n"
    text += "  e = GELUBackward(x, d)\n  f = MishBackward(x, d)\n  g = SoftPlusBackward(x, d)"
    graph = og.parse(text)
    x, d = random((30_000,), "f32") * 3, random((30_000,), "f32", 1)
    on_gpu = og.compile(graph, device="cuda")(x=moved(cupy, x), d=moved(cupy, d))
    CACHE.set_capacity(0)
    with as_on_a_gpu():
        expected = og.compile(graph)(x=x, d=d)
    CACHE.set_capacity(DEFAULT_CAPACITY)
    assert all(agree(on_gpu[name].host, expected[name]) for name in expected)
    if processor.has_avx512():  # other processors use no tables
        assert not agree(on_gpu["a"].host, og.compile(graph)(x=x, d=d)["a"])  # otherwise the comparison would be void


@pytest.mark.parametrize("case", [c for c in CASES if c.variant], ids=str)
def test_layout_cases_have_the_declared_variant(cupy: FakeCupy, case: Case) -> None:
    from opgraph.runtime.cuda_kernel import CudaKernel

    x, a = case.views(np.zeros(case.x), np.zeros(case.a))
    f = og.compile(gated("f64", x.shape, a.shape), device="cuda")
    kernel = f._steps[0].run
    assert isinstance(kernel, CudaKernel)
    strides = [tuple(s // 8 for s in v.strides) for v in (x, a)]
    assert kernel.operands.layout([x.shape, a.shape], strides).variant.operands == case.variant


@pytest.mark.parametrize("case", [c for c in CASES if c.x and 0 not in c.x], ids=str)
def test_64_bit_indices_give_the_same_bits(cupy: FakeCupy, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraph.schedule.cuda.NARROW", 1)
    x, a = random(case.x, "f32"), random(case.a, "f32", 1)
    host, given = case.views(x, a), case.views(moved(cupy, x), moved(cupy, a))
    graph = gated("f32", host[0].shape, host[1].shape)
    f = og.compile(graph, device="cuda")
    got = f(x=given[0], a=given[1])
    np.testing.assert_array_equal(got.host, og.compile(graph)(x=host[0], a=host[1]))
    assert "og::u32 n" not in next(iter(f.kernels.values()))[-500:]


@pytest.mark.parametrize(("offset", "pack"), [(0, 4), (1, 1), (2, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize("which", ["x", "a", "out"])
def test_pack_size_follows_address_alignment(cupy: FakeCupy, which: str, offset: int, pack: int) -> None:
    """A GPU stops at a misaligned access; the emulating host does not."""
    f = og.compile(gated("f32", (None,), (None,)), device="cuda")
    arrays = {name: cupy.empty((1024,), "f4") for name in ("x", "a", "out")}
    arrays[which] = cupy.empty((1024 + offset,), "f4")[offset:]
    f(**arrays)
    (kernel,) = [f.kernels[name] for name, _, _ in cupy.launches]
    assert f"og::flat<Fused, {pack}, " in kernel


def test_misaligned_scalar_keeps_packs(cupy: FakeCupy) -> None:
    f = og.compile(gated("f32", (None,), (1,)), device="cuda")
    f(x=cupy.empty((1024,), "f4"), a=cupy.empty((4,), "f4")[1:2])
    assert "og::flat<Fused, 4, 2>" in f.kernels[cupy.launches[0][0]]


def test_outputs_of_any_layout_are_written_in_place(cupy: FakeCupy) -> None:
    x, a = random((40, 33), "f32"), random((33,), "f32", 1)
    expected = og.compile(gated("f32", (40, 33), (33,)))(x=x, a=a)
    f = og.compile(gated("f32", (40, 33), (33,)), device="cuda")
    ga = moved(cupy, a)
    outs = (
        cupy.empty((40, 33), "f4"),
        cupy.empty((40, 66), "f4")[:, ::2],
        cupy.empty((80, 40), "f4")[1::2, 5:38],
        FakeArray(cupy.empty((33, 40), "f4").host.T),
        moved(cupy, x),
    )
    for out in outs:
        given = out if out is outs[-1] else moved(cupy, x)  # the last one is in place
        assert f(x=given, a=ga, out=out) is out
        np.testing.assert_array_equal(out.host, expected)


def test_no_memory_outside_outputs_is_written(cupy: FakeCupy) -> None:
    f = og.compile(gated("bf16", (1003,), ()), device="cuda")
    x, a = random((1003,), "bf16"), random((), "bf16")
    around = cupy.empty((1100,), dtypes.get("bf16").numpy)
    f(x=moved(cupy, x), a=moved(cupy, a), out=around[40:1043])
    untouched = np.concatenate([around.host[:40], around.host[1043:]])
    assert (untouched.view(np.uint8) == 0xA5).all()


def test_bound_call_uses_the_current_stream_and_allocates_nothing(cupy: FakeCupy) -> None:
    f = og.compile(gated("f32", (None,), ()), device="cuda")
    x, a, out = moved(cupy, random((100,), "f32")), moved(cupy, random((), "f32")), cupy.empty((100,), "f4")
    again = f.bind(x=x, a=a, out=out)
    before = cupy.allocated
    assert cupy.launches == []
    for address in (7, 9):
        cupy.stream = FakeStream(address)
        x.host[...] = address
        assert again() is out
        np.testing.assert_array_equal(out.host, og.compile(gated("f32", (None,), ()))(x=x.host, a=a.host))
    assert [stream for _, _, stream in cupy.launches] == [7, 9]
    assert cupy.allocated == before


def test_call_launches_on_the_current_stream(cupy: FakeCupy) -> None:
    f = og.compile(gated("f32", (None,), ()), device="cuda")
    x, a = moved(cupy, random((100,), "f32")), moved(cupy, random((), "f32"))
    for address in (3, 5):
        cupy.stream = FakeStream(address)
        f(x=x, a=a)
    assert [stream for _, _, stream in cupy.launches] == [3, 5]


@pytest.mark.parametrize(
    "handle",
    [
        11,
        types.SimpleNamespace(ptr=11),
        types.SimpleNamespace(cuda_stream=11),
        types.SimpleNamespace(__cuda_stream__=lambda: (0, 11)),
    ],
    ids=["address", "CuPy", "torch", "protocol"],
)
def test_partition_executes_on_the_given_stream(cupy: FakeCupy, handle: object) -> None:
    g = og.Graph(engine="cuda")
    x = g.input("x", dtype="f32", shape=(64,))
    y = g.add_op("Swish", x, name="y")
    g.finalize()
    engine = og.Engine("cuda", 0)
    compiled = g.get_partitions()[0].compile([x], [y], engine)
    out = cupy.empty((64,), "f4")
    compiled.execute(og.Stream(engine, handle), {x.id: moved(cupy, random((64,), "f32"))}, {y.id: out})
    og.Stream(engine, handle).wait()
    assert cupy.launches[0][2] == 11


def test_workspace_is_allocated_on_the_stream_that_uses_it(cupy: FakeCupy) -> None:
    """Libraries reuse memory in the order of the stream on which it was allocated."""
    g = og.Graph(engine="cuda")
    x, like = g.input("x", "f32", (70_001,)), g.input("like", "f32", (1,))
    s = g.add_op("SumTo", x, like, name="s")
    g.finalize()
    engine = og.Engine("cuda", 0)
    compiled = g.get_partitions()[0].compile([x, like], [s], engine)
    given, out = random((70_001,), "f32"), cupy.empty((1,), "f4")
    inputs = {x.id: moved(cupy, given), like.id: moved(cupy, np.zeros(1, np.float32))}
    cupy.allocated_on.clear()
    compiled.execute(og.Stream(engine, 11), inputs, {s.id: out})
    assert cupy.allocated_on == [11] and {stream for _, _, stream in cupy.launches} == {11} and cupy.stream.ptr == 0
    np.testing.assert_allclose(out.host[0], given.sum(dtype=np.float64), rtol=1e-5)


def test_invalid_stream_is_refused(cupy: FakeCupy) -> None:
    with pytest.raises(InvalidArguments, match="str is no stream\n  where: Stream\n  fix:   pass a torch or CuPy"):
        og.Stream(og.Engine("cuda"), "side").wait()


def test_kernels_device_is_current_only_during_its_launch(cupy: FakeCupy) -> None:
    f = og.compile(gated("f32", (None,), ()), device="cuda:1")
    x, a = FakeArray(random((9,), "f32"), device=1), FakeArray(random((), "f32"), device=1)
    assert f(x=x, a=a).data.device_id == 1
    assert cupy.device == 0


def test_equal_layouts_share_a_plan_and_similar_ones_a_kernel(cupy: FakeCupy) -> None:
    f = og.compile(gated("f32", (None, None), ()), device="cuda")
    a = moved(cupy, random((), "f32"))
    for shape in ((8, 8), (8, 8), (16, 4), (100, 1000)):
        f(x=moved(cupy, random(shape, "f32")), a=a)
    assert len(f.kernels) == 1 and len(f._steps[0].run._plans) == 3


def test_constants_are_uploaded_once(cupy: FakeCupy) -> None:
    g = og.Graph()
    x = g.input("x", dtype="f32", shape=(None, 6))
    table = g.constant("table", np.arange(12, dtype=np.float32)[::2])
    g.output(g.add_op("Multiply", x, table, name="y"))
    f = og.compile(g, device="cuda")
    for rows in (3, 50, 7):
        data = random((rows, 6), "f32")
        np.testing.assert_array_equal(f(x=moved(cupy, data)).host, data * np.arange(0, 12, 2, np.float32))
    assert cupy.uploads == 1


def test_graph_of_several_steps_and_outputs_equals_the_cpu(cupy: FakeCupy) -> None:
    g = og.Graph()
    x = g.input("x", dtype="f32", shape=(17,))
    c = g.constant("c", np.arange(3, dtype=np.float32))
    s = g.add_op("Sigmoid", x, name="s")
    y = g.add_op("Multiply", x, s, name="y")
    for value in (s, y, x, c):
        g.output(value)
    data = random((17,), "f32")
    expected, given = og.compile(g)(x=data), moved(cupy, data)
    got = og.compile(g, device="cuda")(x=given)
    assert list(got) == list(expected) and got["x"] is given
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name].host, value)
    outs = {name: cupy.empty(value.shape, value.dtype) for name, value in expected.items()}
    assert og.compile(g, device="cuda")(x=given, out=outs) is outs
    for name, value in expected.items():
        np.testing.assert_array_equal(outs[name].host, value)


def test_a_donated_input_holds_the_result(cupy: FakeCupy) -> None:
    x, a = moved(cupy, random((50,), "f32")), moved(cupy, random((50,), "f32", 1))
    expected = og.compile(gated("f32", (50,), (50,)))(x=x.host.copy(), a=a.host)
    got = og.compile(gated("f32", (50,), (50,)), device="cuda", donate=("x",))(x=x, a=a)
    assert got is x
    np.testing.assert_array_equal(x.host, expected)


def test_donated_memory_that_is_still_read_is_not_overwritten(cupy: FakeCupy) -> None:
    x = moved(cupy, random((51,), "f32"))
    before = x.host.copy()
    f = og.compile(gated("f32", (50,), (50,)), device="cuda", donate=("x",))
    with pytest.raises(og.errors.InvalidArguments, match="its array overlaps that of another input"):
        f(x=x[:50], a=x[1:])
    np.testing.assert_array_equal(x.host, before)


def test_outputs_may_not_overlap_each_other(cupy: FakeCupy) -> None:
    f = og.compile(og.parse("graph(x: f32[8]) -> (y, w)\n  y = Exp(x)\n  w = Neg(x)"), device="cuda")
    x, both = moved(cupy, random((8,), "f32")), cupy.empty((12,), np.dtype(np.float32))
    with pytest.raises(og.errors.InvalidArguments, match="the output array overlaps another output"):
        f(x=x, out={"y": both[:8], "w": both[4:]})


class TestRefused:
    """Each error has a message, a place and a fix."""

    def call(self, x: object, a: object = None, **more: object) -> None:
        f = og.compile(gated("f32", (4,), ()), device="cuda")
        f(x=x, a=a if a is not None else FakeArray(random((), "f32")), **more)

    def test_numpy_arrays(self, cupy: FakeCupy) -> None:
        with pytest.raises(
            InvalidArguments, match=r'numpy.ndarray.* no array on a GPU\n  where: input "x"\n  fix:   pass cupy.as'
        ):
            self.call(random((4,), "f32"))

    def test_numbers(self, cupy: FakeCupy) -> None:
        with pytest.raises(InvalidArguments, match=r'builtins.float.*\n  where: input "a"\n  fix: '):
            self.call(moved(cupy, random((4,), "f32")), 1.0)

    def test_tensors_on_the_cpu(self, cupy: FakeCupy) -> None:
        torch = pytest.importorskip("torch")
        with pytest.raises(
            InvalidArguments, match='on the CPU, the kernel on cuda:0\n  where: input "x"\n  fix:   move'
        ):
            self.call(torch.zeros(4))

    def test_arrays_on_another_gpu(self, cupy: FakeCupy) -> None:
        with pytest.raises(InvalidArguments, match='on cuda:1, the kernel on cuda:0\n  where: input "x"\n  fix: '):
            self.call(FakeArray(random((4,), "f32"), device=1))

    def test_another_dtype(self, cupy: FakeCupy) -> None:
        with pytest.raises(InvalidDataType, match='float64 for f32\\[4\\]\n  where: input "x"\n  fix: '):
            self.call(moved(cupy, random((4,), "f64")))

    def test_another_shape(self, cupy: FakeCupy) -> None:
        with pytest.raises(InvalidShape, match='where: input "x"\n  fix: '):
            self.call(moved(cupy, random((5,), "f32")))

    def test_an_output_of_another_shape(self, cupy: FakeCupy) -> None:
        f = og.compile(gated("f32", (None,), ()), device="cuda")
        x, a = moved(cupy, random((4,), "f32")), moved(cupy, random((), "f32"))
        with pytest.raises(InvalidShape, match=r"shape \(5,\), the result \(4,\)\n  where: out\n  fix: "):
            f(x=x, a=a, out=cupy.empty((5,), "f4"))

    def test_an_output_over_an_input(self, cupy: FakeCupy) -> None:
        memory = moved(cupy, random((6,), "f32"))
        with pytest.raises(
            InvalidArguments, match='overlaps an input that is still read\n  where: output "y"\n  fix: '
        ):
            self.call(memory[:4], out=memory[2:])

    def test_an_output_of_a_wider_dtype_over_an_input(self, cupy: FakeCupy) -> None:
        """Strides count elements: equal strides mean other addresses."""
        f = og.compile(og.parse("graph(x: f32[64]) -> (y)\n  y: f64[64] = TypeCast(x)"), device="cuda")
        memory = moved(cupy, random((64,), "f64"))
        x = memory.view(np.float32)[:64]
        with pytest.raises(
            InvalidArguments, match='overlaps an input that is still read\n  where: output "y"\n  fix: '
        ):
            f(x=x, out=memory)

    def test_an_output_over_itself(self, cupy: FakeCupy) -> None:
        out = FakeArray(np.broadcast_to(np.zeros((), np.float32), (4,)))
        with pytest.raises(InvalidArguments, match='overlaps itself\n  where: output "y"\n  fix: '):
            self.call(moved(cupy, random((4,), "f32")), out=out)

    def test_unaligned_strides(self, cupy: FakeCupy) -> None:
        raw = np.zeros(4, np.dtype({"names": ["v"], "formats": ["f4"], "offsets": [0], "itemsize": 6}))["v"]
        with pytest.raises(InvalidArguments, match='multiples of the element size\n  where: input "x"\n  fix: '):
            self.call(FakeArray(raw))

    def test_a_gpu_that_is_not_there(self, cupy: FakeCupy) -> None:
        with pytest.raises(DeviceError, match="no GPU 2\n  where: Engine\n  fix:   this machine has 2"):
            og.Engine("cuda", 2)

    def test_no_gpu_at_all(self, cupy: FakeCupy) -> None:
        cupy.cuda.runtime.getDeviceCount = lambda: 0
        with pytest.raises(DeviceError, match=r'no usable GPU.*\n  where: engine "cuda"\n  fix:   check `nvidia-smi`'):
            og.Engine("cuda")

    def test_no_cupy(self, cupy: FakeCupy) -> None:
        sys.modules["cupy"] = None  # makes the import fail
        with pytest.raises(
            DeviceError, match=r"CuPy cannot be imported.*\n.*\n  fix:   pip install 'opgraph\[cuda13\]'"
        ):
            og.Engine("cuda")

    def test_a_kernel_that_nvrtc_refuses(self, cupy: FakeCupy) -> None:
        def refuse(code: str, name: str, options: tuple[str, ...]) -> object:
            line = next(i for i, text in enumerate(code.splitlines(), 1) if "// Add #1" in text)
            raise cupy.cuda.compiler.CompileException(f"/tmp/x/name.cu({line}): error: no such thing\n1 error detected")

        cupy.RawKernel = refuse  # type: ignore[method-assign]
        with pytest.raises(DeviceError) as caught:
            og.compile(gated("f32", (4,), ()), device="cuda")
        text = str(caught.value)
        assert "no such thing" in text and "| " in text and "og::add" in text
        assert '\n  where: Add "y"\n  fix: ' in text

    def test_nvrtc_that_is_not_there(self, cupy: FakeCupy) -> None:
        def missing(code: str, name: str, options: tuple[str, ...]) -> object:
            raise RuntimeError("Failed to find CUDA headers")

        cupy.RawKernel = missing  # type: ignore[method-assign]
        with pytest.raises(
            DeviceError, match=r"Failed to find CUDA headers\n.*\n  fix:   pip install 'opgraph\[cuda13\]'"
        ):
            og.compile(gated("f32", (4,), ()), device="cuda")


def test_torch_tensors_are_read_by_address() -> None:
    torch = pytest.importorskip("torch")
    from opgraph.runtime.providers.torch_cuda import TORCH

    base = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    view = TORCH.view(base[1:, ::2].T)
    assert (view.shape, view.strides) == ((3, 3), (2, 6))
    assert view.pointer == base.data_ptr() + 12 and view.dtype == dtypes.get("bf16").numpy and view.device == -1
    with pytest.raises(ValueError, match="no memory of its own"):
        TORCH.view(torch.empty(3, device="meta"))
    with pytest.raises(TypeError, match="complex64"):
        TORCH.view(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="not plain"):
        TORCH.view(torch.zeros(3, dtype=torch.complex64).conj().imag)


def test_fake_cupy_passes_the_same_argument_bytes_as_cupy() -> None:
    """The stand-in follows CuPy's rules: compares the bytes that a launch would read through each pointer."""
    pytest.importorskip("cupy")
    function = pytest.importorskip("cupy.cuda.function")
    scalar = pytest.importorskip("cupy._core._scalar")

    def read(value: object, size: int) -> bytes:
        return ctypes.string_at(scalar.CScalar(value).ptr, size)

    address = 0x7F01_2345_6789
    assert read(address, 8) == address.to_bytes(8, "little")
    assert read(2**40 + 5, 8) == (2**40 + 5).to_bytes(8, "little")
    assert read(np.uint32(2**31 + 5), 4) == (2**31 + 5).to_bytes(4, "little")
    words = np.array([1, -2, 2**40], np.int64).view(np.dtype((np.void, 24)))
    assert words.size == 1
    assert ctypes.string_at(function.CNumpyArray(words).ptr, 24) == words.tobytes()
    assert _argument(address).value == address and bytes(_argument(np.uint32(5)))[:4] == (5).to_bytes(4, "little")


def test_library_ops_run_on_the_host_without_a_gpu_library(cupy: FakeCupy) -> None:
    """This is the case here: torch, if installed, was built for the CPU."""
    g = og.parse(
        "graph(x: f32[?,3], w: f32[3,2]) -> (y)\n  %0 = MatMul(x, w)\n  %1 = Exp(%0)\n  y = ReduceSum(%1, axes=[1])"
    )
    x, w = random((4, 3), "f32"), random((3, 2), "f32", 1)
    with pytest.warns(RuntimeWarning, match=r"1 op of this graph \(MatMul\) left to the CPU"):
        f = og.compile(g, device="cuda")
    got = f(x=moved(cupy, x), w=moved(cupy, w))
    assert isinstance(got, FakeArray) and len(cupy.launches) == 1
    np.testing.assert_allclose(got.host, np.exp(x @ w).sum(1), rtol=1e-5)
    out = cupy.empty((4,), "f4")
    assert f(x=moved(cupy, x), w=moved(cupy, w), out=out) is out
    np.testing.assert_array_equal(out.host, got.host)


def test_library_op_on_constants_runs_on_the_host(cupy: FakeCupy) -> None:
    """It is also called with an input of the graph, which determines the library and the stream of the call."""
    g = og.parse("graph(x: f32[2,2]) -> (y)\n  const k: f32[2,2] = [1, 2, 3, 4]\n  %0 = MatMul(k, k)\n  y = Add(x, %0)")
    x, k = random((2, 2), "f32"), np.array([[1, 2], [3, 4]], "f4")
    with pytest.warns(RuntimeWarning, match=r"1 op of this graph \(MatMul\) left to the CPU"):
        f = og.compile(g, device="cuda")
    np.testing.assert_array_equal(f(x=moved(cupy, x)).host, x + k @ k)
