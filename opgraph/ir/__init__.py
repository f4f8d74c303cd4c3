"""The graph: dtypes, logical tensors, ops, graphs, and their text form."""
