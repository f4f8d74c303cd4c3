"""One run of a program: its results, what became of its arguments, and its gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from opinfo_calls import Call, mapped, tensors_in


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        values: name -> tensor, or any other object that was returned; None for a gradient that is none.
        error: what was raised instead.
        result: the program's result as it was returned.
    """

    values: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    result: Any = None


def run(
    program: Callable[..., Any],
    call: Call,
    derivative: int = 0,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    convert: Callable[[Any], Any] | None = None,
) -> Outcome:
    """Calls a program on copies of a call's arguments.

    Args:
        derivative: how often the results are differentiated by all arguments that require a gradient.
        change: applied to every tensor argument and to every cotangent.
        convert: applied to every argument that is no tensor, such as a dtype.
    """
    outcome = Outcome()
    change = change or (lambda x: x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, kwargs = (copied(v, change, convert) for v in (call.args, call.kwargs))
        given = tensors_in((args, kwargs))
        try:
            torch.manual_seed(0)
            outcome.result = call.prepare(program(*args, **kwargs)) if derivative else program(*args, **kwargs)
            _note(outcome, outcome.result)
            if derivative:
                _differentiate(outcome, [t for t in given if t.requires_grad], derivative, change)
        except Exception as error:
            outcome.error = error
            return outcome
    if call.form in ("in place", "in place operator", "out"):
        outcome.values.update((f"argument {i} afterwards", t.detach()) for i, t in enumerate(given))
    return outcome


def copied(value: Any, change: Callable[[torch.Tensor], torch.Tensor], convert: Callable[[Any], Any] | None) -> Any:
    """The same value with new tensors, laid out in memory as the old ones are."""
    if type(value) in (list, tuple):
        return type(value)(copied(v, change, convert) for v in value)
    if type(value) is dict:
        return {name: copied(v, change, convert) for name, v in value.items()}
    if isinstance(value, torch.Tensor):
        made = change(_copy(value.detach()))
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


def _differentiate(outcome: Outcome, leaves: list[torch.Tensor], times: int, change: Any) -> None:
    results = [t for t in tensors_in(outcome.result) if t.requires_grad]
    if not leaves or not results:
        return
    cotangents = _cotangents(results, 1, change, times > 1)
    grads = torch.autograd.grad(results, leaves, cotangents, allow_unused=True, create_graph=times > 1)
    outcome.values.update((f"gradient {i}", g) for i, g in enumerate(grads))
    again = [g for g in grads if g is not None and g.requires_grad]
    if times == 1 or not again:
        return
    wrt = leaves + [c for c in cotangents if c.requires_grad]
    seconds = torch.autograd.grad(again, wrt, _cotangents(again, 2, change, False), allow_unused=True)
    outcome.values.update((f"second derivative {i}", g) for i, g in enumerate(seconds))


def _cotangents(results: list[torch.Tensor], seed: int, change: Any, requires_grad: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for result in results:
        draw = torch.rand(result.shape, dtype=torch.float64, generator=generator) + 0.5
        # Numbers of few bits, which every dtype holds: they are the same in the truth.
        value = ((8 * draw).round() / 8).to(result.dtype)
        made.append(
            change(value.to_sparse() if result.layout is not torch.strided else value).requires_grad_(requires_grad)
        )
    return made


__all__ = ["Outcome", "copied", "mapped", "run"]
