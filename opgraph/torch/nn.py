"""Activations as modules, each one kernel forward and one backward: Swish, SwiGLU, and any function of torch ops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from opgraph.errors import InvalidArguments, InvalidShape
from opgraph.ir.logical_tensor import port_name
from opgraph.runtime.compile_graph import compile
from opgraph.runtime.providers.torch_internals import clones_saved_tensors, is_transformed
from opgraph.torch.fuse import fuse
from opgraph.torch.fused.autograd import Trained
from opgraph.torch.fused.op import DEVICES, FusedOp
from opgraph.torch.tracing.guard_discovery import written
from opgraph.torch.tracing.session import memory_key
from opgraph.torch.tracing.trace import Output


class _Pointwise(nn.Module):
    """A module with a formula, which this class fuses and runs."""

    inplace = False
    _rounding = "store"

    def _formula(self) -> Callable[..., torch.Tensor]:
        """A function of tensors, to be fused."""
        raise NotImplementedError

    def _run(self, *tensors: torch.Tensor) -> torch.Tensor:
        if is_transformed():
            formula, x = self._formula(), tensors[0]
            return x.copy_(formula(x.clone(), *tensors[1:])) if self.inplace else formula(*tensors)
        fused: Any = self.__dict__.get("_fused")
        if fused is None:
            fused = self.__dict__["_fused"] = fuse(self._formula(), rounding=self._rounding)
        if not self.inplace:
            return fused(*tensors)  # type: ignore[no-any-return]
        return overwrite(fused, *tensors)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training":
            self.__dict__.pop("_fused", None)  # the formula may read it
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_fused"}


class Swish(_Pointwise):
    """x * sigmoid(alpha * x), elementwise. Saves only x for backward, and alpha, which exists anyway.

    Args:
        alpha: its (initial) value.
        trainable: True if it is a parameter, `alpha` in the state_dict.
        num_parameters: 1, or the size of dimension 1 of the inputs for one alpha per channel, as in nn.PReLU.
        inplace: the result is written into the input. Without gradients that allocates nothing. With gradients a copy
            of the input is saved for backward (two inputs have the same swish, so the result is not enough), so that no
            memory is saved; nn.SiLU(inplace=True) does the same.

    Shapes: any; [N, C, ...] with num_parameters = C > 1. Dtypes: floats; the result has that of x. Integers give
    floats. A trainable alpha keeps its own dtype; the kernel computes in the wider of the dtypes of x and alpha.

    Raises:
        InvalidArguments: several alphas that are not trainable; an alpha that is no number; when called, another number
            of channels.

    Source: Ramachandran, Zoph, Le 2017 (arXiv:1710.05941); ONNX Swish-24 has the same alpha.
    """

    def __init__(
        self, alpha: float = 1.0, trainable: bool = False, num_parameters: int = 1, inplace: bool = False
    ) -> None:
        super().__init__()
        alpha = _number(alpha, "Swish", "alpha")
        _check_whole(num_parameters, "Swish", "num_parameters")
        if num_parameters < 1 or (num_parameters > 1 and not trainable):
            raise InvalidArguments(
                f"num_parameters={num_parameters} with trainable={trainable}",
                where="Swish",
                fix="give trainable=True for one alpha per channel",
            )
        self.trainable = trainable
        self.num_parameters = num_parameters
        self.inplace = inplace
        self.alpha: float | nn.Parameter
        if trainable:
            self.alpha = nn.Parameter(torch.full((num_parameters,), alpha))
        else:
            self.alpha = alpha

    def _formula(self) -> Callable[..., torch.Tensor]:
        alpha = self.alpha
        if isinstance(alpha, torch.Tensor):
            return _swish
        return lambda x: x * torch.sigmoid(alpha * x) if alpha != 1.0 else x * torch.sigmoid(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The swish of x, of the same shape and dtype."""
        alpha = self.alpha
        if not isinstance(alpha, torch.Tensor):
            return self._run(x)
        if self.num_parameters > 1:
            if x.dim() < 2 or x.shape[1] != self.num_parameters:
                raise InvalidArguments(
                    f"got {tuple(x.shape)} for {self.num_parameters} channels",
                    where="Swish",
                    fix="dimension 1 of the input must have num_parameters entries",
                )
            return self._run(x, alpha.view(-1, *[1] * (x.dim() - 2)))
        return self._run(x, alpha if x.dim() else alpha.view(()))

    def extra_repr(self) -> str:
        """For print."""
        trained = isinstance(self.alpha, torch.Tensor)
        shown = f"num_parameters={self.num_parameters}, trainable=True" if trained else f"alpha={self.alpha}"
        return shown + (", inplace=True" if self.inplace else "")


def _swish(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    y = x * torch.sigmoid(alpha * x)
    return y.to(x.dtype) if x.is_floating_point() or x.is_complex() else y


class SwiGLU(_Pointwise):
    """swish(gate) * up, where gate and up are the halves of one tensor, read in place, or two tensors.

    Args:
        dim: the dimension that is cut in two.
        gate: "first": the first half is the gate, as in the gate_up_proj of Llama-like models and in ONNX models made
            from them; "second": the second half, as in torch's F.glu.
        alpha: the alpha of the swish.
        limit: if given, the gate is clamped above it, and up outside [-limit, limit].
        offset: added to up (1.0 in the clamped form of gpt-oss, with alpha=1.702, limit=7.0).

    Shapes: [..., 2 n, ...] -> [..., n, ...], or two of [..., n, ...]. Dtypes: floats. Saves only its input.

    Raises:
        InvalidArguments: another `gate`, a value that is no number; when called, an odd size.
        InvalidShape: when called, a tensor without dimension `dim`.

    Source: Shazeer 2020, GLU Variants Improve Transformer (arXiv:2002.05202).
    """

    def __init__(
        self,
        dim: int = -1,
        gate: str = "first",
        alpha: float = 1.0,
        limit: float | None = None,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        if gate not in ("first", "second"):
            raise InvalidArguments(f"there is no gate {gate!r}", where="SwiGLU", fix='use "first" or "second"')
        _check_whole(dim, "SwiGLU", "dim")
        self.dim, self.gate = dim, gate
        self.alpha = _number(alpha, "SwiGLU", "alpha")
        self.limit = None if limit is None else _number(limit, "SwiGLU", "limit")
        self.offset = _number(offset, "SwiGLU", "offset")

    def _formula(self) -> Callable[..., torch.Tensor]:
        alpha, limit, offset = self.alpha, self.limit, self.offset

        def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            if limit is not None:
                gate = gate.clamp(max=limit)
                up = up.clamp(-limit, limit)
            if offset:
                up = up + offset
            return gate * torch.sigmoid(alpha * gate if alpha != 1.0 else gate) * up

        return swiglu

    def forward(self, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """The SwiGLU of x, or of `x` as the gate and `up`."""
        if up is not None:
            return self._run(x, up)
        if not -x.dim() <= self.dim < x.dim():
            raise InvalidShape(
                f"{tuple(x.shape)} has no dimension {self.dim}",
                where="SwiGLU",
                fix="give a dim of the input, or gate and up as two tensors",
            )
        if x.shape[self.dim] % 2:
            raise InvalidArguments(
                f"dimension {self.dim} of {tuple(x.shape)} cannot be cut in two",
                where="SwiGLU",
                fix="give an even size, or gate and up as two tensors",
            )
        first, second = x.chunk(2, self.dim)
        return self._run(first, second) if self.gate == "first" else self._run(second, first)

    def extra_repr(self) -> str:
        """For print."""
        shown = [f"dim={self.dim}", f"gate={self.gate!r}"]
        shown += [f"alpha={self.alpha}"] if self.alpha != 1.0 else []
        shown += [f"limit={self.limit}"] if self.limit is not None else []
        return ", ".join(shown + ([f"offset={self.offset}"] if self.offset else []))


class Activation(_Pointwise):
    """`fn(x, **params)` with trainable parameters.

    Args:
        fn: a function of torch ops, pointwise in x (as for `fuse`); plain, or fused already.
        inplace: the result is written into x; see `overwrite` for the memory that this saves.
        params: the initial values by name: a number (a 0-d parameter) or a tensor. They are in the state_dict under
            these names.

    Example: `Activation(lambda x, a: x * torch.sigmoid(a * x), a=1.0)`.

    Raises:
        InvalidArguments: a name that modules use themselves, or that is no parameter of the function; a missing
            parameter; a value that is neither a number nor a float tensor.
    """

    def __init__(
        self, fn: Callable[..., torch.Tensor], *, inplace: bool = False, **params: float | torch.Tensor
    ) -> None:
        super().__init__()
        _check_names(fn, params)
        self.fn = fn
        self._rounding = getattr(fn, "rounding", "store")  # of a fused function
        self.inplace = inplace
        self._names = tuple(params)
        for name, value in params.items():
            if hasattr(self, name):
                raise InvalidArguments(
                    f"a parameter cannot be called {name!r}", where="Activation", fix="rename it: modules use that name"
                )
            self.register_parameter(name, nn.Parameter(_first_value(name, value)))

    def _formula(self) -> Callable[..., torch.Tensor]:
        fn, names = written(self.fn), self._names
        return lambda x, *values: fn(x, **dict(zip(names, values, strict=True)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """fn(x, **params)."""
        return self._run(x, *[getattr(self, name) for name in self._names])

    def extra_repr(self) -> str:
        """For print."""
        shown = [getattr(self.fn, "__name__", type(self.fn).__name__)]
        for name in self._names:
            value = getattr(self, name)
            shown.append(f"{name}={value.item():g}" if value.dim() == 0 else f"{name}={tuple(value.shape)}")
        return ", ".join(shown + (["inplace=True"] if self.inplace else []))


def _number(value: Any, where: str, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _odd(value, where, name, "a number") from None


def _check_whole(value: Any, where: str, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _odd(value, where, name, "a whole number")


def _odd(value: Any, where: str, name: str, wanted: str) -> InvalidArguments:
    return InvalidArguments(f"{name} is {value!r}", where=where, fix=f"give {wanted}")


def _check_names(fn: Callable[..., torch.Tensor], params: Iterable[str]) -> None:
    try:
        inspect.signature(fn).bind(None, **dict.fromkeys(params))
    except ValueError:  # a C function without a signature
        return
    except TypeError as error:
        name = getattr(fn, "__name__", "fn")
        raise InvalidArguments(
            f"{name} cannot be called with x and {', '.join(params) or 'nothing else'}: {error}",
            where="Activation",
            fix="give each parameter of the function, but its first one, a first value by its name",
        ) from None


def _first_value(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(float(value))
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone()
    kind = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
    raise InvalidArguments(f"{name} is {kind}", where="Activation", fix="give a number or a float tensor")


def overwrite(fused: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Writes the values of `fused(x, *others)` into x; returns x.

    It behaves like `x.relu_()` in torch: x has the result afterwards, for all references to x, and autograd records it.
    - Without gradients the kernel writes into x. Nothing is allocated.
    - With gradients, if the result is enough for the backward pass (ReLU, LeakyReLU, Elu, Tanh, Sigmoid ...): the same,
      and the result is saved.
    - With gradients that need x itself (Swish and most others): a copy of x is saved, as in torch's silu(inplace=True).

    Args:
        fused: a function made by `fuse`; its result has the shape and dtype of x.

    Raises:
        InvalidArguments: x is a parameter (or another leaf that requires a gradient), while gradients are recorded.
        RuntimeError: torch does not allow writes into x: it shares memory with itself, or its shape or dtype differ.
    """
    grad = torch.is_grad_enabled()
    if grad and x.requires_grad and x.is_leaf:
        raise InvalidArguments(
            "a leaf that requires a gradient cannot be overwritten",
            where="inplace=True",
            fix="use inplace=False, or call it under torch.no_grad()",
        )
    needs = grad and any(t.requires_grad for t in (x, *others))
    # Fake tensors and subclasses have no memory for a kernel.
    has_memory = x.device.type in DEVICES and all(type(t) in (torch.Tensor, nn.Parameter) for t in (x, *others))
    if has_memory and not clones_saved_tensors() and (not needs or not x._is_view()):
        run = fused.tracer((x, *others), {})
        place = next((i for i, t in enumerate(run.tensors) if t is x), None)
        shares = any(t is not x and memory_key(t) == memory_key(x) for t in run.tensors)
        if place is not None and not shares and _fits(run.traced, place, x):
            op = fused.opened(run).traced.op
            if not needs:
                _written(op, op.graph, run.tensors, place)
                return x
            training = op.training(tuple([t.requires_grad for t in run.tensors]))
            if place not in training.kept and len(training.forward.outputs) == 1:

                def write(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                    _written(op, training.forward, tensors, place)
                    return (tensors[place],)

                return Trained(training, write, 1, place)(*run.tensors)[0]
    return x.copy_(fused(x.clone(), *others))


def _fits(traced: Any, place: int, x: torch.Tensor) -> bool:
    """True if the only result has the shape and dtype of x, and the memory of x has no gaps or overlaps."""
    if type(traced.outputs) is not Output or len(traced.graph.outputs) != 1:
        return False
    out, own = traced.graph.outputs[0], traced.graph.inputs[place]
    dense = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    return dense and (own.dims, own.dtype) == (out.dims, out.dtype)


def _written(op: FusedOp, graph: Any, tensors: tuple[torch.Tensor, ...], place: int) -> None:
    device = tensors[place].device
    run = op.cached(("overwrite", id(graph), device), lambda: compile(graph, device=str(device), rounding=op.rounding))
    target = tensors[place].detach()
    given = [target if t is tensors[place] else t.detach() for t in tensors]
    run(dict(zip(map(port_name, graph.inputs), given, strict=True)), out=target)
