"""What the backward program of a captured graph may be given: batches of gradients, and kept tensors of other strides.

A program takes addresses, and strides stand in it as numbers. Under a transform of torch.func, and in
`autograd.grad(is_grads_batched=True)`, a tensor may stand for a batch and have no address, and under
`forward_ad.dual_level` it may have a tangent: the graph is then run op by op. Saved-tensor hooks may give back a
tensor with other strides than it was kept with (contiguous ones, for example): such a tensor is copied into the
strides that the program was made for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Interpreter

from opgraph.runtime.providers.torch_internals import has_saved_tensors_hooks, is_batched, is_forward_mode
from opgraph.torch.graph.dynamic_shapes import SizedPrograms
from opgraph.torch.graph.program import Program
from opgraph.torch.graph.program_text import restrided, same_strides
from opgraph.torch.graph.symbolic_program import SizedProgram


class Hooks:
    """Notes whether saved-tensor hooks were ever in force when a graph's forward program ran."""

    def __init__(self) -> None:
        self.seen = False

    def noted(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """A forward program that notes them."""

        def forward(args: list[Any]) -> Any:
            if has_saved_tensors_hooks():
                self.seen = True
            return run(args)

        forward._boxed_call = True  # type: ignore[attr-defined]
        return forward


def backward_of(program: Program | SizedPrograms, hooks: Hooks) -> Callable[[list[Any]], Any]:
    """A backward program that takes whatever autograd has for it.

    Args:
        hooks: of the forward program of the same graph.
    """

    def backward(args: list[Any]) -> Any:
        if is_batched() or is_forward_mode():
            given = args[:]
            args.clear()
            return Interpreter(program.module).run(*given)
        if hooks.seen:
            _restride(program.sized(args) if isinstance(program, SizedPrograms) else program, args)
        return program.run(args)

    backward._boxed_call = True  # type: ignore[attr-defined]
    return backward


def _restride(program: Program | SizedProgram, args: list[Any]) -> None:
    """Copies the arguments whose strides are others than those that the program was made for."""
    for place, strides in enumerate(program.input_strides):
        given = args[place]
        if strides is not None and isinstance(given, torch.Tensor) and not same_strides(given, strides):
            args[place] = restrided(given, strides)
