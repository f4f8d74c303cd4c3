"""Arguments at which accuracy is measured: every value of the narrow dtypes, a comb through all bit patterns of the
others, and the neighbourhoods of the points where formulas break."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import ml_dtypes
import numpy as np

from opgraph.ir import dtypes
from opgraph.ir.opdef import OpDef, Port
from opgraph.ops import samples

#: The distance between the measured f32 bit patterns: a prime, so that all low bits occur.
F32_STRIDE = 4099
RANDOM = 1_000_000


def of_bits(bits: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    return bits.astype(f"u{dtype.itemsize}").view(dtype)


def bits_of(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}")


def every_16_bit_value(dtype: np.dtype[Any]) -> np.ndarray:
    return of_bits(np.arange(65536), dtype)


@functools.cache
def specials(name: str) -> np.ndarray:
    """The values at the edges of a float dtype and of the functions on it, of both signs, with NaN."""
    dtype = dtypes.get(name).numpy
    info = ml_dtypes.finfo(dtype)
    tiny, smallest, largest, eps = (
        float(v) for v in (info.smallest_subnormal, info.smallest_normal, info.max, info.eps)
    )
    edges = [0, tiny, 3 * tiny, smallest - tiny, smallest, smallest * (1 + eps), eps / 2, eps, largest / 2, largest]
    edges += [np.sqrt(largest), np.sqrt(smallest), 2.0**info.nmant, 2.0**info.nmant - 0.5, np.inf]
    middle = [0.01, 0.25, 0.5 - eps / 4, 0.5, 0.75, 1 - eps / 2, 1, 1 + eps, 1.5, 2, 2.5, 3, np.pi, 6, 7.5, 20, 100]
    positive = np.array([*edges, *middle]).astype(dtype)
    return np.concatenate([positive, (-positive.astype(np.float64)).astype(dtype), np.array([np.nan]).astype(dtype)])


def neighbourhoods(centres: np.ndarray, radius: int) -> np.ndarray:
    """Each value with its `radius` nearest neighbours in both directions, by bit pattern."""
    bits = bits_of(centres)[:, None].astype(np.int64) + np.arange(-radius, radius + 1)
    return of_bits(bits.ravel(), centres.dtype)


def centres(record: OpDef, attrs: dict[str, Any], dtype: np.dtype[Any]) -> np.ndarray:
    """Points where a formula may change.

    Specials, whole and half numbers, multiples of pi/2 and ln 2, the ends of the op's domain, its attributes, powers of
    two, and zeros of the gamma family.
    """
    numbers = [v for v in attrs.values() if isinstance(v, float)]
    found = np.concatenate(
        [
            np.arange(-40, 41) / 2,
            np.arange(-33, 34) * (np.pi / 2),
            np.ravel(record.domain),
            [s * v for v in numbers for s in (1, -1)],
            [s * 2.0**k for k in range(-30, 31) for s in (1, -1)],
            [s * k * np.log(2) for k in (0.5, 1, 127, 128, 149, 150, 1023, 1024, 1075) for s in (1, -1)],
            [s * np.sqrt(k) for k in (2, 3) for s in (1, -1)],
            # zeros of digamma and lgamma
            [1.4616321449683623, -0.504083008264455, -1.573498473162390, -2.610720868444144, -2.457024738220800],
            [-2.747682646727412, -3.143580888349980, -3.955294284858598, -4.039361839740536, -4.991544640560048],
        ]
    )
    name = dtypes.of_array(dtype, where="accuracy").name
    return np.concatenate([found.astype(dtype), specials(name)])


def f32_line(record: OpDef, attrs: dict[str, Any]) -> np.ndarray:
    """About 1.2 million f32: a comb, neighbourhoods, and the op's domain."""
    dtype = np.dtype(np.float32)
    rng = np.random.default_rng(5)
    low, high = record.domain[0]
    return np.concatenate(
        [
            of_bits(np.arange(0, 2**32, F32_STRIDE, dtype=np.uint64), dtype),
            neighbourhoods(centres(record, attrs, dtype), 50),
            rng.uniform(low, high, 50_000).astype(dtype),
            rng.normal(0, 3, 50_000).astype(dtype),
        ]
    )


def f64_line(record: OpDef, attrs: dict[str, Any], count: int) -> np.ndarray:
    """About `count` f64: from the op's domain, of all magnitudes, and next to the special points."""
    rng = np.random.default_rng(6)
    low, high = record.domain[0]
    part = count // 4
    near = neighbourhoods(centres(record, attrs, np.dtype(np.float64)), 1)
    return np.concatenate(
        [
            rng.uniform(low, high, part),
            rng.normal(0, 3, part),
            rng.choice([-1, 1], part) * 10.0 ** rng.uniform(-20, 3, part),
            rng.choice(near, part, replace=False),
            of_bits(rng.integers(0, 2**63, 40).astype(np.uint64) * 2 + 1, np.dtype(np.float64)),
        ]
    )


def grid(record: OpDef, ports: tuple[Port, ...], dtype: str, count: int = RANDOM) -> list[np.ndarray]:
    """Operands of an op that has several: all combinations of specials, then `count` random ones.

    A third each of the random ones are arbitrary bits, values of the op's domain, and pairs that nearly cancel.
    """
    rng = np.random.default_rng(7)
    kinds = [dtypes.get(dtype if p.type in record.types else p.type) for p in ports]
    axes = [specials(k.name) if k.is_float else np.array([False, True]) for k in kinds]
    mesh = [np.array(column).astype(k.numpy) for column, k in zip(zip(*itertools.product(*axes)), kinds)]
    part = count // 3
    anything = [_any_bits(rng, k, part) for k in kinds]
    inside = samples.arrays(record, ports, dtype, [(part,)] * len(ports), seed=8)
    close = samples.arrays(record, ports, dtype, [(part,)] * len(ports), seed=9)
    floats = [i for i, k in enumerate(kinds) if k.is_float]
    for i in floats[1:]:
        steps = rng.integers(-3, 4, part)
        close[i] = of_bits(bits_of(close[floats[0]]).astype(np.int64) + steps, kinds[i].numpy)
    return [np.concatenate(pieces) for pieces in zip(mesh, anything, inside, close)]


def _any_bits(rng: np.random.Generator, kind: dtypes.DType, count: int) -> np.ndarray:
    if kind.category == "bool":
        return rng.random(count) < 0.5
    return of_bits(rng.integers(0, 2 ** (8 * kind.itemsize), count, dtype=np.uint64), kind.numpy)
