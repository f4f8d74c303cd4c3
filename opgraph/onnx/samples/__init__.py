"""Small ONNX models with the op structure that exporters write, made from a seed: what `opgraph demo` works on.

Each function returns a ModelProto. The structures were read off files that torch 2.13 exports (opset 20); the weights
are random, scaled so that activations keep their size.
"""

from opgraph.onnx.samples.activations import gated_f16, own_activation
from opgraph.onnx.samples.builder import write
from opgraph.onnx.samples.efficientnet import efficientnet
from opgraph.onnx.samples.llama import llama

__all__ = ["efficientnet", "gated_f16", "llama", "own_activation", "write"]
