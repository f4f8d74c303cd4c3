"""torch.compile(backend="opgraph"): found by name, correct in training and in inference."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from importlib.metadata import entry_points

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.torch.dynamo import backend  # noqa: E402
from opgraph.torch.graph.backend import observed  # noqa: E402


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.alpha = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        h = self.a(x)
        h = h * torch.sigmoid(self.alpha * h) + 0.5
        h += F.relu(h)
        return self.b(h)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()


def gradients(model, function, x):
    model.zero_grad()
    function(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_training_and_inference_agree_with_eager():
    captured = []
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 6)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with observed(captured.append):
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(gradients(model, compiled, x), gradients(model, model, x))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
    # All arithmetic between the two linear layers is one kernel.
    training, inference = captured
    assert (len(training.forward.launches), len(inference.inference.launches)) == (1, 1)


def tangents(function):
    """The tangents of a function's result, and of its gradient for a cotangent with a tangent; and the Jacobian."""
    x = torch.linspace(-1, 2, 7)
    leaf = x.clone().requires_grad_()
    before = function(leaf)
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(x, torch.linspace(1, 3, 7)))
        (gradient,) = torch.autograd.grad(before, leaf, forward_ad.make_dual(torch.ones(7), torch.linspace(3, 1, 7)))
        found = [forward_ad.unpack_dual(t).tangent for t in (dual, gradient)]
    rows = torch.autograd.functional.jacobian(function, x, vectorize=True, strategy="forward-mode")
    return [*found, rows]


@pytest.mark.parametrize("is_module", [False, True], ids=["compile", "fuse"])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_forward_mode_derivatives_agree_with_eager(is_module):
    """Programs ignore tangents. In forward mode a graph runs as Dynamo captured it, and its backward runs op by op."""

    def f(x):
        return torch.softmax(torch.sin(x) * x, 0) + 1

    class Own(nn.Module):
        def forward(self, x):
            return f(x)

    fused = ogt.fuse(Own()) if is_module else torch.compile(f, backend="opgraph")
    torch.testing.assert_close(tangents(fused), tangents(f))


def test_functions_that_enter_cuda_streams_run_unfused():
    """All of a program's kernels run on one stream. Dynamo marks ops under `with torch.cuda.stream(...)` like this."""

    class Inner(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            y = x * 2 + 1
            with torch.fx.traceback.annotate({"stream": 1}):
                return self.inner(y) + torch.tanh(y)

    captured = []
    compiled, x = torch.compile(Outer(), backend=backend), torch.randn(64)
    with (
        observed(captured.append),
        pytest.warns(UserWarning, match="enters streams of a device runs as it was written"),
    ):
        torch.testing.assert_close(compiled(x), Outer()(x))
    (inner,) = captured
    assert len(inner.inference.launches) == 1 and "tanh" not in inner.inference.source


def test_dynamic_sizes_agree_with_eager():
    model = Net()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for size in (2, 3, 7):
        x = torch.randn(size, 6)
        torch.testing.assert_close(compiled(x), model(x))


def test_function_with_graph_break_agrees_with_eager():
    def broken(x):
        y = torch.tanh(x) * 2
        torch._dynamo.graph_break()
        return y.relu() + y

    x = torch.randn(4)
    torch.testing.assert_close(torch.compile(broken, backend=backend)(x), broken(x))


def test_tensor_methods_passed_as_values_are_guarded():
    """Dynamo itself does not distinguish them."""

    def calling(method):
        return lambda x: method(x) * 2

    x = torch.tensor([-1.5, 1.5])
    for method in (torch.Tensor.ceil, torch.Tensor.floor):
        torch.testing.assert_close(torch.compile(calling(method), backend=backend)(x), calling(method)(x))


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = self.b(self.a(x) * random.uniform(0.5, 2))
        return x if random.uniform(0, 1) < 0.4 else torch.tanh(x) + random.randint(0, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_python_random_draws_anew_at_each_call(dtype):
    torch.manual_seed(0)
    model, x = LayerDrop().to(dtype), torch.randn(5, 6, dtype=dtype)
    compiled, found = torch.compile(model, backend="opgraph"), {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a graph of f64 tensors")
        for function in (compiled, model):
            random.seed(4)
            found[function] = [(function(x), gradients(model, function, x)) for _ in range(8)]
    for got, expected in zip(found[compiled], found[model], strict=True):
        torch.testing.assert_close(got, expected)


def test_an_unknown_option_is_refused():
    with pytest.raises(Exception, match="no option 'fast'"):
        torch.compile(lambda x: x * 2 + 1, backend=backend, options={"fast": True})(torch.randn(3))


ALONE = """
import sys, torch
assert not [m for m in sys.modules if m.startswith("opgraph")]
def f(x, a):
    return x * torch.sigmoid(a * x)
x, a = torch.randn(7, requires_grad=True), torch.tensor(1.3, requires_grad=True)
y = torch.compile(f, backend="opgraph", fullgraph=True)(x, a)
y.sum().backward()
torch.testing.assert_close(y, f(x, a))
assert "opgraph.torch.graph.program" in sys.modules
print(type(y.grad_fn).__name__)
"""


def test_the_entry_point_is_found_without_an_import(tmp_path):
    if "opgraph" not in [e.name for e in entry_points(group="torch_dynamo_backends")]:
        pytest.skip("opgraph is not installed here, only on the path: no entry points")
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "CompiledFunctionBackward"


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_first_import_may_happen_under_no_grad(mode):
    code = f"""
import torch
with torch.{mode}():
    import opgraph.torch as ogt
x = torch.ones(3, requires_grad=True)
ogt.fuse(lambda x: x.exp() * 2)(x).sum().backward()
torch.testing.assert_close(x.grad, 2 * x.detach().exp())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_nested_compile_regions_agree_with_eager():
    @torch.compiler.nested_compile_region
    def region(x):
        return torch.sin(x) * torch.sigmoid(x)

    def function(x):
        return region(region(x)) + region(x * 2)

    x = torch.linspace(-2, 2, 48).view(6, 8).requires_grad_()
    found = [call(x) for call in (torch.compile(function, backend="opgraph"), function)]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*[torch.autograd.grad(y.sum(), x)[0] for y in found])


def test_flex_attention_with_score_mod_agrees_with_eager():
    def function(x):
        return flex_attention(x, x, x, score_mod=lambda value, *place: value * torch.sigmoid(value)) * 2

    x = torch.linspace(-2, 2, 2 * 2 * 16 * 8).view(2, 2, 16, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        torch.testing.assert_close(torch.compile(function, backend="opgraph")(x), function(x))
