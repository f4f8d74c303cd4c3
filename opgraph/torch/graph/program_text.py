"""The steps of a program as the text of one Python function, and a second text that reports the steps to a watcher.

A run without watchers does nothing but allocate, take addresses and launch. If memory is measured, another text of the
same steps runs: it allocates by public functions of torch, which dispatch modes intercept, reports the node of each
allocation before it, and may leave the kernels out. The lifetimes of values are the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from opgraph.runtime.providers.torch_internals import tree_flatten, tree_iter, tree_unflatten
from opgraph.torch.graph.tensor_locations import Place
from opgraph.torch.graph.views import base_of, is_view

if TYPE_CHECKING:
    from opgraph.torch.memory.storage_trace import Watch


@dataclass(frozen=True, slots=True)
class Allocation:
    """A variable of the function to which a line assigns memory, and the node whose value is stored there.

    Attributes:
        place: the layout of the value there.
        fits: variables whose memory it may take if this is their last step.
        over: the variable whose memory it takes; "" if the line allocates.
    """

    name: str
    line: str
    node: Node
    place: Place
    fits: tuple[str, ...] = ()
    over: str = ""


@dataclass(slots=True)
class Step:
    """Lines of the function.

    Attributes:
        call: the lines that compute.
        node: the node whose value the line makes; None for kernels, which write into `allocations`.
        reads: the variables that it reads.
    """

    call: str
    node: Node | None = None
    allocations: list[Allocation] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The variables that it makes and reads."""
        own = [] if self.node is None else [self.node.name]
        return [*own, *(a.name for a in self.allocations), *self.reads]


#: The current watchers. A program's function checks if there are any, in 20 ns.
watchers: list[Watch] = []


@contextmanager
def watched_by(watcher: Watch) -> Iterator[None]:
    """Within this context, programs report to the watcher what they make."""
    watchers.append(watcher)
    try:
        yield
    finally:
        watchers.remove(watcher)


@contextmanager
def unwatched() -> Iterator[None]:
    """Within this context, programs run without watchers."""
    held = watchers[:]
    watchers.clear()
    try:
        yield
    finally:
        watchers[:] = held


@dataclass(frozen=True, slots=True)
class Function:
    """The parts of the text of a program.

    Attributes:
        inputs: the placeholders, in order.
        steps: in order.
        lasting: variables that no step frees: constants and returned values.
        result: the expression that is returned.
        first: lines with which it begins.
        aligned: lines that copy inputs to the alignment that kernels expect.
    """

    inputs: Sequence[Node]
    steps: Sequence[Step]
    lasting: frozenset[str]
    result: str
    first: Sequence[str] = ()
    aligned: Sequence[str] = ()

    def text(self) -> str:
        """The function `run(args)`; if there are watchers, it calls `watched(args)`."""
        return "\n".join(["def run(args):", "    if watchers:", "        return watched(args)", *self._body()]) + "\n"

    def watched_text(self, computes: bool) -> tuple[str, list[Node]]:
        """The same function with reports to a watcher, and the nodes to which it refers by number."""
        nodes: list[Node] = []
        body = self._body(nodes, computes)
        return "\n".join(["def run(args):", *body]) + "\n", nodes

    def _body(self, nodes: list[Node] | None = None, computes: bool = True) -> list[str]:
        def told(event: str, node: Node) -> list[str]:
            if nodes is None:
                return []
            nodes.append(node)
            return [f"    {event}nodes[{len(nodes) - 1}])"]

        last = last_steps(self.steps)
        names = [n.name for n in self.inputs]
        lines = [f"    {line}" for line in self.first]
        if names:
            lines.append(f"    {', '.join(names)}{',' if len(names) == 1 else ''} = args")
        lines.append("    args.clear()")
        if nodes is not None:
            readers = _first_readers(self.inputs)
            for node in self.inputs:
                lines += told(f"reading({node.name}, ", readers[node]) if node in readers else []
        unread = [n for n in names if n not in last and n not in self.lasting]
        if unread:
            lines.append(f"    del {', '.join(unread)}")
        lines += [f"    {line}" for line in self.aligned]
        for place, step in enumerate(self.steps):
            for allocation in step.allocations:
                event = f"taking({allocation.over}, " if allocation.over else "making("
                lines += [*told(event, allocation.node), f"    {allocation.line}"]
            lines += told("making(", step.node) if step.node is not None else []
            if computes or step.node is not None:
                lines += [f"    {line}" for line in step.call.splitlines()]
            dead = [n for n, at in last.items() if at == place and n not in self.lasting]
            if dead:
                lines.append(f"    del {', '.join(dead)}")
        lines.append(f"    return {self.result}")
        return lines


def last_steps(steps: Sequence[Step]) -> dict[str, int]:
    """For each variable, the last step that makes or reads it."""
    last: dict[str, int] = {}
    for place, step in enumerate(steps):
        last.update((name, place) for name in step.names)
    return last


def watched(program: Any, function: Function, env: Mapping[str, Any], args: list[Any]) -> Any:
    """Runs a program's function for the watcher that came last.

    Args:
        program: the program of the function.
        env: the names that its lines use.
    """
    watcher = watchers[-1]
    watcher.running(program)
    source, nodes = function.watched_text(watcher.computes)
    seen = {
        **env, "allocate": _empty, "allocate_cuda": partial(_empty, device="cuda"), "reinterpret": _reinterpret,
        "nodes": nodes, "making": watcher.making, "taking": watcher.taking, "reading": watcher.reading,
    }  # fmt: skip
    if not watcher.computes:  # results without values do not show the strides of real ones
        seen.update((name, value.call) for name, value in env.items() if isinstance(value, Checked))
    watcher.constants([value for value in env.values() if isinstance(value, torch.Tensor)])
    exec(compile(source, "<opgraph, watched>", "exec"), seen)
    try:
        return seen["run"](args)
    finally:
        watcher.making(None)


def _empty(size: Any, stride: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(base: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return base.as_strided(size, stride, base.storage_offset() + offset)


def _first_readers(inputs: Sequence[Node]) -> dict[Node, Node]:
    """For each input that nodes read, perhaps through views, the first such node; inputs that are at most returned are
    left out."""
    found: dict[Node, Node] = {}
    for node in inputs[0].graph.nodes if inputs else ():
        if node.op == "call_function" and not is_view(node):
            for base in map(base_of, node.all_input_nodes):
                found.setdefault(base, node)
    return found


class Checked:
    """Checks a library call until its results fit: kernels rely on the strides of the fake tensors, on the alignment of
    an allocator, and, if they overwrite a result, on memory that nothing else uses.

    Args:
        env, name: the place in which the call itself replaces this object once its results fit; the name has the op's.
        call: the function of torch.
        strides: those of its results in the graph, also of results in tuples; None for a result that is no tensor.
        alignment: the alignment in bytes that kernels expect of its results.

    Attributes:
        overwritten: True if a kernel overwrites a result.
    """

    def __init__(
        self,
        env: dict[str, Any],
        name: str,
        call: Callable[..., Any],
        strides: Sequence[Sequence[int] | None],
        alignment: int,
        overwritten: bool = False,
    ) -> None:
        self.name, self.call, self.strides, self.alignment = name, call, strides, alignment
        self.overwritten = overwritten
        self._env = env

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results, copied if their layout or memory is not the expected one."""
        result = self.call(*args, **kwargs)
        results, structure = ([result], None) if isinstance(result, torch.Tensor) else tree_flatten(result)
        shared = _shared(results, (args, kwargs)) if self.overwritten else set()
        fits = [
            s is None
            or not isinstance(r, torch.Tensor)
            or r.numel() == 0
            or (same_strides(r, s) and r.data_ptr() % self.alignment == 0 and i not in shared)
            for i, (r, s) in enumerate(zip(results, self.strides))
        ]
        if all(fits):
            if "convolution" not in self.name:  # whose strides depend on oneDNN, which may be turned off later
                self._env[self.name] = self.call
            return result
        moved = [r if ok else restrided(r, s) for r, s, ok in zip(results, self.strides, fits)]
        return moved[0] if structure is None else tree_unflatten(moved, structure)


def _shared(results: Sequence[Any], arguments: Any) -> set[int]:
    """The places of results that share memory with an argument or an earlier result."""
    seen = {t.untyped_storage()._cdata for t in tree_iter(arguments) if isinstance(t, torch.Tensor)}
    found = set()
    for place, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            key = result.untyped_storage()._cdata
            if key in seen:
                found.add(place)
            seen.add(key)
    return found


def same_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """True if a tensor has these strides; those of axes of one element are ignored."""
    return all(size == 1 or own == other for size, own, other in zip(tensor.shape, tensor.stride(), strides))


def with_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor, or a copy with these strides if its own are others."""
    return tensor if same_strides(tensor, strides) else restrided(tensor, strides)


def restrided(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """A copy of a tensor with these strides."""
    assert strides is not None
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
