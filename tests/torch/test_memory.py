"""`saved_tensors` reports what autograd keeps: to the byte, by the right name, and at no cost to the model."""

from __future__ import annotations

import json
import logging
import logging.handlers
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from resident import resident_peak  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import InvalidArguments, Unimplemented  # noqa: E402
from opgraph.torch import zoo  # noqa: E402
from opgraph.torch.graph import program  # noqa: E402
from opgraph.torch.graph.backend import observed  # noqa: E402
from opgraph.torch.naf1 import NAF1  # noqa: E402

MIB = 2**20


class TrainableSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.a * x)


class KeepsOnCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.doubled = x * 2
        ctx.pair = [x.exp()]
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.doubled


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(self.act(x)))


def where_split(x: torch.Tensor) -> torch.Tensor:
    left, right = torch.where(x > 0, x, 1.0), torch.where(x <= 0, x, 1.0)
    return torch.where(x > 0, left.pow(0.7), right.exp())


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def hooked_bytes(call: Callable[[], Any], free: set[int]) -> int:
    """Bytes measured by plain torch hooks, without opgraph: each storage once, those of the weights not at all."""
    sizes = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage()._cdata] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    assert result is not None
    return sum(size for key, (size, _) in sizes.items() if key not in free)


SUBJECTS: dict[str, Callable[[], tuple[Any, torch.Tensor]]] = {
    "resnet18 relu": lambda: (zoo.resnet18(nn.ReLU), torch.randn(2, 3, 32, 32)),
    "resnet18 silu": lambda: (zoo.resnet18(nn.SiLU), torch.randn(2, 3, 32, 32)),
    "resnet18 trainable": lambda: (zoo.resnet18(TrainableSwish), torch.randn(2, 3, 32, 32)),
    "efficientnet": lambda: (zoo.efficientnet_b0(nn.Mish), torch.randn(2, 3, 32, 32)),
    "lstm": lambda: (nn.LSTM(8, 16, batch_first=True), torch.randn(2, 5, 8)),
    "attention": lambda: (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)),
    "where split": lambda: (where_split, torch.randn(5, 7, requires_grad=True)),
    "gated": lambda: (gated, torch.randn(5, 8, requires_grad=True)),
    "twice": lambda: (Twice(), torch.randn(3, 8)),
}


@pytest.fixture(params=SUBJECTS, ids=str)
def subject(request: pytest.FixtureRequest) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    return SUBJECTS[request.param]()


def test_totals_equal_the_bytes_seen_by_hooks(subject: tuple[Any, torch.Tensor]) -> None:
    model, x = subject
    report = ogt.saved_tensors(model, x)
    held = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    assert report.totals.kept == hooked_bytes(lambda: model(x), {t.untyped_storage()._cdata for t in held})
    assert report.totals.kept == report.totals.hooked == sum(k.counted for k in report.kept)
    for groups in (report.modules, report.classes, report.ops):
        assert sum(group.kept for group in groups) == report.totals.kept
    assert report.peak.unexplained == 0
    assert all(k.op for k in report.kept)


def test_torch_func_call_is_refused_with_its_line() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * torch.func.grad(lambda t: t.pow(3).sum())(x)

    with pytest.raises(Unimplemented, match="fn calls torch") as raised:
        ogt.saved_tensors(fn, torch.randn(3, requires_grad=True))
    assert "test_memory.py" in str(raised.value)


class CheckpointedDropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def block(t: torch.Tensor) -> torch.Tensor:
            return functional.dropout(t.sigmoid(), 0.3, self.training) * t

        return checkpoint(block, x.exp(), use_reentrant=False).sin()


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_random_op_that_backward_replays_is_counted(dry_run: bool) -> None:
    """A captured graph runs it in a higher-order operator, which saves the state of the generator."""
    model, x = ogt.fuse(CheckpointedDropout()), torch.randn(6, 8, requires_grad=True)
    report = ogt.saved_tensors(model, x, dry_run=dry_run)
    assert report.totals.kept == hooked_bytes(lambda: model(x), set())
    assert report.peak.unexplained == 0


@pytest.mark.slow
def test_dry_run_equals_real_run(subject: tuple[Any, torch.Tensor]) -> None:
    model, x = subject
    real, dry = ogt.saved_tensors(model, x), ogt.saved_tensors(model, x, dry_run=True)
    if isinstance(model, nn.LSTM):  # the size of oneDNN's workspace is known only after it has run
        assert [k.slot for k, r in zip(dry.kept, real.kept, strict=True) if k != r] == ["result3"]
        return
    assert dry.kept == real.kept
    assert dry.timeline == real.timeline
    assert dry.peak == real.peak


#: MiB at batch 128, measured with hooks on a real run of the same networks.
KNOWN = [
    ("resnet18", nn.ReLU, 574), ("resnet18", nn.SiLU, 846), ("resnet18", TrainableSwish, 1118),
    ("resnet50", nn.ReLU, 3115), ("resnet50", nn.SiLU, 4551), ("resnet50", TrainableSwish, 5987),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "activation", "mib"), KNOWN, ids=lambda v: getattr(v, "__name__", str(v)))
def test_dry_run_reports_known_sizes_without_allocating(model: str, activation: type[nn.Module], mib: int) -> None:
    network = zoo.MODELS[model](activation)
    x = torch.empty(128, 3, 32, 32)
    reports = []
    grown = resident_peak(lambda: reports.append(ogt.saved_tensors(network, x, dry_run=True)))
    assert round(reports[0].totals.kept / MIB) == mib
    assert reports[0].totals.kept <= reports[0].peak.bytes
    assert grown is None or grown < 150 * MIB


def test_backward_frees_all_but_the_gradients() -> None:
    model = zoo.resnet18()
    x = torch.randn(2, 3, 32, 32)
    report = ogt.saved_tensors(model, x, dry_run=True)
    gradients = sum(4 * p.numel() for p in model.parameters())
    assert report.peak.after_backward == gradients + 4 * x.numel() + 4 * 2 * 10


def test_zoo_networks_have_published_parameter_counts() -> None:
    counts = {name: sum(p.numel() for p in make().parameters()) for name, make in zoo.MODELS.items()}
    assert counts["resnet18"] == 11_173_962  # the CIFAR variants' well-known sizes
    assert counts["resnet50"] == 23_520_842
    # The paper's 5,288,548 with a classifier of 1,280,000 + 1,000; here it is 12,800 + 10.
    assert counts["efficientnet_b0"] == 5_288_548 - 1_281_000 + 12_810


# -- storages and their owners ---------------------------------------------------------------------------------------


def test_tensors_of_one_storage_count_once() -> None:
    report = ogt.saved_tensors(gated, torch.randn(4, 8, requires_grad=True))
    halves = [k for k in report.kept if k.shape == (4, 4) and k.role == "input"]
    assert [k.storage for k in halves] == [halves[0].storage] * 2
    # Half of the input is kept, and holds the whole storage.
    assert [(k.bytes, k.storage_bytes) for k in halves] == [(64, 128)] * 2
    assert [k.counted for k in halves] == [128, 0]
    assert (report.totals.kept, report.totals.inputs) == (128 + 64, 128)


def test_weights_and_preexisting_tensors_are_not_counted() -> None:
    scale = torch.randn(8)
    linear = nn.Linear(8, 8)
    report = ogt.saved_tensors(lambda x: linear(x) * scale, torch.randn(2, 8, requires_grad=True))
    assert {k.role for k in report.kept} == {"input", "outside"}
    assert report.totals.kept == 64
    report = ogt.saved_tensors(linear, torch.randn(2, 8, requires_grad=True))
    assert [(k.role, k.name, k.counted) for k in report.kept if k.role == "weight"] == [("weight", "weight", 0)]
    assert report.totals.weights == 256


def test_rounded_sizes_are_multiples_of_512_bytes() -> None:
    report = ogt.saved_tensors(lambda x: x.sin().exp(), torch.randn(129, requires_grad=True))
    assert (report.totals.kept, report.totals.rounded) == (2 * 516, 2 * 1024)
    report = ogt.saved_tensors(torch.exp, torch.randn((), requires_grad=True))
    assert (report.totals.kept, report.totals.rounded) == (4, 512)


def test_alone_counts_only_tensors_no_other_module_saves() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    report = ogt.saved_tensors(model, torch.randn(2, 4))
    found = {group.of[0]: (group.kept, group.alone) for group in report.modules}
    # ReLU keeps its output, which the next layer keeps anyway; SiLU keeps its input, which no other layer keeps.
    assert found == {"0": (32, 32), "1": (32, 0), "2": (0, 0), "3": (32, 32), "4": (32, 32)}


# -- names -----------------------------------------------------------------------------------------------------------


def test_saved_tensor_entry_names_module_call_op_and_line() -> None:
    report = ogt.saved_tensors(Twice(), torch.randn(3, 8, requires_grad=True))
    found = [(k.module, k.module_class, k.call, k.op, k.slot) for k in report.kept]
    assert found == [
        ("act", "SiLU", 1, "SiluBackward0", "self"),
        ("linear", "Linear", 1, "AddmmBackward0", "mat1"),
        ("linear", "Linear", 1, "AddmmBackward0", "mat2"),
        ("act", "SiLU", 2, "SiluBackward0", "self"),
    ]
    assert [k.name for k in report.kept] == ["input 0", "act: silu", "linear.weight", "linear: addmm"]
    line = Twice.forward.__code__.co_firstlineno + 1
    assert {(k.where, k.code) for k in report.kept} == {
        (f"{__file__}:{line}", "return self.act(self.linear(self.act(x)))")
    }


def test_entry_names_the_innermost_user_line() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    (kept,) = ogt.saved_tensors(outer, torch.randn(3, requires_grad=True)).kept
    assert (kept.where, kept.code) == (f"{__file__}:{inner.__code__.co_firstlineno + 1}", "return x.exp()")


def test_tensors_stored_on_ctx_are_counted() -> None:
    report = ogt.saved_tensors(KeepsOnCtx.apply, torch.randn(10, requires_grad=True))
    assert [(k.op, k.slot, k.hooked, k.counted) for k in report.kept] == [
        ("KeepsOnCtxBackward", "tensors", True, 40),
        ("KeepsOnCtxBackward", "ctx.doubled", False, 40),
        ("KeepsOnCtxBackward", "ctx.pair", False, 40),
    ]
    assert (report.totals.kept, report.totals.hooked) == (120, 40)
    assert "80 B of it: attributes of custom Functions" in str(report)


def test_memory_held_outside_autograd_is_unexplained() -> None:
    kept = []

    def hoards(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.detach().repeat(3) * 3)
        return x.exp()

    assert ogt.saved_tensors(hoards, torch.randn(10, requires_grad=True)).peak.unexplained == 120


# -- the peak --------------------------------------------------------------------------------------------------------


def test_timeline_and_peak_count_live_tensors() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).sigmoid()

    for dry_run in (False, True):
        report = ogt.saved_tensors(chain, torch.randn(100, requires_grad=True), dry_run=dry_run)
        # x, x + 1 and the sigmoid; then x, the sigmoid, the incoming gradient and the outgoing one.
        assert [(op, size) for _, _, op, size in report.timeline] == [
            ("add", 800), ("sigmoid", 1200), ("ones_like", 1200), ("sigmoid_backward", 1600),
        ]  # fmt: skip
        assert (report.peak.bytes, report.peak.phase, report.peak.op) == (1600, "backward", "sigmoid_backward")
        assert report.peak.after_forward == 800


def test_checkpoint_saves_its_input_and_recomputes() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return (x.sin().exp() * x).tanh()

    x = torch.randn(100, requires_grad=True)
    plain = ogt.saved_tensors(inner, x)
    report = ogt.saved_tensors(lambda x: checkpoint(inner, x, use_reentrant=False), x)
    assert plain.totals.kept == 3 * 400  # x, the exponential and the output
    assert report.totals.kept == 400
    assert "sin" in {op for phase, _, op, _ in report.timeline if phase == "backward"}
    assert report.notes == ()


def test_backward_ops_are_attributed_to_their_forward_module() -> None:
    report = ogt.saved_tensors(nn.Sequential(nn.Linear(4, 4), nn.SiLU()), torch.randn(2, 4))
    found = {(module, op) for phase, module, op, _ in report.timeline if phase == "backward"}
    assert ("1", "silu_backward") in found and ("0", "mm") in found


def test_failing_backward_keeps_the_forward_report() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no way back")

    report = ogt.saved_tensors(Fails.apply, torch.randn(10, requires_grad=True))
    assert report.totals.kept == 40
    assert report.notes == ("the backward pass failed, so the peak is that of what ran: no way back",)


# -- side effects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dry_run", [False, True])
def test_measurement_leaves_model_and_generator_unchanged(dry_run: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(2, 3, 8, 8)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ogt.saved_tensors(model, x, dry_run=dry_run)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert x.grad is None and not x.requires_grad
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_expanded_buffers_are_restored() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.arange(4.0).expand(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.places[0] += 1
            return (x * self.places).exp()

    model = Counts()
    assert ogt.saved_tensors(model, torch.ones(3, 4)).totals.kept > 0
    assert model.places.tolist() == [[0, 1, 2, 3]] * 3


def test_generators_of_python_and_numpy_are_restored() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * random.random() * np.random.rand()).exp()

    before = random.getstate(), np.random.get_state()[1].tolist()
    ogt.saved_tensors(function, torch.ones(4))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_callers_autograd_graph_stays_usable() -> None:
    w = torch.randn(10, requires_grad=True)
    x = w.exp()
    report = ogt.saved_tensors(torch.sigmoid, x)
    assert [k.op for k in report.kept] == ["SigmoidBackward0"]
    x.sum().backward()
    assert torch.equal(w.grad, w.exp())


@pytest.mark.slow
def test_compiled_function_is_measured_compiled() -> None:
    compiled = torch.compile(lambda x: x.sin() * x.exp(), backend="aot_eager")
    x = torch.randn(100, requires_grad=True)
    report = ogt.saved_tensors(compiled, x)
    assert {k.op for k in report.kept} == {"CompiledFunctionBackward"}
    assert report.totals.kept == report.totals.hooked > 0
    assert "CompiledFunction" in type(compiled(x).grad_fn).__name__


def test_inputs_require_grad_if_nothing_else_does() -> None:
    report = ogt.saved_tensors(torch.exp, torch.randn(4))
    assert report.totals.kept == 16
    assert report.notes == ("nothing required a gradient: the floating inputs were made to",)
    with torch.no_grad():
        report = ogt.saved_tensors(nn.Linear(2, 2), torch.randn(1, 2))
    assert report.totals.kept == 0
    assert report.notes == ("no output requires a gradient: nothing is kept for backward",)


# -- dry runs --------------------------------------------------------------------------------------------------------


def test_dry_run_reads_parameter_values() -> None:
    class Steered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.order = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = torch.sigmoid(self.order) * 1.8
            return x.exp() if order < 1 else x.sin().exp()

    x = torch.randn(6, requires_grad=True)
    assert ogt.saved_tensors(Steered(), x, dry_run=True).kept == ogt.saved_tensors(Steered(), x).kept
    assert ogt.saved_tensors(Steered(), x, dry_run=True).totals.tensors == 2


def test_dry_run_refuses_data_dependent_branch_with_its_line() -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        return x.exp() if x.sum() > 0 else x.sin()

    with pytest.raises(Unimplemented, match="asks for one") as caught:
        ogt.saved_tensors(asks, torch.randn(4, requires_grad=True), dry_run=True)
    line = asks.__code__.co_firstlineno + 1
    assert caught.value.where == f"{__file__}:{line}: return x.exp() if x.sum() > 0 else x.sin()"
    assert "dry_run=False" in caught.value.fix
    assert ogt.saved_tensors(asks, torch.ones(4, requires_grad=True)).totals.kept == 16


# -- texts -----------------------------------------------------------------------------------------------------------


def test_memory_report_has_dict_and_text_forms() -> None:
    x = torch.randn(2, 3, 32, 32)
    before = ogt.saved_tensors(zoo.resnet18(nn.SiLU), x)
    report = before.compared(ogt.saved_tensors(zoo.resnet18(nn.ReLU), x))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["totals"]["kept"] == before.totals.kept
    assert data["after"]["totals"]["kept"] < data["totals"]["kept"]
    assert len(data["kept"]) == len(before.kept) and data["kept"][0]["shape"] == [2, 3, 32, 32]
    text = str(report)
    assert "ResNet: 13.3 MiB kept for backward" in text
    assert "less" in text and "layer1.0.act1" in text


def test_a_comparison_shows_both_sides_of_every_group() -> None:
    x = torch.randn(2, 4)
    before = ogt.saved_tensors(nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4)), x)
    after = ogt.saved_tensors(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), x)
    report = before.compared(after)
    assert {g.of[0]: (g.kept, g.after) for g in report.modules} == {"0": (32, 32), "1": (32, 32), "2": (32, 0)}
    assert {g.of[0]: (g.kept, g.after) for g in report.classes} == {
        "Linear": (64, 32), "SiLU": (32, 0), "ReLU": (0, 32),
    }  # fmt: skip
    assert sum(g.after or 0 for g in report.classes) == after.totals.kept


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_peak_agrees_with_cuda_allocator() -> None:
    model = zoo.resnet18(nn.SiLU).cuda()
    report = ogt.saved_tensors(model, torch.randn(16, 3, 32, 32, device="cuda"))
    assert report.peak.cuda is not None
    assert report.peak.cuda >= report.peak.bytes


def test_checkpointed_region_is_recomputed_for_names_and_for_backward() -> None:
    runs = []

    def region(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return (x.exp() * x.sin()).tanh() * x.cos()

    ogt.saved_tensors(lambda x: checkpoint(region, x, use_reentrant=False), torch.randn(8, requires_grad=True))
    assert len(runs) == 3


def test_meta_tensors_of_tracing_are_not_counted() -> None:
    """The first call of a fused function traces it on the meta device."""

    def mish(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tanh(torch.nn.functional.softplus(x))

    x = torch.zeros(64, 64)
    peaks = {dry: ogt.saved_tensors(ogt.fuse(mish), x, dry_run=dry).peak.bytes for dry in (True, False)}
    native = ogt.saved_tensors(functional.silu, x).peak.bytes
    assert peaks == {True: native, False: native}


def test_saved_tensors_refuses_non_callables() -> None:
    with pytest.raises(InvalidArguments, match="type int cannot be called"):
        ogt.saved_tensors(3, torch.ones(2))  # type: ignore[arg-type]


def test_leaked_traced_value_does_not_break_measurement() -> None:
    kept: list[Any] = []

    def leaks(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x * 3

    ogt.fuse(leaks)(torch.ones(4))
    assert ogt.saved_tensors(nn.Tanh(), torch.ones(4)).totals.kept == 16


def test_failing_dry_run_logs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, logged = logging.getLogger("torch._subclasses.fake_tensor"), logging.handlers.BufferingHandler(8)
    monkeypatch.setattr(logger, "handlers", [logged])
    with pytest.raises(RuntimeError, match="broadcast"):
        ogt.saved_tensors(lambda x: x + torch.ones(3), torch.ones(4), dry_run=True)
    assert not logged.buffer and not logger.disabled


# -- fused models ----------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """Dynamo ends a graph in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.silu(self.first(x))
        torch._dynamo.graph_break()
        return functional.silu(self.second(x))


FUSED: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "constants": lambda: (nn.Sequential(nn.Linear(8, 8), NAF1(), nn.Linear(8, 8)), torch.randn(3, 8)),
    "resnet18": lambda: (zoo.resnet18(nn.SiLU), torch.randn(2, 3, 32, 32)),
    "transformer": lambda: (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)),
    "graph break": lambda: (Broken(), torch.randn(3, 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
def test_fused_model_is_measured_exactly_without_recompiling(name: str) -> None:
    """To the byte, in a dry run as in a real one; and measuring compiles nothing again."""
    torch.manual_seed(0)
    model, x = FUSED[name]()
    ogt.fuse(model)
    held = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept = hooked_bytes(lambda: model(x), held)
    compiled: list[Any] = []
    with observed(compiled.append):
        real = ogt.saved_tensors(model, x)
    assert not compiled
    dry = ogt.saved_tensors(model, x, dry_run=True)
    assert real.totals.kept == real.totals.hooked == kept == sum(k.counted for k in real.kept)
    assert (dry.kept, dry.peak) == (real.kept, real.peak)
    assert real.peak.unexplained == 0
    modules = dict(model.named_modules())
    assert all(type(modules[k.module]).__name__ == k.module_class for k in real.kept)
    assert all(k.op != "CompiledFunctionBackward" for k in real.kept)
    assert {name for _, name, *_ in real.timeline} <= set(modules)


#: Upper limits of the peak in MiB, gradients of all weights (43 MiB) included. Eager: 594, 855.
PEAKS = [pytest.param(nn.ReLU, 365, marks=pytest.mark.sweep), (nn.SiLU, 365)]


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "peak"), PEAKS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_fused_network_saves_only_convolution_outputs(activation: type[nn.Module], peak: int) -> None:
    network = ogt.fuse(zoo.resnet18(activation))
    reports: list[ogt.MemoryReport] = []
    x = torch.empty(128, 3, 32, 32)
    grown = resident_peak(lambda: reports.append(ogt.saved_tensors(network, x, dry_run=True)))
    (report,) = reports
    convolutions = {k.module for k in report.kept if k.role == "made" and len(k.shape) == 4 and k.bytes > MIB / 4}
    assert round(report.totals.kept / MIB) == 302  # 301 and the images
    assert convolutions == {n for n, m in network.named_modules() if isinstance(m, nn.Conv2d)}
    assert report.peak.bytes < peak * MIB
    assert grown is None or grown < 250 * MIB


def test_other_batch_sizes_are_measured_exactly() -> None:
    model = ogt.fuse(Twice())
    reports = {n: ogt.saved_tensors(model, torch.randn(n, 8)) for n in (4, 6, 10)}
    unit = reports[4].totals.kept // 4
    assert {n: r.totals.kept for n, r in reports.items()} == {n: n * unit for n in reports}
    assert all(r.peak.unexplained == 0 for r in reports.values())
    plain = ogt.fuse(Twice())
    assert ogt.saved_tensors(plain, torch.randn(10, 8)).peak == reports[10].peak


def test_fused_model_entry_names_module_op_and_line() -> None:
    report = ogt.saved_tensors(ogt.fuse(Twice()), torch.randn(3, 8, requires_grad=True))
    line = Twice.forward.__code__.co_firstlineno + 1
    code = "return self.act(self.linear(self.act(x)))"
    costly = [(k.module, k.module_class, k.call, k.op, k.role, k.name) for k in report.kept if k.counted]
    assert costly == [
        ("act", "SiLU", 1, "silu", "input", "input 0"),
        ("linear", "Linear", 1, "linear", "made", "linear: linear"),
    ]
    assert {(k.where, k.code) for k in report.kept} == {(f"{__file__}:{line}", code)}


def test_fused_submodule_is_named_by_its_full_path() -> None:
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU())
    model = nn.Sequential(nn.SiLU(), ogt.fuse(inner), nn.SiLU())
    report = ogt.saved_tensors(model, torch.randn(2, 3, 8, 8, requires_grad=True))
    assert {"0", "1.0", "2"} <= {k.module for k in report.kept if k.counted}


def test_library_call_results_are_freed_after_last_use() -> None:
    """The value is the gradient of an input, which a convolution's backward returns together with the weights'."""
    layers = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(8)]
    model = ogt.fuse(nn.Sequential(*layers))
    report = ogt.saved_tensors(model, torch.randn(2, 4, 16, 16))
    one = 4 * 2 * 4 * 16 * 16
    weights = sum(4 * p.numel() for p in model.parameters())
    # The input and seven outputs are kept, and the caller holds the last output; at most two gradients are also alive.
    assert report.totals.kept == 8 * one
    assert report.peak.bytes <= (9 + 2) * one + weights
    assert report.timeline[-1][-1] <= 4 * one + weights  # the last call's input, gradients, and the output


def test_dry_run_leaves_compiled_code_of_fused_model() -> None:
    model, x = ogt.fuse(Twice()), torch.randn(3, 8)
    expected = model(x)
    ogt.saved_tensors(model, x.expand(64, 3, 8), dry_run=True)
    compiled: list[Any] = []
    with observed(compiled.append):
        assert torch.equal(model(x), expected)
    assert not compiled


def test_explain_reports_peak_and_eager_memory() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()), torch.randn(2, 3, 8, 8)
    eager = ogt.saved_tensors(model, x)
    report = ogt.explain(ogt.fuse(model), x)
    fused = ogt.saved_tensors(model, x)
    assert (report.kept, report.peak) == (fused.totals.kept, fused.peak.bytes)
    assert (report.eager_kept, report.eager_peak) == (eager.totals.kept, eager.peak.bytes)
    assert "eager" in str(report) and "peak over both passes" in str(report)
    with torch.no_grad():
        assert ogt.explain(model, x).peak is None


def test_large_convolution_backward_is_split_with_weights_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call the gradient of the input is alive together with oneDNN's copies for that of the weights."""
    monkeypatch.setattr(program, "_GATHERED", 0)  # the setting of programs of large values
    model = ogt.fuse(nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 3)).double())
    x = torch.randn(1, 4, 150, 150, dtype=torch.float64)
    captured: list[Any] = []
    with observed(captured.append):
        model(x.requires_grad_()).sum().backward()
    masks = [line for line in captured[0].backward.source.splitlines() if "= call_aten_convolution_backward" in line]
    weights = [line.endswith("[False, True, True])") for line in masks]
    inputs = [line.endswith("[True, False, False])") for line in masks]
    assert (weights, inputs) == ([True, False, False], [False, True, False])  # the gradient of x is small: one call
    found = [x.grad, *(p.grad for p in model.parameters())]
    plain = [x, *model.parameters()]
    expected = torch.autograd.grad(type(model).forward(model, x).sum(), plain)
    for own, eager in zip(found, expected, strict=True):
        assert own is not None
        torch.testing.assert_close(own, eager)


@pytest.mark.filterwarnings("ignore:Sequential runs unfused")
def test_measurement_code_is_not_captured_by_dynamo() -> None:
    """Hooks are called in frames that Dynamo inspects, where their callees would be captured as part of the model."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    model = ogt.fuse(nn.Sequential(nn.Linear(6, 6), nn.SiLU(), nn.LSTM(6, 4, batch_first=True)))
    x = torch.randn(2, 3, 6)
    model(x)
    ogt.saved_tensors(model, x)
    captured = {str(metrics.co_filename) for metrics in torch._dynamo.utils.get_compilation_metrics()}
    assert captured and not any("memory" in name for name in captured)


@ogt.fuse
def weighed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(y)


def test_tensors_saved_by_fused_function_are_listed_at_its_line() -> None:
    inputs = [torch.randn(8, 4, requires_grad=True) for _ in range(2)]
    weighed(*inputs)
    report = ogt.saved_tensors(weighed, *inputs)
    (line,) = report.lines
    assert line.kept == report.totals.kept == sum(x.nbytes for x in inputs)
    place, code = line.of
    assert place.startswith(f"{__file__}:") and code.startswith("def weighed(")
    eager = ogt.saved_tensors(weighed.__wrapped__, *inputs).compared(report)
    assert sum(row.after or 0 for row in eager.lines) == report.totals.kept


# -- unusual tensors and modules -------------------------------------------------------------------------------------


class Refuses(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise TypeError("no torch function")


def test_lazy_modules_and_subclasses_elsewhere_do_not_matter() -> None:
    elsewhere = nn.LazyLinear(3), torch.ones(2).as_subclass(Refuses)
    assert ogt.saved_tensors(torch.exp, torch.ones(4)).totals.kept == 16
    assert ogt.explain(torch.exp, torch.ones(4, requires_grad=True)).kept == 16
    del elsewhere


@pytest.mark.parametrize("measure", [ogt.saved_tensors, ogt.explain])
def test_a_lazy_model_must_be_called_before_it_is_measured(measure: Callable[..., Any]) -> None:
    model, x = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), torch.ones(4, 2)
    with pytest.raises(InvalidArguments, match=r"no shape .*0\.weight.*1\.running_mean") as raised:
        measure(model, x)
    assert "call the model once" in str(raised.value)
    model(x)
    called = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert measure(model, x).to_dict()["peak"] == measure(called, x).to_dict()["peak"]
