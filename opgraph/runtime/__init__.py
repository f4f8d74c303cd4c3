"""The runtime: engines, compiled kernels, whole graphs, the reference, and the providers for all that is not fused."""
