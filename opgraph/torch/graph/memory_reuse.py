"""Stores results of kernels in the memory of values whose last reader is the same kernel.

A step then allocates less: its peak is lower, and the result is in memory that is in the processor's caches and that
the system has already provided. Only memory that the program allocated is overwritten: never an input (backward may run
twice on saved tensors, and other inputs belong to the caller), and never a returned value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from opgraph.runtime.providers.torch_internals import OpOverload
from opgraph.torch.graph.aten import value_of
from opgraph.torch.graph.program_text import Step, last_steps
from opgraph.torch.graph.tensor_locations import Place, place_of
from opgraph.torch.graph.views import base_of, is_alias, is_view


def overwritable(kernel: Any, reads: Sequence[Place], writes: Sequence[Place]) -> dict[str, tuple[str, ...]]:
    """For each variable that a kernel writes, the variables that it reads and whose memory the result may take.

    These have the same dtype, sizes and strides, and the kernel reads them only element by element. Results of sums
    need their own memory, because a kernel may write parts of them while others are computed.

    Args:
        kernel: compiled for the CPU or a GPU.
        reads, writes: the places of the tensors of its ports.
    """
    operands = kernel.operands
    sources: dict[str, list[int]] = {}
    for i, place in enumerate(reads):
        sources.setdefault(place.name, []).append(i)
    found = {}
    for result, place in enumerate(writes):
        store = operands.loop.stores[result]
        if store.to is not None or store.per_row:
            continue
        found[place.name] = tuple(
            name
            for name, ports in sources.items()
            if all(replace(reads[i], name=place.name) == place and operands.lies_over(i, result) for i in ports)
        )
    return found


def own_values(graph: Graph, made: Mapping[str, Place], is_known: Callable[[str], bool]) -> dict[str, Place]:
    """The places of the variables whose memory only the program's kernels and PyTorch's own functions have accessed.

    Other functions (collectives, for example) may still read their arguments after they have returned, or keep their
    results. An alias that a call returns, such as a view in another dtype, may be read when the value is dead.

    Args:
        made: the allocations of the program for its kernels.
        is_known: True if a variable does not alias others, as far as schemas show it; see `Beginnings`.
    """
    found = dict(made)
    exposed: set[str] = set()
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node) or node.name in made:
            continue
        call = node.args[0] if node.target is operator.getitem else node
        if not isinstance(call, Node) or not _is_torchs(call) or is_alias(call):
            exposed |= {base_of(n).name for n in node.all_input_nodes}
        elif is_known(node.name) and isinstance(value_of(node), torch.Tensor) and not _has_twin(node):
            found[node.name] = place_of(node)
    return {name: place for name, place in found.items() if name not in exposed}


def _has_twin(node: Node) -> bool:
    """True if another node takes the same element of the same tuple."""
    if node.target is not operator.getitem:
        return False
    return any(u is not node and u.target is node.target and u.args == node.args for u in node.all_input_nodes[0].users)


def _is_torchs(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims")


def reuse_memory(steps: Sequence[Step], own: Mapping[str, Place], lasting: Collection[str]) -> set[str]:
    """Stores results in the memory of values that die in the step that makes the results.

    Args:
        steps: in order; their allocations are changed.
        own: variables whose memory may be overwritten, and their places.
        lasting: variables that no step frees.

    Returns: the variables whose memory another one takes over.
    """
    last = last_steps(steps)
    taken: set[str] = set()
    for number, step in enumerate(steps):
        for place, allocation in enumerate(step.allocations):
            for name in allocation.fits:
                dies = last[name] == number and name not in lasting and name not in taken
                if dies and name in own and _are_alike(own[name], allocation.place):
                    taken.add(name)
                    line = f"{allocation.name} = {_read_as(name, own[name], allocation.place)}"
                    step.allocations[place] = replace(allocation, line=line, over=name)
                    break
    return taken


def _are_alike(own: Place, wanted: Place) -> bool:
    """True if a tensor can take the whole memory of another one, perhaps with other axes."""
    if replace(own, name=wanted.name) == wanted:
        return True
    are_whole = own.offset == wanted.offset == 0 and _is_dense(own) and _is_dense(wanted)
    return are_whole and own.dtype == wanted.dtype and math.prod(own.size) == math.prod(wanted.size)


def _is_dense(place: Place) -> bool:
    """True if the elements of a tensor fill a range of memory, each once, in any order of the axes."""
    run = 1
    for stride, size in sorted((stride, size) for size, stride in zip(place.size, place.stride) if size != 1):
        if stride != run:
            return False
        run *= size
    return True


def _read_as(name: str, own: Place, wanted: Place) -> str:
    """The expression of a tensor in the memory of another one."""
    if (own.size, own.stride) == (wanted.size, wanted.stride):
        return name
    return f"reinterpret({name}, {wanted.size}, {wanted.stride}, 0)"
