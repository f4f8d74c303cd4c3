"""opgraph for PyTorch. Needs the extra `torch`."""

from __future__ import annotations

from opgraph.torch.inplace_check import check_inplace
from opgraph.torch.inplace_report import InplaceFinding, InplaceReport

__all__ = ["InplaceFinding", "InplaceReport", "check_inplace"]
