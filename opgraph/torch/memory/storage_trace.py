"""Memory over a forward and a backward pass: every storage that an op makes, from its birth to its end.

A dispatch mode sees every op that reaches a device, below autograd. Programs of captured graphs (`torch/graph/`) report
the graph node for which they allocate, and so its origin in the user's source. Memory that an op allocates and frees
internally (workspaces of a library, its temporaries) is not seen; on CUDA the allocator's own maximum is reported too.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node

from opgraph.runtime.providers.torch_internals import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    is_tracing,
    tree_iter,
    unset_fake_temporarily,
    without_torch_function,
)
from opgraph.torch.graph.node_origin import Origin, origin_of
from opgraph.torch.graph.program import Program
from opgraph.torch.memory.recomputed import Run
from opgraph.torch.tracing.proxy import Proxy

if TYPE_CHECKING:
    from opgraph.torch.memory.saved_recording import Place, Recorder

FORWARD, BACKWARD = "forward", "backward"

#: In a dry run, tensors that an op makes without tensor operands are real up to this many elements: scalars of
#: parameters may control Python branches, and must have values.
MAX_REAL_ELEMENTS = 4096
#: Ops that keep a workspace for backward whose size a library decides; on shapes alone it is empty.
_WORKSPACES = frozenset(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"))


class Sample(NamedTuple):
    """Bytes alive after an op, above the bytes before the run."""

    phase: str
    module: str
    op: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Birth:
    """The op that made a storage; for storages of a captured graph, also their origin."""

    module: str
    op: str
    origin: Origin | None = None


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own init_subclass
    """Counts the bytes of all storages that ops make while it is active.

    Args:
        before: keys (`storage_key`) of storages that existed already; they count nothing.
        placing: reports the module that is running.
        dry_run: ops on tensors that have values run as they are, all others under the fake mode around this one.
        meta: True if tensors on the meta device count, because the model itself is there. Otherwise they only serve to
            find shapes, and take no memory.

    Attributes:
        bytes: the current bytes.
        computes: True if programs of captured graphs run their kernels: not in a dry run.
        samples: one for each op that began or followed the life of a storage.
        births: storage key -> the op that made it; for live storages only.
        runs: the runs of programs of captured graphs, in order.
        uncounted: the names of ops of a dry run whose workspaces only a library determines.
    """

    #: Random ops that backward replays run in such operators.
    supports_higher_order_operators = True

    def __init__(self, before: Mapping[int, object], placing: Recorder, *, dry_run: bool, meta: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.samples: list[Sample] = []
        self.births: dict[int, Birth] = {}
        self.phase = FORWARD
        self._before = before
        self._placing = placing
        self.runs: list[Run] = []
        self.uncounted: set[str] = set()
        self._origins: dict[Node, Origin] = {}
        self.computes = not dry_run
        self._origin: Origin | None = None
        self._readers: dict[int, Origin] = {}
        self._constants: dict[int, object] = {}
        self._meta = meta
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._paused = False
        self._changed = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, torch.compile would permanently run its functions uncompiled, once seen under this mode."""
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ops inside this context add no sample: they belong to the measurement."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def alive(self) -> dict[int, int]:
        """Storage key -> bytes, for the storages that are alive."""
        return {key: size for key, (_, size) in self._alive.items()}

    def origin_of(self, tensor: torch.Tensor) -> Origin | None:
        """The origin of a tensor that a captured graph made, or of its first read there; None for all others."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        birth = self.births.get(storage._cdata)
        return self._readers.get(storage._cdata) if birth is None else birth.origin

    # -- calls from programs (`graph.program_text.watched`)

    def running(self, program: Program) -> None:
        """Called when a program begins to run: finds the modules of the model from which its nodes come."""
        places = self._placing.places_of(program)
        now = self._placing.place_now().module
        self._origins = {node: _placed(origin_of(node), places, now) for node in program.module.graph.nodes}
        if not self._paused:
            self.runs.append(Run(program, self.phase == BACKWARD, self._origins))

    def constants(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors that a program computed when it was compiled count as if they had existed before."""
        self._constants.update((s._cdata, s) for s in map(storage_of, tensors) if s is not None)

    def reading(self, tensor: Any, node: Node) -> None:
        """Called for an input of a program, with the node that reads it first."""
        storage = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if storage is not None:
            self._readers.setdefault(storage._cdata, self._origins[node])

    def making(self, node: Node | None) -> None:
        """Assigns later allocations to this node; None: the program has ended."""
        self._origin = None if node is None else self._origins[node]

    def taking(self, tensor: Any, node: Node) -> None:
        """Called when the value of this node takes the memory of a tensor that a program made for another node."""
        storage = storage_of(tensor)
        if storage is not None and storage._cdata in self.births:
            self.births[storage._cdata] = self._birth_from(self._origins[node])

    def _birth(self, func: Any) -> Birth:
        if self._origin is None:
            return Birth(self._placing.place_now().module, _name_of(func))
        return self._birth_from(self._origin)

    def _birth_from(self, origin: Origin) -> Birth:
        return Birth(origin.module, origin.call, origin)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_tracing():
            return func(*args, **kwargs)
        keeps = self._origin is None
        result = func(*args, **kwargs) if self.computes else _dry(func, args, kwargs, keeps_values=keeps)
        if not self.computes and _name_of(func) in _WORKSPACES:
            self.uncounted.add(_name_of(func))
        if self._paused or not any(isinstance(value, torch.Tensor) for value in tree_iter(result)):
            return result
        birth = self._birth(func)
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                self._touch(value, birth)
        if self._changed:
            self._changed = False
            self.samples.append(Sample(self.phase, birth.module, birth.op, self.bytes))
        return result

    def _touch(self, tensor: torch.Tensor, birth: Birth) -> None:
        storage = storage_of(tensor)
        if storage is None or (tensor.is_meta and not self._meta):
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None:
            if size != known[1]:  # it was resized
                self._alive[key] = (known[0], size)
                self.bytes += size - known[1]
                self._changed = True
        elif key not in self._before and key not in self._constants:
            self.births[key] = birth
            self._alive[key] = (weakref.ref(storage, lambda _: self._end(key)), size)
            self.bytes += size
            self._changed = True

    def _end(self, key: int) -> None:
        self.births.pop(key, None)
        _, size = self._alive.pop(key)
        self.bytes -= size
        self._changed = True


def _placed(origin: Origin, places: Mapping[str, Place], now: str) -> Origin:
    """An origin with the name of its module in the model; `now` is the running module that contains it."""
    place = places.get(origin.source)
    if place is None:
        return replace(origin, module=".".join(filter(None, (now, origin.module))))
    call = origin.module_call if origin.source else place.call
    return replace(origin, module=place.module, module_class=place.module_class, module_call=call)


def _name_of(func: OpOverload[..., Any] | HigherOrderOperator) -> str:
    """A name such as "native_dropout"; for an op of another library, such as "library::name"."""
    return str(func) if isinstance(func, HigherOrderOperator) else func._schema.name.removeprefix("aten::")


def _dry(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps_values: bool) -> Any:
    """Calls an op under the fake mode. It runs for real if all tensors that it reads have values; with `keeps_values`,
    also if it makes a small tensor without reading any. Programs of captured graphs allocate without `keeps_values`:
    the kernels that would fill their tensors do not run."""
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    if tensors and not any(isinstance(value, FakeTensor) for value in tensors):
        with unset_fake_temporarily():
            return func(*args, **kwargs)
    result = func(*args, **kwargs)
    if keeps_values and not tensors and isinstance(result, torch.Tensor) and result.numel() <= MAX_REAL_ELEMENTS:
        with unset_fake_temporarily():
            return func(*args, **kwargs)
    return result


def storage_of(tensor: torch.Tensor) -> Any:
    """The storage of a tensor; None for kinds that have none (sparse ones, some subclasses).

    Torch's own method answers: lazy parameters and some subclasses raise errors of their own for torch functions.
    """
    try:
        with without_torch_function():
            return torch.Tensor.untyped_storage(tensor)
    except (RuntimeError, NotImplementedError):
        return None


def existing_storages() -> dict[int, object]:
    """Key -> storage, for every tensor that exists in Python now; holding them prevents reuse of the keys."""
    found = {}
    for thing in gc.get_objects():
        # type(), not isinstance: proxies report the class of the object that they represent, and may compute it.
        # A Proxy in a trace has no memory, and belongs to its run.
        if issubclass(type(thing), torch.Tensor) and type(thing) is not Proxy:
            storage = storage_of(thing)
            if storage is not None:
                found[storage._cdata] = storage
    return found
