"""A model from ONNX gives onnxruntime's results in torch, trains, and is exported again with everything else kept."""

from __future__ import annotations

import copy
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import InvalidArguments, InvalidShape, Unimplemented  # noqa: E402

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "onnx-models"
REAL = {
    "efficientnet": 1e-5,
    "gpt2": 2e-6,
    "llama": 2e-6,
    "llama_op20_bf16": 2.0**-6,
    "llama_op23": 2e-6,
    "qwen3": 2e-6,
}
#: Float buffers with axes: frequencies that are multiplied with positions, not with data.
TABLES: dict[str, set[str]] = {"efficientnet": set(), "gpt2": set(), "llama_op20_bf16": {"_to_copy_1"}}
CHANNELS, CLASSES = 6, 5


# -- models ------------------------------------------------------------------------------------------------------------


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def make(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32) * 0.5

    return {
        "conv.weight": make(CHANNELS, 3, 3, 3),
        "conv.bias": make(CHANNELS),
        "norm.weight": 1 + make(CHANNELS) * 0.1,
        "norm.bias": make(CHANNELS),
        "norm.mean": make(CHANNELS),
        "norm.var": 1 + np.abs(make(CHANNELS)),
        "act/slope:0": np.abs(make(CHANNELS, 1, 1)),
        "factor": np.float32(0.5),
        "head.weight": make(CHANNELS, CLASSES),
        "head.bias": make(CLASSES),
        "shape": np.array([0, -1], np.int64),
    }


def classifier() -> Any:
    """Conv, BatchNormalization, a swish with a slope per channel, pooling, Gemm, and a function of the model itself."""
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node(
            "BatchNormalization", ["c", "norm.weight", "norm.bias", "norm.mean", "norm.var"], ["n"], name="norm",
            momentum=0.8, epsilon=1e-4,
        ),
        helper.make_node("Mul", ["n", "act/slope:0"], ["scaled"], name="scale"),
        helper.make_node("Sigmoid", ["scaled"], ["s"], name="gate"),
        helper.make_node("Mul", ["n", "s"], ["swish"], name="swish"),
        helper.make_node("Halved", ["swish", "factor"], ["halved"], name="halved", domain="mine"),
        helper.make_node("GlobalAveragePool", ["halved"], ["pooled"], name="pool"),
        helper.make_node("Reshape", ["pooled", "shape"], ["flat"], name="flatten"),
        helper.make_node("Gemm", ["flat", "head.weight", "head.bias"], ["logits"], name="head"),
    ]  # fmt: skip
    nodes[0].metadata_props.add(key="written by", value="hand")
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(a, n) for n, a in tensors().items()],
        doc_string="a small classifier",
    )
    body = helper.make_function(
        "mine", "Halved", ["a", "b"], ["r"], [helper.make_node("Mul", ["a", "b"], ["r"])],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    model = helper.make_model(graph, opset_imports=imports, functions=[body], ir_version=9, producer_name="a test")
    helper.set_model_props(model, {"licence": "free"})
    return model


class Twin(nn.Module):
    """The same classifier, written by hand in torch."""

    def __init__(self) -> None:
        super().__init__()
        given = {n: torch.from_numpy(np.array(a)) for n, a in tensors().items()}
        self.conv = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS, eps=1e-4, momentum=0.2)
        self.slope = nn.Parameter(given["act/slope:0"])
        self.head = nn.Linear(CHANNELS, CLASSES)
        with torch.no_grad():
            self.conv.weight.copy_(given["conv.weight"])
            self.conv.bias.copy_(given["conv.bias"])
            self.norm.weight.copy_(given["norm.weight"])
            self.norm.bias.copy_(given["norm.bias"])
            self.norm.running_mean.copy_(given["norm.mean"])
            self.norm.running_var.copy_(given["norm.var"])
            self.head.weight.copy_(given["head.weight"].t())
            self.head.bias.copy_(given["head.bias"])

    def forward(self, x: Any) -> Any:
        n = self.norm(self.conv(x))
        return self.head((n * torch.sigmoid(n * self.slope) * 0.5).mean((2, 3)))

    def gradients(self) -> dict[str, Any]:
        return {
            "conv.weight": self.conv.weight.grad,
            "conv.bias": self.conv.bias.grad,
            "norm.weight": self.norm.weight.grad,
            "norm.bias": self.norm.bias.grad,
            "act/slope:0": self.slope.grad,
            "head.weight": self.head.weight.grad.t(),
            "head.bias": self.head.bias.grad,
        }


WEIGHTS = set(tensors()) - {"norm.mean", "norm.var", "factor", "shape"}


def images(batch: int = 4) -> Any:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def run(path: Path | Any, x: Any) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    given = str(path) if isinstance(path, Path) else path.SerializeToString()
    session = ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def stripped(model: Any) -> Any:
    """A model without the data of its initializers."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        for field in ("raw_data", "float_data", "int64_data", "external_data", "data_location"):
            tensor.ClearField(field)
    return result


# -- the small model ---------------------------------------------------------------------------------------------------


def test_outputs_agree_with_onnxruntime() -> None:
    model = classifier()
    with torch.no_grad():
        got = ogt.from_onnx(model)(images())
    np.testing.assert_allclose(got.numpy(), run(model, images()), rtol=1e-5, atol=1e-6)


def test_weights_are_parameters_and_other_tensors_buffers() -> None:
    module = ogt.from_onnx(classifier())
    assert {module.onnx_names[n] for n, _ in module.named_parameters()} == WEIGHTS
    assert set(module.state_dict()) == set(tensors()) == set(module.onnx_names)
    assert not module.training


@pytest.mark.parametrize("training", [False, True])
def test_gradients_and_statistics_agree_with_an_equal_torch_model(training: bool) -> None:
    module, twin = ogt.from_onnx(classifier()).train(training), Twin().train(training)
    x, y = images().requires_grad_(), images().requires_grad_()
    ours, theirs = module(x), twin(y)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn(ours.shape)
    ours.backward(weight)
    theirs.backward(weight)
    torch.testing.assert_close(x.grad, y.grad)
    found = {module.onnx_names[n]: p.grad for n, p in module.named_parameters()}
    expected = twin.gradients()
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(module.state_dict()["norm.mean"], twin.norm.running_mean)
    torch.testing.assert_close(module.state_dict()["norm.var"], twin.norm.running_var)


def test_fused_partition_saves_only_its_inputs() -> None:
    module = ogt.from_onnx(classifier())
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = images()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    one = 4 * CHANNELS * 8 * 8 * 4  # bytes of one activation
    # BatchNormalization keeps the convolution's result; the swish and everything after it keep BatchNormalization's.
    assert sum(size == one for size in kept.values()) == 2, sorted(kept.values())


def trained_module(source: Any) -> Any:
    """A module after some SGD steps; checks that the loss went down."""
    module = ogt.from_onnx(source).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    labels = torch.arange(4) % CLASSES
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(images()), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    return module.eval()


def test_trained_model_runs_in_onnxruntime_with_only_weights_changed(tmp_path: Path) -> None:
    model = classifier()
    module = trained_module(model)
    ogt.to_onnx(module, tmp_path / "trained.onnx")
    saved = onnx.load(tmp_path / "trained.onnx")
    onnx.checker.check_model(saved, full_check=True)
    assert stripped(saved) == stripped(model)
    with torch.no_grad():
        np.testing.assert_allclose(
            run(tmp_path / "trained.onnx", images()), module(images()).numpy(), rtol=1e-5, atol=1e-6
        )
    changed = {
        t.name for t in saved.graph.initializer if numpy_helper.to_array(t).tobytes() != tensors()[t.name].tobytes()
    }
    assert changed == WEIGHTS | {"norm.mean", "norm.var"}
    again = ogt.from_onnx(tmp_path / "trained.onnx").state_dict()
    assert all(torch.equal(v, again[k]) for k, v in module.state_dict().items())


@pytest.mark.parametrize("name", ["model.onnx", "other.onnx", "elsewhere/model.onnx"])
def test_external_data_stays_external(name: str, tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(
        classifier(), source, save_as_external_data=True, location="model.onnx.data", size_threshold=64,
        convert_attribute=False,
    )  # fmt: skip
    before = onnx.load(source, load_external_data=False)
    outside = {t.name for t in before.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    assert outside
    module = trained_module(source)
    target = tmp_path / name
    target.parent.mkdir(exist_ok=True)
    module.save(target)
    after = onnx.load(target, load_external_data=False)
    assert {t.name for t in after.graph.initializer if t.data_location == TensorProto.EXTERNAL} == outside
    assert stripped(after) == stripped(before)
    with torch.no_grad():
        np.testing.assert_allclose(run(target, images()), module(images()).numpy(), rtol=1e-5, atol=1e-6)
    if name != "model.onnx":
        np.testing.assert_allclose(run(source, images()), run(classifier(), images()), rtol=1e-5, atol=1e-6)


def test_unchanged_data_file_is_referenced_not_copied(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(classifier(), source, save_as_external_data=True, location="weights.bin", size_threshold=64)
    module = ogt.from_onnx(source)
    module.save(tmp_path / "copy.onnx")
    assert not (tmp_path / "copy.onnx.data").exists()
    with torch.no_grad():
        module.get_parameter("head.weight").add_(1)
    module.save(tmp_path / "copy.onnx")
    files = {
        t.name: {e.key: e.value for e in t.external_data}["location"]
        for t in onnx.load(tmp_path / "copy.onnx", load_external_data=False).graph.initializer
        if t.data_location == TensorProto.EXTERNAL
    }
    assert {n for n, f in files.items() if f == "copy.onnx.data"} == {"head.weight"}
    assert set(files.values()) == {"weights.bin", "copy.onnx.data"}
    with torch.no_grad():
        np.testing.assert_allclose(
            run(tmp_path / "copy.onnx", images()), module(images()).numpy(), rtol=1e-5, atol=1e-6
        )


def test_model_with_one_changed_weight_is_saved_over_itself(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(classifier(), source, save_as_external_data=True, location="model.onnx.data", size_threshold=64)
    module = ogt.from_onnx(source)
    with torch.no_grad():
        module.get_parameter("head.weight").add_(1)
        expected = module(images()).numpy()
    module.save(source)
    np.testing.assert_allclose(run(source, images()), expected, rtol=1e-5, atol=1e-6)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_model_saved_over_itself_can_restore_its_first_weights(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(classifier(), source, save_as_external_data=True, location="model.onnx.data", size_threshold=64)
    module = ogt.from_onnx(source)
    first = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        module.get_parameter("head.weight").add_(1)
    module.save(source)
    module.load_state_dict(first)
    for name in ("model.onnx", "other.onnx"):
        module.save(tmp_path / name)
        np.testing.assert_allclose(run(tmp_path / name, images()), run(classifier(), images()), rtol=1e-5, atol=1e-6)


def test_trainable_accepts_names_or_a_function() -> None:
    some = ogt.from_onnx(classifier(), trainable=("head.weight", "factor"))
    assert {some.onnx_names[n] for n, _ in some.named_parameters()} == {"head.weight", "factor"}
    norms = ogt.from_onnx(classifier(), trainable=lambda name: name.startswith("norm."))
    assert {n for n, _ in norms.named_parameters()} == {"norm.weight", "norm.bias", "norm.mean", "norm.var"}
    with pytest.raises(InvalidArguments, match=r"(?s)'shape' is no float initializer.*where:.*fix:"):
        ogt.from_onnx(classifier(), trainable=("shape",))


def test_copied_module_has_independent_weights() -> None:
    module = ogt.from_onnx(classifier())
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.get_parameter("head.bias").add_(1)
        torch.testing.assert_close(other(images()), module(images()) + 1)


def test_pickled_module_runs_and_is_saved_without_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    source = folder / "model.onnx"
    onnx.save(classifier(), source, save_as_external_data=True, location="model.onnx.data", size_threshold=64)
    module = ogt.from_onnx(source)
    with torch.no_grad():
        module.get_parameter("head.weight").add_(1)
    pickled = pickle.dumps(module)
    shutil.rmtree(folder)
    other = pickle.loads(pickled)
    assert torch.equal(other(images()), module(images()))
    other.save(tmp_path / "other.onnx")
    assert torch.equal(ogt.from_onnx(tmp_path / "other.onnx")(images()), module(images()))


def test_module_moves_to_float64(tmp_path: Path) -> None:
    module = ogt.from_onnx(classifier())
    wide = copy.deepcopy(module).double()
    out = wide(images().double())
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.float(), module(images()))
    wide.save(tmp_path / "m.onnx")
    assert onnx.load(tmp_path / "m.onnx") == classifier()


def test_input_defaults_are_weights_that_a_call_may_replace(tmp_path: Path) -> None:
    """Exporters of the first years listed every initializer among the inputs."""
    model, plain = classifier(), ogt.from_onnx(classifier())
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    module = ogt.from_onnx(model)
    assert {k for k, _ in module.named_parameters()} == {k for k, _ in plain.named_parameters()}
    assert set(module.state_dict()) == set(plain.state_dict())
    x = images()
    with torch.no_grad():
        torch.testing.assert_close(module(x), plain(x))
        plain.get_parameter("head.bias").add_(1)
        torch.testing.assert_close(module(x, **{"head.bias": plain.get_parameter("head.bias")}), plain(x))
    with pytest.raises(InvalidArguments, match="x is missing"):
        module()
    module(x).sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.01)
        module.save(tmp_path / "trained.onnx")
        np.testing.assert_allclose(run(tmp_path / "trained.onnx", x), module(x).numpy(), rtol=1e-4, atol=1e-5)


def test_inputs_are_passed_by_position_or_name_and_checked() -> None:
    module = ogt.from_onnx(classifier())
    torch.testing.assert_close(module(x=images()), module(images()))
    with pytest.raises(InvalidArguments, match=r"(?s)x is missing.*where:.*fix:"):
        module()
    with pytest.raises(InvalidArguments, match=r"(?s)where:.*fix:"):
        module(images(), images())
    with pytest.raises(InvalidShape, match=r"(?s)got shape \[3, 8, 8\] for \[batch,3,8,8\].*where: input \"x\".*fix:"):
        module(images()[0])


def test_names_invalid_in_torch_are_changed() -> None:
    names = ["forward", "a", "a.b", "graph", "_plan", "train.x", "odd..name"]
    nodes = [helper.make_node("Add", ["x" if i == 0 else f"t{i - 1}", n], [f"t{i}"]) for i, n in enumerate(names)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info(f"t{len(names) - 1}", TensorProto.FLOAT, [3])],
        [numpy_helper.from_array(np.full(3, i, np.float32), n) for i, n in enumerate(names)],
    )
    module = ogt.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    assert set(module.onnx_names.values()) == set(names)
    assert set(module.onnx_names) == set(module.state_dict())
    assert len(list(module.parameters())) == len(names)
    assert torch.equal(module(torch.zeros(3)), torch.full((3,), 21.0))
    assert "forward" not in module.onnx_names  # a method of every module


def test_gather_with_a_scalar_index_gives_a_scalar() -> None:
    """TorchScript's exporter writes this for each size that it reads from a shape."""
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> net (float[n, m] x) => (int64 y) '
        "{ i = Constant <value_int: int = 1> ()  s = Shape (x)  y = Gather (s, i) }"
    )
    made = ogt.from_onnx(onnx.parser.parse_model(text))(torch.zeros(2, 7))
    assert made.shape == () and made.item() == 7


def one_node(op: str, domain: str = "", **attrs: Any) -> Any:
    node = helper.make_node(op, ["x"], ["y"], name="odd one", domain=domain, **attrs)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 6, 6])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "c", "h", "w"])
    imports = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=imports, ir_version=10)


def test_nodes_without_a_torch_form_are_refused_by_name() -> None:
    with pytest.raises(Unimplemented, match=r'(?s)no torch form for LpPool.*where: LpPool "odd one".*fix:'):
        ogt.from_onnx(one_node("LpPool", kernel_shape=[2, 2]))
    scales = numpy_helper.from_array(np.float32([1, 1, 2, 2]), "scales")
    old = one_node("Resize")
    old.graph.node[0].input.append("scales")
    old.graph.initializer.append(scales)
    old.opset_import[0].version = 10
    with pytest.raises(Unimplemented, match="Resize with the definition of an opset before 11"):
        ogt.from_onnx(old)
    with pytest.raises(Unimplemented, match=r'(?s)AveragePool with dilations.*where: AveragePool "odd one".*fix:'):
        ogt.from_onnx(one_node("AveragePool", kernel_shape=[2, 2], dilations=[2, 2]))


@pytest.mark.parametrize(
    ("op", "dtype", "sizes"),
    [(f"Reduce{op}", np.int32, (2, 3, 4)) for op in ("Mean", "L2", "LogSum", "LogSumExp", "Min")]
    + [(f"Reduce{op}", dtype, (2, 0, 4)) for op in ("Max", "Min") for dtype in (np.float32, np.int32)],
)
def test_integer_and_empty_reductions_agree_with_onnxruntime(op: str, dtype: type, sizes: tuple[int, ...]) -> None:
    x = np.arange(1, np.prod(sizes) + 1, dtype=dtype).reshape(sizes)
    element = helper.np_dtype_to_tensor_dtype(x.dtype)
    node = helper.make_node(op, ["x", "axes"], ["y"], keepdims=0)
    ports = [helper.make_tensor_value_info(n, element, ["a", "b", "c"][:d]) for n, d in (("x", 3), ("y", 2))]
    axes = numpy_helper.from_array(np.array([-2]), "axes")
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = ogt.from_onnx(model)(torch.from_numpy(x)).numpy()
    expected = session.run(None, {"x": x})[0]
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


_POOL = {"kernel_shape": [2], "strides": [3], "pads": [0, 1], "ceil_mode": 1}  # a window would begin in the padding
_FLOOR = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
_ONE = {"mode": "cubic", "coordinate_transformation_mode": "pytorch_half_pixel"}


@pytest.mark.parametrize(
    ("op", "shape", "others", "attrs"),
    [
        ("MaxPool", (1, 1, 6), {}, _POOL),
        ("AveragePool", (1, 1, 6), {}, _POOL),
        ("AveragePool", (1, 1, 7), {}, {**_POOL, "count_include_pad": 1}),
        ("Resize", (1, 1, 3, 4), {"roi": None, "scales": None, "sizes": [1, 1, 3, 1]}, _ONE),
        ("Resize", (1, 1, 3, 4), {"roi": None, "scales": [1, 1, 2, 0.25]}, _ONE),
        ("ConvTranspose", (1, 1, 6), {"w": [[[2]]]}, {"strides": [3], "auto_pad": "SAME_UPPER"}),
        ("Resize", (1, 1, 10, 8), {"roi": None, "scales": [1, 1, 0.7, 2]}, {"mode": "nearest"}),
        ("Resize", (1, 1, 10, 8), {"roi": None, "scales": [1, 1, 0.7, 2]}, {"mode": "cubic"}),
        ("Resize", (1, 1, 6), {"roi": None, "scales": [1, 1, 2.4]}, _FLOOR),
        ("InstanceNormalization", (2, 3, 1, 1), {"w": [1, 2, 3], "b": [4, 5, 6]}, {}),
        ("GroupNormalization", (1, 3, 1), {"w": [1, 2, 3], "b": [4, 5, 6]}, {"num_groups": 3}),
        ("Slice", (3,), {"starts": [-5], "ends": [-9], "axes": [0], "steps": [-1]}, {}),
    ],
)
def test_edge_cases_of_pools_resize_and_slice_agree_with_onnxruntime(
    op: str, shape: tuple[int, ...], others: dict[str, Any], attrs: dict[str, Any]
) -> None:
    kinds = {"scales": np.float32, "w": np.float32, "b": np.float32}
    given = {n: np.array(v, kinds.get(n, np.int64)) for n, v in others.items() if v is not None}
    names = ["x", *(n if n in given else "" for n in others)]
    ports = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape)),
    ]
    constants = [numpy_helper.from_array(value, name) for name, value in given.items()]
    graph = helper.make_graph([helper.make_node(op, names, ["y"], **attrs)], "g", ports[:1], ports[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = ogt.from_onnx(model)(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(got, session.run(None, {"x": x})[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("x", [[2, np.inf, 3, 4], [1, 1e8, 8, 16], [5], []])
def test_exclusive_cumsum_never_includes_the_current_element(x: list[float], reverse: int) -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(x)]) for name in ("x", "y")]
    node = helper.make_node("CumSum", ["x", "axis"], ["y"], exclusive=1, reverse=reverse)
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], [numpy_helper.from_array(np.array(0), "axis")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    order = slice(None, None, -1 if reverse else 1)
    expected = np.cumsum(np.float32([0, *x[order]])[:-1])[order] if x else np.float32([])
    np.testing.assert_array_equal(ogt.from_onnx(model)(torch.tensor(x)).numpy(), expected)


F16 = np.linspace(-3, 2000, 12).astype(np.float16).reshape(2, 6)


@pytest.mark.parametrize(
    ("op", "opset", "x", "attrs", "results"),
    [
        ("TopK", 9, np.float32([3, 1, 2]), {"k": 2, "axis": 0}, {"y": (np.float32, 1), "i": (np.int64, 1)}),
        ("Reshape", 4, np.arange(6, dtype=np.float32), {"shape": [2, 3]}, {"y": (np.float32, 2)}),
        ("MaxPool", 12, np.int8([[[-8, -7, -6, -5]]]), {"kernel_shape": [2], "pads": [0, 1]}, {"y": (np.int8, 3)}),
        ("MaxPool", 12, np.uint8([[[250, 7, 6, 5]]]), {"kernel_shape": [2], "pads": [1, 1]}, {"y": (np.uint8, 3)}),
        (
            "LayerNormalization",
            17,
            F16,
            {},
            {"y": (np.float16, 2), "mean": (np.float32, 2), "inverse": (np.float32, 2)},
        ),
    ],
)
def test_old_op_versions_and_rare_dtypes_agree_with_onnxruntime(
    op: str, opset: int, x: np.ndarray, attrs: dict[str, Any], results: dict[str, Any]
) -> None:
    def port(name: str, dtype: Any, sizes: Any) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), sizes)

    scale = [numpy_helper.from_array(np.ones(6, np.float16), "w")] if op == "LayerNormalization" else []
    node = helper.make_node(op, ["x", *(t.name for t in scale)], list(results), **attrs)
    made = [port(n, dtype, [None] * rank) for n, (dtype, rank) in results.items()]
    graph = helper.make_graph([node], "g", [port("x", x.dtype, x.shape)], made, scale)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = ogt.from_onnx(model)(torch.from_numpy(x))
    for mine, expected in zip(got if len(results) > 1 else [got], session.run(None, {"x": x}), strict=True):
        assert mine.detach().numpy().dtype == expected.dtype
        np.testing.assert_allclose(mine.detach().numpy(), expected, rtol=1e-3 if mine.dtype == torch.float16 else 1e-5)


def test_dropout_mask_of_opset_9_has_the_dtype_of_the_data() -> None:
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y", "mask")]
    graph = helper.make_graph([helper.make_node("Dropout", ["x"], ["y", "mask"])], "g", ports[:1], ports[1:])
    module = ogt.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=8))
    assert [t.dtype for t in module(torch.ones(2))] == [torch.float32] * 2


@pytest.mark.parametrize(
    ("size", "named", "opset", "expected"),
    [(6, "ab-", 13, [2, 2]), (8, "-b--", 13, [2]), (4, "abc", 18, [2, 2, 0]), (0, "ab", 18, [0, 0])],
)
def test_split_gives_as_many_parts_as_the_node_lists(size: int, named: str, opset: int, expected: list[int]) -> None:
    made = named.replace("-", "")
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [s]) for n, s in zip(f"x{made}", (size, *expected))]
    attrs = {"num_outputs": len(named)} if opset == 18 else {}
    node = helper.make_node("Split", ["x"], ["" if n == "-" else n for n in named], **attrs)
    graph = helper.make_graph([node], "g", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    x = np.arange(size, dtype=np.float32)
    got = ogt.from_onnx(model)(torch.from_numpy(x))
    parts = {n: t.numpy() for n, t in zip(made, [got] if len(made) == 1 else got)}
    assert [len(part) for part in parts.values()] == expected
    assert all(part.tolist() == x[2 * named.index(n) :][: len(part)].tolist() for n, part in parts.items())


@pytest.mark.parametrize("op", ["ReduceL1", "ReduceL2", "ReduceSumSquare"])
def test_reduction_over_no_axes_acts_on_each_element(op: str) -> None:
    x = np.array([[-2, 0.5, 3]], np.float32)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], noop_with_empty_axes=1)], "g", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    expected = x * x if op == "ReduceSumSquare" else np.abs(x)
    np.testing.assert_array_equal(ogt.from_onnx(model)(torch.from_numpy(x)).numpy(), expected)


def test_to_onnx_refuses_modules_not_loaded_from_onnx() -> None:
    with pytest.raises(InvalidArguments, match=r"(?s)did not come from an ONNX model.*where:.*torch.onnx.export"):
        ogt.to_onnx(nn.Linear(2, 2), "never.onnx")


def test_dropout_is_active_only_in_training() -> None:
    node = helper.make_node("Dropout", ["x", "ratio"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [100])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [100])
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(np.float32(0.25), "ratio")])
    module = ogt.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    assert torch.equal(module(torch.ones(100)), torch.ones(100))
    torch.manual_seed(0)
    dropped = module.train()(torch.ones(100))
    assert set(dropped.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert 5 < (dropped == 0).sum() < 50


# -- every op of the table ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_outputs_agree_with_onnx_node_tests() -> None:
    """Each node of the table on the cases that onnx ships; unsupported ones are refused when they are read or run."""
    from onnx.backend.test.loader import load_model_tests

    from opgraph.runtime.providers.torch_onnx.table import form_of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = load_model_tests(kind="node")
    wrong, passed = [], set()
    for case in cases:
        node = case.model.graph.node[0]
        if len(case.model.graph.node) > 1 or form_of(node.domain, node.op_type) is None:
            continue
        # Skipped: dtypes that torch or NumPy lack, extremes of nothing; and dropout, which follows the module's mode.
        if node.op_type == "CastLike" or any(
            w in case.name for w in ("bf16", "bfloat16", "uint64", "empty_set", "training_dropout")
        ):
            continue
        try:
            module = ogt.from_onnx(case.model)
            for inputs, outputs in case.data_sets:
                made = module(*[torch.from_numpy(np.array(i)) for i in inputs if i is not None])
                for got, expected in zip(made if isinstance(made, tuple) else (made,), outputs, strict=True):
                    assert got.numpy().dtype == expected.dtype
                    # Some cases are stored with 4 digits.
                    slack = 2e-3 if expected.dtype == np.float16 else 1e-3
                    np.testing.assert_allclose(got.numpy(), expected, rtol=slack, atol=1e-5)
        except Unimplemented:
            continue
        except Exception as error:
            wrong.append(f"{case.name}: {error}")
        else:
            passed.add((node.op_type, case.name))
    assert not wrong, "\n".join(wrong)
    assert len(passed) > 350, len(passed)


# -- real exports ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=REAL)
def real(request: pytest.FixtureRequest) -> tuple[str, Any, Any, np.ndarray]:
    if not FOLDER.is_dir():
        pytest.skip("the exported models are not beside this checkout")
    name = str(request.param)
    with np.load(FOLDER / f"{name}_io.npz") as arrays:
        return name, ogt.from_onnx(FOLDER / f"{name}.onnx"), torch.from_numpy(arrays["x"]), arrays["y"]


def test_exported_model_gives_stored_outputs_and_trains(real: tuple[str, Any, Any, np.ndarray]) -> None:
    name, module, x, expected = real
    out = module(x)
    error = np.abs(out.detach().double().numpy() - expected).max() / np.abs(expected).max()
    assert error <= REAL[name], error
    out.float().square().mean().backward()
    weights = dict(module.named_parameters())
    assert len(weights) >= 12
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in weights.values())
    tables = {n for n, b in module.named_buffers() if b.is_floating_point() and b.dim()}
    assert tables == TABLES.get(name, {"m.model.rotary_emb.inv_freq"})


def test_exported_model_never_reads_values_from_the_device(real: tuple[str, Any, Any, np.ndarray]) -> None:
    _, module, x, expected = real
    # The meta device has no data: all shapes must come from the CPU.
    assert copy.deepcopy(module).to("meta")(x.to("meta")).shape == expected.shape


def test_trained_exported_model_is_saved_to_onnx(real: tuple[str, Any, Any, np.ndarray], tmp_path: Path) -> None:
    name, module, x, _ = real
    module = copy.deepcopy(module)
    before = module(x).float().square().mean()
    before.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 1e-2 * parameter.grad / parameter.grad.norm().clamp_min(1e-12)
    assert module(x).float().square().mean() < before
    module.save(tmp_path / "trained.onnx")
    source, saved = (
        onnx.load(p, load_external_data=False) for p in (FOLDER / f"{name}.onnx", tmp_path / "trained.onnx")
    )
    assert stripped(saved) == stripped(source)
    with torch.no_grad():
        expected = module(x)
        assert torch.equal(ogt.from_onnx(tmp_path / "trained.onnx")(x), expected)
    if name not in ("llama_op20_bf16", "llama_op23"):  # stock onnxruntime cannot run these
        got = run(tmp_path / "trained.onnx", x)
        assert np.abs(got - expected.numpy()).max() <= REAL[name] * np.abs(got).max()
