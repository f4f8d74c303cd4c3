"""Compares two ONNX files in onnxruntime: their outputs, and the first value of the same name that differs."""

from __future__ import annotations

import argparse

from opgraph.cli.agreement import judged, true_outputs
from opgraph.cli.feeds import feeds_for
from opgraph.cli.first_difference import first_differences
from opgraph.cli.main import UsageError
from opgraph.cli.models import ONNX, form_of, load_model
from opgraph.cli.onnx_file import OnnxFile, check_same_ports
from opgraph.cli.terminal import console, printable, progress, table
from opgraph.errors import OpGraphError


def check_files(args: argparse.Namespace) -> int:
    """Compares two ONNX files in onnxruntime."""
    for path in (args.model, args.other):
        if form_of(path) != ONNX:
            raise UsageError(
                "two files are compared in onnxruntime, and this one is no ONNX file",
                where=path,
                fix="save it with og.onnx.save",
            )
    with progress() as step:
        step("opening both in onnxruntime")
        a, b = OnnxFile(args.model), OnnxFile(args.other, library=args.ort_library)
        check_same_ports(a, b)
        feeds = feeds_for(args, a.inputs)
        step("running both")
        rows = judged(a.outputs, a.run(feeds), b.run(feeds), lambda: true_outputs(load_model(args.model), feeds))
        differing = [row for row in rows if row.apart.absolute]
        step("looking for the first tensor that differs")
        wrong = any(not row.agrees for row in rows)
        first, worse = (
            first_differences(args.model, args.other, feeds, args.ort_library, judge=wrong)
            if differing
            else (None, None)
        )
    out = console()
    cells = [
        (
            printable(row.name, 40), row.dtype, row.difference,
            str(row.first or ""), str(row.second or ""), "yes" if row.agrees else "NO",
        )
        for row in rows
    ]  # fmt: skip
    columns = ("~output", "dtype", "B from A", "A from float64", "B from float64", "agrees")
    out.print(table("", columns, cells, right=columns[2:5]))
    if first is not None:
        out.print(f"first difference between values of one name: {first}")
    if worse is not None:
        out.print(f"first value that is twice as far from float64 in B: {worse}")
    bad = next((row for row in rows if not row.agrees), None)
    if bad is not None:
        raise OpGraphError(
            f"B disagrees with A: {bad.second or bad.apart} from float64, A {bad.first or ''}",
            where=f'output "{printable(bad.name, 60)}"',
            fix="look at the first difference above; `opgraph check A` shows whether A itself is sound",
        )
    out.print("B agrees with A")
    return 0
