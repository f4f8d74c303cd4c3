"""Libraries that run what is not fused."""
