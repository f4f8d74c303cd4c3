"""Errors for operations that a traced function must not do, with the line of the user's code."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from opgraph.errors import InvalidArguments, Unimplemented
from opgraph.runtime.providers.torch_internals import is_forward_mode
from opgraph.torch.autograd_function_hooks import RUN

#: Files of torch, of opgraph, and of the Python modules through which both call.
LIBRARY = (
    os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[2]) + os.sep, "<frozen",
    contextlib.__file__, functools.__file__,
)  # fmt: skip
_GENERATED = (*LIBRARY, "<string>")
#: The fix for most errors below.
OUTSIDE = "call it outside of the fused function, before or after"


def place() -> str:
    """The innermost line outside torch and opgraph that led here: "file.py:12 in act"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_GENERATED):
        frame = frame.f_back
    if frame is None:
        return "a fused function"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def users_level() -> int:
    """The `stacklevel` with which a warning of the caller names the innermost line outside torch and opgraph."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_GENERATED):
        level, frame = level + 1, frame.f_back
    return level


def label() -> str:
    """`place` in short form, as the name of an op: "file.py:12"."""
    return os.path.basename(place().split(" in ")[0])


def branch_on_data(what: str) -> InvalidArguments:
    """The error for Python code that reads the value of data."""
    return InvalidArguments(
        f"a fused function cannot read the values of its data: {what} needs them",
        where=place(),
        fix="choose between values with torch.where(condition, a, b), or leave this function unfused",
    )


def sequence(kind: str) -> InvalidArguments:
    """The error for an operator between data and a Python sequence."""
    return InvalidArguments(
        f"data of a fused function meet a {kind}",
        where=place(),
        fix="pass tensors or numbers: torch.tensor(values) outside of the function",
    )


def writes(what: str, target: str) -> InvalidArguments:
    """The error for in-place arithmetic on something that is not the function's own."""
    return InvalidArguments(
        f"{what} writes into {target}",
        where=place(),
        fix="use the function without the underscore (y = x + 1), or x.clone() first",
    )


def unknown(name: str, why: str, fix: str) -> Unimplemented:
    """The error for a torch function that cannot be part of a fused function."""
    return Unimplemented(f"torch's {name} cannot be fused: {why}", where=place(), fix=fix)


def view(name: str) -> Unimplemented:
    """The error for a view of a value that has no memory."""
    return unknown(
        name, "it is applied to a computed value", "apply it to the arguments, before any arithmetic, or outside"
    )


def wrong_dtype(name: str, dtype: object) -> Unimplemented:
    """The error for a function of a dtype in which opgraph does not compute it.

    It is no TypeError, because torch's operators convert every TypeError to NotImplemented.
    """
    return Unimplemented(
        f"{name} of {str(dtype).removeprefix('torch.')} cannot be fused", where=place(), fix="cast its operands first"
    )


def random(name: str) -> Unimplemented:
    """The error for a function that draws random numbers, whose result is not reproducible."""
    return unknown(name, "it draws random numbers", OUTSIDE)


def meets_array() -> InvalidArguments:
    """The error for data and a NumPy array as operands of one call."""
    return InvalidArguments(
        "data of a fused function meet a NumPy array",
        where=place(),
        fix="make it a tensor outside of the function: torch.as_tensor(array)",
    )


def check_grad_mode(name: str, with_gradients: bool) -> None:
    """Rejects a call in another grad mode than the function's, except under no_grad.

    Raises:
        Unimplemented: the call is in the forward of an autograd.Function, under enable_grad, or under no_grad in
            forward-mode differentiation, which no_grad does not stop.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not RUN:
        frame = frame.f_back
    if frame is not None:
        raise unknown(
            name,
            "it stands in a torch.autograd.Function, which has a backward of its own",
            "call that outside of the fused function, or write its forward alone: opgraph derives the gradient",
        )
    if not with_gradients:
        raise unknown(name, "it stands under enable_grad, in a function that is called under no_grad", OUTSIDE)
    if is_forward_mode():
        raise unknown(
            name, "it stands under no_grad, which stops gradients and not tangents", "use detach(), which stops both"
        )


def compares_classes(fn: Callable[..., Any]) -> Unimplemented:
    """The error for a function that tests `type(x) is torch.Tensor`."""
    return Unimplemented(
        "a fused function cannot compare the class of a tensor: type(x)",
        where=getattr(fn, "__qualname__", repr(fn)),
        fix="use isinstance(x, torch.Tensor)",
    )


def leaked() -> InvalidArguments:
    """The error for a value of one run that is used in another."""
    return InvalidArguments(
        "a value of an earlier call of a fused function is used in this one",
        where=place(),
        fix="return it instead of keeping it in a variable outside the function",
    )
