"""Custom-op libraries for onnxruntime: a user's activation as one op, and the functions that run without it."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from disk import room_for
from near import assert_near

import opgraph as og
from opgraph.errors import DeviceError, InvalidArguments, ModelError
from opgraph.ir import dtypes
from opgraph.runtime import cpu_compiler

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
if not cpu_compiler.is_available():
    pytest.skip("there is no C++ compiler", allow_module_level=True)

from opgraph.onnx.atomic_write import Pending  # noqa: E402
from opgraph.onnx.library import build  # noqa: E402  # needs onnx
from opgraph.onnx.library.ops import swish_ops  # noqa: E402
from opgraph.onnx.library.text import library_text  # noqa: E402
from opgraph.onnx.request import Request  # noqa: E402
from opgraph.onnx.save import drafted, to_model  # noqa: E402
from opgraph.onnx.write import write  # noqa: E402

T = onnx.TensorProto
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
NAN = float("nan")

#: Hand-written activations, one partition each. `shapes` are the input shapes of each call.
ACTIVATIONS = {
    "several outputs": (
        "graph(x: f32[n,m], a: f32[m]) -> (y, z)\n t = Exp(x)\n u = Multiply(t, a)\n y = Add(u, 1.5)\n w = Tanh(y)\n"
        " z = Multiply(w, x)",
        [{"x": (5, 7), "a": (7,)}, {"x": (300, 128), "a": (128,)}, {"x": (1, 1), "a": (1,)}, {"x": (0, 4), "a": (4,)}],
    ),
    "per channel": (
        "graph(x: f32[n,6,h,w], p: f32[6,1,1]) -> (y)\n c = GreaterEqual(x, 0.0)\n e = Exp(x)\n f = Subtract(e, 1.0)\n"
        " g = Multiply(f, p)\n y = Select(c, x, g)",
        [{"x": (2, 6, 5, 3), "p": (6, 1, 1)}, {"x": (3, 6, 1, 1), "p": (6, 1, 1)},
         {"x": (1, 6, 200, 200), "p": (6, 1, 1)}],
    ),
    "three operands": (
        "graph(x: f32[n,8], b: f32[8], r: f32[n,1]) -> (y)\n t = Add(x, b)\n u = Multiply(t, r)\n y = Sigmoid(u)",
        [{"x": (4, 8), "b": (8,), "r": (4, 1)}, {"x": (1, 8), "b": (8,), "r": (1, 1)},
         {"x": (9000, 8), "b": (8,), "r": (9000, 1)}],
    ),
    "anyhow": (
        "graph(a: f32[?,?], b: f32[?,?], c: f32[?,?]) -> (y)\n t = Add(a, b)\n u = Multiply(t, c)\n y = Tanh(u)",
        [{"a": (3, 4), "b": (3, 4), "c": (3, 4)}, {"a": (3, 1), "b": (1, 4), "c": (3, 4)},
         {"a": (1, 1), "b": (5, 4), "c": (1, 4)}],
    ),
    "two types": (
        "graph(x: f32[n], k: s64[n]) -> (y, m)\n f: f32[n] = TypeCast(k)\n t = Multiply(x, f)\n y = Exp(t)\n"
        " m = Greater(y, 2.0)",
        [{"x": (33,), "k": (33,)}],
    ),
    **{
        t: (
            f"graph(x: {t}[n,8], b: {t}[8]) -> (y)\n t = Add(x, b)\n u = Exp(t)\n y = Multiply(u, x)",
            [{"x": (6, 8), "b": (8,)}],
        )
        for t in ("f16", "bf16")
    },
    "f64": ("graph(x: f64[n,8]) -> (y)\n t = Exp(x)\n u = Add(t, 0.1)\n y = Divide(x, u)", [{"x": (6, 8)}]),
    "swish inside": ("graph(x: f32[n]) -> (y)\n s = Swish(x, alpha=1.25)\n y = Multiply(s, 3.0)", [{"x": (1000,)}]),
    "a norm between others": (
        "graph(x: f32[b,t,c], r: f32[b,t,c], w: f32[c], v: f32[c]) -> (s, y)\n s = Add(x, r)\n"
        " n = LayerNorm(s, w, v, keep_stats=false)\n y = Tanh(n)",
        [{"x": (b, t, c), "r": (b, t, c), "w": (c,), "v": (c,)}
         for b, t, c in ((2, 5, 8), (1, 1, 8), (3, 70, 200), (2, 3, 1), (0, 3, 8), (1, 2, 4000))],
    ),
    "two axes and their mean": (
        "graph(x: f32[b,6,h,w], a: f32[h,1]) -> (y, p)\n t = Multiply(x, a)\n y = Exp(t)\n"
        " p = ReduceMean(y, axes=[2,3], keep_dims=true)",
        [{"x": (2, 6, 5, 7), "a": (5, 1)}, {"x": (1, 6, 1, 1), "a": (1, 1)}, {"x": (3, 6, 50, 40), "a": (50, 1)}],
    ),
    "a number for each row": (
        "graph(x: f32[b,t,c], k: f32[t,1]) -> (e)\n u = Multiply(x, k)\n p = ReduceSum(u, axes=[-1], keep_dims=false)\n"
        " e = Tanh(p)",
        [{"x": (2, 5, 9), "k": (5, 1)}, {"x": (4, 300, 33), "k": (300, 1)}],
    ),
    "a softmax in f16": (
        "graph(x: f16[n,m], a: f16[m]) -> (y)\n t = Add(x, a)\n y = SoftMax(t, axis=-1)",
        [{"x": (6, 50), "a": (50,)}, {"x": (900, 45), "a": (45,)}],
    ),
    "without dimensions": ("graph(x: f32[]) -> (y)\n t = Exp(x)\n y = Add(t, 1.0)", [{"x": ()}]),
}  # fmt: skip


@pytest.fixture(scope="module")
def drafts() -> dict[str, Any]:
    return {name: drafted(og.parse(text), Request(library=True)) for name, (text, _) in ACTIVATIONS.items()}


@pytest.fixture(scope="module")
def library(drafts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """One library for all models here: its ops have distinct names."""
    ops = [op for draft in drafts.values() for op in draft.library] + list(swish_ops())
    path = tmp_path_factory.mktemp("library") / "all.so"
    path.write_bytes(build.compiled(ops))
    return str(path)


def session(model: Any, library: str | None, level: str = LEVELS[-1], threads: int = 2, **entries: str) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    for key, value in entries.items():
        setattr(options, key, value)
    if library is not None:
        options.register_custom_ops_library(library)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def ran(run: Any, feeds: dict[str, np.ndarray], shape: tuple[int, ...] = ()) -> list[np.ndarray]:
    """The outputs; bf16 arrays are passed as bits, since NumPy has no such type."""
    if all(a.dtype != ml_dtypes.bfloat16 for a in feeds.values()):
        return list(run.run(None, feeds))
    binding = run.io_binding()
    values = {
        n: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(a.view(np.uint16), T.BFLOAT16) for n, a in feeds.items()
    }
    out = np.empty(shape, np.uint16)
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output(run.get_outputs()[0].name, "cpu", 0, T.BFLOAT16, out.shape, out.ctypes.data)
    run.run_with_iobinding(binding)
    return [out.view(ml_dtypes.bfloat16)]


def arrays(graph: og.Graph, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    drawn = {t.name: rng.normal(size=shapes[t.name]) for t in graph.inputs}
    return {t.name: np.asarray(drawn[t.name]).astype(dtypes.get(t.dtype).numpy) for t in graph.inputs}


def outputs(graph: og.Graph, feeds: dict[str, np.ndarray], dtype: str | None = "f64") -> list[np.ndarray]:
    found = og.evaluate(graph, feeds, dtype=dtype)
    return list(found.values()) if isinstance(found, dict) else [found]


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_runs_as_one_op_and_is_as_accurate_as_numpy(name: str, drafts: dict[str, Any], library: str) -> None:
    text, calls = ACTIVATIONS[name]
    graph, model = og.parse(text), drafts[name].proto()
    onnx.checker.check_model(model, full_check=True)
    assert [n.domain for n in model.graph.node] == ["opgraph"]
    runs = [session(model, library, level) for level in LEVELS]
    plain = session(model, None)
    for shapes in calls:
        feeds = arrays(graph, shapes)
        exact, peers = outputs(graph, feeds), outputs(graph, feeds, None)
        results = [ran(run, feeds, exact[0].shape) for run in runs]
        for got in results[1:]:  # the op is the same at every level
            assert all(a.tobytes() == b.tobytes() for a, b in zip(got, results[0], strict=True))
        without = ran(plain, feeds, exact[0].shape)
        for truth, peer, mine, function in zip(exact, peers, results[0], without, strict=True):
            assert (mine.dtype, mine.shape) == (peer.dtype, peer.shape) == (function.dtype, function.shape)
            assert_near(mine, truth, peer)
            assert_near(function, truth, peer)


def test_registered_op_takes_precedence_over_the_function_of_its_name(
    drafts: dict[str, Any], library: str, tmp_path: Path
) -> None:
    path = tmp_path / "optimized.onnx"
    kept = {}
    for lib in (library, None):
        session(drafts["per channel"].proto(), lib, optimized_model_filepath=str(path))
        kept[lib] = [n.op_type for n in onnx.load(path).graph.node]
    assert kept[library] == [drafts["per channel"].library[0].name]
    assert len(kept[None]) > 3


def test_results_do_not_depend_on_the_number_of_threads(drafts: dict[str, Any], library: str) -> None:
    model = drafts["several outputs"].proto()
    feeds = arrays(og.parse(ACTIVATIONS["several outputs"][0]), {"x": (1000, 257), "a": (257,)})
    one, three = (session(model, library, threads=n).run(None, feeds) for n in (1, 3))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one, three, strict=True))


# -- swish ----------------------------------------------------------------------------------------------------------

VALUES = [0.0, -0.0, 1.0, -1.0, 40.0, -40.0, 88.0, -88.0, 104.0, -104.0, 300.0, -300.0, 3e4, -3e4, np.inf, -np.inf, NAN]


@pytest.mark.parametrize("alpha", [1.0, 1.702, -0.5, 64.0, 0.015, 0.0, -1e30])
@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_library_swish_of_any_alpha_agrees_with_the_reference(dtype: str, alpha: float, library: str) -> None:
    graph = og.parse(f"graph(x: {dtype}[n]) -> (y)\n y = Swish(x, alpha={alpha})")
    model = drafted(graph, Request(form="function")).proto()
    assert [(n.op_type, len(n.attribute)) for n in model.graph.node] == [("Swish", 1)]
    target = dtypes.get(dtype).numpy
    x = np.concatenate([np.asarray(VALUES), np.random.default_rng(3).normal(size=500) * 20]).astype(target)
    (got,) = ran(session(model, library), {"x": x}, x.shape)
    with np.errstate(all="ignore"):
        want = og.evaluate(graph, x=x)
        rounded = want.astype(target).astype(np.float64)
    mine = got.astype(np.float64)
    same = (mine == rounded) | (np.isnan(mine) & np.isnan(rounded))
    assert (np.signbit(mine) == np.signbit(rounded))[~np.isnan(rounded)].all()
    bound = 0.51 if dtype in ("f16", "bf16") else 3
    with np.errstate(invalid="ignore"):
        unit = np.abs(np.nextafter(rounded.astype(target), target.type(np.inf)).astype(np.float64) - rounded)
        off = np.abs(mine - want) / unit
    assert (off[~same] <= bound).all(), (x[~same][off[~same] > bound], got[~same][off[~same] > bound])


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_swish_accepts_a_broadcast_factor(dtype: str, library: str) -> None:
    graph = og.parse(f"graph(x: {dtype}[n,4,?], f: {dtype}[4,1]) -> (y)\n y = Swish(x, f, alpha=0.5)")
    model = drafted(graph, Request(form="function")).proto()
    feeds = arrays(graph, {"x": (3, 4, 5), "f": (4, 1)})
    (got,) = ran(session(model, library), feeds)
    assert_near(got, outputs(graph, feeds)[0], outputs(graph, feeds, None)[0])


def test_omitted_alpha_of_swish_is_one(library: str) -> None:
    model = drafted(og.parse("graph(x: f32[n]) -> (y)\n y = Swish(x)"), Request(form="function")).proto()
    x = np.linspace(-9, 9, 50, dtype=np.float32)
    said = session(model, library).run(None, {"x": x})[0]
    del model.graph.node[0].attribute[:]
    np.testing.assert_array_equal(session(model, library).run(None, {"x": x})[0], said)


# -- errors ---------------------------------------------------------------------------------------------------------


def test_shapes_that_do_not_broadcast_raise_an_error_at_run_time(drafts: dict[str, Any], library: str) -> None:
    run = session(drafts["anyhow"].proto(), library)
    bad = {"a": np.ones((3, 4), np.float32), "b": np.ones((2, 4), np.float32), "c": np.ones((3, 4), np.float32)}
    with pytest.raises(Exception, match="do not broadcast"):
        run.run(None, bad)
    bad["b"] = np.ones((3, 4), np.float32)
    assert run.run(None, bad)[0].shape == (3, 4)  # and the session still works


def test_library_reports_an_onnxruntime_that_is_too_old(library: str) -> None:
    """Version 1.16 is simulated: it has no table for the version that the library needs."""
    message: list[bytes] = []
    create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(
        lambda code, text: message.append(text) or 1
    )
    table = (ctypes.c_void_p * 8)(ctypes.cast(create, ctypes.c_void_p).value)
    get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(lambda v: ctypes.addressof(table) if v < 17 else None)
    base = (ctypes.c_void_p * 2)(ctypes.cast(get, ctypes.c_void_p).value, None)
    register = ctypes.CDLL(library).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, ctypes.byref(base)) == 1
    assert b"1.17" in message[0]


def test_no_file_is_written_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
    graph = og.parse(ACTIVATIONS["f64"][0])
    with pytest.raises(DeviceError, match="no C\\+\\+ compiler"):
        og.onnx.save(graph, tmp_path / "m.onnx", ort_library=tmp_path / "m.so")
    assert list(tmp_path.iterdir()) == []


def small() -> og.Graph:
    """A graph that is compiled once for all tests that write it."""
    return og.parse(ACTIVATIONS["f64"][0])


def test_failed_library_write_leaves_both_old_files(tmp_path: Path) -> None:
    model, place = tmp_path / "m.onnx", tmp_path / "act.so"
    build.compiled(drafted(small(), Request(library=True)).library)  # the compiler needs disk space
    model.write_bytes(b"old"), place.write_bytes(b"older")
    with room_for(4096), pytest.raises(ModelError, match="library cannot be written: File too large"):
        og.onnx.save(small(), model, ort_library=place)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"m.onnx": b"old", "act.so": b"older"}


def test_failed_library_rename_leaves_the_old_model(tmp_path: Path) -> None:
    model, place = tmp_path / "m.onnx", tmp_path / "act.so"
    model.write_bytes(b"old")
    with Pending(place, "library") as library:
        place.mkdir()  # after all checks
        with pytest.raises(ModelError, match="library cannot be written") as caught:
            write(drafted(small(), Request()), model, library)
    assert caught.value.where == repr(str(place))
    assert model.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["act.so", "m.onnx"]


#: Paths that no library can have, and the error for each.
BAD_PLACES = {
    "folder": "that is a folder",
    "pipe": "that is no file",
    "link to pipe": "that is no file",
    "": "that is a folder",
    "missing/m.so": "there is no folder",
    "m\0.so": "null",
    "m.onnx": "a file of the model",
    "folder/../m.onnx": "a file of the model",
    "link": "a file of the model",
    "m.onnx.data": "a file of the model",
}


def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes compilation fail, so that a refusal that comes too late is another error."""
    monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)


@pytest.mark.parametrize("name", BAD_PLACES)
def test_invalid_library_path_is_refused_before_compiling(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiling(monkeypatch)
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder"), os.mkfifo("pipe"), os.symlink("pipe", "link to pipe"), os.symlink("m.onnx", "link")
    before = sorted(os.listdir())
    with pytest.raises(ModelError, match=BAD_PLACES[name]) as caught:
        og.onnx.save(small(), tmp_path / "m.onnx", ort_library=name)
    assert [line[:8] for line in str(caught.value).splitlines()] == ["the libr", "  where:", "  fix:  "]
    assert sorted(os.listdir()) == before
    if "model" not in BAD_PLACES[name]:  # a library without a model
        with pytest.raises(ModelError, match=BAD_PLACES[name]):
            og.onnx.fuse(to_model(small()), ort_library=name)
        assert sorted(os.listdir()) == before


@pytest.mark.parametrize("name", ["in.onnx", "weights.bin"])
def test_library_may_not_overwrite_files_of_the_source_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiling(monkeypatch)
    graph = og.parse("graph(x: f64[n,2]) -> (y)\n const c: f64[2] = [1.0, 2.0]\n t = Exp(x)\n y = Add(t, c)")
    source = tmp_path / "in.onnx"
    onnx.save(to_model(graph), source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert sorted(before) == ["in.onnx", "weights.bin"]
    with pytest.raises(ModelError, match="a file of the model"):
        og.onnx.fuse(source, tmp_path / "out.onnx", ort_library=tmp_path / name)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_invalid_path_arguments_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiling(monkeypatch)
    with pytest.raises(InvalidArguments, match="a int is no path\n  where: ort_library"):
        og.onnx.save(small(), tmp_path / "m.onnx", ort_library=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArguments, match="a int is no path\n  where: path"):
        og.onnx.save(small(), 3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"model cannot be written: .*null"):
        og.onnx.save(small(), tmp_path / "m\0.onnx", ort_library=tmp_path / "m.so")
    assert list(tmp_path.iterdir()) == []


def test_symlink_to_a_library_stays_and_file_modes_are_right(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, place = tmp_path / "m.so", tmp_path / "there" / "real.so"
    link.symlink_to(place)
    mask = os.umask(0o027)
    try:
        og.onnx.save(small(), tmp_path / "m.onnx", ort_library=link)
        assert link.is_symlink() and place.stat().st_mode & 0o777 == 0o750
        place.chmod(0o700)
        og.onnx.save(small(), tmp_path / "m.onnx", ort_library=link)
        assert link.is_symlink() and place.stat().st_mode & 0o777 == 0o700  # the rights of an old file are kept
    finally:
        os.umask(mask)
    assert place.read_bytes()[:4] == b"\x7fELF"
    assert (tmp_path / "m.onnx").stat().st_mode & 0o111 == 0
    assert [p.name for p in place.parent.iterdir()] == ["real.so"]


def test_library_for_a_model_without_fused_ops_is_refused(tmp_path: Path) -> None:
    graph = og.parse("graph(x: f32[n]) -> (y)\n y = Exp(x)")
    with pytest.raises(InvalidArguments, match="nothing that a library would run"):
        og.onnx.save(graph, tmp_path / "m.onnx", ort_library=tmp_path / "m.so")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("march", ["native -fplugin=x", "@file", ""])
def test_march_must_be_one_word(march: str) -> None:
    with pytest.raises(InvalidArguments, match="no processors"):
        build.compiled(swish_ops(), march)


# -- names ----------------------------------------------------------------------------------------------------------


def test_op_name_depends_on_its_built_in_constants() -> None:
    names = set()
    for number in ("1.5", "2.5"):
        text = f"graph(x: f32[n]) -> (y)\n t = Exp(x)\n y = Add(t, {number})"
        draft = drafted(og.parse(text), Request(library=True))
        names.add(draft.library[0].name)
        assert draft.proto().functions[0].name == draft.library[0].name
        assert len(draft.proto().graph.node[0].input) == 1
    assert len(names) == 2
    wide = drafted(og.parse("graph(x: f64[n]) -> (y)\n t = Exp(x)\n y = Add(t, 1.5)"), Request(library=True))
    assert wide.library[0].name not in names  # a registered op has one signature


def test_library_source_is_deterministic_and_has_no_names_of_the_model() -> None:
    text = "graph(secret: f32[n]) -> (hidden)\n classified = Exp(secret)\n hidden = Add(classified, 1.5)"
    first, second = (library_text(drafted(og.parse(text), Request(library=True)).library).code for _ in range(2))
    assert first == second
    assert not re.search("secret|hidden|classified", first)


def test_lone_f32_swish_is_left_to_onnxruntime(tmp_path: Path) -> None:
    text = "graph(x: f32[n]) -> (y)\n s = Sigmoid(x)\n y = Multiply(x, s)"
    draft = drafted(og.parse(text), Request(library=True))
    assert [n.op_type for n in draft.proto().graph.node] == ["Sigmoid", "Mul"]
    assert draft.library == []
    with pytest.raises(InvalidArguments, match="an f32 SiLU by itself"):
        og.onnx.save(og.parse(text), tmp_path / "m.onnx", ort_library=tmp_path / "m.so")


@pytest.mark.parametrize(
    ("row", "nodes"),
    [
        ("LayerNorm(t, w, v, keep_stats=false)", ["Add", "LayerNormalization"]),
        ("SoftMax(t, axis=-1)", ["Add", "Softmax"]),
    ],
)
def test_row_ops_that_onnxruntime_runs_faster_are_left_to_it(row: str, nodes: list[str]) -> None:
    """These are short rows, and every f32 softmax; `keep` leaves all rows."""
    text = f"graph(x: f32[n,64], w: f32[64], v: f32[64]) -> (y)\n t = Add(x, w)\n y = {row}"
    assert [n.op_type for n in drafted(og.parse(text), Request(library=True)).proto().graph.node] == nodes
    longer = og.parse(text.replace("64", "640"))
    assert len(drafted(longer, Request(library=True)).proto().graph.node) == (2 if "SoftMax" in row else 1)
    kept = drafted(longer, Request(library=True, keep=frozenset({"rows"}))).proto()
    assert [n.op_type for n in kept.graph.node] == nodes


def test_empty_rows_raise_an_error_at_run_time(drafts: dict[str, Any], library: str) -> None:
    run = session(drafts["a number for each row"].proto(), library)
    with pytest.raises(Exception, match="opgraph: a fused node reduces rows without elements"):
        run.run(None, {"x": np.zeros((2, 5, 0), np.float32), "k": np.ones((5, 1), np.float32)})


def test_ops_on_masks_alone_are_left_to_onnxruntime() -> None:
    """Positions are not read from memory; parts of only masks and shapes are left to onnxruntime."""
    text = "graph(x: boolean[n], z: boolean[n]) -> (y)\n t = And(x, z)\n y = Not(t)"
    draft = drafted(og.parse(text), Request(library=True))
    assert [n.op_type for n in draft.proto().graph.node] == ["And", "Not"]


# -- models ---------------------------------------------------------------------------------------------------------

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "onnx-models"
#: A model, and the number of its fused partitions that a library runs.
MODELS = {"gpt2": 3, "llama": 11, "qwen3": 11}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    if not FOLDER.is_dir():
        pytest.skip("the exported models are not beside this checkout")
    found = {n: drafted(og.onnx.load(FOLDER / f"{n}.onnx"), Request(library=True)) for n in MODELS}
    path = tmp_path_factory.mktemp("models") / "models.so"
    path.write_bytes(build.compiled([op for draft in found.values() for op in draft.library]))
    return found, str(path)


@pytest.mark.parametrize("name", MODELS)
def test_exported_models_run_with_and_without_their_library(name: str, exported: tuple[dict[str, Any], str]) -> None:
    drafts, library = exported
    assert drafts[name].summary.units["fused"] == MODELS[name]
    model = drafts[name].proto()
    onnx.checker.check_model(model, full_check=True)
    with np.load(FOLDER / f"{name}_io.npz") as stored:
        x, y = stored["x"], stored["y"]
    for lib in (library, None):
        for level in LEVELS:
            run = session(model, lib, level)
            got = run.run(None, {run.get_inputs()[0].name: x})[0]
            assert np.abs(got - y).max() <= 2e-6 * np.abs(y).max(), (lib, level)


def test_saved_model_with_library_loads_and_fuses_the_same_again(tmp_path: Path) -> None:
    graph = small()
    og.onnx.save(graph, tmp_path / "m.onnx", ort_library=tmp_path / "m.so")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.so"]
    first = onnx.load(tmp_path / "m.onnx")
    x = {"x": np.linspace(-4, 4, 24).reshape(3, 8)}
    with_it, without = session(first, str(tmp_path / "m.so")).run(None, x)[0], session(first, None).run(None, x)[0]
    np.testing.assert_allclose(with_it, without, rtol=1e-14)
    again = og.onnx.load(tmp_path / "m.onnx")
    assert [op.kind for op in again.ops] == [op.kind for op in graph.ops]
    assert drafted(again, Request(library=True)).library[0].name == first.graph.node[0].op_type
