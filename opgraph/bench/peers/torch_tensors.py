"""A case's arrays as torch tensors on the same memory, and backward by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opgraph.bench.case import Case
from opgraph.bench.peers.peer import Absent, Built


def find_torch(device: str) -> str:
    """Torch's version, if it supports the device."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise Absent(str(error)) from None
    if device == "cuda" and not torch.cuda.is_available():
        raise Absent("torch sees no GPU")
    return str(torch.__version__)


def tensor(array: Any) -> Any:
    """A torch tensor on an array's memory; a tensor is returned unchanged."""
    from opgraph.runtime.providers.torch import from_numpy

    return from_numpy(array) if isinstance(array, np.ndarray) else array


def tensors(case: Case) -> list[Any]:
    """The formula's inputs."""
    return [tensor(a) for a in case.inputs]


def by_autograd(case: Case, function: Callable[..., Any], note: str = "") -> Built:
    """Only backward, of a function that ran forward once: as in `loss.backward()`, into new tensors."""
    import torch

    leaves = [t.detach() for t in tensors(case)]
    wanted = [leaf for leaf, o in zip(leaves, case.entry.operands) if o.name in case.entry.wrt]
    for leaf in wanted:
        leaf.requires_grad_()
    y = function(*leaves)
    d_y = tensor(case.arrays["d_y"])
    return Built(
        call=lambda: torch.autograd.grad(y, wanted, d_y, retain_graph=True),
        returns=tuple(f"d_{o.name}" for o in case.entry.operands if o.name in case.entry.wrt),
        note=note,
    )
