"""Lazy execution: pointwise arithmetic of a model waits until its values are needed, and runs fused."""
