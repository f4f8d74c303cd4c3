"""`opgraph bench [MODEL]`: measures this machine, or a model on it, against a user's alternatives."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opgraph.cli.feeds import feeding_arguments
from opgraph.cli.main import UsageError, check_place, refuse_passed_over
from opgraph.cli.terminal import console, note, printable, progress, table
from opgraph.errors import InvalidArguments, OpGraphError
from opgraph.ir.whole_file import write_whole

if TYPE_CHECKING:
    from opgraph.bench.results import Results

_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMG]?)", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "K": 1_000, "M": 1 << 20, "G": 1 << 30}
_OF_SUITES = ("suite", "entries", "sizes", "dtypes", "quick", "peers", "without", "cache")
_OF_ENTRIES = ("entries", "sizes", "dtypes", "cache")
_OF_MODELS = ("inputs", "dim")
#: Options that take one value at a time, and those that take a list.
_REPEATED, _LISTS = ("entries", "peers", "without", "suite"), ("sizes", "dtypes")
#: The most elements; more do not fit into any memory that this was written for.
_LARGEST = 1 << 36


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="an ONNX file, a oneDNN graph file or a text form")
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--suite",
        action="append",
        metavar="NAME",
        help="a suite, repeat as needed (default: all, or those of the entries, sizes or dtypes asked for)",
    )
    what.add_argument(
        "--entries", action="append", metavar="PATTERN", help='entries by name, as in "swish*", or networks; repeat'
    )
    what.add_argument("--sizes", metavar="LIST", help="elements, as in 1000,1M,32M,2G")
    what.add_argument("--dtypes", metavar="LIST", help="of f32, bf16, f16")
    what.add_argument("--device", choices=("cpu", "cuda"), help="(default: cpu)")
    what.add_argument("--quick", action="store_true", help="one size, f32, few torch.compile: some 3 minutes")
    what.add_argument("--peers", action="append", metavar="NAME", help="only this peer; repeat")
    what.add_argument("--without", action="append", metavar="NAME", help="not this peer; repeat")
    feeding_arguments(parser)
    how = parser.add_argument_group("how")
    how.add_argument("--budget", type=float, metavar="SECONDS", help="how long it may take, about")
    how.add_argument("--threads", type=int, metavar="N", help="for every peer (default: torch's, or all cores)")
    how.add_argument(
        "--cache", choices=("warm", "cold", "both"), help="data in the caches or not (default: CPU warm, GPU cold)"
    )
    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", metavar="FILE", help="write the results")
    out.add_argument("--plot", metavar="FOLDER", help="draw them")
    out.add_argument("--from", metavar="FILE", dest="read", help="measure nothing: show (and draw) results of before")
    out.add_argument("--list", action="store_true", help="the suites, entries and peers of this machine")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    sizes, dtypes = _sizes(args.sizes), _dtypes(args.dtypes)
    if args.budget is not None and not 0 < args.budget <= 1e6:
        raise UsageError("no time", where=f"--budget {args.budget:g}", fix="give seconds, as in --budget 150")
    _check_together(args)
    args.device = args.device or "cpu"
    _check_outputs(args.json, args.plot, (args.model, args.inputs))
    kept: list[Results] = []
    try:
        if args.list:
            return _list(args.device)
        results = _read(args.read) if args.read else _measured(args, sizes, dtypes, kept)
    except InvalidArguments as error:
        raise (
            error if isinstance(error, UsageError) else UsageError(error.what, where=error.where, fix=error.fix)
        ) from None
    except (KeyboardInterrupt, OpGraphError):  # results that took so long are shown in any case
        if kept and (kept[-1].rows or kept[-1].figures):
            _print(kept[-1])
        raise
    try:
        if args.json:
            write_whole(args.json, results.to_json())
    finally:
        _print(results)
    if args.plot:
        from opgraph.bench.plots import draw

        drawn = draw(results, args.plot)
        for path in drawn:
            console().print(f"drawn to {printable(str(path))}")
        if not drawn:
            note("nothing is drawn: a picture takes two entries with a peer, or one in two sizes")
    failed = [row.label for row in results.rows if row.cells and row.ours.failed.startswith("wrong")]
    return 1 if failed else 0


def _sizes(text: str | None) -> tuple[int, ...]:
    found = []
    for word in (text or "").split(",") if text is not None else ():
        match = _SIZE.fullmatch(word.strip())
        size = float(match.group(1)) * _UNITS[match.group(2).upper()] if match else 0.0
        if not 0 < size <= _LARGEST or size != int(size):
            raise UsageError(f"{word!r} is no size", where="--sizes", fix="give elements, as in --sizes 1000,1M,32M")
        found.append(int(size))
    return tuple(found)


def _dtypes(text: str | None) -> tuple[str, ...]:
    from opgraph.bench.entries import DTYPES

    found = tuple(word.strip() for word in text.split(",")) if text is not None else ()
    for word in found:
        if word not in DTYPES:
            raise UsageError(f"{word!r} is not measured", where="--dtypes", fix=f"use {', '.join(DTYPES)}")
    return found


def _check_together(args: argparse.Namespace) -> None:
    """Refuses options that would have no effect."""
    if args.list:
        refuse_passed_over(
            {"MODEL": args.model, "--from": args.read, "--json": args.json, "--plot": args.plot},
            "--list shows names, and nothing else",
        )
    if args.read:
        refuse_passed_over({"--device": args.device}, "--from measures nothing")
    if args.read and args.model:
        raise UsageError("--from shows results, a model would be measured", where="--from", fix="give one of them")
    given = [name for name in (*_OF_SUITES, *_OF_MODELS, "budget", "threads") if _is_given(getattr(args, name))]
    fix = "leave it out"
    if args.read or args.list:
        what, names = f"{'--from' if args.read else '--list'} measures nothing", given
    elif args.model:
        what = f"{args.model!r} is taken as the model to measure, and suites are not measured beside one"
        names = [n for n in given if n in _OF_SUITES]
        fix = _given_again(args, names)
    elif any(n in _OF_MODELS for n in given):
        what, names = "no model is measured", [n for n in given if n in _OF_MODELS]
        fix = "leave it out, or give a model"
    else:
        passed_over: tuple[str, ...] = () if _asks_for_entries(args.suite) else _OF_ENTRIES
        if "networks" in (args.suite or ()):
            passed_over = tuple(n for n in passed_over if n != "entries")
        what, names = "no suite of entries is measured", [n for n in given if n in passed_over]
    for name in names:
        raise UsageError(f"--{name} would be passed over: {what}", where=f"--{name}", fix=fix)


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != []  # a 0 is given


def _given_again(args: argparse.Namespace, names: Sequence[str]) -> str:
    """The fix for a MODEL that was meant as one more value of an option that takes one at a time.

    Args:
        names: the given options that apply to suites.
    """
    if os.path.exists(args.model):
        return "leave it out, or leave out the model"
    for name in (n for n in _REPEATED if n in names):
        if name == "suite" and not _is_suite(args.model):
            return f"write --entries {shlex.quote(args.model)} for an entry of the suite"
        values = [shlex.quote(value) for value in (*getattr(args, name), args.model)]
        return f"repeat the option for each name: {' '.join(f'--{name} {value}' for value in values)}"
    for name in (n for n in _LISTS if n in names):
        return f"give the list without spaces: --{name} {getattr(args, name)},{args.model}"
    return "leave it out, or give the path of a model"


def _is_suite(name: str) -> bool:
    from opgraph.bench.plan import BY_NAME, GROUPS

    return name in (*GROUPS["all"], *GROUPS, *BY_NAME)


def _asks_for_entries(suites: list[str] | None) -> bool:
    """True if these include suites of entries, or unknown names, which are refused later."""
    from opgraph.bench.plan import BY_NAME, ENTRY_SUITES, GROUPS, OTHER_SUITES

    named = [member for name in suites or ("all",) for member in GROUPS.get(name, (name,))]
    return any(name in ENTRY_SUITES or name not in (*OTHER_SUITES, *BY_NAME) for name in named)


def _check_outputs(json: str | None, folder: str | None, reads: tuple[str | None, ...]) -> None:
    """Checks before minutes of measuring that outputs can be written, and that a plotting library is there."""
    if json is not None:
        check_place(json, "--json", reads=reads)
    if folder is None:
        return
    from opgraph.bench.plots import require

    require()
    place = next(p for p in (Path(folder), *Path(folder).absolute().parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(f"no folder can be made in {str(place)!r}", where=f"--plot {folder}", fix="give a folder")


def _read(path: str) -> Results:
    from opgraph.bench.results import read

    return read(path)


def _measured(
    args: argparse.Namespace, sizes: tuple[int, ...], dtypes: tuple[str, ...], kept: list[Results]
) -> Results:
    """Runs the requested measurements; `kept` receives the results so far, for a run that is stopped."""
    from opgraph.bench import run as bench_run

    if args.model:
        from opgraph.cli.bench_model import of_model

        return of_model(args)
    of_entries = args.entries or args.sizes or args.dtypes  # these do not apply to the other suites
    suites = tuple(args.suite or ("entries" if of_entries else "all",))
    budget = args.budget
    if budget is None and args.quick:
        budget = bench_run.QUICK
    if budget is None and args.device == "cuda" and "gpu" in suites:
        budget = bench_run.GPU
    settings = bench_run.Settings(
        suites=suites,
        entries=tuple(args.entries or ()),
        sizes=sizes,
        dtypes=dtypes,
        device=args.device,
        quick=args.quick,
        cache=args.cache or "",
        peers=tuple(args.peers or ()),
        without=tuple(args.without or ()),
        threads=args.threads,
        budget=budget,
    )
    if budget is not None:
        note(f"this takes some {budget:.0f} s")
    with progress() as step:
        return bench_run.run(settings, step, lambda some: _keep(args.json, some, kept))


def _keep(path: str | None, results: Results, kept: list[Results]) -> None:
    """Keeps and writes the results so far. A write error is reported at the end."""
    kept[:] = [results]
    if path:
        with contextlib.suppress(OSError):
            write_whole(path, results.to_json())


def _list(device: str) -> int:
    from opgraph.bench.entries import ENTRIES
    from opgraph.bench.peers.table import look
    from opgraph.bench.plan import OTHER_SUITES

    out = console()
    rows = [(e.suite, e.name, ", ".join(e.directions), (e.formula.__doc__ or "").strip()) for e in ENTRIES]
    rows += [(suite, "", "", "") for suite in OTHER_SUITES]
    out.print(table("", ("suite", "entry", "directions", "~what"), rows))
    found = [(f.peer.name, f.version or f"absent: {f.reason}", f.get) for f in look(device)]
    out.print(table("", ("peer", "~version", "~how to get it"), found))
    return 0


def _print(results: Results) -> None:
    from opgraph.bench import report

    out = console()
    for line in report.summary(results):
        out.print(printable(line))
    made = report.tables(results)
    for one in made:
        out.print(table("", one.columns, one.rows, right=one.right))
    if any(row.cells for row in results.rows):
        out.print(report.legend(made))
    for line in report.remarks(results):
        out.print(printable(line))
