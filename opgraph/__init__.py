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

if TYPE_CHECKING:
    from opgraph import errors, ops
    from opgraph import onednn as onednn
    from opgraph import onnx as onnx
    from opgraph.ir.graph import Graph
    from opgraph.ir.logical_tensor import LogicalTensor
    from opgraph.ir.op import Op
    from opgraph.ir.parse import parse
    from opgraph.partition.partition import Partition
    from opgraph.runtime.compile_graph import compile
    from opgraph.runtime.compiled_partition import CompiledPartition
    from opgraph.runtime.engine import Engine, Stream
    from opgraph.runtime.executable import Executable
    from opgraph.runtime.reference import evaluate
    from opgraph.transforms.gradient import gradient

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
    # train
    "gradient",
    # the rest; og.onnx (which needs its extra) and og.onednn load on first use, so a star import does not load them
    "errors",
    "ops",
]


#: Names that load on first use, and their modules. Everything is lazy: the command line is part of this package and
#: must handle Ctrl-C before NumPy and the op set are loaded.
_LAZY = {
    "Graph": "opgraph.ir.graph",
    "LogicalTensor": "opgraph.ir.logical_tensor",
    "Op": "opgraph.ir.op",
    "parse": "opgraph.ir.parse",
    "Partition": "opgraph.partition.partition",
    "CompiledPartition": "opgraph.runtime.compiled_partition",
    "compile": "opgraph.runtime.compile_graph",
    "Engine": "opgraph.runtime.engine",
    "Stream": "opgraph.runtime.engine",
    "Executable": "opgraph.runtime.executable",
    "evaluate": "opgraph.runtime.reference",
    "gradient": "opgraph.transforms.gradient",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("errors", "ops", "onnx", "onednn"):
        return importlib.import_module(f"opgraph.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'opgraph' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    import importlib.util

    names = {*globals(), *_LAZY, "onednn"}  # without "onnx" if its packages are missing: getattr of it would raise
    return sorted(
        names | {"onnx"} if importlib.util.find_spec("onnx") and importlib.util.find_spec("onnx_ir") else names
    )
