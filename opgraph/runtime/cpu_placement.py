"""Placement of an imported graph on a CPU: the pointwise parts that join a library's region, and those that run once.

The partitions of a graph show which ops could be one kernel. To run them next to onnxruntime, three more things count:

- A seam has a cost. Each kernel between two regions adds a run of onnxruntime and a launch, and hides its operands from
  the optimizer (a bias, an activation after a convolution, blocked layouts). So a fused partition joins the region if
  onnxruntime runs it just as fast: see `_verdict`.
- Values that depend on the shapes of inputs alone (masks, positions, the tables of rotary embeddings, target shapes)
  are the same for each set of shapes. They are split off into partitions that run first, once for each set.
- Regions merge where no other partition lies between them any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from opgraph.ir import dtypes
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.partition.clusters import Clusters
from opgraph.partition.partition import FUSED, LIBRARY, NO_ROWS, Partition, log_partitions, make_partition
from opgraph.partition.traits import cost_of
from opgraph.partition.units import Unit
from opgraph.runtime.constant_folding import ONNXRUNTIME, static_ops
from opgraph.runtime.foreign_nodes import check_onnx

# Microseconds, measured with onnxruntime 1.31 on 2 cores: small transformers of 160 to 240 nodes take 320 to 350 us. An
# empty session with bound buffers takes 2.2 us and a launch 1 us. But the threads of several sessions must not spin, so
# each session wakes them again: nine seams in such a transformer cost about 15 us each.
NODE_COST, SEAM_COST = 1.5, 15.0
#: Small tensors lie in a core's L2 cache. If they do not, the real saving exceeds the estimate.
BYTES_PER_MICROSECOND = 40_000
#: Microseconds of one instruction of a function (an exponential or the like) on one element, and the smallest number of
#: instructions of a function, as its record counts them. Cheaper ops are arithmetic, and as fast in onnxruntime.
INSTRUCTION_COST, FUNCTION = 1e-4, 10
#: The assumed value of an unknown size.
USUAL_SIZE = 8
USUAL_OPSET = 20
#: The number of edges for each op that searches for cycles may visit.
_SEARCH_BUDGET = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Partitions in the order in which they run.

    Attributes:
        partitions: all of them; each op that an output needs is in exactly one.
        first: the number of leading partitions that depend on the shapes of the inputs alone.
        reasons: the reason for an op's placement, by op id, where it differs from the graph's own partitions.
        sizes: ids of the values that stay on the host, where the rest is on a GPU; None on a CPU.
    """

    partitions: tuple[Partition, ...]
    first: int
    reasons: Mapping[int, str]
    sizes: frozenset[int] | None = None


def wired(graph: Graph, partitions: Sequence[Partition]) -> Wiring:
    """Regroups the partitions of a graph (those that an output needs) for a CPU with onnxruntime.

    A graph without ONNX nodes keeps its partitions.
    """
    regions = [p for p in partitions if p.provider == ONNXRUNTIME]
    if not regions:
        return Wiring(partitions=tuple(partitions), first=0, reasons={})
    check_onnx(regions[0].ops[0])
    from opgraph.runtime.providers.onnx_native import opset_of_region

    static = static_ops(graph, partitions)
    reasons = dict.fromkeys(static, "depends on the shapes of inputs alone: computed once for each set of shapes")
    border = _Border(
        opset=opset_of_region(op for part in regions for op in part.ops),
        reads=frozenset(t.id for part in regions for t in part.input_ports),
        makes=frozenset(t.id for part in regions for t in part.output_ports),
    )
    nodes: list[Node] = []
    for part in partitions:
        nodes += _nodes_of(part, border, static, reasons)
    return regrouped(graph, partitions, nodes, reasons)


@dataclass(frozen=True, slots=True)
class _Border:
    """The interface of the regions: their opset, and the tensors that they read and produce."""

    opset: int
    reads: frozenset[int]
    makes: frozenset[int]


@dataclass(frozen=True, slots=True)
class Node:
    """A unit of regrouping: an op of a library, or a fused partition."""

    ops: tuple[Op, ...]
    kind: str
    provider: str
    is_static: bool


def _nodes_of(part: Partition, border: _Border, static: set[int], reasons: dict[int, str]) -> list[Node]:
    is_static = all(op.id in static for op in part.ops)
    if part.kind == FUSED:
        joins, why = _verdict(part, border)
        if not is_static and why:
            reasons.update((op.id, why) for op in part.ops)
        if joins or (is_static and joins is None):
            return [Node((op,), LIBRARY, ONNXRUNTIME, is_static) for op in part.ops]
    elif part.provider == ONNXRUNTIME:
        return [Node((op,), part.kind, part.provider, op.id in static) for op in part.ops]
    return [Node(part.ops, part.kind, part.provider, is_static)]


# -- placement of a fused partition -----------------------------------------------------------------------------------


def _verdict(part: Partition, border: _Border) -> tuple[bool | None, str]:
    """Decides if a fused partition joins a region (None: it may, but a kernel is faster; False: it cannot), and why.

    It stays a kernel if that saves more than the seam costs. It saves the nodes that onnxruntime would run one by one
    (NODE_COST each), the bytes that it would move between them, and the time of its slower functions. A unit that
    onnxruntime fuses itself is one node, and as fast as a kernel.
    """
    from opgraph.runtime.providers.onnx_native import is_writable

    sides = any(t.id in border.makes for t in part.input_ports) + any(t.id in border.reads for t in part.output_ports)
    if sides == 0:
        return False, ""
    # A region of native ops alone specifies no opset, and gets the usual one.
    if not all(is_writable(op, opset) for op in part.ops for opset in {border.opset, USUAL_OPSET}):
        return False, "a kernel of its own: onnxruntime has none for it"
    passes, theirs, instructions = _provider_work(part)
    own = sum(map(_bytes, (*part.input_ports, *part.output_ports)))
    saved = (passes - 1) * NODE_COST + max(theirs - own, 0) / BYTES_PER_MICROSECOND + instructions * INSTRUCTION_COST
    if passes == 1:
        saved = 0
    nodes = "1 node" if passes == 1 else f"{passes} nodes"
    if saved > SEAM_COST * sides / 2:
        return None, f"a kernel of its own: onnxruntime would run {nodes}, some {saved:.0f} us more"
    return True, f"in onnxruntime's region: {nodes} there, and a kernel would cost a seam"


def _provider_work(part: Partition) -> tuple[int, int, int]:
    """The nodes that onnxruntime would run for a partition, the bytes that they move, instructions of its functions."""
    from opgraph.runtime.providers.onnx_native import FUSED_THERE

    root = {op.id: op.id for op in part.ops}  # op -> the op that represents the unit that is one node there
    for unit in sorted(part.unit_matches, key=lambda u: len(u.ops)):
        if unit.name in FUSED_THERE and all(t.dtype == "f32" for op in unit.ops for t in op.outputs):
            root.update((op.id, unit.root.id) for op in unit.ops)
    node_of = {t.id: root[op.id] for op in part.ops for t in op.outputs}
    made = [t for op in part.ops for t in op.outputs if root[op.id] == op.id]
    read = {(root[op.id], t.id): t for op in part.ops for t in op.inputs if node_of.get(t.id) != root[op.id]}
    members = Counter(root.values())
    slow = [op for op in part.ops if members[root[op.id]] == 1 and cost_of(op) >= FUNCTION and not _is_whole_power(op)]
    instructions = sum(cost_of(op) * _elements(op.outputs[0]) for op in slow)
    return len(set(root.values())), sum(map(_bytes, made)) + sum(map(_bytes, read.values())), instructions


def _is_whole_power(op: Op) -> bool:
    """True if a power's exponent is a small integer: onnxruntime, too, multiplies in this case."""
    exponents = [
        op.attrs.get("beta"),
        *(t.data.item() for t in op.inputs[1:] if t.data is not None and t.data.size == 1),
    ]
    return any(e in (2, 3) for e in exponents)


def _elements(tensor: LogicalTensor) -> int:
    sizes = [d if isinstance(d, int) else USUAL_SIZE for d in tensor.dims] if tensor.dims is not None else [USUAL_SIZE]
    return prod(sizes)


def _bytes(tensor: LogicalTensor) -> int:
    return _elements(tensor) * dtypes.get(tensor.dtype).itemsize


# -- merging ----------------------------------------------------------------------------------------------------------


def regrouped(
    graph: Graph, partitions: Sequence[Partition], nodes: Sequence[Node], reasons: Mapping[int, str]
) -> Wiring:
    """Builds partitions from nodes; nodes of one library merge where nothing lies between them.

    Args:
        partitions: the graph's own; the new ones keep their units and rows.
        nodes: the nodes of their ops, in their order.
        reasons: as in Wiring.
    """
    maker = {t.id: place for place, node in enumerate(nodes) for op in node.ops for t in op.outputs}
    sources = [
        sorted({maker[t.id] for op in node.ops for t in op.inputs if t.id in maker} - {place})
        for place, node in enumerate(nodes)
    ]
    clusters = Clusters(sources, _SEARCH_BUDGET * len(nodes) + 1000)

    def color(place: int) -> str:
        node = nodes[place]
        return f"{node.provider} {node.is_static}" if node.kind == LIBRARY else ""

    clusters.join_by_level(lambda a, b: color(a) != "" and color(a) == color(b))
    for place, around in enumerate(sources):
        for source in around:
            a, b = clusters.find(source), clusters.find(place)
            if a != b and color(a) and color(a) == color(b):
                clusters.join(a, b)
    clusters.join_siblings(color)
    members: dict[int, list[Node]] = {}
    for place, node in enumerate(nodes):
        members.setdefault(clusters.find(place), []).append(node)
    order = sorted(clusters, key=lambda c: not nodes[c].is_static)  # stable: static clusters depend on no others
    place_of = {op.id: place for place, op in enumerate(graph.ops)}
    cluster_of = {op.id: c for c, around in members.items() for node in around for op in node.ops}
    units: dict[int, list[Unit]] = {}
    for unit in (u for part in partitions for u in part.unit_matches):
        touched = {cluster_of[op.id] for op in unit.ops}
        if len(touched) == 1:
            units.setdefault(touched.pop(), []).append(unit)
    outputs = {t.id for t in graph.outputs}
    rows = {part.ops[0].id: part.rows for part in partitions if part.kind == FUSED}
    made: list[Partition] = []
    for c in order:
        ops = sorted((op for node in members[c] for op in node.ops), key=lambda op: place_of[op.id])
        kind, provider = nodes[c].kind, nodes[c].provider
        forms = rows.get(ops[0].id, NO_ROWS) if kind == FUSED else NO_ROWS
        made.append(make_partition(graph, outputs, len(made), kind, ops, units.get(c, ()), provider, forms))
    log_partitions(made, ", regrouped beside a library")
    return Wiring(partitions=tuple(made), first=sum(nodes[c].is_static for c in order), reasons=reasons)
