"""Pooling: AvgPool, MaxPool and their gradients, over the windows of `opgraph.ops.windows`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opgraph.ir.logical_tensor import Dims, LogicalTensor, dims_text
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, GradientRule, Onnx, OpDef, Port, ShapeRule
from opgraph.ir.shapes import ShapeMismatch, dims_agree
from opgraph.ops import pooling_arrays as run
from opgraph.ops import pooling_gradients as gradients
from opgraph.ops import windows
from opgraph.ops.explicit_shapes import completed, given_shape, told_shape
from opgraph.ops.families import DATA_FORMAT, FLOAT
from opgraph.ops.library import library
from opgraph.ops.windows import NOT_GIVEN, ONES, Window, moved, moved_back, ordered, restored

_WINDOW = (windows.STRIDES, windows.PADS_BEGIN, windows.PADS_END)
_EXCLUDE = Attr(name="exclude_pad", type="bool")
_DILATIONS = Attr(name="dilations", type="s64[]", default=ONES)
#: "ceil" counts a last partial step; oneDNN treats every other text as "floor".
_ROUNDING = Attr(name="rounding_type", type="string", default="floor", choices=("floor", "ceil"))
_SRC_SHAPE = Attr(name="src_shape", type="s64[]", default=NOT_GIVEN)


def _window(sizes: Sequence[Any], attrs: Attrs) -> Window:
    return Window.of(attrs, attrs["kernel"], sizes)


def _pooled(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """Batch and channels of src; positions of the kernel on each padded spatial axis."""
    dims = inputs[0].dims
    if dims is None:
        return (None,)
    order = windows.data_order(len(dims), attrs)
    batch, channels, *spatial = ordered(dims, order)
    positions = _window(spatial, attrs).positions(spatial, up=attrs.get("rounding_type") == "ceil")
    return (restored((batch, channels, *positions), order),)


def _unpooled(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """src_shape, given as attribute or input; an entry 0 follows from diff_dst."""
    dims = inputs[0].dims
    if dims is None:
        return (None,)
    order = windows.data_order(len(dims), attrs)
    small = ordered(dims, order)
    given = ordered(given_shape("src_shape", inputs, 1, attrs, len(dims)), order)
    covered = _window(given[2:], attrs).covered(small[2:])
    spatial = tuple(c if g == 0 else g for c, g in zip(covered, given[2:], strict=True))
    _fits_either_way(_window(spatial, attrs), spatial, small[2:])
    found = completed("src_shape", (*given[:2], *spatial), (*small[:2], *spatial))
    assert found is not None
    return (restored(found, order),)


def _fits_either_way(window: Window, data: Sequence[Any], positions: Sequence[Any]) -> None:
    """Raises ShapeMismatch where diff_dst has neither the positions that floor counts nor those that ceil counts."""
    if not any(dims_agree(window.positions(data, up=up), positions) for up in (False, True)):
        raise ShapeMismatch(
            f"the window has {dims_text(window.positions(data))} positions on the data, and diff_dst "
            f"{dims_text(tuple(positions))}",
            "give the gradient of what the pool made of these data",
        )


def _like_src(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shape of src."""
    src, diff = inputs[0].dims, inputs[1].dims
    if src is not None and diff is not None:
        order = windows.data_order(len(src), attrs)
        if len(src) != len(diff) or not dims_agree(ordered(src, order)[:2], ordered(diff, order)[:2]):
            raise ShapeMismatch(
                f"src {dims_text(src)} and diff_dst {dims_text(diff)} differ in batch or channels",
                "give the gradient of what the pool made of src",
            )
        spatial = ordered(src, order)[2:]
        _fits_either_way(_window(spatial, attrs), spatial, ordered(diff, order)[2:])
    return (src,)


def _taken(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """Batch and channels of src; positions of the kernel on each padded spatial axis."""
    if inputs[0].dims is not None and inputs[1].dims is not None and not dims_agree(inputs[0].dims, inputs[1].dims):
        raise ShapeMismatch("src and values differ in shape", "give a value for each element of src")
    return _pooled(inputs, attrs)


# -- numbers ----------------------------------------------------------------------------------------------------------


def _forward(compute: Callable[..., Any], *data: Any, **attrs: Any) -> Any:
    order = windows.data_order(data[0].ndim, attrs)
    moved_in = [moved(d, order) for d in data]
    sizes = moved_in[0].shape[2:]
    window = _window(sizes, attrs)
    positions = window.positions(sizes, up=attrs.get("rounding_type") == "ceil")
    return moved_back(compute(*moved_in, window, positions, attrs.get("exclude_pad", False)), order)


def _average_back(compute: Callable[..., Any], diff_dst: Any, *shape: Any, **attrs: Any) -> Any:
    order = windows.data_order(diff_dst.ndim, attrs)
    small = moved(diff_dst, order)
    wanted = ordered(told_shape("src_shape", shape, attrs, diff_dst.ndim), order)[2:]
    covered = _window(wanted, attrs).covered(small.shape[2:])
    sizes = tuple(int(a or b or 0) for a, b in zip(wanted, covered, strict=True))
    return moved_back(compute(small, _window(sizes, attrs), sizes, attrs["exclude_pad"]), order)


def _largest_back(compute: Callable[..., Any], src: Any, diff_dst: Any, **attrs: Any) -> Any:
    order = windows.data_order(src.ndim, attrs)
    big, small = moved(src, order), moved(diff_dst, order)
    return moved_back(compute(big, small, _window(big.shape[2:], attrs)), order)


# -- records ----------------------------------------------------------------------------------------------------------


def _pool(
    kind: str,
    doc: str,
    *,
    inputs: Sequence[Port],
    output: str,
    attrs: Sequence[Attr],
    infer: ShapeRule,
    make: Callable[..., Any],
    compute: str,
    gradient: GradientRule,
    onnx: tuple[Onnx, ...] | str = "none: ai.onnx has no gradients",
    source: str = "",
    check: Callable[[Op], None] = windows.checked_lists,
) -> OpDef:
    """Registers one pool; `make` converts operands to the layout of `compute`, and the result back."""
    numpy_compute, torch_compute = getattr(run, f"numpy_{compute}"), getattr(run, f"torch_{compute}")
    return library(
        kind,
        f"{doc} auto_pad takes the place of pads_begin and pads_end. f16 and bf16 are computed in f32.",
        family="pooling",
        inputs=inputs,
        outputs=(output,),
        types={"T": FLOAT, "T1": ("s32",)},
        attrs=attrs,
        infer=infer,
        reference=lambda *arrays, **given: make(numpy_compute, *arrays, **given),
        torch=lambda t, *tensors, **given: make(lambda *a: torch_compute(t, *a), *tensors, **given),
        gradient=gradient,
        onnx=onnx,
        source=source or f"oneDNN Graph {kind}",
        check=check,
    )


_SRC, _DIFF = Port(name="src"), Port(name="diff_dst")
_PADS = {"pads": ("pads_begin", "pads_end")}
_NODE = {"kernel": "kernel_shape", "strides": "strides"}
#: With ceil, ONNX leaves out a last window that begins in the padding.
_AS_ONNX = {"auto_pad": "None", "data_format": "NCX", "rounding_type": "floor"}

AVG_POOL = _pool(
    "AvgPool",
    "The mean of each window. What is padded counts as 0; with exclude_pad it does not count.",
    inputs=(_SRC,),
    output="dst",
    attrs=(*_WINDOW, _EXCLUDE, windows.KERNEL, DATA_FORMAT, _ROUNDING, windows.AUTO_PAD),
    infer=_pooled,
    make=_forward,
    compute="average",
    gradient=gradients.of_average,
    onnx=tuple(
        Onnx(
            op_type="AveragePool",
            since=7,
            attrs=_NODE,
            joined=_PADS,
            fixed={"count_include_pad": int(not exclude)},
            when={**_AS_ONNX, "exclude_pad": exclude},
        )
        for exclude in (True, False)
    ),
)

MAX_POOL = _pool(
    "MaxPool",
    "The largest element of each window, of several the first in row-major order; NaN if one is NaN. What is padded is "
    "-inf.",
    inputs=(_SRC,),
    output="dst",
    attrs=(*_WINDOW, windows.KERNEL, _DILATIONS, DATA_FORMAT, _ROUNDING, windows.AUTO_PAD),
    infer=_pooled,
    make=_forward,
    compute="largest",
    gradient=gradients.of_largest,
    onnx=(
        Onnx(op_type="MaxPool", since=8, attrs=_NODE, joined=_PADS, when={**_AS_ONNX, "dilations": ONES}),
        Onnx(
            op_type="MaxPool",
            since=10,
            attrs={**_NODE, "dilations": "dilations"},
            joined=_PADS,
            when=_AS_ONNX,
            applies=lambda attrs, ndims: tuple(attrs["dilations"]) != ONES,
        ),
    ),
)

AVG_POOL_BACKWARD = _pool(
    "AvgPoolBackward",
    "The gradient of AvgPool: each element of diff_dst in equal parts to those of its window.",
    inputs=(_DIFF, Port(name="src_shape", type="T1", optional=True, says_shape=True)),
    output="diff_src",
    attrs=(*_WINDOW, _EXCLUDE, windows.KERNEL, windows.AUTO_PAD, DATA_FORMAT, _SRC_SHAPE),
    infer=_unpooled,
    make=_average_back,
    compute="average_back",
    gradient=gradients.of_average_back,
)

MAX_POOL_BACKWARD = _pool(
    "MaxPoolBackward",
    "The gradient of MaxPool: each element of diff_dst to the largest of its window, of several the first in row-major "
    "order; a NaN is larger than all.",
    inputs=(_SRC, _DIFF),
    output="diff_src",
    attrs=(*_WINDOW, windows.KERNEL, windows.AUTO_PAD, _DILATIONS, DATA_FORMAT),
    infer=_like_src,
    make=_largest_back,
    compute="largest_back",
    gradient=gradients.of_largest_back,
)

MAX_POOL_TAKE = _pool(
    "MaxPoolTake",
    "The values at the places where MaxPool of src takes its elements: the adjoint of MaxPoolBackward. 0 where a "
    "window holds nothing but padding.",
    inputs=(_SRC, Port(name="values")),
    output="dst",
    attrs=(*_WINDOW, windows.KERNEL, _DILATIONS, DATA_FORMAT, _ROUNDING, windows.AUTO_PAD),
    infer=_taken,
    make=_forward,
    compute="taken",
    gradient=gradients.of_taken,
    onnx="none: ai.onnx has no gradients, whose gradient this is",
    source="the indices of torch.nn.functional.max_pool2d, gathered",
)
