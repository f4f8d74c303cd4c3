"""How oneDNN's graph files are cut, beside the partition counts of the real library (3.13.2) for them."""

from __future__ import annotations

import pytest
from onednn_files import RUNNABLE, content_of, graph_of, needs_files, real_partitions

import opgraph as og
from opgraph.ir.opdef import find

pytestmark = needs_files

#: Families whose ops one kernel can hold: one pass over elements, or over rows.
FUSIBLE = ("pointwise", "sum", "reduction", "norm")

#: Files that have more partitions than the real library makes of them. To shrink: one that no longer has fails.
MORE_THAN_THE_LIBRARY: set[str] = set()
#: Files in which fusible neighbours are apart although no library op is between them. To shrink as well.
NEIGHBOURS_APART = {
    "complex_fusion/mha/gqa-plain-training-backward-bf16-f32.json",
    "complex_fusion/mha/gqa-plain-training-backward-f32.json",
    "complex_fusion/mha/hf-sdpa-bwd-no-mask-bf16-f32.json",
    "complex_fusion/mha/hf-sdpa-bwd-w-mask-bf16-f32.json",
    "complex_fusion/mha/hf-sdpa-fwd-no-mask-bf16-f32.json",
    "complex_fusion/mha/hf-sdpa-fwd-w-mask-bf16-f32.json",
    "complex_fusion/mha/sdpa-plain-training-backward-bf16-f32.json",
    "complex_fusion/mha/sdpa-plain-training-backward-f32.json",
    "complex_fusion/mha/sdpa-plain-training-backward-w-dmask-bf16-f32.json",
    "complex_fusion/mha/sdpa-training-fwd-no-mask-f16-f32.json",
    "complex_fusion/mha/timms-sdpa-bwd-no-mask-bf16-f32.json",
    "complex_fusion/mha/timms-sdpa-fwd-no-mask-bf16-f32.json",
    "complex_fusion/mha/torchbench-sdpa-bwd-w-mask-bf16-f32.json",
    "complex_fusion/mha/torchbench-sdpa-fwd-bf16-f32.json",
    "complex_fusion/mha/torchbench-sdpa-fwd-implicit-mask-bf16-f32.json",
    "complex_fusion/mha/torchbench-sdpa-fwd-w-mask-bf16-f32.json",
    "pattern/int8/int8_bf16_gnorm_add_fusion.json",
    "pattern/int8/int8_bf16_gnorm_relu_fusion.json",
    "pattern/int8/int8_bnorm_relu_fusion.json",
}


def family(op: og.Op) -> str:
    record = find(op.kind)
    assert record is not None
    return record.family


def kinds(name: str) -> set[str]:
    return {entry["kind"] for entry in content_of(name)["graph"]}


def is_of_rows(name: str) -> bool:
    """Whether all ops of a file are pointwise, reductions, softmax or norms."""
    families = [record.family for kind in kinds(name) if (record := find(kind)) is not None]
    return len(families) == len(kinds(name)) and set(families) <= {*FUSIBLE, "structural"}


ROWS = [name for name in RUNNABLE if is_of_rows(name)]
POINTWISE = [
    name
    for name in ROWS
    if all(record is not None and record.is_pointwise for record in map(find, kinds(name)))
    and len(content_of(name)["graph"]) > 1
]


def test_there_are_files_of_each_kind() -> None:
    assert len(ROWS) >= 50 and len(POINTWISE) >= 12


@pytest.mark.parametrize("name", ROWS)
def test_at_most_as_many_partitions_as_the_real_library(name: str) -> None:
    theirs = min(real_partitions(engine)[name]["fusion"] for engine in ("cpu", "gpu"))
    ours = len(graph_of(name).get_partitions())
    assert (ours > theirs) is (name in MORE_THAN_THE_LIBRARY), (ours, theirs)


@pytest.mark.parametrize("name", POINTWISE)
def test_a_file_of_pointwise_ops_is_one_kernel(name: str) -> None:
    assert [p.kind for p in graph_of(name).get_partitions()] == ["fused"]


def unfused_neighbours(graph: og.Graph) -> list[str]:
    """Edges between fusible ops of two partitions that could be one: no way between them leads through a library op."""
    parts = graph.get_partitions()
    part_of = {op.id: part.id for part in parts for op in part.ops}
    before: list[set[int]] = []  # by partition: all that it depends on
    around: list[set[int]] = []  # by partition: those of them from which a way leads through a library op
    for part in parts:
        sources = {part_of[m.id] for t in part.input_ports if (m := graph.producer(t.id)) is not None}
        before.append(sources.union(*[before[s] for s in sources]))
        passed = [s for s in sources if any(family(op) not in FUSIBLE for op in parts[s].ops)]
        around.append(set().union(*[around[s] for s in sources], *[before[s] for s in passed]))
    found = []
    for op in graph.ops:
        for tensor in op.inputs if op.kind != "End" else ():
            maker = graph.producer(tensor.id)
            if maker is not None and family(op) in FUSIBLE and family(maker) in FUSIBLE:
                p, q = part_of[maker.id], part_of[op.id]
                if p != q and p not in around[q]:
                    found.append(f"{maker.label} -> {op.label} (tensor {tensor.id})")
    return found


@pytest.mark.parametrize("name", RUNNABLE)
def test_fusible_neighbours_are_one_partition_beside_the_library_ops(name: str) -> None:
    apart = unfused_neighbours(graph_of(name))
    assert bool(apart) is (name in NEIGHBOURS_APART), apart


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


def test_there_are_swishes_and_look_alikes() -> None:
    assert len(SWISHES) == 5 and len(LOOK_ALIKES) >= 2


@pytest.mark.parametrize("name", sorted(SWISHES))
def test_swish_is_found_in_every_file_that_has_one(name: str) -> None:
    assert "swish" in units(name)


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_no_swish_is_found_in_files_that_only_look_like_it(name: str) -> None:
    assert "swish" not in units(name)
