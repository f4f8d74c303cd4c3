"""The family of ops that a library runs: the common frame of their NumPy and torch forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, GradientRule, Onnx, OpDef, Port, Row, ShapeRule, Speller, Template, register
from opgraph.ops import reference_math
from opgraph.ops.families import FLOAT, defaults_of


def library(
    kind: str,
    doc: str,
    *,
    family: str,
    inputs: Sequence[str | Port] = ("src",),
    outputs: Sequence[str | Port] = ("dst",),
    types: Mapping[str, tuple[str, ...]] | tuple[str, ...] = FLOAT,
    attrs: Sequence[Attr] = (),
    infer: ShapeRule,
    reference: Callable[..., Any],
    torch: Callable[..., Any],
    onnx: tuple[Onnx, ...] | str,
    gradient: Mapping[str, Template] | GradientRule | str | None = None,
    spelled: Speller | None = None,
    decomposition: Template | None = None,
    domain: tuple[tuple[float, float], ...] = ((-4.0, 4.0),),
    source: str,
    check: Callable[[Op], None] | None = None,
    by_dtype: bool = False,
    keeps_dtypes: bool = False,
    row: Row | None = None,
) -> OpDef:
    """Registers one op that a library runs; see OpDef for the arguments.

    A result has the dtype of the first input with its dtype symbol; without one, the first result has the dtype of the
    first input. `reference` is a formula. The function registered for it fills in default attributes, and computes f16
    and bf16 in f32 with one rounding. `torch` receives the tensors as they are, and has to sum f16 and bf16 in f32:
    how to do that without a copy depends on the op. For an op with several outputs both return an iterable, in the
    order of the outputs; results that are not needed are not taken from it.

    Args:
        keeps_dtypes: the result keeps the dtype that the formula gives it.
    """
    defaults = defaults_of(attrs)
    in_ports = tuple(Port(name=p) if isinstance(p, str) else p for p in inputs)
    out_ports = tuple(Port(name=p) if isinstance(p, str) else p for p in outputs)

    def numpy_form(*arrays: Any, **given: Any) -> Any:
        own = [np.asarray(a) for a in arrays]
        wide = [a.astype(np.float32) if a.dtype.itemsize == 2 else a for a in own]
        with np.errstate(all="ignore"):
            made = formula(*wide, **{**defaults, **given})
            if len(out_ports) == 1:
                return np.asarray(made if keeps_dtypes else np.asarray(made).astype(own[0].dtype, copy=False))
            return tuple(_rounded(np.asarray(r), port, own) for r, port in zip(made, out_ports, strict=True))

    def _rounded(result: np.ndarray, port: Port, own: list[np.ndarray]) -> np.ndarray:
        same = [a.dtype for a, p in zip(own, in_ports, strict=False) if p.type == port.type]
        if not same and port is out_ports[0]:
            same = [own[0].dtype]
        return result.astype(same[0], copy=False) if same else result

    formula = reference
    return register(
        OpDef(
            kind=kind,
            doc=doc,
            family=family,
            inputs=in_ports,
            outputs=out_ports,
            types=types if isinstance(types, Mapping) else {"T": types},
            attrs=tuple(attrs),
            infer=infer,
            reference=numpy_form,
            torch=lambda t, *tensors, **given: torch(t, *tensors, **{**defaults, **given}),
            onnx=onnx,
            decomposition=decomposition,
            domain=domain,
            source=source,
            check=check,
            gradient=gradient,
            spelled=spelled,
            by_dtype=by_dtype,
            row=row,
        )
    )


def wide(tensor: Any) -> Any:
    """Converts a torch tensor to its compute dtype: f32 for f16 and bf16."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def in_torch(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The torch form of a formula for both NumPy and torch, which takes the module as its first argument."""

    def torch_form(t: Any, *tensors: Any, **attrs: Any) -> Any:
        return formula(t, *map(wide, tensors), **attrs)

    return torch_form


def in_numpy(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The NumPy form of such a formula."""

    def numpy_form(*arrays: Any, **attrs: Any) -> Any:
        return formula(np, *arrays, **attrs)

    return numpy_form


def mean_of(values: Any, axes: Iterable[int]) -> Any:
    """The mean over axes, which stay with size 1; NaN over no elements, without numpy.mean's warning."""
    over = tuple(axes)
    count = 1
    for axis in over:
        count *= values.shape[axis]
    total = reference_math.sum_over(values, over, keep=True)
    return total / count if count else total / (total * 0)
