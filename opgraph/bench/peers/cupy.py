"""CuPy's `fuse`: the formula as one kernel, by CuPy's tracer."""

from __future__ import annotations

from opgraph.bench.case import Case
from opgraph.bench.peers.numpy import check_words, words
from opgraph.bench.peers.peer import Absent, Built, Peer, Refused, forward_only


def _find(device: str) -> str:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy raises its own exception classes if there is no driver
        raise Absent(str(error)) from None
    if not count:
        raise Absent("there is no GPU")
    return str(cupy.__version__)


def _build(case: Case) -> Built:
    import cupy

    forward_only(case)
    if case.dtype == "bf16":
        raise Refused("has no bf16")
    known, formula = words(cupy), case.entry.formula
    check_words(case, known)
    fused = cupy.fuse()(lambda *xs: formula(known, *xs))
    xs = [cupy.from_dlpack(x) for x in case.inputs]
    if case.entry.in_place:
        out = cupy.from_dlpack(case.out)

        def into() -> None:
            out[...] = fused(*xs)

        return Built(call=into)
    return Built(call=lambda: fused(*xs), returns=("y",))


PEER = Peer(
    name="cupy.fuse", get="pip install 'opgraph[cuda13]' (or [cuda12])", devices=("cuda",), find=_find, build=_build
)
