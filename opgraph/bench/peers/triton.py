"""Triton: the kernel that a user would write for the formula, with 1024 elements per program."""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from opgraph.bench.case import Case
from opgraph.bench.peers.peer import Absent, Built, Peer, Refused, dense, forward_only
from opgraph.bench.peers.text import triton_module
from opgraph.bench.peers.torch_tensors import find_torch, tensor, tensors

_BLOCK = 1024


def _find(device: str) -> str:
    find_torch(device)
    try:
        import triton
    except ImportError as error:
        raise Absent(str(error)) from None
    return str(triton.__version__)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="opgraph-bench-")


def kernel_of(source: str) -> Any:
    """The kernel of a module's text, written to a file first: Triton reads the source of a function from its file."""
    path = Path(_folder().name) / f"fused_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fused


def _build(case: Case) -> Built:
    forward_only(case)
    dense(case)
    if any(step.kind in ("SoftMax", "LayerNorm", "RMSNorm") for step in case.entry.steps()):
        raise Refused("row kernels are Liger's")
    kernel = kernel_of(triton_module(case.entry))
    xs, out = tensors(case), tensor(case.out)
    size, width = case.elements, case.space[-1]
    channels = case.space[1] if len(case.space) > 1 else 1
    grid = (-(-size // _BLOCK),)
    return Built(call=lambda: kernel[grid](*xs, out, size, width, channels, BLOCK=_BLOCK))


PEER = Peer(name="Triton", get="pip install triton", devices=("cuda",), find=_find, build=_build)
