"""Whole networks: graphs captured by Dynamo and AOTAutograd, compiled into programs of kernels and library calls.

`backend` is the entry point for torch.compile; `specs/decisions/0031-capture-by-dynamo.md` lists the other modules.
"""
