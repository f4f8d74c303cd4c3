"""The kernels whose machine code specs/sass.md shows: named units, trainable ones, chains; forward and backward."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from schedules import cuda_launches, pointwise

import opgraph as og
from opgraph.codegen.kernel import KernelSource, cuda_source
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import row_major
from opgraph.loops.layout import CONTIGUOUS, STRIDED, Layout, bind
from opgraph.loops.loop import Loop
from opgraph.loops.lower import lower
from opgraph.partition.examples import graph_of
from opgraph.schedule.cuda_row_tiles import row_tiles
from opgraph.schedule.cuda_tiles import BLOCK_SIZE
from opgraph.schedule.loop_fission import selected

DTYPES = ("f32", "bf16", "f16", "f64")
ROWS, IMAGES = "[4096,8192]", "[64,64,56,56]"
_CHAIN = ("Exp", "Tanh", "Abs", "Sqrt", "Sigmoid", "GELU", "Log", "Square", "Mish", "SoftPlus", "HardSwish", "ReLU")


def _chained() -> str:
    text = "x"
    for kind in _CHAIN:
        text = f"{kind}({text})"
    return text


@dataclass(frozen=True, slots=True)
class Entry:
    """One forward, and the backward that computes the gradient of each of its inputs.

    Attributes:
        expression: over x and other inputs, or a whole text; "" for NAF1, which is traced.
        shape: of x.
        others: shapes of the other inputs.
        dtypes: the dtypes that are shown.
    """

    name: str
    expression: str
    shape: str = ROWS
    others: tuple[tuple[str, str], ...] = ()
    dtypes: tuple[str, ...] = DTYPES

    def graph(self, dtype: str) -> og.Graph:
        if not self.expression:
            return _naf1(dtype)
        if self.expression.startswith("graph("):
            return og.parse(self.expression.format(t=dtype))
        types = {name: f"{dtype}{shape}" for name, shape in self.others}
        return og.parse(graph_of(self.expression, dtype=dtype, shape=self.shape, **types))


ENTRIES = (
    Entry("sigmoid", "Sigmoid(x)"),
    Entry("tanh", "Tanh(x)"),
    Entry("softplus", "SoftPlus(x)"),
    Entry("swish", "Swish(x)"),
    Entry("swish, alpha 1.702", "Swish(x, alpha=1.702)"),
    Entry("hardswish", "HardSwish(x)"),
    Entry("gelu, erf", "GELU(x)"),
    Entry("gelu, tanh", "GELU(x, mode=gelu_tanh)"),
    Entry("mish", "Mish(x)"),
    Entry("relu", "ReLU(x)"),
    Entry("swiglu", "Multiply(Swish(x), u)", others=(("u", ROWS),)),
    Entry("geglu", "Multiply(GELU(x), u)", others=(("u", ROWS),)),
    Entry("bias and gelu", "GELU(Add(x, b), mode=gelu_tanh)", others=(("b", "[8192]"),)),
    Entry("residual and swish", "Swish(Add(x, r))", others=(("r", ROWS),)),
    Entry("swish, trained factor", "Swish(x, a)", others=(("a", "[]"),)),
    Entry("swish, factor per channel", "Swish(x, a)", IMAGES, (("a", "[64,1,1]"),)),
    Entry("swish, factor per column", "Swish(x, a)", others=(("a", "[8192]"),)),
    # In f64, rows of 8192 are not all held.
    Entry("softmax", "SoftMax(x, axis=-1)", dtypes=DTYPES[:3]),
    Entry("rmsnorm", "RMSNorm(x, w)", others=(("w", "[8192]"),), dtypes=DTYPES[:3]),
    # The scale is a separate op: LayerNorm has none in f16.
    Entry(
        "layernorm",
        "graph(x: {t}[4096,8192], w: {t}[8192], b: {t}[8192]) -> (y)\n"
        "  n = LayerNorm(x, use_affine=false, keep_stats=false)\n  m = Multiply(n, w)\n  y = Add(m, b)",
        dtypes=DTYPES[:3],
    ),
    Entry("12 ops", _chained()),
    Entry("NAF1", ""),
)


def entries(dtype: str) -> Iterator[Entry]:
    """The entries that can be built here: NAF1 needs torch."""
    for entry in ENTRIES:
        if dtype in entry.dtypes and (entry.expression or importlib.util.find_spec("torch")):
            yield entry


def _naf1(dtype: str) -> og.Graph:
    import torch

    from opgraph.torch.naf1 import NAF1
    from opgraph.torch.tracing.trace import Tracer

    names = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
    x = torch.zeros(4096, 8192, device="meta", dtype=names[dtype])
    run = Tracer(NAF1().to(names[dtype]))((x,), {})
    assert run.traced is not None
    return run.traced.graph


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of an entry.

    Attributes:
        elements: of one thread in a whole tile, in a row, or in one turn of the loop that adds up.
        loops: true for such a loop, whose turns count.
        loaded: bytes that a thread loads before it computes; 0 if a turn is one row, as it is written.
        moved: bytes read and written for each element.
        turns: of a thread's nested loops, if it has any in a whole tile.
        shared: bytes of shared memory of a block.
        block: threads of a block.
    """

    source: KernelSource
    elements: int
    loops: bool
    loaded: int
    moved: float
    shared: int = 0
    block: int = BLOCK_SIZE
    turns: tuple[int, ...] = ()


def kernels(entry: Entry, direction: str, dtype: str) -> list[Kernel]:
    """The kernels that go over the data, of the partitions that do."""
    graph = entry.graph(dtype).finalize()
    if direction == "backward":
        names = [str(t.name) for t in graph.inputs]
        graph = og.gradient(graph, names)
    bound = []
    for partition in graph.get_partitions():
        lowered = lower(partition)
        shapes = [() if t is None else _sizes(t.dims or ()) for t in lowered.loads]
        bound.append((lowered.loop, bind(lowered.loop, shapes, [row_major(s) for s in shapes])))
    largest = max(layout.size for _, layout in bound)
    return [k for loop, layout in bound if layout.size * 64 > largest for k in _kernels(loop, layout)]


def _sizes(dims: Sequence[object]) -> tuple[int, ...]:
    """Known dimensions, and those of ROWS for the others, which a trace leaves open."""
    guesses = (*[4096] * (len(dims) - 1), 8192)[: len(dims)]
    return tuple(d if isinstance(d, int) else guess for d, guess in zip(dims, guesses, strict=True))


def _kernels(loop: Loop, layout: Layout) -> list[Kernel]:
    if layout.row_rank:
        cut, (launch,) = row_tiles(loop, layout), cuda_launches(loop, layout)
        made = _kernel(launch.source, loop, layout, cut.vector * cut.packs, loops=layout.variant.has_sums)
        shared = 2 * 8 * cut.threads // 32 * launch.source.functor.count("// Reduce")
        return [replace(made, loaded=0, shared=shared, block=launch.threads)]
    if not layout.variant.has_sums:
        schedule = pointwise(loop, layout)
        elements = schedule.vector * schedule.unroll
        made = _kernel(cuda_source(schedule), loop, layout, elements, loops=False)
        turns = (schedule.unroll, schedule.vector // schedule.group) if schedule.group else ()
        return [replace(made, turns=turns)]
    made = []
    for launch in cuda_launches(loop, layout):
        arguments = launch.source.code.rsplit("og::sum_tiles<", 1)[1].partition(">(")[0].split(", ")
        vector, unroll = int(arguments[1]), int(arguments[2])
        turns = (vector // int(arguments[7]),) if len(arguments) > 7 else ()
        part = _of_stores(loop, layout, launch.stores)
        shared = 256 * (8 if launch.addend == "f64" else 4) * min(len(launch.sums), 8)
        kernel = _kernel(launch.source, *part, vector * unroll, loops=True, shared=shared)
        made.append(replace(kernel, turns=turns))
    return made


def _of_stores(loop: Loop, layout: Layout, stores: tuple[int, ...]) -> tuple[Loop, Layout]:
    return loop.with_stores(stores), selected(layout, len(loop.loads), stores)


def _kernel(source: KernelSource, loop: Loop, layout: Layout, elements: int, *, loops: bool, shared: int = 0) -> Kernel:
    read = loop.reads()
    kinds = layout.variant.operands
    loads = [
        dtypes.BY_NAME[x.dtype].itemsize
        for x, kind in zip(loop.loads, kinds)
        if x.name in read and not x.is_position and kind in (CONTIGUOUS, STRIDED)
    ]
    sizes = [
        dtypes.BY_NAME[s.dtype].itemsize
        for s, kind in zip(loop.stores, kinds[len(loop.loads) :])
        if kind in (CONTIGUOUS, STRIDED)
    ]
    # An operand along the columns stays in a cache: it is read from memory once, not once per row.
    whole = [n for n, strides in zip(loads, _moving(loop, layout), strict=True) if strides]
    return Kernel(source, elements, loops, sum(loads) * elements, sum(whole) + sum(sizes), shared)


def _moving(loop: Loop, layout: Layout) -> list[bool]:
    """For each load that goes element by element: true if it is as large as the space."""
    read, kinds = loop.reads(), layout.variant.operands
    return [
        all(s or d == 1 for s, d in zip(strides, layout.dims))
        for x, kind, strides in zip(loop.loads, kinds, layout.strides)
        if x.name in read and not x.is_position and kind in (CONTIGUOUS, STRIDED)
    ]
