"""The basis of the command line's verdicts: distances in ulp, drawn inputs, paired timings."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from opgraph.cli.compare import distance, same_bits, spacing
from opgraph.cli.feeds import Port, parse_sizes, random_feeds, read_feeds, sizes_for
from opgraph.cli.main import UsageError
from opgraph.errors import InvalidArguments, ModelError
from opgraph.ir import dtypes


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_spacing_is_the_gap_to_the_next_number(dtype: str) -> None:
    numbers = np.arange(0, 1 << 15, dtype=np.uint16).view(dtypes.get(dtype).numpy)
    with np.errstate(invalid="ignore"):  # ml_dtypes sets the flag for the NaNs among them
        every = numbers[np.isfinite(numbers)].astype(np.float64)
    assert np.array_equal(spacing(every[:-1], dtype), np.diff(every))


def test_spacing_equals_numpys_for_f32_and_f64() -> None:
    bits = np.random.default_rng(0).integers(0, 0x7F800000, 10_000, dtype=np.uint32)
    values = bits.view(np.float32)
    assert np.array_equal(spacing(values.astype(np.float64), "f32"), np.spacing(values).astype(np.float64))
    assert np.array_equal(spacing(np.array([1.0, 1e300, 3e-310]), "f64"), np.spacing([1.0, 1e300, 3e-310]))


def test_distance_names_the_worst_element() -> None:
    truth = np.array([[1.0, 2.0], [4.0, -1000.0]])
    got = truth.astype(np.float32)
    got[1, 0] = np.nextafter(got[1, 0], np.float32(9))
    off = distance(got, truth, "f32")
    assert (off.index, off.ulp, off.absolute) == ((1, 0), 1.0, float(np.spacing(np.float32(4))))
    assert off.scaled == float(np.spacing(np.float32(4)) / np.spacing(np.float32(1000)))


@pytest.mark.parametrize(
    ("got", "truth", "infinite"),
    [
        (np.nan, np.nan, False), (np.inf, np.inf, False), (np.inf, 1e300, False), (np.nan, 1.0, True),
        (np.inf, -np.inf, True), (np.inf, 1.0, True), (1.0, np.nan, True), (0.0, -0.0, False),
    ],
)  # fmt: skip
def test_nan_and_infinity_agree_only_with_themselves(got: float, truth: float, infinite: bool) -> None:
    off = distance(np.array([1.0, got], np.float32), np.array([1.0, truth]), "f32")
    assert (off.ulp == np.inf) == infinite and (off.absolute == np.inf) == infinite
    assert off.is_within(distance(np.ones(2, np.float32), np.ones(2), "f32")) != infinite


def test_integers_are_compared_in_units() -> None:
    assert distance(np.array([1, 5]), np.array([1, 7]), "s64").ulp == 2


def test_integers_equal_in_float64_still_differ() -> None:
    off = distance(np.array([1 << 60, 3]), np.array([(1 << 60) + 1, 3]), "s64")
    assert (off.absolute, off.index, off.values) == (1, (0,), (1 << 60, (1 << 60) + 1))


@pytest.mark.parametrize(
    ("wrong", "peer", "within"),
    [([0], [], False), ([0, 1], [3], True), ([0, 1, 2], [3], False), ([], [], True)],
)
@pytest.mark.parametrize("dtype", ["boolean", "s64", "s32"])
def test_wrong_booleans_and_integers_are_counted(dtype: str, wrong: list[int], peer: list[int], within: bool) -> None:
    """ArgMax, Greater and Floor have no nearly right results. With one unit allowed, every comparison used to pass."""
    truth = np.zeros(8, dtypes.get(dtype).numpy)
    ours, theirs = truth.copy(), truth.copy()
    ours[wrong] = theirs[peer] = 1
    assert distance(ours, truth, dtype).is_within(distance(theirs, truth, dtype)) is within


def test_quantized_value_may_be_one_unit_off() -> None:
    off = distance(np.array([3, 4], np.uint8), np.array([3, 5], np.uint8), "u8")
    assert off.is_within(distance(np.array([3, 5], np.uint8), np.array([3, 5], np.uint8), "u8"))


def test_infinity_of_the_peer_excuses_only_its_own_element() -> None:
    truth = np.array([100.0, 1.0, 2.0])
    peer = distance(np.array([np.inf, 1, 2], np.float32), truth, "f32")
    for values, within in [
        ([np.inf, 1, 2], True),
        ([100, 1, 2], True),
        ([100, 1, 3], False),
        ([100, np.nan, 2], False),
    ]:
        assert distance(np.array(values, np.float32), truth, "f32").is_within(peer) is within


def test_same_bits_distinguishes_signed_zeros() -> None:
    zeros = np.zeros(3, np.float32)
    assert same_bits(zeros, zeros.copy()) and not same_bits(zeros, -zeros)


def test_empty_arrays_agree() -> None:
    assert distance(np.empty((0, 3), np.float32), np.empty((0, 3)), "f32").ulp == 0


def test_symbols_get_given_sizes_and_expressions_are_evaluated() -> None:
    ports = [
        Port("a", "f32", ("batch", "seq", 3)),
        Port("b", "s64", ("batch", "seq + 1")),
        Port("c", "boolean", (None,)),
    ]
    sizes = sizes_for(ports, parse_sizes(["seq=5"]))
    feeds = random_feeds(ports, sizes)
    assert sizes["seq"] == 5 and feeds["a"].shape == (sizes["batch"], 5, 3) and feeds["b"].shape[1] == 6
    assert [feeds[k].dtype for k in "abc"] == [np.float32, np.int64, np.bool_]
    assert set(np.unique(feeds["b"])) <= {0, 1}
    again = random_feeds(ports, sizes)
    assert all(np.array_equal(feeds[k], again[k]) for k in feeds)


def test_a_symbol_may_be_a_keyword_of_python() -> None:
    port = Port("x", "f32", ("in", 3))
    assert random_feeds([port], sizes_for([port], parse_sizes(["in=4"])))["x"].shape == (4, 3)


@pytest.mark.parametrize(
    "dim", ["__import__('os').getpid()", "2 ** 99999999", "batch - 9", "((" * 3000, "seq.real", "1 // 0", "other + 1"]
)
def test_dimension_text_is_never_run_as_python(dim: str) -> None:
    with pytest.raises(InvalidArguments, match="has no size"):
        random_feeds([Port("x", "f32", (dim,))], {"batch": 2, "seq": 3})


def test_ports_of_unknown_rank_or_dtype_are_refused() -> None:
    for port in (Port("x", "f32", None), Port("x", "undef", (2,))):
        with pytest.raises(InvalidArguments, match="no array can be drawn"):
            random_feeds([port], {})
    with pytest.raises(UsageError):
        sizes_for([Port("x", "f32", (3,))], {"batch": 2})


def test_arrays_from_a_file_keep_their_bits(tmp_path: Path) -> None:
    value = np.array([1.5, -2], ml_dtypes.bfloat16)
    np.savez(tmp_path / "a.npz", x=value, y=value.view(np.uint16))
    for name in "xy":
        got = read_feeds(str(tmp_path / "a.npz"), [Port(name, "bf16", (2,))])[name]
        assert got.dtype == value.dtype and np.array_equal(got, value)


def test_arrays_from_a_file_get_native_byte_order(tmp_path: Path) -> None:
    """onnxruntime reads the bytes without conversion."""
    value = np.array([1.5, -2], np.float32)
    np.savez(tmp_path / "a.npz", x=value.astype(value.dtype.newbyteorder()))
    got = read_feeds(str(tmp_path / "a.npz"), [Port("x", "f32", (2,))])["x"]
    assert got.dtype.isnative and np.array_equal(got, value)


def test_file_of_python_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([object()]))
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 no archive")
    for name in ("a.npz", "b.npz"):
        with pytest.raises(ModelError):
            read_feeds(str(tmp_path / name), [Port("x", "f32", (1,))])


def test_timed_calls_alternate() -> None:
    from opgraph.cli.onnx_file import timed

    order: list[int] = []
    calls = [lambda: (order.append(0), time.sleep(0.001)), lambda: (order.append(1), time.sleep(0.003))]
    timing = timed(calls, budget=5.0, most=20)  # enough seconds for a busy machine
    assert timing.ratios[0] == 1 and 1.5 < timing.ratios[1] < 6
    assert timing.rounds >= 5 and min(order.count(0), order.count(1)) >= 5
    turns = [pair for pair in pairwise(order) if pair[0] != pair[1]]
    assert len(turns) >= 5 and set(turns) == {(0, 1), (1, 0)}
