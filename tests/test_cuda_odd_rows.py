"""Rows on CUDA whose length is no multiple of a pack: 16-byte accesses between single elements."""

from __future__ import annotations

import numpy as np
import nvrtc
import pytest
import sass
from emulator import FakeCupy
from test_cuda_rows import bound, compiled, run
from test_rows import as_dict, assert_near, samples

import opgraph as og
from opgraph.codegen.cuda_row_cut import row_cut
from opgraph.codegen.cuda_rows import row_launches
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import row_major
from opgraph.loops.layout import bind
from opgraph.loops.lower import lower

pytest.importorskip("torch")

SOFTMAX = "graph(x: {t}[n,c], w: {t}[c], r: {t}[n,c]) -> (y)\n  s = SoftMax(x, axis=-1)\n  p = Multiply(s, w)\n"
SOFTMAX += "  y = Add(p, r)"
#: Graph, shapes, dtype, V, whether rows are held.
ODD = {
    "between a scale and a residual": (SOFTMAX, {"x": (9, 1001), "w": (1001,), "r": (9, 1001)}, "f32", 4, True),
    "of 16 bits": (SOFTMAX, {"x": (17, 643), "w": (643,), "r": (17, 643)}, "bf16", 8, True),
    "longer than registers": (SOFTMAX, {"x": (5, 30_003), "w": (30_003,), "r": (5, 30_003)}, "f32", 4, False),
    "in pieces": ("graph(x: {t}[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)", {"x": (3, 70_001)}, "f32", 4, False),
    "one row": ("graph(x: {t}[n,c]) -> (y)\n  y = ReduceMean(x, axes=[0,1])", {"x": (7, 301)}, "f32", 4, True),
    "an operand that some rows share": (
        "graph(x: {t}[n,k,c], m: {t}[n,1,c]) -> (y, t)\n  p = Multiply(x, m)\n  y = LogSoftmax(p, axis=-1)\n"
        "  t = ReduceMax(p, axes=[2])",
        {"x": (3, 5, 131), "m": (3, 1, 131)}, "f32", 4, True,
    ),
    "operands of two sizes": (
        "graph(x: {t}[n,c], b: boolean[n,c]) -> (y)\n  z = Select(b, x, 0.0)\n  y = SoftMax(z, axis=-1)",
        {"x": (19, 301), "b": (19, 301)}, "f32", 8, True,
    ),
    "one number for all rows": (
        "graph(x: {t}[n,c], k: {t}[]) -> (y, dk)\n  s = SoftMax(x, axis=-1)\n  y = Multiply(s, k)\n"
        "  p = Multiply(s, x)\n  dk = SumTo(p, k)",
        {"x": (90, 77), "k": ()}, "f32", 4, True,
    ),
}  # fmt: skip


def odd_feeds(graph: og.Graph, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Random numbers, and for conditions every second one at random."""
    found = {}
    for i, t in enumerate(graph.inputs):
        shape = shapes[str(t.name)]
        is_flag = t.dtype == "boolean"
        found[str(t.name)] = np.random.default_rng(i).random(shape) < 0.5 if is_flag else samples(shape, t.dtype, i)
    return found


@pytest.mark.parametrize("name", ODD)
def test_rows_that_begin_anywhere_move_in_packs(cupy: FakeCupy, name: str) -> None:
    """In any order of threads and blocks the same bits, no pack where a GPU refuses it (the emulator looks), near the
    truth, and nothing beside the results is written."""
    text, shapes, dtype, vector, held = ODD[name]
    graph = og.parse(text.format(t=dtype))
    (partition,) = graph.finalize().get_partitions()
    lowered = lower(partition)
    sizes = [() if t is None else shapes[str(t.name)] for t in lowered.loads]
    cut = row_cut(lowered.loop, bind(lowered.loop, sizes, [row_major(s) for s in sizes]))
    assert (cut.vector, cut.held, cut.lead >= 0, cut.pieces > 1) == (vector, held, True, name == "in pieces")
    feeds = odd_feeds(graph, shapes)
    got = run(cupy, compiled(text, dtype), feeds)
    exact, host = as_dict(og.evaluate(graph, feeds)), as_dict(og.compile(graph)(feeds))
    for key, want in exact.items():
        assert_near(got[key], np.asarray(want, np.longdouble), host[key])


def test_results_between_other_memory(cupy: FakeCupy) -> None:
    """Rows of a larger array whose length is odd, results in its place: elements beside them stay."""
    f = og.compile(og.parse("graph(x: f32[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)"), device="cuda")
    base, out = cupy.asarray(samples((6, 331))), cupy.asarray(np.full((6, 331), -7, np.float32))
    f(x=base[:, :325], out=out[:, :325])
    powers = np.exp(base.host[:, :325].astype(np.float64))
    np.testing.assert_allclose(out.host[:, :325], powers / powers.sum(1, keepdims=True), rtol=1e-5)
    assert (out.host[:, 325:] == -7).all()


def test_what_is_added_up_for_each_column_keeps_its_columns() -> None:
    """A thread has the same columns in each row, or it could not keep their sums."""
    graph = "graph(x: f32[n,c], w: f32[c]) -> (y, dw)\n  s = SoftMax(x, axis=-1)\n  y = Multiply(s, w)\n"
    cut = row_cut(*bound(graph + "  p = Multiply(s, x)\n  dw = SumTo(p, w)", 300, 1001))
    assert (cut.vector, cut.lead, cut.loose) == (1, -1, 0)


@pytest.mark.parametrize(("rows", "lengths"), [(9, (1000, 4096)), (9, (61, 33)), (9, (1002, 4098))])
def test_rows_that_are_whole_packs_or_short_have_no_single_elements(rows: int, lengths: tuple[int, ...]) -> None:
    for length in lengths:
        assert row_cut(*bound("graph(x: f32[n,c]) -> (y)\n  y = SoftMax(x, axis=-1)", rows, length)).lead == -1


@pytest.mark.skipif(
    nvrtc.library() is None or nvrtc.disassembler() is None,
    reason="pip install nvidia-cuda-nvrtc nvidia-cuda-nvdisasm",
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_accesses_are_16_bytes_wide_but_for_the_ends(dtype: str) -> None:
    loop, layout = bound(SOFTMAX.format(t=dtype), 4096, 10_001)
    cut, (launch,) = row_cut(loop, layout), row_launches(loop, layout)
    for arch in nvrtc.ARCHITECTURES:
        cubin = nvrtc.compile_text(launch.source.code, arch, nvrtc.OPTIONS)
        program = sass.programs(nvrtc.disassemble(cubin))[launch.source.entry]
        moves = [(x.kind, x.bytes_moved) for x in program.instructions if x.kind in ("LDG", "STG")]
        element = dtypes.BY_NAME[dtype].itemsize
        assert moves.count(("LDG", 16)) == 2 * cut.packs and moves.count(("STG", 16)) == cut.packs
        assert moves.count(("STG", element)) == 1 and len(moves) == 3 * cut.packs + 4 + cut.packs * cut.vector
        assert program.frame == 0 and program.registers * cut.block <= 65536
