"""`opgraph demo`: a trainable activation in PyTorch; then four small models, from an ONNX file to an ONNX file."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opgraph.cli import demo_torch
from opgraph.cli.agreement import true_outputs
from opgraph.cli.compare import Distance, distance, number
from opgraph.cli.feeds import parse_sizes, random_feeds, sizes_for
from opgraph.cli.show import unit_text
from opgraph.cli.terminal import Step, console, printable, progress, table
from opgraph.errors import OpGraphError
from opgraph.partition.partition import FUSED

if TYPE_CHECKING:
    from opgraph.cli.onnx_file import Timing
    from opgraph.onnx.draft import Summary
    from opgraph.partition.partition import Partition

#: Model -> sizes of its symbolic dimensions, and one line that describes it.
MODELS = {
    "efficientnet": ("batch=2", "convolutions, SiLU, squeeze gates"),
    "llama": ("batch=2 seq=64", "attention, RMSNorm, SwiGLU"),
    "own_activation": ("batch=512", "a user's activation, 14 ops, f32"),
    "gated_f16": ("batch=512", "the gate of a SwiGLU, f16"),
}
_LEGEND = """\
ulp: units in the last place of the output's largest value. ms: the fastest run; ratio: the median over rounds in
which the three took turns, below 1 is faster than the original. A ratio near 1 in the second line means that
onnxruntime does as well by itself: it fuses x*Sigmoid(x) in f32. Where the work is convolutions and matrix products,
opgraph hands all of it to onnxruntime (0 kernels), and computes once what depends on shapes alone."""
#: Seconds of timing for each model.
TIMING_BUDGET = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of one model. Distances and times are of: original in onnxruntime, fused in onnxruntime, opgraph."""

    summary: Summary
    partitions: Sequence[Partition]
    off: tuple[Distance, Distance, Distance]
    timing: Timing
    compile_seconds: float

    @property
    def agrees(self) -> bool:
        """True if both results of opgraph are as near to the truth as the original is."""
        return all(off.is_within(self.off[0]) for off in self.off[1:])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("--folder", default="opgraph-demo", help="where the models go (default: %(default)s)")
    parser.add_argument(
        "--torch-compile", action="store_true", help="put torch.compile beside the others; it takes half a minute"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from opgraph.onnx import samples

    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    demo_torch.run(folder, torch_compile=args.torch_compile)
    outcomes = {}
    with progress(total=6 * len(MODELS)) as step:
        for name, (sizes, _) in MODELS.items():
            outcomes[name] = _outcome(name, sizes.split(), getattr(samples, name), samples.write, folder, step)
    _print(outcomes, folder, time.perf_counter() - begun)
    wrong = [name for name, outcome in outcomes.items() if not outcome.agrees]
    if wrong:
        raise OpGraphError(
            f"{wrong[0]} computes something else after fusing", where=str(folder / f"{wrong[0]}.fused.onnx"),
            fix=f"this is a bug: `opgraph check {folder / wrong[0]}.onnx` shows where it begins",
        )  # fmt: skip
    return 0


def _outcome(
    name: str,
    sizes: Sequence[str],
    make: Callable[[], Any],
    write: Callable[[Any, Path], None],
    folder: Path,
    step: Step,
) -> Outcome:
    import opgraph
    from opgraph.cli.onnx_file import OnnxFile, timed
    from opgraph.onnx.save import written

    original, fused = folder / f"{name}.onnx", folder / f"{name}.fused.onnx"
    step(f"{name}: writing the model")
    write(make(), original)
    step(f"{name}: reading and fusing it")
    graph = opgraph.onnx.load(original)
    summary = written(graph, fused)
    step(f"{name}: compiling it for the CPU")
    start = time.perf_counter()
    executable = opgraph.compile(graph)
    compile_seconds = time.perf_counter() - start
    step(f"{name}: computing the truth in float64")
    before, after = (OnnxFile(str(path), spins=executable.spins) for path in (original, fused))
    feeds = random_feeds(before.inputs, sizes_for(before.inputs, parse_sizes(sizes)))
    truth = true_outputs(graph, feeds)
    step(f"{name}: running it three ways")
    results: list[Mapping[str, np.ndarray]] = [before.run(feeds), after.run(feeds)]
    (output,) = before.outputs
    results.append({output.name: executable(feeds)})
    far = [distance(result[output.name], truth[output.name], output.dtype) for result in results]
    step(f"{name}: timing it three ways")
    # The result's buffer is reused, because onnxruntime's arena also keeps one from run to run.
    buffer = np.empty_like(results[2][output.name])
    calls = [before.caller(feeds), after.caller(feeds), executable.bind(feeds, out=buffer)]
    return Outcome(
        summary=summary,
        partitions=executable.partitions,
        off=(far[0], far[1], far[2]),
        timing=timed(calls, TIMING_BUDGET),
        compile_seconds=compile_seconds,
    )


def _print(outcomes: Mapping[str, Outcome], folder: Path, seconds: float) -> None:
    def row(head: str, cell: Callable[[Outcome], str]) -> list[str]:
        return [head, *(cell(outcome) for outcome in outcomes.values())]

    def time_cell(which: int) -> Callable[[Outcome], str]:
        return lambda o: f"{number(o.timing.fastest[which] * 1e3)} ({o.timing.ratios[which]:.2f})"

    rows = [
        ["", *(f"{text}\n" for _, text in MODELS.values())],
        row("nodes in the file, before -> after", lambda o: f"{o.summary.nodes_before} -> {o.summary.nodes_after}"),
        row("units found", lambda o: unit_text(Counter(u for p in o.partitions for u in p.units)) or "none"),
        row("partitions: kernels + libraries", lambda o: _partition_cell(o.partitions)),
        row("\nfarthest from float64, in ulp\n  original in onnxruntime", lambda o: f"\n\n{number(o.off[0].scaled)}"),
        row("  fused in onnxruntime", lambda o: number(o.off[1].scaled)),
        row("  compiled by opgraph, CPU", lambda o: number(o.off[2].scaled)),
        row(
            "\nms a run (ratio to the original)\n  original in onnxruntime",
            lambda o: f"\n\n{number(o.timing.fastest[0] * 1e3)}",
        ),
        row("  fused in onnxruntime", time_cell(1)),
        row("  compiled by opgraph, CPU", time_cell(2)),
        row("compile time, s", lambda o: f"{o.compile_seconds:.2f}"),
    ]
    out = console()
    columns = ["", *(f"~{name}" for name in outcomes)]
    out.print(table("", columns, rows, right=tuple(outcomes), fold_at=17))
    out.print(_LEGEND)
    out.print(
        f"\nThe models are in {printable(str(folder))}: NAME.onnx and NAME.fused.onnx. {seconds:.0f} s in all. Next:"
    )
    out.print(f"  opgraph show {folder / 'llama.onnx'} --draw llama.html")
    out.print(f"  opgraph check {folder / 'efficientnet.onnx'}")


def _partition_cell(partitions: Sequence[Partition]) -> str:
    kernels = sum(part.kind == FUSED for part in partitions)
    return f"{kernels} + {len(partitions) - kernels}"
