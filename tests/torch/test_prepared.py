"""Prepared calls: used only for the signature that they were made for, in any mode of torch."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

import opgraph as og  # noqa: E402
from opgraph.errors import InvalidArguments, InvalidDataType, InvalidShape  # noqa: E402
from opgraph.runtime.providers import torch_prepared  # noqa: E402
from opgraph.torch import fuse  # noqa: E402

X = torch.linspace(-3, 3, 24).reshape(4, 6)


def formula(x, a):
    return x * torch.sigmoid(a * x)


def warm(**made):
    """A fused function that has prepared calls for X, with and without gradients."""
    f = fuse(formula)
    for _ in range(3):
        f(X, torch.tensor(0.7))
        both(f, X)
    assert [len(ready) for plan in f.plans for ready in plan.ready] == [0, 2]
    return f


def both(f, x, a=0.7, **kwargs):
    x, a = x.detach().requires_grad_(), torch.tensor(a, requires_grad=True)
    y = f(x, a)
    return y, *torch.autograd.grad(y.sum(), (x, a), **kwargs)


def same(found, wanted) -> bool:
    return all(
        f.dtype == w.dtype and torch.allclose(f, w, rtol=1e-5, atol=1e-6) for f, w in zip(found, wanted, strict=True)
    )


LAYOUTS = {
    "longer": torch.linspace(-1, 1, 30).reshape(5, 6),
    "strided": torch.linspace(-1, 1, 48).reshape(4, 12)[:, ::2],
    "transposed": torch.linspace(-1, 1, 24).reshape(6, 4).t(),
    "spread": torch.linspace(-1, 1, 6).expand(4, 6),
    "shifted": torch.linspace(-1, 1, 25)[1:].reshape(4, 6),
    "f64": X.double(),
    "empty": X[:0],
    "parameter": torch.nn.Parameter(X),
}


@pytest.mark.parametrize("x", LAYOUTS.values(), ids=LAYOUTS)
def test_other_signatures_get_their_own_prepared_call(x) -> None:
    f = warm()
    for _ in range(3):
        assert same([f(x, torch.tensor(0.7))], [formula(x, torch.tensor(0.7))])
        assert same(both(f, x), both(formula, x))
        assert same(both(f, X), both(formula, X))


def test_signatures_beyond_max_ready_are_looked_up() -> None:
    f = fuse(formula)
    for _ in range(2):
        for n in range(1, torch_prepared.MAX_READY + 3):
            assert same(both(f, torch.linspace(-1, 1, n)), both(formula, torch.linspace(-1, 1, n)))
    assert len(f.plans[0].ready[True]) == torch_prepared.MAX_READY


def test_calls_are_looked_up_without_torchs_tensor_guards(monkeypatch) -> None:
    monkeypatch.setattr(torch_prepared, "TensorGuards", None)
    f = fuse(formula)
    for _ in range(3):
        assert same(both(f, X), both(formula, X))
    assert f.plans[0].ready == ([], [])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    """torch's guards would end the process."""
    f = warm()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(InvalidArguments):
        f(nested, torch.tensor(0.7))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_prepared_calls_distinguish_grad_and_other_modes() -> None:
    late = fuse(formula)
    with torch.no_grad():  # the first calls record no gradients
        for _ in range(3):
            late(X.clone().requires_grad_(), torch.tensor(0.7, requires_grad=True))
    assert same(both(late, X), both(formula, X))
    f, a, d = warm(), torch.tensor(0.7), torch.ones_like(X)
    with torch.no_grad():
        assert not f(X.clone().requires_grad_(), a).requires_grad
    with torch.inference_mode():
        assert f(X, a).is_inference() and not f(X, a).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert same([f(X, a)], [formula(X, a)])
    rows = torch.vmap(f, (0, None))(X, a)
    assert same([rows], [formula(X, a)])
    assert same(torch.func.jvp(lambda x: f(x, a), (X,), (d,)), torch.func.jvp(lambda x: formula(x, a), (X,), (d,)))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, d)
        found, wanted = (torch.autograd.forward_ad.unpack_dual(g(dual, a)).tangent for g in (f, formula))
        assert same([found], [wanted])
    assert f(X, a).requires_grad is False and same(both(f, X), both(formula, X))


def test_every_kind_of_backward_agrees_with_eager() -> None:
    f = warm()
    x, a = X.clone().requires_grad_(), torch.tensor(0.7, requires_grad=True)
    for g in (f, f, f):
        for wanted in ((x, a), (x,), (a,)):
            assert same(torch.autograd.grad(g(x, a).sum(), wanted), torch.autograd.grad(formula(x, a).sum(), wanted))
        x.grad = a.grad = None
        g(x, a).sum().backward()
        expected = torch.autograd.grad(formula(x, a).sum(), (x, a))
        assert same((x.grad, a.grad), expected)
        x.grad = a.grad = None
        g(x, a).sum().backward(inputs=[x])
        assert a.grad is None and same([x.grad], expected[:1])
        y = g(x * 1, a)
        assert same(torch.autograd.grad(y.sum(), (x, a), retain_graph=True), expected)
        assert same(torch.autograd.grad(y.sum(), (x, a)), expected)
        (slope,) = torch.autograd.grad(g(x, a).sum(), x, create_graph=True)
        (want,) = torch.autograd.grad(formula(x, a).sum(), x, create_graph=True)
        assert same(torch.autograd.grad(slope.sum(), (x, a)), torch.autograd.grad(want.sum(), (x, a)))
        many = torch.eye(24).reshape(24, 4, 6)
        found, wanted = (torch.autograd.grad(h(x, a), x, many, is_grads_batched=True) for h in (g, formula))
        assert same(found, wanted)


def test_embedding_gradient_and_saved_tensors_hooks_agree() -> None:
    f = warm()
    weight, at = torch.linspace(-1, 1, 24).reshape(4, 6).requires_grad_(), torch.tensor([0, 2, 2])

    def looked_up(g):
        return torch.autograd.grad(
            torch.nn.functional.embedding(at, g(weight, torch.tensor(0.7)), sparse=False).square().sum(), weight
        )

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t[...]):
        for _ in range(2):
            assert same(looked_up(f), looked_up(formula))
            assert same(both(f, X), both(formula, X))
    with torch.autograd.graph.save_on_cpu():
        assert same(both(f, X), both(formula, X))


def test_changed_saved_tensor_raises_in_backward() -> None:
    f = warm()
    x, a = X.clone().requires_grad_(), torch.tensor(0.7, requires_grad=True)
    y = f(x, a)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_some_of_several_results_get_no_gradient() -> None:
    fn = lambda x, a: (x * torch.sigmoid(a * x), x > 0, torch.exp(-a * x))  # noqa: E731
    f = fuse(fn)
    for _ in range(3):
        for pick in (lambda y: y[0].sum(), lambda y: y[2].sum(), lambda y: y[0].sum() + y[2].sum()):
            found, wanted = [], []
            for g, into in ((f, found), (fn, wanted)):
                x, a = X.clone().requires_grad_(), torch.tensor(0.7, requires_grad=True)
                y = g(x, a)
                assert not y[1].requires_grad
                into += [*y, *torch.autograd.grad(pick(y), (x, a))]
            assert same(found, wanted)


def python_functions(call) -> list[str]:
    """The Python functions that a call enters, without the function itself."""
    found: list[str] = []
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in found[1:] if name not in ("grad", "is_dynamo_compiling")]


def test_prepared_call_enters_few_python_functions() -> None:
    f = fuse(lambda x: x * torch.sigmoid(x))
    x, d_y = X.clone().requires_grad_(), torch.ones_like(X)
    for _ in range(3):
        f(X)
        torch.autograd.grad(f(x), x, d_y)
    assert python_functions(lambda: f(X)) == ["__call__", "plan", "prepared"]
    assert python_functions(lambda: f(x)) == ["__call__", "plan", "forward"]
    y = f(x)
    # Functions of torch.autograd.grad itself are not counted: they are the same for torch's own functions.
    of_torch = python_functions(lambda: torch.autograd.grad(torch.nn.functional.silu(x), x, d_y))
    of_torch.remove("silu")
    found = python_functions(lambda: torch.autograd.grad(y, x, d_y))
    for name in of_torch:
        found.remove(name)
    assert found == ["backward", "prepared"]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_reports_nan_gradient_of_fused_function() -> None:
    f = fuse(lambda x: torch.sqrt(x) * 2)
    for _ in range(3):
        x = torch.zeros(4).requires_grad_()
        with (
            pytest.warns(UserWarning, match="Error detected in FusedBackward"),
            pytest.raises(RuntimeError, match="returned nan"),
            torch.autograd.detect_anomaly(check_nan=True),
        ):
            f(x).backward(torch.zeros(4))


# -- compiled graphs ---------------------------------------------------------------------------------------------------


def test_compiled_graph_checks_arguments_after_prepared_calls() -> None:
    f = og.compile(og.parse("graph(x: f32[n,m], a: f32[]) -> (y, z)\n  y = Multiply(x, a)\n  z = Exp(y)"))
    a = torch.tensor(0.7)
    for x in (X, X, X + 1, X[:, ::2], X[:, ::2], X.clone().requires_grad_(), X[:0], X):
        for given in (lambda x=x: f(x=x, a=a), lambda x=x: f({"a": a, "x": x}), lambda x=x: f({"x": x}, a=a)):
            found = given()
            assert list(found) == ["y", "z"] and type(found["y"]) is torch.Tensor and not found["y"].requires_grad
            assert same(list(found.values()), [x.detach() * a, torch.exp(x.detach() * a)])
    out = {"y": torch.empty(4, 6), "z": torch.empty(4, 6)}
    assert f(x=X, a=a, out=out) is out and torch.equal(out["y"], X * a)
    assert isinstance(f(x=X.numpy(), a=np.float32(0.7))["y"], np.ndarray)
    with pytest.raises(InvalidDataType):
        f(x=X.double(), a=a)
    with pytest.raises(InvalidShape):
        f(x=X[0], a=a)
    with pytest.raises(InvalidArguments):
        f(x=X)
    with pytest.raises(InvalidArguments):
        f(x=X, a=a, b=a)


def test_compiled_graph_returns_new_memory_at_each_call() -> None:
    f = og.compile(og.parse("graph(x: f32[n]) -> (y)\n  s = Sigmoid(x)\n  y = Multiply(x, s)"))
    x = torch.linspace(-1, 1, 9)
    results = [f(x=x) for _ in range(4)]
    assert len({r.data_ptr() for r in results}) == 4
    results[0].fill_(7)
    assert all(torch.allclose(r, torch.nn.functional.silu(x)) for r in results[1:])
