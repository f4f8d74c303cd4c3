"""Running: engines, compiled kernels, whole graphs, the reference, and the providers of everything not fused."""
