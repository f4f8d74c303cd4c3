"""opgraph for PyTorch. Needs the extra `torch`."""

from __future__ import annotations

from opgraph.torch.inplace_check import check_inplace
from opgraph.torch.inplace_report import InplaceFinding, InplaceReport
from opgraph.torch.memory import saved_tensors
from opgraph.torch.memory_report import MemoryReport

__all__ = ["InplaceFinding", "InplaceReport", "MemoryReport", "check_inplace", "saved_tensors"]
