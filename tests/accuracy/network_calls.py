"""What a call of a random network does, and how it differs from a call in eager torch (`random_networks.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from random_networks import Text


@dataclass(frozen=True)
class Case:
    """A kind of call.

    Attributes:
        batch: the size of axis 0.
        training, grads, inference: the modes that it is called in.
        twice: a second call before the backward passes; their gradients add up.
        apart: a backward pass for each result.
    """

    batch: int
    training: bool = False
    grads: bool = False
    inference: bool = False
    twice: bool = False
    apart: bool = False

    def __str__(self) -> str:
        names = ("training", "grads", "inference", "twice", "apart")
        return ", ".join([f"batch {self.batch}", *(name for name in names if getattr(self, name))])


def run(model: Any, text: Text, given: list[torch.Tensor], seed: int, case: Case) -> dict[str, Any]:
    """What a call does: results, gradients, parameters, buffers, written inputs, random numbers."""
    torch.manual_seed(seed)
    model.zero_grad()
    needed = [case.grads and needs for needs in (*text.grads, False)]
    tensors = [t.clone().requires_grad_(needs) for t, needs in zip(given, needed, strict=True)]
    called = [t * 1 if t.requires_grad else t for t in tensors]  # what is written is no leaf
    if text.same:
        called[1] = called[0]
    with torch.inference_mode() if case.inference else torch.set_grad_enabled(case.grads):
        results = tree_leaves(model(*called))
        more = tree_leaves(model(*[t.detach().clone() for t in given])) if case.twice else []
    found: dict[str, Any] = {}
    for i, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            found[f"result {i}"] = result
            continue
        found[f"result {i}"] = result.detach().clone()
        found[f"strides {i}"] = _strides(result)
        if not result.requires_grad or _has_gradient(result):
            found[f"requires_grad {i}"] = result.requires_grad
        found[f"shares {i}"] = [_shares(result, t) for t in called]
    for i, t in enumerate(called):
        found[f"input {i}"] = t.detach().clone()
    for kind, outputs in (("", results), ("both calls' ", more)):
        differentiable = [i for i, r in enumerate(outputs) if isinstance(r, torch.Tensor) and r.requires_grad]
        for places in [[i] for i in differentiable] if case.apart else [differentiable] if differentiable else []:
            passed = [outputs[i] for i in places]
            cotangents = [torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view(r.shape) for r in passed]
            torch.autograd.backward(passed, cotangents, retain_graph=case.apart)
            if any(map(_has_gradient, passed)):
                start = f"result {places[0]}" if case.apart else "results"
                found.update({f"{kind}gradient of {name} from {start}": g for name, g in _gradients(model, tensors)})
    found.update({f"gradient of {name}": g for name, g in _gradients(model, tensors)})
    for name, value in [*model.named_buffers(), *model.named_parameters()]:
        found[name] = value.detach().clone()
    found["random numbers"] = torch.rand(2)
    return found


def _gradients(model: nn.Module, tensors: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Copies of the gradients of the parameters, of `x` and of `y`, by name."""
    for name, p in [*model.named_parameters(), *zip(("x", "y"), tensors[:2], strict=True)]:
        yield name, None if p.grad is None else p.grad.clone()


def _has_gradient(result: torch.Tensor) -> bool:
    """Whether a backward pass from a result reaches a leaf; from what a view made under `no_grad` gives, none does."""
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            if hasattr(node, "variable"):
                return True
            seen.add(node)
            waiting += [source for source, _ in node.next_functions]
    return False


def _strides(result: torch.Tensor) -> tuple[int, ...] | None:
    """Those of axes longer than 1; None of a view that does not fill its memory: a fused model may return a copy."""
    found = sorted((s, n) for s, n in zip(result.stride(), result.shape, strict=True) if n > 1)
    is_dense = all(s == (found[i - 1][0] * found[i - 1][1] if i else 1) for i, (s, _) in enumerate(found))
    return tuple(s for s, n in zip(result.stride(), result.shape, strict=True) if n > 1) if is_dense else None


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def differs(got: Any, expected: Any) -> str:
    """Why one entry of what a call does is not another call's in eager torch; "" where it is."""
    if expected is None and isinstance(got, tuple):
        return ""  # strides of what eager torch returns as a view
    if isinstance(expected, list):  # torch.compile returns a copy where F.dropout gives back its argument
        more = any(ours and not theirs for ours, theirs in zip(got, expected, strict=True))
        return "it lies in memory that it has of its own in eager torch" if more else ""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if type(got) is type(expected) and got == expected:
            return ""
        return " is not ".join("a tensor" if isinstance(v, torch.Tensor) else str(v) for v in (got, expected))
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype}{list(got.shape)} is not {expected.dtype}{list(expected.shape)}"
    size = expected.abs().nan_to_num().max().item() if expected.numel() else 0
    try:
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7 * max(1.0, size), equal_nan=True)
    except AssertionError as error:
        return str(error).replace("\n", " ")[:160]
    return ""
