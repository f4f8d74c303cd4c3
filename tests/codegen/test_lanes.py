"""Kernels in f32 on the CPU: 16 floats at a time with AVX-512 give the same bits as one float at a time."""

from __future__ import annotations

import numpy as np
import pytest
from by_lanes import functor, needs_lanes, same, scalar_form
from measure import Case, cases, columns_of, measured_ops
from ulp import errors

import opgraph as og
from opgraph.codegen.kernel import KernelSource
from opgraph.codegen.sources import reduced_functions
from opgraph.ir import dtypes
from opgraph.runtime import cache, cpu_compiler

pytestmark = needs_lanes


def is_reduced(case: Case) -> bool:
    return case.record.cxx({p.name: p.name for p in case.ports}, case.attrs, repr).function in reduced_functions()


CASES = [case for record in measured_ops() for case in cases(record, "f32")]
#: f16 and bf16 are computed as f32 is, except where og::reduced has a special form.
CASES += [
    case for record in measured_ops() for dtype in ("f16", "bf16") for case in cases(record, dtype) if is_reduced(case)
]

#: Everything that uses lanes besides a contiguous f32: 16-bit storage, truth values, a base that is known to be
#: positive, one number for all elements, a column, and results of several kinds.
MIXED = """graph(x: f32[n,m], h: f16[n,m], b: bf16[n,m], c: f32[n,1], a: f32[]) -> (y, z, w, up)
  up = Greater(x, 0.0)
  %0 = Select(up, x, 1.0)
  %1 = Pow(%0, a)
  %2 = Log(%0)
  %3 = Multiply(%1, %2)
  %4: f32[n,m] = TypeCast(h)
  %5: f32[n,m] = TypeCast(b)
  %6 = Multiply(%3, %4)
  %7 = Add(%6, c)
  y = Select(up, %7, %5)
  z: f16[n,m] = TypeCast(%7)
  w: bf16[n,m] = TypeCast(%7)"""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of the special values among the arguments
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.label} {case.dtype}")
def test_vector_kernels_give_the_bits_of_scalar_ones(
    case: Case, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds = case.feeds([column[::11] for column in columns_of(case)])
    lanes = og.compile(case.graph())
    assert "by_lanes" in functor(lanes)
    got = lanes(feeds)
    assert not cpu_compiler.without_lanes, "no form for og::floats: see the end of kernels/math/scalar.h"
    scalar_form(monkeypatch)
    same(got, og.compile(case.graph())(feeds))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("function", "slope", "dtype"),
    [
        ("sigmoid", "SigmoidBackward(x, d, use_dst=false)", "f32"),
        ("tanh", "TanhBackward(x, d, use_dst=false)", "f32"),
        ("swish", "SwishBackward(x, d)", "f32"),
        ("reduced::swish", "SwishBackward(x, d)", "bf16"),
        ("reduced::swish", "SwishBackward(x, d)", "f16"),
    ],
)
def test_function_computed_with_its_slope_is_as_accurate(
    function: str, slope: str, dtype: str, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = function.removeprefix("reduced::").title()
    graph = og.parse(f"graph(x: {dtype}[n], d: {dtype}[n]) -> (y, z)\n  y = {kind}(x)\n  z = {slope}")
    case = next(
        case for case in CASES if (case.record.kind, case.dtype, case.attrs.get("alpha", 1)) == (kind, dtype, 1)
    )
    (x,) = columns_of(case)
    f = og.compile(graph)
    assert f"og::{function}_beside_slope(" in functor(f)
    got = f(x=x, d=np.ones_like(x))["y"]
    assert errors(got, np.asarray(og.evaluate(case.graph(), case.feeds([x])))).max() <= case.bound
    scalar_form(monkeypatch)
    same(got, og.compile(graph)(x=x, d=np.ones_like(x))["y"])


@pytest.mark.parametrize("shape", [(1, 1), (1, 15), (1, 16), (3, 17), (7, 40), (5, 1000)])
@pytest.mark.parametrize("step", [1, 3])
def test_vector_kernels_handle_16_bit_storage_tails_and_strides(
    shape: tuple[int, int], step: int, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(shape[1])

    def sample(dtype: str, columns: int = shape[1]) -> np.ndarray:
        return rng.normal(size=(shape[0], columns * step)).astype(dtypes.get(dtype).numpy)[:, ::step]

    feeds = {"x": sample("f32"), "h": sample("f16"), "b": sample("bf16"), "c": sample("f32", 1), "a": np.float32(0.3)}
    got = og.compile(og.parse(MIXED))(feeds)
    scalar_form(monkeypatch)
    want = og.compile(og.parse(MIXED))(feeds)
    for name in want:
        same(np.asarray(got[name]), np.asarray(want[name]))


def test_power_of_a_positive_base_omits_the_sign() -> None:
    f = og.compile(og.parse(MIXED))
    assert "og::positive::pow(" in functor(f) and "og::positive::log(" in functor(f)
    plain = og.compile(og.parse("graph(x: f32[n], a: f32[]) -> (y)\n y = Pow(x, a)"))
    assert "og::positive" not in functor(plain)


def test_kernel_with_other_dtypes_is_scalar() -> None:
    f = og.compile(og.parse("graph(x: f32[n], k: s64[n]) -> (y)\n %0: f32[n] = TypeCast(k)\n y = Add(x, %0)"))
    assert "by_lanes = true" not in functor(f)


def test_function_without_a_vector_form_is_compiled_scalar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "find", lambda name: None)  # an earlier run may have cached it on the disk
    monkeypatch.setattr(cpu_compiler, "without_lanes", [])
    ((entry, code),) = og.compile(og.parse("graph(x: f32[n]) -> (y)\n y = Softsign(x)")).kernels.items()
    scalar = "namespace og { OG_FN float plain(float x) { return x + 1; } }\nstruct Fused {"
    code = code.replace("struct Fused {", scalar).replace("og::softsign(", "og::plain(")
    cpu_compiler.load(KernelSource(entry=entry, functor="", code=code, tags={}), ("Softsign",))
    assert cpu_compiler.without_lanes == [entry]
