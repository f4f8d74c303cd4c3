"""Custom-op libraries for onnxruntime: fused partitions as compiled ops of domain `opgraph`."""
