"""Rows on CUDA whose length is no multiple of a pack: 16-byte accesses, and single elements at both ends."""

from __future__ import annotations

import numpy as np
import nvrtc
import pytest
import sass
from cuda_row_graphs import ODD, SOFTMAX, bound, compiled, odd_feeds, run
from emulator import FakeCupy
from row_graphs import as_dict, samples
from row_truth import assert_near
from schedules import cuda_launches

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import row_major
from opgraph.loops.layout import bind
from opgraph.loops.lower import lower
from opgraph.schedule.cuda_row_tiles import row_tiles

pytest.importorskip("torch")


@pytest.mark.parametrize("name", ODD)
def test_misaligned_rows_are_read_and_written_in_packs(cupy: FakeCupy, name: str) -> None:
    """The bits are the same in any order of threads and blocks, no pack is misaligned (the emulator checks), results
    are near the truth, and nothing next to the results is written."""
    text, shapes, dtype, vector, held = ODD[name]
    graph = og.parse(text.format(t=dtype))
    (partition,) = graph.finalize().get_partitions()
    lowered = lower(partition)
    sizes = [() if t is None else shapes[str(t.name)] for t in lowered.loads]
    cut = row_tiles(lowered.loop, bind(lowered.loop, sizes, [row_major(s) for s in sizes]))
    assert (cut.vector, cut.held, cut.lead >= 0, cut.pieces > 1) == (vector, held, True, name == "in pieces")
    feeds = odd_feeds(graph, shapes)
    got = run(cupy, compiled(text, dtype), feeds)
    exact, host = as_dict(og.evaluate(graph, feeds)), as_dict(og.compile(graph)(feeds))
    for key, want in exact.items():
        assert_near(got[key], np.asarray(want, np.longdouble), host[key])


def test_results_in_a_larger_array_leave_other_elements(cupy: FakeCupy) -> None:
    """Rows of a larger array with an odd length, results in an array of the same form: other elements do not change."""
    f = og.compile(og.parse("graph(x: f32[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)"), device="cuda")
    base, out = cupy.asarray(samples((6, 331))), cupy.asarray(np.full((6, 331), -7, np.float32))
    f(x=base[:, :325], out=out[:, :325])
    powers = np.exp(base.host[:, :325].astype(np.float64))
    np.testing.assert_allclose(out.host[:, :325], powers / powers.sum(1, keepdims=True), rtol=1e-5)
    assert (out.host[:, 325:] == -7).all()


def test_column_sums_use_no_misaligned_packs() -> None:
    """A thread must have the same columns in each row to keep their sums."""
    graph = "graph(x: f32[n,c], w: f32[c]) -> (y, dw)\n  s = SoftMax(x, axis=-1)\n  y = Multiply(s, w)\n"
    cut = row_tiles(*bound(graph + "  p = Multiply(s, x)\n  dw = SumTo(p, w)", 300, 1001))
    assert (cut.vector, cut.lead, cut.loose) == (1, -1, 0)


@pytest.mark.parametrize(("rows", "lengths"), [(9, (1000, 4096)), (9, (61, 33)), (9, (1002, 4098))])
def test_whole_pack_and_short_rows_have_no_scalar_ends(rows: int, lengths: tuple[int, ...]) -> None:
    for length in lengths:
        assert row_tiles(*bound("graph(x: f32[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)", rows, length)).lead == -1


@pytest.mark.skipif(
    nvrtc.library() is None or nvrtc.disassembler() is None,
    reason="pip install nvidia-cuda-nvrtc nvidia-cuda-nvdisasm",
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_accesses_are_16_bytes_except_at_row_ends(dtype: str) -> None:
    loop, layout = bound(SOFTMAX.format(t=dtype), 4096, 10_001)
    cut, (launch,) = row_tiles(loop, layout), cuda_launches(loop, layout)
    for arch in nvrtc.ARCHITECTURES:
        cubin = nvrtc.compile_text(launch.source.code, arch, nvrtc.OPTIONS)
        program = sass.programs(nvrtc.disassemble(cubin))[launch.source.entry]
        moves = [(x.kind, x.bytes_moved) for x in program.instructions if x.kind in ("LDG", "STG")]
        element = dtypes.BY_NAME[dtype].itemsize
        assert moves.count(("LDG", 16)) == 2 * cut.packs and moves.count(("STG", 16)) == cut.packs
        assert moves.count(("STG", element)) == 1 and len(moves) == 3 * cut.packs + 4 + cut.packs * cut.vector
        assert program.frame == 0 and program.registers * cut.block <= 65536
