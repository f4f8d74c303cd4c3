"""Runs onnx's backend suite and writes the engine of each test to results.md; --stock also compares onnxruntime.

    python tests/onnx_backend/run.py [--stock] [--write] [NAME ...]

Without --write the table is printed. Given names are run alone, one line each.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

import onnx  # noqa: E402
import onnx_suite  # noqa: E402  # found by the line above
import onnxruntime  # noqa: E402


def _counts(outcomes: dict[str, onnx_suite.Outcome]) -> str:
    counts = Counter(o.status for o in outcomes.values())
    return " | ".join(str(counts[s]) for s in ("pass", "wrong", "refused", "skipped"))


def _table(outcomes: dict[str, onnx_suite.Outcome], stock: dict[str, onnx_suite.Outcome]) -> str:
    pointwise = onnx_suite.pointwise()
    lines = [
        "# onnx's backend suite through og.onnx.backend",
        "",
        f"onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}, device CPU; by `run.py --stock --write`.",
        "",
        "| who | pass | wrong | refused | skipped |",
        "|---|---|---|---|---|",
        f"| og.onnx.backend | {_counts(outcomes)} |",
    ]
    if stock:
        lines.append(f"| stock onnxruntime | {_counts(stock)} |")
        worse = sorted(n for n, o in outcomes.items() if o.status != "pass" and stock[n].status == "pass")
        lines += ["", f"Passed by stock onnxruntime alone: {', '.join(worse) or 'none'}."]
    native = {n: m for n, m in pointwise.items() if onnx_suite.has_arithmetic_types(m)}
    natively = sum(outcomes[n].engines == ("opgraph",) and outcomes[n].status == "pass" for n in native)
    lines += [
        "",
        f"Of {len(pointwise)} tests of one pointwise node, {len(native)} are of types that opgraph computes in; "
        f"{natively} of them run in its own kernels alone.",
        "",
        "| engines | pass | wrong |",
        "|---|---|---|",
    ]
    engines = Counter(("+".join(o.engines) or "none needed", o.status) for o in outcomes.values())
    lines += [f"| {e} | {engines[e, 'pass']} | {engines[e, 'wrong']} |"
              for e in sorted({e for e, s in engines if s in ("pass", "wrong")})]  # fmt: skip
    lines += ["", "## Not passed", "", "| test | outcome | engines | reason |", "|---|---|---|---|"]
    reasons = {name: reason for listed in onnx_suite.deviations().values() for name, reason in listed.items()}
    lines += [
        f"| {n} | {o.status} | {'+'.join(o.engines)} | {reasons.get(n, 'NOT LISTED: ' + o.text)} |"
        for n, o in sorted(outcomes.items())
        if o.status != "pass"
    ]
    lines += ["", "## By op", "", "Tests of one node each; how many each set of engines ran.", "", "| op | engines |",
              "|---|---|"]  # fmt: skip
    by_op: dict[str, Counter[str]] = {}
    for name, model in onnx_suite.single_nodes().items():
        by_op.setdefault(model.graph.node[0].op_type, Counter())["+".join(outcomes[name].engines) or "none"] += 1
    lines += [
        f"| {op} | {', '.join(f'{e} {c}' for e, c in sorted(found.items()))} |" for op, found in sorted(by_op.items())
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns 1 if a test fails that is not listed, or a listed one passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--stock", action="store_true", help="run onnxruntime alone, too")
    parser.add_argument("--write", action="store_true", help="write results.md instead of printing it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["ONNX_HOME"] = home
        if given.names:
            for name in given.names:
                print(name, onnx_suite.run(name), onnx_suite.run(name, stock=True) if given.stock else "")
            return 0
        outcomes = {name: onnx_suite.run(name) for name in onnx_suite.tests()}
        stock = {name: onnx_suite.run(name, stock=True) for name in onnx_suite.tests(True)} if given.stock else {}
    text = _table(outcomes, stock)
    if given.write:
        (HERE / "results.md").write_text(text)
    else:
        print(text)
    listed = onnx_suite.deviations()
    expected = listed["delegated"].keys() | listed["refused"].keys()
    failed = {n for n, o in outcomes.items() if o.status != "pass"} - listed["random"].keys()
    return int(failed != expected)


if __name__ == "__main__":
    sys.exit(main())
