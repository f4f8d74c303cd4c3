"""Small ONNX models for `opgraph demo`, made from a seed, with the op structure that exporters write.

Each function returns a ModelProto. The structures were copied from files that torch 2.13 exports (opset 20). The
weights are random, and scaled so that activations keep their magnitude.
"""

from opgraph.onnx.samples.activations import gated_f16, own_activation
from opgraph.onnx.samples.builder import write
from opgraph.onnx.samples.efficientnet import efficientnet
from opgraph.onnx.samples.llama import llama

__all__ = ["efficientnet", "gated_f16", "llama", "own_activation", "write"]
