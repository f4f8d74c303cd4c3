"""Torch's dtypes and ours: the one table of them."""

from __future__ import annotations

import torch

from opgraph.ir import dtypes

#: torch's dtypes that have arithmetic in opgraph, by opgraph's name; both call them as NumPy does.
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, str(dtypes.get(name).numpy)) for name in dtypes.ARITHMETIC}
#: The same the other way round.
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
