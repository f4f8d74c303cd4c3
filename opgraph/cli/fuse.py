"""`opgraph fuse IN -o OUT`: fuse and export; OUT is checked against IN in onnxruntime before it gets its name."""

from __future__ import annotations

import argparse
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opgraph.cli.agreement import Judged, judged, numpy_outputs, true_outputs
from opgraph.cli.compare import number
from opgraph.cli.feeds import feeding_arguments, feeds_for
from opgraph.cli.main import UsageError
from opgraph.cli.models import ONNX, form_of
from opgraph.cli.show import unit_text
from opgraph.cli.terminal import Step, console, note, printable, progress, table
from opgraph.errors import DeviceError, OpGraphError
from opgraph.ir.graph import Graph

if TYPE_CHECKING:
    from opgraph.cli.onnx_file import Timing
    from opgraph.onnx.draft import Summary

FORMS = ("auto", "decomposed", "function", "standard", "contrib")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument("model", metavar="IN", help="an ONNX file")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the ONNX file to write")
    parser.add_argument(
        "--form", choices=FORMS, default="auto", help="how Swish is written (default: what TARGET runs fastest)"
    )
    parser.add_argument("--target", default="onnxruntime==1.31", help="who is to run OUT (default: %(default)s)")
    parser.add_argument("--functions", action="store_true", help="write every other fused partition as a function too")
    feeding_arguments(parser)
    parser.add_argument("--unchecked", action="store_true", help="write OUT without running either file")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    source, target = args.model, Path(args.output)
    if form_of(source) != ONNX:
        raise UsageError("IN is no ONNX file", where=source, fix="`opgraph show` and `check` take the text form")
    if target.exists() and os.path.samefile(source, target):
        raise UsageError("OUT is IN", where=str(target), fix="give another file name")
    import opgraph

    with progress() as step:
        step("reading the model")
        graph = opgraph.onnx.load(source)
        from opgraph.onnx.request import Request
        from opgraph.onnx.save import written

        def write(path: Path) -> Summary:
            return written(graph, path, Request(form=args.form, target=args.target, functions=args.functions))

        trial = target.with_name(f".{target.name[:80]}.{secrets.token_hex(4)}.onnx")
        try:
            step("fusing and writing")
            summary = write(trial)
            rows, timing = ([], None) if args.unchecked else _checked(args, graph, trial, step)
            if all(row.agrees for row in rows):
                step("giving it its name")
                _take_name(trial, target, write)
        finally:
            for leftover in (trial, _data(trial)):
                leftover.unlink(missing_ok=True)
    return _report(source, target, summary, rows, timing)


def _checked(args: argparse.Namespace, graph: Graph, trial: Path, step: Step) -> tuple[list[Judged], Timing | None]:
    """Runs IN and the new file on the same arrays; times them if they agree."""
    from opgraph.cli.onnx_file import OnnxFile, check_same_ports, timed

    step("checking in onnxruntime")
    fused = OnnxFile(str(trial))
    feeds = feeds_for(args, fused.inputs)
    try:
        original = OnnxFile(args.model)
    except DeviceError as error:
        # onnxruntime before 1.31 refuses f64 models with a swish, for one; what opgraph writes instead it may run.
        note(f"{error.what}: OUT is compared with the same formulas in NumPy instead")
        got = fused.run(feeds)
        return judged(fused.outputs, numpy_outputs(graph, feeds), got, lambda: true_outputs(graph, feeds)), None
    check_same_ports(original, fused)
    rows = judged(original.outputs, original.run(feeds), fused.run(feeds), lambda: true_outputs(graph, feeds))
    if not all(row.agrees for row in rows):
        return rows, None
    step("timing in onnxruntime")
    return rows, timed([original.caller(feeds), fused.caller(feeds)])


def _take_name(trial: Path, target: Path, write: Callable[[Path], Summary]) -> None:
    """The checked file becomes OUT; one with a data file, whose name it holds, is written again under its own."""
    if _data(trial).exists():
        _data(trial).unlink()
        write(target)
    else:
        os.replace(trial, target)


def _data(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _report(source: str, target: Path, summary: Summary, rows: Sequence[Judged], timing: Timing | None) -> int:
    out = console()
    agree = all(row.agrees for row in rows)
    lines: list[tuple[str, str, str]] = [
        ("nodes", str(summary.nodes_before), str(summary.nodes_after)),
        ("units written as one node", "", unit_text(Counter(summary.units)) or "none"),
        ("opset, ir_version", "", f"{summary.opset}, {summary.ir_version}"),
    ]
    for row in rows:
        name = printable(row.name, 30)
        if row.first is None or row.second is None:
            lines.append((f"{name}: difference", "", "none: the same bits"))
        else:
            lines.append((f"{name}: largest difference", "", str(row.apart)))
            lines.append((f"{name}: farthest from float64", str(row.first), str(row.second)))
    if timing is not None:
        before, after = (f"{number(s * 1e3)} ms" for s in timing.fastest)
        lines.append(("time in onnxruntime, fastest", before, after))
        lines.append((f"time ratio, median of {timing.rounds} pairs", "1", f"{timing.ratios[1]:.2f}"))
    out.print(table("", ("", "~IN", "~OUT"), lines, right=("IN", "OUT")))
    for remark in summary.notes:
        out.print(f"note: {printable(remark)}")
    if not agree:
        worst = next(row for row in rows if not row.agrees)
        raise OpGraphError(
            f"OUT disagrees with IN: {worst.second or worst.apart} from float64, IN is {worst.first or 'nearer'}",
            where=f'output "{printable(worst.name, 60)}"',
            fix="OUT was not written; report the model, or try --form decomposed",
        )
    unchecked = "" if rows else ", unchecked"
    out.print(f"done: {printable(source)} -> {printable(str(target))} ({args_form(summary)}{unchecked})")
    return 0


def args_form(summary: Summary) -> str:
    """As in: form auto for onnxruntime==1.31."""
    return f"form {summary.form} for {summary.target}"
