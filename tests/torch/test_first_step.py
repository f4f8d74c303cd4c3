"""Work that a captured model's first step does once, or not at all; `opgraph bench` measures its time."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.fx import Graph, GraphModule  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.torch.graph.backend import observed  # noqa: E402
from opgraph.torch.graph.common_subexpressions import share_common_subexpressions  # noqa: E402
from opgraph.torch.graph.constant_folding import fold_constants  # noqa: E402

aten = torch.ops.aten


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return (torch.sigmoid(self.lin(x)) * torch.sigmoid(self.lin(x))).sum()


@pytest.fixture
def gated():
    torch._dynamo.reset()
    return ogt.fuse(Gated())


def test_common_subexpressions_are_shared_without_inductor(gated, monkeypatch):
    """torch's own pass loads Inductor's lowerings, which takes a tenth of a first step."""
    from torch._functorch import partitioners

    called = []
    monkeypatch.setattr(partitioners, "fx_graph_cse", lambda graph: called.append(graph) or graph)
    captured = []
    with observed(captured.append):
        gated(torch.randn(4, 8)).backward()
    assert not called
    (graph,) = captured
    assert [n.target for n in graph.forward.library_calls] == [aten.addmm.default]


def test_garbage_collector_is_off_during_capture(gated):
    """Captured objects stay alive: collecting garbage among them takes a tenth of a first step."""
    states = []
    with observed(lambda captured: states.append(gc.isenabled())):
        gated(torch.randn(4, 8)).backward()
    assert states == [False]
    assert gc.isenabled()


@pytest.fixture
def texts(monkeypatch):
    """Log texts of torch's compilers: printed graphs, and function names from tokenized files."""
    written = []
    print_readable = GraphModule.print_readable

    def printed(*args, **kwargs):
        written.append("graph")
        return print_readable(*args, **kwargs)

    monkeypatch.setattr(GraphModule, "print_readable", printed)
    from torch._dynamo import funcname_cache

    monkeypatch.setattr(funcname_cache, "cache", {})
    monkeypatch.setattr(
        funcname_cache, "_add_file", lambda name: funcname_cache.cache.update({name: {}, "written": {}})
    )
    return lambda: written + list(funcname_cache.cache)


def test_disabled_torch_logs_format_no_text(gated, texts):
    gated(torch.randn(4, 8)).backward()
    assert texts() == []


def test_enabled_torch_logs_format_their_text(gated, texts):
    torch._logging.set_logs(aot_joint_graph=True, trace_call=True)
    try:
        gated(torch.randn(4, 8)).backward()
    finally:
        torch._logging.set_logs()
    assert {"graph", "written"} <= set(texts())


def test_other_backends_still_format_log_text(texts):
    torch._dynamo.reset()
    torch.compile(Gated(), backend="aot_eager")(torch.randn(4, 8)).backward()
    assert {"graph", "written"} <= set(texts())


@pytest.mark.slow
def test_first_step_does_not_load_inductors_scheduler():
    code = (
        "import sys, torch, opgraph.torch as ogt\n"
        "ogt.fuse(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU()))(torch.randn(2, 4)).sum().backward()\n"
        "print(*[name for name in ('torch._inductor.debug', 'torch._inductor.scheduler') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_equal_constants_share_one_attribute():
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, device="meta")
    computed = []

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty(3, device="meta")
        return node

    sums = [call(aten.mul.Tensor, x, call(aten.exp.default, call(aten.arange.start, 1, 4))) for _ in range(2)]
    call(aten.sin.default, call(aten.arange.start, 1, 4))  # unused
    graph.output((call(aten.add.Tensor, *sums),))
    module = GraphModule(nn.Module(), graph)
    share_common_subexpressions(graph)
    with Counting(computed):
        fold_constants(module)
    assert computed.count(aten.exp.default) == 1 and aten.sin.default not in computed
    assert [n.name for n in module.graph.nodes if n.op == "get_attr"] == ["constant_exp_default"]
    module.recompile()
    given = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(module(given)[0], 2 * given * torch.arange(1, 4).exp())


class Counting(TorchDispatchMode):
    def __init__(self, computed):
        super().__init__()
        self.computed = computed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.computed.append(func)
        return func(*args, **(kwargs or {}))


def test_program_text_is_computed_only_when_observed(gated, monkeypatch):
    from opgraph.torch.graph import program_text

    monkeypatch.setattr(program_text, "_first_readers", lambda inputs: pytest.fail("nobody looks on"))
    gated(torch.randn(4, 8)).backward()


class Layers(nn.Module):
    """Equal layers, except the last one."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(count))
        self.last = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU())

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def test_equal_layers_are_lowered_and_planned_once(monkeypatch):
    from opgraph.runtime.cpu_kernel import HostKernel
    from opgraph.torch.graph import launches

    lowered, planned, counts = [], [], []
    lower, plan = launches._launches, HostKernel.plan
    monkeypatch.setattr(launches, "_launches", lambda *args: lowered.append(args) or lower(*args))
    monkeypatch.setattr(HostKernel, "plan", lambda *args: planned.append(args) or plan(*args))
    for count in (3, 6):
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain, fused = Layers(count), ogt.fuse(Layers(count))
        fused.load_state_dict(plain.state_dict())
        x = torch.randn(4, 8)
        captured = []
        with observed(captured.append):
            results = []
            for model in (plain, fused):
                y = model(x)
                results.append([y, *torch.autograd.grad(y, list(model.parameters()), torch.ones_like(y))])
        torch.testing.assert_close(*results)
        (graph,) = captured
        calls = [*graph.forward.launches, *graph.backward.launches]
        assert all(n in launch.nodes[0].graph.nodes for launch in calls for n in launch.nodes)
        counts.append((len(lowered), len(planned), len(calls)))
        lowered.clear()
        planned.clear()
    few, many = counts
    assert few[:2] == many[:2]
    assert many[2] - few[2] >= 2 * 3  # each layer has at least one kernel each way


def test_fake_values_of_equal_views_are_made_once(monkeypatch):
    """A view, and arithmetic in another order of axes, in layers of one size: torch computes one value without data."""
    from opgraph.torch.graph import axis_order

    made = []
    empty = axis_order._Views._value
    monkeypatch.setattr(
        axis_order._Views, "_value", lambda self, key, make: empty(self, key, lambda: made.append(key) or make())
    )

    counts = []
    for count in (2, 5):
        torch._dynamo.reset()
        plain, fused = Turned(count), ogt.fuse(Turned(count))
        x = torch.randn(3, 4, 5)
        torch.testing.assert_close(fused(x), plain(x))
        counts.append(len(made))
        made.clear()
    assert counts[0] == counts[1] > 0


class Turned(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        for _ in range(self.count):
            x = torch.exp(torch.exp(x).permute(1, 2, 0)).permute(2, 0, 1) @ torch.ones(5, 5)
        return x


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def targets(module):
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def test_equal_calls_are_merged():
    def function(x, y):
        return (x + 1) * (x + 1.0) * (x + 1) + torch.cat([x, y]).sum() + torch.cat([x, y]).sum()

    module = traced(function, torch.randn(3), torch.randn(3))
    share_common_subexpressions(module.graph)
    assert targets(module).count(aten.add.Tensor) == 4  # 1 and 1.0 differ, and the last two add up results
    assert targets(module).count(aten.cat.default) == targets(module).count(aten.sum.default) == 1
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(module(x, y), function(x, y))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2, x * 2),  # both are returned as separate tensors
        lambda x: ((x * 2)[1:], (x * 2).sum()),  # one of them shares memory with a result
        lambda x: (torch.bernoulli(x) + torch.bernoulli(x),),
        lambda x: (x.copysign(0.0) + x.copysign(-0.0),),
        lambda x: (torch.empty_like(x).fill_(1) + torch.empty_like(x).fill_(2) + x,),
        lambda x: (x.exp() + x.mul_(2).exp(),),  # one before and one after a write
    ],
    ids=["returned", "memory of a result", "random", "signed zeros", "empty", "written"],
)
def test_different_calls_are_not_merged(function):
    module = traced(function, torch.rand(4))
    before = targets(module)
    share_common_subexpressions(module.graph)
    assert targets(module) == before


@pytest.mark.sweep
def test_same_calls_are_merged_as_by_torchs_cse_pass():
    from torch._functorch.compile_utils import fx_graph_cse

    def function(x, w):
        y = torch.relu(x @ w) + torch.relu(x @ w).mean(1, keepdim=True)
        return y.view(2, 6), (y * y.sum(0)).view(-1), torch.relu(x @ w).exp() * y.sum(0)

    inputs = torch.randn(3, 4), torch.randn(4, 4)
    module = traced(function, *inputs)
    theirs: Graph = fx_graph_cse(module.graph)
    expected = targets(GraphModule(module, theirs))
    share_common_subexpressions(module.graph)
    assert targets(module) == expected
