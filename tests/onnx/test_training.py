"""A model imported from ONNX trains: load, choose the weights, gradient, step, save; everything else is unchanged."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch gives the gradients of ONNX nodes")
onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime runs the nodes")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import opgraph as og  # noqa: E402
from opgraph.errors import (  # noqa: E402
    InvalidArguments,
    InvalidDataType,
    InvalidGraphOp,
    InvalidShape,
    Unimplemented,
)
from opgraph.transforms.saved import read_tensors  # noqa: E402

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "onnx-models"
CLASSES = 4
#: The error that f32 may have after a few layers, relative to the largest element.
SLACK = 2.0**-17

# -- models ------------------------------------------------------------------------------------------------------------


def model_of(nodes: list[Any], inputs: Any, outputs: Any, tensors: dict[str, np.ndarray], opset: int = 17) -> Any:
    def info(shapes: Any, element: int) -> list[Any]:
        return [helper.make_tensor_value_info(n, element, s) for n, s in shapes.items()]

    element = helper.np_dtype_to_tensor_dtype(next(a.dtype for a in tensors.values() if a.dtype.kind == "f"))
    graph = helper.make_graph(
        nodes, "g", info(inputs, element), info(outputs, element),
        [numpy_helper.from_array(a, n) for n, a in tensors.items()], doc_string="kept",
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9, producer_name="a test")
    helper.set_model_props(model, {"licence": "free"})
    return onnx.shape_inference.infer_shapes(model)


def cnn_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def make(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32) * np.float32(0.5)

    return {
        "conv1.weight": make(6, 2, 3, 3),
        "conv1.bias": make(6),
        "norm.weight": 1 + make(6),
        "norm.bias": make(6),
        "norm.mean": make(6),
        "norm.var": 1 + np.abs(make(6)),
        "conv2.weight": make(8, 3, 3, 3),
        "head.weight": make(CLASSES, 8),
        "head.bias": make(CLASSES),
    }


CNN_WEIGHTS = tuple(cnn_tensors())


def cnn() -> Any:
    nodes = [
        helper.make_node("Conv", ["x", "conv1.weight", "conv1.bias"], ["c1"], name="conv1", auto_pad="SAME_UPPER"),
        helper.make_node(
            "BatchNormalization", ["c1", "norm.weight", "norm.bias", "norm.mean", "norm.var"], ["n1"], name="norm",
            epsilon=1e-3,
        ),
        helper.make_node("Relu", ["n1"], ["r1"], name="relu"),
        helper.make_node("MaxPool", ["r1"], ["p1"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p1", "conv2.weight"], ["c2"], name="conv2", group=2, pads=[1, 0, 0, 1]),
        helper.make_node("Tanh", ["c2"], ["t2"], name="tanh"),
        helper.make_node("GlobalAveragePool", ["t2"], ["mean"], name="mean"),
        helper.make_node("Flatten", ["mean"], ["flat"], name="flatten"),
        helper.make_node("Gemm", ["flat", "head.weight", "head.bias"], ["y"], name="head", transB=1, alpha=0.5),
    ]  # fmt: skip
    nodes[0].metadata_props.add(key="written by", value="hand")
    return model_of(nodes, {"x": ["batch", 2, 8, 8]}, {"y": ["batch", CLASSES]}, cnn_tensors())


def cnn_twin(w: dict[str, Any], x: Any) -> Any:
    c = F.conv2d(x, w["conv1.weight"], w["conv1.bias"], padding=1)
    mean, var, scale, bias = (w[f"norm.{n}"].reshape(-1, 1, 1) for n in ("mean", "var", "weight", "bias"))
    n = (c - mean) / torch.sqrt(var + float(np.float32(1e-3))) * scale + bias
    p = F.max_pool2d(torch.relu(n), 2)
    t = torch.tanh(F.conv2d(F.pad(p, (0, 1, 1, 0)), w["conv2.weight"], groups=2))
    return 0.5 * (t.mean((2, 3)) @ w["head.weight"].t()) + w["head.bias"]


SIZE, STEPS = 6, 5


def block_tensors(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)

    def make(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.5).astype(dtype)

    return {
        "ln.weight": 1 + make(SIZE),
        "ln.bias": make(SIZE),
        "q": make(SIZE, SIZE),
        "k": make(SIZE, SIZE),
        "v": make(SIZE, SIZE),
        "root": np.array(SIZE**0.5, dtype),
        "up": make(SIZE, 2 * SIZE),
        "up.bias": make(2 * SIZE),
        "down": make(2 * SIZE, SIZE),
    }


BLOCK_WEIGHTS = tuple(n for n in block_tensors() if n != "root")


def block(dtype: Any = np.float32) -> Any:
    """LayerNormalization, attention of one head, and two layers with Tanh between them."""
    nodes = [
        helper.make_node("LayerNormalization", ["x", "ln.weight", "ln.bias"], ["n"], name="ln", axis=-1),
        *[helper.make_node("MatMul", ["n", w], [f"x{w}"], name=w) for w in "qkv"],
        helper.make_node("Transpose", ["xk"], ["kt"], name="kt", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["xq", "kt"], ["raw"], name="raw"),
        helper.make_node("Div", ["raw", "root"], ["scores"], name="scores"),
        helper.make_node("Softmax", ["scores"], ["shares"], name="softmax", axis=-1),
        helper.make_node("MatMul", ["shares", "xv"], ["mixed"], name="mixed"),
        helper.make_node("Add", ["x", "mixed"], ["h"], name="residual"),
        helper.make_node("MatMul", ["h", "up"], ["u"], name="up"),
        helper.make_node("Add", ["u", "up.bias"], ["ub"], name="bias"),
        helper.make_node("Tanh", ["ub"], ["a"], name="tanh"),
        helper.make_node("MatMul", ["a", "down"], ["d"], name="down"),
        helper.make_node("Add", ["h", "d"], ["y"], name="out"),
    ]
    shape = ["batch", STEPS, SIZE]
    return model_of(nodes, {"x": shape}, {"y": shape}, block_tensors(dtype))


def block_twin(w: dict[str, Any], x: Any) -> Any:
    n = F.layer_norm(x, (SIZE,), w["ln.weight"], w["ln.bias"], float(np.float32(1e-5)))
    h = x + torch.softmax(n @ w["q"] @ (n @ w["k"]).mT / w["root"], -1) @ (n @ w["v"])
    return h + torch.tanh(h @ w["up"] + w["up.bias"]) @ w["down"]


MODELS = {
    "cnn": (cnn, cnn_tensors, cnn_twin, CNN_WEIGHTS, (5, 2, 8, 8)),
    "block": (block, block_tensors, block_twin, BLOCK_WEIGHTS, (3, STEPS, SIZE)),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Any:
    """A model, its weights, a twin written by hand, the names of trained weights, an input."""
    make, tensors, twin, names, shape = MODELS[request.param]
    return make(), tensors(), twin, names, np.random.default_rng(2).standard_normal(shape).astype(np.float32)


def run(model: Any, x: np.ndarray) -> np.ndarray:
    given = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(given, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def truth_of(twin: Any, tensors: dict[str, np.ndarray], x: np.ndarray, d: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of the twin in float64."""
    w = {n: torch.from_numpy(a.astype(np.float64)).requires_grad_() for n, a in tensors.items()}
    twin(w, torch.from_numpy(x.astype(np.float64))).backward(torch.from_numpy(d.astype(np.float64)))
    return {n: t.grad.numpy() for n, t in w.items() if t.grad is not None}


def off(got: Any, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max())


def trained(graph: og.Graph, names: Any) -> dict[str, np.ndarray]:
    return {t.name: np.array(t.data) for t in graph.constants if t.name in names}


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("library", [False, True])
def test_gradients_agree_with_an_equal_torch_model(case: Any, library: bool) -> None:
    model, tensors, twin, names, x = case
    g = og.onnx.load(model, library=library)
    f = og.compile(g, wrt=names)
    y, vjp = f.vjp({"x": x, **trained(g, names)})
    assert off(y, run(model, x).astype(np.float64)) <= SLACK
    d = np.random.default_rng(3).standard_normal(y.shape).astype(np.float32)
    expected = truth_of(twin, tensors, x, d)
    found = vjp(d)
    assert set(found) == set(names)
    for name in names:
        assert found[name].dtype == np.float32
        assert off(found[name], expected[name]) <= SLACK, name
    again = vjp(d)
    assert all(found[n].tobytes() == again[n].tobytes() for n in names)


def test_reference_computes_gradients_in_float64(case: Any) -> None:
    model, tensors, twin, names, x = case
    g = og.onnx.load(model)
    h = og.gradient(g, names)
    d = np.random.default_rng(3).standard_normal(run(model, x).shape).astype(np.float32)
    given = {"x": x, "d_y": d, **trained(g, names)}
    made = og.evaluate(h, {t.name: given[t.name] for t in h.inputs})
    expected = truth_of(twin, tensors, x, d)
    for name in names:
        assert made[f"d_{name}"].dtype == np.float64
        assert off(made[f"d_{name}"], expected[name]) <= 1e-12, name


def test_gradients_agree_with_finite_differences_in_onnxruntime() -> None:
    """They are compared along a random direction for each weight; onnxruntime has the nodes of the block in f64."""
    random = np.random.default_rng(4)
    tensors = block_tensors(np.float64)
    x = random.standard_normal((3, STEPS, SIZE))
    g = og.onnx.load(block(np.float64))
    f = og.compile(g, wrt=BLOCK_WEIGHTS)
    y, vjp = f.vjp({"x": x, **trained(g, BLOCK_WEIGHTS)})
    d = random.standard_normal(y.shape)
    found = vjp(d)

    def loss(name: str, step: np.ndarray) -> float:
        model = block(np.float64)
        (place,) = [t for t in model.graph.initializer if t.name == name]
        place.CopyFrom(numpy_helper.from_array(tensors[name] + step, name))
        return float((run(model, x) * d).sum())

    for name in BLOCK_WEIGHTS:
        step = random.standard_normal(tensors[name].shape) * 1e-5
        slope = (loss(name, step) - loss(name, -step)) / 2
        size = float(np.linalg.norm(found[name]) * np.linalg.norm(step))
        assert slope == pytest.approx(float((found[name] * step).sum()), abs=1e-6 * size), name


def test_cnn_gradients_agree_with_finite_differences_of_the_reference() -> None:
    """In float64. For convolutions and pools onnxruntime has only f32, whose rounding error exceeds the differences."""
    random = np.random.default_rng(5)
    g = og.onnx.load(cnn())
    names = CNN_WEIGHTS
    f = og.compile(g, wrt=names)
    x, weights = random.standard_normal((2, 2, 8, 8)).astype(np.float32), trained(g, names)
    y, vjp = f.vjp({"x": x, **weights})
    d = random.standard_normal(y.shape).astype(np.float32)
    found = vjp(d)
    for name in names:
        step = random.standard_normal(weights[name].shape) * 2e-5  # small, because a maximum may change its element
        up, down = ((weights[name] + s * step).astype(np.float32) for s in (1, -1))
        at_up, at_down = (og.evaluate(f.graph, {"x": x, **weights, name: w}) for w in (up, down))
        rise = float(((at_up - at_down) * d).sum())
        predicted = float((found[name].astype(np.float64) * (up.astype(np.float64) - down)).sum())
        size = float(np.linalg.norm(found[name]) * np.linalg.norm(up.astype(np.float64) - down))
        assert rise == pytest.approx(predicted, abs=1e-4 * size), name


def test_unrequested_gradients_are_not_computed() -> None:
    g = og.onnx.load(cnn())
    backward = og.gradient(g, ("conv2.weight", "head.bias"))
    kinds = [op.attrs.get("onnx_op", op.kind) for op in backward.ops if op.kind == "WildcardBackward"]
    assert kinds == ["GlobalAveragePool", "Conv"]
    (conv,) = [op for op in backward.ops if op.kind == "WildcardBackward" and op.attrs["onnx_op"] == "Conv"]
    assert [t.dims for t in conv.outputs] == [(8, 3, 3, 3)]


def test_gradients_of_a_weight_read_by_two_nodes_are_summed() -> None:
    w = np.random.default_rng(6).standard_normal((SIZE, SIZE)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Gemm", ["a", "w"], ["y"], transB=1),
    ]
    g = og.onnx.load(model_of(nodes, {"x": [3, SIZE]}, {"y": [3, SIZE]}, {"w": w}))
    x = np.ones((3, SIZE), np.float32)
    y, vjp = og.compile(g, wrt=("w",)).vjp(x=x, w=w)
    expected = truth_of(lambda t, a: a @ t["w"] @ t["w"].t(), {"w": w}, x, y)
    assert off(vjp(y)["w"], expected["w"]) <= SLACK


def test_values_of_unknown_rank_have_gradients() -> None:
    """A Reshape to a shape that is an input: all values after it have an unknown rank."""
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"]),
        helper.make_node("Reshape", ["a", "shape"], ["r"]),
        helper.make_node("Softmax", ["r"], ["q"]),
        helper.make_node("MatMul", ["q", "m"], ["y"]),
    ]
    random = np.random.default_rng(9)
    tensors = {"w": random.standard_normal(6).astype(np.float32), "m": random.standard_normal((3, 3)).astype("f4")}
    model = model_of(nodes, {"x": [2, 6]}, {"y": ["a", "b", 3]}, tensors)
    model.graph.input.append(helper.make_tensor_value_info("shape", TensorProto.INT64, ["n"]))
    x = random.standard_normal((2, 6)).astype(np.float32)
    y, vjp = og.compile(og.onnx.load(model), wrt=("w", "m")).vjp(x=x, shape=np.array([2, 2, 3]), **tensors)
    d = random.standard_normal(y.shape).astype(np.float32)
    expected = truth_of(lambda t, a: torch.softmax((a * t["w"]).reshape(2, 2, 3), -1) @ t["m"], tensors, x, d)
    assert all(off(g, expected[n]) <= SLACK for n, g in vjp(d).items())


def test_explain_names_torch_for_gradients_of_onnx_nodes() -> None:
    h = og.gradient(og.onnx.load(cnn()), ("conv2.weight",))
    whys = {row.why for row in h.explain().ops if row.kind == "WildcardBackward"}
    assert "gradient of the ONNX node Conv: runs in torch" in whys


def onnx_cases() -> list[Any]:
    """onnx's own tests of single nodes."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [c for c in load_model_tests(kind="node") if len(c.model.graph.node) == 1]


def test_every_torch_node_has_torchs_gradient_and_reads_only_declared_inputs() -> None:
    """Runs the cases that onnx ships: graphs against autograd over the table, with zeros for unread inputs."""
    import opgraph.torch as ogt
    from opgraph.runtime.providers.torch_onnx.table import form_of

    wrong, passed = [], set()
    for case in onnx_cases():
        node = case.model.graph.node[0]
        if any(not isinstance(a, (np.ndarray, np.generic)) for a in case.data_sets[0][0]):
            continue
        inputs = [np.asarray(a) for a in case.data_sets[0][0]]
        floats = [i.name for i, a in zip(case.model.graph.input, inputs) if a.dtype == np.float32]
        if form_of(node.domain, node.op_type) is None or not floats:
            continue
        if any(w in case.name for w in ("training", "bfloat16", "empty_set")):
            continue
        try:
            g = og.onnx.load(case.model)
            module = ogt.from_onnx(case.model).double()
        except Unimplemented:
            continue
        if all(op.kind != "Wildcard" for op in g.ops):
            continue
        for name in floats:
            try:
                problem = compared(g, module, [i.name for i in case.model.graph.input], inputs, name)
            except Unimplemented:
                continue
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                wrong.append(f"{case.name}, {name}: {problem}")
            else:
                passed.add((case.name, name))
    assert not wrong, "\n".join(wrong[:20])
    assert len(passed) > 250, len(passed)


def compared(g: og.Graph, module: Any, names: list[str], inputs: list[np.ndarray], name: str) -> str:
    """The difference between the gradient of one input and autograd's; "" if they agree."""
    tensors = [torch.from_numpy(np.array(a)) for a in inputs]
    tensors = [t.double() if t.is_floating_point() else t for t in tensors]
    tensors[names.index(name)].requires_grad_()
    made = module(*tensors)
    outputs = dict(zip(module.output_names, made if isinstance(made, tuple) else (made,), strict=True))
    h = og.gradient(g, (name,))
    random = np.random.default_rng(0)
    feeds, loss = dict(zip(names, inputs, strict=True)), torch.zeros((), dtype=torch.float64)
    for output, value in outputs.items():
        d = random.standard_normal(value.shape).astype(np.float32)
        feeds[f"d_{output}"] = d
        if value.requires_grad:
            loss = loss + (value * torch.from_numpy(d.astype(np.float64))).sum()
    (expected,) = (
        torch.autograd.grad(loss, [tensors[names.index(name)]], allow_unused=True) if loss.requires_grad else (None,)
    )
    read = read_tensors(h)
    given = {t.name: feeds[t.name] if t.id in read else np.zeros_like(feeds[t.name]) for t in h.inputs}
    got = og.evaluate(h, given)
    want = np.zeros(inputs[names.index(name)].shape) if expected is None else expected.numpy()
    return "" if np.allclose(got, want, rtol=1e-9, atol=1e-9) else f"off by {np.abs(got - want).max()}"


# -- saved tensors -----------------------------------------------------------------------------------------------------


def kept(g: og.Graph, wrt: Any) -> dict[str, set[str]]:
    """Names of saved tensors, by role; an intermediate value has its name in the model."""
    f = og.compile(g, wrt=wrt)
    made = {f"kept_{t.id}": t.name for op in g.ops for t in op.outputs}
    roles: dict[str, set[str]] = {}
    for s in f.saved_tensors():
        roles.setdefault(s.role, set()).add(str(made.get(s.name, s.name)))
        assert (s.bytes == 0) == (s.role == "shape")
    return roles


def test_cnn_saves_only_the_values_its_backward_ops_read() -> None:
    roles = kept(og.onnx.load(cnn()), CNN_WEIGHTS)
    # The results of the convolutions, of the norm, of the pools; relu and tanh are recomputed.
    assert roles["value"] == {"c1", "n1", "p1", "c2", "flat"}
    assert roles["input"] == {"x", "norm.weight", "norm.mean", "norm.var", "conv2.weight", "head.weight"}
    assert roles["shape"] == {"conv1.weight", "conv1.bias", "norm.bias", "head.bias", "t2", "mean"}


def test_attention_block_saves_softmax_results_but_no_scores_or_transposes() -> None:
    roles = kept(og.onnx.load(block()), BLOCK_WEIGHTS)
    # Either mixed or h = x + mixed is enough, and either u or u + bias.
    assert roles["value"] - {"mixed", "u", "h", "ub"} == {"n", "xq", "kt", "shares", "xv"}
    assert len(roles["value"] & {"mixed", "h"}) == len(roles["value"] & {"u", "ub"}) == 1
    assert "scores" not in roles["shape"] and "raw" not in roles["shape"]


def test_frozen_layers_save_no_inputs() -> None:
    roles = kept(og.onnx.load(cnn()), ("conv1.bias", "head.bias"))
    # Neither convolution needs its input because its weights do not train.
    assert roles["value"] == {"n1", "c2"}
    assert "input" not in roles and "x" in roles["shape"]


# -- steps, and back to a file -----------------------------------------------------------------------------------------


def after_some_steps(model: Any, names: Any, x: np.ndarray) -> tuple[og.Graph, Any, dict[str, np.ndarray]]:
    """The graph, its executable and the weights after some SGD steps on half the squared distance to 1."""
    g = og.onnx.load(model)
    f = og.compile(g, wrt=names)
    weights, losses = trained(g, names), []
    for _ in range(12):
        y, vjp = f.vjp({"x": x, **weights})
        losses.append(float(np.square(y - 1).mean()) / 2)
        for name, gradient in vjp((y - 1) / np.float32(y.size)).items():
            weights[name] = weights[name] - np.float32(0.2) * gradient
    assert losses[-1] < 0.7 * losses[0], losses
    return g, f, weights


def stripped(model: Any, names: Any = ()) -> Any:
    """A model without the data of the named initializers, or of all if no names are given."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if not names or tensor.name in names:
            for field in ("raw_data", "float_data", "int64_data", "external_data", "data_location"):
                tensor.ClearField(field)
    for node in result.graph.node:
        if node.domain == "":  # an omitted or empty domain is ai.onnx
            node.ClearField("domain")
    return result


def test_trained_model_is_saved_with_only_its_weights_changed(case: Any, tmp_path: Path) -> None:
    model, _, _, names, x = case
    names = [n for n in names if n not in ("norm.mean", "norm.var")]
    g, f, weights = after_some_steps(model, names, x)
    before = str(g)
    og.onnx.save(g, tmp_path / "trained.onnx", weights=weights)
    saved = onnx.load(tmp_path / "trained.onnx")
    onnx.checker.check_model(saved, full_check=True)
    assert stripped(saved, names) == stripped(model, names)
    assert off(run(tmp_path / "trained.onnx", x), f({"x": x, **weights}).astype(np.float64)) <= SLACK
    assert trained(og.onnx.load(tmp_path / "trained.onnx"), names).keys() == weights.keys()
    for name, value in trained(og.onnx.load(tmp_path / "trained.onnx"), names).items():
        assert value.tobytes() == weights[name].tobytes(), name
    assert str(g) == before, "the graph that was saved has its own weights still"


def test_trained_weights_in_a_data_file_stay_in_one(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(cnn(), source, save_as_external_data=True, location="model.onnx.data", size_threshold=64)
    before = onnx.load(source, load_external_data=False)
    outside = {t.name for t in before.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    assert "conv1.weight" in outside
    x = np.random.default_rng(7).standard_normal((2, 2, 8, 8)).astype(np.float32)
    g, f, weights = after_some_steps(source, ("conv1.weight", "head.bias"), x)
    og.onnx.save(g, source, weights=weights)  # over its own file
    after = onnx.load(source, load_external_data=False)
    assert {t.name for t in after.graph.initializer if t.data_location == TensorProto.EXTERNAL} == outside
    assert stripped(after) == stripped(before)
    assert off(run(source, x), f({"x": x, **weights}).astype(np.float64)) <= SLACK


def test_trained_factor_is_written_into_its_fused_unit(tmp_path: Path) -> None:
    """x * sigmoid(factor * x) is written as one node with an attribute, which gets the new factor."""
    nodes = [
        helper.make_node("Mul", ["x", "factor"], ["s"]),
        helper.make_node("Sigmoid", ["s"], ["g"]),
        helper.make_node("Mul", ["x", "g"], ["y"]),
    ]
    model = model_of(nodes, {"x": [5]}, {"y": [5]}, {"factor": np.float32(1.5).reshape(())})
    x = np.linspace(-2, 2, 5, dtype=np.float32)
    for form in ("auto", "decomposed"):
        og.onnx.save(og.onnx.load(model), tmp_path / "m.onnx", form, weights={"factor": np.float32(0.25)})
        assert off(run(tmp_path / "m.onnx", x), x / (1 + np.exp(-0.25 * x.astype(np.float64)))) <= SLACK, form


def test_weight_in_a_constant_node_is_trained(tmp_path: Path) -> None:
    w = np.random.default_rng(8).standard_normal((SIZE, SIZE)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["w"], name="w", value=numpy_helper.from_array(w)),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["y"]),
    ]
    model = model_of(nodes, {"x": [3, SIZE]}, {"y": [3, SIZE]}, {"b": np.zeros(SIZE, np.float32)})
    g, f, weights = after_some_steps(model, ("w", "b"), np.ones((3, SIZE), np.float32))
    og.onnx.save(g, tmp_path / "m.onnx", weights={n: torch.from_numpy(a) for n, a in weights.items()})
    saved = onnx.load(tmp_path / "m.onnx")
    assert [n.op_type for n in saved.graph.node] == ["Constant", "MatMul", "Add"]
    x = np.ones((3, SIZE), np.float32)
    assert off(run(tmp_path / "m.onnx", x), f({"x": x, **weights}).astype(np.float64)) <= SLACK


def test_composed_graph_is_saved_with_new_weights(tmp_path: Path) -> None:
    g = og.Graph()
    x = g.input("x", shape=(3,))
    g.add_op("Multiply", x, g.constant("w", np.ones(3, np.float32)), name="y")
    og.onnx.save(g, tmp_path / "m.onnx", weights={"w": np.array([1, 2, 3], np.float32)})
    assert run(tmp_path / "m.onnx", np.ones(3, np.float32)).tolist() == [1, 2, 3]


def test_mismatched_weights_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    g, path = og.onnx.load(cnn()), tmp_path / "never.onnx"
    with pytest.raises(InvalidArguments, match=r"(?s)no constant 'conv1.weights'.*where:.*fix:.*conv1.weight"):
        og.onnx.save(g, path, weights={"conv1.weights": np.zeros(3, np.float32)})
    with pytest.raises(InvalidShape, match=r'(?s)\[5\].*weight "conv1.bias"'):
        og.onnx.save(g, path, weights={"conv1.bias": np.zeros(5, np.float32)})
    with pytest.raises(InvalidDataType, match=r'(?s)float64.*weight "conv1.bias"'):
        og.onnx.save(g, path, weights={"conv1.bias": np.zeros(6)})
    assert not path.exists()


# -- real exports ------------------------------------------------------------------------------------------------------


def test_exported_model_has_the_gradients_of_its_torch_module() -> None:
    if not FOLDER.is_dir():
        pytest.skip("the exported models are not beside this checkout")
    import opgraph.torch as ogt

    # Stock onnxruntime does not run every node of the opset 23 and bf16 models.
    paths = [p for p in FOLDER.glob("*.onnx") if "op2" not in p.name]
    path = min(paths, key=lambda p: p.stat().st_size + Path(f"{p}.data").stat().st_size)
    with np.load(FOLDER / f"{path.stem}_io.npz") as arrays:
        x = arrays["x"]
    module = ogt.from_onnx(path)
    parameters = {module.onnx_names[n]: p for n, p in module.named_parameters()}
    g = og.onnx.load(path)
    names = [t.name for t in g.constants if t.name in parameters][::3]
    y, vjp = og.compile(g, wrt=names).vjp({g.inputs[0].name: x, **trained(g, names)})
    d = np.random.default_rng(0).standard_normal(y.shape).astype(y.dtype)
    module(torch.from_numpy(x)).backward(torch.from_numpy(d))
    found = vjp(d)
    assert len(names) >= 4
    for name in names:
        assert off(found[name], parameters[name].grad.double().numpy()) <= SLACK, name


# -- refusals ----------------------------------------------------------------------------------------------------------


def odd_one(**attrs: Any) -> Any:
    """A weight, a node that torch cannot run, another weight."""
    nodes = [
        helper.make_node("Mul", ["x", "before"], ["a"]),
        helper.make_node("LpPool", ["a"], ["p"], name="odd one", kernel_shape=[2, 2]),
        helper.make_node("Mul", ["p", "after"], ["y"]),
    ]
    ones = np.ones((1, 2, 1, 1), np.float32)
    return model_of(nodes, {"x": [1, 2, 6, 6]}, {"y": [1, 2, 5, 5]}, {"before": ones, "after": ones})


def test_node_unsupported_by_torch_is_refused_only_on_a_gradient_path() -> None:
    g = og.onnx.load(odd_one())
    with pytest.raises(Unimplemented, match=r'(?s)no gradient of LpPool.*where: LpPool "odd one".*fix:'):
        og.compile(g, wrt=("before",))
    x = np.ones((1, 2, 6, 6), np.float32)
    y, vjp = og.compile(g, wrt=("after",)).vjp(x=x, after=np.ones((1, 2, 1, 1), np.float32))
    assert vjp(np.ones_like(y))["after"].shape == (1, 2, 1, 1)
    h = og.gradient(g, ("before",))
    with pytest.raises(Unimplemented, match='LpPool "odd one"'):
        og.compile(h)
    feeds = {t.name: np.ones([d for d in t.dims if isinstance(d, int)], np.float32) for t in h.inputs}
    with pytest.raises(Unimplemented, match='LpPool "odd one"'):
        og.evaluate(h, feeds)


def test_error_without_torch_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "torch" else find(n))
    with pytest.raises(Unimplemented, match=r'(?s)Conv "conv1".*needs torch.*fix: +pip install \'opgraph\[torch\]\''):
        og.compile(og.onnx.load(cnn()), wrt=("conv1.weight",))


def test_dropout_in_training_mode_has_no_gradient() -> None:
    nodes = [helper.make_node("Mul", ["x", "w"], ["a"]), helper.make_node("Dropout", ["a", "p", "on"], ["y"], name="d")]
    tensors = {"w": np.ones(4, np.float32), "p": np.float32(0.5).reshape(()), "on": np.array(True)}
    g = og.onnx.load(model_of(nodes, {"x": [4]}, {"y": [4]}, tensors))
    y, vjp = og.compile(g, wrt=("w",)).vjp(x=np.ones(4, np.float32), w=tensors["w"])
    with pytest.raises(Unimplemented, match=r'(?s)Dropout in training mode.*where: Dropout "d".*eval mode'):
        vjp(y)


def test_gradient_through_a_sequence_is_refused() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"]),
        helper.make_node("SplitToSequence", ["a"], ["parts"], name="split", axis=0),
        helper.make_node("ConcatFromSequence", ["parts"], ["y"], name="join", axis=0),
    ]
    g = og.onnx.load(model_of(nodes, {"x": [4]}, {"y": [4]}, {"w": np.ones(4, np.float32)}))
    with pytest.raises(Unimplemented, match=r'(?s)ConcatFromSequence "join" has no gradient: it reads seq.*fix:'):
        og.gradient(g, ("w",))


def test_gradient_of_a_wildcard_without_an_onnx_node_is_refused() -> None:
    g = og.Graph()
    x = g.input("x", shape=(3,))
    g.add_op("Wildcard", x, name="w", outputs=1, dtype="f32")
    with pytest.raises(Unimplemented, match=r"(?s)carries no ONNX node.*Wildcard \"w\".*fix:"):
        og.gradient(g, ("x",))


def test_second_derivatives_of_onnx_nodes_are_refused() -> None:
    h = og.gradient(og.onnx.load(cnn()), ("conv1.weight",))
    with pytest.raises(Unimplemented, match=r"(?s)differentiated once.*fix:"):
        og.gradient(h, ("x",))
    twice = og.gradient(og.gradient(og.onnx.load(block()), ("up",)), ("up",))  # all ops after it are native
    assert [t.name for t in twice.outputs] == ["d_up"]


def test_hand_written_wildcard_backward_is_checked() -> None:
    g = og.Graph()
    x = g.input("x", shape=(3,))
    with pytest.raises(InvalidGraphOp, match=r"(?s)its attributes do not say.*where:.*fix:"):
        g.add_op("WildcardBackward", x, outputs=1, dtype="f32", onnx_op="Relu")


def test_gradient_graph_round_trips_through_text() -> None:
    h = og.gradient(og.onnx.load(cnn()), ("conv1.weight", "norm.bias"))
    large = {t.name: t.data for t in h.constants if t.name and t.data.size > 64}
    assert og.parse(str(h), constants=large) == h
