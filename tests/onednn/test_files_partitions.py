"""The partitions of oneDNN's graph files, compared with the counts of the real library (3.13.2)."""

from __future__ import annotations

import math

import pytest
from onednn_files import RUNNABLE, content_of, graph_of, needs_files, real_partitions

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.opdef import find

pytestmark = needs_files

#: Families of ops that one kernel can contain: one pass over elements, or over rows.
FUSIBLE = ("pointwise", "sum", "reduction", "norm")

#: Files with more partitions than in the real library. The list must shrink: a file that no longer has more fails.
MORE_THAN_THE_LIBRARY: set[str] = set()


def family(op: og.Op) -> str:
    record = find(op.kind)
    assert record is not None
    return record.family


def kinds(name: str) -> set[str]:
    return {entry["kind"] for entry in content_of(name)["graph"]}


def is_of_rows(name: str) -> bool:
    """True if all ops of a file are pointwise, reductions, softmax or norms."""
    families = [record.family for kind in kinds(name) if (record := find(kind)) is not None]
    return len(families) == len(kinds(name)) and set(families) <= {*FUSIBLE, "structural"}


ROWS = [name for name in RUNNABLE if is_of_rows(name)]
POINTWISE = [
    name
    for name in ROWS
    if all(record is not None and record.is_pointwise for record in map(find, kinds(name)))
    and len(content_of(name)["graph"]) > 1
]


def test_corpus_has_row_and_pointwise_files() -> None:
    assert len(ROWS) >= 50 and len(POINTWISE) >= 12


@pytest.mark.parametrize("name", ROWS)
def test_partitions_are_no_more_than_the_real_librarys(name: str) -> None:
    theirs = min(real_partitions(engine)[name]["fusion"] for engine in ("cpu", "gpu"))
    ours = len(graph_of(name).get_partitions())
    assert (ours > theirs) is (name in MORE_THAN_THE_LIBRARY), (ours, theirs)


@pytest.mark.parametrize("name", POINTWISE)
def test_a_file_of_pointwise_ops_is_one_kernel(name: str) -> None:
    assert [p.kind for p in graph_of(name).get_partitions()] == ["fused"]


# -- neighbours -----------------------------------------------------------------------------------------------------
#
# In every file, two neighbours that kernels can contain are in one partition, unless the graph forbids it: a path
# between the partitions leads through an op that no kernel contains (both in one would be a cycle), or a total over one
# shape is read in a loop over another (it is complete only after its own loop has ended).


def is_held(op: og.Op) -> bool:
    """True if kernels can contain an op, by its record; quantization only between arithmetic dtypes, by one scale."""
    if family(op) == "quantization":
        stored = {t.dtype for t in (*op.inputs, *op.outputs)} - set(dtypes.ARITHMETIC)
        scales = op.attrs.get("scales")
        return not stored and (len(scales) == 1 if isinstance(scales, tuple) else op.attrs["qtype"] != "per_group")
    return family(op) in FUSIBLE


def space(part: og.Partition) -> tuple[int, ...]:
    """The largest shape in a partition, which is that of its loop."""
    shapes = [t.shape for op in part.ops for t in (*op.inputs, *op.outputs) if t.has_known_shape]
    return max(shapes, key=math.prod, default=())


def is_total(part: og.Partition, tensor: og.LogicalTensor) -> bool:
    """True if a value depends on a reduction inside the partition that makes it."""
    made = {t.id: op for op in part.ops for t in op.outputs}
    waiting, seen = [tensor.id], {tensor.id}
    while waiting:
        op = made.get(waiting.pop())
        if op is not None and family(op) in ("sum", "reduction", "norm"):
            return True
        for source in op.inputs if op is not None else ():
            if source.id not in seen:
                seen.add(source.id)
                waiting.append(source.id)
    return False


def apart_without_need(graph: og.Graph) -> list[str]:
    """Edges between ops that kernels can contain, whose two partitions could be one."""
    parts = graph.get_partitions()
    # Obstacles for the partitioner: ops that no kernel contains, as single ops, not as a library groups them.
    node_of = {op.id: (part.id, 0 if part.kind == "fused" else op.id) for part in parts for op in part.ops}
    before: dict[tuple[int, int], set[tuple[int, int]]] = {}  # for each node, all nodes that it depends on
    around: dict[tuple[int, int], set[tuple[int, int]]] = {}  # those that also lead to it through a library op
    for part in parts:
        for node in dict.fromkeys(node_of[op.id] for op in part.ops):
            ops = [op for op in part.ops if node_of[op.id] == node]
            makers = [m for op in ops for t in op.inputs if (m := graph.producer(t.id)) is not None]
            sources = {node_of[m.id] for m in makers} - {node}
            before[node] = sources.union(*[before[s] for s in sources])
            passed = {node_of[m.id] for m in makers if not is_held(m)} - {node}
            around[node] = set().union(*[around[s] for s in sources], *[before[s] for s in passed])
    found = []
    for op in graph.ops:
        for tensor in op.inputs if op.kind != "End" and is_held(op) else ():
            maker = graph.producer(tensor.id)
            if maker is None or not is_held(maker) or node_of[maker.id] == node_of[op.id]:
                continue
            mine, theirs = node_of[maker.id], node_of[op.id]
            one, other = parts[mine[0]], parts[theirs[0]]
            if mine not in around[theirs] and not (is_total(one, tensor) and space(one) != space(other)):
                found.append(f"{maker.label} -> {op.label} (tensor {tensor.id})")
    return found


@pytest.mark.parametrize("name", RUNNABLE)
def test_fusible_neighbours_are_fused_unless_the_graph_forbids_it(name: str) -> None:
    assert apart_without_need(graph_of(name)) == []


def test_debug_policy_separates_fusible_neighbours() -> None:
    """This shows that the test above finds neighbours in most files."""
    debug = {name: _Debug(graph_of(name)) for name in RUNNABLE}
    assert sum(bool(apart_without_need(graph)) for graph in debug.values()) > len(RUNNABLE) / 2  # type: ignore[arg-type]


class _Debug:
    """A graph with a separate partition for each op."""

    def __init__(self, graph: og.Graph) -> None:
        self.ops, self.producer = graph.ops, graph.producer
        self.get_partitions = lambda: graph.get_partitions("debug")


# -- swish ----------------------------------------------------------------------------------------------------------

SWISHES = {
    "complex_fusion/mlp/gated-mlp-f32.json",
    "complex_fusion/mlp/gated-mlp-f16-f32.json",
    "complex_fusion/mlp/gated-mlp-int4.json",
    "pattern/f32/conv_add_swish_relu_fusion.json",
    "pattern/f32/conv_bias_swish_fusion.json",
    "pattern/f32/conv_bias_mul_mul_depthwise_bias_swish_fusion_cpu.json",
    "pattern/f32/matmul_post_ops_swish_fusion.json",
} & set(RUNNABLE)
LOOK_ALIKES = sorted(n for n in RUNNABLE if {"Sigmoid", "Multiply"} <= kinds(n) and n not in SWISHES)


def units(name: str) -> list[str]:
    return [unit for part in graph_of(name).get_partitions() for unit in part.units]


def test_corpus_has_swishes_and_look_alikes() -> None:
    assert len(SWISHES) == 5 and len(LOOK_ALIKES) >= 2


@pytest.mark.parametrize("name", sorted(SWISHES))
def test_swish_is_found_in_every_file_that_has_one(name: str) -> None:
    assert "swish" in units(name)


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_no_swish_is_found_in_look_alike_files(name: str) -> None:
    assert "swish" not in units(name)
