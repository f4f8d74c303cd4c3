"""Small networks for 32x32 images whose activation is an argument, to measure its cost in a network.

ResNet-18 and -50 (He et al. 2015, arXiv:1512.03385) in their CIFAR form: a 3x3 stem, no pooling after it.
EfficientNet-B0 (Tan and Le 2019, arXiv:1905.11946) with a stem of stride 1. Weights are torch's random ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Activation = Callable[[], nn.Module]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut. [N, I, H, W] -> [N, O, H / stride, W / stride]."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = activation()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(inputs, width, stride)
        self.act2 = activation()

    def forward(self, x: torch.Tensor) -> Any:
        """The block's output."""
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.act2(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut; the result has four times `width` channels."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = activation()
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.act2 = activation()
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(inputs, 4 * width, stride)
        self.act3 = activation()

    def forward(self, x: torch.Tensor) -> Any:
        """The block's output."""
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.act2(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.act3(y + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Four stages of blocks between a 3x3 stem and a linear classifier. [N, 3, 32, 32] -> [N, classes]."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        counts: Sequence[int],
        activation: Activation,
        classes: int,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.act1 = activation()
        inputs = 64
        for index, count in enumerate(counts):
            blocks = []
            for position in range(count):
                stride = 2 if index and not position else 1
                blocks.append(block(inputs, 64 << index, stride, activation))
                inputs = (64 << index) * block.expansion
            self.add_module(f"layer{index + 1}", nn.Sequential(*blocks))
        self.pool = nn.AvgPool2d(4)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> Any:
        """The scores of the classes."""
        x = self.act1(self.bn1(self.conv1(x)))
        for index in range(1, 5):
            x = self.get_submodule(f"layer{index}")(x)
        return self.linear(self.pool(x).flatten(1))


class SqueezeExcite(nn.Module):
    """Scales the channels by factors that a small network computes from their means."""

    def __init__(self, channels: int, squeezed: int, activation: Activation) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.act = activation()
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scaled channels, of the shape of x."""
        means = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.expand(self.act(self.reduce(means))))


class MBConv(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, projection; with a shortcut if the shapes agree."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int, activation: Activation
    ) -> None:
        super().__init__()
        width = inputs * expansion
        self.expand = nn.Sequential()
        if expansion != 1:
            self.expand = nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), activation())
        self.depthwise = nn.Sequential(
            nn.Conv2d(width, width, kernel, stride, kernel // 2, groups=width, bias=False),
            nn.BatchNorm2d(width),
            activation(),
        )
        self.se = SqueezeExcite(width, max(1, inputs // 4), activation)
        self.project = nn.Sequential(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> Any:
        """The block's output."""
        y = self.project(self.se(self.depthwise(self.expand(x))))
        return y + x if self.residual else y


#: Blocks, channels, kernel, stride, expansion of each stage: table 1 of the paper.
_B0 = (
    (1, 16, 3, 1, 1), (2, 24, 3, 2, 6), (2, 40, 5, 2, 6), (3, 80, 3, 2, 6),
    (3, 112, 5, 1, 6), (4, 192, 5, 2, 6), (1, 320, 3, 1, 6),
)  # fmt: skip


class EfficientNet(nn.Module):
    """EfficientNet-B0. [N, 3, 32, 32] -> [N, classes]."""

    def __init__(self, activation: Activation, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), activation())
        blocks = []
        inputs = 32
        for count, outputs, kernel, stride, expansion in _B0:
            for position in range(count):
                blocks.append(MBConv(inputs, outputs, kernel, 1 if position else stride, expansion, activation))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Conv2d(inputs, 1280, 1, bias=False), nn.BatchNorm2d(1280), activation())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.2)
        self.linear = nn.Linear(1280, classes)

    def forward(self, x: torch.Tensor) -> Any:
        """The scores of the classes."""
        x = self.head(self.blocks(self.stem(x)))
        return self.linear(self.dropout(self.pool(x).flatten(1)))


def resnet18(activation: Activation = nn.ReLU, classes: int = 10) -> ResNet:
    """ResNet-18 for [N, 3, 32, 32]: 11.2 M parameters, 17 activations."""
    return ResNet(BasicBlock, (2, 2, 2, 2), activation, classes)


def resnet50(activation: Activation = nn.ReLU, classes: int = 10) -> ResNet:
    """ResNet-50 for [N, 3, 32, 32]: 23.5 M parameters, 49 activations."""
    return ResNet(Bottleneck, (3, 4, 6, 3), activation, classes)


def efficientnet_b0(activation: Activation = nn.SiLU, classes: int = 10) -> EfficientNet:
    """EfficientNet-B0 for [N, 3, 32, 32]: 4.0 M parameters, 49 activations."""
    return EfficientNet(activation, classes)


#: Name -> function that makes the network with an activation.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "efficientnet_b0": efficientnet_b0,
}
