"""What an observed run leaves behind: overwritten values, reads of them, and values kept for backward."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from opgraph.torch.inplace.source_position import Position, Sibling


@dataclass(slots=True, eq=False)
class Overwrite:
    """One op that wrote into memory that existed before.

    Attributes:
        number: counts the ops of the run.
        stack: the frames that led to it, innermost first.
        before: a copy of what was there, where it is small enough.
        like: the tensor that was written.
        hidden: whether autograd did not see it though the value has a gradient.
        in_backward: whether it happened inside a backward pass.
        beside: per frame, the other operands of the expressions around it that read the value.
        names: per frame, the names that it had.
        targets: the names that its statement binds.
    """

    number: int
    op: str
    stack: list[Position]
    before: torch.Tensor | None
    like: torch.Tensor
    hidden: bool
    in_backward: bool
    beside: list[tuple[FrameType, Sibling]] = field(default_factory=list)
    names: dict[FrameType, set[str]] = field(default_factory=dict)
    targets: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Misread:
    """An op that read an overwritten value; `aliased`: under another name, rather than in the same expression."""

    overwrite: Overwrite
    reader: Position
    aliased: bool


@dataclass(slots=True, eq=False)
class Kept:
    """One tensor that autograd keeps for backward."""

    tensor: torch.Tensor
    number: int
    version: int
    digest: bytes
    stack: list[Position]


@dataclass(slots=True, eq=False)
class Spoilt:
    """A kept tensor that backward found changed; `overwrite` is None where nothing is known to have written it."""

    kept: Kept
    overwrite: Overwrite | None
    raises: bool


@dataclass(slots=True, eq=False)
class FunctionCall:
    """A call of a custom autograd.Function that wrote into one of its arguments.

    Attributes:
        args: the arguments as they were before; tensors are copies.
        overwrite: the first write.
    """

    cls: type
    args: list[Any]
    overwrite: Overwrite


def memory_of(tensor: torch.Tensor) -> int:
    """What tells one storage from another."""
    return int(tensor.untyped_storage()._cdata)


def digest(tensor: torch.Tensor) -> bytes:
    """A fingerprint of the values, bit by bit."""
    raw = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(raw.view(torch.uint8).numpy().data if raw.numel() else b"", digest_size=16).digest()


def plain(tensor: object) -> bool:
    """Whether a value is a tensor with memory of its own."""
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.device.type != "meta"
