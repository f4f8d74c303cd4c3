"""FusedOp: a graph as a differentiable function of torch tensors, under all of torch's modes and transforms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from opgraph.errors import InvalidArguments
from opgraph.ir.graph import Graph
from opgraph.ir.parse import parse
from opgraph.runtime.bounded_dict import Bounded
from opgraph.runtime.providers.torch_internals import has_storage, is_zero_tensor, tracing_state, transforms_active
from opgraph.runtime.providers.torch_prepared import Run, Statements, is_plain, tensor_names
from opgraph.torch.export_folding import is_in_onnx_export
from opgraph.torch.fused.autograd import recorder
from opgraph.torch.fused.composite import composite
from opgraph.torch.fused.graph import prepared, with_data, without_data
from opgraph.torch.fused.library import Spelling, call, spelling
from opgraph.torch.fused.program import Program, check_count
from opgraph.torch.fused.shapes import Layout, Results
from opgraph.torch.fused.training import Flags, Training
from opgraph.transforms.saved import Saved

#: The number of combinations of dtypes, shapes and strides that are cached for one op.
MAX_CALLS = 1024
#: Devices with kernels; on others torch may still request shapes.
DEVICES = ("cpu", "cuda")

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_grad_enabled = torch.is_grad_enabled
_dynamo = torch.compiler.is_dynamo_compiling


class FusedOp:
    """A graph as a function of torch tensors, differentiable with respect to every float input, any number of times.

    Args:
        graph: finalized by this call if necessary.
        rounding: as `opgraph.compile` takes it.
        traced: True if torch.compile may trace it; its form for torch's dispatcher is then made in advance.
        layout: the memory layout of torch's calls that the graph replaces; without it, that of the graph's own ops.

    Call it with one tensor for each input of the graph, in order, all on one device; it returns a tuple with one new
    tensor for each output. Results have the strides of the first input of their shape. Only the tensors that `saved`
    lists are saved for backward, by torch's own means (`save_for_backward`).
    """

    def __init__(
        self, graph: Graph, *, rounding: str = "store", traced: bool = True, layout: Layout | None = None
    ) -> None:
        self.graph = prepared(graph)
        self.rounding = rounding
        self._layout = layout
        self._calls: Bounded[Any, Run] = Bounded(MAX_CALLS)
        self._programs: dict[tuple[int, torch.device], Program] = {}
        self._trainings: dict[Flags, Training] = {}
        self._derivations: dict[Any, Any] = {}
        self._lock = threading.RLock()
        self._spelled = self.spelling if traced else None

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results.

        Raises:
            InvalidArguments, InvalidDataType, InvalidShape: the tensors do not match the inputs of the graph.
            Unimplemented: an op has no gradient, but needs one.
            DeviceError: a kernel does not compile.
        """
        if _dynamo():
            return self._compiled(tensors)
        run = self.prepared(tensors)
        if run is None:
            return self.dispatched(*tensors)
        results = run(*tensors)
        return (results,) if type(results) is _Tensor else results[: len(self.graph.outputs)]

    def prepared(self, tensors: Sequence[torch.Tensor]) -> Run | None:
        """The function that runs it on tensors of the same signature; None if torch's dispatcher is needed.

        It returns a tensor if there is one result, else a tuple, which may continue with tensors saved for backward.

        Raises:
            as a call.
        """
        parts: list[Any] = []
        needs = False
        for tensor in tensors:
            kind = type(tensor)
            if (kind is not _Tensor and kind is not _Parameter) or tensor.is_neg() or is_zero_tensor(tensor):
                return None
            if needs_one := tensor.requires_grad:
                needs = True
            try:
                parts += (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_cpu or tensor.device, needs_one)
            except RuntimeError as error:  # a nested tensor
                raise _not_strided(error) from None
        if not is_plain() or transforms_active() or tracing_state() is not None:
            return None
        records = needs and _grad_enabled()
        parts.append(records)
        key = tuple(parts)
        found = self._calls.get(key)
        if found is None:
            if not all(t.device.type in DEVICES for t in tensors):
                return None
            found = self._calls[key] = self._recorder(tensors) if records else self._plain(tensors)
        return found

    def statements(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> Statements | None:
        """The statements that run it on tensors of the same signature, with these names, without recording gradients.

        None if torch's dispatcher is needed.
        """
        for tensor in tensors:
            if type(tensor) not in (_Tensor, _Parameter) or tensor.is_neg() or is_zero_tensor(tensor):
                return None
            if tensor.device.type not in DEVICES:
                return None
            if not has_storage(tensor):  # a batch: autograd.grad's is_grads_batched
                return None
        return self._program(self.graph, tensors).statements(tensors, names)

    def saved(self, needs: Flags) -> tuple[Saved, ...]:
        """The tensors that a call saves for backward.

        Args:
            needs: for each input, True if it requires a gradient.
        """
        return self.training(tuple(needs)).saved

    def training(self, needs: Flags) -> Training:
        """The Training for gradients with respect to these inputs; see `saved`."""
        with self._lock:
            found = self._trainings.get(needs)
            if found is None:
                units = self.rounding == "store"
                found = self._trainings[needs] = Training(self.graph, needs, self.derived, units=units)
            return found

    def cached(self, key: object, make: Callable[[], Any]) -> Any:
        """The result of `make`, computed once for this op."""
        with self._lock:
            if key not in self._derivations:
                self._derivations[key] = make()
            return self._derivations[key]

    def derived(self, graph: Graph) -> FusedOp:
        """The op of a graph derived from this one's, made once."""
        # The graph is stored with its op: otherwise another graph might soon have its id.
        made = self.cached(id(graph), lambda: (FusedOp(graph, rounding=self.rounding, traced=False), graph))
        return cast(FusedOp, made[0])

    @property
    def spelling(self) -> Spelling:
        """Its form for torch's dispatcher; see opgraph/torch/fused/library.py."""
        found: Spelling = self.cached("spelling", lambda: spelling(self.graph, self.rounding))
        return found

    @property
    def results(self) -> Results:
        """The shapes, dtypes and strides of its results."""
        found: Results = self.cached("results", lambda: Results(self.graph))
        return found

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The results for plain tensors, without autograd: a tensor if there is one, else a tuple."""
        key = tuple([part for t in tensors for part in (t.dtype, t.shape, t.stride(), t.is_cpu or t.device, None)])
        found = self._calls.get(key)
        if found is None:
            found = self._calls[key] = self._plain(tensors)
        return found(*tensors)

    def _plain(self, tensors: Sequence[torch.Tensor]) -> Run:
        return self._program(self.graph, tensors).plan(tensors)

    def _recorder(self, tensors: Sequence[torch.Tensor]) -> Run:
        training = self.training(tuple([t.requires_grad for t in tensors]))
        names = tensor_names(len(tensors))
        statements = self._program(training.forward, tensors).statements(tensors, names)
        return recorder(training, statements, names, tensors)

    def _program(self, graph: Graph, tensors: Sequence[torch.Tensor]) -> Program:
        if not tensors:
            raise InvalidArguments("got no tensors", where="a fused call", fix="pass one for each input")
        device = device_of(tensors)
        key = (id(graph), device)
        with self._lock:
            found = self._programs.get(key)
            if found is None:
                found = self._programs[key] = Program(graph, device, self.rounding, self._layout)
            return found

    def dispatched(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Makes a call on tensors that are not plain, or under more than plain autograd."""
        for position, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArguments(
                    f"got {type(tensor).__name__} where a tensor is expected",
                    where=f"argument {position} of a fused call",
                    fix="pass torch tensors",
                )
        check_count(self.graph, tensors)
        if is_in_onnx_export() or tracing_state() is not None:
            return tuple(composite(self.graph, tensors, self.rounding))
        return call(self.spelling, tensors)

    def _compiled(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Makes a call in a program that torch.compile traces, including every line of this."""
        assert self._spelled is not None
        results = self._spelled(tensors)
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)

    def __deepcopy__(self, memo: Any) -> FusedOp:
        return self  # it does not change visibly

    def __reduce__(self) -> Any:
        graph, arrays = without_data(self.graph)
        return _unpickled, (str(graph), arrays, self.rounding)

    def __repr__(self) -> str:
        return f"<FusedOp: {self.graph!r}>"


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device of a call on these tensors."""
    return tensors[0].device


def _unpickled(text: str, arrays: list[np.ndarray], rounding: str) -> FusedOp:
    return FusedOp(with_data(parse(text), arrays), rounding=rounding)


def _not_strided(error: RuntimeError) -> InvalidArguments:
    return InvalidArguments(
        f"got a tensor without strides: {error}", where="a fused call", fix="pass plain tensors: x.to_dense()"
    )
