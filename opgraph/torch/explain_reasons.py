"""Why a torch function is left to torch, in a few words, for the report of explain."""

from __future__ import annotations

from opgraph.torch.tracing import refusals
from opgraph.torch.tracing.expansions import is_view

#: Functions whose results are new, or copies: nothing is computed from data.
_MAKES = frozenset(
    ("empty", "zeros", "ones", "full", "arange", "tensor", "rand", "randn", "randint", "clone", "contiguous",
     "get", "numel", "size", "dim", "stride", "shape", "dtype", "device", "to", "cpu", "cuda")
)  # fmt: skip


def reads_values(name: str) -> bool:
    """Whether Python asks for the values of data with this function."""
    return name in refusals._READS


def reason(name: str) -> str:
    """The reason; "" where the function computes nothing from data: questions, views, new tensors."""
    if reads_values(name):
        return "Python reads the values"
    if "norm" in name and name in refusals._REDUCES:
        return "a normalization: a library op"
    if name in refusals._REDUCES:
        return "a reduction: a library op"
    if name in refusals._PRODUCTS:
        return "a library op"
    if name in refusals._RANDOM:
        return "it draws random numbers"
    if name == "__setitem__":
        return "it writes into a part of a tensor"
    if name in _MAKES or is_view(name) or name in refusals._GRADIENTS:
        return ""
    return "" if name.startswith(("_", "new_")) or name.endswith("_like") else "not pointwise"
