"""torch.compile: the formula, and its gradient, compiled to one graph that writes into the given arrays."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from opgraph.bench.case import Case
from opgraph.bench.peers.peer import Built, Peer
from opgraph.bench.peers.torch_tensors import by_autograd, find_torch, tensor, tensors


def _build(case: Case) -> Built:
    import torch

    from opgraph.bench.peers import torch_words as words

    formula, entry = case.entry.formula, case.entry
    xs = tensors(case)
    outs = [tensor(a) for a in case.outs.values()]

    def forward(out: Any, *xs: Any) -> None:
        out.copy_(formula(words, *xs))

    # The gradient as a function of the inputs: forward is recomputed in the kernel, as torch.compile does by default
    # for these formulas, but without the cost of autograd, and into given arrays.
    def backward(d_y: Any, outs: list[Any], *xs: Any) -> None:
        def of_trained(*trained: Any) -> Any:
            given = iter(trained)
            return formula(words, *(next(given) if o.name in entry.wrt else x for o, x in zip(entry.operands, xs)))

        trained = [x for o, x in zip(entry.operands, xs) if o.name in entry.wrt]
        pulled: Any = torch.func.vjp(of_trained, *trained)[1]
        for out, gradient in zip(outs, pulled(d_y)):
            out.copy_(gradient)

    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch.compiler.reset()  # one function here serves all entries: torch would treat the ninth as its ninth version
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.kept:  # backward reads values computed by forward, so forward is not part of it
            return by_autograd(case, torch.compile(lambda *xs: formula(words, *xs), fullgraph=True))
        if case.is_backward:
            d_y = tensor(case.arrays["d_y"])
            gradient: Any = torch.compile(backward, fullgraph=True)
            gradient(d_y, outs, *xs)
            return Built(call=lambda: gradient(d_y, outs, *xs))
        compiled: Any = torch.compile(forward, fullgraph=True)
        compiled(outs[0], *xs)
    return Built(call=lambda: compiled(outs[0], *xs))


PEER = Peer(name="torch.compile", get="pip install torch, and a C++ compiler on the CPU", find=find_torch, build=_build)
