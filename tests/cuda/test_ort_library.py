"""A library of custom ops on onnxruntime's CUDA provider, without a GPU.

The driver and the OrtApi are replaced (tests/support), and kernels are emulated. Results are compared with those of a
real onnxruntime, which runs the model's functions on the CPU.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ort_gpu_child import CONTEXT, STREAM, Called, call, start
from schedules import pointwise

import opgraph as og
from opgraph.errors import DeviceError, InvalidArguments
from opgraph.ir import dtypes
from opgraph.runtime import cpu_compiler

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
if not cpu_compiler.is_available():
    pytest.skip("there is no C++ compiler", allow_module_level=True)

from fake_cuda_driver import built  # noqa: E402
from near import assert_near  # noqa: E402

from opgraph.onnx.library import build, nvrtc  # noqa: E402  # needs onnx
from opgraph.onnx.library.gpu import GpuKernel, gpu_kernels  # noqa: E402
from opgraph.onnx.library.ops import LibraryOp, swish_ops  # noqa: E402
from opgraph.onnx.request import Request  # noqa: E402
from opgraph.onnx.save import drafted  # noqa: E402

try:
    nvrtc.library()
except DeviceError:
    pytest.skip("there is no NVRTC", allow_module_level=True)

MODELS = {
    "bias": "graph(x: f32[n,m], a: f32[m]) -> (y, z)\n t = Exp(x)\n y = Add(t, a)\n z = Multiply(y, x)",
    "channels": (
        "graph(x: f16[n,6,h,w], p: f16[6,1,1]) -> (y)\n c = GreaterEqual(x, 0.0)\n g = Multiply(x, p)\n"
        " y = Select(c, x, g)"
    ),
    "small": "graph(x: f32[n]) -> (y)\n t = Abs(x)\n y = Add(t, 1.5)",
    "anyhow": (
        "graph(a: f64[?,?,?,?,?], b: f64[?,?,?,?,?], c: f64[?,?,?,?,?]) -> (y)\n t = Add(a, b)\n y = Multiply(t, c)"
    ),
}
#: (model, shapes, number of axes that the kernel receives, elements of a pack)
CALLS: list[tuple[str, tuple[tuple[int, ...], ...], int, int]] = [
    ("bias", ((3, 400), (400,)), 3, 4),
    ("bias", ((30, 33), (33,)), 3, 1),  # rows are not multiples of a pack
    ("bias", ((1, 4099), (4099,)), 0, 4),  # one row, whose last pack is incomplete
    ("bias", ((700, 4), (1,)), 0, 4),  # one number for all elements
    ("bias", ((1, 1), (1,)), 0, 4),
    ("channels", ((2, 6, 4, 16), (6, 1, 1)), 3, 8),
    ("channels", ((2, 6, 3, 3), (6, 1, 1)), 3, 1),
    ("anyhow", ((4, 1, 2, 1, 3), (1, 2, 1, 5, 1), (4, 2, 2, 5, 3)), 8, 1),
    ("anyhow", ((2, 1, 1, 1, 3), (1, 1, 7, 1, 1), (2, 1, 7, 1, 3)), 3, 1),
]


@dataclass(frozen=True, slots=True)
class Built:
    """A library that serves both providers, and the process with the emulated GPU."""

    path: Path
    drafts: dict[str, Any]
    ops: list[LibraryOp]
    kernels: dict[str, GpuKernel]
    process: ProcessPoolExecutor

    def call(self, name: str, arrays: list[np.ndarray], kinds: list[Any], **more: Any) -> Called:
        """See `ort_gpu_child.call`."""
        path = more.pop("path", self.path)
        return self.process.submit(call, str(path), name, arrays, kinds, **more).result()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Contains only PTX, which NVRTC makes in a fraction of the time; its results are emulated from the same text."""
    folder = tmp_path_factory.mktemp("library")
    drafts = {name: drafted(og.parse(text), Request(library=True, cuda=True)) for name, text in MODELS.items()}
    swish = [replace(op, on_gpu=True) for op in swish_ops() if op.inputs[0] == "f32"]
    ops = [op for draft in drafts.values() for op in draft.library] + swish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "CUBINS", ())
        (folder / "act.so").write_bytes(build.compiled(ops))
    kernels = {k.source.entry: k for op in ops for form in op.forms for k in gpu_kernels(form)}
    codes = {name: k.source.code for name, k in kernels.items()}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, start, (built(folder), codes)) as process:
        yield Built(folder / "act.so", drafts, ops, kernels, process)


def arrays_of(graph: og.Graph, shapes: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    pairs = zip(graph.inputs, shapes, strict=True)
    return [np.asarray(rng.normal(size=shape)).astype(dtypes.get(t.dtype).numpy) for t, shape in pairs]


def truth_of(graph: og.Graph, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs in float64; a bias of one element, which the graph does not allow, is expanded."""
    if "m" in (t := graph.inputs[-1]).dims:
        feeds = {**feeds, t.name: np.broadcast_to(feeds[t.name], feeds["x"].shape[-1:])}
    found = og.evaluate(graph, feeds)
    return list(found.values()) if isinstance(found, dict) else [found]


def session(model: Any, library: Path | None = None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if library is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(("name", "shapes", "rank", "pack"), CALLS, ids=str)
def test_custom_op_is_one_launch_and_agrees_with_onnxruntime(
    library: Built, name: str, shapes: tuple[tuple[int, ...], ...], rank: int, pack: int
) -> None:
    graph, draft = og.parse(MODELS[name]), library.drafts[name]
    arrays = arrays_of(graph, shapes)
    feeds = dict(zip([t.name for t in graph.inputs], arrays, strict=True))
    expected = session(draft.proto()).run(None, feeds)  # the functions, on the CPU
    (op,) = draft.library
    called = library.call(op.name, arrays, [dtypes.get(t.dtype).numpy for t in graph.outputs])
    assert called.refused is None and called.current == CONTEXT
    ((kernel, blocks, threads, stream),) = called.launches
    chosen = library.kernels[kernel]
    assert (chosen.rank, chosen.schedule.vector, stream) == (rank, pack, STREAM)
    items = expected[0].size if rank == 0 else expected[0].size // pack
    assert (blocks, threads) == (-(-items // chosen.schedule.tile), 256)
    for got, peer, true in zip(called.results, expected, truth_of(graph, feeds), strict=True):
        assert (got.dtype, got.shape) == (peer.dtype, peer.shape)
        assert_near(got, true, peer)


def test_library_also_runs_on_the_cpu_provider(library: Built) -> None:
    for name, shapes, *_ in CALLS[::3]:
        graph, model = og.parse(MODELS[name]), library.drafts[name].proto()
        feeds = dict(zip([t.name for t in graph.inputs], arrays_of(graph, shapes), strict=True))
        with_it, without = session(model, library.path).run(None, feeds), session(model).run(None, feeds)
        for got, peer, true in zip(with_it, without, truth_of(graph, feeds), strict=True):
            assert_near(got, true, peer)


@pytest.mark.parametrize("alpha", [None, 1.702, -3e30])
def test_alpha_of_a_node_is_passed_by_value(library: Built, alpha: float | None) -> None:
    x = np.linspace(-30, 30, 999, dtype=np.float32)
    called = library.call("Swish", [x], [x.dtype], alpha=alpha)
    graph = og.parse(f"graph(x: f32[n]) -> (y)\n y = Swish(x, alpha={1.0 if alpha is None else alpha})")
    with np.errstate(all="ignore"):
        assert_near(called.results[0], og.evaluate(graph, x=x), og.evaluate(graph, x=x, dtype=None))
    factor = np.float32([[0.5], [-2.0]])
    both = np.stack([x[:40], x[-40:]])
    called = library.call("Swish", [both, factor], [x.dtype], alpha=alpha)
    whole = factor * np.float32(1 if alpha is None else alpha)
    with np.errstate(all="ignore"):
        want = [og.evaluate(og.parse("graph(x: f32[n], f: f32[]) -> (y)\n y = Swish(x, f)"), x=r, f=f[0], dtype=t)
                for t in ("f64", None) for r, f in zip(both, whole)]  # fmt: skip
    assert_near(called.results[0], np.stack(want[:2]), np.stack(want[2:]))


def test_misaligned_addresses_use_scalar_accesses(library: Built) -> None:
    (op,) = library.drafts["bias"].library
    x, a = np.arange(4096, dtype=np.float32).reshape(1, 4096) / 500, np.ones(4096, np.float32)
    called = library.call(op.name, [x, a], [x.dtype, x.dtype], offset=4)
    ((kernel, *_),) = called.launches
    assert library.kernels[kernel].schedule.vector == 1
    np.testing.assert_allclose(called.results[0], np.exp(x) + 1, rtol=1e-6)


def test_no_kernel_is_launched_for_no_elements(library: Built) -> None:
    (op,) = library.drafts["bias"].library
    called = library.call(op.name, [np.zeros((0, 4), "f4"), np.zeros(4, "f4")], [np.dtype("f4")] * 2)
    assert called.launches == [] and [r.shape for r in called.results] == [(0, 4)] * 2


def test_packs_equal_those_of_the_cuda_engine(library: Built) -> None:
    """The CUDA engine chooses the same packs for such calls, and for one row the same text."""
    from opgraph.codegen.kernel import cuda_source
    from opgraph.loops.layout import bind

    (op,) = library.drafts["bias"].library
    loop = op.forms[0].loop
    for shapes in ([(3, 400), (400,)], [(64, 512), (64, 512)]):
        strides = [tuple(int(np.prod(s[i + 1 :])) for i in range(len(s))) for s in shapes]
        layout = bind(loop, shapes, strides)
        schedule = pointwise(loop, layout)
        (mine,) = [
            k for k in gpu_kernels(op.forms[0])
            if k.kinds == layout.variant.operands and (k.rank == 0) == layout.variant.flat
        ]  # fmt: skip
        if layout.variant.flat:
            assert mine.source == cuda_source(schedule)
        assert (mine.schedule.vector, mine.schedule.unroll, mine.schedule.group) == (
            schedule.vector, schedule.unroll, schedule.group
        )  # fmt: skip


# -- choice of code, and errors ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(library: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with machine code for every generation."""
    (op,) = library.drafts["small"].library
    path = tmp_path_factory.mktemp("small") / f"{op.name}.so"
    path.write_bytes(build.compiled([op]))
    return path


@pytest.fixture
def fresh(small: Path, tmp_path: Path) -> Path:
    """The same library, before any call to a driver."""
    return Path(shutil.copy(small, tmp_path / "fresh.so"))


X, F32 = [np.float32([-2.0, 7.0])], [np.dtype(np.float32)]


@pytest.mark.parametrize(
    ("capability", "image"),
    [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((11, 0), "ptx"), ((12, 0), "ptx")],
    ids=str,
)
def test_gpu_loads_the_image_of_its_architecture(
    library: Built, small: Path, fresh: Path, capability: tuple[int, int], image: str
) -> None:
    major, minor = capability
    called = library.call(small.stem, X, F32, path=fresh, major=major, minor=minor)
    assert called.loaded == (1, image)
    np.testing.assert_array_equal(called.results[0], np.abs(X[0]) + np.float32(1.5))
    assert library.call(small.stem, X, F32, path=fresh, major=major, minor=minor).loaded[0] == 0  # it is loaded already


def test_context_is_current_while_kernels_load_and_launch(library: Built, small: Path, fresh: Path) -> None:
    """No context need exist when a kernel is created; the current context of a call is restored afterwards."""
    for current in (0, 0x9000):
        called = library.call(small.stem, X, F32, path=fresh, current=current)
        assert called.refused is None and len(called.launches) == 1 and called.current == current
    assert called.loaded[0] == 1  # into the context that was current when the second kernel was created


#: The driver's result, and the OrtStatus: its code (NOT_IMPLEMENTED or FAIL) and its message.
REFUSED = {
    "an old GPU": ({"major": 7, "minor": 5}, 9, "its compute capability is 7.5, and the library has kernels for 8.0"),
    "an old driver": ({"load": 222, "version": 12040}, 9, "driver is too old for this library (it knows CUDA 12.4)"),
    "a driver without the generation": ({"load": 209, "version": 11080}, 9, "(it knows CUDA 11.8)"),
    "no memory": ({"load": 2}, 1, "the kernels cannot be loaded: CUDA_ERROR_OUT_OF_MEMORY"),
    "something else": ({"load": 999}, 1, "the kernels cannot be loaded: an unknown error"),
    "no GPU": ({"init": 100}, 1, "no NVIDIA driver: libcuda.so.1 cannot be loaded, or finds no GPU"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_too_old_driver_or_gpu_gives_ort_status(library: Built, small: Path, fresh: Path, case: str) -> None:
    driver, code, message = REFUSED[case]
    called = library.call(small.stem, X, F32, path=fresh, **driver)
    assert called.refused is not None and called.launches == [] and called.current == CONTEXT
    assert called.refused[0] == code and message in called.refused[1]


def test_incompatible_shapes_give_ort_status(library: Built) -> None:
    (op,) = library.drafts["bias"].library
    called = library.call(op.name, [np.zeros((3, 4), "f4"), np.zeros(3, "f4")], F32 * 2)
    assert called.refused == (2, "opgraph: the inputs of a fused node do not broadcast")


def test_too_many_broadcast_axes_give_ort_status(library: Built) -> None:
    (op,) = library.drafts["anyhow"].library
    shapes = [tuple(2 if (axis + k) % 3 else 1 for axis in range(12)) for k in range(3)]
    called = library.call(op.name, [np.zeros(shape) for shape in shapes], [np.dtype("f8")])
    assert called.refused is not None and "broadcast along so many axes" in called.refused[1]


# -- building ---------------------------------------------------------------------------------------------------------


def test_library_for_both_providers_holds_ops_that_both_run() -> None:
    """There are no kernels for rows on a GPU: a node would copy the data back to the CPU."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> net (float[b, 512] x, float[512] w, float[512] v) '
        "=> (float[b, 512] y) { e = Exp (x)  t = Add (e, x)  n = LayerNormalization (t, w, v)  y = Tanh (n) }"
    )
    alone, both = (drafted(og.onnx.load(model), Request(library=True, cuda=cuda)) for cuda in (False, True))
    assert [op.forms[0].row_rank for op in alone.library] == [1]
    assert [(op.forms[0].row_rank, op.on_gpu) for op in both.library] == [(0, True)]
    assert [n.op_type for n in both.proto().graph.node] == [both.library[0].name, "LayerNormalization", "Tanh"]


def test_cuda_without_a_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArguments, match="none is asked for\n  where: cuda\n  fix:   give ort_library"):
        og.onnx.save(og.parse(MODELS["small"]), tmp_path / "m.onnx", cuda=True)
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_written_without_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", _missing)
    nvrtc.library.cache_clear()
    graph = og.parse("graph(x: f32[n]) -> (y)\n t = Exp(x)\n y = Add(t, 0.25)")
    with pytest.raises(DeviceError, match=r"NVRTC.* is not installed\n  where: .*\n  fix:   pip install nvidia-"):
        og.onnx.save(graph, tmp_path / "m.onnx", ort_library=tmp_path / "m.so", cuda=True)
    assert list(tmp_path.iterdir()) == []


def _missing(path: str) -> None:
    raise OSError(path)


def test_source_refused_by_nvrtc_raises_with_its_log() -> None:
    with pytest.raises(DeviceError, match=r"NVRTC refused the kernels for sm_80:\n.*error.*\n(.*\n)*  where: "):
        nvrtc.compiled("no C++ at all")


def test_swish_has_gpu_kernels_only_for_used_dtypes() -> None:
    """Their build takes seconds. On the CPU a registered op must support every dtype of its name."""
    text = "graph(x: f16[n], b: f32[n]) -> (y, z)\n y = Swish(x, alpha=1.5)\n s = Swish(b, alpha=2.0)\n z = Exp(s)"
    swish = [op for op in drafted(og.parse(text), Request(library=True, cuda=True)).library if op.name == "Swish"]
    assert {op.inputs[0]: op.on_gpu for op in swish} == {"f32": False, "f16": True, "bf16": False, "f64": False}
    assert [len(gpu_kernels(form)) for form in swish[0].forms] == [2, 8]
