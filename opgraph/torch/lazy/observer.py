"""Who wants to know what a lazy forward pass does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgraph.torch.lazy.node import Node


class Observer:
    """Is told what a session does; this one does not listen."""

    def site(self) -> Any:
        """Where in the model the run is."""

    def runs(self, nodes: list[Node], outputs: list[Node], kernel: Any, tensors: list[torch.Tensor]) -> None:
        """Calls are about to run on these tensors: by a kernel, or one by one in torch where there is none."""

    def left(self, func: Callable[..., Any], why: str, result: Any) -> None:
        """A call was left to torch; `why` is empty where opgraph does not know the function."""
