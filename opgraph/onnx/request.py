"""What a caller asks of an export."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_TARGET = "onnxruntime==1.31"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How a graph is to be written; the arguments of `opgraph.onnx.save`, which says what they mean.

    Attributes:
        library: whether an onnxruntime library is to run the fused partitions.
        keep: names of units that stay as they are.
    """

    form: str = "auto"
    target: str = DEFAULT_TARGET
    functions: bool = False
    opset: int | None = None
    library: bool = False
    keep: frozenset[str] = frozenset()
