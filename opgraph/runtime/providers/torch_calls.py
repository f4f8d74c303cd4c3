"""Calls of a one-kernel graph on torch tensors, prepared for the signatures that were seen before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opgraph.runtime.providers.torch_prepared import (
    MAX_READY,
    Check,
    Run,
    check_of,
    is_plain,
    kernel_statements,
    tensor_names,
)
from opgraph.runtime.runner import Runner


class TorchCalls:
    """Prepared calls of a graph that is one kernel.

    Args:
        runner, reads, writes: the result of `Executable.alone`.
        names: the names of the graph's inputs.
        outputs: the names of its outputs.
    """

    def __init__(
        self, runner: Runner, reads: Sequence[int], writes: Sequence[int], names: Sequence[str], outputs: Sequence[str]
    ) -> None:
        self._alone = runner, reads, writes
        self._names, self._outputs = tuple(names), tuple(outputs)
        self._ready: list[tuple[Check, Run]] = []

    def __call__(self, given: Any) -> Any:
        """Returns the result of the graph's call; None if the normal path must handle it: a new signature."""
        if type(given) is not dict or len(given) != len(self._names):
            return None
        try:
            tensors = [given[name] for name in self._names]
            for tensor in tensors:
                if tensor.is_nested:
                    return None
        except (KeyError, AttributeError):
            return None
        if is_plain():
            for check, run in self._ready:
                if check(*tensors):
                    try:
                        found = run(*tensors)
                    except torch.cuda.OutOfMemoryError:  # the normal path's error names the purpose of the memory
                        return None
                    return found if type(found) is not tuple else dict(zip(self._outputs, found))
        return None

    def learn(self, given: Mapping[Any, Any], results: Sequence[torch.Tensor]) -> None:
        """Prepares calls like a successful one."""
        if len(self._ready) >= MAX_READY or not is_plain() or given.keys() != set(self._names):
            return
        tensors = [given[name] for name in self._names]
        if not all(type(t) is torch.Tensor and t.numel() for t in (*tensors, *results)):
            return
        check = check_of(tensors)
        names = tensor_names(len(tensors))
        made = kernel_statements(*self._alone, [t.detach() for t in tensors], results, names, self._otherwise)
        if check is not None and made is not None:
            self._ready.append((check, made.function(names)))

    def _otherwise(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        runner, reads, writes = self._alone
        found = dict(zip(writes, runner([tensors[i].detach() for i in reads])))
        return [found[i] for i in range(len(found))]
