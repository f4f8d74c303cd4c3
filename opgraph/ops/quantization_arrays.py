"""Quantization in NumPy and in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opgraph.ir import dtypes
from opgraph.ir.opdef import Attrs
from opgraph.ops.conversion import cast
from opgraph.ops.scales import scale_dims, spread


def of_attributes(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a formula over inputs into one over attributes."""

    def form(src: Any, *, scales: Sequence[float], zps: Sequence[int] = (), **attrs: Any) -> Any:
        factors = np.asarray(scales, np.float32)
        return formula(src, factors, *([np.asarray(zps, np.int64)] if zps else []), **attrs)

    return form


def numpy_quantize(src: Any, scales: Any, zps: Any = None, *, to: str, **attrs: Any) -> np.ndarray:
    """src / scale + zero point, rounded to the nearest integer and saturated; for f8 it is converted."""
    steps = src / spread(scales, src.shape, attrs).astype(src.dtype)
    if zps is not None:
        steps = steps + spread(zps, src.shape, attrs).astype(src.dtype)
    return cast(np.asarray(np.rint(steps) if dtypes.get(to).category == "int" else steps), to)


def numpy_dequantize(src: Any, scales: Any, zps: Any = None, **attrs: Any) -> Any:
    """(src - zero point) scale, in f32 or f64."""
    work = scales.dtype if scales.dtype.itemsize == 8 else np.float32
    steps = src.astype(work)
    if zps is not None:
        steps = steps - spread(zps, src.shape, attrs).astype(work)
    return steps * spread(scales, src.shape, attrs).astype(work)


def with_spread_scales(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The same torch formula with scales expanded as `spread` does it in NumPy."""

    def torch_form(t: Any, src: Any, *operands: Any, **attrs: Any) -> Any:
        return formula(t, src, *[_torch_spread(t, o, src, attrs) for o in operands], **attrs)

    return torch_form


def _torch_spread(t: Any, values: Any, src: Any, attrs: Attrs) -> Any:
    values = t.as_tensor(values, device=src.device).to(t.float64 if src.dtype == t.float64 else t.float32)
    if values.numel() == 1:
        return values.reshape(())
    expected = tuple(int(d or 0) for d in scale_dims(tuple(src.shape), attrs))
    full = values.reshape(expected)
    for axis, (size, count) in enumerate(zip(src.shape, expected, strict=True)):
        if count not in (1, size):
            full = full.repeat_interleave(size // count, axis)
    return full


def torch_quantize(t: Any, src: Any, scales: Any, zps: Any = None, *, to: str, **_: Any) -> Any:
    """As `numpy_quantize`, to integers."""
    steps = src / scales if zps is None else src / scales + zps
    whole = t.nan_to_num(t.round(steps), nan=0.0)
    limits = np.iinfo({"s8": np.int8, "u8": np.uint8}[to])
    return whole.clamp(limits.min, limits.max).to({"s8": t.int8, "u8": t.uint8}[to])


def torch_dequantize(t: Any, src: Any, scales: Any, zps: Any = None, **_: Any) -> Any:
    """As `numpy_dequantize`."""
    steps = src.to(scales.dtype)
    return (steps if zps is None else steps - zps) * scales
