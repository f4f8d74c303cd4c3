"""Eager torch: the formula, op by op, as a user writes it."""

from __future__ import annotations

from opgraph.bench.case import Case
from opgraph.bench.peers.peer import Built, Peer
from opgraph.bench.peers.torch_tensors import by_autograd, find_torch, tensor, tensors


def _build(case: Case) -> Built:
    from opgraph.bench.peers import torch_words as words

    formula = case.entry.formula
    if case.is_backward:
        return by_autograd(case, lambda *xs: formula(words, *xs))
    xs = tensors(case)
    if case.entry.in_place:
        out = tensor(case.out)
        return Built(call=lambda: out.copy_(formula(words, *xs)))
    return Built(call=lambda: formula(words, *xs), returns=("y",))


PEER = Peer(name="torch eager", get="pip install torch", find=find_torch, build=_build)
