"""fuse(model): the same numbers, objects and errors as eager, fewer kernels, less kept; and unfuse undoes it."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import textwrap
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from agreement import assert_close_enough  # noqa: E402
from eager_rounding import assert_as_exact, in_each_order  # noqa: E402
from random_forward import RandomForward  # noqa: E402
from torch import nn  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import InvalidArguments  # noqa: E402
from opgraph.torch import zoo  # noqa: E402
from opgraph.torch.graph import backend  # noqa: E402


class ScaledSwish(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return x * torch.sigmoid(self.a * x)


class Split(nn.Module):
    """Splits its input with torch.where and joins the parts again."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.1))

    def forward(self, x):
        above, below = torch.where(x > 0, x, 1.0), torch.where(x <= 0, x, 1.0)
        return torch.where(x > 0, above.pow(self.a), below.exp() * self.a)


class Block(nn.Module):
    def __init__(self, width=12, out=3):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, width), nn.Linear(6, width), nn.Linear(width, out)
        self.act = ScaledSwish()
        self.alpha = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        h = self.act(self.gate(x)) * self.up(x)
        h = h * self.alpha + torch.tanh(h)
        h += 1
        if h.sum() > 0:
            h = F.relu(h, inplace=True) - 0.5 * h
        return self.down(h)


def run(model, x):
    """The output, and gradients of input and parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return [y.detach(), x.grad, *grads]


MODELS = {
    "block": (Block, (5, 6)),
    "resnet18": (lambda: zoo.resnet18(Split), (2, 3, 32, 32)),
    "efficientnet": (lambda: zoo.efficientnet_b0(ScaledSwish).eval(), (2, 3, 32, 32)),
}


@pytest.mark.parametrize("name", ["block", "resnet18", pytest.param("efficientnet", marks=pytest.mark.sweep)])
def test_outputs_and_gradients_are_within_rounding_of_eager(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    exact = run(copy.deepcopy(model).double(), x.double())
    eager = in_each_order(lambda: run(copy.deepcopy(model), x))
    fused = run(ogt.fuse(model), x)
    assert_as_exact(fused, eager, exact)


# For in-place writes to values saved for backward, eager torch raises in backward, AOTAutograd when it compiles.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*one of the variables needed for gradient computation has been modified")
@pytest.mark.parametrize("seed", range(40))
def test_random_forwards_agree_with_eager(seed):
    results = []
    for kind in ("eager", "fused", "exact"):
        model, (x, y) = RandomForward(seed), torch.randn(2, 4, 6)
        if kind == "fused":
            ogt.fuse(model)
        if kind == "exact":
            model, x, y = model.double(), x.double(), y.double()
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        last, total = model(x, y)
        same = [[a is b for a in model.kept] for b in model.kept]
        assert all(type(t) is torch.Tensor for t in model.kept)
        values = [t.detach().clone() for t in (last, total, *model.kept)]
        try:
            (total.square().mean() + last.sum()).backward()
            grads = [t.grad for t in (x, y, *model.parameters())]
        except RuntimeError as error:  # in-place arithmetic on a value that backward needs, which is reported
            assert "modified by an inplace operation" in str(error)
            grads = None
        results.append((values, grads, same))
    (eager, eager_grads, same), (fused, fused_grads, fused_same), (exact, exact_grads, _) = results
    assert fused_same == same
    assert_close_enough(fused, eager, exact)
    if None not in (eager_grads, fused_grads, exact_grads):
        kept = [i for i, g in enumerate(exact_grads) if g is not None]
        assert_close_enough(*[[g[i] for i in kept] for g in (fused_grads, eager_grads, exact_grads)])


def test_fill_into_empty_tensor_agrees_with_eager():
    class Filled(nn.Module):
        def forward(self, x):
            ones = torch.empty(4)
            ones.fill_(1.0)
            return x * torch.sigmoid(x), ones

    x = torch.randn(4)
    torch.testing.assert_close(ogt.fuse(Filled())(x), Filled()(x))


@pytest.mark.parametrize("activation", [pytest.param(nn.ReLU, marks=pytest.mark.sweep), Split])
def test_fused_resnet_saves_only_convolution_outputs(activation):
    x = torch.randn(2, 3, 32, 32)
    model = zoo.resnet18(activation)
    assert kept_bytes(model, x) > 1.8 * CONVOLUTIONS
    # Also kept: the image, statistics of each norm, the input of the classifier.
    assert CONVOLUTIONS < kept_bytes(ogt.fuse(model), x) < 1.02 * CONVOLUTIONS
    report = ogt.explain(model, x)
    assert {t.name.rpartition(": ")[2] for t in report.kept_tensors if t.bytes > 2**16} == {"conv2d"}


#: Bytes of the results of all convolutions of a ResNet-18 for two images: 5 of the full size, then 5 in each stage.
CONVOLUTIONS = 2 * 64 * 32 * 32 * 4 * (5 + 5 / 2 + 5 / 4 + 5 / 8)


def kept_bytes(model, x):
    kept = {}
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model(x)
    del output
    return sum(s.nbytes() for s in kept.values())


# Model attributes and methods


def test_fuse_keeps_classes_and_state_dict_and_unfuse_restores():
    model = zoo.resnet18(ScaledSwish)
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    attributes = [dict(m.__dict__) for m in model.modules()]
    assert ogt.fuse(model) is model
    assert [type(m) for m in model.modules()] == kinds
    assert list(model.state_dict()) == keys
    assert ogt.unfuse(model) is model
    assert [dict(m.__dict__) for m in model.modules()] == attributes


def test_fusing_twice_equals_fusing_once():
    model = ogt.fuse(Block())
    forward = model.__dict__["forward"]
    assert ogt.fuse(model).__dict__["forward"] is forward
    ogt.unfuse(model)
    assert "forward" not in model.__dict__


def test_unfuse_restores_a_replaced_forward():
    model = Block()
    model.forward = lambda x: Block.forward(model, x) * 2
    replaced = model.forward
    x = torch.randn(2, 6)
    before = model(x)
    torch.testing.assert_close(ogt.fuse(model)(x), before)
    assert ogt.unfuse(model).forward is replaced


def test_a_submodule_can_be_fused_alone():
    model = zoo.resnet18(ScaledSwish).eval()
    x = torch.randn(1, 3, 32, 32)
    before = model(x)
    ogt.fuse(model.layer1)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    assert "forward" not in model.__dict__ and "forward" in model.layer1.__dict__


def test_deepcopied_and_loaded_models_use_their_own_parameters():
    model = ogt.fuse(Block())
    x = torch.randn(5, 6)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        assert other.forward.module is other
        assert torch.equal(other(x), model(x))
        with torch.no_grad():
            other.alpha.fill_(3.0)
        assert not torch.equal(other(x), model(x))


def test_train_eval_and_forward_hooks_work():
    model = ogt.fuse(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), ScaledSwish(), nn.BatchNorm1d(6)))
    seen = []
    model[2].register_forward_hook(lambda module, args, output: seen.append((type(args[0]), type(output))))
    x = torch.randn(8, 6)
    torch.manual_seed(0)
    first = model(x)
    torch.manual_seed(0)
    eager = ogt.unfuse(model)(x)
    torch.testing.assert_close(first, eager)
    ogt.fuse(model).eval()
    assert torch.equal(model(x), model(x))
    assert seen[0][1] is torch.Tensor  # a hook on a module with its own forward gets computed tensors


def test_global_module_hooks_see_all_modules():
    model, x, seen = ogt.fuse(nn.Sequential(nn.Linear(6, 6), ScaledSwish())), torch.randn(3, 6), []
    expected = model(x)
    with nn.modules.module.register_module_forward_hook(lambda module, args, result: seen.append(type(module))):
        torch.testing.assert_close(model(x), expected)
    assert seen == [nn.Linear, ScaledSwish, nn.Sequential]
    model(x)
    assert len(seen) == 3


def test_parameters_tied_later_are_written_once():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
            self.p, self.q = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

        def forward(self, x):
            with torch.no_grad():
                self.p.mul_(0.5)
                self.q.add_(1)
            return self.second(F.silu(self.first(x)) * self.p) * self.q

    x, found = torch.linspace(-1, 2, 24).reshape(4, 6), []
    for wrap in (lambda model: model, ogt.fuse):
        model = wrap(Two())
        results = [model(x)]
        model.second = model.first
        results.append(model(x))
        model.q = model.p
        results.append(model(x))
        found.append([*results, *model.state_dict().values()])
    torch.testing.assert_close(*found)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1) * 1.5,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last) * 1.5,
    "permuted view": lambda x: x.permute(2, 0, 3, 1),
    "every other": lambda x: x.transpose(0, 2)[:, ::2],
    "expanded": lambda x: x.transpose(0, 2)[:1].expand(4, 4, 2, 5),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_dropout_mask_agrees_with_eager_in_every_layout(layout):
    class Drop(nn.Module):
        def forward(self, x):
            return F.dropout(layout(x), 0.5) + 1

    found = []
    for model in (Drop(), ogt.fuse(Drop())):
        torch.manual_seed(0)
        x = torch.randn(2, 4, 4, 5, requires_grad=True)
        y = model(x)
        y.sum().backward()
        found.append([y, x.grad, torch.rand(1)])
    torch.testing.assert_close(*found)


def _mirrored(x, y):
    h = x * 2 + y
    return torch.tril(h + (-h).mT), (h.sigmoid() + (-h).mT.tanh()) @ y


def _cayley(x, y):
    """The matrix of nn.utils.parametrizations.orthogonal; its backward mirrors a value for `tril`, too."""
    lower = x.tril()
    skew = lower - lower.mT
    return y @ torch.linalg.solve(torch.eye(3) - skew * 0.5, torch.eye(3) + skew * 0.5)


@pytest.mark.parametrize("function", [_mirrored, _cayley], ids=lambda f: f.__name__)
def test_value_plus_its_transpose_feeds_a_library_call(function):
    """The mirror image is stored before the kernel that reads it."""

    class Model(nn.Module):
        def forward(self, x, y):
            return function(x, y)

    found = []
    for model in (Model(), ogt.fuse(Model())):
        torch.manual_seed(0)
        x, y = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
        results = model(x, y)
        loss = sum(r.square().sum() for r in (results if isinstance(results, tuple) else [results * y]))
        found.append([results, torch.autograd.grad(loss, x)])
    torch.testing.assert_close(*found)


def test_weight_norm_parametrization_works():
    model = nn.Sequential(nn.Linear(6, 6), ScaledSwish())
    nn.utils.parametrizations.weight_norm(model[0])
    x = torch.randn(3, 6)
    before = model(x)
    torch.testing.assert_close(ogt.fuse(model)(x), before)


# Code in a forward


class Keeps(nn.Module):
    def forward(self, x):
        self.h = x * 2 + 1
        self.also = self.h
        self.h += 1
        self.view = self.h.view(-1)
        self.h.mul_(3)
        return self.h.sum()


def test_tensors_stored_by_forward_are_plain_and_keep_identity_and_views():
    x = torch.randn(2, 3, requires_grad=True)
    model = ogt.fuse(Keeps())
    model(x)
    assert type(model.h) is torch.Tensor and model.h is model.also
    torch.testing.assert_close(model.h, (x * 2 + 2) * 3)
    torch.testing.assert_close(model.view, model.h.view(-1))
    assert model.h.grad_fn is not None


def test_unused_random_numbers_are_drawn():
    class Draws(nn.Module):
        def forward(self, x):
            h = x * 2
            F.dropout(h, 0.5)
            torch.empty(3).normal_()
            torch.rand(2).mul_(2)
            torch.randn_like(h) * h
            torch.utils.checkpoint.checkpoint(lambda t: (t * 2, F.dropout(t, 0.5)), h, use_reentrant=False)
            return F.dropout(h, 0.5), h, torch.rand(4)

    found = []
    for model in (Draws(), ogt.fuse(Draws())):
        torch.manual_seed(0)
        for grad in (True, False):
            results = model(torch.ones(3, 4, requires_grad=grad))
            found.append([*results, torch.autograd.grad(results[0].sum(), results[1])[0] if grad else None])
    torch.testing.assert_close(found[2:], found[:2])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


doubled = Doubled.apply


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by Dynamo
def test_gradients_flow_through_previously_bound_apply():
    class Model(nn.Module):
        def forward(self, x):
            return doubled(torch.sigmoid(x) * x + 1) * torch.tanh(x)

    x = torch.randn(7)
    eager, fused = run(Model(), x), run(ogt.fuse(Model()), x)
    torch.testing.assert_close(fused, eager)


@pytest.mark.parametrize("region", ["module", "function"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*use_reentrant")
def test_activation_checkpointing_agrees_with_eager(reentrant, region):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), ScaledSwish()) for _ in range(3))

        def forward(self, x):
            for part in self.parts:
                call = part if region == "module" else lambda t, part=part: torch.tanh(part(t) + t) * t + 1
                x = torch.utils.checkpoint.checkpoint(call, x * 1.5 + 0.1, use_reentrant=reentrant) * torch.tanh(x)
            return x

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 6)
    torch.testing.assert_close(run(ogt.fuse(copy.deepcopy(model)), x), run(model, x))


def test_attention_in_a_checkpointed_region_is_recomputed():
    """AOTAutograd returns its results as a tuple next to the state of the random numbers."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.project = nn.Linear(8, 24)

        def part(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).movedim(2, 0).transpose(2, 3)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2) * 2 + x

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.part, F.silu(x), use_reentrant=False)

    x = torch.linspace(-1, 1, 80).view(2, 5, 8)
    torch.testing.assert_close(run(ogt.fuse(Model()), x), run(Model(), x))


def test_no_grad_inference_mode_and_detach_stop_gradients():
    class Model(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                scale = torch.sigmoid(x) * 2
            return x * scale + torch.tanh(x).detach()

    x = torch.randn(9)
    torch.testing.assert_close(run(ogt.fuse(Model()), x), run(Model(), x))
    with torch.inference_mode():
        y = ogt.fuse(Model())(x)
        assert y.is_inference() and not y.requires_grad


def test_torch_errors_name_the_users_line_and_leave_no_state():
    class Model(nn.Module):
        def forward(self, x, y):
            z = x * 2 + 1
            return z + y

    model = ogt.fuse(Model())
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        model(torch.randn(3), torch.randn(4))
    assert any("return z + y" in str(entry.statement) for entry in caught.traceback)
    assert model(torch.ones(3), torch.ones(3)).tolist() == [4, 4, 4]


class Breaks(nn.Module):
    """Counts calls, updates statistics and draws numbers, on both sides of a graph break."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.calls = nn.BatchNorm1d(6), 0

    def forward(self, x, y):
        self.calls += 1
        x = F.silu(self.norm(x)) * torch.rand(6)
        torch._dynamo.graph_break()
        self.calls += 1
        return F.dropout(F.silu(x + y), 0.5)


@pytest.mark.parametrize("why", ["the program", "the capture"])
@pytest.mark.filterwarnings("ignore:Breaks runs unfused")
def test_code_before_a_failed_capture_runs_once(why, monkeypatch):
    torch._dynamo.reset()  # instances of one class share the compiled code
    graphs, aot_backend = [], backend.aot_backend

    def second_refused(**kwargs):
        graphs.append(1)
        if len(graphs) == 2:
            raise torch._dynamo.exc.InternalTorchDynamoError("no")
        return aot_backend(**kwargs)

    if why == "the capture":
        monkeypatch.setattr(backend, "aot_backend", second_refused)
    found = []
    for wrap in (lambda model: model, ogt.fuse):
        model, results = wrap(Breaks()), []
        for step, width in enumerate((6, 5, 6) if why == "the program" else (6, 6)):
            torch.manual_seed(step)
            try:
                results.append(model(torch.randn(4, 6), torch.ones(width)))
            except RuntimeError as error:
                results.append(str(error)[:30])
            results += [model.calls, *model.state_dict().values(), torch.get_rng_state()]
        found.append([r.clone() if isinstance(r, torch.Tensor) else r for r in results])
    for eager, fused in zip(*found, strict=True):
        if isinstance(eager, torch.Tensor):
            torch.testing.assert_close(fused, eager)
        else:
            assert fused == eager
    assert why == "the program" or len(graphs) > 2


def test_kernel_stores_only_its_outputs():
    class Model(nn.Module):
        def forward(self, x):
            big = x * 2
            return torch.tanh(big) + 1

    with torch.no_grad():
        report = ogt.explain(Model(), torch.randn(5))
    assert [len(entry.outputs) for entry in report.fused] == [1]


def test_concurrent_calls_agree_with_eager():
    torch.manual_seed(0)
    model = Block().eval()
    inputs = [torch.randn(50, 6) for _ in range(8)]
    expected = [model(x) for x in inputs]
    ogt.fuse(model)
    results = [None] * 8

    def work(index):
        for _ in range(20):
            results[index] = model(inputs[index])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    torch._dynamo.reset()  # each instance compiles the code after the graph break, and all count for the class
    torch.testing.assert_close(results, expected)


def test_concurrent_first_calls_share_one_compilation():
    """If each thread compiled separately, Dynamo's limit would be reached and the model run unfused for other sizes."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.LayerNorm(12), nn.Linear(12, 3))
    model = ogt.fuse(copy.deepcopy(plain))
    sizes, together = (1, 2, 3, 5, 8, 64, 257, 50), threading.Barrier(8)
    results = {}

    @torch.no_grad()
    def work(first):
        together.wait()
        for size in (*sizes[first:], *sizes[:first]):
            x = torch.full((size, 6), 1 / size)
            results[first, size] = model(x), plain(x)

    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(results) == 64
    for fused, eager in results.values():
        torch.testing.assert_close(fused, eager)
    # One element, another size, and any size; one more where threads switch in between.
    assert 2 <= counters["unique_graphs"] - before <= 5 and not model.forward.limits


class Autocast(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        h = self.linear(x)
        return self.function(h) * 2, h, self.function(x) + h


@pytest.mark.parametrize(
    "function",
    [torch.exp, torch.sigmoid, F.silu, F.gelu, F.softplus, F.mish, torch.tanh, torch.square, F.hardswish, torch.log1p,
     lambda x: x**2, torch.reciprocal, lambda x: torch.rsqrt(x.abs() + 1), F.logsigmoid, torch.asin],
)  # fmt: skip
def test_autocast_dtypes_agree_with_eager(function):
    model, x = Autocast(function), torch.rand(3, 6) * 0.5
    with torch.autocast("cpu", torch.bfloat16):
        eager = model(x)
        fused = ogt.fuse(model)(x)
    assert [t.dtype for t in fused] == [t.dtype for t in eager]
    torch.testing.assert_close(fused, eager, rtol=3e-2, atol=3e-2)


def test_fused_function_inside_a_fused_model_agrees():
    @ogt.fuse
    def act(x, a):
        return x * torch.sigmoid(a * x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return act(x + 1, self.a) * 2

    x = torch.randn(3, 6)
    fused = run(ogt.fuse(Model()), x)
    ones = torch.ones(6)
    torch.testing.assert_close(fused[0], (x + 1) * torch.sigmoid(ones * (x + 1)) * 2)
    assert fused[2].abs().sum() > 0


def test_rounding_each_equals_eager_bits_for_exact_ops():
    class Model(nn.Module):
        def forward(self, x):
            return (x * 1.1 + x) * x - 0.3

    x = torch.randn(4096).to(torch.bfloat16)
    assert torch.equal(ogt.fuse(Model(), rounding="each")(x), Model()(x))
    assert not torch.equal(ogt.fuse(Model())(x), Model()(x))
    with pytest.raises(InvalidArguments, match="unknown rounding"):
        ogt.fuse(Model(), rounding="never")


@pytest.mark.parametrize("fused_first", [True, False])
def test_fsdp_training_of_fused_blocks_agrees_with_plain_model(one_rank, fused_first):
    from torch.distributed.fsdp import fully_shard

    class PerChannel(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.full((6,), 1.3))

        def forward(self, x):
            return x * torch.sigmoid(self.a * x)

    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), PerChannel()) for _ in range(3)])
    model, x = copy.deepcopy(plain), torch.randn(4, 6)
    if fused_first:
        ogt.fuse(model)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    ogt.fuse(model)
    for _ in range(2):
        expected = run(plain, x)
        y = model(x)
        y.square().mean().backward()
        torch.testing.assert_close(y, expected[0])
        torch.testing.assert_close([p.grad.full_tensor() for p in model.parameters()], expected[2:])
        model.zero_grad()


def test_distributed_data_parallel_gradients_agree_with_eager(one_rank):
    torch.manual_seed(0)
    plain, x = Block(), torch.randn(4, 6)
    model = nn.parallel.DistributedDataParallel(ogt.fuse(copy.deepcopy(plain)))
    expected = run(plain, x)
    model(x).square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.module.parameters()], expected[2:])


# Tracers and transforms


def test_tracers_and_transforms_see_the_plain_forward():
    model = nn.Sequential(nn.Linear(6, 6), ScaledSwish(), nn.Linear(6, 2))
    x = torch.randn(3, 6)
    expected = model(x)
    ogt.fuse(model)
    exported = torch.export.export(model, (x,))
    assert not [n for n in exported.graph.nodes if "opgraph" in str(n.target)]
    torch.testing.assert_close(exported.module()(x), expected)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), expected)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    parameters = dict(model.named_parameters())
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)
    assert grads["1.a"].abs() > 0
    torch.testing.assert_close(torch.func.vmap(model)(x[:, None])[:, 0], expected)


# The report


def test_explain_lists_units_reasons_and_graph_breaks():
    torch.manual_seed(0)
    report = ogt.explain(Block(), torch.randn(5, 6))
    assert report.units == {"swiglu": 1, "swish": 1}
    assert ("addmm", "not pointwise: a library op") in {(e.name, e.why) for e in report.left}
    assert report.fused[0].calls[:3] == ("mul", "sigmoid", "mul")
    assert [b.line.split(": ")[1] for b in report.breaks] == ["if h.sum() > 0:"]
    assert report.to_dict()["units"] == report.units
    for word in ("swiglu", "kernels", "left to torch", "addmm", "graph breaks"):
        assert word in str(report)


@pytest.mark.slow
def test_explain_reports_the_bytes_that_hooks_see():
    x = torch.randn(2, 3, 32, 32)
    model = zoo.resnet18(Split)
    report = ogt.explain(model, x)
    assert report.kept == kept_bytes(ogt.fuse(model), x)
    again = {entry.module: entry.module_class for entry in report.recomputed}
    assert {name for name, module in model.named_modules() if isinstance(module, (Split, nn.BatchNorm2d))} <= set(again)
    assert sum(entry.times for entry in report.recomputed) > 17 * 5  # each activation, and the norm before it


def test_fuse_dry_run_changes_no_module():
    model = zoo.efficientnet_b0(ScaledSwish)
    report = ogt.fuse(model, dry_run=True)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert report.units == {"swish": 49}
    assert "decided by what its forward calls" in str(report)
    run_report = ogt.fuse(Block(), dry_run=True, inputs=(torch.randn(2, 6),))
    assert run_report.units == {"swiglu": 1, "swish": 1}


def test_explain_accepts_a_function():
    report = ogt.explain(lambda x: x * torch.sigmoid(x), torch.randn(4))
    assert report.units == {"swish": 1}
    assert "1 kernel;" in str(report) or "1 kernel\n" in str(report)


# Models of the transformers library


TRANSFORMERS = """
import copy, os, sys
import torch, transformers
import opgraph.torch as ogt
torch.manual_seed(0)
small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
config = {
    "llama": lambda: transformers.LlamaConfig(**small, num_key_value_heads=2),
    "qwen2": lambda: transformers.Qwen2Config(**small, num_key_value_heads=2),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0,
                                            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0),
}[sys.argv[1]]()
model = transformers.AutoModelForCausalLM.from_config(config)
ids = torch.randint(0, 64, (2, 9))
found = []
for m in (copy.deepcopy(model).double(), copy.deepcopy(model), ogt.fuse(copy.deepcopy(model))):
    out = m(ids, labels=ids)
    out.loss.backward()
    found.append([out.logits, *(p.grad for p in m.parameters())])
for exact, eager, fused in zip(*found):
    if exact is not None:
        size = exact.abs().max()
        own, theirs = (fused - exact).abs().max() / size, (eager - exact).abs().max() / size
        assert own <= 2 * max(theirs, 1e-6), (own, theirs)
print(ogt.explain(model, ids).units)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, units",
    [
        ("llama", {"swiglu": 2, "swish": 2}),
        ("qwen2", {"swiglu": 2, "swish": 2}),
        ("gpt2", {"gelu": 2}),
    ],
)
def test_transformers_models_fuse_and_agree_with_eager(name, units, tmp_path):
    if not _has("transformers"):
        pytest.skip("transformers is not installed")
    # Outside the checkout's root: transformers would import its folder kernels/ as a package.
    code = f"import sys; sys.path.insert(0, {str(_package(tmp_path))!r})\n" + TRANSFORMERS
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code), name], cwd=tmp_path, capture_output=True, text=True,
        env=_clean_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == str(units)


def _has(name):
    from importlib.util import find_spec

    return find_spec(name) is not None


def _package(tmp_path):
    """A folder that contains only opgraph."""
    from pathlib import Path

    import opgraph
    from opgraph.codegen.sources import kernel_folder

    package = tmp_path / "opgraph"
    package.mkdir()
    for entry in Path(opgraph.__file__).parent.iterdir():
        if entry.name not in ("_kernels", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    (package / "_kernels").symlink_to(kernel_folder())
    return tmp_path


def _clean_environment():
    import os

    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("way", ["copy", "replica"])
def test_a_shallow_copy_computes_with_its_own_parameters(way: str, hooked: bool) -> None:
    """A replica of nn.DataParallel is a shallow copy; both share the object that wraps forward."""
    model = ogt.fuse(ScaledSwish())
    x = torch.linspace(-2, 2, 7)
    with torch.no_grad():
        before = model(x)
        if way == "copy":
            other = copy.copy(model)
            other._parameters = {"a": nn.Parameter(torch.tensor(0.0))}
        else:
            other = model._replicate_for_data_parallel()
            other.a = torch.tensor(0.0)
        if hooked:
            other._forward_hooks = {**other._forward_hooks, 0: lambda module, args, result: None}
        assert torch.equal(other(x), x / 2)
        assert torch.equal(model(x), before)


def test_forward_that_casts_its_input_accepts_any_dtype():
    class Wide(nn.Module):
        def forward(self, x):
            return x.float().sigmoid() * 2

    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        x = torch.linspace(-2, 2, 6).to(dtype)
        torch.testing.assert_close(ogt.fuse(Wide())(x), Wide()(x))


def test_retain_graph_works_after_a_pass_without_it():
    """AOTAutograd compiles backward at the first pass, and infers from that pass what no later pass needs."""
    model = ogt.fuse(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 3)))
    given = [*model.parameters()]
    x = torch.rand(4, 6)
    model(x).sum().backward()  # compiled by a pass that frees its saved tensors
    y = model(x).sum()
    first = torch.autograd.grad(y, given, retain_graph=True)
    again = torch.autograd.grad(y, given)
    assert all(torch.equal(a, b) and torch.equal(a, p.grad) for a, b, p in zip(first, again, given, strict=True))


@pytest.mark.parametrize("module", [nn.GRU(3, 4), nn.BatchNorm2d(3, momentum=None)], ids=lambda m: type(m).__name__)
def test_module_without_captured_ops_warns_once(module: nn.Module) -> None:
    x = torch.randn(2, 3, 3) if isinstance(module, nn.GRU) else torch.randn(2, 3, 4, 4)
    model = ogt.fuse(module)
    with pytest.warns(UserWarning, match="runs unfused: torch.compile captures nothing of it: ") as told:
        model(x)
        model(x)
    assert sum("runs unfused" in str(w.message) for w in told) == 1


def test_module_without_ops_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    ogt.fuse(nn.Identity())(torch.randn(3))
    assert not [w for w in recwarn if "runs unfused" in str(w.message)]


class Windows(nn.Module):
    """A model that is one kernel, in a function that cannot be a fused function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).unfold(1, 3, 1)


@torch.no_grad()
def test_single_kernel_graph_runs_as_compiled_graph_if_not_traceable() -> None:
    x = torch.randn(6, 8)
    torch.testing.assert_close(ogt.fuse(Windows())(x), Windows()(x))


class Negative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


@torch.no_grad()
def test_activation_with_replaced_class_runs_the_new_forward() -> None:
    x = torch.randn(6)
    model = ogt.fuse(nn.SiLU())
    model(x)
    model(x)
    model.__class__ = Negative
    torch.testing.assert_close(model(x), -x)


class Alike(nn.Module):
    """One value under several names."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x * 2
        return h, h, h.view(h.shape), h.detach(), h[:], h.t().t()


@pytest.mark.parametrize("gradients", [False, True])
def test_results_with_equal_layout_stay_distinct_tensors(gradients: bool) -> None:
    x = torch.randn(4, 2, requires_grad=gradients)
    for results in (Alike()(x), ogt.fuse(Alike())(x)):
        assert results[0] is results[1]
        assert len({id(r) for r in results}) == 5 and len({r.data_ptr() for r in results}) == 1
        assert [r.requires_grad for r in results] == [gradients] * 3 + [False] + [gradients] * 2


def test_lazy_layers_draw_the_same_numbers_as_in_eager():
    """A capture would draw the numbers of a new parameter, and then restore the generator."""
    found = []
    for wrap in (lambda model: model, ogt.fuse):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Dropout(0.5), nn.LazyLinear(3), nn.SiLU(), nn.LazyLinear(2)))
        results = [model(torch.ones(2, 4)) for _ in range(3)]
        found.append([*results, *model.parameters(), torch.rand(1)])
    torch.testing.assert_close(*found)
    assert "CompiledFunction" in type(results[-1].grad_fn).__name__


def test_shallow_copy_uses_its_parameters_in_transforms_and_can_be_fused() -> None:
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (x * self.a).softmax(-1)

    x = torch.arange(1.0, 5.0).view(1, 4)
    shallow = copy.copy(ogt.fuse(Weighted()))
    shallow._parameters = {"a": nn.Parameter(torch.zeros(4))}
    torch.testing.assert_close(torch.vmap(shallow)(x), torch.full((1, 4), 0.25))
    slope = torch.func.grad(lambda x: shallow(x)[0, 0])(x)
    torch.testing.assert_close(slope, torch.zeros(1, 4))
    torch.testing.assert_close(ogt.fuse(shallow).forward(x), torch.full((1, 4), 0.25))
