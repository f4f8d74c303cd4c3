"""`opgraph memory act.py:Name`: the memory kept for backward, and the peak, of an activation or a network."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgraph.cli.main import UsageError, check_place
from opgraph.cli.python_file import named_thing, place_and_name
from opgraph.cli.terminal import console, note, printable, progress, table
from opgraph.cli.training_diagram import draw_plan
from opgraph.errors import DeviceError, InvalidArguments, OpGraphError, Unimplemented

if TYPE_CHECKING:
    from opgraph.torch.memory.report import MemoryReport

#: The shape of one input image of the networks in `opgraph.torch.zoo`.
IMAGE = (3, 32, 32)
MODELS = ("resnet18", "resnet50", "efficientnet_b0")
DTYPES = ("f32", "f64", "f16", "bf16")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "target",
        metavar="FILE.py:NAME",
        nargs="?",
        help="a torch module class, module or function; package.module:NAME does as well",
    )
    parser.add_argument(
        "--input", metavar="SHAPE", action="append", help="an input's dimensions, as in 128,64,32,32; one for each"
    )
    parser.add_argument("--model", choices=MODELS, help="put it into this network, for 32x32 images")
    parser.add_argument("--batch", type=int, metavar="N", help="images in a batch, with --model (default: 128)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="f32", help="of inputs and parameters (default: %(default)s)"
    )
    parser.add_argument("--run", action="store_true", help="compute it, instead of counting on shapes alone")
    parser.add_argument("--no-fuse", action="store_true", help="leave out what fusing would save")
    parser.add_argument("--plot", metavar="FILE", help="write a picture: FILE.svg")
    parser.add_argument(
        "--graph",
        metavar="FILE",
        help="draw the graphs of both passes as opgraph fuses them, kept tensors marked: FILE.svg",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else")
    parser.add_argument("--all", action="store_true", help="print tables whole, and every kept tensor")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    shapes = _shapes(args)
    for path, option in ((args.plot, "--plot"), (args.graph, "--graph")):
        if path and Path(path).suffix.lower() != ".svg":
            raise UsageError("the picture is an SVG file", where=path, fix="give a name that ends in .svg")
        if path:
            check_place(path, option)
    if args.plot and args.graph and Path(args.plot).resolve() == Path(args.graph).resolve():
        raise UsageError("--plot and --graph name one file", where=args.graph, fix="give each a file of its own")
    if args.graph and args.model:
        raise UsageError(
            "--graph draws one function, not a network", where=f"--model {args.model}", fix="give --input instead"
        )
    if args.target is not None:
        place_and_name(args.target)  # checked first: loading PyTorch takes seconds
    with progress() as step:
        step("loading PyTorch")
        _require_torch()
        subject, name = _subject(args)
        step("running it" if args.run else "counting on shapes")
        report = _measured(args, subject, name, shapes)
        if not args.no_fuse:
            step("fusing it and measuring again")
            report = _beside_fused(args, subject, name, shapes, report)
        if args.plot:
            step("drawing")
            report.plot(args.plot)
        if args.graph:
            step("fusing and drawing")
            from opgraph.torch.memory.subject import plan_of

            plan, extents = plan_of(subject, shapes, args.dtype)
            draw_plan(plan, args.graph, f"{printable(name, 60)}, forward and backward", extents)
    if args.json:
        print(json.dumps(report.to_dict()))
        return 0
    _print(report, None if args.all else 40)
    for path in filter(None, (args.plot, args.graph)):
        console().print(f"drawn to {printable(path)}")
    return 0


def _shapes(args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Checks that the arguments fit together, and returns the shapes of the inputs."""
    if args.target is None and args.model is None:
        raise UsageError("nothing to measure", where="opgraph memory", fix="give FILE.py:NAME, --model, or both")
    if args.target is not None and ":" not in args.target:
        suffix = Path(args.target).suffix.lower()
        if suffix != ".py":
            raise Unimplemented(
                "memory is measured of PyTorch code, not of graph files", where=args.target,
                fix="give FILE.py:NAME; `opgraph show` takes graph files",
            )  # fmt: skip
    if args.model is not None:
        if args.input:
            raise UsageError("--model brings its own input", where="--input", fix="give --batch N instead of --input")
        batch = 128 if args.batch is None else args.batch
        if batch < 1:
            raise UsageError("a batch has at least one image", where=f"--batch {batch}", fix="give a positive number")
        return [(batch, *IMAGE)]
    if args.batch is not None:
        raise UsageError("--batch goes with --model", where="--batch", fix="write the batch into --input")
    if not args.input:
        raise UsageError("no input", where="--input", fix="give the dimensions, as in --input 128,64,32,32")
    return [_shape(text) for text in args.input]


def _shape(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")] if text else []
    are_numbers = all(word.isascii() and word.isdigit() and len(word) < 20 for word in words)
    dims = tuple(int(word) for word in words) if are_numbers else (-1,)
    if any(not 0 <= dim < 1 << 63 for dim in dims):
        raise UsageError(
            "no dimensions", where=f"--input {text}", fix="whole numbers from 0 on, as in --input 128,64,32,32"
        )
    return dims


def _require_torch() -> None:
    try:
        import opgraph.torch  # noqa: F401
    except ImportError as error:
        raise DeviceError(
            "what is kept for backward is measured with PyTorch, which cannot be imported",
            where=f"opgraph memory ({getattr(error, 'what', error)})",
            fix="pip install 'opgraph[torch]'",
        ) from None


def _subject(args: argparse.Namespace) -> tuple[Callable[..., Any], str]:
    """The object to measure, and its name from the arguments."""
    from opgraph.torch.memory import subject as memory_subject

    thing, name = (None, "") if args.target is None else named_thing(args.target)
    try:
        if args.model is not None:
            return memory_subject.network(args.model, thing, name), name
        return memory_subject.instance(thing, name), name
    except InvalidArguments as error:
        raise UsageError(error.what, where=error.where, fix=error.fix) from error
    except (Exception, SystemExit) as error:
        raise _failed(error, args.target or args.model) from error


def _measured(
    args: argparse.Namespace, subject: Callable[..., Any], name: str, shapes: list[tuple[int, ...]]
) -> MemoryReport:
    from opgraph.torch.memory import subject as memory_subject

    try:
        report = memory_subject.measured(
            subject, shapes, args.dtype, needs_grad=args.model is None, dry_run=not args.run
        )
    except OpGraphError:
        raise
    except (Exception, SystemExit) as error:  # the caller's code may raise either
        raise _failed(error, args.target or args.model) from error
    size = "x".join(str(d) for d in shapes[0]) if shapes[0] else "scalar"
    label = args.model + (f" with {name}" if name else "") if args.model else name
    return replace(report, subject=f"{label}, {size} {args.dtype}")


def _beside_fused(
    args: argparse.Namespace,
    subject: Callable[..., Any],
    name: str,
    shapes: list[tuple[int, ...]],
    report: MemoryReport,
) -> MemoryReport:
    """The report, together with one on the fused subject if fusing changes the totals."""
    from opgraph.torch.memory import subject as memory_subject

    try:
        after = _measured(args, memory_subject.fused(subject), name, shapes)
    except OpGraphError as error:
        note(f"it could not be fused and measured: {error.what} ({error.where})")
        return report
    return report if after.totals == report.totals else report.compared(after, "fused")


def _failed(error: BaseException, target: str) -> OpGraphError:
    from opgraph.torch.memory.measure import line_raising

    return OpGraphError(
        f"{target} raised {type(error).__name__}: {error}".splitlines()[0],
        where=line_raising(error) or target,
        fix="check --input (or --batch) and --dtype against what it takes; --traceback shows where it came from",
    )


def _print(report: MemoryReport, limit: int | None) -> None:
    from opgraph.torch.memory.report_text import summary, tables

    out = console()
    for line in summary(report):
        out.print(printable(line))
    out.print()
    for made in tables(report, limit):
        columns = [f"~{name}" if name in ("source", "which is", "module") else name for name in made.columns]
        out.print(table(made.title, columns, made.rows, right=made.right))
    for text in report.notes:
        note(text)
