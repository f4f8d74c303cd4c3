"""Loops and emitted text: they print and parse back, are pure values, and contain nothing of a model."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import in_order

import opgraph as og
from opgraph.codegen.kernel import host_source
from opgraph.codegen.literals import literal
from opgraph.codegen.sources import kernel_folder, spliced
from opgraph.loops.interpret import interpret
from opgraph.loops.layout import Variant, bind
from opgraph.loops.lower import lower
from opgraph.loops.text import parse_loop

TEXT = """
graph(x: f32[n,64], a: f32[64], b: bf16[n,64]) -> (y, s)
  s = Sigmoid(x)
  %0 = Multiply(x, s)
  %1 = Multiply(%0, a)
  %2: bf16[n,64] = TypeCast(%1)
  %3 = Add(%2, b)
  %4 = Clamp(%3, min=-0.0, max=inf)
  y = Elu(%4, alpha=0.1)
"""


def lowered(text: str = TEXT, **options: str):
    (partition,) = og.parse(text).get_partitions()
    return lower(partition, **options)


def test_loop_prints_and_parses_back() -> None:
    for rounding in ("store", "each"):
        loop = lowered(rounding=rounding).loop
        assert parse_loop(str(loop)) == loop


def test_unreadable_loop_is_refused() -> None:
    with pytest.raises(og.errors.ModelError):
        parse_loop("loop(parallel *)\n  x0 = load")


def test_loop_in_numpy_and_kernel_agree() -> None:
    g = og.parse(TEXT)
    low = lowered()
    rng = np.random.default_rng(0)
    b = og.parse(TEXT).inputs[2]
    feeds = {
        "x": rng.standard_normal((3, 64)).astype(np.float32),
        "a": rng.standard_normal(64).astype(np.float32),
        "b": rng.standard_normal((3, 64)).astype(np.float32).astype("bfloat16"),
    }
    assert b.dtype == "bf16"
    by_loop = interpret(low.loop, [feeds[t.name] for t in low.loads])
    by_kernel = og.compile(g)(feeds)
    for port, looped in zip(low.stores, by_loop, strict=True):
        np.testing.assert_allclose(by_kernel[port.name].astype(np.float64), looped.astype(np.float64), rtol=1e-2)


def test_unused_statements_are_removed() -> None:
    loop = lowered("graph(x: f32[4]) -> (y)\n  %1 = Sigmoid(x)\n  %0 = Exp(%1)\n  y = Multiply(x, %1)").loop
    assert [s.kind for s in loop.statements] == ["Swish"]


def test_emitted_text_is_the_same_in_every_process() -> None:
    code = f"""
import opgraph as og
f = og.compile(og.parse({TEXT!r}))
import hashlib; print(hashlib.sha256("".join(sorted(f.kernels.values())).encode()).hexdigest())
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout


def test_names_and_ids_do_not_reach_kernel_source() -> None:
    renamed = (
        TEXT.replace("(x:", '("*/ evil \\n #define":')
        .replace("(x, s)", '("*/ evil \\n #define", s)')
        .replace("(x)", '("*/ evil \\n #define")')
    )
    variant = Variant("cccccc"[: len(lowered().loop.loads) + 2], True)
    assert (
        host_source(in_order(lowered(renamed).loop, variant)).code
        == host_source(in_order(lowered().loop, variant)).code
    )


def test_every_line_of_arithmetic_ends_with_its_op() -> None:
    low = lowered()
    layout = bind(low.loop, [(3, 64), (64,), (3, 64)], [(64, 1), (1,), (64, 1)])
    source = host_source(in_order(low.loop, layout.variant))
    lines = source.code.splitlines()
    for line, tag in source.tags.items():
        assert lines[line - 1].rstrip().endswith(f"#{tag}")
    assert set(source.tags.values()) <= set(range(len(low.labels)))


def test_positions_are_64_bit() -> None:
    functor = host_source(in_order(lowered().loop, Variant("ccccc", True))).functor
    assert "element(og::i64 i)" in functor


@given(st.floats(width=32))
def test_f32_literals_are_exact(value: float) -> None:
    assert _read_back(literal(value, "float"), "f") == struct.pack("f", value) or math.isnan(value)


@given(st.floats())
def test_f64_literals_are_exact(value: float) -> None:
    assert _read_back(literal(value, "double"), "d") == struct.pack("d", value) or math.isnan(value)


def _read_back(text: str, code: str) -> bytes:
    text = text.strip("()").removesuffix("f") if "infinity" not in text and "nan" not in text else text
    if "infinity" in text:
        return struct.pack(code, -math.inf if text.startswith("-") else math.inf)
    if "nan" in text:
        return b""
    return struct.pack(code, float.fromhex(text) if "0x" in text else float(text))


def test_integer_literals_reach_the_ends_of_their_range() -> None:
    assert literal(-(2**63), "og::i64") == "og::i64(-9223372036854775807LL - 1)"
    assert literal(True, "float") == "true"


@pytest.mark.parametrize("kind", ["Equal", "NotEqual", "Greater", "GreaterEqual", "Less"])
@pytest.mark.parametrize(
    "dtype,a,b",
    [("s32", 10, -2), ("s64", 2**53 + 1, 2**53), ("u8", 3, 3), ("s8", -1, 1), ("f32", 0.5, 0.25), ("f16", -0.0, 0.0)],
)
def test_constants_are_compared_in_their_dtype(kind: str, dtype: str, a: float, b: float) -> None:
    graph = og.parse(f"""graph(x: {dtype}[3]) -> (y)
      const a: {dtype}[] = {a}
      const b: {dtype}[] = {b}
      c = {kind}(a, b)
      y = Select(c, x, a)""")
    (partition,) = graph.get_partitions()
    x = np.array([7, 8, 9]).astype(og.ir.dtypes.get(dtype).numpy)
    (looped,) = interpret(lower(partition).loop, [x])
    want = og.evaluate(graph, x=x, dtype=None)
    np.testing.assert_array_equal(og.compile(graph, device="cpu")(x=x), want)
    np.testing.assert_array_equal(looped, want)


def test_every_header_is_spliced_once_and_none_is_included() -> None:
    text = spliced("cpu/pointwise.h")
    assert "#include" not in text
    assert text.count("OG_FN float load(bf16 x)") == 1
    assert (kernel_folder() / "cpu/pointwise.h").is_file()
