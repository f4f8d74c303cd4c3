"""Observes a run: the overwrites, the values kept for backward, and the reads of overwritten values.

Values are tracked by their memory (storage): views, `.data` and `.detach()` of a tensor are the same value here, so
that a change which bypasses autograd's version counter is seen like any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from opgraph.runtime.array_exchange import write_observer
from opgraph.runtime.providers.torch_internals import TorchDispatchMode, tree_iter, tree_map_only, without_modes
from opgraph.torch.autograd_function_hooks import RUN
from opgraph.torch.inplace.source_position import (
    Position,
    Sibling,
    assigned_names,
    frames_of,
    inside,
    operand_names,
    siblings,
    user_stack,
)

#: Values up to this many bytes are copied before they change: a reader's result for the old value can be computed.
COPY_BYTES = 64 << 20


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own init_subclass
    """Observes every op of a run, in `functions_on_stack()`; `hooks()` observes the tensors that autograd keeps.

    Args:
        until: the file whose frames end the recorded stacks: the file that starts the run.
    """

    def __init__(self, until: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.until = until
        self.number = 0
        self.overwrites: dict[int, list[Overwrite]] = {}
        self.misreads: list[Misread] = []
        self.spoilt: list[Spoilt] = []
        self.hidden_reads: list[Misread] = []
        self.calls: dict[int, FunctionCall] = {}
        self.in_backward = False
        self._made: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._alive: list[Any] = []  # storages with findings: their addresses must not be reused
        self._seen: set[tuple[int, object]] = set()

    # -- ops ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one op, and records its reads and writes."""
        kwargs = kwargs or {}
        self.number += 1
        written = _written(func, args, kwargs)
        tensors = [t for t in tree_iter((args, kwargs)) if plain(t)]
        if self.overwrites and not _is_view(func):
            self._note_reads(func, args, kwargs, tensors, written)
        for tensor in written:
            self._note_write(str(func.overloadpacket).removeprefix("aten."), tensor)
        result = func(*args, **kwargs)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            # Autograd decides if these get a history only after this op has returned.
            for tensor in (t for t in tree_iter(result) if plain(t)):
                self._made.setdefault(memory_of(tensor), []).append(weakref.ref(tensor))
        return result

    def _has_history(self, key: int) -> bool:
        made = (ref() for ref in self._made.get(key, ()))
        return any(t is not None and t.grad_fn is not None and memory_of(t) == key for t in made)

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        """A context in which writes of opgraph's kernels are recorded."""
        token = write_observer.set(self._note_kernel)
        try:
            yield
        finally:
            write_observer.reset(token)

    def _note_kernel(self, tensor: torch.Tensor) -> None:
        with without_modes():
            self.number += 1
            self._note_write("an opgraph kernel", tensor)

    def _note_write(self, op: str, tensor: torch.Tensor) -> None:
        key = memory_of(tensor)
        stack = user_stack(self.until)
        # A value may have a history without this tensor (`.data`), independent of the new value.
        alone = not tensor.requires_grad or not torch.is_grad_enabled()
        applying = next(frames_of(RUN), None)
        overwrite = Overwrite(
            self.number,
            op,
            stack,
            tensor.detach().clone() if tensor.nbytes <= COPY_BYTES else None,
            tensor.detach(),
            hidden=alone and applying is None and not self.in_backward and self._has_history(key),
            in_backward=self.in_backward,
        )

        def is_value(value: object) -> bool:
            return plain(value) and memory_of(value) == key  # type: ignore[arg-type]  # plain: it is a tensor

        if not self.in_backward:
            for position in stack:
                overwrite.beside += [(position.frame, s) for s in siblings(position, is_value)]
                local = position.frame.f_locals
                overwrite.names[position.frame] = {n for n, v in local.items() if is_value(v)}
                overwrite.targets |= assigned_names(position)
        if applying is not None:
            self._note_call(applying, key, overwrite)
        self.overwrites.setdefault(key, []).append(overwrite)
        self._alive.append(tensor.untyped_storage())

    def _note_call(self, frame: FrameType, key: int, overwrite: Overwrite) -> None:
        args = frame.f_locals["given"]
        if id(frame) in self.calls or not any(plain(a) and memory_of(a) == key for a in args):
            return
        copies = tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), list(args))
        self.calls[id(frame)] = FunctionCall(frame.f_locals["function"], copies, overwrite)
        self._alive.append(frame)

    # -- reads --------------------------------------------------------------------------------------------------

    def _note_reads(
        self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        shared: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            if memory_of(tensor) in self.overwrites:
                shared.setdefault(memory_of(tensor), []).append(tensor)
        for key, operands in shared.items():
            for overwrite in self.overwrites[key]:
                if overwrite.hidden and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                    self._misread(self.hidden_reads, overwrite, user_stack(self.until), aliased=False)
            if self.in_backward:
                continue
            stack = user_stack(self.until)
            for overwrite in self.overwrites[key]:
                aliased = self._misreads(overwrite, operands, stack)
                if aliased is not None and self._differs(func, args, kwargs, operands, overwrite):
                    self._misread(self.misreads, overwrite, stack, aliased=aliased)

    def _misread(self, found: list[Misread], overwrite: Overwrite, stack: list[Position], *, aliased: bool) -> None:
        if stack and (id(found), overwrite) not in self._seen:
            self._seen.add((id(found), overwrite))
            found.append(Misread(overwrite, stack[0], aliased))

    def _misreads(self, overwrite: Overwrite, operands: Sequence[torch.Tensor], stack: list[Position]) -> bool | None:
        """False if an op reads a value that the same expression overwrote; True: under another name; None: neither."""
        at = {p.frame: p.span for p in stack}
        for frame, sibling in overwrite.beside:
            span = at.get(frame)
            if span is None:
                continue
            if span == sibling.whole and len(operands) > 1:
                return False
            if sibling.later and inside(span, sibling.span):
                return False
        if len(operands) < 2 or not stack or stack[0].frame not in overwrite.names:
            return None
        known = overwrite.names[stack[0].frame]
        read = set(operand_names(stack[0]))
        # One object under two names: both existed when it was overwritten, or the overwriting statement bound one.
        if len(read & known) > 1 or (read & known and (read - known) & overwrite.targets):
            return True
        return None

    def _differs(
        self, func: Any, args: Any, kwargs: Any, operands: Sequence[torch.Tensor], overwrite: Overwrite
    ) -> bool:
        """True if an op would return something else if one of its operands had not been overwritten."""
        before, like = overwrite.before, overwrite.like
        if before is None:
            return True
        count = len(operands)

        def run(old: int) -> Any:
            place = iter(range(count))

            def replaced(tensor: torch.Tensor) -> torch.Tensor:
                if not any(tensor is o for o in operands):
                    return tensor
                same = (tensor.shape, tensor.stride(), tensor.storage_offset()) == (
                    like.shape, like.stride(), like.storage_offset(),
                )  # fmt: skip
                return (before if next(place) == old and same else tensor).detach().clone()

            a, k = tree_map_only(torch.Tensor, replaced, (args, kwargs))
            with torch.no_grad():
                return [t for t in tree_iter(func(*a, **k)) if isinstance(t, torch.Tensor)]

        actual = run(-1)
        return any(
            not all(torch.allclose(x, y, equal_nan=True) for x, y in zip(actual, run(i))) for i in range(count)
        )  # fmt: skip

    # -- tensors that autograd keeps ------------------------------------------------------------------------------

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context that records everything that autograd keeps."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not plain(tensor):
            return tensor
        with without_modes(), torch.no_grad():
            alias = tensor.detach()
            return Kept(alias, self.number, alias._version, digest(alias), user_stack(self.until))

    def _unpack(self, kept: Any) -> Any:
        if not isinstance(kept, Kept):
            return kept
        with without_modes(), torch.no_grad():
            # Without hooks torch compares the versions, and raises.
            raises = kept.tensor._version != kept.version
            if raises or digest(kept.tensor) != kept.digest:
                key = memory_of(kept.tensor)
                later = [o for o in self.overwrites.get(key, ()) if o.number > kept.number and not _own(o, kept)]
                # Statistics that an op updates itself (batch norm) are kept, too, but never read.
                if raises or later or (self._has_history(key) and not self.overwrites.get(key)):
                    self.spoilt.append(Spoilt(kept, later[0] if later else None, raises))
        return kept.tensor


def _own(overwrite: Overwrite, kept: Kept) -> bool:
    """True if the op that keeps a tensor is the one that fills it: rrelu draws its noise after autograd has kept it."""
    if not overwrite.op.startswith("rrelu_with_noise"):
        return False
    here = [(p.frame, p.span) for p in overwrite.stack[:1]]
    return overwrite.number == kept.number + 1 and here == [(p.frame, p.span) for p in kept.stack[:1]]


def _is_view(func: Any) -> bool:
    arguments = func._schema.arguments
    return any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    if not func._schema.is_mutable:
        return []
    result: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            result += [t for t in tree_iter(value) if plain(t)]
    return result


@dataclass(slots=True, eq=False)
class Overwrite:
    """One op that wrote into memory that existed before.

    Attributes:
        number: the number of the op in the run.
        stack: the frames that led to it, innermost first.
        before: a copy of the old value, if it is small enough.
        like: the tensor that was written.
        hidden: True if autograd did not see it although the value has a gradient.
        in_backward: True if it happened inside a backward pass.
        beside: per frame, the other operands of the expressions around it that read the value.
        names: per frame, the names of the value.
        targets: the names that its statement binds.
    """

    number: int
    op: str
    stack: list[Position]
    before: torch.Tensor | None
    like: torch.Tensor
    hidden: bool
    in_backward: bool
    beside: list[tuple[FrameType, Sibling]] = field(default_factory=list)
    names: dict[FrameType, set[str]] = field(default_factory=dict)
    targets: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Misread:
    """An op that read an overwritten value; `aliased`: under another name, rather than in the same expression."""

    overwrite: Overwrite
    reader: Position
    aliased: bool


@dataclass(slots=True, eq=False)
class Kept:
    """One tensor that autograd keeps for backward."""

    tensor: torch.Tensor
    number: int
    version: int
    digest: bytes
    stack: list[Position]


@dataclass(slots=True, eq=False)
class Spoilt:
    """A kept tensor that backward found changed; `overwrite` is None if no write to it is known."""

    kept: Kept
    overwrite: Overwrite | None
    raises: bool


@dataclass(slots=True, eq=False)
class FunctionCall:
    """A call of a custom autograd.Function that wrote into one of its arguments.

    Attributes:
        args: the arguments before the write; tensors are copies.
        overwrite: the first write.
    """

    cls: type
    args: list[Any]
    overwrite: Overwrite


def memory_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def digest(tensor: torch.Tensor) -> bytes:
    """A fingerprint of the values, bit by bit."""
    raw = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(raw.view(torch.uint8).numpy().data if raw.numel() else b"", digest_size=16).digest()


def plain(tensor: object) -> bool:
    """True if a value is a tensor with memory of its own."""
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.device.type != "meta"
