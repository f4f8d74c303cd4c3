"""The op set: importing this package fills the registry of `opgraph.ir.opdef`."""

from opgraph.ops import pointwise, structural

__all__ = ["pointwise", "structural"]
