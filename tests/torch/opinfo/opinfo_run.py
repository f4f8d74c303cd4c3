"""One run of a program: its results, its arguments after the call, and its gradients."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from opinfo_calls import Call, seed, tensors_in


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        values: name -> tensor, or any other returned object; None for a gradient that is None.
        error: the exception that was raised instead.
        result: the program's result as it was returned.
        unfused: the warning that the program, or a part of it, runs as it was written.
    """

    values: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    result: Any = None
    unfused: str = ""


def run(
    program: Callable[..., Any],
    call: Call,
    derivative: int = 0,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    convert: Callable[[Any], Any] | None = None,
) -> Outcome:
    """Calls a program on copies of a call's arguments.

    Args:
        derivative: how many times the results are differentiated by all arguments that require a gradient.
        change: a function that is applied to every tensor argument and to every cotangent.
        convert: a function that is applied to every other argument, such as a dtype.
    """
    change = change or (lambda x: x)
    return _run(lambda given: [program(*given[0][0], **given[0][1])], [call], derivative, change, convert)[0]


def run_together(program: Callable[[list[Any]], list[Any]], calls: Sequence[Call], derivative: int) -> list[Outcome]:
    """Runs several calls in one program, which takes (args, kwargs) of each and returns a result of each; see `run`.

    An exception becomes the error of all outcomes.
    """
    return _run(program, calls, derivative, lambda x: x, None)


def _run(
    program: Callable[[list[Any]], list[Any]],
    calls: Sequence[Call],
    derivative: int,
    change: Callable[[torch.Tensor], torch.Tensor],
    convert: Callable[[Any], Any] | None,
) -> list[Outcome]:
    outcomes = [Outcome() for _ in calls]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        given = [(copied(c.args, change, convert), copied(c.kwargs, change, convert)) for c in calls]
        tensors = [tensors_in(g) for g in given]
        try:
            seed()
            for outcome, call, result in zip(outcomes, calls, program(given), strict=True):
                outcome.result = call.prepare(result) if derivative else result
                _note(outcome, outcome.result)
            if derivative:
                _differentiate(outcomes, [[t for t in some if t.requires_grad] for some in tensors], derivative, change)
        except Exception as error:
            for outcome in outcomes:
                outcome.error = error
            return outcomes
    unfused = next((str(w.message) for w in warned if " runs unfused: " in str(w.message)), "")
    for outcome, call, some in zip(outcomes, calls, tensors, strict=True):
        outcome.unfused = unfused
        if call.form in ("in place", "in place operator", "out", "module"):
            outcome.values.update((f"argument {i} afterwards", t.detach()) for i, t in enumerate(some))
    return outcomes


def copied(value: Any, change: Callable[[torch.Tensor], torch.Tensor], convert: Callable[[Any], Any] | None) -> Any:
    """The same value with new tensors of the same memory layout."""
    if type(value) in (list, tuple):
        return type(value)(copied(v, change, convert) for v in value)
    if type(value) is dict:
        return {name: copied(v, change, convert) for name, v in value.items()}
    if isinstance(value, torch.Tensor):
        made = change(_copy(value.detach()))
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(made, value.requires_grad)
        return made.requires_grad_() if value.requires_grad else made
    return convert(value) if convert is not None else value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_neg() or tensor.is_conj():
        return tensor.clone()
    made = torch.empty(0, dtype=tensor.dtype)
    storage = tensor.untyped_storage().clone()
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


def _note(outcome: Outcome, result: Any) -> None:
    if isinstance(result, torch.Tensor):
        outcome.values["result"] = result
        return
    leaves: list[Any] = []
    _leaves(result, leaves)
    outcome.values.update((f"result {i}", leaf) for i, leaf in enumerate(leaves))


def _leaves(value: Any, found: list[Any]) -> None:
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for v in value:
            _leaves(v, found)
    else:
        found.append(value)


def _differentiate(outcomes: list[Outcome], leaves: list[list[torch.Tensor]], times: int, change: Any) -> None:
    """Adds the gradients to all outcomes, by one backward pass."""
    found = [[t for t in tensors_in(o.result) if t.requires_grad] if some else [] for o, some in zip(outcomes, leaves)]
    cotangents = [_cotangents(results, 1, change, times > 1) for results in found]
    wrt = [some if results else [] for some, results in zip(leaves, found)]
    firsts = _gradients(found, wrt, cotangents, create_graph=times > 1)
    _note_all(outcomes, "gradient", firsts)
    if times == 1:
        return
    again = [[g for g in grads if g is not None and g.requires_grad] for grads in firsts]
    wrt = [
        some + [c for c in given if c.requires_grad] if grads else []
        for some, given, grads in zip(wrt, cotangents, again)
    ]
    seconds = _gradients(again, wrt, [_cotangents(grads, 2, change, False) for grads in again])
    _note_all(outcomes, "second derivative", seconds)


def _gradients(results: Any, wrt: Any, cotangents: Any, create_graph: bool = False) -> list[list[Any]]:
    """Gradients of lists of lists, one inner list for each outcome."""
    flat = [[t for some in lists for t in some] for lists in (results, wrt, cotangents)]
    if not flat[0]:
        return [[] for _ in results]
    grads = iter(torch.autograd.grad(*flat, allow_unused=True, create_graph=create_graph))
    return [list(itertools.islice(grads, len(some))) for some in wrt]


def _note_all(outcomes: list[Outcome], name: str, grads: list[list[Any]]) -> None:
    for outcome, some in zip(outcomes, grads):
        outcome.values.update((f"{name} {i}", g) for i, g in enumerate(some))


def _cotangents(results: list[torch.Tensor], number: int, change: Any, requires_grad: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    made = []
    for result in results:
        draw = torch.rand(result.shape, dtype=torch.float64, generator=generator) + 0.5
        # These numbers have few bits and are exact in every dtype, so the truth uses the same ones.
        value = ((8 * draw).round() / 8).to(result.dtype)
        made.append(
            change(value.to_sparse() if result.layout is not torch.strided else value).requires_grad_(requires_grad)
        )
    return made
