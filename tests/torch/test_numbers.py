"""Extreme numbers: results, gradients and refusals of fused functions where a formula or a rounding can fail."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from opgraph.torch.fuse import fuse  # noqa: E402

F = torch.nn.functional
INF, NAN = math.inf, math.nan
NARROW = (torch.float16, torch.bfloat16)
#: The incoming gradient, as of a scaled loss.
SCALE = 1024.0
ENDS = [0.0, -0.0, 0.5, 1.0, -1.0, 2.0, -3.0, INF, -INF, NAN]


def pairs(dtype) -> list:
    """Two tensors that pair every two of ENDS."""
    return [torch.tensor(column, dtype=dtype) for column in zip(*itertools.product(ENDS, ENDS))]


def gradients(fn: Callable[..., Any], *args) -> list:
    leaves = [a.clone().requires_grad_() for a in args]
    result = fn(*leaves)
    return list(torch.autograd.grad(result, leaves, torch.full_like(result, SCALE)))


def assert_same(got, expected) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# -- 16 bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_overflow_guard_fires_as_in_16_bits(dtype) -> None:
    x = torch.tensor([300.0, 1e30, 2.0, -300.0, 200.0, 0.0], dtype=torch.float32).to(dtype)

    def guarded(x):
        h = x * x
        return h, torch.isinf(h), torch.isfinite(h), torch.where(torch.isinf(h), 7.0, h), h > torch.finfo(h.dtype).max

    for got, expected in zip(fuse(guarded)(x), guarded(x), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_underflowing_value_compares_equal_to_zero(dtype) -> None:
    x = torch.tensor([torch.finfo(dtype).smallest_normal, 1.0], dtype=dtype)
    function = fuse(lambda x: torch.where((x * x * 1e-3) == 0, 1.0, 2.0))
    assert_same(function(x), torch.tensor([1.0, 2.0]))


#: Functions whose gradient from the rounded result would be 0 or have few digits; the input gives the right one.
SATURATING = {
    "elu": F.elu,
    "celu of a negative alpha": lambda x: F.celu(x, -9.0),
    "by hand": lambda x: torch.where(x > 0, x, torch.expm1(x)),
    "softplus": F.softplus,
    "softplus up to 2": lambda x: F.softplus(x, beta=0.3, threshold=2),
}


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
@pytest.mark.parametrize("name", SATURATING)
def test_gradients_of_saturating_functions_are_accurate(name: str, dtype) -> None:
    """The error against float64 is at most twice eager torch's, or within the 3 ulp of a single op."""
    function, x = SATURATING[name], torch.linspace(-18, 18, 301).to(dtype)
    (truth,), (eager,), (got,) = gradients(function, x.double()), gradients(function, x), gradients(fuse(function), x)
    ulp = torch.finfo(dtype).eps * truth.abs().clamp_min(torch.finfo(dtype).smallest_normal)
    twice = (2 * (eager.double() - truth).abs()).nan_to_num(0)  # where() of eager f16 multiplies 0 by e^x
    assert ((got.double() - truth).abs() <= torch.maximum(twice, 3 * ulp)).all()


def test_softshrink_has_zero_gradient_at_its_limits() -> None:
    """The limit 0.1 in float64 is no float32 number, so that the function is decomposed into smaller ops."""
    x = torch.tensor([-0.1, 0.1, -0.1000001, 0.1000001, 0.0], dtype=torch.float64)

    def shrunk(x):
        return F.softshrink(x, 0.1)

    assert_same(gradients(fuse(shrunk), x), gradients(shrunk, x))
    assert_same(fuse(shrunk)(x).signbit(), shrunk(x).signbit())


# -- infinities, ties -------------------------------------------------------------------------------------------------

PAIRS = {
    "//": lambda a, b: a // b,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "1 //": lambda a, b: 1.0 // b,
    "hypot": torch.hypot,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *NARROW], ids=str)
def test_binary_functions_of_zeros_infinities_and_nan(dtype) -> None:
    """Signs of zeros are equal too, except for fmax and fmin, whose torch kernels differ in them."""

    def every(a, b):
        return [function(a, b) for function in PAIRS.values()]

    a, b = pairs(dtype)
    for name, got, expected in zip(PAIRS, fuse(every)(a, b), every(a, b), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True, msg=name)
        assert name.startswith("fm") or (got.signbit() == expected.signbit())[~expected.isnan()].all(), name


@pytest.mark.parametrize("numbers", [*itertools.permutations((math.nan, math.inf, -math.inf)), (0.1, 0.1, -math.inf)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *NARROW], ids=str)
def test_nan_to_num_with_infinite_and_nan_replacements(dtype, numbers: tuple[float, ...]) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.3], dtype=dtype)

    def replaced(x):
        return torch.nan_to_num(-x, *numbers)

    assert_same(fuse(replaced)(x), replaced(x))
    assert_same(gradients(fuse(replaced), x), gradients(replaced, x))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ["//", "floor"])
def test_floor_division_of_extreme_integers(name: str, dtype: torch.dtype) -> None:
    """`(a - a % b) / b` would overflow the dtype there."""
    info = torch.iinfo(dtype)
    ends = [info.min, info.min + 1, info.min + 2, info.max - 1, info.max, 0, 1, 3, 7, -1 % 2**info.bits]
    column = torch.tensor([n - 2**info.bits if n > info.max else n for n in ends]).to(dtype)
    a, b = (t.contiguous() for t in torch.broadcast_tensors(column[:, None], column[column != 0]))
    assert_same(fuse(PAIRS[name])(a, b), PAIRS[name](a, b))

    def by_number(a):
        return PAIRS[name](a, 3), PAIRS[name](a * 1, info.max)

    for got, expected in zip(fuse(by_number)(a), by_number(a), strict=True):
        assert_same(got, expected)


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="since torch 2.14 ties are shared (test_trace_calls.py)")
def test_clamp_gradients_at_ties_and_crossed_bounds() -> None:
    x, low, high = (torch.tensor(column) for column in zip(*itertools.product(ENDS, ENDS, ENDS)))
    for got, expected in zip(gradients(fuse(torch.clamp), x, low, high), gradients(torch.clamp, x, low, high)):
        assert_same(got, expected)


@pytest.mark.parametrize("function", [torch.fmax, torch.fmin])
def test_fmax_and_fmin_gradients_at_ties_agree_with_torch(function) -> None:
    """Since 2.14 torch gives the whole gradient both to a number and to NaN; here only the number gets it."""
    a, b = pairs(torch.float32)
    clear = ~(a.isnan() | b.isnan()) if torch.__version__ >= "2.14" else torch.ones_like(a, dtype=torch.bool)
    for got, expected in zip(gradients(fuse(function), a, b), gradients(function, a, b)):
        assert_same(got[clear], expected[clear])


# -- conversions and dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [torch.float64, torch.float32, *NARROW], ids=str)
def test_out_of_range_floats_convert_to_integers_as_in_eager(source) -> None:
    """Computed values are too, for few elements and for vectors of them."""
    points = [-1, -0.9, -1.9, NAN, INF, -INF, 300, 127.5, 128, 255.5, 256, 65536.7, 1e10, -1e10, -300.5, 2.0**32 + 1]
    points += [2.0**31, -(2.0**31), 2.0**31 + 256, 3e9, -3e9, 2.0**63, 1e19, -1e19]
    x = torch.tensor(points, dtype=torch.float64).to(source)

    def converted(x):
        y = x * 2
        targets = (torch.uint8, torch.int8, torch.int32, torch.int64)
        return [v.to(target) for v in (x, y) for target in targets]

    fused = fuse(converted)
    for many in (x, x.repeat(40)):
        for got, expected in zip(fused(many), converted(many), strict=True):
            assert_same(got, expected)


REFUSED = {
    "subtraction of truth values": (lambda a, b: a - b, torch.tensor([True]), torch.tensor([True])),
    "a truth value from a number": (lambda a, b: 1 - a, torch.tensor([True]), torch.tensor([1.0])),
    "heaviside of two dtypes": (torch.heaviside, torch.ones(3), torch.ones(3, dtype=torch.float64)),
    "logaddexp of integers": (torch.logaddexp, torch.tensor([1, 2]), torch.tensor([1, 2])),
    "a weight of another dtype": (F.prelu, torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor([0.5])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_refused_by_eager_raise_the_same_error_type(name: str) -> None:
    function, *args = REFUSED[name]
    with pytest.raises((RuntimeError, NotImplementedError)) as eager:
        function(*args)
    with pytest.raises(eager.type):
        fuse(lambda a, b: function(a, b))(*args)


def test_signbit_of_integers_agrees_with_eager() -> None:
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
        x = torch.tensor([0, 1, -1, 2, -3, 100]).to(dtype)
        assert_same(fuse(torch.signbit)(x), torch.signbit(x))


def test_shifts_of_numbers_and_in_place_shifts() -> None:
    x = torch.tensor([1, 2, 3])

    def shifted(x):
        y = x + 0
        y <<= 2
        y >>= 1
        return 1 << x, 64 >> x, y

    for got, expected in zip(fuse(shifted)(x), shifted(x), strict=True):
        assert_same(got, expected)


# -- special functions ------------------------------------------------------------------------------------------------

SPECIAL = {
    "erfinv": torch.erfinv,
    "erfc": torch.erfc,
    "log_ndtr": torch.special.log_ndtr,
    "ndtri": torch.special.ndtri,
    "entr": torch.special.entr,
    "i0": torch.special.i0,
    "i0e": torch.special.i0e,
    "i1": torch.special.i1,
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_functions_and_gradients_agree_with_torch(name: str) -> None:
    function = SPECIAL[name]
    x = torch.cat((torch.linspace(-9, 5, 141), torch.tensor([0.0, 0.999, 1e-3, 1.0, -1.0])))
    compared(fuse(function)(x), function(x), function(x.double()))
    (truth,), (eager,), (got,) = gradients(function, x.double()), gradients(function, x), gradients(fuse(function), x)
    compared(got, eager, truth)


def test_ndtr_tail_agrees_with_erfc() -> None:
    """torch's own ndtr computes 1 + erf there, which is 0 below -8."""
    x = torch.linspace(-9, 5, 141)
    truth = torch.special.erfc(x.double() * -math.sqrt(0.5)) / 2
    compared(fuse(torch.special.ndtr)(x), torch.special.erfc(x * -math.sqrt(0.5)) / 2, truth)


def compared(got, eager, truth) -> None:
    """Checks that the error is at most twice eager torch's, or 16 last bits; skips elements whose true value is NaN."""
    slack = 2 * (eager.double() - truth).abs() + 16 * torch.finfo(got.dtype).eps * truth.abs()
    same = (got.double() == truth) | ((got.double() - truth).abs() <= slack + torch.finfo(got.dtype).tiny)
    assert (same | truth.isnan()).all()


# -- shapes -----------------------------------------------------------------------------------------------------------

SPREAD = {
    "expand": lambda x: (x * 2).expand(3, 4, 5) + 1,
    "a size that stays": lambda x: (x * 2).expand(2, -1, 5) * x,
    "expand_as": lambda x: (x[:, :1] * 2).expand_as(x) + x,
    "broadcast_to": lambda x: torch.broadcast_to(x * 2, (2, 4, 5)).exp(),
    "flip": lambda x: x.flip(0) * x,
    "roll": lambda x: x.roll(1, 0) - x,
}


@pytest.mark.parametrize("name", SPREAD)
def test_computed_values_expand_and_arguments_transpose(name: str) -> None:
    function, first = SPREAD[name], torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    fused = fuse(function)
    for x in (first, first + 1):
        torch.testing.assert_close(fused(x), function(x))
        torch.testing.assert_close(gradients(fused, x), gradients(function, x))


def test_expand_of_computed_value_follows_each_calls_sizes() -> None:
    fused = fuse(lambda x: (x * 2).expand(3, *x.shape) + 1)
    for shape in ((2, 2), (5, 2), (2,)):
        assert_same(fused(torch.ones(shape)), torch.full((3, *shape), 3.0))
    with pytest.raises(RuntimeError, match="expanded size"):
        fuse(lambda x: (x * 2).expand(3, 2))(torch.ones(4, 5))


# -- constants in 16 bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.addcmul(x, x, x, value=0.3),
        lambda x: torch.lerp(x, x * x, 0.3),
        lambda x: x * 0.3 * x + 0.3 / x,
        lambda x: (x / 0.3 - x * 0.7) * x,
        lambda x: torch.atan2(x, torch.ones_like(x)),
        lambda x: torch.atan2(x, -torch.ones_like(x)),
    ],
    ids=["addcmul", "lerp", "product", "quotient", "atan2", "atan2 behind"],
)
def test_scalars_not_representable_in_16_bits_are_not_rounded(dtype, function) -> None:
    x = torch.linspace(0.1, 4, 2001)
    x = torch.cat([x, -x]).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    result, exact = fuse(function)(x), function(wide)
    torch.testing.assert_close(result.double(), exact, rtol=0.52 * torch.finfo(dtype).eps, atol=1e-4)
    (got,), (want,) = torch.autograd.grad(result.sum(), [x]), torch.autograd.grad(exact.sum(), [wide])
    torch.testing.assert_close(got.double(), want, rtol=0.52 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_floor_division_does_not_round_scalar_to_16_bits(dtype) -> None:
    x = torch.linspace(-25, 25, 4001).to(dtype)
    for function in (lambda x: x // 0.3, lambda x: torch.div(x, 0.3, rounding_mode="floor") * 2):
        assert_same(fuse(function)(x), function(x))


ENDLESS = {
    "threshold inf": lambda x: F.threshold(x, math.inf, 1.0),
    "threshold -inf": lambda x: F.threshold(x, -math.inf, 1.0),
    "threshold -inf, value 0": lambda x: F.threshold(x, -math.inf, 0.0),
    "hardshrink inf": lambda x: F.hardshrink(x, math.inf),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ENDLESS)
def test_infinite_value_at_infinite_threshold_agrees_with_eager(name, dtype) -> None:
    function = ENDLESS[name]
    x = torch.tensor([-math.inf, -1.0, 0.0, math.inf], dtype=dtype)
    assert_same(fuse(function)(x), function(x))
    assert_same(gradients(fuse(function), x), gradients(function, x))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_threshold_does_not_round_its_number_to_16_bits(dtype) -> None:
    x = torch.tensor([0.3, 0.298, 0.302, INF, NAN, -INF], dtype=torch.float64).to(dtype)
    for value in (0.0, -2.0):
        assert_same(fuse(F.threshold)(x, 0.3, value), F.threshold(x, 0.3, value))
        assert_same(
            gradients(fuse(lambda x, v=value: F.threshold(x, 0.3, v)), x),
            gradients(lambda x, v=value: F.threshold(x, 0.3, v), x),
        )


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_hardtanh_gradient_does_not_round_bounds_to_16_bits(dtype) -> None:
    """The bf16 value next to 0.7 is below it, the f16 value above it."""
    x = torch.tensor([0.7, -0.3, 0.5, 0.704, 0.75, -0.31, INF, -INF, NAN], dtype=torch.float64).to(dtype)
    for low, high in ((-0.3, 0.7), (-0.7, 0.3), (-60000.0, INF)):
        assert_same(
            gradients(fuse(lambda x, low=low, high=high: F.hardtanh(x, low, high)), x),
            gradients(lambda x, low=low, high=high: F.hardtanh(x, low, high), x),
        )


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_captured_smooth_l1_gradient_is_nan_at_nan(reduction) -> None:
    """The sign of NaN is 0 in torch. A gradient by the sign would hide that the loss is NaN."""

    def function(x):
        return F.smooth_l1_loss(x, torch.zeros_like(x), reduction=reduction, beta=0.3) * 2

    x = torch.tensor([NAN, INF, -INF, 0.3, -0.3, 0.1, 0.0, 2.0])
    got = gradients(torch.compile(function, backend="opgraph", fullgraph=True), x)
    torch.testing.assert_close(got, gradients(function, x), equal_nan=True)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_captured_activation_derivatives_agree_at_nan_and_thresholds(dtype) -> None:
    """NaN at NaN, as in torch's vector loops (its scalar loops give 1), and a threshold that 16 bits cannot hold."""

    def function(*x):
        functions = (F.elu, F.celu, F.selu, F.hardswish, lambda x: F.threshold(x, 0.3, 0.0))
        return torch.stack([f(x) for f, x in zip(functions, x, strict=True)])

    x = torch.tensor([NAN, 0.3, 0.0, -1.0, 3.0, -3.0, 5.0, 1.0] * 8, dtype=torch.float64).to(dtype)
    got = gradients(torch.compile(function, backend="opgraph", fullgraph=True), *[x] * 5)
    torch.testing.assert_close(
        got, gradients(function, *[x] * 5), rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, *NARROW), ids=str)
@pytest.mark.parametrize(
    ("function", "points"),
    [(torch.logit, [0.0, 1.0, 0.5, 0.25, -0.1, 1.1, INF, -INF, NAN]), (torch.special.entr, [0.0, 1.0, 3.0, INF, NAN])],
)
def test_gradients_at_domain_ends_agree_with_eager(function, points, dtype) -> None:
    x = torch.tensor(points, dtype=dtype)
    got, expected = gradients(fuse(lambda x: function(x)), x), gradients(function, x)
    torch.testing.assert_close(got, expected, rtol=4 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, *NARROW), ids=str)
def test_captured_logit_gradients_agree_with_torchs_scalar_loop(dtype) -> None:
    """A negative `eps` means none. (In torch's vector loops NaN has the gradient 0, which hides NaN inputs.)"""

    def function(*given):
        made = [torch.logit(x * 1, eps) for eps, x in zip((None, -1.0, 0.0, 0.25, 0.625), given, strict=True)]
        return torch.stack(made)

    captured = torch.compile(function, backend="opgraph", fullgraph=True)
    for points in ([NAN, -0.5, 0.0, 0.125, 0.25], [0.5, 1.0, 1.5, INF, -INF]):
        given = [torch.tensor(points, dtype=dtype)] * 5
        got, expected = gradients(captured, *given), gradients(function, *given)
        torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, *NARROW), ids=str)
def test_logit_has_full_gradient_at_its_eps_bounds(dtype) -> None:
    x = torch.tensor([0.1, 0.9, 0.05, 0.5, 0.95], dtype=dtype)
    got = gradients(fuse(lambda x: torch.logit(x, 0.1)), x)
    torch.testing.assert_close(
        got, gradients(lambda x: torch.logit(x, 0.1), x), rtol=4 * torch.finfo(dtype).eps, atol=0
    )


# -- intermediate values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
def test_power_of_minus_two_has_gradient_despite_square_overflow(dtype) -> None:
    x = torch.tensor([0.0, -0.0, 2.76e-10, -1e-12, 1e13, INF, -INF, 3.0], dtype=dtype)
    got = gradients(fuse(lambda x: x**-2 / SCALE), x)
    torch.testing.assert_close(
        got, gradients(lambda x: x**-2 / SCALE, x), rtol=4 * torch.finfo(dtype).eps, atol=0, equal_nan=True
    )


def test_square_gradient_does_not_overflow_early() -> None:
    x, d = torch.tensor([1e-20], requires_grad=True), torch.tensor([3e38])
    torch.testing.assert_close(torch.autograd.grad(fuse(torch.square)(x), x, d), (2e-20 * d,))


@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_addcmul_and_addcdiv_multiply_value_first(name) -> None:
    small, large = torch.tensor([1.0]), torch.tensor([1e20])
    other = large if name == "addcmul" else 1 / large
    function = lambda x, y, z: getattr(torch, name)(x, y, z, value=0.01)  # noqa: E731
    assert_same(fuse(function)(small, large, other), function(small, large, other))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
def test_sinc_is_one_with_zero_gradient_near_zero(dtype) -> None:
    x = torch.tensor([1e-310, 1e-40, -1e-39, 1e-30], dtype=torch.float64).to(dtype)
    assert_same(fuse(torch.sinc)(x), torch.ones_like(x))
    assert_same(gradients(fuse(torch.sinc), x)[0].abs(), torch.zeros_like(x))


def test_f64_scalar_beyond_f32_range_raises_no_warning() -> None:
    """Warnings are errors here, also NumPy's."""
    x, low = torch.tensor([-1.0, 2.0], dtype=torch.float64), torch.finfo(torch.float64).min
    with np.errstate(all="raise"):
        assert_same(fuse(lambda x: x.clamp(min=low) + 1)(x), x + 1)
