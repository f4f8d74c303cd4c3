"""Tracing: graphs, captured tensors, views, in-place arithmetic, results, several paths through a function, errors."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from traced import evaluated, traced  # noqa: E402

import opgraph as og  # noqa: E402
from opgraph.errors import InvalidArguments, OpGraphError, Unimplemented  # noqa: E402
from opgraph.torch import naf1  # noqa: E402
from opgraph.torch.fuse import fuse  # noqa: E402
from opgraph.torch.fuse_module import unfuse  # noqa: E402
from opgraph.torch.tracing.trace import Tracer, trace  # noqa: E402

F = torch.nn.functional


def same(got, want, *, rtol=1e-5, atol=1e-6) -> bool:
    return got.dtype == want.dtype and torch.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True)


def swish(x, a):
    return x * torch.sigmoid(a * x)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x  # BAD

    @staticmethod
    def backward(ctx, d):
        raise NotImplementedError


X = torch.linspace(-3, 3, 24).reshape(4, 6)


# -- graphs --


def test_graph_inputs_are_named_after_parameters() -> None:
    graph = trace(swish, X, torch.tensor(1.5)).graph
    assert str(graph).startswith("graph(x: f32[d0,d1], a: f32[]) -> (out)")
    assert [op.kind for op in graph.ops] == ["Multiply", "Sigmoid", "Multiply"]


def test_ops_are_named_after_their_source_line() -> None:
    def two(x):
        y = x.exp()
        return y.log()

    line = two.__code__.co_firstlineno
    assert [op.name for op in trace(two, X).graph.ops] == [f"test_trace.py:{line + 1}", "out"]


def test_one_graph_serves_all_sizes_of_a_broadcast_pattern() -> None:
    tracer = Tracer(swish)
    shapes = [((4, 6), (6,)), ((2, 3), (3,)), ((4, 6), (1,)), ((1, 6), (6,)), ((4, 6), (4, 1)), ((0, 3), (3,))]
    graphs = [tracer((torch.randn(a), torch.randn(b)), {}).traced.graph for a, b in shapes]
    assert graphs[0] is graphs[1] is graphs[5]
    assert len({id(g) for g in graphs}) == 4
    for (a, b), graph in zip(shapes, graphs, strict=True):
        x, y = torch.randn(a), torch.randn(b)
        assert same(og.evaluate(graph, {"x": x, "a": y}, dtype=None), swish(x, y))


def test_dead_ops_are_removed_from_the_graph() -> None:
    def wasteful(x, unused):
        x.sin()
        unused.cos()
        return x + 1

    found = trace(wasteful, X, X)
    assert (found.inputs, [op.kind for op in found.graph.ops]) == (("x",), ["Add"])


def test_captured_tensors_are_named_after_their_variables() -> None:
    class Act(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = torch.nn.Parameter(torch.rand(6))
            self.register_buffer("shift", torch.rand(4, 1))

        def forward(self, x):
            return x * self.slope + self.shift + cell + X

    cell = torch.rand(())
    act = Act()
    run = Tracer(act.forward)((torch.rand(4, 6),), {})
    assert run.traced.inputs == ("x", "slope", "shift", "cell", "X")
    assert run.tensors[1] is act.slope
    assert trace(act, X + 1).inputs == ("x", "slope", "shift", "cell", "X")


def test_captured_tensor_used_twice_is_one_input() -> None:
    w = torch.rand(6)
    assert trace(lambda x: x * w + w, X).inputs == ("x", "w")


# -- parameters stay in torch --


def test_arithmetic_on_scalar_tensors_stays_in_torch() -> None:
    a = torch.tensor(0.3, requires_grad=True)

    def function(x, a):
        b = torch.sigmoid(a) * 1.8 + 0.1
        return torch.pow(x.abs(), b) / torch.exp(torch.lgamma(b))

    run = Tracer(function)((X, a), {})
    assert [op.kind for op in run.traced.graph.ops] == ["Abs", "Pow", "Divide"]
    assert all(t.requires_grad for t in run.tensors[1:])
    assert same(evaluated(run), function(X, a).detach())


def test_branch_on_a_parameter_makes_separate_graphs() -> None:
    def function(x, a):
        return x * a if a > 0 else x - a

    tracer = Tracer(function)
    kinds = [tracer((X, torch.tensor(v)), {}).traced.graph.ops[0].kind for v in (1.0, -1.0, 2.0)]
    assert kinds == ["Multiply", "Subtract", "Multiply"]


def test_identical_trace_reuses_the_graph() -> None:
    tracer = Tracer(lambda x, a: torch.where(x > 0, x * a, x.exp()) + 1.5)
    first = tracer((X, torch.tensor(1.0)), {}).traced
    assert tracer((X, torch.tensor(2.0)), {}).traced is first


def test_different_numbers_make_different_graphs() -> None:
    tracer = Tracer(lambda x, n: x * n)
    numbers = (1, 1.0, True, 2.0, 0.0, -0.0)
    found = [tracer((X.double(), n), {}).traced for n in numbers]
    assert len({id(t) for t in found}) == len(numbers)


@pytest.mark.parametrize("order", [0.2, 0.9, 1.1, 1.8])
def test_traced_naf1_agrees_with_eager(order: float) -> None:
    act = naf1.with_order(order).double()
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    run = Tracer(act.forward)((x,), {})
    assert same(evaluated(run), act(x).detach(), rtol=1e-12)
    assert all(t.dim() == 0 for t in run.tensors[1:])


def test_naf1_has_one_graph_for_all_orders() -> None:
    act = naf1.with_order(0.2)
    tracer = Tracer(act.forward)
    graphs = set()
    for order in (0.2, 0.9, 1.1, 1.8):
        act.load_state_dict(naf1.with_order(order).state_dict())
        graphs.add(id(tracer((X,), {}).traced.graph))
    assert len(graphs) == 1


# -- views, in-place arithmetic, fills --


def test_views_of_arguments_are_graph_inputs_without_copy() -> None:
    def swiglu(x):
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    run = Tracer(swiglu)((X,), {})
    assert [t.data_ptr() for t in run.tensors] == [X.data_ptr(), X[:, 3:].data_ptr()]
    assert same(evaluated(run), swiglu(X))
    for function in (
        lambda x: x[..., :3] * x[..., 3:],
        lambda x: x.split(3, dim=-1)[0].exp(),
        lambda x: x.t() * 2,
        lambda x: x.unsqueeze(-1) * x.reshape(4, 6, 1),
        lambda x: x[0] + x,
        lambda x: F.glu(x),
        lambda x: x.unbind(0)[1].cos(),
    ):
        assert same(traced(function, X), function(X))


def test_a_view_of_a_parameter_stays_in_torch() -> None:
    w = torch.nn.Parameter(torch.rand(3))

    def function(x):
        return x * w.view(1, -1, 1, 1) + w[0] + w.expand_as(x[0, :, 0, 0]).reshape(3, 1, 1)

    x = torch.randn(2, 3, 4, 4)
    assert same(traced(function, x), function(x).detach())


def test_detach_stops_gradients() -> None:
    def rounded(x):
        return x + (torch.round(x) - x).detach()  # the straight-through estimator

    assert "StopGradient" in [op.kind for op in trace(rounded, X).graph.ops]
    x = X.clone().requires_grad_()
    y = fuse(rounded)(x)
    assert torch.equal(y, torch.round(X))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(X))
    y = fuse(lambda x: x * x.detach())(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], X)


def test_in_place_arithmetic_on_computed_values() -> None:
    def function(x, y):
        h = x * 2
        k = h
        h.mul_(y)
        h += 1
        torch.sigmoid_(h)
        F.relu(h, inplace=True)
        return k - h.clone().neg_(), h

    for got, want in zip(traced(function, X, X + 1), function(X, X + 1), strict=True):
        assert same(got, want)


def test_in_place_arithmetic_keeps_the_dtype() -> None:
    def function(x):
        h = x * 2
        h += torch.linspace(0, 1, 6, dtype=torch.float64)
        return h

    assert same(traced(function, X), function(X))
    with pytest.raises(RuntimeError, match="can't be cast"):
        traced(lambda x: (x + 1).mul_(1.5), torch.arange(4))


CONVERSIONS = {
    "as_tensor": lambda x: torch.as_tensor(x * 2) * x,
    "as_tensor of another dtype": lambda x: torch.as_tensor(x * 2, dtype=torch.float64) * x,
    "as_tensor there": lambda x: torch.as_tensor((x > 0).long(), dtype=torch.int64, device=x.device) * x,
    "asarray": lambda x: torch.asarray(x * 2, dtype=torch.float16, copy=True) * x,
    "asarray without a gradient": lambda x: torch.asarray(x * 2, requires_grad=False) * x,
    "tensor": lambda x: torch.tensor(x * 2) * x,
    "new_tensor": lambda x: x.new_tensor((x * 2).double()) * x,
}


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:torch.asarray")
@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_dtype_conversions_are_traced(name: str, rerun: bool) -> None:
    found = []
    fused: Any = fuse(CONVERSIONS[name])
    if rerun:
        fused.why_rerun = "a test"
    for fn in (CONVERSIONS[name], fused):
        for _ in range(2):
            x = torch.linspace(-2, 2, 12).view(3, 4).requires_grad_()
            y = fn(x)
            found.append((y, torch.autograd.grad(y.sum(), x)[0]))
    for call in found[1:]:
        torch.testing.assert_close(call, found[0])


def test_fills_take_the_shape_of_their_template() -> None:
    row = torch.rand(6)
    for function in (
        lambda x: torch.where(x > 0, torch.ones_like(x), torch.zeros_like(x)),
        lambda x: torch.zeros_like(x) + row,
        lambda x: torch.full_like(x, 3.5),
        lambda x: torch.ones_like(x, dtype=torch.float64) * x,
        lambda x: x * x.new_tensor(2.0) + x.new_zeros(6),
    ):
        assert same(traced(function, X), function(X))


def test_casts_agree_with_eager() -> None:
    for function in (
        lambda x: x.half() + x.double(),
        lambda x: (x * 2).to(torch.bfloat16).float(),
        lambda x: x.long() * 3,
        lambda x: x.to(torch.float64, copy=True),
        lambda x: (x > 0).float().type_as(x),
        lambda x: x.bool() & (x > 1),
        lambda x: x.to("cpu") * 1,
    ):
        assert same(traced(function, X), function(X), rtol=1e-2)


def test_traced_tensor_has_the_real_tensors_metadata() -> None:
    answers = []

    def function(x):
        answers.append(
            (
                x.shape, x.size(-1), len(x), x.dim(), x.ndim, x.dtype, x.device, x.numel(), x.is_floating_point(),
                torch.is_tensor(x), isinstance(x, torch.Tensor), x.requires_grad, x.is_cuda, x.element_size(),
                x.T.shape, x.nbytes, x.is_signed(), x.is_mps, x.is_xpu, x.is_sparse_csr,
            )
        )  # fmt: skip
        y = x * 2 + torch.ones(3, 1, 1)
        answers.append((y.shape, y.dtype, y.requires_grad, y.dim()))
        return y

    x = torch.rand(4, 6, requires_grad=True)
    function(x)
    trace(function, x)
    assert answers[:2] == answers[2:]


# -- results --

Pair = collections.namedtuple("Pair", "a b")


def test_nested_result_structure_is_kept() -> None:
    a = torch.tensor(2.0)

    def function(x):
        y = x + 1
        return {"pair": Pair(y, x), "list": [y * 2, (None, "word", 3)], "same": y, "a": a}

    got, want = traced(function, X), function(X)
    assert got["pair"].b is X
    assert got["a"] is a
    assert got["same"] is got["pair"].a
    assert got["list"][1] == (None, "word", 3)
    assert same(got["list"][0], want["list"][0])


def test_results_may_be_arguments_or_their_copies() -> None:
    assert traced(lambda x: x, X) is X
    copied = trace(lambda x: x.clone(), X)
    assert [op.kind for op in copied.graph.ops] == ["Identity"]
    two = trace(lambda x: (x.view(-1), x.view(-1).clone()), X)
    assert [op.kind for op in two.graph.ops] == ["Identity"]


def test_tensors_in_lists_dicts_and_keywords_are_inputs() -> None:
    run = Tracer(lambda xs, *, scale: xs[0] * xs[1]["y"] * scale)(([X, {"y": X + 1}],), {"scale": X - 1})
    assert run.traced.inputs == ("xs_0", "xs_1_y", "scale")
    assert same(evaluated(run), X * (X + 1) * (X - 1))


def test_function_without_tensor_computation_runs_unfused() -> None:
    assert Tracer(lambda a: a * 2)((torch.tensor(3.0),), {}).kept[0] == 6
    with pytest.raises(InvalidArguments, match="computes nothing from its tensor arguments"):
        trace(lambda x: 3, X)


# -- refusals --


def line_of(function, text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return next(i for i in range(first, first + 20) if text in lines[i - 1])


@pytest.mark.parametrize(
    "body",
    [
        lambda x: 1 if x[0, 0] * x > 0 else 2,  # BAD
        lambda x: float(x + 1),  # BAD
        lambda x: int(x * 2),  # BAD
        lambda x: (x * 2).item(),  # BAD
        lambda x: (x * 2).tolist(),  # BAD
        lambda x: (x * 2).numpy(),  # BAD
        lambda x: torch.equal(x, x),  # BAD
    ],
)
def test_data_dependent_branch_is_refused_with_its_line(body) -> None:
    with pytest.raises(InvalidArguments) as caught:
        trace(body, X)
    assert f"test_trace.py:{line_of(body, '# BAD')} in" in caught.value.where
    assert "torch.where" in caught.value.fix


@pytest.mark.parametrize(
    "body,error,what",
    [
        (lambda x: x.sum(), Unimplemented, "sum cannot be fused: a reduction"),  # BAD
        (lambda x: torch.softmax(x, -1), Unimplemented, "a reduction"),  # BAD
        (lambda x: torch.max(x), Unimplemented, r"only maximum\|max\(input, other\) is pointwise"),  # BAD
        (lambda x: x @ x.t(), Unimplemented, "a library runs it better"),  # BAD
        (lambda x: F.dropout(x, 0.5), Unimplemented, "random"),  # BAD
        (lambda x: (x * 2).reshape(24), Unimplemented, "apply it to the arguments"),  # BAD
        (lambda x: torch.fft.fft(x), Unimplemented, "knows no op"),  # BAD
        (lambda x: x.to(torch.complex64), Unimplemented, "complex64"),  # BAD
        (lambda x: x.mul_(2), InvalidArguments, "writes into an argument"),  # BAD
        (lambda x: x.t().add_(1), InvalidArguments, "writes into an argument"),  # BAD
        (lambda x: torch.add(x, 1, out=x), InvalidArguments, "out="),  # BAD
        (lambda x: torch.zeros(6).add_(x[0]), InvalidArguments, "did not make"),  # BAD
        (lambda x: (x * 2).backward(), Unimplemented, "no tensor has a gradient yet"),  # BAD
        (lambda x: (x * 2).data, Unimplemented, "computed value"),  # BAD
        (lambda x: F.rrelu(x, training=True), Unimplemented, "random"),  # BAD
        (lambda x: x * np.ones(6), InvalidArguments, "NumPy array"),  # BAD
        (lambda x: [1.0] * x, InvalidArguments, "meet a list"),  # BAD
        (lambda x: x - (1.0, 2.0), InvalidArguments, "meet a tuple"),  # BAD
        (lambda x: x * "a", InvalidArguments, "meet a str"),  # BAD
        (lambda x: x * len(f"{x.sin():.2f}"), InvalidArguments, "__format__ needs them"),  # BAD
        (lambda x: Squares.apply(x), Unimplemented, "in a torch.autograd.Function"),
    ],
)
def test_unsupported_call_is_refused_with_its_line(body, error, what: str) -> None:
    with pytest.raises(error, match=what) as caught:
        trace(body, X)
    assert isinstance(caught.value, OpGraphError)
    code = Squares.forward if "Squares" in body.__code__.co_names else body
    assert f"test_trace.py:{line_of(code, '# BAD')} in" in caught.value.where


@pytest.mark.parametrize("name", ["__radd__", "__add__", "__rand__", "__lt__"])
def test_dunder_methods_are_refused_like_operators(name: str) -> None:
    """Torch's operators return NotImplemented where a TypeError is raised."""
    with pytest.raises(Unimplemented, match="of int16 cannot be fused"):
        trace(lambda x: getattr(torch.Tensor, name)(x, 3), torch.ones(3, dtype=torch.int16))


def test_unknown_tensor_attribute_raises_at_the_users_line() -> None:
    body = lambda x: x.nonsense()  # noqa: E731  # BAD
    with pytest.raises(AttributeError, match=f"'Tensor' object has no attribute 'nonsense'.*{line_of(body, '# BAD')}"):
        trace(body, X)
    assert traced(lambda x: x * (2 if hasattr(x, "nonsense") else 3), X)[0, 0] == X[0, 0] * 3


@pytest.mark.parametrize("name", ["dropout", "dropout2d", "alpha_dropout"])
def test_dropout_in_evaluation_does_nothing(name: str) -> None:
    function = getattr(F, name)
    assert same(traced(lambda x: function(x, 0.5, training=False) * 2, X), X * 2)
    assert same(traced(lambda x: function(x * 2, 0.5, False), X), X * 2)
    drop = torch.nn.Dropout(0.5)
    with pytest.raises(Unimplemented, match="random"):
        trace(lambda x: drop(x) * 2, X)
    drop.eval()
    assert same(traced(lambda x: drop(x) * 2, X), X * 2)


def test_rrelu_in_evaluation_uses_the_mean_slope() -> None:
    assert same(traced(lambda x: F.rrelu(x * 1, 0.1, 0.3, inplace=True), X), F.rrelu(X, 0.1, 0.3))


@pytest.mark.parametrize(
    "make,what",
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_unsupported_tensor_kinds_are_refused_by_name(make, what: str) -> None:
    with pytest.raises(InvalidArguments, match=f"{what} tensor"):
        fuse(lambda x: x * 2)(make())


def test_fuse_refuses_invalid_arguments_at_once() -> None:
    for wrong, what in ((torch.nn.SiLU, "SiLU is a class"), (3, "type int"), (X, "type Tensor")):
        with pytest.raises(InvalidArguments, match=what):
            fuse(wrong)
    with pytest.raises(InvalidArguments, match="unknown rounding"):
        fuse(swish, rounding="up")
    with pytest.raises(InvalidArguments, match="dry_run tells of a module"):
        fuse(swish, dry_run=True)
    with pytest.raises(InvalidArguments, match="memory='fast' is a choice for modules"):
        fuse(swish, memory="fast")
    with pytest.raises(InvalidArguments, match="memory='fast' is a choice for modules"):
        fuse(memory="fast")(swish)
    with pytest.raises(InvalidArguments, match="pass a module or a function"):
        fuse([torch.nn.SiLU()])
    with pytest.raises(InvalidArguments, match="no module"):
        unfuse(fuse(swish))


def test_incompatible_shapes_raise_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="broadcast"):
        trace(lambda x: x + torch.rand(5), X)


def test_traced_value_of_an_earlier_call_is_refused() -> None:
    kept = []

    def function(x):
        kept.append(x * 2)
        return x + kept[0]

    tracer = Tracer(function)
    tracer((X,), {})
    with pytest.raises(InvalidArguments, match="earlier call"):
        tracer((X,), {})


def test_python_floats_are_constants() -> None:
    assert same(traced(lambda x: x * math.pi + 2**0.5, X), X * math.pi + 2**0.5)


def test_detached_results_require_no_grad_as_in_eager() -> None:
    def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.tanh(x) * x
        return y, y.detach(), torch.floor(x), x.detach() * 2

    x = torch.randn(20, requires_grad=True)
    needs = [t.requires_grad for t in several(x)]
    assert needs == [True, False, True, False]
    assert [t.requires_grad for t in fuse(several)(x)] == needs
    assert not fuse(lambda x: (x * 2).detach())(x).requires_grad
