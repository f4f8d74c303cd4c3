"""The table of torch's dtypes and opgraph's names."""

from __future__ import annotations

import torch

from opgraph.ir import dtypes

#: torch's dtypes that have arithmetic in opgraph, by opgraph's name; torch names them as NumPy does.
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, str(dtypes.get(name).numpy)) for name in dtypes.ARITHMETIC}
#: The inverse of that table.
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
