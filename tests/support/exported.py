"""Models from torch's exporters: a module of every activation at once, in any dtype and opset."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own habit

Function = Callable[[torch.Tensor], torch.Tensor]


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


#: Activations and related functions, as users write them.
ZOO: dict[str, Function] = {
    "silu": F.silu,
    "swish with a factor": lambda x: x * torch.sigmoid(1.5 * x),
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "mish, spelled out": lambda x: x * torch.tanh(F.softplus(x)),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.5),
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "hardtanh": F.hardtanh,
    "logsigmoid": F.logsigmoid,
    "glu": F.glu,
    "swiglu": _swiglu,
    "erf": torch.erf,
    "pow": lambda x: torch.pow(x.abs(), 1.7),
    "where": lambda x: torch.where(x > 0, x, torch.exp(x) - 1),
    "clamp": lambda x: x.clamp(-1, 2),
    "sign": torch.sign,
    "log1p": lambda x: torch.log1p(x.abs()),
    "exp": torch.exp,
    "sin": torch.sin,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "atan": torch.atan,
    "maximum": lambda x: torch.maximum(x, -x),
    "fmod": lambda x: torch.fmod(x, 1.5),
    "remainder": lambda x: torch.remainder(x, 1.5),
    "round": torch.round,
    "floor": torch.floor,
    "nan_to_num": torch.nan_to_num,
    "isnan": lambda x: torch.isnan(x).to(x.dtype),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "softmax": lambda x: torch.softmax(x, -1),
    "layernorm": lambda x: F.layer_norm(x, (8,)),
}
#: Functions that only the newer exporter accepts.
NEW_ONLY: dict[str, Function] = {
    "asinh": torch.asinh,
    "expm1": torch.expm1,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "rmsnorm": lambda x: F.rms_norm(x, (8,)),
    "lerp": lambda x: torch.lerp(x, -x, 0.3),
}


class Zoo(torch.nn.Module):
    """One output for each activation of a zoo."""

    def __init__(self, zoo: dict[str, Function]) -> None:
        super().__init__()
        self.zoo = zoo

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(x) for function in self.zoo.values())


def export(module: torch.nn.Module, args: tuple[torch.Tensor, ...], opset: int, **options: Any) -> onnx.ModelProto:
    """A module as torch's exporter writes it, with a dynamic first axis of its first input."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports missing packages, which do not matter here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = options.pop("dynamic_shapes", ({0: torch.export.Dim("n")}, *({} for _ in args[1:])))
        program = torch.onnx.export(
            module, args, dynamo=True, verbose=False, opset_version=opset, dynamic_shapes=shapes, **options
        )
    return program.model_proto


def export_by_tracing(module: torch.nn.Module, args: tuple[torch.Tensor, ...], opset: int) -> onnx.ModelProto:
    """A module as torch's older exporter writes it, which supports opsets before 18."""
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, args, written, dynamo=False, opset_version=opset, input_names=["x"], dynamic_axes={"x": {0: "n"}}
        )
    return onnx.load_from_string(written.getvalue())


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values in its own dtype."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def rounding_errors(got: Any, want: torch.Tensor) -> float:
    """The largest difference, in roundings of the dtype at the largest value (or at 1, if all are smaller)."""
    exact = want.detach().double().numpy()
    size = max(1.0, float(np.abs(exact).max()))
    return float(np.abs(np.asarray(got).astype(np.float64) - exact).max() / size / torch.finfo(want.dtype).eps)
