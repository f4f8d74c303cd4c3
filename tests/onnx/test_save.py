"""ONNX export: five forms, round trips, and a stock runtime that agrees at every optimization level."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from disk import room_for

import opgraph as og
from opgraph.errors import InvalidArguments, InvalidGraph, ModelError, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.opdef import OpDef, all_ops
from opgraph.ops import samples

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
ort = pytest.importorskip("onnxruntime")
evaluator = pytest.importorskip("onnx.reference")
pytest.importorskip("onnx.inliner")

from opgraph.onnx.request import Request  # noqa: E402  # needs onnx
from opgraph.onnx.save import drafted, to_model, written  # noqa: E402
from opgraph.onnx.target import target_of  # noqa: E402

helper, T = onnx.helper, onnx.TensorProto
POINTWISE = [r for r in all_ops() if r.is_pointwise]
FORMS = ("decomposed", "function", "standard", "contrib", "auto")
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
#: Half the digits of the type: other formulas for the same function agree to these, other functions do not.
RESOLUTION = {"f64": 2.0**-23, "f32": 2.0**-10, "f16": 2.0**-7, "bf16": 2.0**-4}


def accepted(made: Any) -> Any:
    """The model, after onnx's checker and strict shape inference have accepted it."""
    onnx.checker.check_model(made, full_check=True)
    onnx.shape_inference.infer_shapes(made, strict_mode=True, check_type=True)
    return made


def reference(made: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if any(n.op_type == "Gelu" for f in made.functions for n in f.node):  # it needs types, which functions lack
            made = onnx.shape_inference.infer_shapes(onnx.inliner.inline_local_functions(made))
        return [np.asarray(a) for a in evaluator.ReferenceEvaluator(made).run(None, feeds)]


def session(made: Any, level: str = LEVELS[-1]) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    source = made if isinstance(made, str) else made.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def assert_close(got: np.ndarray, expected: np.ndarray, where: object) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
    dtype = dtypes.of_array(expected.dtype, where="test")
    if not dtype.is_float:
        np.testing.assert_array_equal(got, expected, str(where))
        return
    truth, value = expected.astype(np.float64), got.astype(np.float64)
    error = np.abs(value - truth) / np.maximum(np.abs(truth), 1)
    assert error.max(initial=0) <= RESOLUTION[dtype.name], (where, got, expected)


def graphs_of(record: OpDef) -> list[tuple[og.Graph, dict[str, np.ndarray]]]:
    """The op alone, for every dtype and every way to call it, with example inputs."""
    found = []
    for dtype in samples.dtypes_of(record):
        for ports, attrs in samples.forms(record, dtype):
            arrays = samples.arrays(record, ports, dtype, [(3, 4)] + [(4,)] * (len(ports) - 1))
            graph = og.Graph()
            ins = [
                graph.input(f"x{i}", dtypes.of_array(a.dtype, where="test").name, ("n", 4) if i == 0 else (4,))
                for i, a in enumerate(arrays)
            ]
            try:
                graph.add_op(record.kind, *ins, name="y", dtype="f32" if record.is_cast else None, **attrs)
            except og.errors.InvalidShape:
                continue
            found.append((graph.finalize(), {f"x{i}": a for i, a in enumerate(arrays)}))
    return found


@pytest.mark.parametrize("record", POINTWISE, ids=lambda r: r.kind)
def test_every_op_round_trips_and_agrees_with_the_onnx_evaluator(record: OpDef) -> None:
    for graph, feeds in graphs_of(record):
        where = str(graph)
        form = "function" if record.kind == "Swish" else "decomposed"
        if isinstance(record.onnx, str):
            with pytest.raises(Unimplemented, match=record.kind):
                to_model(graph, form=form)
            continue
        try:
            made = accepted(to_model(graph, form=form))
        except Unimplemented as error:
            assert record.kind in str(error)
            # Only integer types may be missing in ONNX.
            assert graph.inputs[0].dtype in dtypes.INTS, where
            continue
        assert og.onnx.load(made) == graph, where
        if graph.inputs[0].dtype in dtypes.INTS and record.kind in ("Pow", "Divide", "Mod"):
            continue  # ONNX leaves their corner cases open: negative exponents, zero divisors
        assert_close(reference(made, feeds)[0], og.evaluate(graph, feeds, dtype=None), where)


@pytest.mark.parametrize("opset", [13, 14, 15, 18, 20, 22, 24, 26, 28])
@pytest.mark.parametrize(
    "text",
    [
        "graph(x: f32[n,4], y: bf16[4]) -> (z)\n z = Add(x, y)",
        "graph(x: f16[n,4], y: bf16[4]) -> (z)\n z: f16[n,4] = Multiply(x, y)",
        'graph(x: bf16[2,3,4,4], s: bf16[3]) -> (z)\n z = PReLU(x, s, data_format="NCX")',
        'graph(x: f32[2,4], s: f32[2,4]) -> (z)\n z = Add(x, s, auto_broadcast="none")',
        "graph(x: f32[n,4]) -> (z)\n const c: f32[] = 2.0\n a = Pow(x, c)\n z = Pow(a, beta=2.0)",
        "graph(x: f32[n,4], lo: f32[4]) -> (z)\n a = Clamp(x, lo)\n const c: f32[] = 1.0\n b = Clamp(a, c)\n"
        " d = Clamp(b, min=1.0)\n z = Clamp(d, max=2.0)",
        "graph(x: f16[n,4], w: f64[n,4], v: bf16[n,4], u: f32[n,4], f: f32[4]) -> (a, b, c, d, e)\n a = Swish(x)\n"
        " b = Swish(w, alpha=2.0)\n c = Swish(v)\n d = Swish(u, alpha=1.702)\n e = Swish(u, f)",
        "graph(x: bf16[n,4]) -> (z)\n a = Elu(x, alpha=0.5)\n b = Mish(a)\n z = IsInf(b)",
        "graph(x: f32[n,4], y: f32[4]) -> (z, x)\n z = SquaredDifference(x, y)",
        "graph(x: f32[n,4]) -> (z)\n const c: f32[4] = [1.0, 2.0, nan, -0.0]\n z = Maximum(x, c)",
    ],
)
def test_mixed_types_channel_operands_and_constants_round_trip_at_every_opset(text: str, opset: int) -> None:
    graph = og.parse(text)
    made = accepted(to_model(graph, form="function", opset=opset, target="onnxruntime==1.32"))
    assert og.onnx.load(made) == graph
    if "bf16" not in text and opset <= target_of(f"onnxruntime=={ort.__version__}").opset:
        session(made)


# -- forms of Swish -------------------------------------------------------------------------------------------------


def composed_swish(dtype: str, alpha: float) -> og.Graph:
    scale = "" if alpha == 1 else "  a = Multiply(x, c)\n"
    constant = "" if alpha == 1 else f"  const c: {dtype}[] = {alpha}\n"
    inner = "x" if alpha == 1 else "a"
    return og.parse(f"graph(x: {dtype}[n,8]) -> (y)\n{constant}{scale}  s = Sigmoid({inner})\n  y = Multiply(x, s)")


def source_graph(dtype: str, alpha: float) -> og.Graph:
    """The composed swish, as if an exporter had written it."""
    return og.onnx.load(to_model(composed_swish(dtype, alpha), form="decomposed"))


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("dtype", dtypes.FLOATS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_swish_agrees_and_saves_again_unchanged(form: str, dtype: str, alpha: float) -> None:
    graph = source_graph(dtype, alpha)
    made = to_model(graph, form=form)
    onnx.checker.check_model(made, full_check=True)
    again = og.onnx.load(made)
    assert og.onnx.load(to_model(again, form=form)) == again
    if form == "decomposed":
        assert again == graph
    else:
        assert [op.kind for op in again.ops] == ["Swish"]
        assert again.ops[0].attrs["alpha"] == alpha
        assert len(made.graph.node) == 1
        assert all("alpha" not in t.name and t.name != "c" for t in made.graph.initializer)
    target = dtypes.get(dtype).numpy
    feeds = {"x": np.linspace(-20, 20, 64).reshape(8, 8).astype(target)}
    expected = og.evaluate(graph, feeds, dtype=None)
    if form != "contrib":  # onnx's evaluator has only ai.onnx
        onnx.shape_inference.infer_shapes(made, strict_mode=True)
        assert_close(reference(made, feeds)[0], expected, form)
    for level in LEVELS:
        if dtype == "bf16" and form not in ("function", "auto"):
            continue  # no bf16 kernels: this is why auto writes a function that computes in f32
        run = session(made, level)
        if dtype == "bf16":
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(feeds["x"].view(np.uint16), T.BFLOAT16)
            out = np.empty((8, 8), np.uint16)
            binding = run.io_binding()
            binding.bind_ortvalue_input("x", value)
            binding.bind_output("y", "cpu", 0, T.BFLOAT16, out.shape, out.ctypes.data)
            run.run_with_iobinding(binding)
            got = out.view(ml_dtypes.bfloat16)
        else:
            got = run.run(None, feeds)[0]
        assert_close(got, expected, (form, level))


def test_function_body_of_swish_depends_on_dtype() -> None:
    ops = {
        d: [n.op_type for n in to_model(source_graph(d, 1.5), form="function").functions[0].node] for d in dtypes.FLOATS
    }
    assert ops["f32"] == ["Constant", "CastLike", "Mul", "Sigmoid", "Mul"]
    assert ops["f16"] == ops["bf16"] == ["Cast", "Constant", "Mul", "Sigmoid", "Mul", "CastLike"]
    assert "Exp" in ops["f64"]
    assert "Sigmoid" not in ops["f64"]


def test_onnxruntime_fuses_the_f32_swish_function_into_one_kernel(tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    made = to_model(source_graph("f32", 1.5))
    ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node] == ["QuickGelu"]


def test_auto_form_keeps_quick_gelu_and_contrib_form_writes_its_alpha() -> None:
    graph = og.onnx.load(to_model(source_graph("f32", 1.0), form="contrib"))
    assert to_model(graph).graph.node[0].op_type == "QuickGelu"
    assert to_model(graph, form="contrib").graph.node[0].attribute[0].f == 1.0


def test_swish_look_alikes_are_not_fused() -> None:
    text = "graph(x: f32[n,8], z: f32[n,8]) -> (y)\n  s = Sigmoid(z)\n  y = Multiply(x, s)"
    made = to_model(og.onnx.load(to_model(og.parse(text))), form="function")
    assert [n.op_type for n in made.graph.node] == ["Sigmoid", "Mul"]


def test_sigmoid_with_another_reader_stays() -> None:
    text = "graph(x: f32[n,8]) -> (y, s)\n  s = Sigmoid(x)\n  y = Multiply(x, s)"
    made = accepted(to_model(og.onnx.load(to_model(og.parse(text))), form="function"))
    assert [n.op_type for n in made.graph.node] == ["Sigmoid", "Swish"]


def test_two_dtypes_in_one_model_get_overloads_and_ir_10() -> None:
    text = "graph(x: f32[n], w: f64[n]) -> (y, z)\n  y = Swish(x)\n  z = Swish(w)"
    made = accepted(to_model(og.parse(text)))
    assert sorted(f.overload for f in made.functions) == ["", "f64"]
    assert made.ir_version >= 10
    session(made)


# -- preserved content ----------------------------------------------------------------------------------------------


def exported(folder: Path, opset: int = 20) -> Path:
    """A model as an exporter writes it: metadata everywhere, symbolic shapes, weights in a data file."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="linear"),
        helper.make_node("Sigmoid", ["h"], ["s"], name="act/sigmoid"),
        helper.make_node("Mul", ["h", "s"], ["a"], name="act/mul", doc_string="silu"),
        helper.make_node("Reshape", ["a", "shape"], ["y"], name="reshape"),
    ]
    for node in nodes:
        node.metadata_props.add(key="source", value=node.name)
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", T.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", T.FLOAT, ["2*batch", 32])],
        [
            onnx.numpy_helper.from_array(rng.normal(size=(64, 64)).astype(np.float32), "w"),
            onnx.numpy_helper.from_array(np.int64([-1, 32]), "shape"),
            onnx.numpy_helper.from_array(np.float32([1, 2]), "unused"),
        ],
        doc_string="a graph",
        value_info=[helper.make_tensor_value_info(n, T.FLOAT, ["batch", 64]) for n in "hsa"],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("my", 3)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=8, producer_name="me", doc_string="a model")
    made.metadata_props.add(key="license", value="free")
    folder.mkdir(exist_ok=True)
    onnx.save(made, folder / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=1000)
    return folder / "m.onnx"


@pytest.mark.parametrize("form", FORMS)
def test_names_metadata_initializers_opsets_and_symbols_are_kept(tmp_path: Path, form: str) -> None:
    path = exported(tmp_path)
    before = onnx.load(path, load_external_data=False)
    summary = written(og.onnx.load(path), tmp_path / "out.onnx", Request(form=form))
    after = onnx.load(tmp_path / "out.onnx", load_external_data=False)
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    for name in ("producer_name", "doc_string", "metadata_props"):
        assert getattr(after, name) == getattr(before, name)
    assert (after.graph.name, after.graph.doc_string) == ("main", "a graph")
    assert (list(after.graph.input), list(after.graph.output)) == (list(before.graph.input), list(before.graph.output))
    kept = {o.domain: o.version for o in after.opset_import}
    assert kept["my"] == 3
    assert kept[""] == (24 if form == "standard" else 20)
    assert {t.name: t for t in after.graph.initializer} == {t.name: t for t in before.graph.initializer}
    assert os.listdir(tmp_path).count("m.bin") == 1
    assert not (tmp_path / "out.onnx.data").exists()  # in the same folder the data file is reused
    names = [n.name for n in after.graph.node]
    assert names == (
        ["linear", "act/sigmoid", "act/mul", "reshape"] if form == "decomposed" else ["linear", "act/mul", "reshape"]
    )
    swish = next(n for n in after.graph.node if n.name == "act/mul")
    assert swish.doc_string == "silu"
    assert [(p.key, p.value) for p in swish.metadata_props] == [("source", "act/mul")]
    assert {v.name for v in after.graph.value_info} == ({"h", "s", "a"} if form == "decomposed" else {"h", "a"})
    assert summary.nodes_before == 4
    assert summary.nodes_after == len(after.graph.node)


def test_model_saved_to_another_folder_gets_its_own_data_file(tmp_path: Path) -> None:
    path, other = exported(tmp_path / "a"), tmp_path / "b"
    other.mkdir()
    og.onnx.save(og.onnx.load(path), other / "out.onnx")
    assert sorted(os.listdir(other)) == ["out.onnx", "out.onnx.data"]
    x = {"x": np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)}
    got, expected = session(str(other / "out.onnx")).run(None, x)[0], session(str(path)).run(None, x)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert (
        og.onnx.load(other / "out.onnx").constants[0].data.tobytes() == og.onnx.load(path).constants[0].data.tobytes()
    )


def test_saving_over_the_source_keeps_its_data(tmp_path: Path) -> None:
    path = exported(tmp_path)
    weights = og.onnx.load(path).constants[0].data.copy()
    og.onnx.save(og.onnx.load(path), path)
    assert sorted(os.listdir(tmp_path)) == ["m.bin", "m.onnx"]
    np.testing.assert_array_equal(og.onnx.load(path).constants[0].data, weights)


def test_dead_nodes_and_unused_initializers_are_kept(tmp_path: Path) -> None:
    made = onnx.load(exported(tmp_path))
    made.graph.node.append(helper.make_node("Relu", ["x"], ["dead"], name="dead"))
    after = to_model(og.onnx.load(made))
    assert "dead" in [n.name for n in after.graph.node]
    assert "unused" in [t.name for t in after.graph.initializer]


def test_fused_partitions_become_functions_on_request() -> None:
    text = (
        "graph(x: f32[n,8], w: f32[8,8]) -> (y)\n  a = Add(x, 1.0)\n  b = Tanh(a)\n  c: f32[n,8] = Wildcard(b, w, "
        'onnx_op="MatMul", onnx_domain="", onnx_opset=20)\n  d = Exp(c)\n  y = Subtract(d, b)'
    )
    composed = og.parse(text)
    graph = og.onnx.load(to_model(composed))
    made = accepted(to_model(graph, functions=True))
    assert to_model(composed, functions=True).graph.node == made.graph.node
    assert [n.domain for n in made.graph.node] == ["opgraph", "", "opgraph"]
    assert og.onnx.load(made) == graph
    feeds = {n: np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) for n in "xw"}
    for level in LEVELS:
        np.testing.assert_allclose(session(made, level).run(None, feeds)[0], reference(made, feeds)[0], rtol=1e-4)


def test_input_that_a_function_no_longer_reads_keeps_its_default() -> None:
    """A CastLike inside a function is a Cast, without its second operand."""
    nodes = [helper.make_node("Mul", ["x", "x"], ["a"]), helper.make_node("CastLike", ["a", "like"], ["y"])]
    ports = [helper.make_tensor_value_info(n, T.FLOAT, s) for n, s in (("x", [3]), ("like", []), ("y", [3]))]
    like = onnx.numpy_helper.from_array(np.float32(1), "like")
    graph = helper.make_graph(nodes, "g", ports[:2], ports[2:], [like])
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made = accepted(to_model(og.onnx.load(source), functions=True))
    assert [n.domain for n in made.graph.node] == ["opgraph"]
    assert made.graph.initializer == source.graph.initializer
    assert session(made).run(None, {"x": np.float32([1, 2, 3])})[0].tolist() == [1, 4, 9]


@pytest.mark.parametrize("lone", [False, True])
def test_f16_unit_inside_a_function_runs_in_onnxruntime(lone: bool) -> None:
    """onnxruntime finds no overload from inside a function, so the unit is decomposed instead."""
    text = (
        "graph(x: f16[n,4], k: f16[4]) -> (y, z{0})\n t = Multiply(x, k)\n s = Sigmoid(t)\n y = Multiply(x, s)\n"
        " u = Tanh(t)\n z = Add(u, s){1}"
    )
    tail = '\n m: f16[n,4] = Wildcard(z, onnx_op="Relu", onnx_domain="", onnx_opset=22)'
    tail += "\n h = Sigmoid(m)\n v = Multiply(m, h)"
    written = to_model(og.parse(text.format(", v", tail) if lone else text.format("", "")), form="decomposed")
    graph = og.onnx.load(written)
    made = accepted(to_model(graph, functions=True))
    assert not any(n.overload for f in made.functions for n in f.node)
    x, k = np.linspace(-4, 4, 24, dtype=np.float16).reshape(6, 4), np.float16([1, -2, 0.5, 3])
    got = dict(zip([o.name for o in made.graph.output], session(made).run(None, {"x": x, "k": k}), strict=True))
    for name, wanted in og.evaluate(graph, x=x, k=k).items():
        np.testing.assert_allclose(got[name], wanted, rtol=2**-9, atol=2**-10)
    again = to_model(og.onnx.load(made), functions=True)
    assert [n.domain for n in again.graph.node] == [n.domain for n in made.graph.node]


def test_parsed_text_of_an_imported_graph_saves_like_the_graph(tmp_path: Path) -> None:
    graph = og.onnx.load(exported(tmp_path))
    parsed = og.parse(str(graph), constants={t.name: t.data for t in graph.constants if t.data.size > 64})
    assert parsed.source is None
    made = accepted(to_model(parsed, form="decomposed"))
    assert og.onnx.load(made) == graph


def test_fuse_returns_the_kind_of_model_it_was_given(tmp_path: Path) -> None:
    path = exported(tmp_path)
    assert og.onnx.fuse(str(path)) == str(tmp_path / "m.fused.onnx")
    assert og.onnx.fuse(path, tmp_path / "o.onnx") == tmp_path / "o.onnx"
    proto = og.onnx.fuse(onnx.load(path))
    model = og.onnx.fuse(ir.load(path))
    assert isinstance(proto, onnx.ModelProto)
    assert isinstance(model, ir.Model)
    expected = og.onnx.load(tmp_path / "o.onnx")
    for fused in (proto, model, tmp_path / "m.fused.onnx"):
        assert og.onnx.load(fused) == expected
    assert isinstance(model.graph.initializers["w"].const_value, ir.ExternalTensor)
    assert [op.kind for op in expected.ops] == ["Wildcard", "Swish", "Wildcard"]


# -- targets --------------------------------------------------------------------------------------------------------


def test_opset_and_ir_version_stay_within_limits_of_the_target() -> None:
    made = to_model(source_graph("f32", 1.0), form="decomposed")
    made.ir_version = onnx.IR_VERSION
    lowered = to_model(og.onnx.load(made), target="onnxruntime==1.31")
    assert lowered.ir_version <= 13
    made.ir_version = 8
    assert to_model(og.onnx.load(made), form="decomposed", target="onnxruntime==1.23").ir_version == 8
    made.opset_import[0].version = 26
    assert to_model(og.onnx.load(made), target="onnxruntime==1.23").opset_import[0].version == 23
    with pytest.raises(Unimplemented, match=r"1\.23 reads opsets up to 23"):
        to_model(og.onnx.load(made), target="onnxruntime==1.23", opset=26)
    with pytest.raises(Unimplemented, match="Swish"):
        to_model(og.onnx.load(made), form="standard", opset=26)
    with pytest.raises(Unimplemented, match="functions need"):
        to_model(og.parse("graph(x: f32[n], w: f64[n]) -> (y, z)\n y = Swish(x)\n z = Swish(w)"),
                 target="onnxruntime==1.16", opset=19)  # fmt: skip


@pytest.mark.parametrize("size", [100, 3000, 100_000])
def test_save_to_a_full_disk_leaves_no_files(size: int, tmp_path: Path) -> None:
    graph = og.Graph()
    graph.add_op("Add", graph.input("x", "f32", (size,)), graph.constant("c", np.ones(size, np.float32)))
    with room_for(64), pytest.raises(ModelError, match="File too large"):
        og.onnx.save(graph, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def one_node(op: str, opset: int, ir_version: int) -> Any:
    ports = [helper.make_tensor_value_info(n, T.FLOAT, [4]) for n in ("x", "z", "y")]
    inputs = ["x", "z"] if op == "SwiGLU" else ["x"]
    graph = helper.make_graph([helper.make_node(op, inputs, ["y"])], "g", ports[: len(inputs)], ports[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def test_target_table_states_limits_of_the_installed_onnxruntime() -> None:
    target = target_of(f"onnxruntime=={ort.__version__}")
    newest = (target.opset, target.ir_version)
    session(one_node("Sigmoid", *newest))
    session(one_node("Swish", target.runs_swish_until, 10))
    if target.version > target_of("onnxruntime").version:
        pytest.skip(f"onnxruntime {ort.__version__} is newer than the table")
    refused = [("Sigmoid", newest[0] + 1, newest[1]), ("Sigmoid", newest[0], newest[1] + 1), ("SwiGLU", 28, newest[1]),
               ("Swish", target.runs_swish_until + 1, 10)]  # fmt: skip
    for op, opset, ir_version in refused:
        with pytest.raises(Exception, match=r"opset|IR version|Swish"):
            session(one_node(op, opset, ir_version))


def test_node_is_refused_for_an_old_target_and_kept_for_a_newer_one() -> None:
    graph = og.onnx.load(one_node("SwiGLU", 28, 14))
    with pytest.raises(Unimplemented, match=r"SwiGLU would change on the way to 26[^§]*onnxruntime==1\.32"):
        to_model(graph, keep=["swiglu"], target="onnxruntime==1.31")
    kept = to_model(graph, keep=["swiglu"], target="onnxruntime==1.32")
    assert [n.op_type for n in kept.graph.node] == ["SwiGLU"]


def test_standard_form_moves_to_opset_24_only_if_no_node_changes() -> None:
    graph = source_graph("f32", 1.0)
    assert to_model(graph, form="standard").opset_import[0].version == 24
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["m"]),
             helper.make_node("ReduceMax", ["m"], ["y"], axes=[1], keepdims=1)]  # fmt: skip
    value = [helper.make_tensor_value_info(n, T.FLOAT, ["n", s]) for n, s in (("x", 4), ("y", 1))]
    made = helper.make_model(helper.make_graph(nodes, "g", value[:1], value[1:]),
                             opset_imports=[helper.make_opsetid("", 17)], ir_version=8)  # fmt: skip
    with pytest.raises(Unimplemented, match="ReduceMax"):
        to_model(og.onnx.load(made), form="standard")


@pytest.mark.parametrize(
    "arguments",
    [
        *({"form": form} for form in ("best", None, 3, [])),
        *(
            {"target": target}
            for target in ("tensorrt", "onnxruntime==1.2", "onnxruntime==9.9", "onnxruntime==1.99", 3)
        ),
        *({"opset": opset} for opset in (9, 0, -1, "zzz", "22", 22.0, True, [])),
        *({"keep": keep} for keep in ("gelu", ["gleu"], [3], 3, None)),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises((InvalidArguments, Unimplemented), match="fix:"):
        to_model(og.parse("graph(x: f32[n]) -> (y)\n y = ReLU(x)"), **arguments)


@pytest.mark.parametrize("weights", [3, ["c"], "c", {"d": 1}, {3: 1}])
def test_weights_other_than_a_dict_by_name_are_refused(weights: Any, tmp_path: Path) -> None:
    graph = og.parse("graph(x: f32[n]) -> (y)\n const c: f32[] = 2.0\n y = Add(x, c)")
    with pytest.raises(InvalidArguments, match="weights"):
        og.onnx.save(graph, tmp_path / "m.onnx", weights=weights)
    assert not list(tmp_path.iterdir())


def test_target_newer_than_the_table_is_noted() -> None:
    graph = og.parse("graph(x: f32[n]) -> (y)\n y = ReLU(x)")
    newest = target_of("onnxruntime").version
    for target, notes in ((f"onnxruntime==1.{newest[1]}", 0), (f"onnxruntime==1.{newest[1] + 1}", 1)):
        summary = drafted(graph, Request(target=target)).summary
        assert sum("newer than all that was measured" in note for note in summary.notes) == notes


def test_graphs_without_an_onnx_form_are_refused() -> None:
    cases = {
        "gamma family": "graph(x: f32[n]) -> (y)\n y = Lgamma(x)",
        "BitShift": 'graph(x: s32[n]) -> (y)\n y = BitShift(x, x, direction="LEFT")',
        "number of dimensions": "graph(x: f32[*]) -> (y)\n y = ReLU(x)",
        "carries no ONNX node": "graph(x: f32[n]) -> (y)\n y: f32[n] = Wildcard(x)",
    }
    for word, text in cases.items():
        with pytest.raises(Unimplemented, match=word):
            to_model(og.parse(text))
    graph = og.Graph()
    graph.add_op("ReLU", graph.input("x", shape=(2,)), name="x")
    with pytest.raises(InvalidGraph, match="both called"):
        to_model(graph)


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["replace", "fsync", "second replace", "link"])
def test_failed_save_leaves_existing_files_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path, folder = exported(tmp_path / "a"), tmp_path / "b"
    folder.mkdir()
    graph = og.onnx.load(path)
    og.onnx.save(graph, folder / "out.onnx", form="decomposed")
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    calls = itertools.count(1)
    real = os.replace

    def fail(*arguments: Any) -> None:
        if failing == "second replace" and next(calls) != 2:
            return real(*arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing.split()[-1], fail)
    with pytest.raises(ModelError, match=r"No space left on device[\s\S]*fix:"):
        og.onnx.save(graph, folder / "out.onnx")
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before


def test_failed_first_save_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = og.onnx.load(exported(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    calls = itertools.count(1)
    real = os.replace

    def fail(*arguments: Any) -> None:
        if next(calls) == 2:
            raise OSError(5, "Input/output error")
        real(*arguments)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ModelError):
        og.onnx.save(graph, tmp_path / "b" / "out.onnx")
    assert os.listdir(tmp_path / "b") == []


def test_unwritable_paths_are_refused(tmp_path: Path) -> None:
    graph = og.parse("graph(x: f32[n]) -> (y)\n y = ReLU(x)")
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "none" / "m.onnx", tmp_path / "file" / "m.onnx", str(tmp_path) + "/a\0b"):
        with pytest.raises(ModelError, match="fix:"):
            og.onnx.save(graph, path)
    assert os.listdir(tmp_path) == ["file"]


def test_saved_file_has_the_default_file_mode(tmp_path: Path) -> None:
    og.onnx.save(og.parse("graph(x: f32[n]) -> (y)\n y = ReLU(x)"), tmp_path / "m.onnx")
    (tmp_path / "other").write_text("")
    assert (tmp_path / "m.onnx").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_large_weights_of_a_composed_graph_go_to_a_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraph.onnx.write._INLINE_BYTES", 10_000)
    graph = og.Graph()
    x = graph.input("x", shape=(64, 64))
    big = graph.constant("big", np.arange(4096, dtype=np.float32).reshape(64, 64))
    graph.add_op("Add", graph.add_op("Add", x, big), graph.constant("small", np.ones(64, np.float32)), name="y")
    og.onnx.save(graph, tmp_path / "m.onnx")
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    assert og.onnx.load(tmp_path / "m.onnx") == graph
    session(str(tmp_path / "m.onnx"))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("kind", "attrs"), [("Celu", {"alpha": -1.5}), ("Squeeze", {"axes": []})])
def test_ops_that_onnxruntime_computes_wrongly_are_written_differently(
    kind: str, attrs: dict[str, Any], dtype: str
) -> None:
    graph = og.Graph()
    graph.add_op(kind, graph.input("x", dtype, (1, 4)), name="y", **attrs)
    x = np.array([[-2, -1, 1, 2]], dtypes.get(dtype).numpy)
    (got,) = session(to_model(graph)).run(None, {"x": x})
    expected = og.evaluate(graph, x=x)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=RESOLUTION[dtype])


def test_reshape_to_an_array_of_another_dtype_runs_in_onnxruntime() -> None:
    graph = og.parse("graph(x: f32[2,3], like: f16[3,2]) -> (y)\n  y = ReshapeTo(x, like)")
    made = accepted(to_model(graph, form="function"))
    x, like = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((3, 2), np.float16)
    session = ort.InferenceSession(made.SerializeToString())
    (y,) = session.run(None, {"x": x, "like": like})
    np.testing.assert_array_equal(y, x.reshape(3, 2))
