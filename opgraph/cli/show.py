"""`opgraph show MODEL`: the graph, its partitions, and why anything stayed unfused."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opgraph.cli.draw import draw
from opgraph.cli.main import check_place, refuse_passed_over
from opgraph.cli.models import files_of, load_model
from opgraph.cli.sources import kernel_sources
from opgraph.cli.stages import stage_texts
from opgraph.cli.terminal import console, printable, progress, table
from opgraph.ir.graph import Graph
from opgraph.partition.partition import FUSED, LIBRARY, Partition
from opgraph.partition.report import counted

if TYPE_CHECKING:
    from rich.console import Console

    from opgraph.partition.report import Report

#: Tables are cut to this many rows unless --all.
MAX_ROWS = 40


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("model", metavar="MODEL", help="an ONNX file, a oneDNN graph file or a text form")
    parser.add_argument(
        "--source",
        nargs="?",
        const="part",
        choices=("part", "full"),
        help="print the kernel of every fused partition: the part that is its own, or the full text",
    )
    parser.add_argument(
        "--stages",
        action="store_true",
        help="print each stage of every fused partition: its ops, its loops, the schedule and why, the kernel's name",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="whose kernels --source and --stages print (default: cpu)"
    )
    parser.add_argument("--draw", metavar="FILE", help="write a picture: FILE.svg or FILE.html")
    parser.add_argument("--text", action="store_true", help="print the graph's text form, and nothing else")
    parser.add_argument("--all", action="store_true", help=f"print tables whole, not just {MAX_ROWS} rows")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.text:
        others = {"--source": args.source, "--stages": args.stages, "--device": args.device, "--draw": args.draw}
        refuse_passed_over({**others, "--all": args.all}, "--text prints the text form, and nothing else")
    if args.source is None and not args.stages:
        fix = "give --source or --stages, or leave it out"
        refuse_passed_over({"--device": args.device}, "no kernel is printed", fix)
    if args.draw:
        check_place(args.draw, "--draw", reads=(args.model,))
    with progress() as step:
        step("reading the model")
        graph = load_model(args.model)
        if args.draw:
            check_place(args.draw, "--draw", reads=files_of(graph))
        if args.text:
            print(graph)
            return 0
        step("cutting it into partitions")
        partitions = graph.get_partitions()
        report = graph.explain()
        if args.draw:
            step("drawing")
            draw(graph, partitions, args.draw, printable(Path(args.model).name, 90), totals(partitions))
    out = console()
    limit = None if args.all else MAX_ROWS
    _print_graph(out, graph, args.model)
    _print_partitions(out, partitions, limit)
    _print_reasons(out, report, partitions, limit)
    for note in report.notes:
        out.print(f"note: {printable(note)}")
    device = args.device or "cpu"
    for part in partitions:
        if part.kind == FUSED:
            if args.stages:
                out.print()
                print("\n".join(stage_texts(part, device)))
            if args.source:
                for source in kernel_sources(part, device):
                    out.print(f"\npartition {part.id}: {source.entry} ({device}), {source.schedule}")
                    print(source.code if args.source == "full" else source.functor)
    if args.draw:
        out.print(f"drawn to {printable(args.draw)}")
    return 0


def totals(partitions: Sequence[Partition]) -> str:
    """A summary, for example: 212 ops in 63 partitions: 26 fused, 37 library; units: 2 swish, 2 swiglu."""
    kinds = Counter(p.kind for p in partitions)
    units = Counter(u for p in partitions for u in p.units)
    text = f"{counted(sum(len(p.ops) for p in partitions), 'op')} in {counted(len(partitions), 'partition')}"
    if kinds:
        text += ": " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    return text + ("; units: " + unit_text(units) if units else "")


def unit_text(units: Counter[str]) -> str:
    """The numbers of units, for example: 2 swish, 2 swiglu."""
    return ", ".join(f"{n} {name}" for name, n in units.most_common())


def _print_graph(out: Console, graph: Graph, path: str) -> None:
    names = {"in": graph.inputs, "out": graph.outputs}
    for word, tensors in names.items():
        for tensor in tensors[:20]:
            out.print(f"{word:<4} {printable(tensor.name or str(tensor.id), 60)}: {printable(tensor.type_text, 60)}")
        if len(tensors) > 20:
            out.print(f"{word:<4} ... and {len(tensors) - 20} more")
    kinds = Counter(str(op.attrs.get("onnx_op", op.kind)) for op in graph.ops)
    listed = ", ".join(f"{n} {printable(kind, 40)}" for kind, n in kinds.most_common())
    out.print(f"ops  {len(graph.ops)}: {listed}")
    if graph.engine != "cpu":
        out.print(f"for  {graph.engine}")
    if graph.constants:
        size = sum(t.data.nbytes for t in graph.constants if t.data is not None)
        out.print(f"data {size / 2**20:.2f} MiB in {counted(len(graph.constants), 'constant')}")
    out.print()


def _print_partitions(out: Console, partitions: Sequence[Partition], limit: int | None) -> None:
    rows = []
    for part in partitions[:limit]:
        kinds = Counter(str(op.attrs.get("onnx_op", op.kind)) for op in part.ops)
        listed = ", ".join(printable(k, 30) if n == 1 else f"{n} {printable(k, 30)}" for k, n in kinds.most_common(6))
        runs = "1 kernel" if part.kind == FUSED else part.provider or "nobody"
        writes = ", ".join(printable(t.type_text, 30) for t in part.output_ports[:2])
        writes += f" and {len(part.output_ports) - 2} more" if len(part.output_ports) > 2 else ""
        more = " ..." if len(kinds) > 6 else ""
        rows.append((part.id, part.kind, runs, len(part.ops), unit_text(Counter(part.units)), listed + more, writes))
    columns = ("id", "kind", "runs as", "ops", "~units", "~kinds", "~writes")
    out.print(table(totals(partitions), columns, rows, right=("id", "ops")))
    _say_cut(out, len(partitions), limit)


def _print_reasons(out: Console, report: Report, partitions: Sequence[Partition], limit: int | None) -> None:
    """Prints why ops are not in one kernel with their neighbours: libraries by kind, pointwise ops one by one."""
    kinds = {p.id: p for p in partitions}
    foreign: Counter[tuple[str, str]] = Counter()
    apart = []
    for row in report.ops:
        part = kinds[row.partition]
        if part.kind == FUSED:
            reasons = [text for text in row.why.split("; ") if text.startswith("apart from")]
            apart += [(row.name, row.kind, row.partition, reason) for reason in reasons]
        else:
            foreign[row.why, part.provider if part.kind == LIBRARY else ""] += 1
    if foreign:
        rows = [(count, why) for (why, _), count in foreign.most_common(limit)]
        out.print(table("Not fused", ("ops", "~why"), rows, right=("ops",)))
        _say_cut(out, len(foreign), limit)
    if apart:
        rows2 = [(printable(name, 40), kind, part, why) for name, kind, part, why in apart[:limit]]
        out.print(table("Fused, but kept apart from a neighbour", ("op", "kind", "partition", "~why"), rows2))
        _say_cut(out, len(apart), limit)


def _say_cut(out: Console, count: int, limit: int | None) -> None:
    if limit is not None and count > limit:
        out.print(f"... and {count - limit} more rows: --all prints them\n")
