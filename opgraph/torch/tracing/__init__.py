"""Tracing: converts a Python function of torch ops to a graph, and makes plans that replace further runs."""
