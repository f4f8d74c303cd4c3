"""Plans: a fused function runs its Python code again only if a value that it read has changed."""

from __future__ import annotations

import builtins
import copy
import sys
from enum import Enum, IntEnum

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.errors import Unimplemented  # noqa: E402
from opgraph.torch import naf1  # noqa: E402
from opgraph.torch.fuse import MOST_PLANS, FusedFunction, fuse  # noqa: E402
from opgraph.torch.fused.op import FusedOp  # noqa: E402

F = torch.nn.functional
X = torch.linspace(-3, 3, 24).reshape(4, 6)
FACTOR = 2.0
WEIGHT = torch.linspace(0, 1, 6)
SETTINGS = {"shift": 0.5}


class Counted:
    """A fused function that counts how often the Python function ran."""

    def __init__(self, fn) -> None:
        self.runs = 0
        self.fused = fuse(fn)
        tracer_fn = self.fused.tracer.fn

        def counting(*args, **kwargs):
            self.runs += 1
            return tracer_fn(*args, **kwargs)

        self.fused.tracer.fn = counting

    def __call__(self, *args, **kwargs):
        return self.fused(*args, **kwargs)


def close(got, want) -> bool:
    return got.dtype == want.dtype and torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def with_global(x):
    return x * FACTOR


def with_weight(x):
    return torch.sigmoid(x * WEIGHT)


def with_settings(x):
    return x + SETTINGS["shift"]


def helper(x):
    return x * FACTOR + 1


def with_helper(x):
    return helper(x).exp()


@pytest.mark.parametrize("fn", [with_global, with_weight, with_settings, with_helper], ids=lambda f: f.__name__)
def test_second_call_does_not_run_python_code(fn) -> None:
    counted = Counted(fn)
    assert close(counted(X), fn(X))
    assert close(counted(X + 1), fn(X + 1))
    assert (counted.runs, counted.fused.why_rerun) == (1, "")


def test_new_sizes_and_strides_run_python_code_once_each() -> None:
    counted = Counted(lambda x, a: x * torch.sigmoid(a * x))
    a = torch.tensor(0.5)
    for _ in range(2):
        for shape in ((4, 6), (3, 2), (8, 1)):
            x = torch.randn(shape)
            assert close(counted(x, a), x * torch.sigmoid(a * x))
    assert counted.runs == 3
    assert len(counted.fused.plans) == 1


def test_changed_global_invalidates_the_plan(monkeypatch) -> None:
    for fn, name, value in (
        (with_global, "FACTOR", 3.0),
        (with_helper, "FACTOR", 5.0),
        (with_weight, "WEIGHT", torch.ones(6)),
        (with_settings, "SETTINGS", {"shift": 1.5}),
        (with_helper, "helper", torch.abs),
    ):
        counted = Counted(fn)
        counted(X)
        with monkeypatch.context() as patch:
            patch.setitem(fn.__globals__, name, value)
            assert close(counted(X), fn(X)), name
        assert close(counted(X), fn(X)), name


def test_dict_changed_in_place_invalidates_the_plan(monkeypatch) -> None:
    counted = Counted(with_settings)
    counted(X)
    monkeypatch.setitem(SETTINGS, "shift", -1.0)
    assert close(counted(X), with_settings(X))


def test_changed_cells_defaults_and_code_invalidate_the_plan() -> None:
    n = 2

    def fn(x, m=3):
        return x * n + m

    counted = Counted(fn)
    counted(X)
    n = 4
    assert close(counted(X), X * 4 + 3)
    fn.__defaults__ = (5,)
    assert close(counted(X), X * 4 + 5)
    fn.__code__ = (lambda x, m=3: x - n).__code__
    assert close(counted(X), X - 4)


class Act(torch.nn.Module):
    limit = 7.0

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.rand(6))
        self.shift = 0.5
        self.inner = torch.nn.LeakyReLU(0.1)

    def scaled(self, x):
        return x * self.slope

    def forward(self, x):
        y = self.inner(self.scaled(x)) + self.shift
        return y * 2 if self.training else y.clamp(max=self.limit)


def test_changed_module_attributes_invalidate_the_plan(monkeypatch) -> None:
    act = Act()
    counted = Counted(act.forward)

    def check() -> None:
        assert close(counted(X), act(X))
        assert close(counted(X), act(X))

    check()
    assert counted.runs == 1
    assert counted.fused.why_rerun == ""
    act.shift = 0.75
    check()
    act.inner.negative_slope = 0.3
    check()
    act.eval()
    check()
    monkeypatch.setattr(Act, "limit", 0.1)
    check()
    act.limit = 0.2
    check()
    act.slope = torch.nn.Parameter(torch.rand(6))
    check()
    act.slope.data = torch.rand(6)
    check()
    act.double()
    assert counted(X.double()).dtype is torch.float64
    act.float()
    act.inner = torch.nn.SiLU()
    check()
    act.inner.register_forward_hook(lambda module, args, result: result * 2)
    assert close(counted(X), act(X))


def test_fused_method_has_one_plan_for_all_modules_of_a_class() -> None:
    class Fused(Act):
        forward = fuse(Act.forward)

    for module in (Fused(), Fused()):
        assert close(module(X), Act.forward(module, X))
    assert len(Fused.forward.plans) == 1


def test_plan_repeats_scalar_parameter_arithmetic_without_python() -> None:
    p = torch.nn.Parameter(torch.tensor(0.3))

    def fn(x):
        order = torch.sigmoid(p) * 1.8 + 0.1
        a, b = x.abs().clone() if False else x.chunk(2, -1)
        return a * order + b ** torch.round(order)

    counted = Counted(fn)
    counted(X)
    with torch.no_grad():
        p.fill_(2.0)
    got, want = counted(X), fn(X)
    assert close(got, want)
    assert counted.runs == 1
    (got_d,), (want_d,) = torch.autograd.grad(got.sum(), p), torch.autograd.grad(want.sum(), p)
    assert close(got_d, want_d)


def branching(x, a):
    return x * a if torch.sigmoid(a) > 0.5 else x - a


def test_branch_on_a_parameter_has_a_plan_per_outcome() -> None:
    counted = Counted(branching)
    for value in (1.0, -1.0, 2.0, -0.5, 3.0):
        a = torch.tensor(value)
        assert close(counted(X, a), branching(X, a))
    assert (counted.runs, counted.fused.why_rerun, len(counted.fused.plans)) == (2, "", 2)


def test_written_parameter_switches_the_branch() -> None:
    counted, a = Counted(branching), torch.tensor(1.0, requires_grad=True)
    for value in (1.0, 2.0, -1.0, -2.0, 1.0):
        with torch.no_grad():
            a.fill_(value)
        got, want = counted(X, a), branching(X, a)
        assert close(got, want)
        assert close(*[torch.autograd.grad(y.sum(), a)[0] for y in (got, want)])
        a.data.neg_()  # torch does not count this write
        assert close(counted(X, a), branching(X, a))
    assert counted.runs == 2


class Reads(TorchFunctionMode):
    """Counts the calls by which Python reads tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in ("__bool__", "tolist", "item", "__float__", "stack", "lt", "gt"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_device_branch_values_are_read_once_after_a_write(monkeypatch) -> None:
    """The tensors are on the CPU, but handled like those of a device whose values need a synchronization."""
    monkeypatch.setattr("opgraph.torch.tracing.plan_builder.waits", lambda tensor: True)
    monkeypatch.setattr("opgraph.torch.tracing.plan_builder.function_modes", lambda: 0)  # Reads only watches
    act = naf1.with_order(0.7)
    fused, x = fuse(act.forward), torch.linspace(-4, 4, 101)
    with Reads() as eager:
        act(x)
    assert eager.names.count("__bool__") > 2
    for value in (0.1, 0.2, -0.3):
        with torch.no_grad():
            act.frac_order.fill_(value)
        fused(x)  # may take another path through the function
        for written in (True, False, False):
            with torch.no_grad():
                act.frac_order.add_(1e-3 if written else 0) if written else None
            with Reads() as reads:
                got = fused(x)
            assert close(got, act(x))
            assert [n for n in reads.names if n in ("__bool__", "tolist")] == ["tolist"] * written
            assert ("lt" in reads.names) == written  # values that are only compared are not computed either
    assert fused.why_rerun == ""


def test_constant_tensor_arithmetic_is_computed_once(monkeypatch) -> None:
    def fn(x, a):
        three = torch.lgamma(torch.tensor(3.0))
        return x * three if three > 0.5 else x * a, torch.tensor(2.0)

    monkeypatch.setattr("opgraph.torch.tracing.plan_builder.function_modes", lambda: 0)  # Reads only watches
    counted, a = Counted(fn), torch.tensor(0.25)
    counted(X, a)
    with Reads() as reads:
        (got, two), (want, _) = counted(X, a), fn(X, a)
    assert close(got, want) and counted.runs == 1
    assert reads.names.count("__bool__") == 1  # only `fn` itself
    two.fill_(5.0)  # a returned tensor belongs to the caller
    assert counted(X, a)[1] == 2.0
    with torch.inference_mode():
        inner = fuse(fn)
        inner(X, a)
    x = X.clone().requires_grad_()
    for _ in range(2):
        assert close(torch.autograd.grad(inner(x, a)[0].sum(), x)[0], torch.autograd.grad(fn(x, a)[0].sum(), x)[0])
    try:
        torch.set_default_dtype(torch.float64)
        assert counted(X.double(), a.double())[1].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_branch_on_random_number_runs_python_at_each_call() -> None:
    counted = Counted(lambda x, a: x * a if torch.rand(()) + a > 0.5 else x - a)
    a = torch.tensor(0.25)
    for _ in range(3):
        torch.manual_seed(3)
        want = X * a if torch.rand(()) + a > 0.5 else X - a
        torch.manual_seed(3)
        assert close(counted(X, a), want)
    assert counted.runs == 3 and "draws random numbers" in counted.fused.why_rerun


def test_plan_lookup_draws_no_random_numbers() -> None:
    """Checking the plans draws no numbers, even where no plan serves the call."""

    def fn(x):
        return x * torch.rand(())

    fused = fuse(fn)
    for seed, shape in enumerate([(4,), (6,), (2, 3), (6,), (4,)]):
        x = torch.ones(shape)
        torch.manual_seed(seed)
        want = fn(x), torch.rand(())
        torch.manual_seed(seed)
        got = fused(x), torch.rand(())
        assert all(map(torch.equal, got, want))


def test_first_call_may_use_fake_tensors() -> None:
    """Ops may refuse real tensors there; the generators' states are compared all the same."""
    fused = fuse(lambda x: torch.sigmoid(x) * x)
    with FakeTensorMode():
        assert fused(torch.empty(3, 4)).shape == (3, 4)
    assert close(fused(X), torch.sigmoid(X) * X) and not fused.why_rerun


def test_custom_op_runs_once_per_call() -> None:
    """The op may count its calls, or print."""
    calls = []

    @torch.library.custom_op("opgraph_tests::counting", mutates_args=())
    def counting(a: torch.Tensor) -> torch.Tensor:
        calls.append(a)
        return a * len(calls)

    a = torch.tensor(1.0)
    fused = fuse(lambda x: x * torch.ops.opgraph_tests.counting(a))
    assert [float(fused(torch.ones(n))[0]) for n in (2, 3, 2, 3)] == [1, 2, 3, 4]
    assert "custom op" in fused.why_rerun


class Mode(Enum):
    """An enumeration whose methods read a global."""

    SCALED = 2.0

    @property
    def factor(self) -> float:
        return self.value * FACTOR

    def scaled(self) -> float:
        return self.factor

    def __rmul__(self, other):
        return other * self.factor


class Plain(IntEnum):
    """An enumeration without methods of its own."""

    ONE = 1
    TWO = 2


MODE, PLAIN = Mode.SCALED, Plain.TWO


@pytest.mark.parametrize(
    "fn",
    [lambda x: x * MODE.factor, lambda x: x * MODE.scaled(), lambda x: x * (1.0 * MODE)],
    ids=["property", "method", "operator"],
)
def test_computed_enum_properties_are_evaluated_at_each_call(fn, monkeypatch) -> None:
    fused = fuse(fn)
    for factor in (2.0, 3.0):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        assert close(fused(X), X * 2 * factor)


def test_enum_member_is_a_constant_of_the_plan(monkeypatch) -> None:
    counted = Counted(lambda x: x * PLAIN + (1 if PLAIN == 1 else 0))
    assert close(counted(X), X * 2) and close(counted(X), X * 2) and counted.runs == 1
    monkeypatch.setattr(sys.modules[__name__], "PLAIN", Plain.ONE)
    assert close(counted(X), X + 1)


def test_reading_a_tensor_value_runs_python_at_each_call() -> None:
    counted = Counted(lambda x, a: x * float(a))
    for value in (1.0, -1.0, 2.0):
        assert close(counted(X, torch.tensor(value)), X * value)
    assert counted.runs == 3 and "reads the value" in counted.fused.why_rerun


@pytest.mark.parametrize("order", [0.2, 0.9, 1.1, 1.8])
def test_naf1_values_and_gradients_agree_with_eager(order: float) -> None:
    act = naf1.with_order(order).double()
    fused = fuse(act.forward)
    x = torch.linspace(-4, 4, 101, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        got, want = fused(x), act(x)
        assert torch.allclose(got, want, rtol=1e-12)
        for a, b in zip(
            torch.autograd.grad(got.square().sum(), [x, act.frac_order]),
            torch.autograd.grad(want.square().sum(), [x, act.frac_order]),
            strict=True,
        ):
            assert torch.allclose(a, b, rtol=1e-9)


def test_branch_on_shapes_follows_each_call() -> None:
    counted = Counted(lambda x: x / x.shape[-1] if len(x) > 3 else x * 2)
    for shape in ((4, 6), (2, 6), (4, 3), (4, 6), (2, 6)):
        x = torch.randn(shape)
        assert close(counted(x), x / shape[-1] if shape[0] > 3 else x * 2)
    assert counted.runs == 3


def test_branch_on_shapes_and_a_cell_follows_each_call() -> None:
    flag = [True]

    def fn(x):
        return x * 2 if flag[0] or len(x) > 3 else x * 5

    fused = fuse(fn)
    for value, rows in ((True, 2), (False, 4), (False, 2), (False, 4), (True, 2), (False, 2)):
        flag[0] = value
        x = torch.randn(rows, 6)
        assert close(fused(x), fn(x))
    assert fused.why_rerun == ""


def test_shape_read_from_an_unused_argument_is_guarded() -> None:
    def fn(x, y):
        return x[:, :2] * (2 if y.shape[0] > 3 or x.shape[1] > 5 else 3)

    fused = fuse(fn)
    for shape, rows in (((4, 4), 2), ((4, 4), 5), ((4, 6), 2), ((4, 4), 2)):
        x, y = torch.randn(shape), torch.randn(rows)
        assert close(fused(x, y), fn(x, y))
    assert fused.why_rerun == ""


def test_branch_on_requires_grad_follows_each_call() -> None:
    fused = fuse(lambda x: x * 2 if x.requires_grad else x * 3)
    assert close(fused(X), X * 3)
    assert close(fused(X.clone().requires_grad_()), X * 2)


def test_one_plan_serves_many_sizes_of_one_rank() -> None:
    counted = Counted(lambda x: x * x.dim())
    for n in range(20):
        assert close(counted(torch.ones(n + 1)), torch.ones(n + 1))
    assert len(counted.fused.plans) == 1


def test_different_python_arguments_need_different_plans() -> None:
    counted = Counted(lambda x, n, *, mode="a": x * n if mode == "a" else x + n)
    for n, mode in ((1.5, "a"), (2, "a"), (2.0, "b"), (True, "b"), (0.0, "a"), (-0.0, "a")):
        for _ in range(2):
            got, want = counted(X, n, mode=mode), X * n if mode == "a" else X + n
            assert close(got, want)
            assert torch.equal(got.signbit(), want.signbit())
    assert counted.runs == 6


def test_dtypes_and_default_dtype_are_guarded() -> None:
    fused = fuse(lambda x: x / 2)
    for x in (X, X.double(), X.to(torch.int32), X.bfloat16()):
        assert close(fused(x), x / 2)
    torch.set_default_dtype(torch.float64)
    try:
        assert fused(X.to(torch.int32)).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_function_with_too_many_paths_reruns_python() -> None:
    fused = fuse(lambda x, n: x * n)
    for n in range(MOST_PLANS + 3):
        assert close(fused(X, n), X * n)
    assert "ways through" in fused.why_rerun


def test_side_effects_happen_at_every_call(capsys) -> None:
    seen = []

    def writes(x):
        seen.append(1)
        print("here")
        return x + 1

    fused = fuse(writes)
    for _ in range(3):
        fused(X)
    assert len(seen) == 3
    assert capsys.readouterr().out == "here\n" * 3
    assert fused.why_rerun


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * getattr(Act, "limit"),  # noqa: B009
        lambda x: x * 3 if torch.is_grad_enabled() else x * 2,
        lambda x: x * len(globals()),
        lambda x: x * max(HOLDERS[0].values),
        lambda x: x * next(ITERATOR),
    ],
)
def test_unsupported_python_runs_at_each_call(fn) -> None:
    fused = fuse(fn)
    fused(X)
    assert fused.why_rerun
    assert fused.plans == []


class Holder:
    values = (1.0, 2.0)


HOLDERS = [Holder()]
ITERATOR = iter(range(100))


def test_nested_fused_functions_are_one_kernel() -> None:
    inner = fuse(lambda x: x * torch.sigmoid(x))
    outer = fuse(lambda x: inner(x) + 1)
    assert close(outer(X), F.silu(X) + 1)
    assert len(outer.plans) == 1
    run = outer.tracer((X,), {})
    assert [op.kind for op in run.traced.graph.ops] == ["Sigmoid", "Multiply", "Add"]


def test_fuse_decorator_takes_options_and_refuses_non_functions() -> None:
    @fuse(rounding="each")
    def act(x):
        """Words."""
        return x * 1.1 + 0.3

    x = X.bfloat16()
    assert act.__doc__ == "Words."
    assert torch.equal(act(x), x * 1.1 + 0.3)
    with pytest.raises(ValueError, match="cannot be fused"):
        fuse(3)


def test_nested_results_and_passed_through_arguments() -> None:
    fused = fuse(lambda x: {"y": x + 1, "x": x, "n": (3, [x * 2])})
    for _ in range(2):
        got = fused(X)
        assert got["x"] is X
        assert got["n"][0] == 3
        assert close(got["n"][1][0], X * 2)


def test_callers_graph_runner_is_used() -> None:
    made = []

    def make(traced):
        made.append(traced.graph)
        return FusedOp(traced.graph)

    fused = FusedFunction(lambda x: x.exp(), make)
    for n in (4, 5, 6):
        fused(torch.rand(n))
    assert len(made) == 1


def test_unusual_arguments_do_not_affect_other_plans() -> None:
    def fn(x, more=()):
        return x + sum(more)

    counted = Counted(fn)
    assert close(counted(X, [X, X]), 3 * X)
    assert close(counted(X.as_subclass(Odd)).as_subclass(torch.Tensor), X)
    for _ in range(3):
        assert close(counted(X), X)
    assert counted.runs == 3


class Odd(torch.Tensor):
    pass


def test_torch_compile_traces_the_original_function() -> None:
    fused = fuse(lambda x: x * torch.sigmoid(x))
    compiled = torch.compile(lambda x: fused(x) + 1, backend="eager", fullgraph=True)
    assert close(compiled(X), F.silu(X) + 1)


def test_function_that_writes_a_tensor_runs_at_each_call() -> None:
    steps = torch.zeros(())

    def fn(x):
        steps.add_(1)
        return x * torch.sigmoid(x)

    counted = Counted(fn)
    for _ in range(3):
        assert close(counted(X), F.silu(X))
    assert steps == 3 and "changes a tensor" in counted.fused.why_rerun


def test_plan_distinguishes_repeated_tensor_arguments() -> None:
    formula = lambda x, y: x * torch.sigmoid(y)  # noqa: E731
    f = fuse(formula)
    x, y = torch.randn(6), torch.randn(6)
    for given in ((x, x), (x, y), (y, x), (y, y), (x, x.clone())):
        assert torch.allclose(f(*given), formula(*given))
    assert f.why_rerun == "" and len(f.plans) == 2


def test_parameter_passed_as_argument_is_distinguished_from_others() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.rand(6)), torch.nn.Parameter(torch.rand(6))

        @fuse
        def forward(self, x):
            return x * self.a - self.b

    m = Scaled()
    x = torch.randn(6)
    for given in (m.a, x, m.b, x):
        assert torch.allclose(m(given), given * m.a - m.b)
    m.b = m.a
    assert torch.allclose(m(x), x * m.a - m.a)
    m.b = torch.nn.Parameter(torch.rand(6))
    assert torch.allclose(m(x), x * m.a - m.b)


class Numbers:
    """An object that returns a number by an operator, without an attribute name."""

    def __init__(self) -> None:
        self.number = 2.0

    def __getitem__(self, key: str) -> float:
        return self.number

    def __iter__(self):
        return iter([self.number])

    def __float__(self) -> float:
        return self.number


@pytest.mark.parametrize(
    "read", [lambda n: n["any"], lambda n: sum(n), lambda n: float(n)], ids=["getitem", "iter", "float"]
)
def test_values_from_overloaded_operators_follow_each_call(read) -> None:
    numbers, x = Numbers(), torch.randn(3)
    f = fuse(lambda x: x * read(numbers))
    for number in (2.0, 2.0, 3.0):
        numbers.number = number
        assert torch.equal(f(x), x * number)


SEQUENCES = {
    "appended": lambda layers: layers.append(torch.nn.Sigmoid()),
    "replaced": lambda layers: layers.__setitem__(0, torch.nn.ReLU()),
    "an attribute": lambda layers: setattr(layers[1], "negative_slope", 0.7),
    "nested": lambda layers: layers[2].append(torch.nn.Sigmoid()),
    "a hook": lambda layers: layers[0].register_forward_hook(lambda module, given, result: result * 3),
    "a forward": lambda layers: setattr(layers[0], "forward", lambda x: x * 3),
    "a parameter": lambda layers: setattr(layers[2][0], "weight", torch.nn.Parameter(torch.tensor([0.7]))),
}


@pytest.mark.parametrize("change", SEQUENCES.values(), ids=SEQUENCES)
def test_changed_sequential_invalidates_the_plan(change) -> None:
    inner = torch.nn.Sequential(torch.nn.PReLU())
    layers = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.LeakyReLU(0.1), inner)
    formula = lambda x: layers(x) * 2  # noqa: E731
    f, x = fuse(formula), torch.randn(9)
    for step in (len, len, change):
        step(layers)
        assert torch.allclose(f(x), formula(x), atol=1e-6)
        if step is len:
            assert f.why_rerun == "" and len(f.plans) == 1


def test_global_module_hook_is_run() -> None:
    layer, x = torch.nn.SiLU(), torch.randn(9)
    f = fuse(lambda x: layer(x) * 2)
    f(x)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, given, result: result * 3)
    try:
        assert torch.allclose(f(x), layer(x) * 2, atol=1e-6)
    finally:
        hook.remove()
    assert torch.allclose(f(x), layer(x) * 2, atol=1e-6)


def test_strides_and_storage_offset_are_guarded() -> None:
    functions = (
        lambda x: x * 2 if x.is_contiguous() else x * 3,
        lambda x: x * x.stride(0),
        lambda x: x * (2 + x.storage_offset()),
    )
    x = torch.randn(5, 4)
    for function in functions:
        f = fuse(function)
        for given in (x[:4], x[:4].t(), x[1:]):
            assert torch.equal(f(given), function(given)), function.__code__.co_consts
        assert "Python reads" in f.why_rerun
    f = fuse(lambda x: (x * 2 if (x + 1).is_contiguous() else x) + 1)
    assert torch.equal(f(x), x * 2 + 1)
    with pytest.raises(Unimplemented, match="a computed value"):
        f(x.t())


def test_plan_distinguishes_int_float_and_bool_in_a_list() -> None:
    numbers, x = [1], torch.arange(3)
    f = fuse(lambda x: x * numbers[0])
    for number in (1, 1.0, True):
        numbers[0] = number
        assert f(x).dtype is (x * number).dtype


def test_tensor_created_inside_follows_the_default_dtype() -> None:
    f, x = fuse(lambda x: x * torch.tensor([1.5])), torch.randn(3)
    try:
        for default in (torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(default)
            assert f(x).dtype is default
    finally:
        torch.set_default_dtype(torch.float32)


SIZES = (2, 3, 3, 2, 4, 4, 3, 2)  # a plan of one size; one for learned sizes; both used again
TABLE = torch.linspace(-1, 1, 8)
ASKING = {
    "a tensor times a size": lambda x: x + WEIGHT * x.shape[0],
    "a size under a root": lambda x: torch.tanh(x) * (WEIGHT[3] / x.shape[0] ** 0.5),
    "one of two tensors": lambda x: x.exp() + (WEIGHT if x.shape[0] > 2 else X[0]),
    "an element of a table": lambda x: x * TABLE[x.shape[0]],
    "a part of a table": lambda x: x * TABLE[: x.shape[0], None],
    "ones of a shape": lambda x: x + torch.ones(x.shape),
    "a number in a new tensor": lambda x: x * torch.full((1,), float(x.shape[0])),
    "a size of a tensor of its own": lambda x: x * (TABLE[: x.shape[0]] * 2).shape[0],
    "an expanded tensor": lambda x: x + WEIGHT.expand(x.shape),
    "a size that is returned": lambda x: (x.exp(), x.shape[0]),
    "a size that a number is made of": lambda x: x * x.shape[0],
    "a rank": lambda x: x.exp() if x.dim() == 2 else x,
}


@pytest.mark.parametrize("what", ASKING)
def test_values_derived_from_sizes_follow_each_call(what) -> None:
    fused = fuse(ASKING[what])
    for size in SIZES:
        x = torch.linspace(-1, 1, size * 6).reshape(size, 6)
        got, want = fused(x), ASKING[what](x)
        if isinstance(want, tuple):
            assert got[1] == want[1]
            got, want = got[0], want[0]
        assert close(got, want)
    assert not fused.why_rerun


def test_unused_size_needs_no_separate_plan() -> None:
    fused = fuse(lambda x: x.exp() if x.dim() == 2 else x)
    for size in (2, 3, 4, 5):
        fused(torch.ones(size, 6))
    assert len(fused.plans) == 1


class Two(torch.nn.Module):
    """Two parameters and a buffer, which calls change."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(6)) for _ in range(2))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0]))


def data_dependent_sizes(wrap):
    own = Two()
    f = wrap(lambda x: x * len(own.mask.nonzero()))
    yield f(X)
    own.mask[0] = 0.0
    yield f(X)
    g = wrap(lambda x, k: x * torch.arange(k).numel())
    for k in (2, 2, 3, 2):
        yield g(X, torch.tensor(k))


def the_order_of_keywords(wrap):
    def f(x, **factors):
        for factor in factors.values():
            x = x * factor + 1
        return x

    f = wrap(f)
    yield f(X, a=2.0, b=3.0)
    yield f(X, b=3.0, a=2.0)


def an_attribute_of_the_function(wrap):
    @wrap
    def f(x):
        return x * f.scale

    for scale in (2.0, 3.0):
        f.scale = scale
        yield f(X)


def the_default_dtype(wrap):
    f = wrap(lambda x: torch.where(x > 0, 1.0, 0.0))
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            yield f(X)
    finally:
        torch.set_default_dtype(torch.float32)


def a_constant_that_is_given_out(wrap):
    @wrap
    def f(x):
        number = torch.tensor(0.0)
        return x + number, number.detach()

    for _ in range(3):
        first, second = f(X)
        yield first
        yield second.clone()
        second.add_(10)


def what_gives_its_argument_back(wrap):
    f = wrap(lambda x, y: (x * 2, y.flatten()))
    for shape in ((4,), (2, 2), (4,)):
        yield f(X, torch.ones(shape))[1]
    g, own = wrap(lambda x: x.contiguous() * 2), torch.arange(9.0).reshape(3, 3)
    for x in (own, own.t(), own):
        yield g(x)
    two = Two()
    h = wrap(lambda x, two: x * two.a.flatten())
    for shape in ((6,), (2, 3), (2, 3), (6,)):
        two.a = torch.nn.Parameter(torch.arange(6.0).reshape(shape))
        yield h(X, two)


def tensors_that_become_one(wrap):
    f, two = wrap(lambda two, x: x * 2 if two.a is two.b else x * 3), Two()
    yield f(two, X)
    two.b = two.a
    yield f(two, X)
    number = torch.ones(())
    g = wrap(lambda x, a: x * 2 if a is number else x * 3)
    yield g(X, torch.ones(()))
    yield g(X, number)


def a_setting_under_a_name_of_its_own(wrap):
    is_enabled = torch.is_grad_enabled
    f = wrap(lambda x: x * 2 if is_enabled() else x * 3)
    yield f(X)
    with torch.no_grad():
        yield f(X)


def a_layout_that_is_asked_for(wrap):
    f, two = wrap(lambda two, x: x * 2 if two.mask.is_sparse else x * 3), Two()
    yield f(two, X)
    two.mask = two.mask.to_sparse()
    yield f(two, X)
    two.mask = torch.ones(3, device="meta")
    yield f(two, X)


def autocast_around_arithmetic_on_parameters(wrap):
    matrix, vector = torch.eye(6), torch.ones(6)
    f = wrap(lambda x: x * (matrix @ vector))
    yield f(X)
    with torch.autocast("cpu", torch.bfloat16):
        yield f(X)
    yield f(X)


def a_tensor_that_gets_a_dimension(wrap):
    own, ones = torch.nn.Module(), torch.ones(6)
    own.w = torch.tensor(2.0, dtype=torch.float64)
    f = wrap(lambda x, own: x * (own.w * ones))
    yield f(X, own)
    own.w = own.w.reshape(1)
    yield f(X, own)


def a_pattern_of_a_class(wrap):
    def f(x, own):
        match own:
            case torch.nn.Module(training=True):
                return x * 2
            case _:
                return x * 3

    f, own = wrap(f), Two()
    yield f(X, own)
    own.eval()
    yield f(X, own)


class Sevens(list):
    """A list of another class."""

    def __getitem__(self, place):
        return 7.0


def a_list_of_another_class(wrap):
    own = Two()
    own.numbers = [2.0]
    f = wrap(lambda x, own: x * own.numbers[0])
    yield f(X, own)
    own.numbers = Sevens([2.0])
    yield f(X, own)


def a_class_that_gets_an_attribute(wrap):
    class Own(Two):
        pass

    own = Own()
    own.factor = 2.0
    f = wrap(lambda x, own: x * own.factor * own.a)
    yield f(X, own)
    Own.a = property(lambda self: torch.full((6,), 5.0))
    yield f(X, own)
    Own.factor = property(lambda self: 3.0)
    yield f(X, own)


def a_function_of_python_that_is_replaced(wrap):
    f, known = wrap(lambda x: x * divmod(7.0, 2.0)[0]), divmod
    yield f(X)
    try:
        builtins.divmod = lambda a, b: (a * b,)
        yield f(X)
    finally:
        builtins.divmod = known


def lists_that_torch_was_given(wrap):
    first, second, table = torch.tensor(1.0), torch.tensor(10.0), torch.arange(4.0).view(2, 2)

    def f(x):
        picked, places = [first], [0]
        total = torch.stack(picked).sum() + table[places].sum()
        picked.append(second)
        places += [1]
        return x * total

    f = wrap(f)
    for _ in range(3):
        yield f(X)


def what_gives_something_new_at_first(wrap):
    f = wrap(lambda x: x * 2 if x.contiguous() is x else x * 3)
    g = wrap(lambda x: x.flatten() * 2 if x.flatten() is x else x.flatten() * 3)
    square, row = torch.arange(9.0).view(3, 3), torch.arange(9.0)
    for _ in range(2):
        yield f(square.t())
        yield g(square)
    yield f(square)
    yield g(row)


def an_attribute_of_a_tensor_that_becomes_none(wrap):
    weight, own = nn.Parameter(torch.ones(6)), Two()
    own.view = torch.arange(8.0)[:6]
    f = wrap(lambda x: x * 2 if weight.grad is not None else x * 3)
    g = wrap(lambda x, own: x * 2 if own.view._base is not None else x * 3)
    weight.grad = torch.ones(6)
    yield f(X) + g(X, own)
    weight.grad, own.view = None, torch.arange(6.0)
    yield f(X) + g(X, own)


def parameters_that_become_one_key(wrap):
    own = Two()
    own.a, own.b = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))
    f = wrap(lambda x, own: x * sum({own.a: 0, own.b: 0}, torch.tensor(0.0)))
    yield f(X, own)
    own.b = own.a
    yield f(X, own)


def modules_that_become_one(wrap):
    own, other = Two(), nn.ReLU()
    own.first, own.second = nn.ReLU(), nn.ReLU()
    f = wrap(lambda x, own: x * 2 if own.first is own.second else x * 3)
    g = wrap(lambda x, m: x * 2 if m is other else x * 3)
    equal = [
        wrap(lambda x, m, n: x * 2 if m == n else x * 3),
        wrap(lambda x, m, n: x * 2 if len({m: 0, n: 0}) == 1 else x * 3),
        wrap(lambda x, m, n: x * 2 if [m].count(n) else x * 3),
        wrap(lambda x, m, n: x * 2 if (m,) == (n,) else x * 3),
    ]
    yield f(X, own) + g(X, nn.ReLU()) + sum(h(X, other, nn.ReLU()) for h in equal)
    own.second = own.first
    yield f(X, own) + g(X, other) + sum(h(X, other, other) for h in equal)


def lists_that_become_one(wrap):
    own = Two()
    own.empty, own.given = [], []
    f = wrap(lambda x, own: x * 2 if own.given is own.empty else x * 3)
    yield f(X, own)
    own.given = own.empty
    yield f(X, own)


def tensors_that_become_one_in_a_choice(wrap):
    own = Two()
    own.a, own.b, own.use = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(2.0)), True
    f = wrap(lambda x, own: x * 2 if own.a is (own.b if own.use else None) else x * 3)
    yield f(X, own)
    own.b = own.a
    yield f(X, own)


class Tanh(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return torch.tanh(*args) if func is torch.sigmoid else func(*args, **(kwargs or {}))


def a_mode_of_functions(wrap):
    before, after = (wrap(lambda x: torch.sigmoid(x) * 2) for _ in range(2))
    yield before(X)
    for f in (before, after):
        with Tanh():
            found = f(X)
        yield found
    yield after(X)


def hooks_on_all_modules(wrap):
    f = wrap(lambda x: nn.ReLU()(x) * 2)
    yield f(X)
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, result: result * 3)
    found = f(X)
    hook.remove()
    yield found


def a_buffer_that_is_a_tensor_now(wrap):
    own = Two()
    own.held = nn.Buffer(torch.tensor(5.0))
    f = wrap(lambda x, own: x * 2 if isinstance(own.held, nn.Buffer) else x * 3)
    yield f(X, own)
    own._buffers["held"] = torch.tensor(5.0)
    yield f(X, own)


class Whole(float):
    """A number of a user's class."""


def numbers_of_other_classes(wrap):
    f = wrap(lambda x, s: x * s)
    for number in (np.float64(0.0), np.float64(-0.0), 1, Whole(1.0), 1.0):
        yield torch.signbit(f(X, number)), f(torch.arange(2), number)


CHANGING = [
    lists_that_torch_was_given, what_gives_something_new_at_first, an_attribute_of_a_tensor_that_becomes_none,
    parameters_that_become_one_key, modules_that_become_one, lists_that_become_one,
    tensors_that_become_one_in_a_choice, a_mode_of_functions, hooks_on_all_modules, a_buffer_that_is_a_tensor_now,
    numbers_of_other_classes,
    a_list_of_another_class, a_class_that_gets_an_attribute, a_function_of_python_that_is_replaced,
    data_dependent_sizes, the_order_of_keywords, an_attribute_of_the_function, the_default_dtype,
    a_constant_that_is_given_out, what_gives_its_argument_back, tensors_that_become_one,
    a_setting_under_a_name_of_its_own, a_layout_that_is_asked_for, autocast_around_arithmetic_on_parameters,
    a_tensor_that_gets_a_dimension, a_pattern_of_a_class,
]  # fmt: skip


@pytest.mark.parametrize("calls", CHANGING, ids=lambda f: f.__name__)
def test_no_plan_is_reused_after_a_change(calls) -> None:
    # Sequentially: a mode that one of two generators has entered would also apply to the other.
    found = [list(calls(wrap)) for wrap in (fuse, lambda f: f)]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, check_stride=True)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.a


def test_copied_module_with_fused_method_has_its_own_parameters() -> None:
    model = Scaled()
    model.forward = fuse(model.forward)
    model(X)
    other = copy.deepcopy(model)
    torch.nn.init.constant_(other.a, 5.0)
    assert close(other(X), X * 5) and close(model(X), X)


def test_opgraph_modules_follow_changed_attributes() -> None:
    swish, activation = ogt.Swish(1.5), ogt.Activation(lambda x: x * 2)
    swish(X), activation(X)
    swish.alpha, activation.fn = 3.0, lambda x: x * 3
    assert close(swish(X), X * torch.sigmoid(3 * X)) and close(activation(X), X * 3)
