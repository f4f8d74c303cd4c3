"""Training: an executable that also returns the function from gradients of its outputs to gradients of its inputs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime.array_exchange import Watched
from opgraph.runtime.engine import Engine
from opgraph.runtime.executable import Executable
from opgraph.runtime.foreign_nodes import check_foreign
from opgraph.runtime.graph_arguments import check_shape
from opgraph.transforms.cut import kept_name
from opgraph.transforms.saved import Saved, training_plan
from opgraph.transforms.units import freed


class TrainableExecutable(Executable):
    """An executable with a backward pass; made by `compile(graph, wrt=...)`.

    Only the tensors listed by `saved_tensors` are kept from forward to backward, and they are never written to.
    """

    def __init__(
        self, graph: Graph, engine: Engine, *, donate: tuple[str, ...], rounding: str, wrt: tuple[str, ...]
    ) -> None:
        plan = training_plan(graph, wrt, units=rounding == "store")
        check_foreign(plan.backward.ops)
        for entry in plan.saved:
            if entry.name in donate and entry.role == "input":
                raise InvalidArguments(
                    f'input "{entry.name}" cannot be donated: the backward pass reads it',
                    where="donate",
                    fix="leave it out, or compile without wrt",
                )
        super().__init__(freed(graph, wrt).finalize(), engine, donate=donate, rounding=rounding, regroup=False)
        self._recipe = partial(TrainableExecutable, engine=engine, donate=donate, rounding=rounding, wrt=wrt), graph
        self.wrt = wrt
        self._plan = plan
        self._rounding = rounding
        self._lock = threading.Lock()
        keeps_more = len(plan.forward.outputs) > len(graph.outputs)
        self._forward: Executable = (
            Executable(plan.forward, engine, donate=donate, rounding=rounding, regroup=False) if keeps_more else self
        )
        #: The names that backward uses for the results of the forward pass.
        self._kept_names = [kept_name(plan.forward, t) for t in plan.forward.outputs]
        self._backward: Executable | None = None

    @property
    def backward_graph(self) -> Graph:
        """The graph that the backward pass runs: from saved tensors and `d_<output>` to `d_<input>`."""
        return self._plan.backward

    def saved_tensors(self) -> tuple[Saved, ...]:
        """The tensors that `vjp` saves: name, role, dtype, shape and bytes, as far as the graph specifies them."""
        return self._plan.saved

    def vjp(self, feeds: Mapping[Any, Any] | None = None, /, **named: Any) -> tuple[Any, Pullback]:
        """Runs the graph, and returns its output and a function that computes gradients.

        Args:
            feeds, named: as for a call.

        Returns: the output (or the dict of outputs), and a `Pullback`. It takes the gradient of a scalar with respect
            to the output (a dict by output name for several; omitted ones are zero), and returns the gradients with
            respect to the inputs of `wrt`, a dict by name. It may be called again, with the same result.

        Saved tensors are not copies. If a saved torch tensor is changed in place before the pullback is called, the
        pullback raises an error, as autograd does: torch counts the changes. Changes of NumPy and CuPy arrays are not
        detected: the gradients are then those of the new values.

        Raises:
            the errors of a call.
        """
        written = self._written(None, feeds, named) if self._donated else ()
        given = self._ins.by_name(feeds, named)
        feeds, named, kind = self._exchange.imported(feeds, named)
        arrays = self._ins.bind(feeds, named)
        made = self._forward._results(arrays)
        results = dict(zip(self._forward._outs.names, made))
        self._exchange.written(written)
        inputs = dict(zip(self._ins.names, arrays))
        named = dict(zip(self._kept_names, made))
        kept = {}
        for entry in self._plan.saved:
            array = inputs[entry.name] if entry.name in inputs else named[entry.name]
            is_shape = entry.role == "shape"
            kept[entry.name] = self._exchange.zeros(array.shape, array.dtype, array) if is_shape else array
        outputs = {name: results[name] for name in self._outs.names}
        shapes = {name: tuple(array.shape) for name, array in outputs.items()}
        read = [(name, given.get(name)) for name, array in kept.items() if array is inputs.get(name)]
        shown = [name for name, array in outputs.items() if any(array is k for k in kept.values())]
        if kind is not None:
            outputs = {name: self._exchange.exported(array, kind) for name, array in outputs.items()}
        pullback = Pullback(self, kept, shapes, kind, Watched([*read, *((name, outputs[name]) for name in shown)]))
        return outputs[self._outs.names[0]] if self._single else outputs, pullback

    def _backward_pass(self) -> Executable:
        """The executable of the backward graph, compiled at the first use."""
        with self._lock:
            if self._backward is None:
                self._backward = Executable(
                    self._plan.backward, self.engine, donate=(), rounding=self._rounding, regroup=False
                )
            return self._backward


class Pullback:
    """Computes gradients of inputs from gradients of outputs; see `TrainableExecutable.vjp`."""

    def __init__(
        self,
        owner: TrainableExecutable,
        kept: dict[str, Any],
        shapes: dict[str, tuple[int, ...]],
        kind: Any,
        watched: Watched,
    ) -> None:
        self._owner = owner
        self._kept = kept
        self._shapes = shapes
        self._kind = kind
        self._watched = watched

    @property
    def saved(self) -> tuple[Saved, ...]:
        """The saved tensors: as `saved_tensors`, with the shapes and bytes of this call."""
        entries = []
        for s in self._owner.saved_tensors():
            shape = tuple(self._kept[s.name].shape)
            size = 0 if s.role == "shape" else int(np.prod(shape, dtype=np.int64)) * dtypes.get(s.dtype).itemsize
            entries.append(Saved(s.name, s.role, s.dtype, shape, size))
        return tuple(entries)

    def __call__(self, gradients: Any) -> dict[str, Any]:
        """Returns the gradients of the inputs.

        Args:
            gradients: an array like the output; for several outputs a dict by name, omitted ones are zero.

        Raises:
            InvalidArguments, InvalidDataType, InvalidShape: an array does not fit its output.
            InvalidArguments: a saved torch tensor was changed in place since forward.
        """
        self._watched.check("vjp")
        owner = self._owner
        feeds, _, kind = owner._exchange.imported({**self._kept, **self._by_name(gradients)}, {})
        backward = owner._backward_pass()
        like = next(iter(feeds.values()), None)
        for tensor in backward.graph.inputs:
            name = port_name(tensor)
            if name in self._kept:
                continue
            shape = self._shapes[name.removeprefix("d_")]
            if name not in feeds:
                feeds[name] = owner._exchange.zeros(shape, dtypes.get(tensor.dtype).numpy, like)
            check_shape(tuple(getattr(feeds[name], "shape", ())), shape, f'gradient "{name}"')
        wanted = set(backward._ins.names)  # backward takes no gradient for an output that does not depend on wrt
        results = backward._results(backward._ins.bind({n: a for n, a in feeds.items() if n in wanted}, {}))
        kind = self._kind if kind is None else kind
        if kind is not None:
            results = [owner._exchange.exported(array, kind) for array in results]
        return dict(zip(owner.wrt, results))

    def _by_name(self, gradients: Any) -> dict[str, Any]:
        names = list(self._shapes)
        if not isinstance(gradients, Mapping):
            if len(names) > 1:
                raise InvalidArguments(
                    "the graph has several outputs", where="vjp", fix=f"pass a dict with {', '.join(names)}"
                )
            gradients = {names[0]: gradients}
        for name in gradients:
            if name not in self._shapes:
                raise InvalidArguments(
                    f"there is no output {name!r}", where="vjp", fix=f"the outputs are {', '.join(names)}"
                )
        return {f"d_{name}": array for name, array in gradients.items()}

    def __repr__(self) -> str:
        return f"<Pullback: keeps {', '.join(self._kept) or 'nothing'}>"
