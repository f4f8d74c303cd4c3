"""Runs a graph of opgraph in oneDNN's own library, to see its fusion, its results and its time.

    library = opgraph.onednn.library.load()      # needs pip install "opgraph[onednn]"
    real = library.build(graph)                  # a finalized og.Graph of oneDNN's kinds, engine "cpu"
    real.partitions                              # op ids, ports, supported
    real({"t0": x})                              # {"t2": y}: NumPy arrays in and out, by name or tensor id
    call = real.bind({"t0": x}, {"t2": y}); call()          # checked once, for timing
    real.close()                                 # or: with library.build(graph) as real

It uses the process's OpenMP runtime. The wheel loads libgomp.so.1 by this name, as do torch's and opgraph's kernels, so
there is one pool of threads, in any order of loading.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from functools import cache
from pathlib import Path
from typing import Any

from opgraph.errors import DeviceError
from opgraph.ir.graph import Graph
from opgraph.onednn import capi
from opgraph.onednn.real_graph import RealGraph

_WHEEL = "onednn-cpu-gomp"
_FIX = 'pip install "opgraph[onednn]" (x86-64 Linux)'


class Library:
    """The loaded library. Created by `load`.

    Attributes:
        path: path of the shared object.
        version: for example "3.2.0".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._dll = ctypes.CDLL(str(path))
        except OSError as error:
            raise DeviceError(f"the library does not load: {error}", where=str(path), fix=_FIX) from None
        for name, types in capi.SIGNATURES.items():
            function = getattr(self._dll, f"dnnl_{name}")
            function.argtypes, function.restype = types, ctypes.c_int
        self._dll.dnnl_version.restype = ctypes.POINTER(capi.Version)
        found = self._dll.dnnl_version().contents
        self.version = f"{found.major}.{found.minor}.{found.patch}"
        self._dll.dnnl_get_effective_cpu_isa.restype = ctypes.c_uint
        self._isa = int(self._dll.dnnl_get_effective_cpu_isa())
        self.engine = self.created("engine_create", capi.CPU, 0)
        self.stream = self.created("stream_create", self.engine, 1)

    def call(self, name: str, *args: Any, where: str = "") -> None:
        """Calls `dnnl_<name>`.

        Raises:
            OpGraphError: the subclass for its status.
        """
        capi.checked(getattr(self._dll, f"dnnl_{name}")(*args), f"dnnl_{name}", where or "-")

    def computes(self, dtype: str) -> bool:
        """True if it computes in a dtype on this processor. If not, it ends the process when it compiles."""
        return bool(self._isa & capi.ISA_OF[dtype]) if dtype in capi.ISA_OF else True

    def created(self, name: str, *args: Any) -> ctypes.c_void_p:
        """The handle that `dnnl_<name>` creates."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *args)
        return handle

    def set_threads(self, count: int) -> None:
        """Sets the threads of later parallel regions of the calling thread: omp_set_num_threads."""
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(count)

    def build(self, graph: Graph, policy: str = "fusion") -> RealGraph:
        """The same graph in the library, cut into partitions.

        Args:
            graph: finalized by this call if need be; every kind is oneDNN's, every shape known, engine "cpu".
            policy: "fusion" or "debug".

        Raises:
            Unimplemented: a kind, dtype or attribute that this version of the library does not have.
            OpGraphError: an error of the library, as the class of the same name.
        """
        return RealGraph(self, graph.finalize(), policy)


@cache
def load() -> Library:
    """The library of the wheel `onednn-cpu-gomp`.

    Raises:
        DeviceError: it is not installed, or does not load on this machine.
    """
    try:
        files = importlib.metadata.distribution(_WHEEL).files or ()
    except importlib.metadata.PackageNotFoundError:
        raise DeviceError("oneDNN's library is not installed", where=_WHEEL, fix=_FIX) from None
    found = [Path(os.path.normpath(str(f.locate()))) for f in files if f.name == "libdnnl.so.3"]
    if not found or not found[0].is_file():
        raise DeviceError("the wheel has no libdnnl.so.3", where=_WHEEL, fix=_FIX)
    return Library(found[0])
