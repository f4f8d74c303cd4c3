"""Kernels that take long are compiled in two halves concurrently."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mixed_graph import bound
from schedules import in_order

import opgraph as og
from opgraph.codegen.kernel import KernelSource, host_source
from opgraph.errors import DeviceError
from opgraph.loops.layout import bind
from opgraph.runtime import build_library, cpu_compiler
from opgraph.runtime.build_library import Built
from opgraph.schedule import cpu_body
from opgraph.schedule.cpu_body import Form
from opgraph.schedule.schedule import POINTWISE, POINTWISE_TILED, TILED_SUM

pytestmark = pytest.mark.skipif(not cpu_compiler.is_available(), reason="there is no C++ compiler")

#: Both sides cost more than packing; the sum adds up one side's multiplied values.
BRANCHES = """graph(x: f32[n,m], a: f32[1,1]) -> (y{sum})
  up = Greater(x, 0.0)
  %0 = Select(up, x, 1.0)
  %1 = Select(up, 1.0, x)
  %2 = Log(%0)
  %3 = Tanh(%2)
  %4 = Multiply(%3, a)
  %5 = Exp(%1)
  %6 = Tanh(%5)
  y = Select(up, %4, %6)"""
SUM = "\n  s = SumTo(y, a)"


def built_from(source: KernelSource, cpus: set[int], monkeypatch: pytest.MonkeyPatch) -> tuple[Built, list[int]]:
    """The build of a source, and the number of compiler processes that run concurrently in each stage."""
    compiler, at_once = cpu_compiler.find_compiler(), []
    run = build_library._run

    def counting(commands: Sequence[Sequence[str]], folder: str) -> str | None:
        at_once.append(len(commands))
        return run(commands, folder)

    monkeypatch.setattr(build_library, "_run", counting)
    monkeypatch.setattr(build_library.os, "sched_getaffinity", lambda _: cpus)
    assert compiler is not None
    flags = compiler.flags(flat=True, branches=source.form is Form.BRANCHES)
    made = build_library.built(source, compiler.command, flags, compiler.libraries)
    monkeypatch.setattr(build_library, "_run", run)
    return made, at_once


@pytest.mark.parametrize(
    ("text", "form", "schedule"),
    [
        (BRANCHES.format(sum=""), Form.LANE_STRIPS, POINTWISE),
        (BRANCHES.format(sum=""), Form.BRANCHES, POINTWISE),
        (BRANCHES.format(sum=""), Form.BRANCHES, POINTWISE_TILED),
        (BRANCHES.format(sum=", s") + SUM, Form.BRANCHES, TILED_SUM),
        (BRANCHES.format(sum=""), Form.LOOP, POINTWISE),
    ],
    ids=["statement by statement", "branches", "branches, short rows", "branches, a sum", "one loop"],
)
def test_large_kernels_compile_in_two_concurrent_halves(
    text: str, form: Form, schedule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_body, "goes_by_strips", lambda values, by_lanes: form is Form.LANE_STRIPS)
    if form is Form.LOOP:
        monkeypatch.setattr(cpu_body, "branches_of", lambda values: None)
    loop, _ = bound(og.parse(text).finalize())
    layout = bind(loop, [(8, 256), (1, 1)], [(256, 1), (1, 1)])
    source = host_source(replace(in_order(loop, layout.variant), name=schedule))
    assert source.form is form
    wrong = replace(source, code=source.code.replace("og::tanh(", "og::no_such_thing("))
    for cpus, stages in ({0, 1}, [1] if form is Form.LOOP else [2, 1]), ({0}, [1]):
        made, at_once = built_from(source, cpus, monkeypatch)
        assert made.library is not None and at_once == stages, made.log
        file = tmp_path / f"{len(cpus)}.so"
        file.write_bytes(made.library)
        ctypes.CDLL(str(file), mode=os.RTLD_NOW)  # all functions that it calls exist
        refused, at_once = built_from(wrong, cpus, monkeypatch)
        assert refused.library is None and at_once == stages[:1]
        line = next(n for n, text in enumerate(wrong.code.splitlines(), 1) if "no_such_thing" in text)
        assert f"kernel.cpp:{line}:" in refused.log


def test_concurrent_kernel_builds_use_one_processor_each(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, layout = bound(og.parse(BRANCHES.format(sum="")).finalize())
    source = host_source(in_order(loop, layout.variant))
    other = subprocess.Popen(["sleep", "60"])
    try:
        monkeypatch.setattr(build_library, "_running", {other})
        for cpus, stages in ({0, 1}, [1]), ({0, 1, 2}, [2, 1]):
            made, at_once = built_from(source, cpus, monkeypatch)
            assert made.library is not None and at_once == stages
        assert build_library._running == {other}
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("version", ["echo a compiler", ":"])
@pytest.mark.parametrize("writes", ["", ': > "$2"'], ids=["nothing", "an empty file"])
def test_compiler_that_writes_no_library_raises_device_error(
    version: str, writes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx_ir")
    place = tmp_path / "g++"
    output = f'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then {writes or ":"}; fi; shift; done'
    place.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {version}; exit 0; fi\n{output}\n')
    place.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_compiler, "find_compiler", cpu_compiler.find_compiler.__wrapped__)
    graph = og.parse("graph(x: f64[n]) -> (y)\n a = Exp(x)\n y = Tanh(a)")
    with pytest.raises(DeviceError, match="without an error, and wrote no library"):
        og.compile(graph)(x=np.zeros(3))
    with pytest.raises(DeviceError, match="without an error, and wrote no library"):
        og.onnx.save(graph, tmp_path / "m.onnx", ort_library=tmp_path / "m.so")
    assert not list(tmp_path.glob("m.*"))
