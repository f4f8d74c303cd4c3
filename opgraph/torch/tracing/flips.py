"""flip, roll and half turns of a computed value: the same arithmetic on flipped and rolled tensors.

A fused function computes element by element, so its values have no memory in which they could be turned around. What
they are computed from has: torch turns that, and the arithmetic is done once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opgraph.torch.tracing import trace_errors
from opgraph.torch.tracing.emit import Emitter
from opgraph.torch.tracing.proxy import Proxy, Ref
from opgraph.torch.tracing.session import Input, Session, Step

#: The axes of functions that are given none.
_AXES = {"fliplr": (1,), "flipud": (0,)}


def turned(session: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What flip, fliplr, flipud, roll or rot90 of a computed value is.

    Raises:
        Exception: torch's own, for axes and shifts that do not fit.
        Unimplemented: rot90 by a quarter turn, which moves elements from one axis to another.
    """
    session.asks = True
    x, *rest = args or (kwargs["input"],)
    named = {name: value for name, value in kwargs.items() if name != "input"}
    func(torch.empty((1,) * x.dim()), *rest, **named)  # torch says what does not fit
    if func.__name__ == "roll":
        shifts = _numbers(rest[:1] or named["shifts"])
        axes = _numbers(rest[1:] or named.get("dims", ()))
    elif func.__name__ == "rot90":
        turns = {"k": 1, "dims": (0, 1), **dict(zip(("k", "dims"), rest)), **named}
        if turns["k"] % 2:
            raise trace_errors.view("rot90")
        shifts, axes = (), _numbers(turns["dims"]) if turns["k"] % 4 else ()
    else:
        shifts = ()
        axes = _AXES.get(func.__name__) or _numbers(rest or named["dims"])
    _, read = _arithmetic(session, x.ref)
    made = [_turned_input(session, entry, x.shape, shifts, axes) for entry in read]
    return session.call(same_arithmetic, (x, *made), {})


def same_arithmetic(value: Proxy, *tensors: torch.Tensor) -> None:
    """Stands in a trace for the arithmetic that led to a value, on other tensors than those that it read."""


def repeat_arithmetic(emitter: Emitter, args: tuple[Any, ...]) -> Ref:
    """The steps of a call of `same_arithmetic`; returns the name of the result."""
    value, *tensors = args
    steps, read = _arithmetic(emitter.session, value.ref)
    names: dict[Any, Any] = {
        entry.ref: t.ref if isinstance(t, Proxy) else emitter.session.capture(t)
        for entry, t in zip(read, tensors, strict=True)
    }
    for step in steps:
        operands = tuple([names.get(o, o) if isinstance(o, Ref) else o for o in step.operands])
        names[step.result] = emitter.step(step.kind, operands, step.dtype, dict(step.attrs))
    result: Ref = names[value.ref]
    return result


def _arithmetic(session: Session, ref: Ref) -> tuple[list[Step], list[Input]]:
    """The steps that lead to a value, and the tensors that they read the data of."""
    wanted, steps = {ref}, []
    for step in reversed(session.node.path()):
        if step.result in wanted:
            steps.append(step)
            data = step.operands[:1] if step.kind == "BroadcastTo" else step.operands
            wanted.update(o for o in data if isinstance(o, Ref))
    return steps[::-1], [entry for entry in session.inputs if entry.ref in wanted]


def _turned_input(
    session: Session, entry: Input, shape: Sequence[int], shifts: Sequence[int], axes: Sequence[int]
) -> Any:
    """A tensor that broadcasts to a shape, turned as the shape is.

    Args:
        shifts: of a roll; a flip has none.
        axes: of the shape; none where its elements are rolled in the order of memory.
    """
    tensor: Any = entry.tensor if entry.captured else session.given[id(entry.tensor)]
    run: Callable[..., Any] = session.eager if entry.captured else session.call
    own, rank = entry.tensor.shape, len(shape)
    if not own or (shifts and not axes and all(size == 1 for size in own)):
        return tensor
    if shifts and not axes:
        whole = tensor if tuple(own) == tuple(shape) else run(torch.Tensor.expand, (tensor, tuple(shape)), {})
        return run(torch.roll, (whole, tuple(shifts)), {})
    last = [axis % rank - rank for axis in axes]
    kept = [i for i, axis in enumerate(last) if -axis <= len(own) and own[axis] != 1]
    if not kept:  # one element is read for all along these axes
        return tensor
    taken = tuple(last[i] for i in kept)
    if shifts:
        return run(torch.roll, (tensor, tuple(shifts[i] for i in kept), taken), {})
    return run(torch.flip, (tensor, taken), {})


def _numbers(value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(n for v in value for n in _numbers(v))
    return (int(value),)
