"""opgraph: compose or import a graph, fuse it, run it, export it.

import opgraph as og

g = og.Graph()
x = g.input("x", dtype="f32", shape=(None, 4096))
y = g.add_op("Multiply", x, g.add_op("Sigmoid", x), name="y")
print(g.explain())                 # one partition, one unit: swish
f = og.compile(g, device="cpu")
out = f(x=array)
"""

from typing import TYPE_CHECKING, Any

from opgraph import errors, ops
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.parse import parse
from opgraph.partition.partition import Partition
from opgraph.runtime.compiled import CompiledPartition
from opgraph.runtime.engine import Engine, Stream
from opgraph.runtime.executable import Executable, compile
from opgraph.runtime.reference import evaluate

if TYPE_CHECKING:
    from opgraph import onnx

__version__ = "0.1.0"

__all__ = [
    # build
    "Graph",
    "LogicalTensor",
    "Op",
    "parse",
    # fuse
    "Partition",
    "CompiledPartition",
    # run
    "Engine",
    "Executable",
    "Stream",
    "compile",
    "evaluate",
    # edges and the rest
    "errors",
    "onnx",
    "ops",
]

_ON_FIRST_USE = ("onnx",)


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        import importlib

        return importlib.import_module(f"opgraph.{name}")
    raise AttributeError(f"module 'opgraph' has no attribute {name!r}")
