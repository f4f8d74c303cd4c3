"""Every torch function of the records and compositions, traced: the results are eager torch's."""

from __future__ import annotations

import itertools
import math
import re
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from traced import relative_error, traced  # noqa: E402

import opgraph as og  # noqa: E402
from opgraph.errors import Unimplemented  # noqa: E402
from opgraph.runtime import cpu_compiler  # noqa: E402
from opgraph.runtime.providers.torch import from_numpy, to_numpy  # noqa: E402
from opgraph.runtime.providers.torch_dtypes import TORCH_DTYPES  # noqa: E402
from opgraph.torch.fuse import fuse  # noqa: E402
from opgraph.torch.fused.shapes import Results  # noqa: E402
from opgraph.torch.tracing import calls  # noqa: E402
from opgraph.torch.tracing.calls import REQUIRED, Found, table  # noqa: E402
from opgraph.torch.tracing.trace import Tracer  # noqa: E402

CALLS = sorted(table().items(), key=lambda item: (item[1].call.signature, str(item[0])))
INTEGERS = ("bitwise", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__")
NUMBERS = frozenset(
    (
        "threshold", "value", "eps", "inplace", "lambd", "alpha", "beta", "negative_slope", "min_val", "max_val",
        "approximate", "decimals", "rounding_mode", "nan", "posinf", "neginf",
    )
)  # fmt: skip
ARITHMETIC = tuple(TORCH_DTYPES.values())


def name_of(func) -> str:
    return getattr(func, "__name__", str(func))


def sample(func, found: Found, dtype) -> list:
    """Arguments for a call: tensors that broadcast, of both signs; optional numbers at their defaults."""
    generator = torch.Generator().manual_seed(7)
    args: list = []
    for name, default in found.parameters:
        if name in ("condition", "mask"):
            args.append(torch.rand(4, 5, generator=generator) > 0.5)
        elif name == "n":
            args.append(1)
        elif name in NUMBERS:
            if default is not REQUIRED:
                break
            args.append(0.25)
        elif name in ("min", "max"):
            args.append(torch.full((5,), -1.0 if name == "min" else 1.0, dtype=dtype))
        elif name_of(func).startswith(INTEGERS):
            args.append(torch.randint(0, 7, (5,) if args else (4, 5), generator=generator))
        else:
            values = torch.rand((5,) if args else (4, 5), dtype=torch.float64, generator=generator)
            args.append((6 * values - 3).to(dtype))
    return args


def widened(args: list) -> list:
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("func,found", CALLS, ids=[f"{i}-{name_of(func)}" for i, (func, _) in enumerate(CALLS)])
def test_every_traced_call_agrees_with_eager(func, found: Found, dtype: str) -> None:
    kind = getattr(torch, dtype)
    args = sample(func, found, kind)

    def call(*given):
        return func(given[0].clone(), *given[1:]) if found.inplace else func(*given)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eager, truth = call(*args), call(*widened(args))
    except (RuntimeError, AttributeError, TypeError) as error:
        pytest.skip(f"torch refuses it: {error}"[:80])
    got = traced(call, *args)
    assert (got.dtype, got.shape) == (eager.dtype, eager.shape)
    eps = torch.finfo(kind).eps
    # In float64 the only truth is torch's own result; sums that cancel lose as many bits as they have terms.
    slack = 2 * relative_error(eager, truth) + (64 if dtype == "float64" else 16) * eps
    assert relative_error(got, truth) <= slack * (1e7 if "polygamma" in found.call.signature else 1)


#: Zeros, and ends of pieces and of domains.
POINTS = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 6.0, 20.0], dtype=torch.float64)
FUNCTIONS = {found.call.signature: (func, found) for func, found in CALLS if not found.inplace}


def at_every_point(found: Found) -> list:
    """Arguments for a call: tensors that contain every pair of points; a third one is larger than the second."""
    grid = torch.meshgrid(POINTS, POINTS, indexing="ij")
    tensors = iter([t.flatten() for t in (*grid, grid[1] + 1)])
    args: list = []
    for name, default in found.parameters:
        if name == "n":
            args.append(1)
        elif name in NUMBERS:
            if default is not REQUIRED:
                break
            args.append(0.5)
        elif name in ("condition", "mask"):
            args.append(POINTS.repeat_interleave(len(POINTS)) > 0)
        else:
            args.append(next(tensors).clone().requires_grad_())
    return args


def traced_gradients(func, args: list) -> list:
    """The gradients of the sum of `func(*args)` by each tensor that requires one."""
    run = Tracer(func)(tuple(args), {})
    graph = run.traced.graph
    names = {id(t): name for t, name in zip(run.tensors, run.traced.inputs, strict=True)}
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    rule = og.gradient(graph, [names[id(a)] for a in leaves if id(a) in names])
    feeds = {names[id(t)]: to_numpy(t.detach()) for t in run.tensors}
    feeds[f"d_{graph.outputs[0].name}"] = np.ones(len(POINTS) ** 2)
    made = og.evaluate(rule, {t.name: feeds[t.name] for t in rule.inputs})
    found = made if isinstance(made, dict) else {rule.outputs[0].name: made}
    zeros = np.zeros(len(POINTS) ** 2)
    return [from_numpy(np.array(found.get(f"d_{names.get(id(a))}", zeros))) for a in leaves]


@pytest.mark.parametrize("signature", FUNCTIONS)
def test_gradients_at_kinks_and_ties_agree_with_torch(signature: str) -> None:
    func, found = FUNCTIONS[signature]
    args = at_every_point(found)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    try:
        result = func(*args)
        eager = torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True)
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"torch has no gradient: {error}"[:80])
    if "polygamma" in signature:
        pytest.skip("opgraph has no gradient of Trigamma")
    for got, given in zip(traced_gradients(func, args), eager, strict=True):
        expected = torch.zeros_like(got) if given is None else given
        clear = expected.isfinite() & result.isfinite()  # elsewhere opgraph often has a limit where torch has NaN
        assert torch.allclose(got[clear], expected[clear], rtol=1e-6, atol=1e-9)


#: Clamps, the gradient of x at a bound up to torch 2.13 and since 2.14 (both were run), and where else it is 1.
CLAMPS = {
    "below": (lambda x, m: x.clamp(min=1.0), (1, 0), lambda x, m: x > 1),
    "above": (lambda x, m: torch.clamp_max(x, 1.0), (1, 0), lambda x, m: x < 1),
    "both": (lambda x, m: x.clamp(-1.0, 1.0), (1, 0), lambda x, m: abs(x) < 1),
    "one value": (lambda x, m: x.clamp(1.0, 1.0), (1, 0), lambda x, m: x != x),
    "out of order": (lambda x, m: x.clamp(1.0, 0.3), (0, 0), lambda x, m: x != x),
    "below a tensor": (lambda x, m: x.clamp(min=m), (1, 0.5), lambda x, m: x > m),
    "above a tensor": (lambda x, m: x.clamp(max=m), (1, 0.5), lambda x, m: x < m),
    "between tensors": (lambda x, m: x.clamp(m, m + 1), (1, 0.5), lambda x, m: (x > m) & (x < m + 1)),
    "tensors that meet": (lambda x, m: x.clamp(m, m), (1, 1), lambda x, m: x != x),
}


@pytest.mark.parametrize("version", [(2, 13), (2, 14), None], ids=["up to 2.13", "since 2.14", "the one installed"])
@pytest.mark.parametrize("name", CLAMPS)
def test_clamp_gradient_at_bounds_follows_torch_version(
    name: str, version: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    func, worth, inside = CLAMPS[name]
    x, m = (t.flatten() for t in torch.meshgrid(POINTS, POINTS, indexing="ij"))
    result = func(x, m)
    if version is None:
        given = x.clone().requires_grad_()
        expected = torch.autograd.grad(func(given, m).sum(), given)[0]
    else:
        monkeypatch.setattr(calls, "_VERSION", version)
        expected = torch.where(inside(x, m), 1.0, torch.where(x == result, float(worth[version >= (2, 14)]), 0.0))
    assert torch.equal(traced(func, x, m), result)
    assert torch.equal(traced_gradients(func, [x.requires_grad_(), m])[0], expected.double())


BOUNDED = {
    **{name: clamp for name, (clamp, _, _) in CLAMPS.items() if name != "tensors that meet"},
    "relu6": lambda x, m: torch.nn.functional.relu6(x),
    "hardtanh": lambda x, m: torch.nn.functional.hardtanh(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", BOUNDED)
def test_clamp_like_gradients_at_nan_agree_with_torch(name: str, dtype) -> None:
    """It is 1 for relu6 and hardtanh, 0 for clamp by numbers, and 1 by tensors since 2.14."""
    x = torch.tensor([math.nan, 0.5], dtype=dtype, requires_grad=True)
    m = torch.zeros(2, dtype=dtype)
    functions = BOUNDED[name], fuse(BOUNDED[name])
    (y, grad), (got, got_grad) = ((y, torch.autograd.grad(y.sum(), x)[0]) for y in (f(x, m) for f in functions))
    torch.testing.assert_close(got, y, equal_nan=True)
    torch.testing.assert_close(got_grad, grad)


@pytest.mark.parametrize("form", ["tensor", "0-d", "int", "float", "bool"])
@pytest.mark.parametrize("first", ARITHMETIC, ids=str)
def test_type_promotion_agrees_with_torch(first, form: str) -> None:
    """For every pair of dtypes, and for numbers and tensors of no dimension on either side."""
    x = torch.tensor([[0, 1, 2], [3, 1, 0]]).to(first)
    others = {
        "tensor": [torch.tensor([1, 2, 1]).to(d) for d in ARITHMETIC],
        "0-d": [torch.tensor(2).to(d) for d in ARITHMETIC],
        "int": [2],
        "float": [1.5],
        "bool": [True],
    }[form]
    functions = [
        lambda a, b: a + b,
        lambda a, b: b * a,
        lambda a, b: a / b,
        lambda a, b: a > b,
        lambda a, b: torch.where(a != 0, a, b),
        lambda a, b: torch.where(b == 1, a, b) if isinstance(b, torch.Tensor) else a == b,
    ]
    for other, function in itertools.product(others, functions):
        eager = function(x, other)
        if torch.int16 in (eager.dtype, torch.result_type(x, other)):
            continue  # the common type of s8 and u8; opgraph has no such dtype
        got = traced(function, x, other)
        assert got.dtype == eager.dtype, (x.dtype, other)
        assert torch.equal(torch.nan_to_num(got.double()), torch.nan_to_num(eager.double())), (x.dtype, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scalars_with_16_bit_tensors_round_as_eager_or_exactly(dtype) -> None:
    x = torch.linspace(-4, 4, 999).to(dtype)
    a = torch.tensor(1.7023)
    for function in (
        lambda x, a: x * 1.1,
        lambda x, a: x + 0.3,
        lambda x, a: x / 1.3,
        lambda x, a: x * a,
        lambda x, a: x - a,
        lambda x, a: 0.7 - x,
    ):
        assert torch.equal(traced(function, x, a, as_eager=True), function(x, a))
        assert torch.equal(traced(function, x, a), function(x.double(), a.double()).to(dtype))


UNARY_ON_INTEGERS = ("sigmoid", "exp", "floor", "round", "abs", "sqrt", "neg", "sign", "isnan", "square", "reciprocal")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("name", UNARY_ON_INTEGERS)
def test_unary_functions_of_integers_agree_or_are_refused(name: str, dtype) -> None:
    x = torch.tensor([0, 1, 2, 7], dtype=dtype)
    function = getattr(torch, name)
    try:
        got = traced(function, x)
    except Unimplemented:
        pytest.fail(f"{name} of {dtype} is refused")
    except TypeError as error:
        assert "cannot be fused" in str(error)
        return
    eager = function(x)
    assert got.dtype == eager.dtype
    assert torch.allclose(got.double(), eager.double(), rtol=1e-6)


ACTIVATIONS = [
    "silu", "mish", "hardswish", "hardsigmoid", "hardtanh", "relu6", "relu", "elu", "selu", "celu", "softplus",
    "softsign", "logsigmoid", "tanhshrink", "softshrink", "hardshrink", "leaky_relu", "gelu", "glu",
]  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nn_functional_activations_agree_with_eager(name: str) -> None:
    function = getattr(torch.nn.functional, name)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    got, eager = traced(function, x), function(x)
    assert torch.allclose(got, eager, rtol=1e-5, atol=1e-6)


def test_keyword_and_default_arguments_agree_with_eager() -> None:
    x = torch.linspace(-30, 30, 101, dtype=torch.float64)
    f = torch.nn.functional
    for function in (
        lambda x: f.softplus(x, beta=0.3, threshold=2),
        lambda x: f.gelu(x, approximate="tanh"),
        lambda x: f.leaky_relu(input=x, negative_slope=0.3),
        lambda x: torch.clamp(x, min=-1.1, max=2.3),
        lambda x: torch.clamp(x, max=2.3),
        lambda x: x.clamp(min=torch.tensor(0.1, dtype=torch.float64)),
        lambda x: f.threshold(x, 0.1, 20.0),
        lambda x: torch.add(x, x, alpha=0.3),
        lambda x: torch.sub(x, 1, alpha=3),
        lambda x: torch.div(x, 0.7, rounding_mode="floor"),
        lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
        lambda x: torch.round(x, decimals=1),
        lambda x: torch.addcmul(x, x, x, value=0.3),
        lambda x: torch.lerp(x, x * 2, 0.7),
        lambda x: torch.nan_to_num(torch.log(x), nan=3.0, posinf=2.0),
        lambda x: x.masked_fill(x > 3, 0.7),
        lambda x: (2**x) + x**3 + x**0.37 + abs(x) ** -0.5,
        lambda x: 3 - x + 2 / x - (7 % x) + (x // 0.3) - (-x) % 1.5,
        lambda x: f.prelu(x.view(1, 101, 1), torch.linspace(0, 1, 101, dtype=torch.float64)),
    ):
        got, eager = traced(function, x), function(x)
        assert torch.allclose(got, eager, rtol=1e-12, atol=1e-13, equal_nan=True)


def test_unsupported_function_is_refused_by_name() -> None:
    with pytest.raises(Unimplemented, match="polygamma"):
        traced(lambda x: torch.polygamma(3, x), torch.rand(3))


@pytest.mark.parametrize(
    "dtype,ends",
    [(torch.float32, (-0.3, 0.7)), (torch.float32, (0.0, 6.0)), (torch.bfloat16, (-1.0, 1.0))],
    ids=str,
)
def test_hardtanh_saves_its_output_and_has_torchs_gradient(dtype, ends) -> None:
    points = [0.0, -0.0, 6.0, -1.0, 1.0, -0.3, 0.7, 0.5, 3.0, -9.0, 9.0, math.inf, -math.inf, math.nan]
    x = torch.tensor(points, dtype=dtype).requires_grad_()
    function = fuse(lambda x: torch.nn.functional.hardtanh(x, *ends))
    got, expected = function(x), torch.nn.functional.hardtanh(x, *ends)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(*[torch.autograd.grad(y.sum(), x)[0] for y in (got, expected)], rtol=0, atol=0)
    (plan,) = function.plans
    (graph,) = plan.graphs.values()
    roles = [s.role for s in graph.op.saved((True,)) if s.role != "shape"]
    assert roles == ["output"]


@pytest.mark.parametrize("name", ["sign", "sgn"])
def test_sign_of_nan_agrees_with_torch(name: str) -> None:
    x = torch.tensor([math.nan, -0.0, 3.0, -math.inf], requires_grad=True)
    function = getattr(torch, name)
    results = [f(x) for f in (fuse(lambda x: function(x)), function)]
    torch.testing.assert_close(*results, rtol=0, atol=0)
    torch.testing.assert_close(*[torch.autograd.grad(y.sum(), x)[0] for y in results], rtol=0, atol=0)


def test_hardsigmoid_near_its_zero_is_as_accurate_as_torchs() -> None:
    x = torch.linspace(-3, -2.9, 1000)
    hardsigmoid = torch.nn.functional.hardsigmoid
    got, eager, truth = fuse(lambda x: hardsigmoid(x))(x), hardsigmoid(x), hardsigmoid(x.double())
    assert relative_error(got, truth) <= 2 * relative_error(eager, truth)


@pytest.mark.parametrize("slope", [torch.tensor([0.3]), torch.tensor(0.3)], ids=["one axis", "none"])
def test_prelu_of_a_scalar_tensor(slope: torch.Tensor) -> None:
    x = torch.tensor(-2.0, requires_grad=True)
    prelu = torch.nn.functional.prelu
    got, eager = fuse(lambda x, w: prelu(x, w))(x, slope), prelu(x, slope)
    assert got.shape == eager.shape and got == eager


@pytest.mark.parametrize(
    "call,args",
    [
        (torch.nn.functional.prelu, (torch.tensor(1.0), torch.rand(3))),
        (torch.nn.functional.prelu, (torch.rand(3), torch.rand(3))),
        (torch.nn.functional.prelu, (torch.rand(2, 3), torch.rand(2))),
        (lambda x: torch.nn.functional.rrelu(x, 0.5, 0.2), (torch.rand(3),)),
        (lambda x: (x * 1).float_power_(2), (torch.rand(3),)),
        (lambda x: (x * 1).mul_(1.5), (torch.arange(3),)),
    ],
)
def test_arguments_refused_by_torch_raise_its_message(call, args) -> None:
    with pytest.raises(RuntimeError) as eager:
        call(*args)
    words = re.escape(str(eager.value).splitlines()[0][:30])
    with pytest.raises(RuntimeError, match=words):
        fuse(lambda *args: call(*args))(*args)
    try:  # torch.compile takes some of these, as functional calls whose result is cast
        torch.compile(Calls(call), backend="aot_eager")(*args)
    except RuntimeError:
        with pytest.raises(RuntimeError, match=words):
            fuse(Calls(call))(*args)


class Calls(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def test_copysign_has_zero_gradient_for_its_sign_operand() -> None:
    x, y = torch.tensor([1.0, -2.0, math.inf]), torch.tensor([-0.0, 3.0, -1.0], requires_grad=True)
    got = fuse(lambda x, y: torch.copysign(x, y))(x, y)
    assert torch.equal(got, torch.copysign(x, y))
    assert torch.equal(torch.autograd.grad(got.sum(), y)[0], torch.zeros(3))


def test_logsigmoid_of_large_numbers_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
    x = torch.tensor([-500.0, -90.0, -1.0, 500.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = fuse(lambda x: torch.nn.functional.logsigmoid(x) * 1)(x)
    torch.testing.assert_close(got, torch.nn.functional.logsigmoid(x))


#: Sizes and axes of operands, the outermost axis in memory first: in several orders; broadcast; all in one order.
PLACED = (
    (((3, 4, 5), (1, 2, 0)), ((3, 4, 5), (0, 1, 2)), ((3, 4, 5), (2, 0, 1))),
    (((1, 1, 5), (0, 1, 2)), ((3, 4, 1), (2, 1, 0)), ((3, 1, 5), (2, 1, 0))),
    (((3, 4, 5), (2, 0, 1)), ((3, 4, 5), (2, 0, 1)), ((3, 4, 5), (2, 0, 1))),
    (((1, 4, 1), (0, 1, 2)), ((3, 1, 1), (1, 2, 0)), ((3, 4, 5), (0, 2, 1))),
)


def placed(tensor: torch.Tensor, sizes: tuple[int, ...], axes: tuple[int, ...]) -> torch.Tensor:
    """A tensor of another's dtype with the given sizes and axis order, whose elements every call takes."""
    dense = torch.ones([sizes[axis] for axis in axes]).to(tensor.dtype)
    return dense.permute([axes.index(axis) for axis in range(len(axes))])


@pytest.mark.parametrize("signature", FUNCTIONS)
def test_results_have_torchs_strides(signature: str) -> None:
    func, found = FUNCTIONS[signature]
    for dtype, places in itertools.product((torch.float32, torch.int32), PLACED):
        rest = iter(places)
        args = [placed(a, *next(rest)) if isinstance(a, torch.Tensor) else a for a in sample(func, found, dtype)]
        try:
            eager = func(*args)
        except (RuntimeError, TypeError, AttributeError):
            continue  # torch has no such call for this dtype
        run = Tracer(func)(tuple(args), {})
        if run.traced is None:
            continue  # a view
        results = Results(run.traced.graph, run.traced.layout).empty(run.tensors)
        assert strides(results[0]) == strides(eager), places


def strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def test_results_of_permuted_inputs_have_torchs_strides_and_gradients() -> None:
    def function(x, y):
        return torch.copysign(x, y) * torch.lerp(x.exp(), y, x.sigmoid()), x + y

    given = [placed(torch.empty(0), (3, 4, 5), axes).clone().requires_grad_() for axes in ((1, 2, 0), (2, 0, 1))]
    for got, eager in zip(fuse(function)(*given), function(*given), strict=True):
        assert got.stride() == eager.stride()
        torch.testing.assert_close(got, eager)
        torch.testing.assert_close(*(torch.autograd.grad(t.sum(), given, retain_graph=True) for t in (got, eager)))


@pytest.mark.parametrize("func", [torch.remainder, torch.fmod, torch.floor_divide])
def test_quotient_of_computed_integers_has_torchs_strides(func, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory may hold zeros, and torch raises for an integer division by zero."""
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    x, y = (placed(torch.empty(0).long(), *place) for place in (((5, 10, 5), (1, 2, 0)), ((10, 5), (1, 0))))
    run = Tracer(lambda x, y: -func(x * 2, -y))((x, y), {})
    assert run.traced is not None
    results = Results(run.traced.graph, run.traced.layout).empty(run.tensors)
    assert results[0].stride() == func(x, y).stride()


def numbers_of_16_bits(dtype: torch.dtype) -> torch.Tensor:
    """All positive finite numbers of a 16-bit dtype."""
    values = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[(values > 0) & values.isfinite()]


def ulps_off(found: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest distance, among normal numbers, in ulp of a dtype."""
    info = torch.finfo(dtype)
    spacing = torch.ldexp(torch.full_like(truth, info.eps), torch.frexp(truth.abs())[1] - 1)
    normal = (truth.abs() < info.max) & (truth.abs() >= info.tiny)
    return float(((found.double() - truth).abs() / spacing)[normal].max())


@pytest.mark.parametrize("exponent", [0.5, -0.5, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_power_derivatives_do_not_use_rounded_results(
    exponent: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's derivatives use the base too."""
    monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
    x = numbers_of_16_bits(dtype)
    x = x[(x > 2.0**-8) & (x < 2.0**8)].requires_grad_()
    wide = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad((wide**exponent).sum(), wide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = torch.autograd.grad(fuse(lambda x: x**exponent)(x).sum(), x)
    assert ulps_off(found, truth, dtype) <= 0.51


@pytest.mark.parametrize("eps", [0.2, 1e-6, 0.7, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logit_does_not_round_its_bounds_or_quotient_to_16_bits(
    eps: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
    x = torch.cat([-numbers_of_16_bits(dtype)[-9:], numbers_of_16_bits(dtype)])
    ends = torch.tensor([eps, 1 - eps, 0.5], dtype=dtype)  # x that rounds to an end; torch gives a whole gradient there
    x = torch.cat([x[~torch.isin(x, ends)], ends[1:2]]) if eps == 1e-6 else x[~torch.isin(x, ends)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fuse(lambda x: torch.logit(x, eps=eps))(x)
    assert ulps_off(found, torch.logit(x.double(), eps=eps), dtype) <= 0.51


#: Calls with a number that torch's kernels treat specially where it is not finite.
WITH_NUMBERS = {
    "elu": torch.nn.functional.elu,
    "celu": torch.nn.functional.celu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "hardtanh": lambda x, number: torch.nn.functional.hardtanh(x, number, 2.0),
    "hardshrink": torch.nn.functional.hardshrink,
    "threshold": lambda x, number: torch.nn.functional.threshold(x, number, 0.0),
    "softplus": torch.nn.functional.softplus,
    "logit": torch.logit,
}


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_non_finite_parameters_are_refused_in_tracing(name: str) -> None:
    with pytest.raises(Unimplemented, match=name):
        traced(lambda x: WITH_NUMBERS[name](x, math.nan), torch.rand(3))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_non_finite_parameters_in_captured_graphs_agree_with_eager(name: str, number: float) -> None:
    if (name, number) == ("hardtanh", math.inf):
        number = -number  # torch refuses bounds out of order

    def function(x):
        return WITH_NUMBERS[name](x + 0, number), x.sum()

    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -3.0, 30.0, math.inf, -math.inf]).repeat(4).requires_grad_()
    got, expected = (call(x)[0] for call in (torch.compile(function, backend="opgraph"), function))
    torch.testing.assert_close(got, expected, equal_nan=True)
    if name == "hardshrink" and math.isnan(number):
        return  # torch's vector loops and their scalar remainders differ
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (got, expected)]
    torch.testing.assert_close(*gradients, equal_nan=True)


@pytest.mark.parametrize("where", [0.0, 1.0])
def test_logit_gradient_is_infinite_at_0_and_1(where: float) -> None:
    x = torch.full((3,), where, requires_grad=True)
    (gradient,) = torch.autograd.grad(fuse(lambda x: torch.logit(x, eps=0.0))(x).sum(), x)
    assert torch.equal(gradient, torch.full((3,), math.inf))
