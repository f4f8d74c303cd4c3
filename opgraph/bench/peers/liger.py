"""Liger's Triton kernels, for the formulas that it has."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from opgraph.bench.case import Case
from opgraph.bench.entries import EPSILON
from opgraph.bench.peers.peer import Absent, Built, Peer, Refused, dense
from opgraph.bench.peers.torch_tensors import by_autograd, find_torch, tensors

#: Entry.native -> module of liger_kernel.ops, class, and the arguments after the inputs.
_FUNCTIONS: Mapping[str, tuple[str, str, tuple[Any, ...]]] = {
    "silu_mul": ("swiglu", "LigerSiLUMulFunction", ()),
    "softmax": ("softmax", "LigerSoftmaxFunction", ()),
    "layer_norm": ("layer_norm", "LigerLayerNormFunction", (EPSILON,)),
    "rms_norm": ("rms_norm", "LigerRMSNormFunction", (EPSILON, 0.0, "llama", False)),
}
#: Its kernels are for rows; a flat array is split into rows of this length, if that divides its size.
_WIDTH = 4096


def _find(device: str) -> str:
    find_torch(device)
    try:
        importlib.import_module("liger_kernel.ops")
        return importlib.metadata.version("liger-kernel")
    except ImportError as error:
        raise Absent(str(error)) from None


def _build(case: Case) -> Built:
    dense(case)
    found = _FUNCTIONS.get(case.entry.native)
    if found is None:
        raise Refused("has no kernel for it")
    module, name, more = found
    apply = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply
    flat = len(case.space) == 1
    if flat and case.elements % _WIDTH:
        raise Refused(f"takes rows; the size is no multiple of {_WIDTH}")

    def function(*xs: Any) -> Any:
        if flat:
            return apply(*(x.view(-1, _WIDTH) for x in xs), *more).view(-1)
        return apply(*xs, *more)

    if case.is_backward:
        # Its backward overwrites what forward saved, so it runs on copies, and the inputs of others stay intact. Later
        # runs compute with what the first run left behind, which takes as long.
        return by_autograd(case, lambda *xs: function(*(x.clone() for x in xs)), "overwrites what it kept")
    xs = tensors(case)
    return Built(call=lambda: function(*xs), returns=("y",))


PEER = Peer(name="Liger", get="pip install liger-kernel", devices=("cuda",), find=_find, build=_build)
