"""A graph of opgraph in oneDNN's own library: its partitions there, their compilation, and runs on NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from opgraph.errors import InvalidArguments, InvalidGraph, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import port_name
from opgraph.onednn import capi
from opgraph.onednn.c_values import c_op, c_tensor
from opgraph.onednn.capi import CLogicalTensor
from opgraph.runtime.graph_arguments import Ports

if TYPE_CHECKING:
    from opgraph.onednn.library import Library


@dataclass(frozen=True, slots=True)
class RealPartition:
    """A partition as oneDNN's library created it.

    Attributes:
        ops: op ids, in its order.
        inputs, outputs: tensor ids; an input is listed once for each use.
        inplace: pairs (input id, output id) that may share memory in its kernel; empty if not compiled.
    """

    ops: tuple[int, ...]
    supported: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    inplace: tuple[tuple[int, int], ...] = ()


class RealGraph:
    """A graph in the library. Its partitions are compiled when they first run."""

    def __init__(self, library: Library, graph: Graph, policy: str) -> None:
        self._library = library
        self.graph = graph
        self._handles: list[tuple[str, ctypes.c_void_p]] = []
        self._compiled: list[ctypes.c_void_p] = []
        self._ins, self._outs = Ports(graph.inputs, "input"), Ports(graph.outputs, "output")
        self._tensors = {t.id: t for op in graph.ops for t in (*op.inputs, *op.outputs)}
        try:
            self._parts = self._partitioned(policy)
        except BaseException:
            self.close()
            raise
        self.partitions = tuple(found for _, found in self._parts)

    def _own(self, kind: str, handle: ctypes.c_void_p) -> ctypes.c_void_p:
        self._handles.append((kind, handle))
        return handle

    def _partitioned(self, policy: str) -> list[tuple[ctypes.c_void_p, RealPartition]]:
        lib = self._library
        real = self._own("graph_graph", lib.created("graph_graph_create", capi.CPU))
        for op in self.graph.ops:
            lib.call("graph_add_op", real, self._own("graph_op", c_op(lib, op)), where=op.where)
        lib.call("graph_graph_finalize", real)
        lib.call("graph_graph_filter", real, capi.POLICY[policy])
        count = ctypes.c_size_t()
        lib.call("graph_graph_get_partition_num", real, ctypes.byref(count))
        handles = (ctypes.c_void_p * count.value)()
        lib.call("graph_graph_get_partitions", real, count, handles)
        return [self._described(self._own("graph_partition", ctypes.c_void_p(h))) for h in handles]

    def _described(self, part: ctypes.c_void_p) -> tuple[ctypes.c_void_p, RealPartition]:
        lib = self._library
        count = ctypes.c_size_t()
        lib.call("graph_partition_get_op_num", part, ctypes.byref(count))
        ids = (ctypes.c_size_t * count.value)()
        lib.call("graph_partition_get_ops", part, count, ids)
        supported = ctypes.c_uint8()
        lib.call("graph_partition_is_supported", part, ctypes.byref(supported))
        ports = []
        for side in ("input", "output"):
            lib.call(f"graph_partition_get_{side}_ports_num", part, ctypes.byref(count))
            found = (CLogicalTensor * count.value)()
            lib.call(f"graph_partition_get_{side}_ports", part, count, found)
            ports.append(tuple(t.id for t in found))
        return part, RealPartition(tuple(ids), bool(supported.value), *ports)

    # -- running ------------------------------------------------------------------------------------------------

    def compile(self) -> tuple[RealPartition, ...]:
        """Compiles every partition, once; returns them with their in-place pairs.

        Raises:
            InvalidGraph: the graph was closed.
            Unimplemented, InvalidArguments ...: the library's error for a partition that it does not support.
            Unimplemented: a dtype in which it does not compute on this processor.
        """
        if not self._handles:
            raise InvalidGraph("the graph was closed", where="compile", fix="build it again")
        if not self._compiled:
            for op in (op for op in self.graph.ops if op.kind != "TypeCast"):  # TypeCast works on every processor
                for dtype in {t.dtype for t in (*op.inputs, *op.outputs)}:
                    if not self._library.computes(dtype):
                        raise Unimplemented(
                            f"oneDNN does not compute in {dtype} on this processor", where=op.where,
                            fix="use f32, or a processor with AVX-512",
                        )  # fmt: skip
            made = [self._compile(part, found) for part, found in self._parts]
            self._compiled = [handle for handle, _ in made]
            self.partitions = tuple(found for _, found in made)
        return self.partitions

    def _compile(self, part: ctypes.c_void_p, found: RealPartition) -> tuple[ctypes.c_void_p, RealPartition]:
        lib = self._library
        where = ", ".join(op.label for op in self.graph.ops if op.id in found.ops)
        compiled = self._own("graph_compiled_partition", lib.created("graph_compiled_partition_create", part))
        ins, outs = self._pointers(found.inputs), self._pointers(found.outputs)
        lib.call("graph_partition_compile", part, compiled, len(ins), ins, len(outs), outs, lib.engine, where=where)
        count, pairs = ctypes.c_size_t(), ctypes.POINTER(capi.InplacePair)()
        lib.call("graph_compiled_partition_get_inplace_ports", compiled, ctypes.byref(count), ctypes.byref(pairs))
        inplace = tuple((pairs[i].input_id, pairs[i].output_id) for i in range(count.value))
        return compiled, replace(found, inplace=inplace)

    def _pointers(self, ids: Sequence[int]) -> Any:
        pointers = [ctypes.pointer(c_tensor(self._tensors[i])) for i in ids]
        return (ctypes.POINTER(CLogicalTensor) * len(ids))(*pointers)

    def __call__(self, feeds: Mapping[Any, Any]) -> dict[str, np.ndarray]:
        """The outputs by name, for NumPy inputs by name or tensor id; both dense and row-major."""
        outs = {port_name(t): np.empty(t.shape, dtypes.get(t.dtype).numpy) for t in self.graph.outputs}
        self.bind(feeds, outs)()
        return outs

    def bind(self, feeds: Mapping[Any, Any], outs: Mapping[Any, Any]) -> Callable[[], None]:
        """Compiles, checks, and returns a function that runs all partitions on these arrays, one after the other.

        Raises:
            InvalidArguments, InvalidDataType, InvalidShape: arrays that do not fit, or are not row-major.
            OpGraphError: the library's error for a partition that it cannot compile.
        """
        self.compile()
        arrays = dict(zip((t.id for t in self.graph.inputs), self._ins.bind(feeds, {}), strict=True))
        arrays.update(zip((t.id for t in self.graph.outputs), self._outs.bind(outs, {}), strict=True))
        for id, array in arrays.items():
            strides = tuple(s // array.itemsize for s in array.strides)
            if array.size and strides != self._tensors[id].get_strides():
                raise InvalidArguments("the array is not laid out as declared", where=f"tensor {id}", fix="copy it")
        runs = [self._bound(c, found, arrays) for c, found in zip(self._compiled, self.partitions, strict=True)]

        def call(graph: RealGraph = self) -> None:  # keeps the handles alive
            if not graph._handles:
                raise InvalidGraph("the graph was closed", where="a bound call", fix="build it again")
            for run in runs:
                run()

        return call

    def _bound(self, compiled: ctypes.c_void_p, found: RealPartition, arrays: dict[int, Any]) -> Callable[[], None]:
        lib = self._library
        sides = []
        for ids in (found.inputs, found.outputs):
            for id in ids:
                tensor = self._tensors[id]
                data = np.ascontiguousarray(tensor.data) if tensor.data is not None else None
                made = data if data is not None else np.empty(tensor.shape, dtypes.get(tensor.dtype).numpy)
                arrays.setdefault(id, made)
            sides.append((ctypes.c_void_p * len(ids))(*[self._tensor(i, arrays[i]).value for i in ids]))
        ins, outs = sides
        args = (compiled, lib.stream, len(ins), ins, len(outs), outs)

        def run(keep: Any = arrays) -> None:  # keeps the arrays alive: the tensors hold only addresses
            lib.call("graph_compiled_partition_execute", *args)

        return run

    def _tensor(self, id: int, array: np.ndarray) -> ctypes.c_void_p:
        address = array.__array_interface__["data"][0]
        made = self._library.created("graph_tensor_create", c_tensor(self._tensors[id]), self._library.engine, address)
        return self._own("graph_tensor", made)

    def close(self) -> None:
        """Destroys all handles of the library, newest first."""
        while self._handles:
            kind, handle = self._handles.pop()
            self._library.call(f"{kind}_destroy", handle)
        self._compiled = []

    def __enter__(self) -> RealGraph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
