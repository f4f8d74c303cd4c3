"""Whole networks: what Dynamo and AOTAutograd captured, as programs of kernels and library calls.

`backend` is where torch.compile enters; `specs/decisions/0031-capture-by-dynamo.md` is the map of the rest.
"""
