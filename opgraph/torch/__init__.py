"""opgraph for PyTorch. Needs the extra `torch`."""

from __future__ import annotations

from opgraph.torch.from_onnx import from_onnx, to_onnx
from opgraph.torch.inplace_check import check_inplace
from opgraph.torch.inplace_report import InplaceFinding, InplaceReport
from opgraph.torch.memory import saved_tensors
from opgraph.torch.memory_report import MemoryReport

__all__ = ["InplaceFinding", "InplaceReport", "MemoryReport", "check_inplace", "from_onnx", "saved_tensors", "to_onnx"]
