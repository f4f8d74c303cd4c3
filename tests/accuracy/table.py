"""Measures and reads specs/accuracy.md. `python tests/accuracy/table.py [KIND ...]` measures and writes it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import measure
import points

PAGE = Path(__file__).resolve().parent.parent.parent / "specs" / "accuracy.md"
REWRITE = "rewrite the page, or the rows of some kinds: python tests/accuracy/table.py [KIND ...]"

_HEAD = """# Accuracy

`python tests/accuracy/table.py` writes this page, or the rows of some kinds. `tests/accuracy/test_accuracy.py` measures
again and fails if a result exceeds the bound of its row. Measured on the CPU engine through `og.compile`. A GPU runs
the same f32 and f64 arithmetic, with two exceptions. CuPy's kernels flush subnormal f32 to zero. GELU by erf, its
derivative, Mish's, and powers in f32 are computed from tables on a CPU with AVX-512, without tables on other CPUs and
on a GPU, within the same bounds (`tests/codegen/test_tables.py`).

An ulp is the distance between neighbouring numbers of the dtype at the truth. The truth is the op's NumPy reference in
float64, and for f64 mpmath with 50 digits; the references are within 16 ulp of mpmath.

| dtype | bound | arguments |
|---|---|---|
| f16, bf16 | {bf16} ulp | all 65,536 values; for several operands tuples: all of {specials} specials, {random} random |
| f32 | {f32:g} ulp | every {stride}th bit pattern, next to special points: 1.2 million; otherwise as above |
| f64 | {f64:g} ulp | 2000 for each form: the op's domain, all magnitudes, next to special points |

- NaN and infinities must be where the truth has them, and zeros must have its sign; otherwise the distance is infinite.
  A truth too large for the dtype is infinity from half an ulp below the first power of two that the dtype cannot hold.
- f16 and bf16 are computed in f32 and rounded once, so they are close to 0.5. Half an ulp is correct rounding.
  With AVX-512 sigmoid, swish, GELU by tanh, Mish, their derivatives, that of GELU by erf, and HardSwish are computed
  only as accurately as this requires (`kernels/math/reduced_precision.h`).
- {scaled} in f64, next to zeros that are not special arguments, are measured in ulp of max(|f|, |x f'(x)|):
  there the last bit of the argument is worth more than the result. In f32 this exception does not apply.
- Derivatives (the Backward kinds: f'(x) d) are measured in ulp of max(|f'(x)|, |x f''(x)|) |d|: next to a zero of f'
  the last bit of x is worth more than the result. In f32 the ulp is that of f', and the rounding of its product with d
  is not counted. In f16, bf16 and f32 2^-149 |d| is not counted either, because f' is an f32. In f16 and bf16 all
  65,536 x are measured, with d = 1 and with other d; for ops that take f(x) instead of x (use_dst), at the f(x) that
  exist. In f64 d is 0, infinite or of ordinary size.
- Named units that are spelled out (every row of the table of units) have the bounds of the equivalent op. A gated
  unit (SwiGLU, GeGLU) also rounds a product, {gated:g} ulp in f32, where the activation inside is a normal f32.
- Runs of ops have no fixed bound: they are at most twice as far from the truth as NumPy is in the same dtype, or within
  the bound of a single op, on composed and on random graphs.
- Results have the same bits in every run, for any number of threads, and for contiguous, strided and broadcast
  operands. With sums, or with a part in a library, the bits may differ between layouts of the operands
  ([loops.md](loops.md)).
- Without a compiler torch's ops run, with their accuracy: GELU loses digits in its tail, and infinities follow torch's
  rules.
- Casts, integers and booleans are exact. Integers of more than 24 bits are converted to f16 and bf16 through f32.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    label: str
    dtype: str
    ulp: float
    at: str
    points: int
    bound: float

    def __str__(self) -> str:
        return f"| {self.label} | {self.dtype} | {self.ulp:.4g} | {self.at} | {self.points} | {self.bound:g} |"


def read() -> Iterator[Row]:
    """The rows of the page."""
    line = re.compile(r"^\| (\S.*) \| (f64|f32|f16|bf16) \| (\S+) \| (.*) \| (\d+) \| (\S+) \|$", re.MULTILINE)
    for label, dtype, ulp, at, count, bound in line.findall(PAGE.read_text(encoding="utf-8")):
        yield Row(label, dtype, float(ulp), at, int(count), float(bound))


def rows(kinds: Collection[str]) -> Iterator[Row]:
    """The rows of some kinds as measured now; those of the others as the page has them."""
    known = list(read())
    for record in measure.measured_ops():
        if record.kind not in kinds:
            yield from (r for r in known if r.label.partition("(")[0] == record.kind)
            continue
        for dtype in measure.FLOATS:
            for case in measure.cases(record, dtype):
                found = measure.measure(case)
                at = ", ".join(f"{float(a):.9g}" for a in found.at)
                row = Row(case.label, dtype, found.ulp, at if found.ulp else "", found.points, case.bound)
                print(row, file=sys.stderr)
                yield row


def text(kinds: Collection[str]) -> str:
    """The page, with the rows of these kinds measured."""
    scaled = " and ".join(sorted({r.kind for r in measure.measured_ops() if r.kind in measure.real.SLOPE}))
    counts = {
        "specials": len(points.specials("f32")),
        "random": f"{points.RANDOM:,}",
        "stride": points.F32_STRIDE,
        "gated": measure.GATED["f32"],
    }
    lines = [_HEAD.format(scaled=scaled, **counts, **measure.BOUNDS)]
    lines.append("| op | dtype | ulp | at | arguments | bound |\n|---|---|---|---|---|---|")
    lines += map(str, rows(kinds))
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Writes the page; exits with 1 if a row exceeds its bound."""
    known = [record.kind for record in measure.measured_ops()]
    parser = argparse.ArgumentParser(
        description="Measures how far results are from the truth; writes specs/accuracy.md."
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="of op whose rows are measured (default: all)")
    kinds = parser.parse_args(arguments).kinds
    for kind in kinds:
        if kind not in known:
            parser.error(f"no op {kind!r} is measured; there are {', '.join(known)}")
    PAGE.write_text(text(kinds or known), encoding="utf-8")
    far = [
        f"{r.label} {r.dtype}: {r.ulp:.4g} ulp at {r.at}, where {r.bound:g} is the bound"
        for r in read()
        if r.ulp > r.bound
    ]
    if far:
        sys.exit("\n".join(far))


if __name__ == "__main__":
    main()
