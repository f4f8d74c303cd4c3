"""Faults of torch.compile, with any backend, that are visible in Dynamo's graph: avoided before AOTAutograd gets it.

Most were found by `tests/accuracy/random_networks.py` with torch 2.13, where `backend="aot_eager"` has them too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional

from opgraph.runtime.providers.torch_internals import HigherOrderOperator
from opgraph.torch.graph.parameter_branches import draws_random_numbers, written_arguments
from opgraph.torch.graph.torch_internals import (
    MEMORY,
    has_constant_rows,
    hint,
    is_random_number,
    memory_of,
    parameter_of,
)

#: Methods that change the shape of a tensor in place.
_TURNS = frozenset(
    (
        "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_",
        "unsqueeze_",
    )
)  # fmt: skip


def fault_of_frame(graph: GraphModule) -> str:
    """The reason for which the captured function must run as it was written, or "".

    - After a call that changes the shape of a tensor in place, Python code reads the old shape. Guards on symbolic
      sizes of an input are evaluated when it has its new shape, and fail.
    - For a nested tensor whose values are a view, the graph contains the number of rows of this call, but is used for
      all calls.
    """
    if any(has_constant_rows(n.meta.get("example_value")) for n in graph.graph.find_nodes(op="placeholder")):
        return (
            "takes a nested tensor whose values are a view runs as it was written: torch.compile would take their "
            "number of rows for that of all calls. Give it `nested_tensor_from_jagged(values.clone(), offsets)`."
        )
    inputs = {memory_of(n) for n in graph.graph.find_nodes(op="placeholder") if _has_symbols(n)} - {None}
    turned: set[Node] = set()
    for node in graph.graph.nodes:
        is_turn = node.op == "call_method" and node.target in _TURNS and isinstance(node.args[0], Node)
        if is_turn and memory_of(node.args[0]) in inputs:
            return (
                "changes the shape of an argument in place, which has another one at each call, runs as it was "
                "written: guards of torch.compile would look at the new shape."
            )
        if not turned.isdisjoint(node.all_input_nodes) or (is_turn and not node.users):
            return (
                "changes the shape of a tensor in place, and goes on with it, runs as it was written: torch.compile "
                "would show it the old shape. Write `x = x.unsqueeze(0)` for `x.unsqueeze_(0)`."
            )
        turned |= {node.args[0]} if is_turn else set()
    return ""


#: If a -1 ends the class numbers of a row, torch's decomposition adds terms of class 0 for the places after it. It is
#: registered so that every backend of torch.compile uses it (torch 2.13).
_WRONG = frozenset(("multilabel_margin_loss",))


def fault_of_graph(graph: GraphModule) -> str:
    """The reason for which a graph must run unfused, or ""."""
    names = {getattr(n.target, "__name__", "") for n in graph.graph.nodes if n.op == "call_function"}
    for name in sorted(names & _WRONG):
        return f"calls {name} runs unfused: torch.compile gets its values wrong"
    lost = _lost_write(graph)
    return f"writes into {lost} runs unfused: torch.compile gets the write wrong" if lost else ""


def _lost_write(graph: GraphModule) -> str:
    """The kind of tensor that a graph writes into, if torch.compile would lose the write or return a wrong view; or "".

    - Dynamo treats a 0-d f64 tensor on the CPU as a Python number. AOTAutograd makes it trace the function again with
      the number's current value, and the second graph lacks the calls that write into the tensor and whose results are
      not read (`OutputGraph.remove_tensorify_specialized_graphargs`, torch 2.13).
    - Functionalization reads a write into an expanded tensor back from one of the elements that share memory, which may
      not be the one that was written.
    - For inputs that overlap and are written, AOTAutograd returns a view of the wrong one, or raises an error, and
      writes to the same place of the other one in later calls (`overlap_check`).
    """
    shared = _shared_by_inputs(graph)
    inputs = [n for n in graph.graph.find_nodes(op="placeholder") if _is_number(n.meta.get("example_value"))]
    numbers = {memory_of(n) for n in inputs}
    for node in graph.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            continue
        for written in written_arguments(node):
            if memory_of(written) in numbers and all(user.target == "item" for user in node.users):
                return "an f64 tensor of no dimension"
            if _is_expanded(written.meta.get("example_value")):
                return "an expanded tensor"
            if memory_of(written) in shared:
                return "one of two arguments that share memory"
    return ""


def _shared_by_inputs(graph: GraphModule) -> set[int | None]:
    """The memory in which two inputs overlap."""
    inputs: dict[int, list[Node]] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        if (memory := memory_of(node)) is not None:
            inputs.setdefault(memory, []).append(node)
    extents = {memory: sorted(_extent(n.meta["example_value"]) for n in nodes) for memory, nodes in inputs.items()}
    return {m for m, own in extents.items() if any(end > begin for (_, end), (begin, _) in pairwise(own))}


def _extent(value: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its memory, and the byte after the last one."""
    offset, *numbers = (hint(n) for n in (value.storage_offset(), *value.shape, *value.stride()))
    sizes, strides = numbers[: value.dim()], numbers[value.dim() :]
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return offset * value.itemsize, (offset + last + 1) * value.itemsize if all(sizes) else 0


def overlap_check(graph: GraphModule) -> Callable[[Sequence[Any]], bool] | None:
    """Returns a function that checks if an argument that the graph writes into overlaps with another one; None for a
    graph that writes into no argument.

    A graph is compiled for arguments that do not overlap, and Dynamo has no guard on their addresses. A parameter or
    buffer of a module is compared if the graph writes into it. All of them are compared if the graph writes into an
    argument that is neither.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    values = [n.meta.get("example_value") for n in inputs]
    written = {memory_of(argument) for node in graph.graph.nodes for argument in written_arguments(node)} - {None}
    dense = [
        (place, memory_of(node) in written, parameter_of(node) is None)
        for place, (node, value) in enumerate(zip(inputs, values, strict=True))
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    ]
    is_argument_written = any(is_written and is_free for _, is_written, is_free in dense)
    compared = [(p, is_written) for p, is_written, is_free in dense if is_written or is_free or is_argument_written]
    if len(compared) < 2 or not any(is_free for *_, is_free in dense) or not any(w for _, w in compared):
        return None
    known: tuple[Any, bool] = ((), False)

    def overlaps(args: Sequence[Any]) -> bool:
        nonlocal known
        given = [args[place] for place, _ in compared]
        if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in given):
            return False
        try:
            where = [(t.data_ptr(), t.shape) for t in given]
        except RuntimeError:  # a batch of torch.func has no address
            return False
        if known[0] != where:
            known = where, _any_written_overlaps(given, [is_written for _, is_written in compared])
        return known[1]

    return overlaps


def _any_written_overlaps(tensors: Sequence[torch.Tensor], written: Sequence[bool]) -> bool:
    """True if the byte range of a written tensor, from its first to its last byte, overlaps with that of another."""
    reached = {True: 0, False: 0}
    extents = []
    for tensor, is_written in zip(tensors, written, strict=True):
        first: Any = tensor.data_ptr() - tensor.storage_offset() * tensor.itemsize
        begin, end = _extent(tensor)
        if end > begin:
            extents.append((first + begin, first + end, is_written))
    for begin, end, is_written in sorted(extents):
        if begin < reached[True] or (is_written and begin < reached[False]):
            return True
        reached[is_written] = max(reached[is_written], end)
    return False


def _has_symbols(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _is_number(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim() and value.dtype is torch.float64 and value.is_cpu


def _is_expanded(value: object) -> bool:
    """True if several elements of a tensor share one element of memory."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return any(stride == 0 and size != 1 for stride, size in zip(value.stride(), value.shape, strict=True))


#: Functions of (input, p, training, inplace), which return their input if nothing is dropped.
_DROPOUTS = frozenset(
    (
        functional.alpha_dropout, functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
        functional.feature_alpha_dropout, torch.dropout, torch.ops.aten.dropout, torch.ops.aten.dropout.default,
    )
)  # fmt: skip


def remove_idle_dropout(graph: GraphModule) -> None:
    """Removes dropout that drops nothing from a graph: its result is its argument, but AOTAutograd makes a copy.

    A write into the result, which is a write into the argument in eager torch, would be lost. Views of the copy become
    views of the argument.
    """
    moved: dict[int | None, Any] = {}  # the memory of a copy -> the value that holds the argument's memory
    for node in [n for n in graph.graph.nodes if n.target in _DROPOUTS]:
        given = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
        given.setdefault("training", given.get("train", True))  # the ops call it `train`
        if given["training"] is False or given.get("p", 0.5) == 0:
            source = given["input"]
            moved[memory_of(node)] = moved.get(memory_of(source), source.meta.get("example_value"))
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
            graph.recompile()
    moved.pop(None, None)
    for node in graph.graph.nodes if moved else ():
        if memory_of(node) in moved:
            node.meta[MEMORY] = moved[memory_of(node)]


_NATIVE_DROPOUT = (torch.native_dropout, torch.ops.aten.native_dropout, torch.ops.aten.native_dropout.default)


def correct_native_dropout(graph: GraphModule) -> None:
    """Adds to direct calls of `native_dropout` the behavior of its kernel for host memory that torch.compile omits.

    - torch's rule for fake tensors returns the argument itself if `train` is None. The kernel drops elements.
    - The kernel draws numbers if p is 1, too. Other dropout functions draw none then, but they become calls of
      `native_dropout` in AOTAutograd.
    """
    for node in [n for n in graph.graph.nodes if n.target in _NATIVE_DROPOUT]:
        given = dict(zip(("input", "p", "train"), node.args, strict=False)) | node.kwargs
        x = given["input"].meta.get("example_value")
        if not isinstance(x, torch.Tensor) or not x.is_cpu or given["train"] is False:
            continue
        if given["train"] is None:
            made = torch.empty_like(x), node.meta["example_value"][1]
            node.meta["example_value"] = made
            for part in [n for n in node.users if n.target is operator.getitem]:
                part.meta["example_value"] = made[part.args[1]]
        if given["p"] == 1:
            with graph.graph.inserting_before(node):
                drawn = graph.graph.call_function(torch.bernoulli, (given["input"], 0.0))
            drawn.meta["example_value"] = torch.empty_like(x)
            graph.recompile()


def with_random_numbers(graph: GraphModule, example_inputs: Sequence[Any]) -> Sequence[Any] | None:
    """The inputs, with an f64 example for each number of Python's `random`; None if no graph can compute with them.

    Dynamo traces such a number as f32, and passes an f64 to each call: code that reads an f32 from its memory would
    read half of it. The graph converts it to the traced dtype. If a tensor is f64, that would lose digits.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    drawn = [n for n in inputs if is_random_number(n) and n.meta["example_value"].dtype is torch.float32]
    if not drawn:
        return example_inputs
    values = [n.meta.get("example_value") for n in graph.graph.nodes]
    if any(isinstance(v, torch.Tensor) and v.dtype is torch.float64 for v in values):
        return None
    for node in drawn:
        with graph.graph.inserting_before(inputs[-1].next):
            rounded = graph.graph.call_method("float", (node,))
        rounded.meta["example_value"] = node.meta["example_value"]
        node.replace_all_uses_with(rounded, lambda user, rounded=rounded: user is not rounded)
        node.meta["example_value"] = node.meta["example_value"].double()
    graph.recompile()
    return [given.double() if n in drawn else given for n, given in zip(inputs, example_inputs, strict=True)]


def copy_overlapping_results(graph: GraphModule) -> None:
    """Copies results in which several elements share one element of memory, such as those of `unfold`.

    AOTAutograd gives gradients the strides of results, except along expanded axes, so that several gradients would
    share one element. Results that share memory with an input or another result are views of it, which have no such
    gradients.
    """
    output: Any = graph.graph.output_node()
    results = [n for n in output.args[0] if isinstance(n, Node)]
    memory = [memory_of(n) for n in (*graph.graph.find_nodes(op="placeholder"), *dict.fromkeys(results))]
    copies: dict[Node, Node] = {}
    for node in dict.fromkeys(results):
        value = node.meta.get("example_value")
        if _overlaps(value) and value.requires_grad and memory.count(memory_of(node)) == 1:
            with graph.graph.inserting_before(output):
                copies[node] = graph.graph.call_method("contiguous", (node,))
            copies[node].meta["example_value"] = value.detach().contiguous().requires_grad_()
    if copies:
        output.args = (torch.fx.map_arg(output.args[0], lambda n: copies.get(n, n)),)
        graph.recompile()


def _overlaps(value: object) -> TypeGuard[torch.Tensor]:
    """True if several elements of a tensor with no expanded axis share one element of memory.

    For symbolic sizes, the current values decide: AOTAutograd may specialize the graph to them.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or _is_expanded(value):
        return False
    axes = [(hint(stride), hint(size)) for stride, size in zip(value.stride(), value.shape, strict=True)]
    reached = 0
    for stride, size in sorted(axis for axis in axes if axis[1] > 1):
        if stride <= reached:
            return True
        reached += stride * (size - 1)
    return False


def with_own_results(graph: GraphModule, compile: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Compiles a graph after its results were changed to those that AOTAutograd handles correctly.

    Inputs of the graph, written to or not, are removed from its results. For `self.steps += 1` Dynamo returns the
    buffer. If an input with a gradient is written to in the same graph, AOTAutograd returns the buffer in place of the
    first result.

    Random numbers from which no result is computed become results, which the caller does not see. AOTAutograd would
    leave them out; eager torch draws them, and every later number depends on how many were drawn before.

    Args:
        graph: its results are changed; the returned function restores them.
        compile: called afterwards.
    """
    output: Any = graph.graph.output_node()
    inputs = {
        id(value): place
        for place, n in enumerate(graph.graph.find_nodes(op="placeholder"))
        if isinstance(value := n.meta.get("example_value"), torch.Tensor)
    }
    results = output.args[0]
    places = [inputs.get(id(n.meta.get("example_value"))) if isinstance(n, Node) else None for n in results]
    output.args = (tuple(n for n, place in zip(results, places, strict=True) if place is None),)
    nodes = list(graph.graph.nodes)
    draws = [n for n in nodes if draws_numbers(n)]
    read = _read(nodes, output) if draws else set()
    unread = [n for n in draws if n not in read]
    if not unread and all(place is None for place in places):
        return compile()
    with graph.graph.inserting_before(output):
        drawn = [graph.graph.call_method("detach", (part,)) for n in unread for part in _tensors(n)]
    output.args = ((*output.args[0], *drawn),)
    graph.recompile()
    call = compile()

    def run(*args: Any) -> tuple[Any, ...]:
        made = iter(call(*args))
        return tuple(next(made) if place is None else args[place] for place in places)

    return run


def draws_numbers(node: Node) -> bool:
    """True if a node is a call that draws random numbers, directly or in a function that it runs, as checkpoints do."""
    if node.op not in ("call_function", "call_method"):
        return False
    arguments = [n for n in node.all_input_nodes if n.op == "get_attr"]
    bodies = [getattr(node.graph.owning_module, str(n.target), None) for n in arguments]
    return draws_random_numbers(node) or any(
        draws_numbers(n) for body in bodies if isinstance(body, GraphModule) for n in body.graph.nodes
    )


def _tensors(node: Node) -> list[Node]:
    """The tensors that a call returns, alone or in a tuple."""
    values = node.meta.get("example_value")
    if not isinstance(values, tuple):
        return [node]
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
    return [node.graph.call_function(operator.getitem, (node, place)) for place in places]


def _read(nodes: Sequence[Node], output: Node) -> set[Node]:
    """The nodes that a graph's results, or the memory of its inputs, are computed from; checkpoints may write, too."""
    memory = {memory_of(n) for n in nodes if n.op in ("placeholder", "get_attr")}
    calls = [n for n in nodes if not isinstance(n.target, HigherOrderOperator)]
    writes = [(n, found) for n in calls if (found := {memory_of(w) for w in written_arguments(n)})]
    read: set[Node] = set()
    waiting: Iterable[Node] = [output]
    while waiting:
        new = list(waiting)
        while new:
            node = new.pop()
            if node not in read:
                read.add(node)
                memory.add(memory_of(node))
                new += _read_by(node)
        memory.discard(None)
        waiting = [n for n, found in writes if n not in read and found & memory]
    return read


#: Calls that read only shape, dtype and device of their first tensor, or of their second one.
_READ_NO_FIRST = frozenset(
    (
        "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like",
        "randint_like", "randn_like", "zeros_like",
    )
)  # fmt: skip
_READ_NO_SECOND = frozenset(("expand_as", "reshape_as", "to", "type_as", "view_as"))


def _read_by(node: Node) -> list[Node]:
    """The arguments on which the result of a call depends; AOTAutograd leaves the others out."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in _READ_NO_FIRST or name in _READ_NO_SECOND:
        unread = node.args[:1] if name in _READ_NO_FIRST else node.args[1:2]
        return [n for n in node.all_input_nodes if n not in unread or node.args.count(n) > 1]
    if node.target is operator.getitem:
        parts, place = node.args
        if isinstance(parts, Node) and parts.target is torch.broadcast_tensors:
            given: Any = parts.args
            return [given[place]]
    return node.all_input_nodes
