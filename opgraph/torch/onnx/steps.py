"""A graph as a list of torch calls: one for each fused partition, one for each other op."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from opgraph.errors import Unimplemented
from opgraph.ir.graph import Graph
from opgraph.partition.partition import needed_for
from opgraph.partition.partitioner import partition
from opgraph.runtime.providers.torch_onnx.nodes import kind_of
from opgraph.runtime.providers.torch_onnx.sizes import carries_sizes
from opgraph.torch.onnx.calls import Run, pieces, unable


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call.

    Attributes:
        reads, makes: tensor ids.
        frees: what nobody reads afterwards.
        numbers: which of `reads` it takes as Python numbers.
        on_host: it works on shapes, and stays on the CPU.
    """

    run: Run
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: tuple[int, ...]
    numbers: tuple[bool, ...]
    on_host: bool


def steps_of(graph: Graph, weights: Collection[int]) -> list[Step]:
    """The calls that compute a graph's outputs, in order.

    Args:
        weights: ids of the constants that are trained.

    Raises:
        Unimplemented: nodes that torch has no form for here, named.
    """
    _refuse_unknown(graph)
    kept = {t.id for t in graph.outputs}
    needed = needed_for(partition(graph).partitions, kept)
    runs = [piece for part in needed for piece in pieces(part, weights)]
    last = {i: place for place, (_, reads, _, _, _) in enumerate(runs) for i in reads}
    kept |= {t.id for t in (*graph.inputs, *graph.constants)}
    constants = {t.id for t in graph.constants}
    host: set[int] = set()
    result = []
    for place, (run, reads, made, numbers, sizes) in enumerate(runs):
        on_host = carries_sizes(reads, made, constants, host)
        host |= {t.id for t in made} if on_host or sizes else set()
        result.append(
            Step(
                run=run,
                reads=reads,
                makes=tuple(t.id for t in made),
                frees=tuple({i for i in reads if last[i] == place} - kept),
                numbers=numbers,
                on_host=on_host,
            )
        )
    return result


def _refuse_unknown(graph: Graph) -> None:
    reasons = [(op, reason) for op in graph.ops if op.outputs and (reason := unable(op)) is not None]
    if not reasons:
        return
    kinds = sorted({f"{kind_of(op)} with {reason}" if reason else kind_of(op) for op, reason in reasons})
    names = ", ".join(f'{kind_of(op)} "{op.name}"' for op, _ in reasons[:5]) + (" ..." if len(reasons) > 5 else "")
    raise Unimplemented(
        f"from_onnx has no torch form for {', '.join(kinds)}",
        where=f"{len(reasons)} nodes: {names}" if len(reasons) > 1 else names,
        fix="replace these nodes in the model, or export it with an opset or options that avoid them",
    )
