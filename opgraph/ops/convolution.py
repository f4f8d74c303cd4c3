"""oneDNN's convolutions: Convolution, ConvTranspose, and the gradients of both with respect to data and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from opgraph.errors import InvalidGraphOp
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attr, Attrs, GradientRule, Onnx, OpDef, Port, ShapeRule
from opgraph.ops import convolution_arrays as run
from opgraph.ops import convolution_gradients as gradients
from opgraph.ops import convolution_layouts as layouts
from opgraph.ops import convolution_shapes as shapes
from opgraph.ops import windows
from opgraph.ops.families import DATA_FORMAT, FLOAT
from opgraph.ops.library import library
from opgraph.ops.spelling import attr_of
from opgraph.ops.windows import NOT_GIVEN

_GROUPS = Attr(name="groups", type="s64", default=1)
_OUTPUT_PADDING = Attr(name="output_padding", type="s64[]", default=NOT_GIVEN)
_DST_SHAPE = Attr(name="dst_shape", type="s64[]", default=NOT_GIVEN)
_WEIGHTS_SHAPE = Attr(name="weights_shape", type="s64[]", default=NOT_GIVEN)
_WINDOW = (windows.STRIDES, windows.PADS_BEGIN, windows.PADS_END, windows.DILATIONS, windows.AUTO_PAD)
#: Layouts of the weights of Convolution and of ConvTranspose.
_XIO = Attr(name="weights_format", type="string", default="XIO", choices=("XIO", "OIX"))
_XOI = Attr(name="weights_format", type="string", default="XOI", choices=("XOI", "IOX"))
_PADS = {"pads": ("pads_begin", "pads_end")}
_NODE = {"strides": "strides", "dilations": "dilations", "groups": "group"}
_AS_ONNX = {"auto_pad": "None", "data_format": "NCX"}


def _any_padding(attrs: Attrs, ndims: Mapping[str, int | None]) -> bool:
    return tuple(attrs["output_padding"]) != NOT_GIVEN


_BIAS = Port(name="bias", type="T1", optional=True)


def _fits(op: Op) -> None:
    """Paddings are not negative. output_padding is less than strides, and 0 with auto_pad SAME. The rest is positive.

    Raises:
        InvalidGraphOp: an attribute breaks these rules.
    """
    windows.checked_lists(op)
    if attr_of(op, "groups") < 1:
        raise InvalidGraphOp(f"{op.kind} got groups={op.attrs['groups']}", where=op.where, fix="give 1 or more")
    padding = attr_of(op, "output_padding") if "output_padding" in op.attrs else ()
    if any(p < 0 or p >= s for p, s in zip(padding, attr_of(op, "strides"), strict=False)):
        raise InvalidGraphOp(
            f"{op.kind} got output_padding={list(padding)} for strides {list(attr_of(op, 'strides'))}",
            where=op.where,
            fix="give less than the stride of each axis: with more the window would have a further position",
        )
    if any(padding) and attr_of(op, "auto_pad").startswith("SAME"):
        raise InvalidGraphOp(
            f"{op.kind} got auto_pad={op.attrs['auto_pad']} and an output_padding",
            where=op.where,
            fix="give pads_begin and pads_end instead of auto_pad, or no output_padding",
        )


# -- records ----------------------------------------------------------------------------------------------------------


def _convolution(
    kind: str,
    doc: str,
    *,
    inputs: Sequence[str],
    optional: Port | None,
    output: str,
    attrs: Sequence[Attr],
    infer: ShapeRule,
    make: Callable[..., Any],
    compute: str,
    gradient: GradientRule,
    onnx: tuple[Onnx, ...] | str = "none: ai.onnx has no gradients",
) -> OpDef:
    """Registers one of the six kinds.

    Args:
        make: converts operands to the layout of `compute`, and the result back.
        compute: the array that is computed: small, big or weights.
    """
    numpy_compute, torch_compute = getattr(run, f"numpy_{compute}"), getattr(run, f"torch_{compute}")
    has_shape = optional is not None and optional.says_shape
    return library(
        kind,
        f"{doc} Layouts are data_format and weights_format, O and I of one group where it matters; auto_pad takes the "
        "place of pads_begin and pads_end. f16 and bf16 are summed in f32.",
        family="convolution",
        inputs=(*[Port(name=n, type="T1") for n in inputs], *([] if optional is None else [optional])),
        outputs=(Port(name=output, type="T1"),),
        types={"T1": FLOAT, "T2": ("s32",)} if has_shape else {"T1": FLOAT},
        attrs=attrs,
        infer=infer,
        reference=partial(make, numpy_compute),
        torch=lambda t, *tensors, **given: make(partial(torch_compute, t), *tensors, **given),
        gradient=gradient,
        onnx=onnx,
        domain=((-2.0, 2.0),),
        source=f"oneDNN Graph {kind}",
        check=_fits,
    )


CONVOLUTION = _convolution(
    "Convolution",
    "dst[n, o, y] = sum over i, k of src[n, i, y strides + k dilations - pads_begin] weights[o, i, k], + bias[o].",
    inputs=("src", "weights"),
    optional=_BIAS,
    output="dst",
    attrs=(*_WINDOW, _GROUPS, DATA_FORMAT, _XIO),
    infer=shapes.of_small,
    make=layouts.make_small,
    compute="small",
    gradient=gradients.of_convolution,
    onnx=(
        Onnx(
            op_type="Conv",
            since=1,
            attrs=_NODE,
            joined=_PADS,
            implied=("kernel_shape",),
            when={**_AS_ONNX, "weights_format": "OIX"},
        ),
    ),
)

CONVOLUTION_BACKWARD_DATA = _convolution(
    "ConvolutionBackwardData",
    "The gradient of src of Convolution, of shape dst_shape: of an entry 0 of the attribute, what follows from "
    "diff_dst, weights and output_padding.",
    inputs=("diff_dst", "weights"),
    optional=Port(name="dst_shape", type="T2", optional=True, says_shape=True),
    output="diff_src",
    attrs=(_OUTPUT_PADDING, _DST_SHAPE, *_WINDOW, _GROUPS, DATA_FORMAT, _XIO),
    infer=shapes.of_told_big,
    make=layouts.make_told_big,
    compute="big",
    gradient=gradients.of_convolution_data,
)

CONVOLUTION_BACKWARD_WEIGHTS = _convolution(
    "ConvolutionBackwardWeights",
    "The gradient of weights of Convolution, of shape weights_shape: of an entry 0 for channels, what follows from src "
    "and diff_dst.",
    inputs=("src", "diff_dst"),
    optional=Port(name="weights_shape", type="T2", optional=True, says_shape=True),
    output="diff_weights",
    attrs=(_WEIGHTS_SHAPE, *_WINDOW, _GROUPS, DATA_FORMAT, _XIO),
    infer=shapes.of_weights,
    make=layouts.make_weights,
    compute="weights",
    gradient=gradients.of_convolution_weights,
)

CONV_TRANSPOSE = _convolution(
    "ConvTranspose",
    "The adjoint of Convolution: every element of src, times weights, is added to dst where the window was; + bias. "
    "dst is the smallest that has so many positions of the window, and output_padding larger.",
    inputs=("src", "weights"),
    optional=_BIAS,
    output="dst",
    attrs=(_OUTPUT_PADDING, *_WINDOW, _GROUPS, DATA_FORMAT, _XOI),
    infer=shapes.of_free_big,
    make=layouts.make_free_big,
    compute="big",
    gradient=gradients.of_transposed,
    onnx=(
        Onnx(
            op_type="ConvTranspose",
            since=1,
            attrs=_NODE,
            joined=_PADS,
            implied=("kernel_shape",),
            when={**_AS_ONNX, "weights_format": "IOX", "output_padding": NOT_GIVEN},
        ),
        Onnx(
            op_type="ConvTranspose",
            since=1,
            attrs={**_NODE, "output_padding": "output_padding"},
            joined=_PADS,
            implied=("kernel_shape",),
            when={**_AS_ONNX, "weights_format": "IOX"},
            applies=_any_padding,
        ),
    ),
)

CONV_TRANSPOSE_BACKWARD_DATA = _convolution(
    "ConvTransposeBackwardData",
    "The gradient of src of ConvTranspose: the Convolution of diff_dst.",
    inputs=("diff_dst", "weights"),
    optional=None,
    output="diff_src",
    attrs=(*_WINDOW, _GROUPS, DATA_FORMAT, _XOI),
    infer=shapes.of_small,
    make=layouts.make_small,
    compute="small",
    gradient=gradients.of_transposed_data,
)

CONV_TRANSPOSE_BACKWARD_WEIGHTS = _convolution(
    "ConvTransposeBackwardWeights",
    "The gradient of weights of ConvTranspose, of shape weights_shape: of an entry 0 for channels, what follows from "
    "src and diff_dst.",
    inputs=("src", "diff_dst"),
    optional=Port(name="weights_shape", type="T2", optional=True, says_shape=True),
    output="diff_weights",
    attrs=(_WEIGHTS_SHAPE, *_WINDOW, _GROUPS, DATA_FORMAT, _XOI),
    infer=shapes.of_weights,
    make=layouts.make_weights,
    compute="weights",
    gradient=gradients.of_transposed_weights,
)
