"""A kernel's text contains the parts of `kernels/` that it needs, and no more: the machine code does not change."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_graphs import RMS

import opgraph as og
from opgraph.codegen import kernel, prune_source
from opgraph.codegen.kernel import KernelSource
from opgraph.codegen.sources import spliced
from opgraph.ir import dtypes
from opgraph.runtime import cpu_compiler
from opgraph.schedule.cpu_body import Form
from opgraph.schedule.schedule import GROUPS

SKELETONS = sorted({skeleton for skeleton, _ in (*kernel._HOST.values(), *kernel._CUDA.values())})

BRANCHES = """graph(x: f32[n], a: f32[]) -> (y)
  up = Greater(x, 0.0)
  %0 = Pow(1.5, x)
  %1 = Sin(x)
  %2 = Tanh(%1)
  %3 = Multiply(%2, a)
  y = Select(up, %0, %3)"""
TRAINED = """graph(x: {t}[n,c], a: {t}[c], d: {t}[n,c]) -> (dx, da)
  dx = SwishBackward(x, d, a)
  %0 = Multiply(x, d)
  da: {t}[c] = SumTo(%0, a)"""
MIXED = """graph(x: {t}[n]) -> (y, i, u)
  %0 = Erf(x)
  %1 = Log(x)
  %2 = Cos(%0)
  y = Pow(%1, %2)
  i: s32[n] = TypeCast(y)
  u: u8[n] = TypeCast(%0)"""
#: Text, sizes, and the kernel's skeleton.
CASES = {
    "flat": ("graph(x: f32[n]) -> (y)\n  y = Swish(x)", {"n": 64}, "cpu/pointwise.h"),
    "f64": (MIXED.format(t="f64"), {"n": 64}, "cpu/pointwise.h"),
    "f16": (MIXED.format(t="f16"), {"n": 64}, "cpu/pointwise.h"),
    "bf16": (
        "graph(x: bf16[n], g: bf16[n]) -> (y)\n  %0 = Swish(x)\n  y = Multiply(%0, g)",
        {"n": 64},
        "cpu/pointwise.h",
    ),
    "integers": (
        "graph(x: s32[n], y: s32[n]) -> (z)\n  %0 = Mod(x, y)\n  z = Pow(%0, y)",
        {"n": 64},
        "cpu/pointwise.h",
    ),
    "branches": (BRANCHES, {"n": 64}, "cpu/pointwise.h"),
    "sums": (TRAINED.format(t="f32"), {"n": 64, "c": 32}, "cpu/tiled_sums.h"),
    "sums in bf16": (TRAINED.format(t="bf16"), {"n": 64, "c": 32}, "cpu/tiled_sums.h"),
    "rows": (RMS.format(t="f32"), {"n": 8, "c": 1000}, "cpu/inner_reduction.h"),
    "rows in f64": (RMS.format(t="f64"), {"n": 8, "c": 1000}, "cpu/inner_reduction.h"),
    "rows at once": (RMS.format(t="f32"), {"n": 640, "c": 48}, "cpu/persistent_reduction.h"),
    "rows side by side": (
        "graph(x: f32[n,c]) -> (y)\n  y = ReduceSum(x, axes=[0])",
        {"n": 1000, "c": 64},
        "cpu/outer_reduction.h",
    ),
    "a long row of few columns": (
        "graph(x: f32[n,c]) -> (y)\n  y = ReduceMax(x, axes=[0])",
        {"n": 500_003, "c": 9},
        "cpu/split_outer_reduction.h",
    ),
    "groups": (
        """graph(x: f32[n,h,w,64], g: f32[64], b: f32[64]) -> (y, m, v)
  y, m, v = GroupNorm(x, g, b, groups=16, data_format="NXC")""",
        {"n": 2, "h": 10, "w": 10},
        "cpu/grouped_reduction.h",
    ),
    "one long row": (
        "graph(x: f32[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)",
        {"n": 1, "c": 4_000_000},
        "cpu/split_reduction.h",
    ),
}


def sources(text: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> list[tuple[KernelSource, list[str]]]:
    """The sources that a call of a graph compiles, with their flags."""
    compiler = cpu_compiler.find_compiler()
    assert compiler is not None
    found = []
    load = cpu_compiler.load

    def noted(source: KernelSource, labels: tuple[str, ...], *, flat: bool = False) -> Any:
        branches, grouped = source.form is Form.BRANCHES, source.schedule in GROUPS
        flags = compiler.flags(flat=flat, branches=branches, grouped=grouped)
        found.append((source, [*compiler.command, *flags]))
        return load(source, labels, flat=flat)

    monkeypatch.setattr(cpu_compiler, "load", noted)
    graph = og.parse(text)
    arrays = {}
    for t in graph.inputs:
        shape = tuple(d if isinstance(d, int) else sizes[str(d)] for d in t.dims or ())
        arrays[t.name] = np.full(shape, 2, dtypes.get(t.dtype).numpy)
    og.compile(graph, device="cpu")(arrays)
    return found


def machine_code(text: str, command: list[str], folder: Path) -> bytes:
    (folder / "kernel.cpp").write_text(text)
    subprocess.run([*command, "-c", "-o", "kernel.o", "kernel.cpp"], cwd=folder, check=True)
    copy = ["objcopy", "-O", "binary", "--only-section=.text*", "--only-section=.rodata*", "kernel.o", "code"]
    subprocess.run(copy, cwd=folder, check=True)
    return (folder / "code").read_bytes()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("no_cache")
def test_pruned_source_compiles_to_the_same_machine_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = cpu_compiler.find_compiler()
    if compiler is None or not compiler.is_gcc:
        pytest.skip("no GCC")
    text, sizes, skeleton = CASES[name]
    if skeleton == "cpu/persistent_reduction.h" and not cpu_compiler.has_lanes():
        pytest.skip("no AVX-512: no row is done at once")
    found = sources(text, sizes, monkeypatch)
    assert skeleton in {source.skeleton for source, _ in found}
    for source, command in found:
        whole = f"{spliced(source.skeleton)}\n\n{source.own}"
        assert len(source.code) < 0.8 * len(whole)
        assert machine_code(source.code, command, tmp_path) == machine_code(whole, command, tmp_path)


def test_cases_include_every_cpu_skeleton() -> None:
    assert {skeleton for _, _, skeleton in CASES.values()} == {s for s in SKELETONS if s.endswith(".h")}


@pytest.mark.parametrize("skeleton", SKELETONS)
def test_pruned_parts_are_whole_declarations(skeleton: str) -> None:
    frames: list[str] = []
    for part in prune_source._parts(skeleton):
        if part.frame > 0:
            frames.append(part.text)
        elif part.frame < 0:
            assert frames.pop().startswith("#if") == part.text.startswith("#endif")
        elif not part.text.startswith("#"):
            conditions = part.text.count("\n#if") - part.text.count("\n#endif")
            assert part.names or part.text.startswith(("using namespace", "static_assert", "typedef")), part.text
            assert conditions == 0 and re.search(r"[;})](  // .*)?$", part.text), part.text
    assert not frames
