"""Fused calls in everything that torch may do with an op: compile, export, transforms, tracers, exporters."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from fused_graphs import COMPOSED  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import opgraph as og  # noqa: E402
from opgraph.errors import Unimplemented  # noqa: E402
from opgraph.torch.fuse import fuse  # noqa: E402
from opgraph.torch.fused.composite import composite  # noqa: E402
from opgraph.torch.fused.library import VERSION  # noqa: E402
from opgraph.torch.fused.op import FusedOp  # noqa: E402

# warnings of torch's own compiler and exporters
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

NAMES = ["swish", "swish per channel", "where-split", "two results", "bias"]


class Case:
    """A fused function, the same function in torch's own ops, and inputs for both."""

    def __init__(self, name: str) -> None:
        composed = COMPOSED[name]
        self.op = FusedOp(composed.graph())
        generator = torch.Generator().manual_seed(0)
        self.given = [torch.randn(s, generator=generator, dtype=torch.float64) for s in composed.shapes]
        self.moving = [torch.randn(s, generator=generator, dtype=torch.float64) for s in composed.shapes]

    def fused(self, *tensors: Any) -> Any:
        return self.op(*tensors)

    def eager(self, *tensors: Any) -> Any:
        return tuple(composite(self.op.graph, tensors, "store"))

    def with_gradients(self) -> list[Any]:
        return [t.clone().requires_grad_() for t in self.given]


@pytest.fixture(params=NAMES, ids=lambda name: name.replace(" ", "-"))
def case(request: Any) -> Case:
    return Case(request.param)


def total(results: Any) -> Any:
    return sum((y * y).sum() for y in results)


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected)


# -- the dispatcher ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", [True, False], ids=["trained", "fixed"])
def test_opcheck_passes(case: Case, needs: bool) -> None:
    given = case.with_gradients() if needs else case.given
    spelled = case.op.spelling
    torch.library.opcheck(spelled.overload, (*given, VERSION, spelled.text, "store"))


def test_opcheck_passes_with_library_ops() -> None:
    op = FusedOp(og.parse("graph(x: f64[n,k], w: f64[k,m]) -> (y)\n  %0 = MatMul(x, w)\n  y = Tanh(%0)"))
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (4, 3)))
    torch.library.opcheck(op.spelling.overload, (x, w.t(), VERSION, op.spelling.text, "store"))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_torch_compile_gets_one_graph(case: Case, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: total(case.fused(*t)), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    given, again = case.with_gradients(), case.with_gradients()
    got, expected = compiled(*given), total(case.eager(*again))
    same(got, expected)
    same(torch.autograd.grad(got, given), torch.autograd.grad(expected, again))


@pytest.mark.slow
def test_inductor_compiles_fused_op() -> None:
    torch._dynamo.reset()
    case = Case("swish")
    compiled = torch.compile(lambda x, a: case.fused(x * 2, a)[0] + 1, backend="inductor", fullgraph=True)
    given, again = case.with_gradients(), case.with_gradients()
    got, expected = compiled(*given), case.eager(again[0] * 2, again[1])[0] + 1
    same(got, expected)
    same(torch.autograd.grad(got.sum(), given), torch.autograd.grad(expected.sum(), again))


def test_make_fx_sees_one_op_forward_and_one_backward() -> None:
    case = Case("swish")
    traced = make_fx(lambda *t: torch.autograd.grad(total(case.fused(*t)), t))(*case.with_gradients())
    ops = [n for n in traced.graph.nodes if "opgraph" in str(n.target)]
    assert len(ops) == 2
    same(traced(*case.given), torch.autograd.grad(total(case.eager(*(g := case.with_gradients()))), g))


def test_meta_tensors_give_shapes_and_dtypes(case: Case) -> None:
    got = case.fused(*[t.to("meta") for t in case.given])
    assert [(y.shape, y.dtype, y.device.type) for y in got] == [
        (y.shape, y.dtype, "meta") for y in case.eager(*case.given)
    ]


@pytest.mark.slow
def test_exported_program_runs_in_another_process(tmp_path: Path) -> None:
    case = Case("swish per channel")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(case.given[1])

        def forward(self, x: Any) -> Any:
            return case.fused(x, self.a)[0]

    dims = {0: torch.export.Dim("n")}
    program = torch.export.export(Model(), (case.given[0],), dynamic_shapes=(dims,))
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    expected = case.eager(x, case.given[1])[0]
    same(program.module()(x), expected)
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save((x, expected.detach()), tmp_path / "data.pt")
    code = (
        "import sys, torch, opgraph.torch\n"
        "x, y = torch.load(sys.argv[2])\n"
        "torch.testing.assert_close(torch.export.load(sys.argv[1]).module()(x), y)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "program.pt2", tmp_path / "data.pt"], check=True)


def test_large_constants_are_passed_as_tensors() -> None:
    graph = og.Graph()
    x = graph.input("x", "f64", ("n", 100))
    table = graph.constant("table", np.linspace(0, 1, 100))
    graph.output(graph.add_op("Tanh", graph.add_op("Multiply", x, table), name="y"))
    op = FusedOp(graph)
    eager = lambda x: torch.tanh(x * torch.linspace(0, 1, 100, dtype=torch.float64))  # noqa: E731
    x = torch.randn(3, 100, dtype=torch.float64)
    torch._dynamo.reset()
    same(torch.compile(lambda x: op(x)[0], backend="aot_eager", fullgraph=True)(x), eager(x))
    same(slopes(op, 1)(x), slopes(lambda x: (eager(x),), 1)(x))
    copied = pickle.loads(pickle.dumps(op))
    assert copied.graph == op.graph
    same(copied(x)[0], eager(x))


def test_large_constants_are_copied_to_each_device_once() -> None:
    """The meta device represents a GPU: a copy from the host at each call cannot be captured in a CUDA graph."""
    graph = og.Graph()
    x = graph.input("x", "f64", (3, 100))
    graph.output(graph.add_op("Multiply", x, graph.constant("table", np.linspace(0, 1, 100)), name="y"))
    op, x = FusedOp(graph), torch.randn(3, 100, dtype=torch.float64)
    spelled, meta = op.spelling, torch.device("meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        op.dispatched(x.to(meta))
    slopes(lambda x: op.dispatched(x), 1)(x.to(meta))
    assert meta not in spelled.placed  # these are wrappers, which are invalid after their mode or transform has ended
    op.dispatched(x.to(meta))
    (constant,) = spelled.placed[meta]
    op.dispatched(x.to(meta))
    assert type(constant) is torch.Tensor and spelled.placed[meta][0] is constant
    assert spelled.placed[x.device] is spelled.constants
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: op(x)[0], backend=counted, fullgraph=True)
    for _ in range(3):
        same(compiled(x), x * torch.linspace(0, 1, 100, dtype=torch.float64))
    assert counted.frame_count == 1


def test_module_holding_fused_op_is_copied_and_pickled() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.op = FusedOp(COMPOSED["swish"].graph())

    model = Model()
    assert copy.deepcopy(model).op is model.op
    op = pickle.loads(pickle.dumps(model.op))
    assert op.graph == model.op.graph and op.rounding == "store"


# -- torch.func --------------------------------------------------------------------------------------------------------


def slopes(function: Any, count: int) -> Any:
    return torch.func.grad(lambda *t: total(function(*t)), argnums=tuple(range(count)))


def test_func_grad_of_first_and_second_order(case: Case) -> None:
    count = len(case.given)
    first = [slopes(f, count) for f in (case.fused, case.eager)]
    same(first[0](*case.given), first[1](*case.given))
    second = [slopes(f, count) for f in first]
    same(second[0](*case.given), second[1](*case.given))


def test_func_grad_inside_plain_autograd(case: Case) -> None:
    found = []
    for f in (case.fused, case.eager):
        given = case.with_gradients()
        found.append(torch.autograd.grad(total(slopes(f, len(given))(*given)), given))
    same(*found)


def test_vmap_over_any_inputs(case: Case) -> None:
    for batched in range(1, 2 ** len(case.given)):
        dims = tuple(0 if batched >> i & 1 else None for i in range(len(case.given)))
        given = [t if d is None else torch.stack([t, t + 1, t - 1]) for t, d in zip(case.given, dims, strict=True)]
        same(torch.vmap(case.fused, dims)(*given), torch.vmap(case.eager, dims)(*given))


def test_vmap_along_any_axis_and_twice(case: Case) -> None:
    x, *rest = case.given
    given = torch.stack([x, x + 1], -1)
    dims = (-1, *[None] * len(rest))
    same(torch.vmap(case.fused, dims)(given, *rest), torch.vmap(case.eager, dims)(given, *rest))
    twice = [torch.vmap(torch.vmap(f, dims), (0, *dims[1:])) for f in (case.fused, case.eager)]
    given = torch.stack([given, given * 2])
    same(twice[0](given, *rest), twice[1](given, *rest))


def test_per_sample_gradients(case: Case) -> None:
    dims = (0, *[None] * (len(case.given) - 1))
    given = [torch.stack([case.given[0]] * 3), *case.given[1:]]
    found = [torch.vmap(slopes(f, len(given)), dims)(*given) for f in (case.fused, case.eager)]
    same(*found)


def test_vmap_of_matmul_agrees_with_torch() -> None:
    op = FusedOp(og.parse("graph(x: f64[n,k], w: f64[k,m]) -> (y)\n  %0 = MatMul(x, w)\n  y = Tanh(%0)"))
    x, w = torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    same(torch.vmap(op, (0, None))(x, w)[0], torch.tanh(x @ w))
    assert torch.vmap(op, (0, None))(x[:0], w)[0].shape == (0, 2, 5)


def test_forward_mode_agrees_with_eager(case: Case) -> None:
    given, moving = tuple(case.given), tuple(case.moving)
    same(torch.func.jvp(case.fused, given, moving), torch.func.jvp(case.eager, given, moving))
    found = []
    for f in (case.fused, case.eager):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(given[0], moving[0]), *given[1:]]
            found.append([forward_ad.unpack_dual(y).tangent for y in f(*duals)])
    same(*found)


W64 = torch.ones(4, dtype=torch.float64)
WEIGHTS = torch.ones(4, requires_grad=True)


@pytest.mark.parametrize(
    "fn",
    [lambda x: x * W64, lambda x: x.double() * WEIGHTS, lambda x: x * torch.arange(4), lambda x: (x > 0) * WEIGHTS],
    ids=["another dtype", "a cast", "an integer", "a result without a tangent"],
)
def test_forward_mode_with_tangent_for_one_operand(fn: Any) -> None:
    x, along = torch.ones(3, 4), torch.full((3, 4), 2.0)
    want, got = (torch.func.jvp(f, (x,), (along,)) for f in (fn, fuse(fn)))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a)
    want, got = (torch.func.hessian(lambda x, f=f: f(x).pow(2).sum())(x) for f in (fn, fuse(fn)))
    torch.testing.assert_close(got, want)


def test_forward_mode_result_without_tangent_has_zero_or_none() -> None:
    f = fuse(lambda x, y: (x * 2, y * 3, x > 0))
    with forward_ad.dual_level():
        results = f(forward_ad.make_dual(torch.ones(4), torch.ones(4)), torch.ones(4))
        tangents = [forward_ad.unpack_dual(r).tangent for r in results]
    torch.testing.assert_close(tangents[0], torch.full((4,), 2.0))
    assert not tangents[1].any() and tangents[2] is None


def test_backward_runs_inside_dual_level() -> None:
    x = torch.ones(4, requires_grad=True)
    with forward_ad.dual_level():
        y = fuse(lambda x: x * WEIGHTS)(forward_ad.make_dual(x, torch.ones(4)))
        for gradient in torch.autograd.grad(y.sum(), [x, WEIGHTS]):
            torch.testing.assert_close(gradient, torch.ones(4))


def test_forward_mode_refuses_no_grad_inside_the_function() -> None:
    def f(x: Any) -> Any:
        with torch.no_grad():
            m = x * x
        return x * m

    with pytest.raises(Unimplemented, match="stops gradients and not tangents"):
        torch.func.jvp(fuse(f), (torch.ones(3),), (torch.ones(3),))


def test_forward_over_reverse_and_reverse_over_forward_mode(case: Case) -> None:
    given, moving, count = tuple(case.given), tuple(case.moving), len(case.given)
    over = [torch.func.jvp(slopes(f, count), given, moving)[1] for f in (case.fused, case.eager)]
    same(*over)
    under = [slopes(lambda *t, f=f: torch.func.jvp(f, t, moving)[1], count)(*given) for f in (case.fused, case.eager)]
    same(*under)


def test_hessian_agrees_with_eager(case: Case) -> None:
    rest = case.given[1:]
    found = [torch.func.hessian(lambda x, f=f: total(f(x, *rest)))(case.given[0]) for f in (case.fused, case.eager)]
    same(*found)


def test_batched_gradients_agree_with_eager(case: Case) -> None:
    def jacobians(function: Any) -> Any:
        given = case.with_gradients()
        y = function(*given)[0]
        many = torch.stack([torch.ones_like(y), y.detach(), torch.zeros_like(y)])
        return torch.autograd.grad(y, given, many, is_grads_batched=True, allow_unused=True)

    same(jacobians(case.fused), jacobians(case.eager))


def test_functional_call_agrees_with_eager() -> None:
    case = Case("swish per channel")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.ones(3, 1, dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            return case.fused(x, self.a)[0]

    x, a = case.given
    same(torch.func.functional_call(Model(), {"a": a}, (x,)), case.eager(x, a)[0])


# -- other modes -------------------------------------------------------------------------------------------------------


def test_checkpoint_recomputes_fused_op(case: Case) -> None:
    given, again = case.with_gradients(), case.with_gradients()
    got = torch.utils.checkpoint.checkpoint(lambda *t: total(case.fused(*t)), *given, use_reentrant=False)
    same(torch.autograd.grad(got, given), torch.autograd.grad(total(case.eager(*again)), again))


def test_inference_mode_and_no_grad_save_nothing(case: Case) -> None:
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            got = case.fused(*case.with_gradients())
        assert not any(y.requires_grad for y in got)
        same([y.clone() for y in got], [y.clone() for y in case.eager(*case.given)])


def test_lazily_negated_tensors_are_read_correctly() -> None:
    case = Case("swish")
    x = torch.view_as_complex(torch.randn(7, 2, dtype=torch.float64)).conj().imag
    assert x.is_neg()
    same(case.fused(x, case.given[1]), case.eager(x, case.given[1]))


def test_tensor_subclass_is_called_through_the_dispatcher() -> None:
    class Counted(torch.Tensor):
        seen: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs)

    case = Case("swish")
    case.fused(case.given[0].as_subclass(Counted), case.given[1])
    assert any("opgraph.fused_2_1" in name for name in Counted.seen)


def test_torchscript_trace_records_plain_ops() -> None:
    case = Case("swish")
    traced = torch.jit.trace(lambda x, a: case.fused(x, a)[0], tuple(case.given), check_trace=False)
    assert "aten::sigmoid" in str(traced.graph)
    same(traced(*case.given), case.eager(*case.given)[0])


def test_onnx_export_writes_standard_ops(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch's ONNX exporter needs onnxscript")
    session = pytest.importorskip("onnxruntime", reason="runs the exported model")
    op = FusedOp(COMPOSED["swish per channel"].graph("f32"))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.linspace(0.5, 1.5, 3).view(3, 1))

        def forward(self, x: Any) -> Any:
            return op(x, self.a)[0]

    model = Model().eval()
    program = torch.onnx.export(model, (torch.randn(2, 3, 4),), dynamo=True, verbose=False)
    assert {n.domain for n in program.model.graph} == {""}
    program.save(tmp_path / "model.onnx")
    run = session.InferenceSession(tmp_path / "model.onnx")
    x = torch.randn(2, 3, 4)
    got = run.run(None, {run.get_inputs()[0].name: x.numpy()})[0]
    same(torch.from_numpy(got), model(x).detach())


def test_torch_func_pullback_works_after_the_transform() -> None:
    def fn(x):
        return x * torch.sigmoid(x)

    x, results = torch.randn(3, 4), []
    for function in (fn, fuse(fn)):
        value, pullback = torch.func.vjp(function, x)
        results.append((value, *pullback(torch.ones_like(x)), *pullback(x)))
    torch.testing.assert_close(results[1], results[0])
