"""The table of ONNX nodes that torch runs: its rows, and the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opgraph.errors import Unimplemented


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a node.

    Attributes:
        attrs: the node's own attributes, as plain values.
        opset: the version of its domain.
        outputs: the number of its outputs up to the last one that it makes.
        listed: the number of its outputs, with those that it omits.
        dtype: the dtype declared for its first output; None if nothing is declared.
        device: the device of the tensors, also for results made from numbers alone.
        training: the mode of the node's module; None: it is in no module, and its own attributes determine the mode.
        where: the node, for messages.
    """

    attrs: Mapping[str, Any]
    opset: int
    outputs: int
    listed: int
    dtype: torch.dtype | None
    device: torch.device
    training: bool | None
    where: str

    def attr(self, name: str, default: Any = None) -> Any:
        """The value of an attribute."""
        return self.attrs.get(name, default)

    def refuse(self, what: str, fix: str = "replace the node in the model") -> Unimplemented:
        """The error for a use of an op that is not implemented."""
        return Unimplemented(f"torch has no form for this node: {what}", where=self.where, fix=fix)


#: `run(call, *inputs)`: inputs are tensors, or None if omitted; numbers for the positions in `numbers`.
Run = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchForm:
    """The torch form of one ONNX op.

    Attributes:
        run: computes the op in torch.
        weights: positions whose initializers are trained.
        numbers: positions that are read as Python numbers (shapes, axes), and may stay on the CPU.
        on_host: True if it reads no data, and its results (sizes) stay on the CPU.
        refuses: returns the reason why `run` does not support a node, by its attributes and outputs; None if it does.
    """

    run: Run
    weights: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    on_host: bool = False
    refuses: Callable[[Call], str | None] | None = None


_TABLE: dict[tuple[str, str], TorchForm] = {}


def torch_form(
    *names: str,
    domain: str = "",
    weights: tuple[int, ...] = (),
    numbers: tuple[int, ...] = (),
    on_host: bool = False,
    refuses: Callable[[Call], str | None] | None = None,
) -> Callable[[Run], Run]:
    """Registers a function as the torch form of some ONNX ops."""

    def enter(run: Run) -> Run:
        for name in names:
            if (domain, name) in _TABLE:
                raise ValueError(f"ONNX op {domain}::{name} has two torch forms")
            _TABLE[(domain, name)] = TorchForm(
                run=run, weights=weights, numbers=numbers, on_host=on_host, refuses=refuses
            )
        return run

    return enter


def form_of(domain: str, name: str) -> TorchForm | None:
    """The torch form of an ONNX op, or None."""
    from opgraph.runtime.providers.torch_onnx import (  # noqa: F401  # they fill the table
        attention,
        indexing,
        layers,
        pooling,
        resize,
        shapes,
    )

    return _TABLE.get((domain, name))
