"""CUDA kernels with much arithmetic: the text handles a few elements of a pack, with the bits of a whole pack."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import nvrtc
import pytest
import sass
from agreement import agree
from emulator import FakeCupy
from mixed_graph import MIXED, bound, feeds
from schedules import pointwise

import opgraph as og
from opgraph.bench.entries import ENTRIES
from opgraph.codegen import prune_source
from opgraph.codegen.emitter import Emitter
from opgraph.codegen.kernel import cuda_source
from opgraph.codegen.sources import spliced
from opgraph.schedule.cuda import ROLLED_COST, SINGLES_COST

#: Operands of 1 to 8 bytes, one number for all elements, and a result of each size.
FLAT = """graph(x: f32[n,m], h: f16[n,m], b: bf16[n,m], k: s8[n,m], a: f32[]) -> (y, z, w, up, same)
  up = Greater(x, 0.0)
  %0 = Select(up, x, a)
  %1: f32[n,m] = TypeCast(h)
  %2: f32[n,m] = TypeCast(b)
  %3: f32[n,m] = TypeCast(k)
  %4 = Multiply(%0, %1)
  y = Add(%4, %3)
  z: f16[n,m] = TypeCast(%4)
  w: bf16[n,m] = TypeCast(%2)
  same = Identity(k)"""
WIDE = """graph(x: f64[n,m], k: s32[n,m]) -> (y, c)
  %0: f64[n,m] = TypeCast(k)
  y = Multiply(x, %0)
  c = Greater(y, x)"""
SUMS = """graph(x: {t}[n,m], a: {t}[], l: {t}[m], r: {t}[n,1]) -> (y, s, c, q)
  y = Multiply(x, a)
  %1 = Multiply(y, x)
  s = SumTo(%1, a)
  q = SumTo(y, r)
  c = SumTo(%1, l)"""


@pytest.fixture
def in_groups(cupy: FakeCupy, no_cache: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, np.ndarray]]:
    """The results of a graph whose text handles `group` elements of a pack; 0: all."""

    def run(g: og.Graph, data: dict[str, np.ndarray], group: int, apart: bool = False) -> dict[str, np.ndarray]:
        monkeypatch.setattr("opgraph.schedule.cuda.group_of", lambda values, vector: min(group, vector))
        given = {name: cupy.asarray(a) for name, a in data.items()}
        if apart:
            given = {name: cupy.asarray(np.repeat(a, 2, axis=1))[:, ::2] for name, a in data.items()}
        f = og.compile(g, device="cuda")
        got = f(given)
        moved = [text for text in f.kernels.values() if "struct Packs" in text]
        assert moved and all(("struct Held" in text) == (group > 0) for text in moved)
        return {name: a.host for name, a in got.items()}

    return run


@pytest.mark.parametrize("shape", [(1, 3), (3, 1024), (5, 1303)], ids=str)
@pytest.mark.parametrize("text", [FLAT, MIXED, WIDE], ids=["flat", "rows", "wide"])
def test_any_group_size_gives_the_same_bits(
    text: str, shape: tuple[int, int], in_groups: Callable[..., dict[str, np.ndarray]]
) -> None:
    """Whole tiles, packs of a last tile, and its remainder."""
    g = og.parse(text).finalize()
    data = feeds(g, shape)
    expected = in_groups(g, data, 0)
    for group in (1, 2, 4, 8):
        got = in_groups(g, data, group)
        assert [name for name in expected if not agree(got[name], expected[name])] == [], group


def test_strided_elements_in_groups_give_the_same_bits(in_groups: Callable[..., dict[str, np.ndarray]]) -> None:
    g = og.parse("graph(x: f32[n,m], b: bf16[n,m]) -> (y, z)\n  y = Multiply(x, 3.0)\n  z = Abs(b)").finalize()
    data = feeds(g, (33, 70))
    expected = in_groups(g, data, 0)
    assert all(agree(in_groups(g, data, 2, apart=True)[name], a) for name, a in expected.items())


@pytest.mark.parametrize(("dtype", "group"), [("f32", 2), ("bf16", 4)])
def test_grouped_sums_have_the_bits_of_whole_pack_sums(
    dtype: str, group: int, in_groups: Callable[..., dict[str, np.ndarray]]
) -> None:
    """In whole packs, and in the remainder of a row, which goes one by one in both."""
    g = og.parse(SUMS.format(t=dtype)).finalize()
    data = feeds(g, (37, 148))
    data["l"], data["a"] = data["l"].reshape(-1)[:1].repeat(148), data["a"].reshape(-1)[0]
    expected, got = (in_groups(g, data, n) for n in (0, group))
    assert [name for name in expected if got[name].tobytes() != expected[name].tobytes()] == []


def test_grouped_total_sum_is_right_for_any_length(in_groups: Callable[..., dict[str, np.ndarray]]) -> None:
    text = "graph(x: f32[n], a: f32[]) -> (y, s)\n  y = Multiply(x, a)\n  %1 = Exp(y)\n  s = SumTo(%1, a)"
    g = og.parse(text).finalize()
    for n in (3, 1027):
        data = {"x": np.random.default_rng(n).normal(0, 1, n).astype(np.float32), "a": np.asarray(0.5, np.float32)}
        got = in_groups(g, data, 2)
        assert np.array_equal(got["y"], data["x"] / 2)
        np.testing.assert_allclose(got["s"], np.exp(data["x"].astype(np.float64) / 2).sum(), rtol=2e-7)


# -- the kernels concerned, and their machine code ---------------------------------------------------------------------


def graph(name: str, direction: str, dtype: str) -> og.Graph:
    entry = next(e for e in ENTRIES if e.name == name)
    return entry.graph((1 << 20,), dtype, direction)


def test_costly_kernels_are_grouped_to_limit_nvrtc_time() -> None:
    seen = set()
    for name in ("swish", "gelu", "chain of 12", "fractional (NAF1)", "chain of 60"):
        for dtype in ("f32", "bf16", "f64"):
            loop, layout = bound(graph(name, "forward", dtype))
            cost = Emitter(loop, layout.variant).cost
            schedule = pointwise(loop, layout)
            assert (schedule.group > 0) == (ROLLED_COST < cost <= SINGLES_COST)
            assert schedule.group == 0 or schedule.vector % schedule.group == 0
            seen.add((name, dtype, schedule.group))
    assert {("swish", "f32", 0), ("chain of 60", "f32", 2), ("chain of 60", "f64", 1)} <= seen


@pytest.mark.skipif(
    nvrtc.library() is None or nvrtc.disassembler() is None,
    reason="pip install nvidia-cuda-nvrtc nvidia-cuda-nvdisasm",
)
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "most"), [("f32", 1400), ("bf16", 1400), ("f64", 1600)])
def test_the_machine_code_is_short_and_stays_in_registers(dtype: str, most: int, arch: str) -> None:
    """NVRTC takes some 60 us for an instruction; a chain of 60 had 3000 to 5600."""
    loop, layout = bound(graph("chain of 60", "forward", dtype))
    schedule = pointwise(loop, layout)
    listing = nvrtc.disassemble(nvrtc.compile_text(cuda_source(schedule).code, arch, nvrtc.OPTIONS))
    (program,) = sass.programs(listing).values()
    assert len(program.instructions) < most
    assert not [x for x in program.instructions if x.kind in ("LDL", "STL")]
    if arch != "sm_90":
        return  # the main path is derived from NVRTC's code for this one
    path = program.main_path((schedule.unroll, schedule.vector // schedule.group))
    moved = [x.bytes_moved for x in path if x.kind in ("LDG", "STG")]
    size = {"f32": 4, "bf16": 2, "f64": 8}[dtype]
    assert sum(n for n in moved if n == 16) == 3 * size * schedule.vector * schedule.unroll


def test_sass_main_path_multiplies_loop_bodies() -> None:
    text = """\
\t.section\t.text.og_a,"ax",@progbits
        /*0000*/                   S2R R2, SR_CTAID.X ;
.L_x_0:
        /*0010*/              @P0 BRA `(.L_x_2) ;
        /*0020*/                   LDG.E R8, desc[UR4][R2.64] ;
.L_x_2:
        /*0030*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
.L_x_1:
        /*0040*/                   FADD R8, R8, R2 ;
        /*0050*/              @P1 BRA `(.L_x_1) ;
        /*0060*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*0070*/              @P2 BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
//--------------------- .nv.info
"""
    program = sass.programs(text)["og_a"]
    path = [x.kind for x in program.main_path((2, 3))]
    assert (path.count("FADD"), path.count("LDG"), path.count("STG"), len(path)) == (6, 2, 2, 2 + 2 * (4 + 6))
    with pytest.raises(ValueError, match="2 loops, 1 expected"):
        program.main_path((2, 1))


# -- parts of kernels/ in a kernel's text ------------------------------------------------------------------------------


def test_source_holds_only_declarations_its_kernel_uses() -> None:
    loop, layout = bound(graph("hardswish", "forward", "f32"))
    text = cuda_source(pointwise(loop, layout)).code
    assert len(text) < len(spliced("cuda/pointwise.cuh")) / 4
    assert "hard_swish(" in text and "load_pack(" in text
    assert not [name for name in ("gelu_erf(", "philox(", "struct floats", "lgamma") if name in text]


def test_every_declaration_in_kernels_is_found_by_name() -> None:
    for skeleton in (
        "cuda/pointwise.cuh",
        "cuda/pointwise_scalar.cuh",
        "cuda/pointwise_unrolled.cuh",
        "cuda/tiled_sums.cuh",
        "cuda/inner_reduction.cuh",
    ):
        parts = prune_source._parts(skeleton)
        nameless = [p.text for p in parts if not p.names and not p.frame and p.text[0] != "#"]
        assert [t for t in nameless if not t.startswith(("static_assert", "using namespace"))] == []
        named = {name for p in parts for name in p.names}
        functions = {f for p in parts for f in re.findall(r"^(?:template <.*> )?OG_FN \w+ (\w+)\(", p.text)}
        assert len(functions) > 100 and functions <= named


def test_pruning_keeps_transitively_used_declarations() -> None:
    text = prune_source.needed("cuda/pointwise.cuh", "og::gelu_erf(x)")
    assert "gelu_erf(" in text and "exp_tail(" in text and "philox" not in text.lower()
    assert text.count("namespace og {") == text.count("}  // namespace og")
    assert text.count("#if") == text.count("#endif")
