"""Numbers that both Python and `kernels/` define, such as the number of cells that a thread has room for, are equal."""

from __future__ import annotations

import re
from math import prod

import pytest

from opgraph.codegen import strip_mining
from opgraph.codegen.sources import kernel_folder
from opgraph.onnx.library import ops
from opgraph.runtime import cpu_plan
from opgraph.schedule import cpu, cpu_tiles, cuda, cuda_tiles, interleaved_rows, merged_axes, split_columns

#: The name in the kernels of the CPU (.h) or of a GPU (.cuh), and the number in Python.
SHARED = (
    (".h", "max_cells", cpu_tiles.MAX_CELLS),
    (".h", "stretch", merged_axes.STRETCH),
    (".h", "max_spread", merged_axes.MAX_SPREAD),
    (".h", "small_work", cpu_plan._SMALL_WORK),
    (".h", "strip", strip_mining.LONGEST),
    (".h", "side", interleaved_rows.LANES),
    (".h", "longest", interleaved_rows.TILE_BYTES),
    (".h", "most_sides", split_columns.MOST_LANES // interleaved_rows.LANES),
    (".h", "lane_count", cpu.WIDTH),
    (".h", "keep_bytes", cpu.KEEP_BYTES),
    (".h", "attribute", ops.ALPHA),
    (".h", "dense_operands", ops.MAX_OPERANDS),
    (".cuh", "block_size", cuda_tiles.BLOCK_SIZE),
    (".cuh", "singles", cuda.SINGLES),
)


@pytest.mark.parametrize("ending,name,number", SHARED, ids=[name for _, name, _ in SHARED])
def test_shared_constants_are_equal_in_python_and_kernels(ending: str, name: str, number: int) -> None:
    defined = re.compile(rf"^ *enum {{(?:[^}}]*,)? {name} = ([\d *]+)", re.MULTILINE)
    found = [d for path in sorted(kernel_folder().rglob(f"*{ending}")) for d in defined.findall(path.read_text())]
    assert len(found) == 1, f"{name} is defined {len(found)} times in kernels/*{ending}"
    factors = [int(factor) for factor in found[0].split("*")]
    assert factors and prod(factors) == number
