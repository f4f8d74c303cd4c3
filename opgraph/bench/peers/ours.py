"""opgraph: the graph compiled and bound to the arrays."""

from __future__ import annotations

import opgraph as og
from opgraph.bench.case import Case
from opgraph.bench.peers.peer import Built, Peer


def _build(case: Case) -> Built:
    f = og.compile(case.graph, device=case.device)
    outs = dict(case.outs)
    call = f.bind(case.feeds, out=outs if len(outs) > 1 else case.out)
    kernels = len(f.partitions)
    return Built(call=call, note="" if kernels == 1 else f"{kernels} partitions")


PEER = Peer(name="opgraph", get="", find=lambda device: og.__version__, build=_build)
