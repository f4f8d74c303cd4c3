"""One forward pass whose pointwise arithmetic waits: notes calls down, and runs them when their values are needed."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from opgraph.torch.lazy.call import CAST, SPECS, TENSOR, WRITES, cast_dtype, in_place, kind_of, to_dtype
from opgraph.torch.lazy.hooks import hooked, saved_tensor_hooks
from opgraph.torch.lazy.memory import storages_read, tensors_in
from opgraph.torch.lazy.node import Node, Spec
from opgraph.torch.lazy.observer import Observer
from opgraph.torch.lazy.run import run
from opgraph.torch.lazy.shape import is_own, meeting
from opgraph.torch.lazy.value import Lazy, given_up, lazies, lazy
from opgraph.torch.tracing.calls import Found
from opgraph.torch.writes import told_to_write

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_DEVICES = ("cpu", "cuda")
_grad, _inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_transforms = torch._C._are_functorch_transforms_active


class LazySession:
    """A forward pass.

    Args:
        observer: is told what happens; None: nobody.
        rounding: as `fuse` takes it.
        outer: the one of this thread that it interrupts.

    Attributes:
        hooks: the saved-tensor hooks when it began. Under others (activation checkpointing) nothing waits: how many
            tensors are saved must not depend on when something runs.
        computing: whether values are computed right now.
        suspended: in how many custom autograd functions the run is, and modules that compare classes: nothing waits
            there either, for autograd connects what a function returns.
    """

    def __init__(
        self, observer: Observer | None = None, rounding: str = "store", outer: LazySession | None = None
    ) -> None:
        self.observer = observer
        self.rounding = rounding
        self.outer = outer
        self.hooks = saved_tensor_hooks()
        self.computing = False
        self.suspended = 0
        self._handles: list[weakref.ref[Lazy]] = []
        self._limit = 64
        self._lock = threading.RLock()

    def call(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One torch function of the forward pass."""
        kind = kind_of(func)
        why = ""
        if isinstance(kind, Found):
            result, why = self._arithmetic(kind, func, args, kwargs)
            if result is not None:
                return result
        elif kind is CAST and self._may_wait():
            result = self._conversion(func, args, kwargs)
            if result is not None:
                return result
        nodes = [t.node for t in lazies((args, kwargs))] if types or kwargs else []
        if nodes:
            self.compute(nodes)
        writes = kind is WRITES or (type(kind) is Found and kind.inplace)
        if writes or (kwargs and told_to_write(kwargs)):
            self.before_writing((args, kwargs))
        result = func(*args, **kwargs)
        if self.observer is not None:
            self.observer.left(func, why, result)
        return result

    def _may_wait(self) -> bool:
        return not self.suspended and not _transforms() and saved_tensor_hooks() == self.hooks

    def _arithmetic(
        self, found: Found, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, str]:
        """The Lazy result of a call; or None, and why it does not wait."""
        if not self._may_wait():
            return None, "a mode or a transform is on"
        target = None
        if found.inplace or "inplace" in kwargs:
            if found.inplace or kwargs["inplace"]:
                target = args[0] if args else None
                if type(target) is not Lazy and not is_own(target):
                    return None, "it writes into a tensor that others may hold"
            kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
        marks: list[tuple[Any, ...]] = []
        operands: list[Node | torch.Tensor] = []
        places = [self._placed(value, marks, operands) for value in args]
        named = {name: self._placed(value, marks, operands) for name, value in kwargs.items()}
        if len(marks) != len(args) + len(kwargs):
            return None, "an argument is neither a tensor nor a number"
        shape, device, why = meeting(operands)
        if shape is None:
            return None, why
        spec = SPECS.find(found, func, tuple(places), named, tuple(marks), device)
        if isinstance(spec, str):
            return None, spec
        if spec.name == "detach" and type(operands[0]) is not Node:
            return None, "it is the same memory"
        if target is None:
            return self._noted(spec, operands, shape, device), ""
        return self._changed(target, spec, operands, shape, device, func)

    def _placed(self, value: Any, marks: list[tuple[Any, ...]], operands: list[Node | torch.Tensor]) -> Any:
        kind = type(value)
        if kind is Lazy:
            node = value.node
            operands.append(node)
            marks.append((TENSOR, node.spec.dtype, len(node.shape)))
            return TENSOR
        if kind in _PLAIN:
            if value.layout is torch.strided and value.device.type in _DEVICES and not value.is_neg():
                operands.append(value)
                marks.append((TENSOR, value.dtype, value.dim()))
            return TENSOR
        if kind is float:
            marks.append((kind, value.hex()))
        elif kind is int or kind is bool or kind is str or value is None:
            marks.append((kind, value))
        return value

    def _conversion(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        kind = type(x)
        if kind is not Lazy and (kind not in _PLAIN or not x.dim() or x.device.type not in _DEVICES):
            return None
        dtype = cast_dtype(func, args, kwargs)
        if dtype is None or not (dtype.is_floating_point and x.dtype.is_floating_point):
            return None
        if dtype == x.dtype:
            return x
        spec = to_dtype(dtype, x.dtype)
        if spec is None or (kind is not Lazy and (x.layout is not torch.strided or x.is_neg())):
            return None
        return self._noted(spec, [x.node if kind is Lazy else x], x.shape, x.device)

    def _node(self, spec: Spec, operands: list[Node | torch.Tensor], shape: torch.Size, device: torch.device) -> Node:
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None
        state = (_grad(), _inference(), stream)
        early = [
            o for o in operands
            if type(o) is Node and o.value is None and (o.state != state or o.shape.numel() < shape.numel())
        ]  # fmt: skip
        if early:  # what is spread over more elements is computed once, not for each of them
            self.compute(early)
        taken = tuple([o.value if type(o) is Node and o.value is not None else o for o in operands])
        node = Node(self, spec, taken, shape, device, state)
        if self.observer is not None:
            node.site = self.observer.site()
        return node

    def _noted(self, spec: Spec, operands: list[Node | torch.Tensor], shape: torch.Size, device: torch.device) -> Lazy:
        made = lazy(self._node(spec, operands, shape, device))
        assert made.node.handle is not None
        self._handles.append(made.node.handle)
        if len(self._handles) > self._limit:
            self._handles = [h for h in self._handles if type(h()) is Lazy]
            self._limit = 64 + 2 * len(self._handles)
        return made

    def _changed(
        self,
        target: torch.Tensor,
        spec: Spec,
        operands: list[Node | torch.Tensor],
        shape: torch.Size,
        device: torch.device,
        func: Callable[..., Any],
    ) -> tuple[Any, str]:
        """In-place arithmetic: the tensor stands for the new value from now on.

        Args:
            target: a Lazy, or a tensor whose memory nobody else sees; that becomes a Lazy.
            func: the function that was called.
        """
        dtype = target.dtype
        convert = to_dtype(dtype, spec.dtype) if spec.dtype != dtype else None
        if shape != target.shape or (spec.dtype != dtype and convert is None):
            return None, "it writes into a tensor of another shape or dtype"
        if not torch.can_cast(spec.dtype, dtype):
            return None, "it writes into a tensor of another kind"
        if type(target) is Lazy:
            if target.node.state[:2] != (_grad(), _inference()):
                return None, "it writes into a tensor that was made with other gradient settings"
            if target.node.shared:
                return None, "it writes into memory that another value has, by detach()"
            node = self._node(spec, operands, shape, device)
        else:
            self.before_writing(target)
            if not is_own(target):  # what was waiting has its memory now
                return None, "it writes into a tensor that others may hold"
            old = given_up(target)
            node = self._node(spec, [old if o is target else o for o in operands], shape, device)
            node.overwrites = in_place(spec, func)
        if convert is not None:
            node = self._node(convert, [node], shape, device)
        if type(target) is not Lazy:  # an operand had to be computed, and it with that
            return None, "its operands were computed already"
        known = target.__dict__.get("node")
        if known is not None:
            known.handle = None
        target.__dict__["node"] = node
        node.handle = weakref.ref(target)
        self._handles.append(node.handle)
        return target, ""

    def compute(self, nodes: list[Node]) -> None:
        """Runs what these nodes need, and gives their tensors the values."""
        with self._lock, hooked(self.hooks):
            before, self.computing = self.computing, True
            try:
                run([n for n in nodes if n.value is None], self.rounding, self.observer)
            finally:
                self.computing = before

    def compute_all(self) -> None:
        """Runs everything that somebody still holds."""
        held = [tensor for tensor in (handle() for handle in self._handles) if type(tensor) is Lazy]
        self._handles = []
        if held:
            self.compute([t.node for t in held])

    @contextlib.contextmanager
    def nothing_waits(self) -> Iterator[None]:
        """Everything has been computed, and what comes runs in torch at once."""
        self.compute_all()
        self.suspended += 1
        try:
            yield
        finally:
            self.suspended -= 1

    def before_writing(self, values: Any) -> None:
        """Runs what reads the memory of these tensors, before it is written to."""
        held = [tensor for tensor in (handle() for handle in self._handles) if type(tensor) is Lazy]
        if not held:
            return
        try:
            written = {t.untyped_storage()._cdata for t in tensors_in(values)}
        except (NotImplementedError, ValueError):
            # A wrapper of torch.func, a parameter of a lazy module: nobody says where their memory is.
            return self.compute_all()
        self.compute([t.node for t in held if any(s in written for s in storages_read(t.node))])
