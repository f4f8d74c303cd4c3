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

if TYPE_CHECKING:
    from opgraph import onnx as onnx
    from opgraph.ir.parse import parse
    from opgraph.partition.partition import Partition
    from opgraph.runtime.compiled import CompiledPartition
    from opgraph.runtime.engine import Engine, Stream
    from opgraph.runtime.executable import Executable, compile
    from opgraph.runtime.reference import evaluate

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - grouped by stage
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
    # the rest; og.onnx loads on first use and needs its extra, so a star import leaves it alone
    "errors",
    "ops",
]

#: What loads on first use: composing a graph needs none of it, and it is half of the time that an import takes.
_ON_FIRST_USE = {
    "parse": "opgraph.ir.parse",
    "Partition": "opgraph.partition.partition",
    "CompiledPartition": "opgraph.runtime.compiled",
    "Engine": "opgraph.runtime.engine",
    "Stream": "opgraph.runtime.engine",
    "Executable": "opgraph.runtime.executable",
    "compile": "opgraph.runtime.executable",
    "evaluate": "opgraph.runtime.reference",
    "onnx": "",
}


def __getattr__(name: str) -> Any:
    module = _ON_FIRST_USE.get(name)
    if module is None:
        raise AttributeError(f"module 'opgraph' has no attribute {name!r}")
    import importlib

    found = importlib.import_module(module or f"opgraph.{name}")
    value = getattr(found, name) if module else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
