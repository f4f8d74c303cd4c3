"""All peers, and the search for those on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from opgraph.bench.peers import (
    cupy,
    jiterator,
    liger,
    numexpr,
    numpy,
    onednn,
    onnxruntime,
    ours,
    torch_compiled,
    torch_eager,
    torch_native,
    triton,
)
from opgraph.bench.peers.peer import Absent, Peer
from opgraph.errors import InvalidArguments

OURS = ours.PEER
#: In the order of tables. Importing a module of these imports no library; `find` does.
PEERS: tuple[Peer, ...] = (
    torch_native.PEER,
    torch_eager.PEER,
    torch_compiled.PEER,
    onnxruntime.PEER,
    onednn.PEER,
    numexpr.PEER,
    numpy.PEER,
    triton.PEER,
    liger.PEER,
    jiterator.PEER,
    cupy.PEER,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A peer, and the result of the search for it.

    Attributes:
        version: empty if it is absent.
        reason: why it is absent.
        get: how to get it; empty if it is present, or does not run on the device.
    """

    peer: Peer
    version: str = ""
    reason: str = ""
    get: str = ""


def look(device: str, only: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> tuple[Found, ...]:
    """Every peer for a device, found or not.

    Args:
        only: names; all if empty.
        without: names to leave out.

    Raises:
        InvalidArguments: no peer has one of the names.
    """
    names = [p.name for p in PEERS]
    for name in (*only, *without):
        if name not in names:
            option = "--peers" if name in only else "--without"
            raise InvalidArguments(f"there is no peer {name!r}", where=option, fix=f"the peers are {', '.join(names)}")
    found = []
    for peer in PEERS:
        if (only and peer.name not in only) or peer.name in without:
            continue
        if device not in peer.devices:
            where = "a GPU (--device cuda)" if peer.devices == ("cuda",) else "the CPU"
            found.append(Found(peer=peer, reason=f"runs on {where} alone"))
            continue
        try:
            found.append(Found(peer=peer, version=peer.find(device)))
        except Absent as error:
            reason = str(error).splitlines()[0] if str(error) else "not installed"
            found.append(Found(peer=peer, reason=reason, get=peer.get))
    return tuple(found)
