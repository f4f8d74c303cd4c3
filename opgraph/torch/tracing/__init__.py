"""Tracing: a Python function of torch ops as a graph, and plans that spare running it again."""
