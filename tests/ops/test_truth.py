"""The references are the truth: compared with mpmath, with torch, and at the points where formulas break."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opgraph as og
from opgraph.ir import dtypes, opdef
from opgraph.ir.opdef import OpDef, all_ops
from opgraph.ops import samples
from opgraph.ops.conversion import cast
from opgraph.runtime import cpu_compiler

POINTWISE = [r for r in all_ops() if r.is_pointwise]
INF, NAN = float("inf"), float("nan")
TINY = 5e-324


def op(kind: str) -> OpDef:
    return opdef.get(kind, where="test")


def of(kind: str, *args: Any, **attrs: Any) -> Any:
    reference = op(kind).reference
    assert reference is not None
    return reference(*[np.asarray(a) for a in args], **attrs)


# -- mpmath -----------------------------------------------------------------------------------------------------------

mp = pytest.importorskip("mpmath")


def _digits(kind: str, f: Callable[[Any], Any], low: float, high: float, ulps: float = 3.0, **attrs: Any) -> Any:
    return pytest.param(kind, f, low, high, ulps, attrs, id=" ".join([kind, *map(str, attrs.values())]))


TRUTHS = [
    _digits("Sigmoid", lambda x: 1 / (1 + mp.exp(-x)), -744, 40),
    _digits("Swish", lambda x: x / (1 + mp.exp(-x)), -750, 40),
    _digits("GELU", lambda x: x / 2 * mp.erfc(-x / mp.sqrt(2)), -38.5, 10, 5.0, mode="gelu_erf"),
    _digits(
        "GELU",
        lambda x: x / (1 + mp.exp(-2 * mp.sqrt(2 / mp.pi) * (x + mp.mpf("0.044715") * x**3))),
        -20.5,
        10,
        mode="gelu_tanh",
    ),
    _digits("Mish", lambda x: x * mp.tanh(mp.log1p(mp.exp(x))), -740, 40),
    _digits("SoftPlus", lambda x: mp.log1p(mp.exp(x)), -744, 40),
    _digits("Elu", mp.expm1, -40, -1e-9, alpha=1.0),
    _digits("Erf", mp.erf, -6, 6),
    _digits("Lgamma", lambda x: mp.log(abs(mp.gamma(x))), 0.01, 30),
    _digits("Digamma", mp.digamma, 0.01, 30),
    _digits("Trigamma", lambda x: mp.psi(1, x), -5, 20, 5.0),
    _digits("Expm1", mp.expm1, -40, 40),
    _digits("Log1p", mp.log1p, -0.99, 10),
    _digits("Exp", mp.exp, -740, 700),
    _digits("Log", mp.log, 1e-6, 10),
    _digits("Tanh", mp.tanh, -20, 20),
    _digits("Sinh", mp.sinh, -30, 30),
    _digits("Cosh", mp.cosh, -30, 30),
    _digits("Asinh", mp.asinh, -30, 30),
    _digits("Acosh", mp.acosh, 1.0001, 30),
    _digits("Atanh", mp.atanh, -0.9999, 0.9999),
    _digits("Sin", mp.sin, -100, 100),
    _digits("Cos", mp.cos, -100, 100),
    _digits("Tan", mp.tan, -100, 100),
    _digits("Asin", mp.asin, -1, 1),
    _digits("Acos", mp.acos, -1, 1),
    _digits("Atan", mp.atan, -30, 30),
    _digits("Sqrt", mp.sqrt, 0, 100, 1.0),
    _digits("Rsqrt", lambda x: 1 / mp.sqrt(x), 1e-3, 100),
]


@pytest.mark.parametrize(("kind", "truth", "low", "high", "ulps", "attrs"), TRUTHS)
def test_float64_is_within_a_few_ulp_of_the_real_function(
    kind: str, truth: Callable[[Any], Any], low: float, high: float, ulps: float, attrs: Mapping[str, Any]
) -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(low, high, 250), np.clip(rng.normal(0, 1, 150), low, high)])
    got = of(kind, x, **attrs)
    with mp.workdps(60):
        for a, y in zip(x, got):
            exact = truth(mp.mpf(float(a)))
            error = abs(mp.mpf(float(y)) - exact) / np.spacing(max(abs(float(exact)), np.finfo(float).tiny))
            assert error <= ulps, f"{kind}({a!r}) = {y!r}, truth {mp.nstr(exact, 20)}"


# -- torch ------------------------------------------------------------------------------------------------------------

#: Special points where torch's result differs, with the reason for opgraph's value.
TORCH_DIFFERS = {
    "Swish": "swish(-inf) is the limit -0, not NaN",
    "GELU": "gelu(-inf) is the limit -0, not NaN",
    "Mish": "mish(-inf) is the limit -0, not NaN",
    "HardSwish": "hard_swish(-inf) is the limit -0, not NaN",
    "Softsign": "softsign(inf) is the limit 1, not NaN",
    "Digamma": "torch gives NaN at -inf or a pole of another sign",
    "PReLU": "0 * inf",
    "I0": "i0(inf) is the limit inf, not NaN",
    "I1": "i1(inf) is the limit inf, not NaN",
    "I0eSlope": "torch has no such function",
}
SPECIAL = [INF, -INF, NAN, 0.0, -0.0, TINY, -TINY, 1e-310, 1e300, -1e300, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0]


def torch_result(record: OpDef, arrays: list[np.ndarray], attrs: Mapping[str, Any]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    assert record.torch is not None
    tensors = [
        torch.from_numpy(a.view(np.uint16)).view(torch.bfloat16)
        if a.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(a)
        for a in arrays
    ]
    result = record.torch(torch, *tensors, **attrs)
    return result.float().numpy() if result.dtype == torch.bfloat16 else result.numpy()


@pytest.mark.parametrize("record", POINTWISE, ids=lambda r: r.kind)
def test_torch_form_agrees_with_the_reference(record: OpDef) -> None:
    for dtype in samples.dtypes_of(record):
        for ports, attrs in samples.forms(record, dtype):
            small = [(6, 5, 5)] + [(5,)] * (len(ports) - 1)
            arrays = samples.arrays(record, ports, dtype, small)
            got, expected = torch_result(record, arrays, attrs), record.reference(*arrays, **attrs)
            assert got.shape == expected.shape
            if dtypes.of_array(expected.dtype, where="test").is_float:
                wide = [a.astype(np.float64) if dtypes.of_array(a.dtype, where="t").is_float else a for a in arrays]
                truth = record.reference(*wide, **attrs)
                info = ml_dtypes.finfo(expected.dtype)
                scale = np.maximum(np.abs(truth), 1)
                # 32 ulp of the larger of the result and 1: formulas of several ops round at every step, and cancel.
                assert np.max(np.abs(got.astype(np.float64) - truth) / scale, initial=0) <= 32 * float(info.eps), (
                    dtype,
                    attrs,
                )
            else:
                np.testing.assert_array_equal(got, expected, f"{dtype} {attrs}")


@pytest.mark.parametrize("record", [r for r in POINTWISE if len(r.inputs) == 1], ids=lambda r: r.kind)
def test_special_values_agree_with_torch(record: OpDef) -> None:
    if record.kind in TORCH_DIFFERS or "f64" not in samples.dtypes_of(record) or record.index_of:
        pytest.skip(TORCH_DIFFERS.get(record.kind, "no special points"))
    for _, attrs in samples.forms(record, "f64"):
        x = np.array(SPECIAL)
        got, expected = torch_result(record, [x], attrs), record.reference(x, **attrs)
        np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-300, err_msg=str(attrs))


# -- special points, pinned -------------------------------------------------------------------------------------------

PINNED = [
    ("Swish", (-INF,), {}, -0.0),
    ("Swish", (INF,), {}, INF),
    ("Swish", (-INF,), {"alpha": -1.0}, -INF),
    ("Swish", (INF,), {"alpha": -1.0}, 0.0),
    ("Swish", (INF,), {"alpha": 0.0}, INF),
    ("Swish", (-3.0,), {"alpha": 0.0}, -1.5),
    ("Swish", (-0.0,), {}, -0.0),
    ("Swish", (-745.0,), {}, -426 * TINY),
    ("Sigmoid", (-INF,), {}, 0.0),
    ("Sigmoid", (-745.0,), {}, TINY),
    ("Sigmoid", (NAN,), {}, NAN),
    ("GELU", (-INF,), {}, -0.0),
    ("GELU", (-INF,), {"mode": "gelu_tanh"}, -0.0),
    ("GELU", (-0.0,), {}, -0.0),
    ("Mish", (-INF,), {}, -0.0),
    ("HardSwish", (-INF,), {}, -0.0),
    ("HardSwish", (INF,), {}, INF),
    ("Softsign", (INF,), {}, 1.0),
    ("Softsign", (-INF,), {}, -1.0),
    ("SoftPlus", (-INF,), {}, 0.0),
    ("SoftPlus", (INF,), {}, INF),
    ("ReLU", (NAN,), {}, NAN),
    ("ThresholdedRelu", (NAN,), {}, NAN),
    ("Shrink", (NAN,), {}, NAN),
    ("Clamp", (NAN,), {"min": 0.0, "max": 1.0}, NAN),
    ("Clamp", (5.0,), {"min": 3.0, "max": 1.0}, 1.0),
    ("Maximum", (NAN, 1.0), {}, NAN),
    ("Minimum", (1.0, NAN), {}, NAN),
    ("Sign", (NAN,), {}, NAN),
    ("Sign", (-0.0,), {}, 0.0),
    ("Round", (0.5,), {}, 0.0),
    ("Round", (-0.5,), {}, -0.0),
    ("Round", (2.5,), {}, 2.0),
    ("Trunc", (-0.5,), {}, -0.0),
    ("Ceil", (-0.5,), {}, -0.0),
    ("Reciprocal", (-0.0,), {}, -INF),
    ("Rsqrt", (0.0,), {}, INF),
    ("Sqrt", (-0.0,), {}, -0.0),
    ("Sqrt", (-1.0,), {}, NAN),
    ("Log", (0.0,), {}, -INF),
    ("Log", (-1.0,), {}, NAN),
    ("Log1p", (-1.0,), {}, -INF),
    ("Expm1", (-0.0,), {}, -0.0),
    ("Lgamma", (-3.0,), {}, INF),
    ("Lgamma", (-INF,), {}, INF),
    ("Lgamma", (1.0,), {}, 0.0),
    ("Lgamma", (2.0,), {}, 0.0),
    ("Digamma", (-1.0,), {}, NAN),
    ("Digamma", (0.0,), {}, -INF),
    ("Digamma", (-0.0,), {}, INF),
    ("Trigamma", (-1.0,), {}, INF),
    ("Trigamma", (0.0,), {}, INF),
    ("Trigamma", (INF,), {}, 0.0),
    ("Pow", (-8.0,), {"beta": 0.5}, NAN),
    ("Pow", (NAN,), {"beta": 0.0}, 1.0),
    ("Pow", (1.0, NAN), {}, 1.0),
    ("Pow", (0.0, -1.0), {}, INF),
    ("Mod", (-1.0, 3.0), {}, 2.0),
    ("Mod", (-1.0, 3.0), {"fmod": 1}, -1.0),
    ("Mod", (-1.0, INF), {}, INF),
    ("Mod", (0.0, -2.0), {}, -0.0),
    ("Mod", (1.0, 0.0), {}, NAN),
    ("Divide", (1.0, -0.0), {}, -INF),
    ("Asin", (1.5,), {}, NAN),
    ("Acosh", (0.5,), {}, NAN),
    ("Atanh", (1.0,), {}, INF),
    ("Sin", (INF,), {}, NAN),
    ("PReLU", (-0.0, 2.0), {}, -0.0),
    ("PReLU", (0.0, INF), {}, 0.0),
    ("PReLU", (NAN, 2.0), {}, NAN),
    ("LeakyReLU", (NAN,), {"alpha": 0.5}, NAN),
    ("Elu", (-INF,), {"alpha": 2.0}, -2.0),
    ("Celu", (-0.0,), {}, -0.0),
    ("Celu", (-INF,), {"alpha": 0.5}, -0.5),
]


@pytest.mark.parametrize(("kind", "args", "attrs", "expected"), PINNED)
def test_pinned_special_value(kind: str, args: tuple[float, ...], attrs: Mapping[str, Any], expected: float) -> None:
    for dtype in (np.float64, np.float32):
        with np.errstate(all="ignore"):
            inputs = [np.asarray(a, dtype) for a in args]
            wanted = np.asarray(expected, dtype)
        if dtype == np.float32 and 0 < abs(expected) < 1e-300:
            continue  # not a float32
        got = of(kind, *inputs, **attrs)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, wanted)
        assert np.isnan(expected) or np.signbit(got) == np.signbit(wanted)


INTEGERS = [
    ("Divide", -7, 2, {}, -3),
    ("Divide", 7, 0, {}, 0),
    ("Divide", -128, -1, {}, -128),
    ("Mod", -7, 3, {}, 2),
    ("Mod", -7, 3, {"fmod": 1}, -1),
    ("Mod", 7, 0, {}, 0),
    ("Mod", -128, -1, {"fmod": 1}, 0),
    ("Add", 127, 1, {}, -128),
    ("Multiply", 64, 2, {}, -128),
    ("SquaredDifference", 100, -100, {}, 64),
    ("Pow", 2, 7, {}, -128),
    ("Pow", -1, -3, {}, -1),
    ("Pow", -1, -2, {}, 1),
    ("Pow", 1, -5, {}, 1),
    ("Pow", 0, -1, {}, 0),
    ("Pow", 3, -1, {}, 0),
    ("Pow", 0, 0, {}, 1),
    ("BitShift", 1, 7, {"direction": "LEFT"}, -128),
    ("BitShift", 1, 8, {"direction": "LEFT"}, 0),
    ("BitShift", -128, 8, {"direction": "RIGHT"}, -1),
    ("BitShift", 127, 8, {"direction": "RIGHT"}, 0),
    ("BitShift", -128, 2, {"direction": "RIGHT"}, -32),
    ("BitShift", 5, -1, {"direction": "LEFT"}, 0),
]


@pytest.mark.parametrize(("kind", "a", "b", "attrs", "expected"), INTEGERS)
def test_integer_corner_case(kind: str, a: int, b: int, attrs: Mapping[str, Any], expected: int) -> None:
    inputs = [np.array([v], np.int8) for v in (a, b)]
    assert of(kind, *inputs, **attrs).tolist() == [expected]
    assert of(kind, *[v.reshape(()) for v in inputs], **attrs) == expected
    assert torch_result(op(kind), inputs, attrs).tolist() == [expected]


def test_lowest_integer_has_no_negation() -> None:
    low = np.array([-128], np.int8)
    assert of("Abs", low).tolist() == of("Neg", low).tolist() == [-128]


@pytest.mark.parametrize("record", POINTWISE, ids=lambda r: r.kind)
def test_16_bit_results_are_f32_rounded_once(record: OpDef) -> None:
    for dtype in {"f16", "bf16"} & set(samples.dtypes_of(record)):
        for ports, attrs in samples.forms(record, dtype):
            arrays = samples.arrays(record, ports, dtype, [(40, 5)] + [(5,)] * (len(ports) - 1))
            wide = record.reference(*[a.astype(np.float32) if a.dtype.itemsize == 2 else a for a in arrays], **attrs)
            got = record.reference(*arrays, **attrs)
            np.testing.assert_array_equal(got, wide.astype(got.dtype))


def test_mixed_16_bit_floats_are_computed_in_f32() -> None:
    half, brain = np.array([1.0], np.float16), np.array([2.0**-10], ml_dtypes.bfloat16)
    assert of("Add", half, brain).dtype == np.float32
    assert of("Add", half, brain.astype(np.float32)).dtype == np.float32
    assert of("Add", half, brain)[0] == 1 + 2.0**-10


# -- conversion -------------------------------------------------------------------------------------------------------

CASTS = [
    (1.9, "f32", "s32", 1),
    (-1.9, "f64", "s8", -1),
    (300.0, "f32", "s8", 127),
    (-300.0, "f32", "s8", -128),
    (-1.0, "f32", "u8", 0),
    (NAN, "f32", "s64", 0),
    (INF, "f16", "s32", 2**31 - 1),
    (-INF, "f64", "s64", -(2**63)),
    (2.0**63, "f64", "s64", 2**63 - 1),
    (2.0**31, "f32", "s32", 2**31 - 1),
    (300, "s32", "s8", 44),
    (-1, "s8", "u8", 255),
    (0.25, "f32", "boolean", True),
    (NAN, "f32", "boolean", True),
    (-0.0, "f64", "boolean", False),
    (True, "boolean", "f16", 1.0),
    (2**53 + 1, "s64", "f64", 2.0**53),
    (1 + 2.0**-8, "f32", "bf16", 1.0),
    (1 + 2.0**-8 + 2.0**-40, "f64", "bf16", 1 + 2.0**-7),
    (1 + 2.0**-11 + 2.0**-40, "f64", "f16", 1 + 2.0**-10),
    (1e39, "f64", "f32", INF),
    (3.4e38, "f64", "bf16", INF),
    (-1e300, "f64", "bf16", -INF),
    (65520.0, "f32", "f16", INF),
]


@pytest.mark.parametrize(("value", "source", "target", "expected"), CASTS)
def test_cast_of_a_pinned_value(value: Any, source: str, target: str, expected: Any) -> None:
    array = np.array([value], dtypes.get(source).numpy)
    result = cast(array, target)
    assert result.dtype == dtypes.get(target).numpy
    assert result[0] == expected
    assert cast(array.reshape(()), target) == expected


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.filterwarnings("ignore:there is no C")
def test_kernel_casts_equal_the_reference(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiles:
        monkeypatch.setattr(cpu_compiler, "find_compiler", lambda: None)
    graph = og.Graph()
    for i, (value, source, target, _) in enumerate(CASTS):
        number = graph.constant(f"k{i}", np.array(value, dtypes.get(source).numpy))
        graph.output(graph.add_op("TypeCast", number, dtype=target))
    results = og.compile(graph.finalize())().values()
    for (value, source, target, expected), result in zip(CASTS, results, strict=True):
        assert result.dtype == dtypes.get(target).numpy and result == expected, (value, source, target)


def test_double_to_bf16_rounds_once() -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.normal(size=20000), [NAN, INF, -INF, 0.0, -0.0, TINY, 1e-40, 3.3895e38]])
    # Of two neighbouring bf16 values the nearer one is right; ties go to the even one.
    got = cast(x, "bf16").astype(np.float64)
    for shift in (-1, 1):
        bits = cast(x, "bf16").view(np.uint16).astype(np.int32) + shift
        with np.errstate(all="ignore"):  # the neighbour of infinity is a signalling NaN
            other = np.clip(bits, 0, 65535).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
            closer = np.abs(other - x) < np.abs(got - x)
        assert not np.any(closer & np.isfinite(x) & np.isfinite(other))
