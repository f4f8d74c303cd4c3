"""Programs reuse their own memory, and recompute values that would exceed their peak: the bits are the same."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.torch import zoo  # noqa: E402
from opgraph.torch.graph import peak_recomputation, program  # noqa: E402
from opgraph.torch.graph.backend import Captured, observed  # noqa: E402

MIB = 2**20


class Blocks(nn.Module):
    """Residual blocks of a product and random pointwise ops; an intermediate value and a view of it are results."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.picks = torch.randint(0, 4, (4, 3)).tolist()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shown = x
        for layer, picks in zip(self.layers, self.picks, strict=True):
            y = layer(x)
            for pick in picks:
                y = [F.silu(y), y * torch.sigmoid(x), y + x.roll(1, 0), y - y.mean(-1, keepdim=True)][pick]
            x = F.layer_norm(x + y, (8,))
            shown = y if picks[0] % 2 else shown
        return x, shown, shown[1:, :4]


def run(seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor], Captured]:
    """The results, the gradients, and the graph; checks that two backward passes agree and change no kept tensor."""
    model, x = ogt.fuse(Blocks(seed)), torch.randn(6, 8, requires_grad=True)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append((tensor.detach(), tensor.detach().clone()))
        return tensor

    found: list[Captured] = []
    with observed(found.append), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = model(x)
    held += [(t.detach(), t.detach().clone()) for t in (x, *results, *model.parameters())]
    directions = [torch.randn_like(t) for t in results]
    held += [(t, t.clone()) for t in directions]
    wanted = [x, *model.parameters()]
    passes = [torch.autograd.grad(results, wanted, directions, retain_graph=True) for _ in range(2)]
    for now, before in held:
        assert torch.equal(now, before)
    for first, second in zip(*passes, strict=True):
        assert torch.equal(first, second)
    return list(results), list(passes[0]), found[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 8))])
def test_memory_reuse_keeps_bits_and_recomputed_values_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_GATHERED", 0)  # the setting of programs of large values
    monkeypatch.setattr(peak_recomputation, "SMALLEST", 1)
    torch.manual_seed(seed)
    results, gradients, made = run(seed)
    assert any(line.count(" ") == 6 and "=" in line for line in made.backward.source.splitlines())  # "    a = b"
    torch._dynamo.reset()
    monkeypatch.setattr(program, "reuse_memory", lambda *_: set())
    torch.manual_seed(seed)
    plain = run(seed)
    for own, other in zip([*results, *gradients], [*plain[0], *plain[1]], strict=True):
        assert torch.equal(own, other)
    torch._dynamo.reset()
    monkeypatch.setattr(peak_recomputation, "recompute_over_peak", lambda *_: False)
    torch.manual_seed(seed)
    plain = run(seed)  # other kernels add in another order
    for own, other in zip([*results, *gradients], [*plain[0], *plain[1]], strict=True):
        torch.testing.assert_close(own, other)


def test_memory_read_by_collectives_is_not_reused() -> None:
    """An op that is not PyTorch's own may still read its inputs after it has returned."""
    from torch.fx import Graph

    from opgraph.torch.graph.memory_reuse import own_values
    from opgraph.torch.graph.tensor_locations import place_of

    graph = Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.ops.aten.mm.default, (x, x))
    b = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (a,))
    c = graph.call_function(torch.ops.aten.mm.default, (b, b))
    graph.output((c,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 2, device="meta")
    own = own_values(graph, {}, lambda name: True)
    assert own == {c.name: place_of(c)}


_COUNTED = pytest.mark.xfail(
    reason="345.6 MiB since gradients of convolutions with stride are channels last", strict=True
)


@pytest.mark.parametrize(
    ("activation", "mib"),
    [(nn.SiLU, 365), (nn.ReLU, 365), pytest.param(nn.ReLU, 345, marks=_COUNTED)],
    ids=("silu", "relu", "relu, as few as once"),
)
@pytest.mark.sweep
def test_resnet18_peak_memory_stays_within_limit(activation: type[nn.Module], mib: int) -> None:
    model = ogt.fuse(copy.deepcopy(zoo.resnet18(activation)))
    report = ogt.saved_tensors(model, torch.empty(128, 3, 32, 32), dry_run=True)
    assert report.totals.kept <= 302 * MIB
    assert report.peak.bytes <= mib * MIB


def test_result_reuses_input_memory_of_another_shape() -> None:
    """A product of tokens is a matrix, and its activation has the axes of the tokens."""
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).eval()
    fused, x = ogt.fuse(copy.deepcopy(model)), torch.randn(4, 5, 8)
    found: list[Captured] = []
    with torch.no_grad(), observed(found.append):
        results = [fused(x) for _ in range(3)]
        torch.testing.assert_close(results[0], model(x))
    assert all(torch.equal(results[0], other) for other in results)
    inference = found[0].inference
    assert isinstance(inference, program.Program)
    assert "gelu = reinterpret(addmm, (4, 5, 32), (160, 32, 1), 0)" in inference.source
