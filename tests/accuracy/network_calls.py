"""The effects of one call of a random network, and its differences from eager torch's (`random_networks.py`)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from random_networks import Text


@dataclass(frozen=True)
class Case:
    """A kind of call.

    Attributes:
        batch: the size of axis 0.
        training, grads, inference: the modes that it is called in.
        twice: a second call before the backward passes; their gradients add up.
        apart: a separate backward pass for each result.
        again: two backward passes through the same graph.
        accumulates: gradients are added to those of earlier calls.
        checkpointed: the call is inside a checkpoint, which calls the network again in backward.
        offloaded: the call has hooks that move saved tensors.
        other: the arguments contain other numbers and words.
        layout: the memory layout of `x` and `y` (`LAYOUTS`).
        change: the change of the model before the call (`CHANGES`).
    """

    batch: int
    training: bool = False
    grads: bool = False
    inference: bool = False
    twice: bool = False
    apart: bool = False
    again: bool = False
    accumulates: bool = False
    checkpointed: bool = False
    offloaded: bool = False
    other: bool = False
    layout: str = "contiguous"
    change: str = "unchanged"

    def __str__(self) -> str:
        set_ = [name for name, value in vars(self).items() if value is True]
        named = [name for name in (self.layout, self.change) if name not in ("contiguous", "unchanged")]
        return ", ".join([f"batch {self.batch}", *set_, *named])


#: The first case is the first call of each network; the others are drawn.
CASES = (
    Case(3, training=True, grads=True),
    Case(3),
    Case(3, inference=True),
    Case(3, grads=True, again=True),
    Case(3, training=True, grads=True, accumulates=True),
    Case(3, training=True, grads=True, checkpointed=True),
    Case(3, training=True, grads=True, offloaded=True),
    Case(5, training=True, grads=True, twice=True),
    Case(2, grads=True, apart=True),
    Case(4, training=True, other=True),
    Case(1, training=True, grads=True),
    Case(1),
    Case(0, training=True, grads=True),
    Case(0),
    Case(7, grads=True, other=True),
)


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


#: Layouts of inputs, each a function of a contiguous tensor.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "channels last": _channels_last,
    "turned": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "axes reversed": lambda t: t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim()))),
    "every second element": lambda t: torch.stack((t, -t), -1).flatten(-2)[..., ::2],
    "part of a larger one": lambda t: torch.cat((t, t, t), 1)[:, t.shape[1] : 2 * t.shape[1]],
    "expanded": lambda t: t[:, :1].expand_as(t),
}


def _halved(module: nn.Module, args: Any, made: Any) -> Any:
    return tree_map(lambda v: v * 0.5 if isinstance(v, torch.Tensor) and v.is_floating_point() else v, made)


def _doubled_first(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return (args[0] * 2, *args[1:])


def _with_hooks(model: Any) -> Any:
    for child in model.children():
        child.register_forward_hook(_halved)
        child.register_forward_pre_hook(_doubled_first)
    return model


def _hooked(model: Any) -> Any:
    model.register_forward_hook(_halved)
    return model


def _frozen(model: Any) -> Any:
    for p in list(model.parameters())[::2]:
        p.requires_grad_(not p.requires_grad)
    return model


def _another_weight(model: Any) -> Any:
    model.weight = nn.Parameter(model.weight.detach() * 0.5)
    model.scale = model.scale.detach() * 2
    return model


def _loaded(model: Any) -> Any:
    state = {name: value * 0.5 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return model


#: Changes of a model between two calls.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "unchanged": lambda model: model,
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "hooks on parts": _with_hooks,
    "a hook": _hooked,
    "frozen": _frozen,
    "another weight": _another_weight,
    "loaded": _loaded,
}


def inputs(seed: int, batch: int, image: bool, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Two inputs, and a tensor of integers below 7."""
    source = torch.Generator().manual_seed(seed + batch)
    shape = (batch, 4, 6, 6) if image else (batch, 6, 8)
    made = [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for _ in range(2)]
    return [*made, torch.randint(7, (batch, 5), generator=source)]


def more(other: bool, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The last argument: a dict of numbers, flags, None and tensors.

    Args:
        other: True for other numbers and flags.
    """
    kind = torch.complex128 if dtype is torch.float64 else torch.complex64
    return {
        "factor": 1.5 if other else 0.5,
        "size": 3 if other else 2,
        "flag": other,
        "pair": (torch.tensor([0.75], dtype=dtype), None),
        "complex": torch.tensor([0.5 + 1j], dtype=kind),
    }


def run(model: Any, text: Text, seed: int, case: Case) -> dict[str, Any]:
    """The effects of a call: results, gradients, parameters, buffers, written inputs, random numbers."""
    torch.manual_seed(seed)
    if not case.accumulates:
        model.zero_grad()
    given = inputs(seed, case.batch, text.image, text.dtype)
    needed = [case.grads and needs for needs in (*text.grads, False)]
    leaves = [t.clone().requires_grad_(needs) for t, needs in zip(given, needed, strict=True)]
    called: list[Any] = [t * 1 if t.requires_grad else t for t in leaves]  # tensors that are written must not be leaves
    called[:2] = map(LAYOUTS[case.layout], called[:2])
    if text.same:
        called[1] = called[0] if text.same == "same" else called[0][:]
    extra = more(case.other, text.dtype)
    casts = torch.autocast("cpu", text.autocast) if text.autocast else nullcontext()
    with torch.inference_mode() if case.inference else torch.set_grad_enabled(case.grads), casts:
        saved = torch.autograd.graph.save_on_cpu() if case.offloaded else nullcontext()
        with saved:
            call = (
                checkpoint(model, *called, extra, use_reentrant=False) if case.checkpointed else model(*called, extra)
            )
        results = tree_leaves(call)
        more_results = tree_leaves(model(*[t.detach().clone() for t in given], extra)) if case.twice else []
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
    for i, t in enumerate([*called, extra["pair"][0]]):
        found[f"input {i}"] = t.detach().clone()
    for kind, outputs in (("", results), ("both calls' ", more_results)):
        differentiable = [i for i, r in enumerate(outputs) if isinstance(r, torch.Tensor) and r.requires_grad]
        for places in [[i] for i in differentiable] if case.apart else [differentiable] if differentiable else []:
            passed = [outputs[i] for i in places]
            cotangents = [torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view(r.shape) for r in passed]
            for _ in range(2 if case.again else 1):
                torch.autograd.backward(passed, cotangents, retain_graph=case.apart or case.again)
            if any(map(_has_gradient, passed)):
                start = f"result {places[0]}" if case.apart else "results"
                found.update({f"{kind}gradient of {name} from {start}": g for name, g in _gradients(model, leaves)})
    found.update({f"gradient of {name}": g for name, g in _gradients(model, leaves)})
    for name, value in [*model.named_buffers(), *model.named_parameters()]:
        found[name] = value.detach().clone()
    found["calls"] = model.calls
    found["random numbers"] = torch.rand(2)
    return found


def _gradients(model: nn.Module, tensors: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Copies of the gradients of the parameters, of `x` and of `y`, by name."""
    for name, p in [*model.named_parameters(), *zip(("x", "y"), tensors[:2], strict=True)]:
        yield name, None if p.grad is None else p.grad.clone()


def _has_gradient(result: torch.Tensor) -> bool:
    """True if a backward pass from a result reaches a leaf; it reaches none from a view made under `no_grad`."""
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
    """Strides of axes longer than 1; None for a view that does not fill its memory: a fused model may return a copy.

    A tensor without elements has none: torch treats it as contiguous.
    """
    if not result.numel():
        return ()
    found = sorted((s, n) for s, n in zip(result.stride(), result.shape, strict=True) if n > 1)
    is_dense = all(s == (found[i - 1][0] * found[i - 1][1] if i else 1) for i, (s, _) in enumerate(found))
    return tuple(s for s, n in zip(result.stride(), result.shape, strict=True) if n > 1) if is_dense else None


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def differs(got: Any, expected: Any, text: Text, allowed: float = 0) -> str:
    """The difference between one entry of a call's effects and the same entry of eager torch; "" if they agree.

    Args:
        text: its dtypes determine the rounding error allowed between two results.
        allowed: the difference that elements may have in any case.
    """
    if expected is None and isinstance(got, tuple):
        return ""  # the expected result is a view, whose strides are not compared
    if isinstance(expected, list):  # torch.compile returns a copy where F.dropout returns its argument
        more = any(ours and not theirs for ours, theirs in zip(got, expected, strict=True))
        return "it lies in memory that it has of its own in eager torch" if more else ""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if type(got) is type(expected) and got == expected:
            return ""
        return " is not ".join("a tensor" if isinstance(v, torch.Tensor) else str(v) for v in (got, expected))
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype}{list(got.shape)} is not {expected.dtype}{list(expected.shape)}"
    size = expected.abs().nan_to_num(posinf=0).max().item() if expected.numel() else 0
    rounding = text.rounding if expected.is_floating_point() or expected.is_complex() else 0
    bound = max(rounding * max(float(text.dtype is torch.float64), size), allowed)
    try:
        torch.testing.assert_close(got, expected, rtol=rounding, atol=bound, equal_nan=True)
    except AssertionError as error:
        return str(error).replace("\n", " ")[:160]
    return ""
