"""The first part of `opgraph demo`: a trainable activation in PyTorch, and its memory and time in training."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from opgraph.cli.compare import Distance, distance, number
from opgraph.cli.terminal import console, printable, progress, table
from opgraph.errors import OpGraphError

if TYPE_CHECKING:
    from opgraph.bench.side_by_side import Measured

#: Seconds of timing, for the tensor and for the network.
TIMING_BUDGET = 2.0
_MIB = 2**20
_HEAD = """\
NAF1, a trainable activation in PyTorch as a user posted it (%s): a recursive gamma function, and
torch.where around two halves. Eager torch keeps a tensor for nearly every operation. The last line of each table is
the same class with one decorator on its forward, @opgraph.torch.fuse.
"""
_LEGEND = """\
kept: for backward. peak: above the weights, over a forward and a backward pass. step: both passes, the fastest; ratio:
to eager, the median over rounds in which all took turns. first call: with everything compiled for it; kernels stay on
disk, so that it is shorter the next time. off: from float64, output and gradient of the input, in ulp (see below)."""
_WITHOUT_COMPILE = (
    "torch.compile is left out, which compiles for half a minute: `opgraph demo --torch-compile` includes it."
)
_NOT_THERE = """\
The first part, a trainable activation in PyTorch, is left out: %s. To see it: pip install 'opgraph[torch]'
"""


def run(folder: Path, *, torch_compile: bool) -> None:
    """Measures and prints, or prints in one line why not.

    Args:
        folder: the folder for the source of the activation.
        torch_compile: if True, includes torch.compile.

    Raises:
        OpGraphError: the fused activation computes something else.
    """
    why = _missing()
    if why:
        console().print(_NOT_THERE % printable(why))
        return
    source = folder / "naf1.py"
    with progress() as step:
        step("loading PyTorch")
        from opgraph.bench import side_by_side
        from opgraph.torch import naf1

        shutil.copyfile(naf1.__file__, source)
        ways = {n: way for n, way in side_by_side.WAYS.items() if torch_compile or n != side_by_side.COMPILED}
        model, x = side_by_side.alone(naf1.NAF1)
        tensor = side_by_side.measured(model, x, naf1.NAF1, ways, TIMING_BUDGET, lambda what: step(f"NAF1: {what}"))
        exact = side_by_side.truth(model, x)
        net, images = side_by_side.network(naf1.NAF1)
        network = side_by_side.measured(
            net, images, naf1.NAF1, ways, TIMING_BUDGET, lambda what: step(f"a network: {what}")
        )
    off = {
        name: max((distance(got, want, "f32") for got, want in zip(one.results, exact, strict=True)), key=_scaled)
        for name, one in tensor.items()
    }
    out = console()
    out.print(_HEAD % printable(str(source)))
    out.print(_table(f"NAF1, forward and backward of {_size(x.shape)} f32", tensor, off))
    out.print(_table(f"A network of 3 convolutions with NAF1 after each, {images.shape[0]} images of 32x32", network))
    out.print(_LEGEND)
    if not torch_compile:
        out.print(_WITHOUT_COMPILE)
    out.print("Line by line, and in a ResNet-18:")
    out.print(f"  opgraph memory {source}:NAF1 --input 128,64,32,32")
    out.print(f"  opgraph memory {source}:NAF1 --model resnet18 --batch 128\n")
    if not off[side_by_side.FUSED].is_within(off[side_by_side.EAGER]):
        raise OpGraphError(
            "NAF1 computes something else after fusing",
            where=str(source),
            fix="this is a bug: please report it with the table above",
        )


def _missing() -> str:
    """The reason why PyTorch cannot be used; empty if it can."""
    if find_spec("torch") is None:
        return "PyTorch is not installed"
    try:
        import opgraph.torch  # noqa: F401
    except (ImportError, OSError) as error:
        return f"PyTorch cannot be imported ({error})"
    return ""


def _scaled(off: Distance) -> float:
    return off.scaled


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(str(d) for d in shape)


def _table(title: str, found: Mapping[str, Measured], off: Mapping[str, Distance] | None = None) -> object:
    heads = ["kept, MiB", "peak, MiB", "step, ms (ratio)", "first call, s", *(["off, ulp"] if off else [])]
    rows = [
        [
            name,
            f"{one.kept / _MIB:.1f}",
            f"{one.peak / _MIB:.1f}",
            f"{number(one.step * 1e3)} ({one.ratio:.2f})",
            f"{one.first:.2f}",
            *([number(off[name].scaled)] if off else []),
        ]
        for name, one in found.items()
    ]
    return table(title, ["", *heads], rows, right=heads)
