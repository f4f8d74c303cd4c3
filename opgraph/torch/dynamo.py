"""`torch.compile(model, backend="opgraph")`: the captured graph runs with its pointwise arithmetic in fused ops.

Found by name through the entry point `torch_dynamo_backends`; nothing needs to be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opgraph.errors import InvalidArguments
from opgraph.torch.lazy.mode import run_lazily


def backend(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """What runs a graph that torch.compile captured, in training and in inference.

    Args:
        graph: of torch functions, as captured; autograd runs through it as in eager mode.
        example_inputs: not needed: dtypes and shapes are those of each call.
        options: none are known.

    Raises:
        InvalidArguments: an option is given.
    """
    if options:
        raise InvalidArguments(
            f"there is no option {next(iter(options))!r}", where='torch.compile(backend="opgraph")', fix="leave it out"
        )
    forward = graph.forward

    def run(*args: Any) -> Any:
        return run_lazily(lambda: forward(*args))

    return run
