"""Random graphs as ordinary functions of torch, through opgraph.torch, against eager torch in f64."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from random_scenario import Scenario
from random_truth import Truth, problem, same_bits, truths
from torch.fx.experimental.proxy_tensor import make_fx

import opgraph as og
import opgraph.torch as ogt
from opgraph.errors import OpGraphError, Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import port_name

_BY_NAME = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "s64": torch.int64,
    "s32": torch.int32, "s8": torch.int8, "u8": torch.uint8, "boolean": torch.bool,
}  # fmt: skip

#: The part of modules that Dynamo captures as they are written.
AS_WRITTEN = 0.1


def function_of(graph: og.Graph) -> Callable[..., list[torch.Tensor]] | None:
    """The graph as a function of torch ops, from its records; None if one of them has no torch form."""
    records = [opdef.get(op.kind, where="") for op in graph.ops]
    if any(r.torch is None or r.by_position or r.by_dtype or r.foreign for r in records):
        return None
    if any(t.dtype not in _BY_NAME for op in graph.ops for t in (*op.inputs, *op.outputs)):
        return None
    constants = {t.id: torch.from_numpy(_plain(opdef.array_of(t))).to(_BY_NAME[t.dtype]) for t in graph.constants}

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values: dict[int, Any] = {**constants, **{t.id: x for t, x in zip(graph.inputs, tensors, strict=True)}}
        for op, record in zip(graph.ops, records, strict=True):
            for part in record.parts(op):
                own = opdef.get(part.kind, where="")
                assert own.torch is not None
                made = own.torch(torch, *(values[t.id] for t in part.inputs), **part.attrs)
                results = list(made) if own.returns_several else [made]
                for tensor, result in zip(part.outputs, results, strict=False):
                    values[tensor.id] = result.to(_BY_NAME[tensor.dtype])
        return [values[t.id] for t in graph.outputs]

    return run


def _plain(array: np.ndarray) -> np.ndarray:
    return np.array(array, np.float32 if array.dtype.itemsize == 2 and array.dtype.kind == "V" else None)


def torch_calls(found: Scenario, rng: random.Random) -> Iterator[str]:
    """Problems of the scenario's graph, fused as a function of torch."""
    graph, feeds = found.graph, found.feeds[0]
    run = function_of(graph)
    if run is None or len({t.id for t in graph.outputs}) != len(graph.outputs):
        return
    try:
        want = truths(graph, feeds)
    except OpGraphError:
        return
    tensors = [_tensor(feeds[port_name(t)], t.dtype) for t in graph.inputs]
    torch.compiler.reset()  # Dynamo compiles at most eight graphs of one function
    eager = run(*tensors)
    fair = [not problem(_array(e), w) for e, w in zip(eager, want, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pointwise = all(opdef.get(op.kind, where="").is_pointwise for op in graph.ops)
            fused = _fused(run if pointwise or rng.random() < AS_WRITTEN else in_one_piece(run, tensors), pointwise)
            fused(*tensors)
        except Unimplemented:
            return
        before = [t.clone() for t in tensors]
        got = fused(*tensors)
        yield from _wrong("fused", got, want, fair)
        yield from (f"a call changed input {i}" for i, (a, b) in enumerate(zip(tensors, before)) if not _same(a, b))
        with torch.no_grad():
            laid = [_other_layout(t, rng) for t in tensors]  # torch adds up in another order then
            as_fair = [not problem(_array(e), w) for e, w in zip(run(*laid), want, strict=True)]
            yield from _wrong("no_grad", fused(*laid), want, as_fair)
        yield from _trained(graph, run, fused, tensors, want, rng)


class Forward(torch.nn.Module):
    """A function as a module, whose forward may have library ops, too."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: torch.Tensor) -> Any:
        """The function's results."""
        return self.run(*tensors)


def in_one_piece(run: Callable[..., Any], tensors: list[torch.Tensor]) -> Callable[..., Any]:
    """A function as the straight line of ATen calls that it makes, which Dynamo captures as one graph in a second.

    The function itself walks through records: Dynamo breaks the graph there every few ops, and takes ten times as long.
    """
    try:
        made: Callable[..., Any] = make_fx(run, pre_dispatch=True)(*tensors)
    except (torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode, RuntimeError):
        return run  # sizes, or branches, that come from values
    return made


def _fused(run: Callable[..., Any], pointwise: bool) -> Any:
    return ogt.fuse(lambda *x: run(*x)) if pointwise else ogt.fuse(Forward(run))


def _trained(
    graph: og.Graph, run: Any, fused: Any, tensors: list[torch.Tensor], want: list[Truth], rng: Any
) -> Iterator[str]:
    floats = [i for i, t in enumerate(tensors) if t.dtype.is_floating_point]
    if not floats:
        return
    learn = set(rng.sample(floats, rng.randint(1, len(floats))))
    wrt = tuple(port_name(graph.inputs[i]) for i in sorted(learn))
    leaves = [t.clone().requires_grad_(i in learn) for i, t in enumerate(tensors)]
    try:
        slope = og.gradient(graph, wrt)
    except Unimplemented:
        return
    laid = [_other_layout(t, rng) if rng.random() < 0.3 else t for t in leaves]
    got = fused(*laid)
    as_fair = [not problem(_array(e), w) for e, w in zip(run(*laid), want, strict=True)]
    yield from _wrong("fused, training", got, want, as_fair)
    plain = run(*[t.clone().requires_grad_(i in learn) for i, t in enumerate(tensors)])
    for place, (a, b) in enumerate(zip(got, plain, strict=True)):
        if a.requires_grad != b.requires_grad:
            yield f"result {place} requires_grad={a.requires_grad}, eager {b.requires_grad}"
    used = [place for place, a in enumerate(got) if a.requires_grad]
    if not used:
        return
    draw = torch.Generator().manual_seed(rng.getrandbits(30))
    d = {i: torch.rand(got[i].shape, generator=draw, dtype=torch.float64).to(got[i].dtype) for i in used}
    given = {port_name(t): _array(x) for t, x in zip(graph.inputs, tensors, strict=True)}
    for place, tensor in enumerate(graph.outputs):
        zero = torch.zeros(got[place].shape, dtype=got[place].dtype)
        given[f"d_{port_name(tensor)}"] = _array(d.get(place, zero))
    expected = truths(slope, {port_name(t): given[port_name(t)] for t in slope.inputs})
    wanted = [leaves[i] for i in sorted(learn)]
    first = torch.autograd.grad(
        [got[i] for i in used], wanted, [d[i] for i in used], retain_graph=True, allow_unused=True
    )
    again = torch.autograd.grad([got[i] for i in used], wanted, [d[i] for i in used], allow_unused=True)
    theirs = _eager(graph, run, tensors, learn, {i: d[i] for i in used})
    for name, gradient, second, truth, own in zip(wrt, first, again, expected, theirs, strict=True):
        if (gradient is None) != (second is None) or (gradient is not None and not _same(gradient, second)):
            yield f"a second backward pass gives other bits by {name}"
        found = problem(_array(_or_zero(gradient, truth)), truth)
        if found and not problem(_array(_or_zero(own, truth)), truth):  # at kinks torch has rules of its own
            yield f"gradient by {name} of {wrt}: {found}"


def _or_zero(gradient: torch.Tensor | None, truth: Truth) -> torch.Tensor:
    return torch.zeros(truth.value.shape, dtype=_BY_NAME[truth.dtype]) if gradient is None else gradient


def _eager(
    graph: og.Graph, run: Any, tensors: list[torch.Tensor], learn: set[int], d: dict[int, torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients by eager torch, in the dtypes of the graph."""
    leaves = [t.clone().requires_grad_(i in learn) for i, t in enumerate(tensors)]
    results = run(*leaves)
    used = [i for i in d if results[i].requires_grad]
    wanted = [leaves[i] for i in sorted(learn)]
    return list(torch.autograd.grad([results[i] for i in used], wanted, [d[i] for i in used], allow_unused=True))


def _wrong(what: str, got: Any, want: list[Truth], fair: list[bool]) -> Iterator[str]:
    for result, truth, is_fair in zip(got, want, fair, strict=True):
        found = problem(_array(result), truth)
        if found and is_fair:  # an error that eager torch shares is tested elsewhere, with the records
            yield f"{what}: {found}"


def _tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype == "bf16":
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.float().numpy()).astype(dtypes.get("bf16").numpy)
    return np.asarray(tensor.resolve_neg().resolve_conj().numpy())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same_bits(_array(a), _array(b))


def _other_layout(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    how = rng.randrange(4)
    if tensor.ndim == 0 or how == 0:
        return tensor
    if how == 1:
        order = list(range(tensor.ndim))
        rng.shuffle(order)
        back = sorted(range(len(order)), key=order.__getitem__)
        return tensor.permute(order).contiguous().permute(back)
    axis = rng.randrange(tensor.ndim)
    doubled = tensor.repeat_interleave(2, axis)
    return doubled[tuple(slice(None, None, 2) if a == axis else slice(None) for a in range(tensor.ndim))]
