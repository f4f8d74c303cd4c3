"""Random forwards: arithmetic in and out of place, views, library ops, branches on data, tensors kept after a call."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

_UNARY = (
    torch.sigmoid, torch.tanh, torch.exp, F.silu, F.gelu, F.relu, F.softplus, torch.abs, torch.square, torch.neg,
    lambda x: 1 - x, lambda x: 2 ** (0.1 * x), lambda x: x.clamp(-1, 1), lambda x: 1 / (x.abs() + 1),
    lambda x: x.to(torch.bfloat16).to(x.dtype),
    lambda x: x * 0.5 + 1, lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: x.to(torch.float64).sin().to(x.dtype),
)  # fmt: skip
_BINARY = (
    torch.add, torch.mul, torch.sub, torch.maximum, lambda a, b: a * torch.sigmoid(b), lambda a, b: a + b * 0.3,
    lambda a, b: torch.where(a > b, a, b), lambda a, b: a / (1 + b * b), lambda a, b: torch.lerp(a, b, 0.3),
)  # fmt: skip
_IN_PLACE = (
    lambda x: x.tanh_(), lambda x: F.relu(x, inplace=True), lambda x: x.mul_(0.5), lambda x: x.add_(1),
    lambda x: torch.sigmoid_(x), lambda x: F.silu(x, inplace=True), lambda x: x.clamp_(-2, 2), lambda x: x.neg_(),
)  # fmt: skip
_IN_PLACE_BINARY = (lambda a, b: a.add_(b), lambda a, b: a.mul_(b), lambda a, b: a.sub_(b, alpha=0.5))


class RandomForward(nn.Module):
    """A forward drawn from a seed, for x and y of [4, 6]."""

    def __init__(self, seed: int, steps: int = 14) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed = seed
        self.steps = steps
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.alpha = nn.Parameter(torch.tensor(0.7))
        self.kept: list[torch.Tensor] = []

    def forward(self, x, y):
        draw = random.Random(self.seed)
        values = [x, y, x * self.scale]
        for _ in range(self.steps):
            a, b = draw.choice(values), draw.choice(values)
            kind = draw.randrange(20)
            if kind < 6:
                values.append(draw.choice(_UNARY)(a))
            elif kind < 10:
                values.append(draw.choice(_BINARY)(a, b))
            elif kind == 10:
                values.append(a * self.alpha + self.scale)
            elif kind == 11:
                values.append(self.linear(a))
            elif kind == 12 and a is not x and a is not y:
                values.append(draw.choice(_IN_PLACE)(a))
            elif kind == 13 and a is not x and a is not y:
                draw.choice(_IN_PLACE_BINARY)(a, b)
            elif kind == 14 and a is not x and a is not y:
                a[:, 1:3] *= 0.5  # through a view
            elif kind == 15:
                values.append(torch.cat((a[:, 3:], -b[:, :3]), -1))
            elif kind == 16 and a.sum() > 0:  # a branch on the data
                values.append(a - b.mean(1, keepdim=True))
            elif kind == 17:
                with torch.no_grad():
                    values.append(torch.sigmoid(a) * b)
            elif kind == 18:
                del values[draw.randrange(2, len(values))]
                values.append(a.detach() * 2 + b)
            elif kind == 19:
                view = a.view(2, 12)
                values.append((view * 2 + 1).view(4, 6))
        self.kept = values[2:]
        return values[-1], sum(values[2:])
