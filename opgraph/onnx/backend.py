"""onnx's backend interface (`onnx.backend.base`): prepares and runs a model or a node, and lists each op's engine.

    import opgraph.onnx.backend as backend
    rep = backend.prepare(model, device="CPU")
    outputs = rep.run([x, y])
    rep.engines                        # {"opgraph": ["Sigmoid \"s\"", ...], "onnxruntime": [...]}

Pointwise ops run natively, in generated kernels. All other ops run in onnxruntime. Regions that it refuses (bf16, ops
newer than it) run in onnx's own evaluator. Anything that neither accepts, or that opgraph cannot represent, raises an
error with its name when the model is prepared, or when it is run if only the arrays show the problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto, helper
from onnx.backend.base import Backend, BackendRep

from opgraph.errors import DeviceError, InvalidArguments, OpGraphError
from opgraph.onnx.load import load
from opgraph.onnx.origin import ModelLike
from opgraph.onnx.source import Source
from opgraph.runtime.compile_graph import compile as compiled
from opgraph.runtime.engine import Engine, engine_of
from opgraph.runtime.executable import Executable

__all__ = ["OpGraphBackend", "Prepared", "is_compatible", "prepare", "run_model", "run_node", "supports_device"]

#: The ir_version and opset of a model around a single node; stock runtimes read these.
_NODE_IR_VERSION, _NODE_OPSET = 10, 26


class Prepared(BackendRep):
    """A compiled model.

    Attributes:
        executable: the compiled graph.
        inputs, outputs: the names of its inputs and outputs, in order.
    """

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        self.inputs = tuple(t.name or str(t.id) for t in executable.graph.inputs)
        source = executable.graph.source
        assert isinstance(source, Source)
        self.outputs = tuple(value.name for value in source.origin.skeleton.graph.output)  # one may be listed twice

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Runs the model.

        Args:
            inputs: arrays in the order of the model's inputs (fewer, where the last ones have defaults), a dict of
                them by name, or one array. Sequences are lists, an absent optional is None, text is an array of
                objects.
            kwargs: must be empty.

        Returns: one value for each output of the model, in order.

        Raises:
            InvalidArguments, InvalidDataType, InvalidShape: the inputs do not match the declarations.
            DeviceError: a region failed; the message comes from the runtime.
        """
        if kwargs:
            raise InvalidArguments(
                f"unknown option {next(iter(kwargs))!r}", where="BackendRep.run", fix="give the inputs alone"
            )
        feeds = self._by_name(inputs)
        if self.executable.engine.kind == "cuda":
            return self._on_gpu(feeds)
        return self._in_order(self.executable(feeds))

    def _on_gpu(self, feeds: dict[str, Any]) -> tuple[Any, ...]:
        from opgraph.runtime import cuda  # needs CuPy

        index = self.executable.engine.index
        with cuda.OnDevice(index):
            there = {name: cuda.CUPY.from_host(np.asarray(value), index) for name, value in feeds.items()}
            return tuple(cuda.CUPY.to_host(value) for value in self._in_order(self.executable(there)))

    def _in_order(self, results: Any) -> tuple[Any, ...]:
        """One value for each output of the model. A graph with one output returns the bare value, no dict."""
        if len(set(self.outputs)) == 1:
            return (results,) * len(self.outputs)
        return tuple(results[name] for name in self.outputs)

    def _by_name(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            return {name: _array(value) for name, value in inputs.items()}
        given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        if len(given) > len(self.inputs):
            raise InvalidArguments(
                f"got {len(given)} inputs, the model has {len(self.inputs)}",
                where="BackendRep.run",
                fix=f"give {', '.join(self.inputs) or 'none'}",
            )
        return {name: _array(value) for name, value in zip(self.inputs, given, strict=False)}

    @property
    def engines(self) -> dict[str, list[str]]:
        """Maps the name of each engine to the ops that it runs, in order.

        "opgraph" means generated kernels, "onnx" means onnx's evaluator in NumPy; the third name is "onnxruntime".
        onnxruntime may refuse a region only when it runs, so the result is final after the first run.
        """
        found: dict[str, list[str]] = {}
        for partition, engine in zip(self.executable.partitions, self.executable.engines, strict=True):
            found.setdefault(engine, []).extend(op.label for op in partition.ops)
        return found


def _array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, np.generic) else value


class OpGraphBackend(Backend):
    """The backend class for onnx's test runner: `onnx.backend.test.BackendTest(OpGraphBackend, __name__)`."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """True if models can be prepared for the device ("CPU", "CUDA" or "CUDA:n") on this machine."""
        try:
            _engine(device)
        except OpGraphError:
            return False
        return True

    @classmethod
    def is_compatible(cls, model: ModelLike, device: str = "CPU", **kwargs: Any) -> bool:
        """True if the model can be read and compiled. Nothing is run."""
        try:
            cls.prepare(model, device, **kwargs)
        except OpGraphError:
            return False
        return True

    @classmethod
    def prepare(cls, model: ModelLike, device: str = "CPU", **kwargs: Any) -> Prepared:
        """Compiles a model for a device.

        Args:
            model: a ModelProto, a path or an onnx_ir.Model.
            device: "CPU", "CUDA" or "CUDA:n".
            kwargs: ignored, as onnx's test runner passes its tolerances here.

        Raises:
            ModelError: the model is malformed.
            Unimplemented: it contains something that opgraph cannot represent.
            DeviceError: no engine runs one of its nodes, or the device does not exist.
        """
        # ONNX defines the result of each op in the op's own dtype.
        return Prepared(compiled(load(model), device=_engine(device), rounding="each"))

    @classmethod
    def run_model(cls, model: ModelLike, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Prepares a model and runs it once; see `prepare` and `Prepared.run`."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Runs one node of ai.onnx.

        Args:
            node: its inputs are fed in order, except those that it leaves out ("").
            inputs: arrays, one for each distinct name among them.
            device: "CPU", "CUDA" or "CUDA:n".
            outputs_info: dtype and shape of each output, where onnx cannot infer them.
            kwargs: `opset_version`, the opset of the node. Default: the newest that onnx has, at most 26.

        Raises:
            as `prepare` and `Prepared.run`.
        """
        arrays = [_array(v) for v in (inputs if isinstance(inputs, (list, tuple)) else [inputs])]
        opset = int(kwargs.get("opset_version", min(_NODE_OPSET, onnx.defs.onnx_opset_version())))
        return cls.run_model(_node_model(node, arrays, outputs_info, opset), arrays, device)


def _node_model(node: NodeProto, arrays: Sequence[Any], outputs_info: Any, opset: int) -> ModelProto:
    names = list(dict.fromkeys(name for name in node.input if name))
    if len(names) != len(arrays):
        raise InvalidArguments(
            f"got {len(arrays)} inputs, the node reads {len(names)}",
            where=f'{node.op_type} "{node.name}"',
            fix=f"give {', '.join(names) or 'none'}",
        )
    made = [name for name in node.output if name]
    outputs = [ValueInfoProto(name=name) for name in made]
    if outputs_info is not None:
        outputs = [_info(name, np.dtype(dtype), shape) for name, (dtype, shape) in zip(made, outputs_info, strict=True)]
    ins = [_info(name, np.asarray(a).dtype, np.shape(a)) for name, a in zip(names, arrays, strict=True)]
    graph = helper.make_graph([node], "node", ins, outputs)
    imports = [helper.make_opsetid(node.domain, opset if not node.domain else 1)]
    if node.domain:
        imports.append(helper.make_opsetid("", opset))
    model = helper.make_model(graph, opset_imports=imports, ir_version=_NODE_IR_VERSION)
    return model if outputs_info is not None else onnx.shape_inference.infer_shapes(model)


def _info(name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), list(shape))


def _engine(device: str) -> Engine:
    """Returns the engine for onnx's name of a device.

    Raises:
        DeviceError: there is no such device.
    """
    if device.partition(":")[0] not in ("CPU", "CUDA"):
        raise DeviceError(f"there is no device {device!r}", where="opgraph.onnx.backend", fix="use CPU, CUDA or CUDA:n")
    return engine_of(device.lower())


prepare = OpGraphBackend.prepare
run_model = OpGraphBackend.run_model
run_node = OpGraphBackend.run_node
supports_device = OpGraphBackend.supports_device
is_compatible = OpGraphBackend.is_compatible
