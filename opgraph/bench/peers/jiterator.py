"""torch.cuda.jiterator: a C++ function that torch compiles to one elementwise kernel."""

from __future__ import annotations

from opgraph.bench.case import Case
from opgraph.bench.peers.peer import Built, Peer, Refused, forward_only
from opgraph.bench.peers.text import cxx_function
from opgraph.bench.peers.torch_tensors import find_torch, tensor, tensors

#: The maximum number of inputs.
_MOST_INPUTS = 8


def _build(case: Case) -> Built:
    import torch

    forward_only(case)
    xs = tensors(case)
    if len(xs) > _MOST_INPUTS:
        raise Refused(f"takes {_MOST_INPUTS} inputs")
    fused = torch.cuda.jiterator._create_jit_fn(cxx_function(case.entry))
    if case.entry.in_place:
        out = tensor(case.out)
        return Built(call=lambda: out.copy_(fused(*xs)))
    return Built(call=lambda: fused(*xs), returns=("y",))


PEER = Peer(name="jiterator", get="pip install torch", devices=("cuda",), find=find_torch, build=_build)
