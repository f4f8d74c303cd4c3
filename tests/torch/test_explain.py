"""`explain` reports exactly what saved-tensor hooks see, with the right module name for each tensor and op."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import Unimplemented  # noqa: E402


class Block(nn.Module):
    """Two layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(functional.silu(self.first(x))) * x


class Breaking(Block):
    """Dynamo ends its graph in the middle, twice; the code compiled for one instance serves the others, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.silu(self.first(x))
        torch._dynamo.graph_break()
        y = functional.silu(self.second(x))
        torch._dynamo.graph_break()
        return torch.tanh(y) * x


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], calls: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            for block in self.blocks:
                x = block(x)
        return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(6, 6), nn.Linear(6, 6, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional.silu(self.words(x.argmax(-1))))


class Views(Block):
    """Keeps two halves of one tensor across a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.first(x).chunk(2, -1)
        torch._dynamo.graph_break()
        return torch.sigmoid(left) * right


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.block, x, use_reentrant=False, debug=True)


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.second(self.cell(functional.silu(self.first(x))[None])[0]))


class Parameters(nn.Module):
    """It keeps parameters, which exist anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.t() * self.scale.exp()).relu() @ self.weight


MODELS: dict[str, Callable[[], nn.Module]] = {
    "several graphs": Breaking,
    "shared code": lambda: Blocks(Breaking),
    "called twice": lambda: Blocks(Block, calls=2),
    "tied weights": Tied,
    "views": Views,
    "checkpointed": Checkpointed,
    "recurrent": Recurrent,
    "parameters": Parameters,
    "budget": lambda: ogt.fuse(nn.Sequential(Block(), Block()), memory=0.5),
    "autocast": Block,
}


def kept_by_hooks(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that the hooks see and that are held after the forward pass: each storage once, without weights."""
    free = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    held: list[weakref.ref[Any]] = []

    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor.detach()

    def pack(tensor: torch.Tensor) -> Packed:
        packed = Packed(tensor)
        held.append(weakref.ref(packed))
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        result = model(x)
    found = [packed.tensor.untyped_storage() for ref in held if (packed := ref()) is not None]
    assert result is not None
    return sum({s._cdata: s.nbytes() for s in found if s._cdata not in free}.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_explain_and_saved_tensors_agree_with_hooks(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(5, 6)
    context = torch.autocast("cpu", torch.bfloat16) if name == "autocast" else nullcontext()
    with warnings.catch_warnings(), context:
        warnings.filterwarnings("ignore", ".*runs unfused")  # a part of the recurrent model
        told = ogt.explain(model, x)
        ogt.fuse(model, memory=0.5 if name == "budget" else "least")
        measured = ogt.saved_tensors(model, x)
        kept = kept_by_hooks(model, x)
    assert told.memory is not None
    assert told.kept == told.memory.totals.hooked == measured.totals.kept == kept > 0
    assert (told.kept_tensors, told.recomputed) == (tuple(k for k in measured.kept if k.counted), measured.recomputed)
    assert (told.peak, sum(k.counted for k in told.kept_tensors)) == (measured.peak.bytes, kept)
    assert told.eager_kept is not None and told.eager_kept >= kept
    modules = dict(model.named_modules(remove_duplicate=False))
    for entry in (*measured.kept, *measured.recomputed):
        assert type(modules[entry.module]).__name__ == entry.module_class
    assert {e.path for e in (*told.fused, *told.left)} | {e[1] for e in measured.timeline} <= set(modules)
    assert ("computed again" in str(told)) == ("Computed again" in str(measured)) == bool(measured.recomputed)
    assert measured.to_dict()["recomputed"] == told.to_dict()["memory"]["recomputed"]


def test_instances_that_share_code_have_their_own_names() -> None:
    model = ogt.fuse(Blocks(Breaking))
    report = ogt.explain(model, torch.randn(5, 6))
    names = {f"blocks.{i}{part}" for i in range(2) for part in ("", ".first", ".second")}
    assert {k.module for k in report.kept_tensors} | {r.module for r in report.recomputed} == names
    assert {e.path: e.times for e in report.left if e.name == "addmm"} == {n: 1 for n in names if n.count(".") == 2}
    assert report.units == {"swish": 4}


def test_recomputed_ops_are_listed_with_bytes_saved() -> None:
    """Backward reads the results of the norm and of the activation, 160 bytes each. The normalized values are kept."""
    report = ogt.explain(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 4)), torch.randn(5, 6))
    saves: dict[tuple[str, str], int] = {}
    for entry in report.recomputed:
        saves[entry.module, entry.module_class] = saves.get((entry.module, entry.module_class), 0) + entry.saves
    assert saves == {("1", "LayerNorm"): 160, ("2", "SiLU"): 160}
    assert "computed again there instead of keeping 320 B" in str(report)


def test_recomputed_op_read_only_by_recomputed_ops_saves_nothing() -> None:
    report = ogt.explain(lambda x: torch.exp(torch.sin(x * 2)), torch.randn(4, requires_grad=True))
    assert {r.op: (r.times, r.saves) for r in report.recomputed} == {"sin": (1, 0), "exp": (1, 16)}


def test_measuring_puts_back_buffers_that_the_forward_replaces() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("missing", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
            self.missing = self.mean.sin()
            return x * self.mean

    model, x = Replaces(), torch.randn(4, 6, requires_grad=True)
    mean = model.mean
    for dry in (False, True):
        ogt.saved_tensors(model, x, dry_run=dry)
        assert model.mean is mean and mean.eq(0).all() and model.missing is None
    ogt.explain(model, x)
    assert model.mean is mean and mean.eq(0).all() and model.missing is None


def test_tensor_passed_twice_is_measured_once() -> None:
    seen: list[bool] = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(a is b)
        return a * b

    x = torch.randn(4, 6, requires_grad=True)
    assert ogt.saved_tensors(product, x, x).peak.after_backward == 3 * x.nbytes  # the result and one gradient
    assert seen == [True]


def test_a_nested_tensor_is_measured_on_its_values() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.LayerNorm(8))
    x = torch.nested.nested_tensor_from_jagged(torch.randn(8, 8), torch.tensor([0, 3, 8]))
    report = ogt.explain(model, x)
    assert report.eager_kept == ogt.saved_tensors(model, x).totals.kept
    assert report.memory is not None and report.memory.totals.kept < report.eager_kept
    with pytest.raises(Unimplemented, match="nested tensor"):
        ogt.saved_tensors(model, x, dry_run=True)


def test_eager_lstm_is_counted_with_its_workspace() -> None:
    model, x = nn.LSTM(8, 16, batch_first=True), torch.randn(2, 5, 8)
    dry = ogt.saved_tensors(model, x, dry_run=True)
    assert dry.uncounted and "workspaces" in str(dry)
    assert ogt.explain(model, x).eager_kept == ogt.saved_tensors(model, x).totals.kept > dry.totals.kept


class Moded(Block):
    """Every mode gives another graph."""

    def forward(self, x: torch.Tensor, mode: str = "") -> torch.Tensor:
        return functional.silu(self.first(x)) * len(mode)


class Routed(Block):
    """A graph break inside a loop: torch.compile leaves the whole function to Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for layer in (self.first, self.second):
            rows = torch.where(x.sum(1) > 0)[0]
            total = total.index_add(0, rows, functional.silu(layer(x[rows])))
        return total


def test_recompile_limit_warns_and_is_in_the_report() -> None:
    model, x, limit = ogt.fuse(Moded()), torch.randn(3, 6), 4
    # The OpInfo tests run in the same process and set a limit that is never reached.
    limited = torch._dynamo.config.patch(
        recompile_limit=limit, accumulated_recompile_limit=256, fail_on_recompile_limit_hit=False
    )
    with limited, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in range(1, limit + 3):
            torch.testing.assert_close(model(x, mode="m" * length), Moded.forward(model, x, "m" * length))
    (warning,) = [w for w in told if "runs unfused" in str(w.message)]
    assert "mode" in str(warning.message) and "recompile_limit" in str(warning.message)
    assert warning.filename == __file__
    with limited:
        (said,) = ogt.explain(model, x, mode="m").limits
    assert said.startswith(f"its forward was compiled {limit} times; the last difference: ") and "mode" in said
    assert said in str(ogt.explain(model, x, mode="m"))
    assert ogt.explain(Moded(), x, mode="m").limits == ()


def test_graph_break_in_a_loop_is_reported_with_line_and_advice() -> None:
    model, x = Routed(), torch.randn(4, 6)
    with pytest.warns(UserWarning, match="runs unfused: torch.compile captures nothing of it: ") as told:
        ogt.fuse(model)(x)
    (warning,) = [w for w in told if "runs unfused" in str(w.message)]
    assert warning.filename == __file__ and "rows = torch.where(x.sum(1) > 0)[0]" in str(warning.message)
    report = ogt.explain(model, x)
    (found,) = report.breaks
    lines = str(report).splitlines()
    assert f"  {found.line}" in lines and f"    {found.reason}" in lines
    assert "make the body of the loop a method" in str(report)
