"""Operands whose neighbours lie in the next row: copied in blocks for reads, processed in tiles for writes."""

from __future__ import annotations

import numpy as np
import pytest
from schedules import in_order

import opgraph as og
from opgraph.codegen.kernel import host_source
from opgraph.ir import dtypes
from opgraph.loops.layout import Variant
from opgraph.loops.lower import lower
from opgraph.runtime import cpu_compiler

pytestmark = pytest.mark.skipif(not cpu_compiler.is_available(), reason="there is no C++ compiler")

MIXED = """graph(x: f16[n,m], r: f32[n,m], i: s32[n,m]) -> (y)
  %0: f32[n,m] = TypeCast(x)
  %1: f32[n,m] = TypeCast(i)
  %2 = Add(%0, r)
  y = Add(%1, %2)"""
#: Rows and columns: less than a block, more, more than one thread's share, whole blocks, one row, a leading axis.
SHAPES = [(5, 129), (67, 150), (130, 1100), (64, 1024), (1, 400), (3, 70, 300)]


def compiled(dtype: str, rank: int) -> og.Executable:
    """x * x + r"""
    g = og.Graph()
    x, r = (g.input(name, dtype, (None,) * rank) for name in "xr")
    g.output(g.add_op("Add", g.add_op("Multiply", x, x), r, name="y"))
    return og.compile(g)


def filled(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * 8).astype(dtypes.get(dtype).numpy)


def turned(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.swapaxes(filled((*shape[:-2], shape[-1], shape[-2]), dtype, seed), -1, -2)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "s32", "u8"])
def test_transposed_operand_does_not_change_results(dtype: str) -> None:
    for shape in SHAPES:
        f = compiled(dtype, len(shape))
        x, r = turned(shape, dtype), filled(shape, dtype, 1)
        want = bits(f(x=np.ascontiguousarray(x), r=r))
        np.testing.assert_array_equal(bits(f(x=x, r=r)), want, err_msg=f"{shape}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_several_transposed_operands_and_a_transposed_result(shape: tuple[int, ...]) -> None:
    f = compiled("f32", len(shape))
    x, r, out = turned(shape, "f32"), turned(shape, "f32", 1), turned(shape, "f32", 2)
    want = bits(f(x=np.ascontiguousarray(x), r=np.ascontiguousarray(r)))
    np.testing.assert_array_equal(bits(f(x=x, r=r)), want)
    np.testing.assert_array_equal(bits(f(x=x, r=np.ascontiguousarray(r), out=out)), want)
    every_other = np.ascontiguousarray(np.repeat(r, 2, axis=-1))[..., ::2]
    np.testing.assert_array_equal(bits(f(x=x, r=every_other)), want)
    up = np.ascontiguousarray(x[..., ::-1, :].swapaxes(-1, -2)).swapaxes(-1, -2)[
        ..., ::-1, :
    ]  # transposed and reversed
    np.testing.assert_array_equal(bits(f(x=up, r=r)), want)


def test_kernel_knows_element_sizes_of_strided_operands() -> None:
    (partition,) = og.parse(MIXED).get_partitions()
    loop = lower(partition).loop
    assert [x.dtype for x in loop.loads] == ["f16", "s32", "f32"]

    def told(kinds: str) -> str:
        lines = host_source(in_order(loop, Variant(kinds, False))).functor.splitlines()
        return next((line.split("return ")[1] for line in lines if "strided_bytes" in line), "")

    assert told("sscc") == "k == 0 ? 2 : k == 1 ? 4 : 0; }"
    assert told("cccs") == ""  # a strided result is processed in tiles
