"""Tensors kept for backward and the memory peak: measurement, reports and drawings."""
