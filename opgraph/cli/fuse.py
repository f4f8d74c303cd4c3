"""`opgraph fuse IN -o OUT`: fuses and exports. OUT is checked against IN in onnxruntime before it gets its name."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

from opgraph.cli.compare import number
from opgraph.cli.feeds import feeding_arguments
from opgraph.cli.fuse_trial import Outcome, Trial, march_of
from opgraph.cli.main import UsageError, check_place, refuse_passed_over, usage
from opgraph.cli.models import ONNX, form_of
from opgraph.cli.show import unit_text
from opgraph.cli.terminal import console, printable, progress, table
from opgraph.errors import OpGraphError

FORMS = ("auto", "decomposed", "function", "standard", "contrib")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("model", metavar="IN", help="an ONNX file")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the ONNX file to write")
    parser.add_argument(
        "--form", choices=FORMS, default="auto", help="how units are written (default: what TARGET runs fastest)"
    )
    parser.add_argument("--target", default="onnxruntime==1.31", help="who is to run OUT (default: %(default)s)")
    parser.add_argument("--functions", action="store_true", help="write every other fused partition as a function too")
    parser.add_argument(
        "--ort-library",
        metavar="LIB.so",
        help="compile the fused partitions into this library of custom ops: one op for each, in stock onnxruntime",
    )
    parser.add_argument("--march", help="the processors that LIB.so is for (default: like this one)")
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="LIB.so serves onnxruntime's CUDA provider as well: GPUs from sm_80 on, norms and reductions left out",
    )
    parser.add_argument(
        "--keep", metavar="UNIT", action="append", default=[], help="leave units of this name as they are; repeat"
    )
    feeding_arguments(parser)
    parser.add_argument("--unchecked", action="store_true", help="write OUT without running either file")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    source, target = args.model, Path(args.output)
    if form_of(source) != ONNX:
        raise UsageError("IN is no ONNX file", where=source, fix="`opgraph show` and `check` take the text form")
    if target.exists() and os.path.samefile(source, target):
        raise UsageError("OUT is IN", where=str(target), fix="give another file name")
    if args.unchecked:
        refuse_passed_over({"--inputs": args.inputs, "--dim": args.dim}, "--unchecked runs neither file")
    check_place(args.output, "-o", regular=True, reads=(args.inputs,))
    if args.ort_library is not None:
        check_place(args.ort_library, "--ort-library", regular=True, reads=(args.inputs,))
        if os.path.realpath(args.ort_library) in map(os.path.realpath, (source, target, f"{target}.data")):
            raise UsageError("LIB.so is IN, OUT or OUT.data", where=args.ort_library, fix="give another file name")
    else:
        about = {"--cuda": args.cuda, "--march": args.march}
        refuse_passed_over(about, "it is about a library", "give --ort-library LIB.so, or leave it out")
    import opgraph

    with progress() as step:
        step("reading the model")
        graph = opgraph.onnx.load(source)
        from opgraph.onnx.library.build import library_place
        from opgraph.onnx.request import Request, checked_keep
        from opgraph.onnx.save import put
        from opgraph.onnx.source import Source
        from opgraph.onnx.target import target_of

        if args.ort_library is not None and isinstance(graph.source, Source):  # must not overwrite the data of IN
            library_place(args.ort_library, target, graph.source.origin)
        with usage({"target": "--target", "keep": "--keep"}):
            target_of(args.target)
            keep = checked_keep(args.keep)
        request = Request(
            form=args.form,
            target=args.target,
            functions=args.functions,
            library=args.ort_library is not None,
            cuda=args.cuda,
            keep=keep,
        )
        outcome = Trial(args, graph, target, step).best(request)
        library = args.ort_library if outcome.draft.library else None
        if outcome.agrees:
            step("giving it its name")
            put(outcome.draft, target, library, march_of(args))
    return _report(source, target, library, args, outcome)


def _report(source: str, target: Path, library: str | None, args: argparse.Namespace, outcome: Outcome) -> int:
    out, summary, timing = console(), outcome.draft.summary, outcome.timing
    lines: list[tuple[str, str, str]] = [
        ("nodes", str(summary.nodes_before), str(summary.nodes_after)),
        ("units written as one node", "", unit_text(Counter({n: c for n, c in summary.units.items() if c})) or "none"),
        ("opset, ir_version", "", f"{summary.opset}, {summary.ir_version}"),
    ]
    for row in outcome.rows:
        name = printable(row.name, 30)
        lines.append((f"{name}: largest difference", "", row.difference))
        if row.first is not None and row.second is not None:
            lines.append((f"{name}: farthest from float64", str(row.first), str(row.second)))
    if timing is not None:
        ways = ["", " without LIB"]
        for way, fastest, ratio in zip(ways, timing.fastest[1:], timing.ratios[1:], strict=False):
            before = number(timing.fastest[0] * 1e3)
            lines.append((f"time in onnxruntime{way}, fastest", f"{before} ms", f"{number(fastest * 1e3)} ms"))
            lines.append((f"time ratio{way}, median of {timing.rounds} pairs", "1", f"{ratio:.2f}"))
    out.print(table("", ("", "~IN", "~OUT"), lines, right=("IN", "OUT")))
    for remark in summary.notes:
        out.print(f"note: {printable(remark)}")
    if not outcome.agrees:
        worst = next(row for row in outcome.rows if not row.agrees)
        raise OpGraphError(
            f"OUT disagrees with IN: {worst.second or worst.apart} from float64, IN is {worst.first or 'nearer'}",
            where=f'output "{printable(worst.name, 60)}"',
            fix="OUT was not written; report the model, or try --form decomposed",
        )
    if library is not None:
        ops = len({op.name for op in outcome.draft.library})
        march = march_of(args)
        processors = "processors like this one" if march == "native" else f"{printable(march)} processors"
        devices = f"{processors}{' and GPUs from sm_80 on' if args.cuda else ''}"
        out.print(f"library: {printable(library)}, {ops} ops for {devices}; with it:")
        out.print(f"  options.register_custom_ops_library({printable(str(Path(library).absolute()))!r})")
    elif args.ort_library is not None:
        out.print("note: there is nothing that a library would run, so none was written")
    unchecked = "" if outcome.rows else ", unchecked"
    form = f"form {summary.form} for {summary.target}"
    out.print(f"done: {printable(source)} -> {printable(str(target))} ({form}{unchecked})")
    return 0
