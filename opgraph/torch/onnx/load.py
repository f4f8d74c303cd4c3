"""`from_onnx`: loads a model from a file, to train it in torch; `to_onnx`: writes it back to a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch

from opgraph.errors import InvalidArguments

if TYPE_CHECKING:
    from opgraph.onnx.origin import ModelLike
    from opgraph.torch.onnx.module import OnnxModule


def from_onnx(model: ModelLike, *, trainable: Collection[str] | Callable[[str], bool] | None = None) -> OnnxModule:
    """An ONNX model as a torch module whose weights can be trained. Needs the extra `onnx`.

    opgraph runs pointwise partitions; Conv, Gemm, MatMul, norms, pooling and the like are torch's own ops. The module
    is in eval mode, in which it follows the file; `module.train()` makes BatchNormalization use batch statistics and
    update the stored ones, and Dropout drop, as in torch. State-dict keys are the names of the initializers. An
    initializer that is also an input (IR 4 and later) is used where the input is left out, and trained like the others.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model.
        trainable: the initializers that become parameters: names, or a function of the name. By default the float ones
            in the weight position of a layer, those multiplied as matrices, and those that are at least 1-d and an
            operand next to data in a pointwise op (scales, slopes, biases). All others become buffers.

    Raises:
        ModelError: the file cannot be read, or must not be trusted.
        Unimplemented: nodes without a torch form; all are named.
        InvalidArguments: a name in `trainable` is no float initializer.
    """
    from opgraph.torch.onnx.module import OnnxModule  # needs onnx

    return OnnxModule(model, trainable).eval()


def to_onnx(module: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes a module that came from ONNX back to a file, with its current weights; see `OnnxModule.save`.

    Raises:
        InvalidArguments: the module did not come from `from_onnx`.
        ModelError: the file cannot be written.
    """
    from opgraph.torch.onnx.module import OnnxModule  # needs onnx

    if not isinstance(module, OnnxModule):
        raise InvalidArguments(
            f"a {type(module).__name__} did not come from an ONNX model",
            where="to_onnx",
            fix="use torch.onnx.export(module, ..., dynamo=True)",
        )
    module.save(path)
