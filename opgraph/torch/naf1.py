"""NAF1: a trainable activation of fractional order, as it was posted, except that its buffer is a tensor.

opgraph started from this activation, and `opgraph demo` begins with it. Source: the fractional derivative of SELU by
Gruenwald-Letnikov, as a PyTorch user wrote it: arithmetic of the order in Python, a recursive gamma function with a
branch on its argument, and torch.where around both halves.
"""

from __future__ import annotations

import math

import torch
from torch import nn


def gamma(x: torch.Tensor, t: float = 0.01) -> torch.Tensor:
    """The gamma function of a 0-d tensor, by reflection below t; arguments at poles are shifted."""
    if x < t:
        if torch.abs(x - torch.round(x)) < 1e-4:
            x = x + 1e-4
        return math.pi / (torch.sin(math.pi * x) * gamma(1 - x))
    return torch.exp(torch.lgamma(x))


class NAF1(nn.Module):
    """The activation; any shape. Its order is sigmoid(frac_order) * 1.8 + 0.1, between 0.1 and 1.9."""

    def __init__(self, frac_order: float = 0.0, lambda_: float = 1.0507, alpha: float = 1.67326) -> None:
        super().__init__()
        self.frac_order = nn.Parameter(torch.tensor(float(frac_order)))
        self.lambda_ = lambda_
        self.alpha = alpha
        self.h: torch.Tensor
        self.register_buffer("h", torch.tensor(1.0))  # posted: register_buffer("h", [1.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of x, of the same shape."""
        order = torch.sigmoid(self.frac_order) * 1.8 + 0.1
        positive = torch.where(x > 0, x, 1.0)
        negative = torch.where(x <= 0, x, 1.0)
        right = self.lambda_ * torch.pow(positive, 1 - order) / gamma(2 - order)
        total = 0
        for n in range(3):
            weight = gamma(1 + order) / (gamma(torch.tensor(n + 1.0)) * gamma(1 - n + order)) * (-1) ** n
            total = total + (1 - torch.exp(negative - n * self.h)) * weight
        left = self.alpha * self.lambda_ / torch.pow(self.h, order) * total
        return torch.where(x > 0, right, left)


def with_order(order: float) -> NAF1:
    """NAF1 with an initial order of about `order`."""
    p = (order - 0.1) / 1.8
    return NAF1(math.log(p / (1 - p)))
