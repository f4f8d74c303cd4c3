"""Properties of the machine code of pointwise kernels, read without a GPU; specs/sass.md has its cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import nvrtc
import pytest
from schedules import pointwise

import opgraph as og
from opgraph.codegen.kernel import KernelSource, cuda_source
from opgraph.ir.logical_tensor import LogicalTensor, row_major
from opgraph.loops.layout import bind
from opgraph.loops.loop import Loop
from opgraph.loops.lower import lower
from opgraph.schedule.schedule import CudaPointwise

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None or nvrtc.disassembler() is None,
    reason="pip install nvidia-cuda-nvrtc nvidia-cuda-nvdisasm",
)

Build = Callable[..., LogicalTensor]
ROWS, IMAGES = (64, 4096), (32, 64, 56, 56)
CHAIN = ("Exp", "Tanh", "Abs", "Sqrt", "Sigmoid", "GELU", "Log", "Square", "Mish", "SoftPlus", "HardSwish", "ReLU")


def swish(g: og.Graph, x: LogicalTensor, *a: LogicalTensor) -> LogicalTensor:
    return g.add_op("Multiply", x, g.add_op("Sigmoid", g.add_op("Multiply", x, *a) if a else x))


def add_relu(g: og.Graph, x: LogicalTensor, y: LogicalTensor) -> LogicalTensor:
    return g.add_op("ReLU", g.add_op("Add", x, y))


def swiglu(g: og.Graph, x: LogicalTensor, y: LogicalTensor) -> LogicalTensor:
    return g.add_op("Multiply", swish(g, x), y)


def chain(g: og.Graph, x: LogicalTensor) -> LogicalTensor:
    for kind in CHAIN:
        x = g.add_op(kind, x)
    return x


@dataclass(frozen=True)
class Kernel:
    """A kernel whose machine code is tested.

    Attributes:
        vector_loads, vector_stores: 16-byte accesses of a whole tile.
        by_memory: memory bounds its time, so its loads must not wait for each other.
    """

    name: str
    build: Build
    shapes: tuple[tuple[int, ...], ...]
    vector_loads: int
    strides: tuple[tuple[int, ...], ...] | None = None
    vector_stores: int = 1
    by_memory: bool = True

    def source(self, dtype: str) -> tuple[KernelSource, CudaPointwise]:
        g = og.Graph()
        inputs = [g.input(f"x{i}", dtype=dtype, shape=s) for i, s in enumerate(self.shapes)]
        g.output(self.build(g, *inputs))
        return compiled(lowered(g), self.shapes, self.strides)


def lowered(g: og.Graph) -> Loop:
    (partition,) = g.finalize().get_partitions()
    return lower(partition).loop


def compiled(
    loop: Loop, shapes: tuple[tuple[int, ...], ...], strides: tuple[tuple[int, ...], ...] | None = None
) -> tuple[KernelSource, CudaPointwise]:
    layout = bind(loop, shapes, strides or [row_major(s) for s in shapes])
    schedule = pointwise(loop, layout)
    return cuda_source(schedule), schedule


KERNELS = (
    Kernel("swish", swish, (ROWS,), 2, vector_stores=2),
    Kernel("swish, scalar factor", swish, (ROWS, ()), 2, vector_stores=2),
    Kernel("swish, factor per channel", swish, (IMAGES, (64, 1, 1)), 2, vector_stores=2),
    Kernel("swish, factor along rows", swish, (ROWS, (4096,)), 2),
    Kernel("add relu", add_relu, (ROWS, ROWS), 2),
    Kernel("swiglu", swiglu, (ROWS, ROWS), 2),
    Kernel("swiglu of halves", swiglu, (ROWS, ROWS), 2, strides=((8192, 1), (8192, 1))),
    Kernel(
        "chain of 12", chain, (ROWS,), 1, by_memory=False
    ),  # packs one after the other (kernels/cuda/pointwise_unrolled.cuh)
)
DTYPES = ("f32", "bf16", "f16", "f64")
#: ptxas keeps these at 32 registers, with all threads resident, and loads the second pack only after the first arrived.
LATE = {("swish, factor per channel", "bf16"), ("swish, factor per channel", "f16")}
CASES = [(k, d, "sm_90") for k in KERNELS for d in DTYPES]
CASES += [(k, d, arch) for k in KERNELS for d in DTYPES[:2] for arch in nvrtc.ARCHITECTURES if arch != "sm_90"]


@pytest.mark.parametrize(("what", "dtype", "arch"), CASES, ids=[f"{k.name}-{d}-{arch}" for k, d, arch in CASES])
def test_accesses_are_16_bytes_wide_and_early_without_spills(what: Kernel, dtype: str, arch: str) -> None:
    code = nvrtc.machine_code(what.source(dtype)[0].code, arch)
    tile = code.whole_tile
    wide_loads = [x for x in tile if x.is_load and x.op.endswith(".128")]
    stores = [x for x in tile if x.op.startswith("STG")]
    assert len(wide_loads) == what.vector_loads
    assert sum(x.op.endswith(".128") for x in stores) == what.vector_stores
    if what.by_memory:  # in others the last tile takes the same path, with single elements next to its packs
        assert len(stores) == what.vector_stores
    assert code.count("LDL") == code.count("STL") == 0
    assert code.registers <= 64  # 1024 threads, half of a multiprocessor's maximum, even for f64
    if what.by_memory and (what.name, dtype) not in LATE:
        assert used_before_the_last_load(tile) == []


def used_before_the_last_load(tile: Sequence[nvrtc.Instruction]) -> list[nvrtc.Instruction]:
    """Instructions that wait for a load while another one is still to be issued."""
    last = max(i for i, x in enumerate(tile) if x.is_load)
    pending: set[int] = set()
    waiting = []
    for instruction in tile[:last]:
        if pending & instruction.reads():
            waiting.append(instruction)
        if instruction.is_load:
            pending |= instruction.writes()
    return waiting


def test_row_index_is_computed_without_division() -> None:
    """A 64-bit division is a call, a 32-bit one a reciprocal; the magic numbers of a layout need neither."""
    source, schedule = KERNELS[2].source("f32")
    assert schedule.narrow
    code = nvrtc.machine_code(source.code, "sm_90")
    first_load = next(i for i, x in enumerate(code.instructions) if x.is_load)
    before = [x.op for x in code.instructions[:first_load]]
    assert not [op for op in before if op.startswith(("CALL", "MUFU", "I2F"))]
    assert len(before) < 66


def test_more_than_2_31_elements_are_indexed_in_64_bits() -> None:
    loop = lowered_binary()
    flat, variant = compiled(loop, ((2**31 + 8,), (2**31 + 8,)))
    assert not variant.narrow and "og::i64 n)" in flat.code and "const i64 tile = (i64)blockIdx.x" in flat.code
    wide = [x.op for x in nvrtc.machine_code(flat.code, "sm_90").whole_tile if x.op.startswith("IMAD.WIDE")]
    assert wide
    for rows, narrow in ((2**15, True), (2**16, False)):
        source, schedule = compiled(loop, ((rows, 2**15), (2**15,)))
        assert schedule.narrow is narrow
        assert f"const og::Layout<{'og::u32' if narrow else 'og::i64'}, 2, 3> layout" in source.code


def test_large_strides_are_indexed_in_64_bits() -> None:
    """Few elements, far apart: a view of a large array."""
    loop = lowered_binary()
    _, variant = compiled(loop, ((8, 64), (8, 64)), ((2**31, 1), (64, 1)))
    assert not variant.narrow


def lowered_binary() -> Loop:
    g = og.Graph()
    x, y = g.input("x", dtype="s8", shape=None), g.input("y", dtype="s8", shape=None)
    g.output(g.add_op("Add", x, y))
    return lowered(g)
