"""opgraph for PyTorch. Needs the extra `torch`."""

from __future__ import annotations

from opgraph.ir.optional_dependencies import NotInstalled

try:
    import torch  # noqa: F401
except ImportError as error:
    raise NotInstalled(
        f"torch cannot be imported: {error}", where="opgraph.torch", fix="pip install 'opgraph[torch]'"
    ) from None

from opgraph.runtime.memory_pool import empty_cache
from opgraph.torch.explain import FusionReport, explain
from opgraph.torch.fuse import fuse
from opgraph.torch.fuse_module import unfuse
from opgraph.torch.inplace.check import check_inplace
from opgraph.torch.inplace.findings import InplaceFinding, InplaceReport
from opgraph.torch.memory.measure import saved_tensors
from opgraph.torch.memory.report import MemoryReport
from opgraph.torch.nn import Activation, SwiGLU, Swish
from opgraph.torch.onnx.load import from_onnx, to_onnx

__all__ = [
    "Activation",
    "FusionReport",
    "InplaceFinding",
    "InplaceReport",
    "MemoryReport",
    "SwiGLU",
    "Swish",
    "check_inplace",
    "empty_cache",
    "explain",
    "from_onnx",
    "fuse",
    "saved_tensors",
    "to_onnx",
    "unfuse",
]
