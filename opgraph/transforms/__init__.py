"""Transforms: from a graph to another graph."""
