"""Fused models in parts of torch that call them, or their backward pass, in special ways: results are eager's."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.bench.networks import TrainedSwish as Swish  # noqa: E402
from opgraph.errors import InvalidArguments  # noqa: E402
from opgraph.torch.graph.backend import observed  # noqa: E402


def plain_and_fused(model):
    return model, ogt.fuse(copy.deepcopy(model))


@pytest.fixture
def without_a_compiler(monkeypatch):
    monkeypatch.setattr("opgraph.runtime.cpu_compiler.is_available", lambda: False)


def test_checkpointed_activation_saves_the_same_tensors_in_recomputation():
    """Its other calls run as a fused function; activation checkpointing compares the saved tensors, in order."""
    found = []
    for model in plain_and_fused(Swish()):
        x = torch.linspace(-2, 2, 12).view(3, 4).requires_grad_()
        for _ in range(3):
            checkpoint(lambda t, model=model: model(t * 2) * 3, x, use_reentrant=False).square().sum().backward()
        found.append([x.grad, model.a.grad])
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:there is no C", "ignore:`torch.jit")
def test_forward_mode_and_batched_gradients_agree_with_eager(without_a_compiler):
    torch.manual_seed(0)
    found = []
    for model in plain_and_fused(nn.Sequential(nn.Linear(4, 6), Swish(), nn.LayerNorm(6))):
        x = torch.linspace(-2, 2, 12).view(3, 4).requires_grad_()
        y = model(x)
        (rows,) = torch.autograd.grad(y, x, torch.eye(18).view(18, 3, 6), is_grads_batched=True)
        with forward_ad.dual_level():
            dual = model(forward_ad.make_dual(x.detach(), torch.ones(3, 4)))
            found.append([rows, *forward_ad.unpack_dual(dual)])
    torch.testing.assert_close(*found)


def test_saved_tensors_hooks_may_change_strides():
    def pack(tensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    torch.manual_seed(0)
    found = []
    for model in plain_and_fused(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU()).double()):
        model.to(memory_format=torch.channels_last)
        results = []
        for rows in (5, 6):  # the second size is traced with symbols
            x = (
                torch.linspace(-2, 2, 30 * rows, dtype=torch.float64)
                .view(2, 3, rows, 5)
                .to(memory_format=torch.channels_last)
            )
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                y = model(x)
            results.append(torch.autograd.grad(y.mT.cos().sum(), model.parameters()))
        found.append(results)
    torch.testing.assert_close(*found)


def test_saved_tensors_hooks_may_convert_masks_to_floats():
    """Hooks that keep activations in 16 bits do this: eager torch keeps no mask of a ReLU or of dropout."""
    torch.manual_seed(0)
    x = torch.randn(16, 4, dtype=torch.float64)
    for act in (nn.ReLU(), nn.Dropout(0.3), nn.Hardtanh()):
        found = []
        for model in plain_and_fused(nn.Sequential(nn.Linear(4, 8), act, nn.Linear(8, 2)).double()):
            torch.manual_seed(1)
            with saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()):
                y = model(x)
            found.append(torch.autograd.grad(y.sin().sum(), model.parameters()))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unpack", [lambda t: t.half(), lambda t: t[:1]], ids=["a dtype", "a shape"])
def test_saved_tensors_hooks_that_change_dtype_or_shape_raise(unpack):
    model = ogt.fuse(nn.Sequential(nn.SiLU(), nn.LayerNorm(4), nn.SiLU()))
    with saved_tensors_hooks(lambda t: t, unpack):
        y = model(torch.randn(3, 4, requires_grad=True))
    with pytest.raises(InvalidArguments, match="that a captured graph kept for backward"):
        y.sum().backward()


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.a = nn.Linear(6, 6), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        h = F.silu(self.linear(x))
        return h * self.a if self.a > 0.5 else h + self.a


def trained_in_parallel(model, x, bucket, times=1):
    """The last result and the gradients of a model under DistributedDataParallel, with buckets of `bucket` MB."""
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket)
    for _ in range(times):
        y = parallel(x)
        y.square().sum().backward()
    del parallel  # gloo's threads end with the group's last owner, which must not be freed later, under the GIL
    return [y.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("bucket", [25, 0.001])
def test_ddp_models_with_branches_and_small_buckets_agree(bucket, one_rank):
    captured = []
    x = torch.linspace(-2, 2, 12).view(2, 6)
    with observed(captured.append):
        found = [trained_in_parallel(model, x, bucket) for model in plain_and_fused(Branches())]
    assert len(captured) == 1
    torch.testing.assert_close(*found)


def test_ddp_model_with_several_buckets_agrees(one_rank, monkeypatch):
    monkeypatch.setattr(one_rank, "_DEFAULT_FIRST_BUCKET_BYTES", 4096)
    captured = []
    x = torch.linspace(-2, 2, 64).view(2, 32)
    network = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.SiLU())])
    with observed(captured.append):
        found = [trained_in_parallel(model, x, 0.004, times=2) for model in plain_and_fused(network)]
    assert len(captured) > 1
    torch.testing.assert_close(*found)


class Queue(nn.Module):
    """Contrastive learning: each step multiplies with the keys of earlier batches, and then replaces some of them."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 4)
        self.register_buffer("queue", torch.linspace(-1, 1, 32).view(4, 8).sin())
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        keys = self.query(x)
        scores = keys @ self.queue.clone().detach()
        self.put(keys.detach())
        return scores

    @torch.no_grad()
    def put(self, keys):
        at = int(self.place)  # ends the graph
        self.queue[:, at : at + len(keys)] = keys.T
        self.place[0] = (at + len(keys)) % 8


def test_buffer_may_be_written_before_backward_if_cloned():
    torch.manual_seed(0)
    eager = Queue()
    fused = ogt.fuse(copy.deepcopy(eager))
    for _ in range(4):
        x = torch.randn(2, 6)
        for model in (eager, fused):
            model.zero_grad()
            model(x).square().sum().backward()
        torch.testing.assert_close(fused.query.weight.grad, eager.query.weight.grad)
        torch.testing.assert_close(fused.queue, eager.queue)


class OfAClone(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))

    def forward(self, x):
        return (x * self.weight.clone()).sin()


@pytest.mark.parametrize("write", [lambda w: w.data.add_(1), lambda w: w.detach().mul_(3)], ids=["data", "detached"])
def test_parameter_may_be_written_before_backward_if_cloned(write):
    found = []
    for model in plain_and_fused(OfAClone()):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        y = model(x)
        write(model.weight)
        y.sum().backward()
        found.append((y.detach(), x.grad, model.weight.grad))
    torch.testing.assert_close(*found)
