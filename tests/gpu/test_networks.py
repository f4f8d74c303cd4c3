"""Captured networks on a GPU: a step, a side stream, a CUDA graph. They also run on a CPU, to validate the tests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from agreement import assert_close_enough

torch = pytest.importorskip("torch", reason="torch is missing")

import opgraph.torch as ogt  # noqa: E402
from opgraph.torch import zoo  # noqa: E402
from opgraph.torch.graph import backend  # noqa: E402
from opgraph.torch.naf1 import NAF1  # noqa: E402


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        request.getfixturevalue("torch")  # it skips, or fails if a GPU is required
    return str(request.param)


def block() -> Any:
    return zoo.BasicBlock(8, 8, 1, torch.nn.SiLU)


def with_naf1() -> Any:
    return torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), NAF1())


NETWORKS = {"ResNet block": block, "NAF1": with_naf1}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest, device: str) -> Any:
    torch.manual_seed(0)
    return NETWORKS[request.param]().to(device)


def step(model: Any, x: Any) -> list[Any]:
    """The result, gradients and buffers of a step."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return [t.detach().clone().cpu() for t in (y, x.grad, *(p.grad for p in model.parameters()), *model.buffers())]


def test_training_step_at_any_address_agrees_with_eager(network: Any, device: str) -> None:
    exact, fused = copy.deepcopy(network).cpu().double(), ogt.fuse(copy.deepcopy(network))
    memory = torch.randn(2 * 8 * 7 * 7 + 1, device=device)
    found: list[backend.Captured] = []
    with backend.observed(found.append):
        for given in (memory[:-1], memory[1:]):  # the second one's address is no multiple of 16 bytes
            x = given.view(2, 8, 7, 7)
            assert_close_enough(step(fused, x), step(network, x), step(exact, x.cpu().double()))
    assert {launch.target.engine.kind for c in found if c.forward for launch in c.forward.launches} == {device}


def test_training_step_on_a_side_stream_agrees_with_eager(network: Any, device: str) -> None:
    exact, fused = copy.deepcopy(network).cpu().double(), ogt.fuse(copy.deepcopy(network))
    x = torch.randn(2, 8, 7, 7, device=device)
    if device == "cpu":
        found = step(fused, x)
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)  # without synchronization a reader is too early
            found = step(fused, x + 0)
        torch.cuda.synchronize()
    assert_close_enough(found, step(network, x), step(exact, x.cpu().double()))


def test_cuda_graph_of_forward_and_backward_agrees_with_eager(network: Any, device: str) -> None:
    network.eval()
    fused, x = ogt.fuse(copy.deepcopy(network)), torch.randn(2, 8, 7, 7, device=device, requires_grad=True)

    def run() -> Any:
        y = fused(x)
        return y, *torch.autograd.grad(y.square().mean(), x)

    if device == "cpu":
        found = run()
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(), run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        with torch.no_grad():
            x.mul_(-0.5)
        graph.replay()
        torch.cuda.synchronize()
    wanted = step(network, x)[:2]
    exact = step(copy.deepcopy(network).cpu().double(), x.detach().cpu().double())[:2]
    assert_close_enough([t.detach().cpu() for t in found], wanted, exact)
