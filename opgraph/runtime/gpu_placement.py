"""Placement of an imported graph on a GPU: the library of each op that is not fused, and the values on the host.

A region of ONNX nodes is split. Nodes with a torch form run in torch on the caller's memory, like the graph's native
library ops. onnxruntime runs the rest: on device memory if it has CUDA, else through the host, with a warning. Sizes
(results of `Shape`, and arithmetic with them) always stay on the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from opgraph.ir import opdef
from opgraph.ir.dtypes import BY_NAME
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.partition.partition import FUSED, LIBRARY, NATIVE, Partition
from opgraph.partition.report import counted
from opgraph.runtime.constant_folding import ONNXRUNTIME
from opgraph.runtime.cpu_placement import Node, Wiring, regrouped
from opgraph.runtime.library_partition import torch_on_gpu
from opgraph.runtime.runner import Runner

_SIZES = "carries sizes: runs on the host"


def wired_on_gpu(graph: Graph, partitions: Sequence[Partition]) -> Wiring:
    """Regroups the partitions of a graph (those that an output needs) for a GPU.

    A graph without ONNX nodes keeps its partitions. If torch sees no GPU, every graph does.
    """
    plain = Wiring(partitions=tuple(partitions), first=0, reasons={}, sizes=frozenset())
    if not any(p.provider == ONNXRUNTIME for p in partitions) or not torch_on_gpu():
        return plain
    from opgraph.runtime.providers.torch_onnx.nodes import runs_node  # needs torch and onnx
    from opgraph.runtime.providers.torch_onnx.sizes import sizes_of

    theirs = {op.id for p in partitions if p.provider == ONNXRUNTIME for op in p.ops if not runs_node(op)}
    calls: list[tuple[Op, ...]] = []
    for part in partitions:
        calls += [part.ops] if part.kind == FUSED else [(op,) for op in part.ops]
    place_of = {op.id: place for place, op in enumerate(graph.ops)}
    calls.sort(key=lambda ops: place_of[ops[-1].id])
    refused = {t.id for ops in calls for op in ops if op.id in theirs for t in op.outputs}
    constants = {t.id for t in graph.constants}
    sizes = sizes_of(calls, constants) - refused
    on_host = {op.id for ops in calls for op in ops if op.outputs and all(t.id in sizes for t in op.outputs)}
    reasons = dict.fromkeys(on_host, _SIZES)
    reasons.update(dict.fromkeys(theirs, "torch has no form for it"))
    nodes: list[Node] = []
    for part in partitions:
        if part.kind == FUSED and not all(op.id in on_host for op in part.ops):
            nodes.append(Node(part.ops, part.kind, part.provider, False))
        elif part.kind in (FUSED, LIBRARY):
            nodes += [Node((op,), LIBRARY, ONNXRUNTIME if op.id in theirs else NATIVE, False) for op in part.ops]
        else:
            nodes.append(Node(part.ops, part.kind, part.provider, False))
    wiring = regrouped(graph, partitions, nodes, reasons)
    elsewhere = {t.id for p in wiring.partitions if p.provider != NATIVE for t in p.input_ports}
    kept = sizes - elsewhere - {t.id for t in graph.outputs}
    return Wiring(partitions=wiring.partitions, first=0, reasons=reasons, sizes=frozenset(kept))


def told(wiring: Wiring, runs: Sequence[Runner]) -> Wiring:
    """Adds the library of each library op to the reasons, and warns of partitions that go through the host."""
    reasons = dict(wiring.reasons)
    placed = list(zip(wiring.partitions, runs, strict=True))
    for part, run in placed:
        if part.kind != LIBRARY:
            continue
        where = f"in {run.runs_in} on the GPU, on the memory of the call"
        if is_hosted(run):
            where = f"in {run.runs_in} on the CPU, which waits for the GPU and copies operands down and results up"
        for op in part.ops:
            why = [wiring.reasons[op.id]] if op.id in wiring.reasons else []
            why += [] if why == [_SIZES] else [f"runs {where}"]
            reasons[op.id] = "; ".join(why) if "onnx_op" in op.attrs else f"library op {op.kind}: {'; '.join(why)}"
    warn_of_hosted(placed)
    return Wiring(partitions=wiring.partitions, first=wiring.first, reasons=reasons, sizes=wiring.sizes)


def is_hosted(run: Runner) -> bool:
    """True if a runner on a GPU goes through the host."""
    from opgraph.runtime.cuda_exchange import Hosted  # needs CuPy

    return isinstance(run, Hosted)


def warn_of_hosted(runs: Sequence[tuple[Partition, Runner]]) -> None:
    """Gives one warning for all partitions of a graph that go through the host, with the cost of a call."""
    parts = [(part, run) for part, run in runs if is_hosted(run)]
    if not parts:
        return
    names = list(dict.fromkeys(str(op.attrs.get("onnx_op", op.kind)) for part, _ in parts for op in part.ops))
    libraries = ", ".join(dict.fromkeys(run.runs_in for _, run in parts))
    count = sum(len(part.ops) for part, _ in parts)
    down = _bytes([t for part, _ in parts for t in part.input_ports])
    up = _bytes([t for part, _ in parts for t in part.output_ports])
    foreign = any(opdef.get(op.kind, where=op.label).foreign for part, _ in parts for op in part.ops)
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    warnings.warn(
        f"{counted(count, 'op')} of this graph ({listed}) left to the CPU, in {libraries}: each call waits for the GPU "
        f"in {counted(len(parts), 'place')}, copies {down} to the host and {up} back. Install torch for this GPU"
        f"{', or onnxruntime-gpu' if foreign else ''}; explain() says which ops",
        RuntimeWarning,
        stacklevel=2,
    )


def _bytes(tensors: Sequence[LogicalTensor]) -> str:
    """The size of tensors as text, as far as it is known."""
    known = [t.mem_size for t in tensors if t.has_known_shape and t.dtype in BY_NAME]
    total = f"{sum(known) / 2**20:.1f} MiB" if sum(known) >= 2**20 else f"{sum(known) / 2**10:.1f} KiB"
    return total if len(known) == len(tensors) else f"{total} and what has no known size" if known else "all operands"
