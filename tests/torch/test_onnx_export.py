"""torch's ONNX exporter on a fused function with Python branches on its parameters, which ONNX has no ops for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import opgraph.torch as ogt
from opgraph.torch import export_folding
from opgraph.torch.naf1 import NAF1, with_order

pytest.importorskip("onnxscript", reason="torch's ONNX exporter needs onnxscript")
ort = pytest.importorskip("onnxruntime", reason="runs the exported model")


class Network(nn.Module):
    def __init__(self, order: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.act: Any = with_order(order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.act(self.linear(x))
        return result


class Calling(Network):
    """A fused function in place of a fused module."""

    def __init__(self, order: float) -> None:
        super().__init__(order)
        self.call = ogt.fuse(self.act.forward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.call(self.linear(x))
        return result


def fused_module(order: float) -> nn.Module:
    network = Network(order)
    network.act = ogt.fuse(network.act)
    return network


def fused_network(order: float) -> nn.Module:
    return ogt.fuse(Network(order))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # warnings of the exporter
@pytest.mark.parametrize(("make", "order"), [(fused_module, 0.2), (fused_network, 1.8), (Calling, 1.1)])
def test_naf1_exports_with_its_parameter_arithmetic_folded(make: Any, order: float, tmp_path: Path) -> None:
    model = make(order).eval()
    with torch.no_grad():
        model.act.frac_order.add_(0.01)  # the export uses its present value
    rows = torch.export.Dim("rows")
    program = torch.onnx.export(model, (torch.randn(4, 8),), dynamo=True, verbose=False, dynamic_shapes=({0: rows},))
    program.save(tmp_path / "model.onnx")
    ops = [node.op_type for node in program.model_proto.graph.node]
    assert ops.count("Pow") == 1 and ops.count("Exp") == 3 and "Sigmoid" not in ops and len(ops) < 30
    run = ort.InferenceSession(tmp_path / "model.onnx")
    plain = Network(order)
    plain.load_state_dict(model.state_dict())
    for n in (3, 7):
        x = torch.randn(n, 8)
        (got,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(got, plain(x).detach().numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_parameter_combined_with_data_stays_a_parameter(tmp_path: Path) -> None:
    class Trainable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(self.slope * x) * torch.exp(self.slope)

    model = ogt.fuse(Trainable()).eval()
    program = torch.onnx.export(model, (torch.randn(4, 8),), dynamo=True, verbose=False)
    graph = program.model_proto.graph
    assert "slope" in [t.name for t in graph.initializer]
    assert [node.op_type for node in graph.node if "slope" in node.input] == ["Mul"]
    assert "Exp" not in [node.op_type for node in graph.node]
    program.save(tmp_path / "model.onnx")
    x = torch.randn(4, 8)
    run = ort.InferenceSession(tmp_path / "model.onnx")
    (got,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(got, Trainable()(x).detach().numpy(), rtol=2e-6, atol=1e-6)


def test_nothing_is_folded_outside_of_an_export() -> None:
    module = NAF1(0.3)
    fused = ogt.fuse(module.forward)
    x = torch.linspace(-2, 2, 9)
    (grad,) = torch.autograd.grad(fused(x).sum(), [module.frac_order])
    (eager,) = torch.autograd.grad(module(x).sum(), [module.frac_order])
    torch.testing.assert_close(grad, eager, rtol=1e-4, atol=1e-5)


def test_nothing_is_folded_under_functional_call_and_func_grad() -> None:
    model = ogt.fuse(NAF1(0.3))
    x = torch.linspace(-2, 2, 9)

    def total(order: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.func.functional_call(model, {"frac_order": order}, x)
        return y.sum()

    order = model.frac_order.detach()
    plain = NAF1(0.3)
    (eager,) = torch.autograd.grad(plain(x).sum(), [plain.frac_order])
    torch.testing.assert_close(torch.func.grad(total)(order), eager, rtol=1e-4, atol=1e-5)


def test_folding_never_switches_grad_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export creates a region at each change of that mode; 300 regions took a minute."""
    told = []

    class Told(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            told.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(export_folding, "is_in_onnx_export", lambda: True)
    with Told():
        y = export_folding.called_for_onnx(NAF1(), (torch.ones(3),), {})
    assert y.shape == (3,) and "where" in told
    assert not any("grad" in name for name in told)


class Scaled(nn.Module):
    """Numbers computed from parameters, from data, and from both, on either side of an op."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.7))
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, largest = torch.exp(self.a), x.max()
        own = torch.exp(self.a)
        if self.writes:
            own.add_(largest)
        return (
            (w * x).sigmoid() * own + torch.pow(w, x) / torch.exp(0.1 * largest) - w.sub(largest) * torch.maximum(w, x)
        )


@pytest.mark.filterwarnings("ignore")  # warnings of both of torch's exporters
@pytest.mark.parametrize("dynamo", [False, True], ids=["by tracing", "by torch.export"])
def test_numbers_that_depend_on_data_are_not_folded(dynamo: bool, tmp_path: Path) -> None:
    # torch.export refuses changes of constants.
    module = ogt.fuse(nn.Sequential(nn.Linear(8, 8), Scaled(writes=not dynamo))).eval()
    torch.manual_seed(0)
    path = tmp_path / "scaled.onnx"
    torch.onnx.export(module, (torch.randn(3, 8),), str(path), dynamo=dynamo, opset_version=18)
    session = ort.InferenceSession(str(path))
    for scale in (1, 5):
        x = torch.randn(3, 8) * scale
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(got, module(x).numpy(), rtol=1e-5, atol=1e-5)
