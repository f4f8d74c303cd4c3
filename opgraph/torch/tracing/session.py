"""One run of a function on proxies. Its calls are compared with those of earlier runs as they happen.

The calls of all runs of a function form a tree: a node is one call, its children the calls that came next. A run walks
down the tree. While it repeats an earlier run, only the key of each call is computed (a few microseconds per call). A
new call is translated into ops once, and the new node stores these.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opgraph.torch.broadcast import broadcast_shapes
from opgraph.torch.tracing import trace_errors
from opgraph.torch.tracing.proxy import Proxy, Ref, proxy, sources_of
from opgraph.torch.tracing.tensor_calls import Watch, function_name

_REFS = [Ref(i) for i in range(64)]
_TRUE, _FALSE = Ref(-1), Ref(-2)


@dataclass(frozen=True, slots=True)
class Number:
    """A scalar constant among the operands of a Step; dtype None: that of the other operands."""

    value: float
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One op of a trace.

    Attributes:
        operands: refs of values and numbers.
        dtype: the dtype of the result.
        label: the line of the user's code.
    """

    kind: str
    operands: tuple[Ref | Number, ...]
    result: Ref
    dtype: str
    attrs: tuple[tuple[str, Any], ...] = ()
    label: str = ""


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A torch call that makes a value, with the names of values in place of tensors."""

    result: Ref
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


#: Actions of a call: makes a value, changes its first argument's value, returns that argument, runs on real tensors.
MAKES, CHANGES, GIVES_BACK, RUNS = range(4)


class Node:
    """One call in the tree of calls.

    Attributes:
        after: the calls that came next, by key.
        action: MAKES, CHANGES, GIVES_BACK or RUNS.
        ref, dtype: those of the new value.
        alone: True if the value depends on the call's first argument alone: of others only the dtype counts.
        detached: True if no gradient goes through the value.
        shares: True if the value has the memory of the call's first argument.
        refs: the number of refs after the call.
        steps: the ops of the call.
        call: torch's call, if it makes a value.
        leaf: the Leaf of the run, at the node for the function's result.
    """

    __slots__ = (
        "action", "after", "alone", "call", "detached", "dtype", "leaf", "parent", "ref", "refs", "shares", "steps",
    )  # fmt: skip

    def __init__(self, parent: Node | None, refs: int) -> None:
        self.parent = parent
        self.refs = refs
        self.after: dict[Hashable, Node] = {}
        self.action = GIVES_BACK
        self.ref: Ref | None = None
        self.dtype: torch.dtype | None = None
        self.alone = self.detached = self.shares = False
        self.steps: tuple[Step, ...] = ()
        self.call: TorchCall | None = None
        self.leaf: Any = None

    def path(self) -> list[Step]:
        """The steps of all calls up to this node, in order."""
        return [step for node in self._nodes() for step in node.steps]

    def calls(self) -> list[TorchCall]:
        """The calls up to this node that make values, in order."""
        return [node.call for node in self._nodes() if node.call is not None]

    def _nodes(self) -> list[Node]:
        found = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


@dataclass(slots=True)
class Input:
    """A real tensor that the run reads: an argument, a view of one, or a captured tensor."""

    ref: Ref
    tensor: torch.Tensor
    name: str
    captured: bool = False


class Session:
    """A run.

    Args:
        root: the tree's root for arguments of these dtypes.
        device: the device of the data.
        watch: records the calls on real tensors.
        as_eager: True if numbers are rounded where eager torch's kernels round them.

    Attributes:
        inputs: the real tensors that the run reads, arguments first.
        arguments: the arguments of the function, by name.
        asks: True if the function read the shape or the requires_grad of data.
    """

    def __init__(self, root: Node, device: torch.device, watch: Watch | None = None, *, as_eager: bool = False) -> None:
        self.node = root
        self.as_eager = as_eager
        self.watch = watch
        self.asks = False
        self.device = device
        self.inputs: list[Input] = []
        self.captured: dict[int, Ref] = {}
        self.given: dict[int, Proxy] = {}
        self.arguments: dict[str, Any] = {}
        self.count = 0
        self.finished = False
        self.with_gradients = torch.is_grad_enabled()

    def asked(self) -> None:
        """Notes that the function queried data, unless opgraph does it while it translates a call."""
        if self.watch is not None and not self.watch.paused:
            self.asks = True

    def new_ref(self) -> Ref:
        """The ref of the next value."""
        if self.count == len(_REFS):
            _REFS.append(Ref(self.count))
        self.count += 1
        return _REFS[self.count - 1]

    def argument(self, tensor: torch.Tensor, name: str) -> Proxy:
        """The proxy of a data tensor: an argument, or a view of one; the same one for the same tensor."""
        known = self.given.get(id(tensor))
        if known is None:
            known = self.given[id(tensor)] = self._new_argument(tensor, name)
        return known

    def _new_argument(self, tensor: torch.Tensor, name: str) -> Proxy:
        ref = self.new_ref()
        self.inputs.append(Input(ref, tensor, name))
        return proxy(self, ref, tensor.dtype, tensor, ())

    def capture(self, tensor: torch.Tensor) -> Ref:
        """The ref of a real tensor that is an operand next to a proxy."""
        ref = self.captured.get(id(tensor))
        if ref is None:
            ref = self.captured[id(tensor)] = self.new_ref()
            self.inputs.append(Input(ref, tensor, "", True))
        return ref

    def keep_values(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies inputs before they are written to: values computed from them read the copy when the graph runs."""
        written = set(map(memory_key, tensors))
        for entry in self.inputs[:]:
            tensor = entry.tensor
            if memory_key(tensor) not in written:
                continue
            with torch.set_grad_enabled(self.with_gradients):
                entry.tensor, entry.captured = tensor.clone(), True
            if self.captured.get(id(tensor)) is entry.ref:  # from now on it is another value
                del self.captured[id(tensor)]
            elif (known := self.given.get(id(tensor))) is not None and known.ref is entry.ref:
                known.ref = self.new_ref()
                self.inputs.append(Input(known.ref, tensor, entry.name))
            self.node = self.node.after.setdefault(("written", self.count), Node(self.node, self.count))

    def forget(self, count: int) -> None:
        """Removes the refs that the key of a call added, if the call becomes no node."""
        for known in [k for k, ref in self.captured.items() if ref.index >= count]:
            del self.captured[known]
        self.inputs = [i for i in self.inputs if i.ref.index < count]
        self.count = count

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles a torch function whose arguments include proxies."""
        if self.watch is not None and not self.watch.paused:
            with self.watch.pause():
                return self.call(func, args, kwargs)
        before = self.count
        parts: list[Hashable] = [func, *map(self._key, args)]
        for name, value in kwargs.items():
            parts += (name, self._key(value))
        if torch.is_grad_enabled() is not self.with_gradients:
            trace_errors.check_grad_mode(function_name(func), self.with_gradients)
            parts.append(torch.no_grad)
        key = tuple(parts)
        node = self.node.after.get(key)
        if node is None:
            if self.finished:
                raise trace_errors.leaked()
            from opgraph.torch.tracing.call_recording import record  # imports this module

            return record(self, key, before, func, args, kwargs)
        return self.replay(node, func, args, kwargs)

    def replay(self, node: Node, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Performs the action of a node, and makes it the current node."""
        self.node = node
        action = node.action
        if action == MAKES:
            self.count = node.refs
            origin = args[:1] if node.alone else (*args, *kwargs.values())
            made = proxy(self, node.ref, node.dtype, None, origin)  # type: ignore[arg-type]
            made.detached = node.detached
            if node.shares:
                made.shared = args[0].shared = True
            return made
        if action == RUNS:
            result = self.run(func, args, kwargs)
            self.node = node.after.setdefault(("gives", self.count), Node(node, self.count))  # by the number of views
            return result
        if action == CHANGES:
            self.count = node.refs
            others = (*args[1:], *kwargs.values())
            self.check_kept_shape(args[0], others)
            args[0].change(node.ref, others)
        return args[0]

    def check_kept_shape(self, target: Proxy, others: tuple[Any, ...]) -> None:
        """Raises RuntimeError if in-place arithmetic with others would change the shape of a value."""
        own = target.shape  # cached from here on: the others may have been computed from the target
        known = {id(tensor) for tensor in target.sources()}
        new = [t.shape for t in sources_of(others) if t.dim() and id(t) not in known]
        if not new:
            return
        self.asks = True
        whole = broadcast_shapes([own, *new])
        if whole != own:
            raise RuntimeError(
                f"output with shape {list(own)} doesn't match the broadcast shape {list(whole)} "
                f"({trace_errors.place()})"
            )

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a view (or the like) of arguments on the real tensors; its results are arguments again."""
        return self._wrapped(self.eager(func, self.real(args), self.real(kwargs)))

    def eager(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call on real tensors, on behalf of the function."""
        result = func(*args, **kwargs)
        if self.watch is not None:
            self.watch.note(func, args, kwargs, result)
        return result

    def real(self, values: Any) -> Any:
        """Arguments with the real tensors in place of proxies."""
        if type(values) is Proxy:
            return values.actual
        if isinstance(values, dict):
            return {name: self.real(value) for name, value in values.items()}
        if type(values) in (list, tuple):
            return type(values)(self.real(value) for value in values)
        return values

    def _wrapped(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return self.argument(result, "") if result.dim() else result
        if isinstance(result, (list, tuple)):
            return tuple(self._wrapped(part) for part in result)
        return result

    def _key(self, value: Any) -> Any:
        kind = type(value)
        if kind is Proxy:
            if value.session is not self:
                raise trace_errors.leaked()
            return value.ref
        if kind is float:
            return value.hex()  # 0.0 and -0.0, 1 and 1.0 are different constants
        if kind is bool:
            return _TRUE if value else _FALSE
        if kind is int or kind is str or value is None:
            return value
        if isinstance(value, torch.Tensor):
            return (self.capture(value), value.dtype, value.dim() > 0, value.device)
        if kind in (tuple, list, torch.Size):
            return (kind, *map(self._key, value))
        if kind is slice:
            return (kind, self._key(value.start), self._key(value.stop), self._key(value.step))
        if kind is dict:
            return (kind, *[(name, self._key(v)) for name, v in value.items()])
        if isinstance(value, np.generic):
            return (kind, value.tobytes())  # 0.0 and -0.0 are different
        if isinstance(value, np.ndarray):
            raise trace_errors.meets_array()
        return (kind, value)  # a dtype, a device, Ellipsis, a number of a user's class


def memory_key(tensor: torch.Tensor) -> tuple[str, int]:
    """The key of a tensor's memory: its address, or the id of a tensor without one (a batch of torch.func)."""
    try:
        return "address", tensor.untyped_storage().data_ptr() or id(tensor)
    except RuntimeError:
        return "tensor", id(tensor)
