"""Two models that are pointwise from end to end; a runtime without fusion runs them node by node."""

from __future__ import annotations

from onnx import ModelProto, TensorProto

from opgraph.onnx.samples.builder import Builder

_WIDTH = 4096


def own_activation() -> ModelProto:
    """A user's own activation, 14 nodes: `x`, f32[batch,4096] -> `y`, the same.

    y = x sigmoid(1.5 x) (1 + 0.1 tanh(x)) + 0.05 x exp(-x^2 / 2), clamped to [-6, 6].
    """
    net = Builder("activation", seed=3)
    x = net.input("x", TensorProto.FLOAT, ("batch", _WIDTH))
    swish = net("Mul", x, net("Sigmoid", net("Mul", x, net.value(1.5))))
    bent = net("Add", net("Mul", net("Tanh", x), net.value(0.1)), net.value(1.0))
    bump = net("Exp", net("Mul", net("Mul", x, x), net.value(-0.5)))
    tail = net("Mul", net("Mul", bump, x), net.value(0.05))
    y = net("Clip", net("Add", net("Mul", swish, bent), tail), net.value(-6.0), net.value(6.0), name="y")
    return net.model(y, TensorProto.FLOAT, ("batch", _WIDTH))


def gated_f16() -> ModelProto:
    """The gate of a SwiGLU in half precision: `gate`, `up`, f16[batch,4096] -> `y` = gate sigmoid(gate) up."""
    net = Builder("gated_f16", seed=4)
    gate = net.input("gate", TensorProto.FLOAT16, ("batch", _WIDTH))
    up = net.input("up", TensorProto.FLOAT16, ("batch", _WIDTH))
    silu = net("Mul", gate, net("Sigmoid", gate), name="silu")
    return net.model(net("Mul", silu, up, name="y"), TensorProto.FLOAT16, ("batch", _WIDTH))
