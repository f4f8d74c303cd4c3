"""Libraries that run all that is not fused."""
