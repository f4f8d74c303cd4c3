"""kernels/math/exact.h: f32 on a GPU, in fewer instructions, equals f32 on a CPU bit by bit. Needs no GPU.

Division is replaced by steps from the result of the special-function unit, which is within an ulp of 1 / b by the PTX
ISA; all such results are tried here. All other GPU forms are compiled for the CPU (-DOG_NO_TABLES) and compared.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import approximate
import measure
import numpy as np
import pytest
from agreement import differing
from measure import Case

import opgraph as og
from opgraph.codegen.sources import spliced
from opgraph.loops.lower import lower
from opgraph.runtime.cpu_compiler import find_compiler

pytestmark = [
    pytest.mark.skipif(not approximate.is_possible, reason="needs a C++ compiler and x86-64"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

#: Functions that the CPU computes from tables, with other bits: see specs/accuracy.md.
BY_TABLE = ("GELU", "GELUBackward", "MishBackward", "Pow", "PowBackward")
#: Functions with a special form for GPUs, and some that call them.
KINDS = [
    *("Celu", "Elu", "ELUBackward", "Exp", "Expm1", "GELU", "GELUBackward", "Log1p", "Mish", "Selu", "Sigmoid"),
    *("SigmoidBackward", "SoftPlus", "SoftPlusBackward", "Swish", "SwishBackward", "Tanh", "TanhBackward"),
]
#: Steps towards 1 / b and a / b from results near the exact one: `reach` of them on each side, at most an ulp away.
STEPS = """
static bool within(float r, float b, double most) {
  const double exact = 1 / (double)b, ulp = exact > 0.5 ? 0x1p-24 : 0x1p-25;
  const double off = (double)r - exact;
  return (off < 0 ? -off : off) <= most * ulp;
}
extern "C" long inverses(unsigned first, unsigned count, double most, unsigned* worst) {
  long wrong = 0;
  for (unsigned i = first; i < first + count; ++i) {
    const float b = og::from_bits(0x3f800000u + i), exact = 1 / b;
    for (int k = -3; k <= 3; ++k) {
      const float r = og::from_bits(og::bits(exact) + k);
      if (!within(r, b, most) || og::mended_inverse(b, r) == exact) continue;
      ++wrong;
      *worst = i;
    }
  }
  return wrong;
}
extern "C" long quotients(const float* a, const float* b, unsigned count, double most) {
  long wrong = 0;
  for (unsigned i = 0; i < count; ++i) {
    const float exact = a[i] / b[i], inverse = 1 / b[i];
    for (int k = -3; k <= 3; ++k) {
      const float r = og::from_bits(og::bits(inverse) + k);
      if (within(r, b[i], most)) wrong += og::bits(og::mended_quotient(a[i], b[i], r)) != og::bits(exact);
    }
  }
  return wrong;
}
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = find_compiler()
    assert compiler is not None
    folder = tmp_path_factory.mktemp("steps")
    source, made = (Path(folder) / name for name in ("steps.cpp", "steps.so"))
    source.write_text(spliced("math/exact.h") + STEPS)
    flags = ("-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-w", "-fPIC", "-shared")
    subprocess.run([*compiler.command, *flags, "-o", str(made), str(source)], check=True)
    library = ctypes.CDLL(str(made))
    library.inverses.restype = library.quotients.restype = ctypes.c_long
    return library


def test_newton_step_gives_the_rounded_inverse_of_every_mantissa(steps: ctypes.CDLL) -> None:
    """Checks all 2^23 mantissas; exponents change nothing without subnormals. One result for one number leads to an
    error: 0.5 for 2 - 2^-23, whose inverse is next to the middle. tests/gpu checks a GPU, whose rcp.rn does the same.
    """
    at = ctypes.c_uint()
    wrong = steps.inverses(0, 1 << 23, ctypes.c_double(1.0), ctypes.byref(at))
    assert (wrong, hex(at.value)) == (1, "0x7fffff")
    assert steps.inverses(0, 1 << 23, ctypes.c_double(3.0), ctypes.byref(at)) > 0  # the test can detect a wrong result


def test_newton_steps_give_the_rounded_quotient(steps: ctypes.CDLL) -> None:
    """Random quotients, and those next to the middle between two floats, where the last step decides the rounding."""
    rng = np.random.default_rng(0)
    count = 1 << 21
    b = (1 + rng.integers(0, 1 << 23, count) * 2.0**-23).astype(np.float32)
    a = (1 + rng.integers(0, 1 << 23, count) * 2.0**-23).astype(np.float32)
    middle = 1 + (rng.integers(0, 1 << 23, count) + 0.5) * 2.0**-23
    close = (middle * b).astype(np.float32)
    ones = np.full(count, np.float32(2 - 2.0**-23))
    zeros = np.array([0.0, -0.0, -1.0, -3.0], np.float32)
    pointer = ctypes.POINTER(ctypes.c_float)
    for above, below in ((a, b), (close, b), (-close, b), (a, ones), (ones, b), (zeros, a[:4])):
        x, y = (np.ascontiguousarray(v).ctypes.data_as(pointer) for v in (above, below))
        assert steps.quotients(x, y, len(above), ctypes.c_double(1.0)) == 0


def compared() -> list[Case]:
    return [
        case
        for record in measure.measured_ops()
        if record.kind in KINDS
        for case in measure.cases(record, "f32")
        if record.kind not in BY_TABLE or case.attrs.get("mode") == "gelu_tanh"
    ]


@pytest.fixture(scope="module")
def libraries() -> tuple[approximate.Library, approximate.Library]:
    """Libraries of the CPU's forms and of the GPU's, one float at a time."""
    loops = [lower(case.graph().get_partitions()[0]).loop for case in compared()]
    return approximate.Library(loops, ("-DOG_NO_LANES",)), approximate.Library(
        loops, ("-DOG_NO_LANES", "-DOG_NO_TABLES")
    )


@pytest.mark.parametrize("index", range(len(compared())), ids=[c.label for c in compared()])
def test_gpu_form_of_a_function_has_the_cpu_bits(
    libraries: tuple[approximate.Library, approximate.Library], index: int
) -> None:
    columns = [c[::3] for c in measure.columns_of(compared()[index])]
    (_, (cpu,)), (_, (gpu,)) = (next(library.results(index, columns)) for library in libraries)
    wrong = np.flatnonzero(differing(gpu, cpu))
    assert not len(wrong), (len(wrong), [c[wrong[0]] for c in columns], gpu[wrong[0]], cpu[wrong[0]])


@pytest.mark.parametrize("kind", ["GELU", "GELUBackward", "SigmoidBackward", "SwishBackward", "TanhBackward"])
def test_flushed_gpu_results_equal_flushed_cpu_lanes(
    libraries: tuple[approximate.Library, approximate.Library], kind: str
) -> None:
    """On a GPU intermediate products are flushed as well; the results have the CPU's sign."""
    torch = pytest.importorskip("torch", reason="only torch can make the CPU flush subnormals")
    for index, case in enumerate(compared()):
        if case.record.kind != kind or case.attrs.get("use_dst") or case.attrs.get("alpha", 1) != 1:
            continue
        columns = [c[:: len(c) // 50_000] for c in measure.columns_of(case)]  # so few that only this thread works
        columns = [np.where(np.abs(c) < 2.0**-126, np.float32(0), c) for c in columns]
        f = og.compile(case.graph())
        torch.set_flush_denormal(True)
        try:
            cpu = np.array(f(case.feeds(columns)))
        finally:
            torch.set_flush_denormal(False)
        _, (gpu,) = next(libraries[1].results(index, columns))
        wrong = np.flatnonzero(differing(gpu, cpu))
        assert not len(wrong), (case.label, [c[wrong[0]] for c in columns], gpu[wrong[0]], cpu[wrong[0]])
