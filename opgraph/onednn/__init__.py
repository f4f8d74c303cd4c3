"""Reads and writes oneDNN Graph's own files, and runs graphs in its real library; loaded on first use.

g = og.onednn.load("graph-100.json"); og.onednn.dump(g, "again.json")     # equal as JSON
real = og.onednn.library.load().build(g)                                  # needs pip install "opgraph[onednn]"
"""

from __future__ import annotations

from opgraph.onednn import library
from opgraph.onednn.dump import dump
from opgraph.onednn.load import load
from opgraph.runtime.partition_cache import (
    compiled_partition_cache_info,
    get_compiled_partition_cache_capacity,
    set_compiled_partition_cache_capacity,
)

__all__ = [
    "compiled_partition_cache_info",
    "dump",
    "get_compiled_partition_cache_capacity",
    "library",
    "load",
    "set_compiled_partition_cache_capacity",
]
