"""Runs what was noted down: calls that belong together by one fused op, a call on its own by torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from opgraph.errors import OpGraphError
from opgraph.runtime.bounded import Bounded
from opgraph.torch.fused.op import FusedOp
from opgraph.torch.lazy.node import Node
from opgraph.torch.lazy.shape import is_own
from opgraph.torch.tracing.build import pattern
from opgraph.torch.tracing.trace import Tracer

if TYPE_CHECKING:
    from opgraph.torch.lazy.observer import Observer

#: A value that somebody still holds is not stored but computed again where that takes no more calls and memory.
_MAX_REPEATED = 8
_MAX_KNOWN = 4096


class Kernel:
    """A fused op for some calls.

    Attributes:
        op: from the tensors that the calls read to the values asked for; None where opgraph cannot do it.
        order: which of the tensors each input of `op` is.
        results: which of the results of `op` each value is.
        why: the reason, where it cannot.
    """

    __slots__ = ("op", "order", "results", "why")

    def __init__(
        self, op: FusedOp | None, order: tuple[int, ...] = (), results: tuple[int, ...] = (), why: str = ""
    ) -> None:
        self.op = op
        self.order = order
        self.results = results
        self.why = why

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The values."""
        assert self.op is not None
        made = self.op(*[tensors[i] for i in self.order])
        return [made[i] for i in self.results]


_by_shapes: Bounded[Any, Kernel] = Bounded(_MAX_KNOWN)
_by_pattern: Bounded[Any, Kernel] = Bounded(_MAX_KNOWN)
_lock = threading.Lock()


def run(wanted: list[Node], rounding: str, observer: Observer | None) -> None:
    """Gives nodes their values, and those that they are made of, where somebody else needs them too."""
    for closure, roots in _groups([_memory_of(node) for node in wanted]):
        outputs = _outputs(closure, roots)
        inner = _inner(closure, outputs)
        if inner:  # gradients by them are gradients of what is computed from them: each its own kernel
            for node in (*inner, *roots):
                run([node], rounding, observer)
            continue
        with torch._C.DisableTorchFunction(), _as_noted(closure[0]):
            kernel = _kernel(closure, outputs, rounding) if len(closure) > 1 else None
            if observer is not None:
                observer.runs(closure, outputs, *(kernel or (None, [])))
            overwrites = closure[0].overwrites if kernel is None else None
            if overwrites is not None and is_own(closure[0].operands[0]):
                closure[0].settle(overwrites([o.value if type(o) is Node else o for o in closure[0].operands]))
            elif kernel is None or kernel[0].op is None:
                values = one_by_one(closure, _itself)
                for node in outputs:
                    node.settle(values[node])
            else:
                for node, value in zip(outputs, kernel[0](kernel[1]), strict=True):
                    node.settle(value)
            _settle_detached(closure)
    with torch._C.DisableTorchFunction():
        _settle_detached(wanted)


def _memory_of(node: Node) -> Node:
    """The node whose memory this one is."""
    while node.value is None and node.is_detached and type(node.operands[0]) is Node:
        node = node.operands[0]
    return node


def _settle_detached(nodes: list[Node]) -> None:
    for node in nodes:
        memory = _memory_of(node)
        if node.value is None and memory is not node and memory.value is not None:
            node.settle(memory.value.detach())


def _groups(wanted: list[Node]) -> list[tuple[list[Node], list[Node]]]:
    """The nodes to run for those wanted, in order, and of these the wanted ones; apart where nothing connects them."""
    group_of: dict[Node, list[Any]] = {}
    for root in wanted:
        group: list[Any] = [[], [root]]
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if node.value is not None:
                continue
            known = group_of.get(node)
            if known is None:
                group[0].append(node)
                group_of[node] = group
                waiting += [o for o in node.operands if type(o) is Node]
            elif known is not group:
                for side in (0, 1):
                    group[side] += known[side]
                group_of.update((member, group) for member in known[0])
    groups = {id(g): g for g in group_of.values()}
    result = []
    for nodes, roots in groups.values():
        result.append((sorted(nodes, key=lambda n: n.index), list(dict.fromkeys(r for r in roots))))
    return sorted(result, key=lambda g: g[0][0].index)


def _outputs(closure: list[Node], roots: list[Node]) -> list[Node]:
    if len(closure) == 1:
        return closure
    inside: dict[Node, int] = {}
    for node in closure:
        for operand in node.operands:
            if type(operand) is Node:
                inside[operand] = inside.get(operand, 0) + 1
    asked = {*roots, *(_memory_of(n) for n in closure if n.is_detached and n.is_alive())}
    return [
        n for n in closure
        if n in asked
        or ((n.readers > inside.get(n, 0) or n.is_alive()) and not n.is_detached and not _is_repeatable(n))
    ]  # fmt: skip


def _inner(closure: list[Node], outputs: list[Node]) -> list[Node]:
    """Values that others are computed from and that somebody holds, who may ask for gradients by them, in order."""
    if len(closure) == 1 or not closure[0].state[0]:
        return []
    inside = {o for n in closure for o in n.operands if type(o) is Node and not n.is_detached}
    return [n for n in closure if n in inside and (n in outputs or n.is_alive()) and n.requires_grad()]


def _is_repeatable(node: Node) -> bool:
    """Whether computing it once more later keeps no more memory alive than storing it now."""
    seen: set[int] = set()
    waiting: list[Node | torch.Tensor] = [node]
    count = size = 0
    while waiting:
        item = waiting.pop()
        if type(item) is Node and item.value is None:
            count += 1
            waiting += item.operands
        else:
            tensor: Any = item.value if type(item) is Node else item
            if id(tensor) not in seen:
                seen.add(id(tensor))
                size += tensor.nbytes
    return count <= _MAX_REPEATED and size <= node.nbytes


def one_by_one(closure: Sequence[Node], leaf: Callable[[torch.Tensor], torch.Tensor]) -> dict[Node, torch.Tensor]:
    """The values of nodes by torch's own functions, in order; nothing is changed.

    Args:
        leaf: gives the tensor to use for one that is read.
    """
    values: dict[Node, torch.Tensor] = {}
    for node in closure:
        tensors = []
        for operand in node.operands:
            known = type(operand) is not Node or operand.value is not None
            real: Any = operand.value if type(operand) is Node else operand
            tensors.append(leaf(real) if known else values[operand])  # type: ignore[index]
        value = node.spec(tensors)
        values[node] = value.view_as(value) if any(value is t for t in tensors) else value
    return values


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _kernel(closure: list[Node], outputs: list[Node], rounding: str) -> tuple[Kernel, list[torch.Tensor]]:
    """What runs these nodes, and the tensors that they read."""
    index: dict[Node, int] = {}
    places: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    calls: list[tuple[Any, ...]] = []
    for node in closure:
        row: list[Any] = [node.spec]
        for operand in node.operands:
            if type(operand) is Node:
                if operand.value is None:
                    row.append(~index[operand])
                    continue
                operand = operand.value
            place = places.setdefault(id(operand), len(tensors))
            if place == len(tensors):
                tensors.append(operand)  # type: ignore[arg-type]
            row.append(place)
        index[node] = len(calls)
        calls.append(tuple(row))
    shape = (tuple(calls), tuple([index[n] for n in outputs]), closure[0].device.type, rounding)
    key = (shape, tuple([t.shape for t in tensors]))
    kernel = _by_shapes.get(key)
    if kernel is None:
        kernel = _found(shape, key, tensors)
    return kernel, tensors


def _found(shape: Any, key: Any, tensors: list[torch.Tensor]) -> Kernel:
    general = (shape, pattern(t.shape for t in tensors))
    with _lock:
        kernel = _by_pattern.get(general)
        if kernel is None:
            kernel = _by_pattern[general] = _made(shape, tensors)
        _by_shapes[key] = kernel
    return kernel


def _made(shape: tuple[Any, ...], tensors: list[torch.Tensor]) -> Kernel:
    calls, outputs, _, rounding = shape

    def replayed(*given: Any) -> tuple[Any, ...]:
        values: list[Any] = []
        for spec, *places in calls:
            values.append(spec([values[~p] if p < 0 else given[p] for p in places]))
        return tuple(values[i] for i in outputs)

    try:
        with torch._C._EnableTorchFunction():
            traced = Tracer(replayed, as_eager=rounding == "each")(tuple(tensors), {})
        by_id = {id(t): i for i, t in enumerate(tensors)}
        order = tuple(by_id[id(t)] for t in traced.tensors)  # KeyError: a tensor that the trace made itself
        results = [value.index for value in traced.traced.outputs] if traced.traced is not None else []
        if traced.traced is None or len({*results}) != len(results):
            return Kernel(None, why="two of its values are one")
        return Kernel(FusedOp(traced.traced.graph, rounding=rounding), order, tuple(results))
    except (OpGraphError, KeyError, AttributeError) as error:
        return Kernel(None, why=str(error).splitlines()[0])


@contextlib.contextmanager
def _set(state: Any, device: torch.device) -> Iterator[None]:
    grad, inference, stream = state
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled() != inference:
            stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if stream is not None and stream != torch._C._cuda_getCurrentRawStream(device.index):
            now, then = torch.cuda.current_stream(device), torch.cuda.ExternalStream(stream, device)  # type: ignore[no-untyped-call]
            stack.enter_context(torch.cuda.stream(then))
            stack.callback(now.wait_stream, then)
        yield


def _as_noted(node: Node) -> contextlib.AbstractContextManager[None]:
    """torch set as it was when a node was noted down; conversions of autocast are part of nodes."""
    grad, inference, stream = node.state
    same = torch.is_grad_enabled() == grad and torch.is_inference_mode_enabled() == inference
    same = same and not torch.is_autocast_enabled(node.device.type)
    same = same and (stream is None or stream == torch._C._cuda_getCurrentRawStream(node.device.index))
    return contextlib.nullcontext() if same else _set(node.state, node.device)
