"""The same functions as ops of torch's dispatcher: under torch.compile, torch.export, torch.func and other modes.

An op's name contains its numbers of inputs and outputs: `opgraph::fused_2_1`. The text of its graph is an argument, so
that a traced program can be saved and run in another process after `opgraph.torch` is imported there (and, for more
than 8 inputs or 2 outputs, `overload` was called there).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from opgraph.ir import opdef
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.parse import parse
from opgraph.runtime.providers.torch import from_numpy
from opgraph.runtime.providers.torch_internals import (
    after_autograd,
    below_autograd,
    dispatch_modes,
    enable_single_level_autograd_function,
    forward_ad,
    tangents_enabled,
    transforms_active,
)
from opgraph.torch.fused.autograd import Trained
from opgraph.torch.fused.composite import composite
from opgraph.torch.fused.graph import without_data
from opgraph.torch.fused.program import check

if TYPE_CHECKING:
    from opgraph.torch.fused.op import FusedOp


#: The version of the arguments' meaning. An int also makes DTensor's cache of shardings distinguish the arguments
#: after it.
VERSION = 1

_NAMESPACE = "opgraph"
_open: Any = torch.library.Library  # untyped
_LIBRARY: Any = _open(_NAMESPACE, "FRAGMENT")
#: Numbers of inputs and outputs of the ops that exist from the start; other ops are defined when first called.
_USUAL = ((i, o) for o in (1, 2) for i in range(1, 9))

_dynamo = torch.compiler.is_dynamo_compiling

_lock = threading.Lock()
_defined: dict[tuple[int, int], Any] = {}
_sharded: set[Any] = set()


@lru_cache(maxsize=4096)
def op_of(graph: str, rounding: str) -> FusedOp:
    """The op of a graph's text.

    Raises:
        ModelError: the text is no graph.
    """
    from opgraph.torch.fused.op import FusedOp  # imports this module

    return FusedOp(parse(graph), rounding=rounding)


def overload(inputs: int, outputs: int) -> Any:
    """torch's op for these numbers of inputs and outputs, defined when it is first requested."""
    found = _defined.get((inputs, outputs))
    if found is None:
        with _lock:
            if (inputs, outputs) not in _defined:
                _define(inputs, outputs)
            found = _defined[inputs, outputs]
    return found


@dataclass(frozen=True)
class Spelling:
    """A graph in the form for torch's dispatcher.

    Attributes:
        overload: torch's op.
        text: the text of the graph.
        rounding: as `opgraph.compile` takes it.
        constants: the constants that the text does not hold, passed as tensors after all others.
        placed: the constants on each device that a call used.
    """

    overload: Any
    text: str
    rounding: str
    constants: tuple[torch.Tensor, ...]
    placed: dict[torch.device, tuple[torch.Tensor, ...]] = field(compare=False)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The op's results for the tensors of a call: a tensor, or a tuple. torch.compile traces every line of this."""
        constants = self.on(tensors[0].device) if self.constants else ()
        return self.overload(*tensors, *constants, VERSION, self.text, self.rounding)

    def on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The constants on a device, copied there once: a CUDA graph cannot capture a copy from the host."""
        found = self.placed.get(device)
        if found is None:
            found = tuple([c.to(device) for c in self.constants])
            if _dynamo() or not (dispatch_modes() or transforms_active()):  # their wrappers end with them
                self.placed[device] = found
        return found


def spelling(graph: Graph, rounding: str) -> Spelling:
    """Converts a graph to the form for torch's dispatcher."""
    spelled, arrays = without_data(graph)
    constants = tuple(from_numpy(a.copy()) for a in arrays)
    placed = {torch.device("cpu"): constants}
    return Spelling(overload(len(spelled.inputs), len(spelled.outputs)), str(spelled), rounding, constants, placed)


def call(spelled: Spelling, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Makes a call through torch's dispatcher, with any kind of tensors and under any modes."""
    if any(hasattr(t, "device_mesh") for t in tensors):
        _shard(spelled.overload)
    results = spelled(tensors)
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _define(inputs: int, outputs: int) -> None:
    name = f"fused_{inputs}_{outputs}"
    given = "".join(f"Tensor x{i}, " for i in range(inputs))
    made = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    _LIBRARY.define(
        f"{name}({given}int version, str graph, str rounding) -> {made}", tags=(torch.Tag.pt2_compliant_tag,)
    )
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, _run, device)
    _LIBRARY.impl(name, _differentiable, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", _fake, lib=_LIBRARY)
    torch.library.register_vmap(f"{_NAMESPACE}::{name}", _vmap, lib=_LIBRARY)
    _defined[inputs, outputs] = getattr(getattr(torch.ops, _NAMESPACE), name).default


def _given(args: tuple[Any, ...]) -> tuple[FusedOp, tuple[torch.Tensor, ...]]:
    *tensors, _, graph, rounding = args
    return op_of(graph, rounding), tuple(tensors)


def _unpacked(results: Sequence[torch.Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _run(*args: Any) -> Any:
    op, tensors = _given(args)
    return op.run(tensors)


def _fake(*args: Any) -> Any:
    """Results without data: shapes, dtypes and strides."""
    op, tensors = _given(args)
    check(op.graph, tensors)
    results = op.results
    if results.known:
        return _unpacked(results.empty(tensors))
    made = composite(op.graph, tensors, op.rounding)
    return _unpacked([torch.empty_like(t, memory_format=torch.contiguous_format) for t in made])


def _differentiable(keyset: Any, *args: Any) -> Any:
    """The op under autograd: no node if no gradient is needed, else one (autograd.py)."""
    op, tensors = _given(args)
    needs = tuple([t.requires_grad for t in tensors]) if torch.is_grad_enabled() else (False,) * len(tensors)
    if not any(needs) and forward_ad._current_level < 0:
        with below_autograd():
            return op.spelling.overload.redispatch(keyset & after_autograd, *args)
    training = op.training(needs)
    forward = op if training.forward is op.graph else op.derived(training.forward)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with below_autograd():
            return call(forward.spelling, tensors)

    def run_lower(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # A node's forward runs without recording, but the levels below this one have gradients of their own to record.
        with torch.enable_grad(), tangents_enabled(True):
            return run(*tensors)

    if not transforms_active():
        return _unpacked(Trained(training, run, len(op.graph.outputs))(*tensors))
    # Here torch.func runs one level of its transforms, in which plain autograd records.
    with enable_single_level_autograd_function():
        return _unpacked(Trained(training, run_lower, len(op.graph.outputs))(*tensors))


def _vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
    op, tensors = _given(args)
    results = batched_call(op, tensors, in_dims[: len(tensors)], info.batch_size)
    return (results[0], 0) if len(results) == 1 else (results, (0,) * len(results))


def _shard(found: Any) -> None:
    """Registers the allowed shardings of an op's tensors, once."""
    if found not in _sharded:
        from torch.distributed.tensor.experimental import register_sharding

        from opgraph.torch.fused.sharding import placements

        register: Callable[..., Any] = register_sharding(found)
        register(placements)
        _sharded.add(found)


def batched_call(
    op: FusedOp, tensors: Sequence[torch.Tensor], in_dims: Sequence[int | None], size: int
) -> tuple[torch.Tensor, ...]:
    """The results of a call for each index along a batch axis, stacked along axis 0.

    Args:
        in_dims: the batch axis of each tensor; None: the same tensor for every index.
        size: the size of the batch axis.
    """
    moved = [
        t.unsqueeze(0).expand(size, *t.shape) if at is None else t.movedim(at, 0) for t, at in zip(tensors, in_dims)
    ]
    graph = op.cached("batched", lambda: batched(op.graph))
    if graph is None:
        rows = [op(*[t[i] for t in moved]) for i in range(size)]
        if not rows:
            rows, size = [op(*[t.new_zeros(t.shape[1:]) for t in moved])], 0
        return tuple(torch.stack(parts)[:size] for parts in zip(*rows, strict=True))
    rank = graph.inputs[0].ndim or 0
    padded = [t.reshape(size, *[1] * (rank - t.ndim), *t.shape[1:]) for t in moved]
    made = op.derived(graph)(*padded)
    ranks = [t.ndim or 0 for t in op.graph.outputs]
    return tuple(r.reshape(size, *r.shape[r.ndim - n :]) for r, n in zip(made, ranks, strict=True))


def batched(graph: Graph) -> Graph | None:
    """The same function of tensors that have one more axis in front, then axes of size 1 up to a common rank.

    None if that is another function: with library ops, operands along the channel axis, or unknown ranks.
    """
    tensors = [*graph.inputs, *graph.constants, *(t for op in graph.ops for t in op.outputs)]
    if any(t.ndim is None for t in tensors) or not graph.inputs:
        return None
    rank = max(t.ndim or 0 for t in tensors)
    taken = {d for t in graph.inputs for d in t.dims or () if isinstance(d, str)}
    batch = "batch" if "batch" not in taken else f"batch{len(taken)}"
    result = Graph(graph.engine)
    values: dict[int, LogicalTensor] = {}
    for tensor in graph.inputs:
        dims = (batch, *[1] * (rank - (tensor.ndim or 0)), *(tensor.dims or ()))
        values[tensor.id] = result.input(tensor.name or f"t{tensor.id}", tensor.dtype, dims)
    for tensor in graph.constants:
        values[tensor.id] = result.constant(tensor.name or "", opdef.array_of(tensor), tensor.dtype)
    for op in graph.ops:
        record = opdef.get(op.kind, where=op.label)
        ranks = [t.ndim for t in op.inputs]
        along = any(record.lies_along_channel(i, ranks, op.attrs) for i in record.channel_inputs if i < len(ranks))
        is_sum = record.family == "sum"
        if record.by_position or len(op.outputs) > 1:  # positions in the batch differ from those in single calls
            return None
        if not (record.is_pointwise or is_sum) or along or (is_sum and op.inputs[1].is_constant):
            return None
        attrs: dict[str, Any] = dict(op.attrs)
        if record.index_of:
            attrs[record.index_of] = int(attrs[record.index_of]) % (ranks[0] or 1) - (ranks[0] or 1)
        given = [values[t.id] for t in op.inputs]
        made = result.add_op(op.kind, *given, dtype=op.outputs[0].dtype, **attrs)
        values[op.outputs[0].id] = made
    outputs = [values[t.id] for t in graph.outputs]
    result.set_outputs(outputs)
    return result.finalize()


for _ports in _USUAL:
    overload(*_ports)
