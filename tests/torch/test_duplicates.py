"""Values of captured graphs that are recomputed."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from opgraph.torch.graph.duplication import Sources

aten = torch.ops.aten


@pytest.mark.parametrize(("rounds", "is_long"), [(1, False), (4, False), (5, True)])
def test_length_of_a_recomputed_chain_counts_each_node_once(rounds: int, is_long: bool) -> None:
    graph = Graph()
    value = graph.placeholder("x")
    computed = set()
    for _ in range(rounds):  # each value reads the previous one three times
        square = graph.call_function(aten.mul.Tensor, (value, value))
        value = graph.call_function(aten.add.Tensor, (square, value))
        computed |= {square, value}
    assert Sources(computed).is_long(value) is is_long
