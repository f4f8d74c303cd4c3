"""The table of ONNX nodes that torch runs: what a row is, and how a node is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opgraph.errors import Unimplemented


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One node at one call.

    Attributes:
        attrs: the node's own attributes, as plain values.
        opset: the version of its domain.
        outputs: how many of its outputs somebody reads, up to the last one.
        dtype: the dtype declared for its first output; None where nothing is declared.
        device: where the tensors are; what is made from numbers alone goes there.
        training: the mode of the module that the node is part of; None: it is part of none, and is what it says.
        where: the node, for messages.
    """

    attrs: Mapping[str, Any]
    opset: int
    outputs: int
    dtype: torch.dtype | None
    device: torch.device
    training: bool | None
    where: str

    def attr(self, name: str, default: Any = None) -> Any:
        """The value of an attribute."""
        return self.attrs.get(name, default)

    def refuse(self, what: str, fix: str = "replace the node in the model") -> Unimplemented:
        """The error for a use of an op that is not written."""
        return Unimplemented(f"torch has no form for this node: {what}", where=self.where, fix=fix)


#: `run(call, *inputs)`: inputs are tensors, or None where one is left out; numbers for the positions in `numbers`.
Run = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchForm:
    """How torch runs one ONNX op.

    Attributes:
        run: the meaning in torch.
        weights: positions whose initializers are trained.
        numbers: positions that are read as Python numbers (shapes, axes), and may stay on the CPU.
        on_host: it reads no data, and what it makes (sizes) stays on the CPU.
        refuses: why a node, known by its attributes and outputs, is one that `run` has no answer for; None otherwise.
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
    """Enters a function as the torch form of some ONNX ops."""

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
