"""Bodies of functions that differ from the record's decomposition: what onnxruntime runs faster, or at all."""

from __future__ import annotations

_E = "Exp(Minimum(src, 20))"
_N = f"Multiply({_E}, Add({_E}, 2))"
#: Kinds that f16 and bf16 compute as the op itself in f32, where ai.onnx has it: only that has a kernel.
WHOLE = ("GELU",)

#: By kind, dtype that the body computes in, and number of inputs.
OTHER_BODIES = {
    # onnxruntime up to 1.30 fuses x*Sigmoid(x) in f64 into an op that it has no f64 kernel for, and then refuses the
    # model; this form is also 1.7 times as fast there.
    ("Swish", "f64", 1): "Divide(src, Add(Exp(Neg(Multiply(src, $alpha))), 1))",
    ("Swish", "f64", 2): "Divide(src, Add(Exp(Neg(Multiply(Multiply(src, factor), $alpha))), 1))",
    # Two nodes, which have f32 kernels, instead of five.
    ("HardSwish", "f32", 1): "Multiply(src, HardSigmoid(src, alpha=0.16666666666666666, beta=0.5))",
    # ONNX has Relu for signed types only.
    ("ReLU", "u8", 1): "Maximum(src, 0)",
    # tanh(softplus(x)) = n / (n + 2), n = e^x (e^x + 2), which is 1 in f64 from 20 on. onnxruntime 1.31 takes 9
    # times as long for Softplus and Tanh.
    **{("Mish", work, 1): f"Multiply(src, Divide({_N}, Add({_N}, 2)))" for work in ("f32", "f64")},
}
