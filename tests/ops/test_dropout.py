"""Dropout: its random bits, which depend only on the position, and that nothing is kept to draw them again."""

from __future__ import annotations

import ctypes
import re
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import nvrtc
import pytest
from emulator import FakeArray, FakeCupy
from layouts import CASES, Case
from schedules import cuda_launches, pointwise

import opgraph as og
from opgraph.codegen.kernel import cuda_source
from opgraph.codegen.sources import spliced
from opgraph.errors import Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import row_major
from opgraph.loops.interpret import interpret
from opgraph.loops.layout import bind
from opgraph.loops.lower import Lowered, lower
from opgraph.loops.text import parse_loop
from opgraph.ops.dropout import philox, random_word
from opgraph.runtime import threads
from opgraph.runtime.cpu_compiler import find_compiler
from opgraph.runtime.fallback import InterpretedKernel
from opgraph.schedule.cuda_tiles import packed_vector
from opgraph.schedule.merged_axes import merged_axes
from opgraph.transforms.saved import training_plan

SEED, OFFSET = -(2**61) + 12345, 2**40 + 7
#: Random123 1.14, kat_vectors, philox4x32 of 10 rounds: counter, key, result.
PUBLISHED = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)
#: The ends of blocks, of 32 bits, and of 63 bits.
PLACES = [0, 1, 2, 3, 4, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**33 + 2, 2**40 + 3, 2**62 + 1, 2**63 - 1]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def word(position: int, seed: int, offset: int) -> int:
    """The result of random_word, in Python integers, from the description."""
    block = position - position % 4
    low = 2**32
    a, b, c, d = offset % low, (offset >> 32) % low, block % low, (block >> 32) % low
    k0, k1 = seed % low, (seed >> 32) % low
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q // low) ^ b ^ k0, q % low, (p // low) ^ d ^ k1, p % low
        k0, k1 = (k0 + 0x9E3779B9) % low, (k1 + 0xBB67AE85) % low
    return (a, b, c, d)[position % 4]


def dropped(shape: Any = None, dtype: str = "f32", p: float | None = None) -> og.Graph:
    """y, mask = Dropout(x)."""
    g = og.Graph()
    x, seed, offset = g.input("x", dtype, shape), g.input("seed", "s64", (1,)), g.input("offset", "s64", ())
    g.output(*g.add_op("Dropout", x, seed, offset, g.input("p", "f32", ()) if p is None else p, name="y", outputs=2))
    return g.finalize()


def drawn(p: float = 0.4) -> dict[str, Any]:
    return {"seed": np.array([SEED]), "offset": np.array(OFFSET), "p": np.float32(p)}


def mask(shape: tuple[int, ...], p: float = 0.4) -> np.ndarray:
    """The mask by the reference alone."""
    size = int(np.prod(shape))
    found = random_word(np.where, np.arange(size), np.array([SEED]), np.array([OFFSET]))
    return (found > 4294967295.0 * np.float64(np.float32(p))).reshape(shape)


def random(shape: tuple[int, ...], dtype: str = "f32", seed: int = 0) -> np.ndarray:
    made = np.random.default_rng(seed).uniform(1, 2, shape)  # never 0, so that dropped values are visible
    return np.asarray(made).astype(dtypes.get(dtype).numpy)


def both(result: dict[str, Any]) -> tuple[Any, Any]:
    y, m = result.values()
    return y, m


def lowered(graph: og.Graph) -> Lowered:
    (partition,) = graph.finalize().get_partitions()
    return lower(partition)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The C++ functions themselves, compiled."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder: Path = tmp_path_factory.mktemp("philox")
    (folder / "philox.cpp").write_text(
        spliced("math/philox.h")
        + """
extern "C" og::u32 word(og::i64 at, og::i64 seed, og::i64 offset) { return og::random_word(at, seed, offset); }
extern "C" bool keeps(og::i64 at, og::i64 seed, float p) { return og::dropout_keeps(at, seed, 0, p); }
extern "C" void block(og::u32* x) {
  const og::Philox y = og::philox({x[0], x[1], x[2], x[3]}, x[4], x[5]);
  x[0] = y.a; x[1] = y.b; x[2] = y.c; x[3] = y.d;
}
"""
    )
    command = [*compiler.command, "-std=c++17", "-O2", "-fPIC", "-shared", "-o", str(folder / "philox.so")]
    subprocess.run([*command, str(folder / "philox.cpp")], check=True)
    library = ctypes.CDLL(str(folder / "philox.so"))
    library.word.argtypes, library.word.restype = [ctypes.c_int64] * 3, ctypes.c_uint32
    library.keeps.argtypes, library.keeps.restype = [ctypes.c_int64] * 2 + [ctypes.c_float], ctypes.c_bool
    return library


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counter", "key", "result"), PUBLISHED)
def test_philox_gives_the_published_words(compiled: ctypes.CDLL, counter: str, key: str, result: str) -> None:
    torch = pytest.importorskip("torch")
    of_numpy = philox(*(tuple(np.array([w]) for w in words(t)) for t in (counter, key)))
    of_torch = philox(*(tuple(torch.tensor(w) for w in words(t)) for t in (counter, key)))
    own = (ctypes.c_uint32 * 6)(*words(counter), *words(key))
    compiled.block(own)
    assert tuple(int(w[0]) for w in of_numpy) == words(result)
    assert tuple(int(w) for w in of_torch) == words(result)
    assert tuple(own[:4]) == words(result)


@pytest.mark.parametrize("seed", [0, 1, -1, SEED, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("offset", [0, 2**32, OFFSET])
def test_random_words_match_the_description_beyond_32_bits(compiled: ctypes.CDLL, seed: int, offset: int) -> None:
    torch = pytest.importorskip("torch")
    expected = [word(at, seed, offset) for at in PLACES]
    assert [compiled.word(at, seed, offset) for at in PLACES] == expected
    places = np.array(PLACES)
    assert random_word(np.where, places, np.array([seed]), np.array([offset])).tolist() == expected
    of_torch = random_word(torch.where, torch.tensor(PLACES), torch.tensor(seed), torch.tensor([offset]))
    assert of_torch.tolist() == expected


@pytest.mark.parametrize("p", [0.0, -0.0, 1e-9, 0.25, 0.5, 1 - 2**-24, 1.0, 2.0, -1.0, float("nan"), float("inf")])
def test_keep_decision_compares_as_in_onednn(compiled: ctypes.CDLL, p: float) -> None:
    held = max(min(np.float32(p), 1.0), 0.0) if p == p else p
    expected = [word(at, 5, 0) > 4294967295.0 * np.float64(held) for at in range(64)]
    assert [compiled.keeps(at, 5, p) for at in range(64)] == expected
    _, m = both(og.evaluate(dropped((64,)), x=random((64,)), seed=np.array([5]), offset=0, p=np.float32(p), dtype=None))
    assert m.tolist() == expected


def test_random_word_equal_to_the_bound_is_dropped(compiled: ctypes.CDLL) -> None:
    torch = pytest.importorskip("torch")
    record = opdef.get("DropoutMask", where="test")
    assert record.reference is not None and record.torch is not None
    # Below 2^24 an f32 probability distinguishes neighbouring words.
    small = [(at, w) for at in range(4096) if (w := word(at, 5, 0)) < 2**24]
    assert small
    for at, w in small:
        for p, kept in [(np.float32((w + 0.5) / (2**32 - 1)), 0), (np.float32((w - 0.5) / (2**32 - 1)), 1)]:
            assert compiled.keeps(at, 5, p) == kept
            given = (np.array([5]), np.array([0]), np.array([p]))
            assert record.reference(*given, position=np.array([at])).tolist() == [kept]
            tensors = [torch.from_numpy(a) for a in given]
            assert record.torch(torch, *tensors, position=torch.tensor([at])).tolist() == [kept]


def test_kernel_mask_equals_the_described_mask() -> None:
    x = random((5, 13))
    y, m = both(og.compile(dropped((5, 13)))(x=x, **drawn(0.4)))
    kept = np.array([word(at, SEED, OFFSET) > 4294967295.0 * float(np.float32(0.4)) for at in range(65)]).reshape(5, 13)
    np.testing.assert_array_equal(m, kept.astype(np.uint8), strict=True)
    scale = np.float32(1) / (np.float32(1) - np.float32(0.4))
    np.testing.assert_array_equal(y, np.where(kept, x * scale, np.float32(0)), strict=True)


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0, 1.5, -0.5, float("nan")])
def test_kernel_interpreters_and_reference_agree(dtype: str, p: float) -> None:
    g, x = dropped((7, 30), dtype), random((7, 30), dtype)
    x.flat[:9], x.flat[9:18], x.flat[18:27] = np.nan, np.inf, -0.0
    feeds = {"x": x, **drawn(p)}
    y, m = both(og.compile(g)(feeds))
    (partition,) = g.get_partitions()
    with warnings.catch_warnings(action="ignore"):
        fallback = InterpretedKernel(lower(partition), partition)
    for with_torch in (True, False):
        fallback._with_torch = with_torch
        got = fallback([feeds[str(t.name)] for t in partition.input_ports])
        np.testing.assert_array_equal(got[0].astype(np.float64), y.astype(np.float64))
        np.testing.assert_array_equal(got[1], m, strict=True)
    expected, kept = both(og.evaluate(g, feeds, dtype=None))
    np.testing.assert_array_equal(kept, m, strict=True)
    np.testing.assert_array_equal(expected.astype(np.float64), y.astype(np.float64))
    assert not y[m == 0].astype(bool).any()  # also where x is NaN or infinite
    if p >= 1 or p != p:
        assert not m.any()
    if p <= 0:
        assert m.all()


@pytest.mark.parametrize("p", [0.001, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_kept_fraction_matches_the_probability(p: float) -> None:
    n = 1 << 20
    f = og.compile(dropped((None,)))
    masks = []
    for seed, offset in [(0, 0), (1, 0), (0, 1), (SEED, OFFSET)]:
        y, m = both(f(x=np.ones(n, np.float32), seed=np.array([seed]), offset=np.array(offset), p=np.float32(p)))
        kept = m.astype(np.float64) - (1 - p)
        sigma = np.sqrt(p * (1 - p))
        assert abs(kept.mean()) < 5 * sigma / np.sqrt(n)
        assert abs(y.mean(dtype=np.float64) - 1) < 5 * sigma / (1 - p) / np.sqrt(n) + 1e-6
        for step in (1, 2, 4, 1024):  # neighbours, blocks and rows are independent
            assert abs((kept[:-step] * kept[step:]).mean()) < 5 * sigma**2 / np.sqrt(n - step)
        masks.append(kept)
    for i in range(4):
        for j in range(i):
            assert abs((masks[i] * masks[j]).mean()) < 5 * sigma**2 / np.sqrt(n), (i, j)


def test_constant_seed_beyond_float_precision_is_exact() -> None:
    x, seed = random((40, 9)), 2**62 + 1
    g = og.Graph()
    g.output(g.add_op("Dropout", g.input("x", "f32", (40, 9)), seed, 3, 0.5, name="y"))
    given, _ = both(og.compile(dropped((40, 9)))(x=x, seed=np.array([seed]), offset=np.array(3), p=np.float32(0.5)))
    np.testing.assert_array_equal(og.compile(g)(x=x), given)
    np.testing.assert_array_equal(og.evaluate(g, x=x, dtype=None), given)
    assert "4611686018427387905LL" in next(iter(og.compile(g).kernels.values()))


def test_seeds_and_probabilities_may_broadcast() -> None:
    g = og.Graph()
    x, seed = g.input("x", "f32", (6, 50)), g.input("seed", "s64", (6, 1))
    g.output(*g.add_op("Dropout", x, seed, 0, g.input("p", "f32", (50,)), name="y", outputs=2))
    data, p = random((6, 50)), np.linspace(0, 1, 50).astype(np.float32)
    y, m = both(og.compile(g)(x=data, seed=np.arange(6)[:, None], p=p))
    for row in range(6):
        kept = [word(50 * row + i, row, 0) > 4294967295.0 * float(p[i]) for i in range(50)]
        assert m[row].tolist() == kept
    np.testing.assert_array_equal(y, og.evaluate(g, x=data, seed=np.arange(6)[:, None], p=p, dtype=None)["y"])


# -- positions --------------------------------------------------------------------------------------------------------


def chain(dtype: str, x: Any, a: Any) -> og.Graph:
    """y, mask = Dropout(x a)"""
    g = og.Graph()
    product = g.add_op("Multiply", g.input("x", dtype, x), g.input("a", dtype, a))
    drawn_from = [g.input("seed", "s64", (1,)), g.input("offset", "s64", ()), g.input("p", "f32", ())]
    g.output(*g.add_op("Dropout", product, *drawn_from, name="y", outputs=2))
    return g.finalize()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dropout_mask_is_the_same_in_every_layout(cupy: FakeCupy, case: Case, dtype: str) -> None:
    arrays = random(case.x, dtype), random(case.a, dtype, 1)
    x, a = case.views(*arrays)
    g = chain(dtype, x.shape, a.shape)
    y, m = both(og.compile(g)(x=x, a=a, **drawn()))
    shape = np.broadcast_shapes(x.shape, a.shape, (1,))  # the seed's one axis
    np.testing.assert_array_equal(m, mask(shape).astype(np.uint8), strict=True)
    assert (np.asarray(y, np.float64) != 0).tolist() == mask(shape).tolist()
    on_gpu = case.views(*(cupy.asarray(v) for v in arrays))
    rest = {name: cupy.asarray(v) for name, v in drawn().items()}
    made, kept = both(og.compile(chain(dtype, x.shape, a.shape), device="cuda")(x=on_gpu[0], a=on_gpu[1], **rest))
    np.testing.assert_array_equal(kept.host, m)
    assert made.host.tobytes() == np.ascontiguousarray(y).tobytes()


@pytest.mark.parametrize("case", [c for c in CASES if c.x and 0 not in c.x], ids=str)
def test_dropout_mask_is_the_same_with_64_bit_indices(
    cupy: FakeCupy,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opgraph.schedule.cuda.NARROW", 1)
    x, a = case.views(*(cupy.asarray(random(s)) for s in (case.x, case.a)))
    rest = {name: cupy.asarray(v) for name, v in drawn().items()}
    _, m = both(og.compile(chain("f32", x.shape, a.shape), device="cuda")(x=x, a=a, **rest))
    np.testing.assert_array_equal(m.host, mask(m.shape))


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": np.asfortranarray,
    "every second": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "backwards": lambda x: x[::-1, ::-1],
    "rows broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "one number": lambda x: np.broadcast_to(x[:1, :1], x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_dropout_mask_ignores_strides(view: str) -> None:
    g = dropped((None, None))
    f, x = og.compile(g), VIEWS[view](random((70, 90)))
    outs = {"y": np.empty((90, 70), np.float32).T, f"t{g.outputs[1].id}": np.empty((70, 180), np.uint8)[:, ::2]}
    y, m = both(f(x=x, **drawn(), out=outs))
    np.testing.assert_array_equal(m, mask((70, 90)))
    np.testing.assert_array_equal(y != 0, mask((70, 90)))
    again = f.bind(x=x, **drawn(), out=outs)
    m[...] = 7
    again()
    np.testing.assert_array_equal(m, mask((70, 90)))


@pytest.mark.parametrize("shape", [(60,), (1, 60, 1), (3, 20), (2, 1, 5, 6), (60, 1), (5, 3, 2, 2)], ids=str)
def test_dropout_mask_depends_only_on_row_major_position(shape: tuple[int, ...]) -> None:
    y, m = both(og.compile(dropped(shape))(x=random(shape), **drawn()))
    assert m.ravel().tolist() == mask((60,)).tolist()
    assert y.shape == m.shape == shape


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_dropout_mask_ignores_the_number_of_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    pytest.importorskip("torch")
    f, (_, parallel) = og.compile(chain("f32", (None, None), (None, 1))), threads.team(1 << 30)
    x, a = random((1000, 300)), random((1000, 1), seed=1)
    for address in (None, parallel):
        monkeypatch.setattr(threads, "team", lambda size, team=(count, address): team)
        _, m = both(f(x=x, a=a, **drawn()))
        np.testing.assert_array_equal(m, mask((1000, 300)))


#: Shapes of the data and of the sums: rows, columns, short rows that are joined, several boxes and tiles.
SUMS = [
    ((300, 70), (70,)), ((300, 70), (300, 1)), ((70001,), ()), ((64, 8, 4, 4), (8, 1, 1)), ((40, 16, 7, 7), (16, 1, 1)),
    ((5000, 8), (8,)), ((6, 5, 130), (5, 1)), ((500, 3), (500, 1)), ((12, 8), (12, 8)),
]  # fmt: skip


def summing(shape: Any, to: Any) -> og.Graph:
    """z, mask = Dropout(x a), and the sum of z to the shape of a."""
    g = og.Graph()
    x, a = g.input("x", "f32", shape), g.input("a", "f32", to)
    drawn_from = [g.input("seed", "s64", (1,)), g.input("offset", "s64", ()), g.input("p", "f32", ())]
    z, m = g.add_op("Dropout", g.add_op("Multiply", x, a), *drawn_from, name="z", outputs=2)
    g.output(g.add_op("SumTo", z, a, name="s"), z, m)
    return g.finalize()


@pytest.mark.parametrize(("shape", "to"), SUMS, ids=str)
@pytest.mark.parametrize("engine", ["cpu", "cuda"])
def test_dropout_mask_is_the_same_in_a_loop_with_sums(
    cupy: FakeCupy,
    shape: tuple[int, ...],
    to: tuple[int, ...],
    engine: str,
) -> None:
    g = summing(shape, to)
    assert len(g.get_partitions()) == 1
    feeds = {"x": random(shape), "a": random(to, seed=1), **drawn()}
    if engine == "cuda":
        made = og.compile(summing(shape, to), device="cuda")({k: cupy.asarray(v) for k, v in feeds.items()})
        found = [v.host for v in made.values()]
    else:
        found = list(og.compile(g)(feeds).values())
    truth = list(og.evaluate(g, feeds).values())
    np.testing.assert_array_equal(found[2], mask(shape))
    np.testing.assert_array_equal(found[1] != 0, mask(shape))
    np.testing.assert_allclose(found[0], truth[0], rtol=1e-5)
    assert found[0].shape == to


def test_short_rows_are_merged_with_dropout() -> None:
    loop = lowered(summing((64, 8, 4, 4), (8, 1, 1))).loop
    shapes = [(64, 8, 4, 4) if x.name == "x0" else (8, 1, 1) if x.name == "x1" else (1,) for x in loop.loads]
    layout = bind(loop, shapes, [row_major(s) for s in shapes])
    long = merged_axes(layout, len(loop.loads))
    assert long is not None and long.short == 16
    (place,) = [i for i, x in enumerate(loop.loads) if x.is_position]
    assert long.layout.strides[place] == row_major(long.layout.dims)


def test_dropout_positions_exceed_32_bits() -> None:
    loop = lowered(chain("f32", (None, None), (None, None))).loop
    shapes = [(2**20, 2**14) if x.dtype == "f32" and i < 2 else () for i, x in enumerate(loop.loads)]
    strides = [(1, 2**20) if i == 0 else row_major(s) for i, s in enumerate(shapes)]
    layout = bind(loop, shapes, strides)
    (place,) = [i for i, x in enumerate(loop.loads) if x.is_position]
    assert layout.dims == (2**20, 2**14) and layout.strides[place] == (2**14, 1)
    schedule = pointwise(loop, layout)
    assert not schedule.narrow
    text = cuda_source(schedule).functor
    assert f"og::i64 x{place};" in text and f"x{place} = offset[{place}];" in text


def test_position_operand_does_not_shorten_packs() -> None:
    loop = lowered(dropped((None, None), "bf16", 0.5)).loop
    assert any(x.is_position for x in loop.loads)
    shapes = [(64, 96) if x.dtype == "bf16" else () for x in loop.loads]
    layout = bind(loop, shapes, [row_major(s) for s in shapes])
    assert packed_vector(loop, layout, 16) == 16  # by the mask's bytes; twice 16 bytes of bf16


def test_dropout_of_no_elements() -> None:
    for shape in [(0,), (3, 0, 2)]:
        y, m = both(og.compile(dropped(shape))(x=np.zeros(shape, np.float32), **drawn()))
        assert y.shape == m.shape == shape


# -- graphs, loops ----------------------------------------------------------------------------------------------------


def test_exp_and_dropout_are_one_partition_as_in_onednn() -> None:
    g = og.parse(
        """graph(x: f32[64,512,28,28], seed: s64[], offset: s64[], p: f32[]) -> (y)
      e = Exp(x)
      y = Dropout(e, seed, offset, p)
    """
    )
    (partition,) = g.get_partitions()
    assert [op.kind for op in partition.ops] == ["Exp", "Dropout"] and partition.kind == "fused"
    assert "DropoutMask" not in str(lower(partition).loop)  # an unused mask costs nothing


def test_both_outputs_print_and_parse_back() -> None:
    g = dropped(("n", 5))
    assert og.parse(str(g)) == g and len(g.outputs) == 2
    assert ": u8" not in str(g)  # the reader infers the types of both
    assert [(t.dtype, t.dims) for t in g.outputs] == [("f32", ("n", 5)), ("u8", ("n", 5))]
    loop = lowered(g).loop
    assert "x4 = load s64 align=position" in str(loop)
    assert parse_loop(str(loop)) == loop


def test_interpreter_needs_no_array_for_positions() -> None:
    loop = lowered(dropped((3, 5))).loop
    arrays = {"x": random((3, 5)), **drawn()}
    given = [arrays["x"], arrays["seed"], arrays["offset"], arrays["p"], None]
    _, m = interpret(loop, given)
    np.testing.assert_array_equal(m, mask((3, 5)))


def test_mask_alone_computes_no_data() -> None:
    g = og.Graph()
    x = g.input("x", "f32", (6, 9))
    _, m = g.add_op("Dropout", g.add_op("Exp", x), SEED, OFFSET, 0.4, outputs=2)
    g.set_outputs([m])
    loop = lowered(g).loop
    assert [s.kind for s in loop.statements] == ["DropoutMask"] and "x0" not in loop.reads()
    np.testing.assert_array_equal(og.compile(g)(x=random((6, 9))), mask((6, 9)))


def test_dropout_is_fused_only_in_its_own_shape() -> None:
    text = """graph(x: f32[64,8], a: f32[8]) -> (z)
      y = Dropout(a, 5, 0, 0.5)
      z = Add(x, y)
    """
    assert len(og.parse(text).get_partitions()) == 2
    assert "depends on the place in its own shape" in str(og.parse(text).explain())
    smaller = og.parse(text.replace("Dropout(a, 5, 0, 0.5)", "Dropout(x, 5, 0, q)").replace("Add(x, y)", "Add(y, a)"
        ).replace("[8])", "[8], q: f32[8])"))  # fmt: skip
    assert len(smaller.get_partitions()) == 1


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is missing: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_kernels_with_masks_and_sums_compile(arch: str) -> None:
    for shape, to in [((300, 70), (70,)), ((300, 70), (300, 1))]:
        loop = lowered(summing(shape, to)).loop
        shapes = [shape if x.name == "x0" else to if x.name == "x1" else (1,) for x in loop.loads]
        layout = bind(loop, shapes, [row_major(s) for s in shapes])
        for launch in cuda_launches(loop, layout):
            assert nvrtc.compile_text(launch.source.code, arch, nvrtc.OPTIONS)
    for x, a in [((4, 96), (4, 96)), ((96, 64), (96, 1))]:
        loop = lowered(chain("bf16", x, a)).loop
        shapes = [x, a, *[(1,)] * (len(loop.loads) - 2)]
        layout = bind(loop, shapes, [row_major(s) for s in shapes])
        source = cuda_source(pointwise(loop, layout))
        assert nvrtc.compile_text(source.code, arch, nvrtc.OPTIONS)


# -- training ---------------------------------------------------------------------------------------------------------


def squared() -> og.Graph:
    g = og.Graph()
    x, seed = g.input("x", "f64", (40, 30)), g.input("seed", "s64", (1,))
    g.output(g.add_op("Dropout", g.add_op("Multiply", x, x), seed, OFFSET, 0.4, name="y"))
    return g.finalize()


def test_gradient_draws_the_same_mask() -> None:
    g = og.gradient(squared(), ["x"])
    x, d, kept = random((40, 30), "f64"), random((40, 30), "f64", 1), mask((40, 30))
    feeds = {"x": x, "seed": np.array([SEED]), "d_y": d}
    scale = 1 / (1 - np.float64(np.float32(0.4)))
    np.testing.assert_allclose(og.compile(g)(feeds), 2 * x * d * kept * scale, rtol=1e-15)
    second = og.gradient(g, ["x", "d_y"])
    made = og.compile(second)({**feeds, "d_d_x": x})
    np.testing.assert_allclose(made["d_x"], 2 * x * d * kept * scale, rtol=1e-15)
    np.testing.assert_allclose(made["d_d_y"], 2 * x * x * kept * scale, rtol=1e-15)


def test_dropout_saves_only_seed_offset_and_probability() -> None:
    plan = training_plan(dropped((64, 64)), ["x"])
    assert {(s.name, s.role, s.bytes) for s in plan.saved} == {
        ("seed", "input", 8),
        ("offset", "input", 8),
        ("p", "input", 4),
    } | {(s.name, s.role, s.bytes) for s in plan.saved if s.role == "shape"}
    assert [op.kind for op in plan.backward.ops] == ["Dropout"]
    under = training_plan(squared(), ["x"])
    assert {(s.name, s.bytes) for s in under.saved} == {("x", 40 * 30 * 8), ("seed", 8)}


def test_gradient_of_the_probability_is_refused_with_a_reason() -> None:
    with pytest.raises(Unimplemented, match="Dropout has no gradient with respect to probability: the mask jumps"):
        og.gradient(dropped((4,)), ["p"])


def test_fused_torch_function_draws_the_same_mask() -> None:
    torch = pytest.importorskip("torch")
    from opgraph.torch.fused.composite import composite
    from opgraph.torch.fused.op import FusedOp

    g, x = dropped((None, None)), torch.tensor(random((9, 33)), requires_grad=True)
    given = [x, torch.tensor([SEED]), torch.tensor(OFFSET), torch.tensor(0.4)]
    y, m = FusedOp(g)(*given)
    np.testing.assert_array_equal(m.numpy(), mask((9, 33)))
    (grad,) = torch.autograd.grad(y.sum(), x)
    np.testing.assert_array_equal(grad.numpy() != 0, mask((9, 33)))
    plain = composite(g, [t.detach() for t in given], "store")
    assert torch.equal(plain[0], y.detach()) and torch.equal(plain[1], m)


def test_record_with_several_outputs_must_define_each() -> None:
    record = opdef.get("Dropout", where="test")
    fields = {name: getattr(record, name) for name in record.__slots__}
    for also, message in [
        ({}, re.escape("its outputs after the first are ['mask']")),
        ({"mask": "DropoutMask(seed, offset, probability, other)"}, "not one op over its inputs"),
        ({"mask": "DropoutMask(Add(seed, 1), offset, probability, src)"}, "not one op over its inputs"),
        ({"mask": "src"}, "not one op over its inputs"),
    ]:
        with pytest.raises(ValueError, match=message):
            type(record)(**{**fields, "also": also})


def test_onnx_export_of_dropout_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from opgraph import onnx

    with pytest.raises(Unimplemented, match="Dropout"):
        onnx.save(dropped((4,)), tmp_path / "model.onnx")


def test_dropout_on_the_emulated_gpu_has_the_same_mask(cupy: FakeCupy) -> None:
    feeds = {"x": random((9, 31)), **drawn()}
    y, m = both(og.compile(dropped((None, None)), device="cuda")({k: cupy.asarray(v) for k, v in feeds.items()}))
    assert isinstance(y, FakeArray)
    np.testing.assert_array_equal(m.host, mask((9, 31)))


def test_dropout_of_one_element_rows_agrees_with_the_reference() -> None:
    text = "graph(x: f32[31,1], s: s64[], o: s64[], p: f32[]) -> (y)\n  d = Dropout(x, s, o, p)\n"
    graph = og.parse(text + "  m = ReduceMax(d, axes=[-1], keep_dims=true)\n  y = Add(d, m)")
    given = {"x": np.arange(31, dtype=np.float32)[:, None], "s": np.array(3), "o": np.array(4), "p": np.float32(0.5)}
    np.testing.assert_allclose(og.compile(graph)(given), og.evaluate(graph, given), rtol=1e-6)
