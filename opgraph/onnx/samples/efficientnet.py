"""A small EfficientNet: five op types, SiLU as Sigmoid and Mul, and squeeze gates that resemble SiLU but are not."""

from __future__ import annotations

import math

from onnx import ModelProto, TensorProto

from opgraph.onnx.samples.builder import Builder

#: (channels out, expansion, stride, kernel) of each block.
BLOCKS = ((16, 1, 1, 3), (24, 6, 2, 3), (24, 6, 1, 3), (40, 6, 2, 5), (40, 6, 1, 5), (80, 6, 2, 3), (80, 6, 1, 3))
_STEM, _HEAD = 32, 320


def efficientnet(size: int = 64) -> ModelProto:
    """The model: `pixel_values` f32[batch,3,size,size] -> `features` f32[batch,320,1,1].

    Each block is expansion, depthwise convolution and projection, with SiLU after the first two. In between, Sigmoid of
    the squeezed channel means gates the channels. Batch norms are folded into the convolutions.
    Source: Tan and Le, arXiv 1905.11946; Hu et al., arXiv 1709.01507.
    """
    net = Builder("efficientnet", seed=1)
    x = net.input("pixel_values", TensorProto.FLOAT, ("batch", 3, size, size))
    x = _silu(net, _conv(net, x, "stem", 3, _STEM, kernel=3, stride=2))
    channels = _STEM
    for index, (out, expansion, stride, kernel) in enumerate(BLOCKS):
        x, channels = _block(net, x, f"blocks.{index}", channels, out, expansion, stride, kernel), out
    x = _silu(net, _conv(net, x, "head", channels, _HEAD))
    x = net("ReduceMean", x, net.value([2, 3], "int64"), keepdims=1, name="features")
    return net.model(x, TensorProto.FLOAT, ("batch", _HEAD, 1, 1))


def _block(net: Builder, x: str, name: str, channels: int, out: int, expansion: int, stride: int, kernel: int) -> str:
    wide = channels * expansion
    y = x
    if expansion != 1:
        y = _silu(net, _conv(net, y, f"{name}.expand", channels, wide))
    y = _silu(net, _conv(net, y, f"{name}.depthwise", wide, wide, kernel=kernel, stride=stride, groups=wide))
    squeezed = max(1, channels // 4)
    s = net("ReduceMean", y, net.value([2, 3], "int64"), keepdims=1, name="mean")
    s = _silu(net, _conv(net, s, f"{name}.reduce", wide, squeezed))
    s = _conv(net, s, f"{name}.restore", squeezed, wide)
    y = net("Mul", net("Sigmoid", s), y)  # a gate: the sigmoid of another tensor
    y = _conv(net, y, f"{name}.project", wide, out, gain=1.0)
    return str(net("Add", y, x)) if stride == 1 and channels == out else y


def _silu(net: Builder, x: str) -> str:
    return str(net("Mul", x, net("Sigmoid", x), name="silu"))


def _conv(
    net: Builder, x: str, name: str, channels: int, out: int, *, kernel: int = 1, stride: int = 1, groups: int = 1,
    gain: float = 1.7,
) -> str:  # fmt: skip
    shape = (out, channels // groups, kernel, kernel)
    weight = net.weight(f"{name}.weight", shape, gain / math.sqrt(math.prod(shape[1:])))
    bias = net.weight(f"{name}.bias", (out,), 0.1)
    pad = kernel // 2
    return str(
        net(
            "Conv", x, weight, bias, name="conv2d", group=groups, kernel_shape=[kernel, kernel],
            strides=[stride, stride], pads=[pad] * 4, dilations=[1, 1], auto_pad="NOTSET",
        )
    )  # fmt: skip
