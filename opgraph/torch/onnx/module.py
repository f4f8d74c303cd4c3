"""An ONNX model as a torch module."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opgraph.errors import InvalidArguments, Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.onnx.load import load
from opgraph.onnx.open_model import taken_apart
from opgraph.onnx.origin import ModelLike, Origin
from opgraph.onnx.source import Source
from opgraph.onnx.weights import save_with_weights
from opgraph.runtime.graph_arguments import check_shape
from opgraph.runtime.providers.torch import from_numpy, known_dtype, to_numpy
from opgraph.runtime.providers.torch_onnx.nodes import form_for, given_inputs
from opgraph.torch.onnx.steps import Step, steps_of


@dataclass(frozen=True, slots=True)
class _Plan:
    """Constant data that a module shares with its copies.

    Attributes:
        weights: the ids of the constants that are trained.
        host: the constants that are read as Python numbers.
    """

    graph: Graph
    origin: Origin
    weights: Collection[int]
    steps: list[Step]
    host: Mapping[int, torch.Tensor]

    def __deepcopy__(self, memo: object) -> _Plan:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _plan, (self.graph, self.origin, self.weights, self.host)  # calls cannot be pickled


def _plan(graph: Graph, origin: Origin, weights: Collection[int], host: Mapping[int, torch.Tensor]) -> _Plan:
    return _Plan(graph, origin, weights, steps_of(graph, weights), host)


class OnnxModule(torch.nn.Module):
    """An ONNX model that runs in torch, with gradients. Made by `from_onnx`.

    Call it with the model's inputs, in order or by name; it returns the output, or a tuple of them in order. Inputs
    with a default in the model may be left out; the defaults are parameters or buffers, like other initializers.

    Attributes:
        onnx_names: key of the state_dict -> name of the initializer. They differ only where torch rejects the name.
        input_names, output_names: as in the model.
    """

    def __init__(self, model: ModelLike, trainable: Trainable) -> None:
        super().__init__()
        graph = load(model)
        source = graph.source
        assert isinstance(source, Source)
        # Read again: loading unfolds functions, and the saved model must be as it was.
        origin = taken_apart(model)
        origin.map_files()  # later the files may be replaced, by a save over the model itself
        weights = trained(graph, trainable)
        self.onnx_names: dict[str, str] = {}
        self.input_names = [t.name or str(t.id) for t in graph.inputs]
        self.output_names = [source.value_of[t.id] for t in graph.outputs]
        self._slots: list[tuple[int, torch.nn.Module, str]] = []
        host: dict[int, torch.Tensor] = {}
        self._plan = _plan(graph, origin, weights, host)
        steps = self._plan.steps
        used = {i for step in steps for i in step.reads} | {t.id for t in graph.outputs}
        steering = {i for step in steps for i, n in zip(step.reads, step.numbers) if n or step.on_host}
        for constant in graph.constants:
            if constant.id in used:
                assert constant.data is not None
                value = _own(constant, constant.data)
                self._enter(constant, value, source, constant.id in weights)
                if constant.id in steering:
                    host[constant.id] = value.detach().clone()
        for tensor in graph.inputs:
            if tensor.name in graph.defaults and tensor.id in used:
                self._enter(tensor, _own(tensor, graph.defaults[tensor.name]), source, tensor.id in weights)

    def _enter(self, constant: LogicalTensor, value: torch.Tensor, source: Source, is_weight: bool) -> None:
        name = source.value_of.get(constant.id, f"constant_{constant.id}")
        stored = name in source.origin.tensors
        owner, leaf, key = self._place(name)
        if is_weight:
            owner.register_parameter(leaf, torch.nn.Parameter(value))
        else:
            owner.register_buffer(leaf, value, persistent=stored)
        if stored:
            self.onnx_names[key] = name
        self._slots.append((constant.id, owner, leaf))

    def _place(self, name: str) -> tuple[torch.nn.Module, str, str]:
        """The owner, leaf and key for a name with dots; makes the modules on its path, as the exporter had them."""
        *path, leaf = name.split(".")
        owner: torch.nn.Module = self
        key = []
        for part in path:
            word = part or "_"
            while not isinstance(found := owner._modules.get(word), torch.nn.Module) and hasattr(owner, word):
                word += "_"
            if found is None:
                found = torch.nn.Module()
                owner.add_module(word, found)
            owner = found
            key.append(word)
        word = leaf or "_"
        while hasattr(owner, word):
            word += "_"
        return owner, word, ".".join([*key, word])

    @property
    def graph(self) -> Graph:
        """The graph as `opgraph.onnx.load` reads it."""
        return self._plan.graph

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """Runs the model.

        In training mode, BatchNormalization uses the statistics of the batch and updates the stored ones, and Dropout
        drops, as in torch; in eval mode both follow the file.

        Raises:
            InvalidArguments: an input is missing, or one too many.
            InvalidShape: an input does not have the declared number of axes, or sizes.
        """
        plan = self._plan
        given = self._bound(inputs, named)
        stored = {i: getattr(owner, leaf) for i, owner, leaf in self._slots}
        device = next((v.device for v in (*given.values(), *stored.values())), torch.device("cpu"))
        values: dict[int, torch.Tensor] = {**stored, **given}
        for step in plan.steps:
            read = [self._operand(step, place, values, device) for place in range(len(step.reads))]
            values.update(
                zip(step.makes, step.run(read, torch.device("cpu") if step.on_host else device, self.training))
            )
            for i in step.frees:
                del values[i]
        made = tuple(values[t.id].to(device) for t in plan.graph.outputs)
        return made[0] if len(made) == 1 else made

    def _operand(self, step: Step, place: int, values: Mapping[int, torch.Tensor], device: torch.device) -> Any:
        key = step.reads[place]
        value = values[key]
        if step.numbers[place] or step.on_host:
            # A constant on a GPU is read from its host copy: a read from the GPU would wait for all earlier work.
            near = self._plan.host.get(key, value) if value.device.type != "cpu" else value
            return near.tolist() if step.numbers[place] else near
        return value.to(device)

    def _bound(self, inputs: tuple[torch.Tensor, ...], named: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The given inputs by id; only those with a default may be missing."""
        names = self.input_names
        given = dict(zip(names, inputs))
        twice = [n for n in named if n in given or n not in names]
        missing = [n for n in names if n not in given and n not in named and n not in self._plan.graph.defaults]
        if len(inputs) > len(names) or twice or missing:
            raise InvalidArguments(
                f"{len(inputs)} inputs by position and {list(named)} by name"
                + (f"; {', '.join(missing)} is missing" if missing else ""),
                where="a module from ONNX",
                fix=f"give {', '.join(names)}, in this order or by name",
            )
        given.update(named)
        tensors = {name: t for t, name in zip(self._plan.graph.inputs, names) if name in given}
        for name, tensor in tensors.items():
            check_shape(tuple(given[name].shape), tensor.dims, f'input "{name}" of a module from ONNX')
        return {tensor.id: given[name] for name, tensor in tensors.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model with its current weights and statistics; everything else stays as it was in the file.

        Nodes, names, functions, metadata, opset imports and symbolic dimensions are those of the source, and tensors
        from a data file are written to a data file again.

        Args:
            path: the file; it may be the one that the model came from.

        Raises:
            ModelError: it cannot be written. Then nothing has changed on the disk.
            InvalidArguments: a weight no longer has its shape.
        """
        plan = self._plan
        state = self.state_dict(keep_vars=True)
        changed = {}
        for key, name in self.onnx_names.items():
            old = plan.origin.array(name)
            new = _array(state[key], old)
            if new.shape != old.shape or new.tobytes() != old.tobytes():
                changed[name] = new
        save_with_weights(plan.origin, changed, path)

    def extra_repr(self) -> str:
        """The inputs and outputs, and the number of trainable initializers."""
        weights = sum(1 for _ in self.parameters())
        return (
            f"{', '.join(self.input_names)} -> {', '.join(self.output_names)}; {weights} of "
            f"{len(self.onnx_names)} initializers are parameters"
        )


def _own(tensor: LogicalTensor, data: np.ndarray) -> torch.Tensor:
    if known_dtype(tensor.dtype) is None:
        raise Unimplemented(
            f"from_onnx: torch has no dtype for {tensor.type_text}", where=tensor.label, fix="convert the model"
        )
    return from_numpy(np.array(data))  # a copy: the file's pages are read-only


def _array(tensor: torch.Tensor, old: np.ndarray) -> np.ndarray:
    wanted = from_numpy(np.empty(0, old.dtype)).dtype
    return to_numpy(tensor.detach().to("cpu", wanted).contiguous())


#: Names, or a function of a name that returns True if it is trained.
Trainable = Collection[str] | Callable[[str], bool] | None


def trained(graph: Graph, trainable: Trainable = None) -> set[int]:
    """The ids of the initializers to train, also of those that are defaults of inputs.

    By default these are the float ones in the weight position of a layer (`TorchForm.weights`), those multiplied as
    matrices, and those with at least one axis that are an operand of a pointwise op next to a value that depends on a
    float input or on another weight. So scales, slopes and biases are found, while epsilons, masks and tables of
    frequencies are not.

    Raises:
        InvalidArguments: a name that is no float initializer of the model.
    """
    source = graph.source
    assert isinstance(source, Source)
    names = source.value_of
    stored = [t for t in (*graph.constants, *graph.inputs) if names.get(t.id) in source.origin.tensors]
    possible = {t.id for t in stored if t.dtype in dtypes.FLOATS}
    if trainable is not None:
        return _chosen(possible, names, trainable)
    found: set[int] = set()
    flowing = {t.id for t in graph.inputs if t.dtype in dtypes.FLOATS and t.name not in graph.defaults}
    for op in graph.ops:
        found |= _weights(op, possible, flowing)
        if any(t.id in flowing or t.id in found for t in op.inputs):
            flowing |= {t.id for t in op.outputs if t.dtype in (*dtypes.FLOATS, dtypes.UNDEF)}
    return found


def _weights(op: Op, possible: Collection[int], flowing: Collection[int]) -> set[int]:
    record = opdef.find(op.kind)
    form = form_for(op) if op.kind == "Wildcard" else None
    if form is not None:
        places = given_inputs(op)
        wanted = [places[i] for i in form.weights if i < len(places)]
        ids = {op.inputs[i].id for i in wanted if i is not None}
    elif record is not None and record.family == "linear":
        ids = {t.id for t in op.inputs}
    elif record is not None and record.is_pointwise and any(t.id in flowing for t in op.inputs):
        ids = {t.id for t in op.inputs if t.ndim}
    else:
        ids = set()
    return ids & set(possible) if ids else ids


def _chosen(possible: Collection[int], names: dict[int, str], trainable: Trainable) -> set[int]:
    if callable(trainable):
        return {i for i in possible if trainable(names[i])}
    wanted = {trainable} if isinstance(trainable, str) else set(trainable or ())
    unknown = sorted(wanted - {names[i] for i in possible})
    if unknown:
        raise InvalidArguments(
            f"{unknown[0]!r} is no float initializer that the model uses",
            where="from_onnx, trainable",
            fix="name initializers of the model; `module.onnx_names` lists them",
        )
    return {i for i in possible if names[i] in wanted}
