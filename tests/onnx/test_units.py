"""Named units in ONNX export: found in every spelling, and written as onnxruntime's fastest op, or kept."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opgraph as og
from opgraph.ir import dtypes
from opgraph.partition.rules import NORMS, find_units

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from opgraph.onnx.request import Request  # noqa: E402  # needs onnx
from opgraph.onnx.save import drafted, to_model  # noqa: E402

helper, T = onnx.helper, onnx.TensorProto
ELEMENT = {"f32": T.FLOAT, "f16": T.FLOAT16, "f64": T.DOUBLE, "bf16": T.BFLOAT16}
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")

RMS = ["p=Pow x two", "m=ReduceMean p ax", "v=Add m eps", "s=Sqrt v", "r=Reciprocal s", "n=Mul x r", "y=Mul w n"]
OPS_OF_RMS = [line.split("=")[1].split()[0] for line in RMS]
LAYER = [
    "m=ReduceMean x ax", "d=Sub x m", "p=Mul d d", "q=ReduceMean p ax", "v=Add q eps", "s=Sqrt v", "n=Div d s",
    "t=Mul n w", "y=Add t b",
]  # fmt: skip
ERF = ["a=Div x sqrt2", "e=Erf a", "o=Add e one", "h=Mul x half", "y=Mul h o"]
ERF_SUM = ["a=Mul x sqrth", "e=Erf a", "h=Mul x half", "g=Mul h e", "y=Add h g"]
TANH = [
    "c=Pow x three",
    "k=Mul c cubic",
    "i=Add x k",
    "j=Mul i root",
    "t=Tanh j",
    "o=Add t one",
    "h=Mul x half",
    "y=Mul h o",
]
MISH = ["s=Softplus x", "t=Tanh s", "y=Mul x t"]
HARD = ["a=Add x three", "c=Clip a zero six", "m=Mul x c", "y=Div m six"]
SIGMOID = ["n=Neg x", "e=Exp n", "o=Add one e", "y=Div one o"]
SOFT = ["e=Exp x", "o=Add e one", "y=Log o"]
GATED = ["s=Sigmoid x", "g=Mul x s", "y=Mul g z"]

#: name, spelling, dtype, opset -> op types of the main graph, with "domain::" before those of other domains.
CASES = [
    ("gelu", ERF, "f32", 20, ["Gelu"]),
    ("gelu", ERF_SUM, "f32", 20, ["Gelu"]),
    ("gelu", TANH, "f32", 20, ["Gelu"]),
    ("gelu", ERF_SUM, "f32", 18, ["com.microsoft::Gelu"]),
    ("gelu", TANH, "f32", 18, ["com.microsoft::FastGelu"]),
    ("gelu", TANH, "f16", 20, ["opgraph::GELU"]),
    ("gelu", ERF, "bf16", 20, ["opgraph::GELU"]),
    ("gelu", TANH, "f64", 20, [s.split("=")[1].split()[0] for s in TANH]),
    ("mish", MISH, "f32", 18, ["opgraph::Mish"]),
    ("mish", MISH, "f16", 18, ["opgraph::Mish"]),
    ("mish", ["y=Mish x"], "f32", 18, ["opgraph::Mish"]),
    ("hardswish", HARD, "f32", 18, ["HardSwish"]),
    ("hardswish", HARD, "f16", 18, ["opgraph::HardSwish"]),
    ("sigmoid", SIGMOID, "f32", 18, ["Sigmoid"]),
    ("softplus", SOFT, "f32", 18, ["Exp", "Add", "Log"]),
    ("swish", GATED, "f32", 18, ["opgraph::Swish", "Mul"]),
    ("rms_norm", RMS, "f32", 18, ["opgraph::RMSNorm"]),
    ("rms_norm", RMS, "f32", 17, ["opgraph::RMSNorm"]),
    ("rms_norm", RMS, "f32", 23, ["RMSNormalization"]),
    ("rms_norm", RMS, "bf16", 23, ["opgraph::RMSNorm"]),
    ("rms_norm", RMS, "f64", 23, OPS_OF_RMS),
    ("rms_norm", ["x:f32", *RMS[:-1], "n:same", "y=Mul w n_"], "f16", 23, ["RMSNormalization"]),
    ("rms_norm", ["x:f32", *RMS[:-1], "n:same", "y=Mul w n_"], "f16", 18, ["opgraph::RMSNorm"]),
    ("rms_norm", ["x:f64", *RMS[:-1], "n:same", "y=Mul w n_"], "f32", 18, ["Cast", *OPS_OF_RMS[:-1], "Cast", "Mul"]),
    ("rms_norm", [*RMS[:-2], "y=Mul x r"], "f32", 18, ["opgraph::RMSNorm"]),
    ("rms_norm", [*RMS[:-3], "y=Div x s"], "f32", 23, ["RMSNormalization"]),
    ("rms_norm", [*RMS[:-1], "y=Mul n z"], "f32", 18, ["opgraph::RMSNorm", "Mul"]),
    ("rms_norm", ["x:f32", *RMS[:-1], "n:same", "y=Mul n_ z"], "f16", 23, ["RMSNormalization", "Mul"]),
    ("layer_norm", LAYER, "f32", 17, ["LayerNormalization"]),
    ("layer_norm", LAYER, "f16", 18, ["LayerNormalization"]),
    ("layer_norm", LAYER, "f32", 16, [s.split("=")[1].split()[0] for s in LAYER]),
]  # fmt: skip
IDS = [f"{name}-{dtype}-{opset}-{len(lines)}" for name, lines, dtype, opset, _ in CASES]


def model_of(lines: list[str], dtype: str, opset: int) -> Any:
    """A model of one line per node: `y=Mul x z`; `x:f32` casts x to the x of the next lines, `n:same` back to n_."""
    numbers = {
        "two": 2.0, "three": 3.0, "six": 6.0, "zero": 0.0, "one": 1.0, "half": 0.5, "eps": 1e-3, "sqrt2": 2**0.5,
        "sqrth": 0.5**0.5, "cubic": 0.044715, "root": (2 / np.pi) ** 0.5,
    }  # fmt: skip
    nodes, weights, work, renamed = [], {}, dtype, {}
    rng = np.random.default_rng(5)
    for line in lines:
        if ":" in line:
            name, target = line.split(":")
            work = target if target != "same" else dtype
            made = f"{name}_"
            nodes.append(helper.make_node("Cast", [name], [made], to=ELEMENT[work], name=f"node{len(nodes)}"))
            renamed = {name: made} if target != "same" else {}
            continue
        made, call = line.split("=")
        op, *inputs = call.split()
        inputs = [renamed.get(n, n) for n in inputs]
        attributes: dict[str, Any] = {"keepdims": 1} if op == "ReduceMean" else {}
        if op == "ReduceMean" and opset < 18:
            inputs, attributes = inputs[:1], {**attributes, "axes": [-1]}
        for name in inputs:
            if name in numbers:
                weights[name] = np.asarray(numbers[name]).astype(dtypes.get(work).numpy)
            if name in ("w", "b"):
                weights[name] = rng.uniform(0.5, 1.5, 32).astype(dtypes.get(work).numpy)
            if name == "ax":
                weights[name] = np.int64([-1])
        nodes.append(helper.make_node(op, inputs, [made], name=f"node{len(nodes)}", **attributes))
    made_by_ir = [onnx.helper.make_tensor(n, ELEMENT.get(dtypes.of_array(a.dtype, where="t").name, T.INT64), a.shape,
                                          a.tobytes(), raw=True) for n, a in weights.items()]  # fmt: skip
    inputs = ["x", *(["z"] if any(line.endswith(" z") for line in lines) else [])]
    ports = [helper.make_tensor_value_info(n, ELEMENT[dtype], ["n", 32]) for n in inputs]
    result = [helper.make_tensor_value_info("y", ELEMENT[dtype], ["n", 32])]
    graph = helper.make_graph(nodes, "g", ports, result, made_by_ir)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def types(model: Any) -> list[str]:
    return [f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in model.graph.node]


def ran(model: Any, feeds: dict[str, np.ndarray], level: str = LEVELS[-1]) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    run = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    if feeds["x"].dtype != ml_dtypes.bfloat16:
        return np.asarray(run.run(None, feeds)[0])
    binding, out = run.io_binding(), np.empty(feeds["x"].shape, np.uint16)
    bits = {n: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(a.view(np.uint16), T.BFLOAT16) for n, a in feeds.items()}
    for name, value in bits.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y", "cpu", 0, T.BFLOAT16, out.shape, out.ctypes.data)
    run.run_with_iobinding(binding)
    return out.view(ml_dtypes.bfloat16)


@pytest.mark.parametrize(("name", "lines", "dtype", "opset", "expected"), CASES, ids=IDS)
def test_each_unit_is_written_as_the_fastest_form_in_onnxruntime(
    name: str, lines: list[str], dtype: str, opset: int, expected: list[str]
) -> None:
    source = model_of(lines, dtype, opset)
    graph = og.onnx.load(source)
    draft = drafted(graph, Request())
    made = draft.proto()
    onnx.checker.check_model(made, full_check=True)
    assert types(made) == expected
    changed = expected != [n.op_type for n in source.graph.node]
    assert draft.summary.units.get(name, 0) == (1 if changed else 0)
    if changed:
        last = made.graph.node[-1 if name != "swish" else 0]
        assert last.name == (source.graph.node[-1] if name != "swish" else source.graph.node[1]).name
    again = og.onnx.load(made)
    assert types(to_model(again)) == expected
    rng = np.random.default_rng(1)
    kind = dtypes.get(dtype).numpy
    feeds = {i.name: (rng.normal(size=(7, 32)) * 3).astype(kind) for i in source.graph.input if i.name in "xz"}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        truth = np.asarray(og.evaluate(graph, feeds), np.float64)
    unit = np.abs(truth).max() * float(ml_dtypes.finfo(kind).eps)
    bound = 4 * unit  # relative to the largest value: both are formulas with a few roundings
    if dtype != "bf16":
        bound = max(bound, 2 * np.abs(ran(source, feeds).astype(np.float64) - truth).max())
    for level in LEVELS:
        got = ran(made, feeds, level)
        assert np.abs(got.astype(np.float64) - truth).max() <= bound, level


def test_keep_leaves_the_named_unit_unfused() -> None:
    graph = og.onnx.load(model_of(ERF, "f32", 20))
    assert types(to_model(graph, keep=["gelu"])) == ["Div", "Erf", "Add", "Mul", "Mul"]
    graph = og.onnx.load(model_of(RMS, "f32", 18))
    assert len(to_model(graph, keep=["rms_norm"]).graph.node) == 7


@pytest.mark.parametrize("form", ["standard", "contrib", "decomposed"])
def test_each_form_writes_gelu_with_its_own_op(form: str) -> None:
    made = to_model(og.onnx.load(model_of(TANH, "f32", 20)), form=form)
    expected = {"standard": ["Gelu"], "contrib": ["com.microsoft::FastGelu"]}
    assert types(made) == expected.get(form, [line.split("=")[1].split()[0] for line in TANH])
    if form != "decomposed":
        assert [u.name for u in find_units(og.onnx.load(made))] == ["gelu"]


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("m=ReduceMean p ax", [line.split("=")[1].split()[0] for line in RMS]),
        ("y=Mul w n", ["opgraph::RMSNorm", "Mul"]),
    ],
)
def test_rms_norm_needs_the_last_axis_and_leaves_out_other_weights(line: str, written: list[str]) -> None:
    source = model_of(RMS, "f32", 18)
    for tensor in source.graph.initializer:
        if tensor.name == "ax" and "ax" in line:
            tensor.raw_data = np.int64([0]).tobytes()
        if tensor.name == "w" and "w" in line:
            del tensor.dims[:]
            tensor.dims.extend([32, 1])
            source.graph.output[0].type.tensor_type.shape.dim[0].ClearField("dim_param")
    assert types(to_model(og.onnx.load(source))) == written


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrowing_casts_around_a_norm_stay(dtype: str) -> None:
    made = to_model(og.onnx.load(model_of([f"x:{dtype}", *RMS[:-1], "n:same", "y=Mul w n_"], "f32", 18)))
    assert types(made) == ["Cast", "opgraph::RMSNorm", "Cast", "Mul"]
    out = ran(made, {"x": np.full((1, 32), 70000, np.float32)})
    assert np.isnan(out).all() == (dtype == "f16")  # 70000 is infinite there


def test_norms_without_weight_share_a_ones_constant_and_need_a_known_size() -> None:
    twice = [*RMS[:-2], "h=Mul x r", *(line.replace("x", "h").replace("=", "2=") for line in RMS[:1])]
    source = model_of([*twice, "m2=ReduceMean p2 ax", "v2=Add m2 eps", "s2=Sqrt v2", "y=Div h s2"], "f32", 18)
    made = to_model(og.onnx.load(source))
    assert types(made) == ["opgraph::RMSNorm"] * 2
    assert [(t.name, list(t.dims)) for t in made.graph.initializer] == [("ones_f32_32", [32])]
    for port in (*source.graph.input, *source.graph.output):
        port.type.tensor_type.shape.dim[1].dim_param = "wide"
    assert "opgraph::RMSNorm" not in types(to_model(og.onnx.load(source)))


def test_inner_values_of_a_norm_with_other_readers_stay() -> None:
    source = model_of(RMS, "f32", 18)
    source.graph.output.append(helper.make_tensor_value_info("s", T.FLOAT, ["n", 1]))
    made = to_model(og.onnx.load(source))
    assert types(made) == ["Pow", "ReduceMean", "Add", "Sqrt", "opgraph::RMSNorm"]


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("lines", [RMS, LAYER], ids=["rms", "layer"])
def test_norm_whose_unweighted_result_is_an_output_is_computed_once(lines: list[str], opset: int) -> None:
    source = model_of(lines, "f32", opset)
    source.graph.output.append(helper.make_tensor_value_info("n", T.FLOAT, ["n", 32]))
    made = to_model(og.onnx.load(source))
    norm = "RMSNormalization" if opset == 23 else "opgraph::RMSNorm"
    assert types(made) == ([norm, "Mul"] if lines is RMS else types(source))
    assert to_model(og.onnx.load(made)) == made
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)}
    np.testing.assert_allclose(ran(made, feeds), ran(source, feeds), rtol=1e-4, atol=1e-5)


def test_opset_raised_for_one_unit_applies_to_all_units() -> None:
    source = model_of([*GATED[:-1], "n=Erf x", *ERF], "f32", 18)
    source.graph.output.append(helper.make_tensor_value_info("g", T.FLOAT, ["n", 32]))
    made = to_model(og.onnx.load(source), form="standard", target="onnxruntime==1.32")
    assert sorted(types(made)) == ["Erf", "Gelu", "Swish"]
    assert to_model(og.onnx.load(made), form="standard", target="onnxruntime==1.32") == made


def test_norm_rules_match_and_reject_their_examples() -> None:
    for rule in NORMS:
        taken, left = og.parse(rule.takes), og.parse(rule.leaves)
        unit = find_units(taken, NORMS)[-1]
        assert (unit.name, unit.ops) == (rule.name, taken.ops)
        assert rule.name not in [u.name for u in find_units(left, NORMS)]


@pytest.mark.parametrize("op", ["Gelu", "FastGelu", "BiasGelu", "SwiGLU"])
def test_contrib_gelus_and_swiglu_are_loaded_as_units(op: str) -> None:
    domain, opset = ("", 28) if op == "SwiGLU" else ("com.microsoft", 20)
    inputs = ["a", "b"] if op in ("BiasGelu", "SwiGLU") else ["a"]
    attributes = {"alpha": 1.5} if op == "SwiGLU" else {}
    node = helper.make_node(op, inputs, ["y"], domain=domain, **attributes)
    ports = [helper.make_tensor_value_info(n, T.FLOAT, ["n", 4] if n == "a" or domain == "" else [4]) for n in inputs]
    graph = helper.make_graph([node], "g", ports, [helper.make_tensor_value_info("y", T.FLOAT, ["n", 4])])
    imports = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    loaded = og.onnx.load(helper.make_model(graph, opset_imports=imports, ir_version=10))
    assert all(o.kind != "Wildcard" for o in loaded.ops)
    units = [u.name for u in find_units(loaded)]
    assert units == (["swish", "swiglu"] if op == "SwiGLU" else ["gelu"])
    if domain:
        rng = np.random.default_rng(0)
        feeds = {n: rng.normal(size=(3, 4) if n == "a" else (4,)).astype(np.float32) for n in inputs}
        proto = helper.make_model(graph, opset_imports=imports, ir_version=10)
        run = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(og.evaluate(loaded, feeds), run.run(None, feeds)[0], rtol=1e-5, atol=2e-6)


def gated(opset: int) -> Any:
    nodes = [
        helper.make_node("Tanh", ["a"], ["t"]),
        helper.make_node("SwiGLU", ["t", "b"], ["y"], alpha=1.5, name="act"),
    ]
    ports = [helper.make_tensor_value_info(n, T.FLOAT, ["n", 4]) for n in "aby"]
    graph = helper.make_graph(nodes, "g", ports[:2], ports[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=14)


_SWISH = {"decomposed": ["Mul", "Sigmoid", "Mul"], "contrib": ["com.microsoft::QuickGelu"], "standard": ["Swish"]}


@pytest.mark.parametrize("form", ["auto", "function", "standard", "contrib", "decomposed"])
@pytest.mark.parametrize(("version", "opset"), [("1.32", 28), ("1.31", 26), ("1.23", 23)])
def test_swiglu_is_written_as_swish_and_mul(version: str, opset: int, form: str) -> None:
    graph = og.onnx.load(gated(28))
    target = f"onnxruntime=={version}"
    if form == "standard":  # as for every other swish
        with pytest.raises(og.errors.Unimplemented, match=f"runs no ai.onnx Swish at opset {opset}"):
            drafted(graph, Request(form=form, target=target))
        if opset < 24:
            return
        opset = 24
    draft = drafted(graph, Request(form=form, target=target, opset=24 if form == "standard" else None))
    made = draft.proto()
    onnx.checker.check_model(made, full_check=True)
    assert types(made) == ["Tanh", *_SWISH.get(form, ["opgraph::Swish"]), "Mul"]
    if form != "decomposed":
        assert to_model(og.onnx.load(made), form=form, target=target) == made
    assert made.graph.node[-1].name == "act"
    assert {o.domain: o.version for o in made.opset_import}[""] == opset
    lowered = any(f"opset 28 was lowered to {opset}" in note for note in draft.summary.notes)
    assert lowered == (opset < 28 and form != "standard")
    if tuple(map(int, ort.__version__.split(".")[:2])) < tuple(map(int, version.split("."))):
        pytest.skip(f"run by onnxruntime {version} alone")
    feeds = {n: np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32) for n in "ab"}
    run = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(run.run(None, feeds)[0], og.evaluate(graph, feeds), rtol=1e-5, atol=1e-6)


def test_opset_is_not_lowered_if_a_node_would_change_meaning() -> None:
    nodes = [helper.make_node("Attention", ["a", "a", "a"], ["y"], q_num_heads=1, kv_num_heads=1)]
    ports = [helper.make_tensor_value_info(n, T.FLOAT, [1, 2, 4]) for n in "ay"]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    with pytest.raises(og.errors.Unimplemented, match="would change on the way to 21"):
        drafted(og.onnx.load(made), Request(target="onnxruntime==1.18"))


def test_f16_bias_gelu_node_is_not_split() -> None:
    """A BiasGelu in f16: the value between its sum and its GELU has no name in the model."""
    node = helper.make_node("BiasGelu", ["a", "b"], ["y"], domain="com.microsoft")
    ports = [helper.make_tensor_value_info(n, T.FLOAT16, ["n", 4] if n != "b" else [4]) for n in "aby"]
    graph = helper.make_graph([node], "g", ports[:2], ports[2:])
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=10)
    assert types(to_model(og.onnx.load(made))) == ["com.microsoft::BiasGelu"]


@pytest.mark.parametrize(
    ("op", "inputs"), [("FastGelu", "x"), ("FastGelu", "xb"), ("QuickGelu", "x"), ("BiasGelu", "xb")]
)
def test_ops_after_a_contrib_op_have_types_and_are_fused(op: str, inputs: str) -> None:
    """onnx infers no type for contributed ops, and so none for the values after the product."""
    nodes = [
        helper.make_node(op, list(inputs), ["a"], domain="com.microsoft"),
        helper.make_node("MatMul", ["a", "w"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Mul", ["t", "h"], ["y"]),
    ]
    weights = [onnx.numpy_helper.from_array(np.ones(s, np.float32), n) for n, s in (("w", (4, 4)), ("b", (4,)))]
    ports = [helper.make_tensor_value_info(n, T.FLOAT, ["n", 4]) for n in "xy"]
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(helper.make_graph(nodes, "g", ports[:1], ports[1:], weights),
                             opset_imports=imports, ir_version=10)  # fmt: skip
    graph = og.onnx.load(made)
    assert [op.kind for op in graph.ops][-3:] == ["Wildcard", "Tanh", "Multiply"]
    assert types(to_model(graph, functions=True))[-2:][0] == "MatMul"
    assert [o.name for o in drafted(graph, Request(library=True)).library] != []


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_unit_gets_its_own_body_beside_an_existing_one_of_another_dtype(dtype: str) -> None:
    spelled = " s = SoftPlus({0})\n t = Tanh(s)\n {1} = Multiply({0}, t)"
    first = to_model(og.parse("graph(a: f32[n,4]) -> (b)\n" + spelled.format("a", "b")))
    made = to_model(
        og.parse(f"graph(x: {dtype}[n,4]) -> (y)\n" + spelled.format("x", "y")), form="decomposed", opset=22
    )
    made.graph.node.append(first.graph.node[0])
    made.graph.node[-1].name = "other"
    made.graph.input.append(first.graph.input[0])
    made.graph.output.append(first.graph.output[0])
    made.functions.append(first.functions[0])
    made.opset_import.append(helper.make_opsetid("opgraph", 1))
    graph = og.onnx.load(made)
    written = to_model(graph)
    calls = {(node.op_type, node.overload) for node in written.graph.node}
    assert len(calls) == 2 and calls == {(f.name, f.overload) for f in written.functions}
    assert to_model(og.onnx.load(written)) == written
    a = np.linspace(-9, 9, 24, dtype=np.float32).reshape(6, 4)
    feeds = {"x": a.astype(dtypes.BY_NAME[dtype].numpy), "a": a}
    if dtype == "f16":  # onnxruntime takes no arrays of the other type
        run = ort.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
        expected = og.evaluate(graph, feeds)
        for output, got in zip(written.graph.output, run.run(None, feeds), strict=True):
            np.testing.assert_allclose(got, expected[output.name], rtol=2**-10)
    else:
        ort.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])  # refuses single bf16 ops


def test_names_of_new_nodes_are_unique() -> None:
    """onnxruntime refuses two nodes of one name, and exporters number their names."""
    nodes = [helper.make_node("QuickGelu", ["x"], ["a"], name="/act/Mul", domain="com.microsoft"),
             helper.make_node("Neg", ["a"], ["b"], name="/act/Mul_1"),
             helper.make_node("Exp", ["b"], ["y"], name="/act/Mul_0")]  # fmt: skip
    ports = [helper.make_tensor_value_info(name, T.FLOAT, ["n", 4]) for name in "xy"]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:])
    made = to_model(og.onnx.load(helper.make_model(graph, opset_imports=imports, ir_version=10)), form="decomposed")
    names = [node.name for node in made.graph.node]
    assert types(made) == ["Mul", "Sigmoid", "Mul", "Neg", "Exp"] and len(set(names)) == 5
    assert names[2:] == ["/act/Mul", "/act/Mul_1", "/act/Mul_0"]
    ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])


def test_f16_quick_gelu_stays_at_opset_11_and_is_fused_at_opset_12() -> None:
    node = helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft", alpha=2.0)
    ports = [helper.make_tensor_value_info(n, T.FLOAT16, ["n", 4]) for n in "xy"]
    imports = [helper.make_opsetid("", 11), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:])
    source = helper.make_model(graph, opset_imports=imports, ir_version=8)
    assert to_model(og.onnx.load(source)) == source
    assert types(to_model(og.onnx.load(source), opset=12)) == ["opgraph::Swish"]
