"""Fused partitions as functions: one node in the model where opgraph would launch one kernel."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

from onnx import FunctionProto, ModelProto, NodeProto, helper

from opgraph.ir.graph import Graph
from opgraph.onnx.functions import canonical
from opgraph.onnx.nodes import reads
from opgraph.onnx.signature import DOMAIN
from opgraph.onnx.source import Source

if TYPE_CHECKING:
    from opgraph.onnx.draft import Summary
    from opgraph.onnx.emit import Emitter

#: A function of one node would say nothing.
_FEWEST = 2


def fold_partitions(
    graph: Graph,
    source: Source,
    nodes: list[tuple[int, NodeProto]],
    model: ModelProto,
    emitter: Emitter,
    summary: Summary,
) -> list[tuple[int, NodeProto]]:
    """The nodes with each fused partition of several nodes replaced by a call of a function.

    Equal bodies share one function, called after the units inside and a hash of the body.
    """
    by_index: dict[int, list[NodeProto]] = {}
    for index, node in nodes:
        by_index.setdefault(index, []).append(node)
    outputs = {o.name for o in model.graph.output}
    uses = Counter(name for _, node in nodes for name in reads(node))
    calls: dict[int, NodeProto] = {}
    folded: set[int] = set()
    for part in graph.get_partitions():
        indices = sorted({source.node_of[op.id] for op in part.ops if op.id in source.node_of} & by_index.keys())
        inside = [node for index in indices for node in by_index[index]]
        if part.kind != "fused" or len(inside) < _FEWEST or folded & set(indices):
            continue
        call = _call("_".join(dict.fromkeys(part.units)) or "fused", inside, uses, outputs, emitter)
        calls[indices[-1]] = call
        folded |= set(indices)
        summary.units["fused"] = summary.units.get("fused", 0) + 1
    return [
        (index, node)
        for index, group in by_index.items()
        for node in ([calls[index]] if index in calls else [] if index in folded else group)
    ]


def _call(name: str, inside: list[NodeProto], uses: Counter[str], outputs: set[str], emitter: Emitter) -> NodeProto:
    """A function of these nodes, and the node that calls it."""
    made = [n for node in inside for n in node.output if n]
    within = Counter(n for node in inside for n in node.input)
    reads = list(dict.fromkeys(n for node in inside for n in node.input if n and n not in set(made)))
    results = [n for n in made if uses[n] > within[n] or n in outputs or not uses[n]]
    function = FunctionProto(domain=DOMAIN, doc_string="One fused partition.")
    function.input.extend(reads)
    function.output.extend(results)
    for node in inside:
        copy = function.node.add()
        copy.CopyFrom(node)
    function.opset_import.append(helper.make_opsetid("", emitter.opset))
    for domain in sorted({node.domain for node in inside} - {""}):
        function.opset_import.append(helper.make_opsetid(domain, 1))
    function.name = f"{name}_{hashlib.sha256(canonical(function)).hexdigest()[:8]}"
    overload = emitter.functions.add(function, "other")
    return NodeProto(
        op_type=function.name, domain=DOMAIN, overload=overload, input=reads, output=results, name=inside[-1].name
    )
