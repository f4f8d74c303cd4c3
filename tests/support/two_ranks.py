"""The part of each of two processes in the test of distributed training: `python two_ranks.py RANK RENDEZVOUS`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import opgraph as og
import opgraph.torch as ogt
from opgraph.torch.fused.op import FusedOp

SWISH = "graph(x: f32[n,c,k], a: f32[c,1]) -> (y)\n  %0 = Multiply(a, x)\n  %1 = Sigmoid(%0)\n  y = Multiply(x, %1)"
ROW_SUMS = "graph(x: f32[n,c,k], a: f32[c,1]) -> (y)\n  %0 = Multiply(x, a)\n  y = SumTo(%0, a)"
RANK = int(sys.argv[1]) if __name__ == "__main__" else 0

#: Placements of x and of a; then of y, of the gradient of x, and of that of a.
PLACEMENTS = {
    "batch": (Shard(0), Replicate(), "S(0)", "S(0)", "P(sum)"),
    "channels": (Shard(1), Shard(0), "S(1)", "S(1)", "S(0)"),
    "channels of x alone": (Shard(1), Replicate(), "S(1)", "S(1)", "S(0)"),
    "last axis": (Shard(2), Replicate(), "S(2)", "S(2)", "P(sum)"),
    "whole": (Replicate(), Replicate(), "R", "R", "R"),
}

swish = FusedOp(og.parse(SWISH))
row_sums = FusedOp(og.parse(ROW_SUMS))


def eager(x: Any, a: Any) -> Any:
    return x * torch.sigmoid(a * x)


class Model(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.linear = torch.nn.Linear(4, 4)
        self.a = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6).view(6, 1))

    def forward(self, x: Any) -> Any:
        return self.function(self.linear(x), self.a)


def data() -> Any:
    return torch.randn(2, 5, 6, 4, generator=torch.Generator().manual_seed(1))


def expected() -> list[Any]:
    model = Model(eager)
    model(data().flatten(0, 1)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def dtensor(name: str) -> None:
    x_place, a_place, *wanted = PLACEMENTS[name]
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    x, a, weight = (torch.randn(s, generator=generator) for s in ((4, 6, 3), (6, 1), (4, 6, 3)))
    given = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in ((x, x_place), (a, a_place))]
    (y,) = swish(*given)
    grads = torch.autograd.grad(y, given, distribute_tensor(weight, mesh, [x_place]), retain_graph=True)
    assert [_short(t.placements[0]) for t in (y, *grads)] == wanted
    plain = [x.requires_grad_(), a.requires_grad_()]
    true = eager(*plain)
    torch.testing.assert_close(y.full_tensor(), true)
    for got, exact in zip(grads, torch.autograd.grad(true, plain, weight), strict=True):
        torch.testing.assert_close(got.full_tensor(), exact)
    # Another graph on tensors of the same shapes has shardings of its own.
    (sums,) = row_sums(*given)
    torch.testing.assert_close(sums.full_tensor(), (x * a).sum((0, 2)).view(6, 1))


def _short(placement: Any) -> str:
    return {"Shard": f"S({getattr(placement, 'dim', 0)})", "Replicate": "R"}.get(type(placement).__name__, "P(sum)")


def ddp() -> None:
    model = torch.nn.parallel.DistributedDataParallel(Model(lambda x, a: swish(x, a)[0]))
    model(data()[RANK]).square().mean().backward()
    for parameter, true in zip(model.parameters(), expected(), strict=True):
        torch.testing.assert_close(parameter.grad, true)


def fsdp() -> None:
    model = Model(lambda x, a: swish(x, a)[0])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(data()[RANK]).square().mean().backward()
    for parameter, true in zip(model.parameters(), expected(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), true)


class Block(torch.nn.Module):
    """A fused network: a residual block around a norm and a trained swish."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(4)
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.a = torch.nn.Parameter(torch.tensor([1.3]))  # sharding supports no scalars

    def forward(self, x: Any) -> Any:
        return x + self.second(eager(self.first(self.norm(x)), self.a)) * 0.5


def _trained(model: Any, batch: Any, steps: int = 2) -> list[Any]:
    """Parameters after some steps of gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def network_ddp() -> None:
    model = torch.nn.parallel.DistributedDataParallel(ogt.fuse(Block()))
    torch.testing.assert_close(_trained(model, data()[RANK]), _trained(Block(), data().flatten(0, 1)))


def network_fsdp(fuse_first: bool) -> None:
    model = Block()
    if fuse_first:
        ogt.fuse(model)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not fuse_first:
        ogt.fuse(model)
    torch.testing.assert_close(_trained(model, data()[RANK]), _trained(Block(), data().flatten(0, 1)))


def network_tensor_parallel() -> None:
    model = Block()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    ogt.fuse(model)
    # Each rank applies the swish to its own part: the gradient of `a` is the sum over ranks.
    model.a.register_hook(_summed)
    torch.testing.assert_close(_trained(model, data()[0]), _trained(Block(), data()[0]))


def network_sequence_parallel() -> None:
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel()}
    found = []
    for fuse in (lambda model: model, ogt.fuse):
        torch.manual_seed(0)
        nn = torch.nn
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        found.append(_trained(fuse(parallelize_module(model, init_device_mesh("cpu", (2,)), plan)), data()[RANK]))
    torch.testing.assert_close(*found)


def _summed(gradient: Any) -> Any:
    total = gradient.clone()
    dist.all_reduce(total)
    return total


CHECKS: dict[str, Callable[[], None]] = {
    **{f"DTensor, {name}": (lambda name=name: dtensor(name)) for name in PLACEMENTS},  # type: ignore[misc]
    "DistributedDataParallel": ddp,
    "fully_shard": fsdp,
    "network, DistributedDataParallel": network_ddp,
    "network, fully_shard": lambda: network_fsdp(True),
    "network, fully_shard before fusing": lambda: network_fsdp(False),
    "network, tensor parallel": network_tensor_parallel,
    "network, sequence parallel": network_sequence_parallel,
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    for name, check in CHECKS.items():
        try:
            check()
            print(f"{name}: right")
        except Exception:
            print(f"{name}: wrong")
            traceback.print_exc()
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
