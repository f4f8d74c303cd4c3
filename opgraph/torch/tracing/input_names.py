"""What the tensors are called that a function brings along: for the inputs of its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensor_names(fn: Callable[..., Any], arguments: dict[str, Any]) -> dict[int, str]:
    """id of a tensor -> its name, for the tensors in reach of a function.

    Args:
        arguments: by name: tensors, modules and anything else.
    """
    found: dict[int, str] = {}
    for name, value in _in_reach(fn, arguments):
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), name)
        elif isinstance(value, torch.nn.Module):
            for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
                found.setdefault(id(tensor), inner)
            for inner, tensor in vars(value).items():
                if isinstance(tensor, torch.Tensor):
                    found.setdefault(id(tensor), inner)
    return found


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a callable's positional parameters, as far as it tells."""
    fn = _written(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return ()
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return names[1:] if getattr(fn, "__self__", None) is not None else names


def _written(fn: Callable[..., Any]) -> Any:
    """The function as it was written, under decorators; of a module, its forward."""
    return getattr(fn, "__wrapped__", fn.forward if isinstance(fn, torch.nn.Module) else fn)


def _in_reach(fn: Callable[..., Any], arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from arguments.items()
    fn = _written(fn)
    yield "self", getattr(fn, "__self__", fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, getattr(fn, "__closure__", None) or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for name in code.co_names:
        yield name, getattr(fn, "__globals__", {}).get(name)
