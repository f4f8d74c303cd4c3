"""Reads and writes ONNX models: `load`, `save`, `fuse`, and `FusePass` for onnx_ir. Requires the extra `onnx`."""

from __future__ import annotations

from typing import Any

from opgraph.ir.optional_dependencies import NotInstalled

try:
    import onnx  # noqa: F401
    import onnx_ir  # noqa: F401
except ImportError as error:
    raise NotInstalled(
        f"ONNX files cannot be read or written: {error}", where="opgraph.onnx", fix="pip install 'opgraph[onnx]'"
    ) from None

from opgraph.onnx.ir_pass import FusePass
from opgraph.onnx.load import load
from opgraph.onnx.save import fuse, save

__all__ = ["FusePass", "fuse", "load", "save"]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "backend":  # only test runners use it
        return importlib.import_module("opgraph.onnx.backend")
    raise AttributeError(f"module 'opgraph.onnx' has no attribute {name!r}")
