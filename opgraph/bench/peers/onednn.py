"""oneDNN's library: the graph, or the one op that is the whole formula, through its Graph API."""

from __future__ import annotations

from opgraph.bench.case import Case
from opgraph.bench.peers.peer import Absent, Built, Peer, Refused, dense
from opgraph.errors import DeviceError, OpGraphError


def _find(device: str) -> str:
    from opgraph.onednn import library

    try:
        return library.load().version
    except DeviceError as error:
        raise Absent(error.what) from None


def _build(case: Case) -> Built:
    from opgraph.onednn import library

    dense(case)
    if case.entry.in_place:
        raise Refused("writes no result over an input that other partitions read")
    loaded = library.load()
    loaded.set_threads(case.threads)
    graph = None if case.is_backward else case.entry.one_op(case.space, case.dtype)
    try:
        real = loaded.build(graph or case.graph)
        call = real.bind(case.feeds, dict(case.outs))
    except OpGraphError as error:
        raise Refused(error.what) from None
    parts = len(real.partitions)
    return Built(call=lambda real=real: call(), note="" if parts == 1 else f"{parts} partitions")  # type: ignore[misc]


PEER = Peer(
    name="oneDNN", get="pip install 'opgraph[onednn]' (x86-64 Linux)", devices=("cpu",), find=_find, build=_build
)
