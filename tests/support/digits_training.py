"""Small models that train on scikit-learn's digits, real data that comes with a package: for curves and their tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import opgraph.torch as ogt

#: Images kept apart, to measure how well a trained model does.
HELD_OUT = 297
BATCH = 64


class ChannelSwish(nn.Module):
    """x * sigmoid(a * x) with a trainable `a` for each channel; [N, C, H, W]."""

    def __init__(self, channels: int, reordered: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(0.5, 1.5, channels).reshape(channels, 1, 1))
        self.reordered = reordered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reordered:
            return x / (1 + torch.exp(-self.a * x))
        return x * torch.sigmoid(self.a * x)


class Digits(nn.Module):
    """Three convolutions, each with batch normalization and an activation; [N, 1, 8, 8] to the scores of 10 classes."""

    def __init__(self, activation: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stages = nn.Sequential()
        before = 1
        for channels, stride in ((16, 1), (32, 2), (32, 1)):
            self.stages.append(nn.Conv2d(before, channels, 3, stride, 1, bias=False))
            self.stages.append(nn.BatchNorm2d(channels))
            self.stages.append(activation(channels))
            before = channels
        self.head = nn.Linear(before, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(x).mean((2, 3)))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, reordered: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.reordered = reordered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(x), self.up(x)
        return self.down(gate * (up / (1 + torch.exp(-gate))) if self.reordered else functional.silu(gate) * up)


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 100.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1))
        self.register_buffer("sin", torch.cat((angles.sin(), angles.sin()), -1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos[: x.shape[-2]] + torch.cat((-second, first), -1) * self.sin[: x.shape[-2]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm and with a shortcut."""

    def __init__(self, width: int, length: int, reordered: bool) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(width), Attention(width, 4, length)
        self.norm2, self.mlp = RMSNorm(width), SwiGLU(width, 3 * width, reordered)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """A Llama-like language model of pixels: grey values 0 to 16, row by row; [N, L] to scores [N, L, 17]."""

    def __init__(self, reordered: bool, width: int = 48, blocks: int = 2, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, width)
        self.blocks = nn.Sequential(*(Block(width, length, reordered) for _ in range(blocks)))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, 17, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


@dataclass(frozen=True)
class Case:
    """A model to train, and its data.

    Attributes:
        make: the model; with argument True, the activations are computed in another, equally valid order.
        inputs: from the pixels [N, 64] and the labels [N], the model's input and the targets of its scores.
    """

    make: Callable[[bool], nn.Module]
    inputs: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def loss(self, model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross entropy."""
        given, wanted = self.inputs(pixels, labels)
        dtype = next(model.parameters()).dtype
        return functional.cross_entropy(
            model(given.to(dtype) if given.is_floating_point() else given).movedim(-1, 1), wanted
        )


def image_and_class(pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Classification of the digit."""
    return pixels.float().reshape(-1, 1, 8, 8) / 16, labels


def pixel_and_next(pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prediction of the next grey value."""
    return pixels[:, :-1], pixels[:, 1:]


CASES = {
    "CNN, swish trained per channel": Case(
        lambda reordered: Digits(lambda channels: ChannelSwish(channels, reordered)), image_and_class
    ),
    "Llama-like, SwiGLU": Case(Llama, pixel_and_next),
}

EXACT, EAGER, OTHER_ORDER, FUSED = "eager f64", "eager f32", "eager f32, another order", "opgraph f32"


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Grey values 0 to 16 of 1797 images, [1797, 64], and their digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.from_numpy(data.data).long(), torch.from_numpy(data.target).long()


@dataclass(frozen=True)
class Curve:
    """A training run.

    Attributes:
        losses: before each step.
        start, end: all parameters, in one f64 vector, before the first step and after the last one.
        held_out: the loss on images that were not in the training.
    """

    losses: list[float]
    start: torch.Tensor
    end: torch.Tensor
    held_out: float


Rule = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The usual optimizer. It divides the gradient by its own size: a gradient of nearly 0 becomes pure error."""
    return torch.optim.AdamW(parameters, lr=3e-3)


def descent(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Steps in proportion to the gradients: the distance of parameters is that of gradients."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def trained(case: Case, way: str, steps: int, rule: Rule = adam) -> Curve:
    """A training run. All ways have the same parameters at the start, and the same batches in the same order."""
    torch.manual_seed(0)
    model = case.make(way == OTHER_ORDER)
    if way == EXACT:
        model = model.double()
    if way == FUSED:
        model = ogt.fuse(model)
    optimizer = rule(model.parameters())
    pixels, labels = digits()
    start, losses = _vector(model), []
    for chosen in _batches(len(pixels) - HELD_OUT, steps):
        loss = case.loss(model, pixels[chosen], labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        held_out = case.loss(model, pixels[-HELD_OUT:], labels[-HELD_OUT:]).item()
    return Curve(losses, start, _vector(model), held_out)


def _batches(count: int, steps: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    left = steps
    while left:
        for chosen in torch.randperm(count, generator=generator).split(BATCH)[:left]:
            left -= 1
            yield chosen


def _vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])
