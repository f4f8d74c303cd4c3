"""One ONNX file against another in onnxruntime: their outputs, and the first value of one name that differs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import numpy as np

from opgraph.cli.agreement import judged, true_outputs
from opgraph.cli.compare import Distance, distance
from opgraph.cli.feeds import Port, feeds_for
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
        a, b = OnnxFile(args.model), OnnxFile(args.other)
        check_same_ports(a, b)
        feeds = feeds_for(args, a.inputs)
        step("running both")
        rows = judged(a.outputs, a.run(feeds), b.run(feeds), lambda: true_outputs(load_model(args.model), feeds))
        differing = [row for row in rows if row.apart.absolute]
        step("looking for the first tensor that differs")
        first = _first_difference(args.model, args.other, feeds) if differing else None
    out = console()
    cells = [
        (
            printable(row.name, 40), row.dtype, str(row.apart) if row.apart.absolute else "none: the same bits",
            str(row.first or ""), str(row.second or ""), "yes" if row.agrees else "NO",
        )
        for row in rows
    ]  # fmt: skip
    columns = ("~output", "dtype", "B from A", "A from float64", "B from float64", "agrees")
    out.print(table("", columns, cells, right=columns[2:5]))
    if first is not None:
        name, dtype, off = first
        out.print(
            f"first difference between values of one name: {printable(name, 80)} ({dtype}): {off}, element "
            f"{list(off.index)}: {off.values[1]:.9g} in A, {off.values[0]:.9g} in B"
        )
    bad = next((row for row in rows if not row.agrees), None)
    if bad is not None:
        raise OpGraphError(
            f"B disagrees with A: {bad.second or bad.apart} from float64, A {bad.first or ''}",
            where=f'output "{printable(bad.name, 60)}"',
            fix="look at the first difference above; `opgraph check A` shows whether A itself is sound",
        )
    out.print("B agrees with A")
    return 0


def _first_difference(a: str, b: str, feeds: Mapping[str, np.ndarray]) -> tuple[str, str, Distance] | None:
    """The first value, in A's order, that both files name and that differs; None where only outputs are shared.

    Values are looked at in the order of A. Making them outputs may keep onnxruntime from fusing what lies between.
    """
    from opgraph.onnx.probe import value_names, with_outputs

    shared = set(value_names(b))
    names = [name for name in value_names(a) if name in shared]
    left, right = (OnnxFile(path, with_outputs(path, names)) for path in (a, b))
    ports: dict[str, Port] = {p.name: p for p in left.outputs}
    values, others = left.run(feeds), right.run(feeds)
    for name in names:
        if values[name].shape != others[name].shape or values[name].dtype != others[name].dtype:
            raise OpGraphError(
                f"it is {values[name].dtype}{list(values[name].shape)} in A and "
                f"{others[name].dtype}{list(others[name].shape)} in B",
                where=f'value "{printable(name, 60)}"',
                fix="compare two files of one model",
            )
        off = distance(others[name], values[name], ports[name].dtype)
        if off.absolute:
            return name, ports[name].dtype, off
    return None
