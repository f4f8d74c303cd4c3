"""FusedOp: a graph as a differentiable function of torch tensors, under everything that torch may do with one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.autograd import forward_ad

from opgraph.errors import InvalidArguments
from opgraph.ir.graph import Graph
from opgraph.ir.parse import parse
from opgraph.runtime.bounded import Bounded
from opgraph.torch.fold import is_in_onnx_export
from opgraph.torch.fused.autograd import Trained, record
from opgraph.torch.fused.composite import composite
from opgraph.torch.fused.graph import prepared, with_data, without_data
from opgraph.torch.fused.library import Spelling, call, spelling
from opgraph.torch.fused.program import Program, Run, check_count
from opgraph.torch.fused.shapes import Results
from opgraph.torch.fused.training import Flags, Training
from opgraph.transforms.saved import Saved

#: Combinations of dtypes, shapes and strides remembered for one op.
MAX_CALLS = 1024
#: Where there are kernels; elsewhere torch may still ask for shapes.
DEVICES = ("cpu", "cuda")

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state
_grad_enabled = torch.is_grad_enabled
_dynamo = torch.compiler.is_dynamo_compiling


class _Call:
    """What tensors of one combination of dtypes, shapes, strides and gradients needed take, once somebody asked."""

    __slots__ = ("run", "trained")

    def __init__(self) -> None:
        self.run: Run | None = None
        self.trained: Trained | None = None


class FusedOp:
    """A graph as a function of torch tensors, differentiable with respect to every float input, any number of times.

    Args:
        graph: finalized by this call if need be.
        rounding: as `opgraph.compile` takes it.
        traced: whether torch.compile will meet it, which wants everything at hand.

    Call it with one tensor for each input of the graph, in order, all on one device; it returns a tuple with one new
    tensor for each output. Results have the strides of the first input of their shape. Nothing is kept for backward but
    what `saved` lists, in torch's own keeping (`save_for_backward`).
    """

    def __init__(self, graph: Graph, *, rounding: str = "store", traced: bool = True) -> None:
        self.graph = prepared(graph)
        self.rounding = rounding
        self._calls: Bounded[Any, _Call] = Bounded(MAX_CALLS)
        self._programs: dict[tuple[int, torch.device], Program] = {}
        self._trainings: dict[Flags, Training] = {}
        self._derivations: dict[Any, Any] = {}
        self._lock = threading.RLock()
        self._spelled = self.spelling if traced else None

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results.

        Raises:
            InvalidArguments, InvalidDataType, InvalidShape: tensors that are not what the graph declares.
            Unimplemented: a gradient is needed that no op has.
            DeviceError: a kernel that does not compile.
        """
        if _dynamo():
            return self._compiled(tensors)
        parts: list[Any] = []
        needs = False
        for tensor in tensors:
            kind = type(tensor)
            if (kind is not _Tensor and kind is not _Parameter) or tensor.is_neg():
                return self.dispatched(*tensors)
            if needs_one := tensor.requires_grad:
                needs = True
            try:
                parts += (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_cpu or tensor.device, needs_one)
            except RuntimeError as error:  # a nested tensor
                raise _not_strided(error) from None
        if _modes() or _transforms() or forward_ad._current_level >= 0 or _tracing() is not None:
            return self.dispatched(*tensors)
        key = tuple(parts)
        found = self._calls.get(key)
        if found is None:
            if not all(t.device.type in DEVICES for t in tensors):
                return self.dispatched(*tensors)
            found = self._remember(key)
        if needs and _grad_enabled():
            trained = found.trained
            if trained is None:
                trained = found.trained = self._trained(tensors)
            results = record(trained, *tensors)
            return (results,) if trained.single else results[: trained.count]
        run = found.run
        if run is None:
            run = found.run = self._program(self.graph, tensors).plan(tensors)
        return tuple(run(tensors))

    def saved(self, needs: Flags) -> tuple[Saved, ...]:
        """What a call keeps for backward.

        Args:
            needs: for each input, whether it requires a gradient.
        """
        return self.training(tuple(needs)).saved

    def training(self, needs: Flags) -> Training:
        """What gradients with respect to these inputs take; see `saved`."""
        with self._lock:
            found = self._trainings.get(needs)
            if found is None:
                units = self.rounding == "store"
                found = self._trainings[needs] = Training(self.graph, needs, self.derived, units=units)
            return found

    def cached(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for this op."""
        with self._lock:
            if key not in self._derivations:
                self._derivations[key] = make()
            return self._derivations[key]

    def derived(self, graph: Graph) -> FusedOp:
        """The op of a graph derived from this one's, made once."""
        # The graph stays with its op: its id would otherwise soon be another one's.
        made = self.cached(id(graph), lambda: (FusedOp(graph, rounding=self.rounding, traced=False), graph))
        return cast(FusedOp, made[0])

    @property
    def spelling(self) -> Spelling:
        """How torch's dispatcher knows it; see opgraph/torch/fused/library.py."""
        found: Spelling = self.cached("spelling", lambda: spelling(self.graph, self.rounding))
        return found

    @property
    def results(self) -> Results:
        """What its results look like."""
        found: Results = self.cached("results", lambda: Results(self.graph))
        return found

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results for plain tensors, without autograd."""
        key = tuple([part for t in tensors for part in (t.dtype, t.shape, t.stride(), t.is_cpu or t.device, None)])
        found = self._calls.get(key) or self._remember(key)
        if found.run is None:
            found.run = self._program(self.graph, tensors).plan(tensors)
        return found.run(tensors)

    def _trained(self, tensors: Sequence[torch.Tensor]) -> Trained:
        training = self.training(tuple([t.requires_grad for t in tensors]))
        run = self._program(training.forward, tensors).plan(tensors)
        return Trained(training, run, len(self.graph.outputs))

    def _program(self, graph: Graph, tensors: Sequence[torch.Tensor]) -> Program:
        if not tensors:
            raise InvalidArguments("got no tensors", where="a fused call", fix="pass one for each input")
        key = (id(graph), tensors[0].device)
        with self._lock:
            found = self._programs.get(key)
            if found is None:
                found = self._programs[key] = Program(graph, tensors[0].device, self.rounding)
            return found

    def _remember(self, key: Any) -> _Call:
        made = self._calls[key] = _Call()
        return made

    def dispatched(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A call on anything but plain tensors, or under anything but plain autograd."""
        for position, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArguments(
                    f"got {type(tensor).__name__} where a tensor is expected",
                    where=f"argument {position} of a fused call",
                    fix="pass torch tensors",
                )
        check_count(self.graph, tensors)
        if is_in_onnx_export() or _tracing() is not None:
            return tuple(composite(self.graph, tensors, self.rounding))
        return call(self.spelling, tensors)

    def _compiled(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A call in a program that torch.compile traces, which follows every line of this."""
        assert self._spelled is not None
        results = self._spelled(tensors)
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)

    def __deepcopy__(self, memo: Any) -> FusedOp:
        return self  # as far as anybody can tell, it does not change

    def __reduce__(self) -> Any:
        graph, arrays = without_data(self.graph)
        return _unpickled, (str(graph), arrays, self.rounding)

    def __repr__(self) -> str:
        return f"<FusedOp: {self.graph!r}>"


def _unpickled(text: str, arrays: list[np.ndarray], rounding: str) -> FusedOp:
    return FusedOp(with_data(parse(text), arrays), rounding=rounding)


def _not_strided(error: RuntimeError) -> InvalidArguments:
    return InvalidArguments(
        f"got a tensor without strides: {error}", where="a fused call", fix="pass plain tensors: x.to_dense()"
    )
