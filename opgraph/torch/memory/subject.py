"""The subject of `opgraph memory`, made from an object in a Python file: an activation alone, or inside a network."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes
from opgraph.runtime.providers.torch_dtypes import TORCH_DTYPES
from opgraph.runtime.providers.torch_internals import FakeTensorMode
from opgraph.torch import zoo
from opgraph.torch.fuse import fuse
from opgraph.torch.memory.measure import saved_tensors
from opgraph.torch.memory.report import MemoryReport
from opgraph.torch.tracing.trace import parameter_names, trace
from opgraph.transforms.saved import TrainingPlan, training_plan


def measured(
    subject: Callable[..., Any], shapes: Sequence[Sequence[int]], dtype: str, *, needs_grad: bool, dry_run: bool
) -> MemoryReport:
    """The report on a module or function called with random inputs.

    Args:
        shapes: the shapes of the inputs.
        dtype: the dtype of the inputs and of the module's parameters, by opgraph's name.
        needs_grad: True if the inputs require a gradient, as they do inside a network.
    """
    if isinstance(subject, torch.nn.Module):
        subject = subject.to(TORCH_DTYPES[dtype])
    with FakeTensorMode() if dry_run else nullcontext():  # a batch may be larger than the memory
        inputs = [torch.randn(tuple(shape), dtype=TORCH_DTYPES[dtype], requires_grad=needs_grad) for shape in shapes]
    return saved_tensors(subject, *inputs, dry_run=dry_run)


def plan_of(
    subject: Callable[..., Any], shapes: Sequence[Sequence[int]], dtype: str
) -> tuple[TrainingPlan, dict[str, int]]:
    """The plan of the tensors that opgraph would keep if it fused a function or a module's forward; and the sizes of
    its symbolic dimensions.

    Raises:
        OpGraphError: it cannot be traced, or an op has no gradient; the message names the op and its place.
    """
    if isinstance(subject, torch.nn.Module):
        subject = subject.to(TORCH_DTYPES[dtype]).forward
    with FakeTensorMode():
        inputs = [torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype]) for shape in shapes]
    graph = trace(subject, *inputs).graph
    floats = [t.name for t in graph.inputs if t.name is not None and t.dtype in dtypes.FLOATS]
    names = dict(zip(parameter_names(subject), shapes, strict=False))
    extents = {
        dim: size
        for tensor in graph.inputs
        for dim, size in zip(tensor.dims or (), names.get(tensor.name or "", ()), strict=False)
        if isinstance(dim, str)
    }
    return training_plan(graph, floats), extents


def fused(subject: Callable[..., Any]) -> Callable[..., Any]:
    """A fused function, or a fused copy of a module."""
    made: Callable[..., Any] = fuse(copy.deepcopy(subject) if isinstance(subject, torch.nn.Module) else subject)
    return made


def instance(thing: object, name: str) -> Callable[..., Any]:
    """Makes a module from a class of modules; returns a module or function unchanged.

    Raises:
        InvalidArguments: neither, or a class whose constructor needs arguments.
    """
    if not isinstance(thing, type):
        if callable(thing):
            return thing
        raise InvalidArguments(
            f"{name} is of type {type(thing).__name__}",
            where=name,
            fix="name a module, a class of modules or a function",
        )
    if not issubclass(thing, torch.nn.Module):
        raise InvalidArguments(
            f"{name} is a class, but not of modules",
            where=name,
            fix="derive it from torch.nn.Module, or name a function",
        )
    wanted = [
        p.name
        for p in inspect.signature(thing).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if wanted:
        raise InvalidArguments(
            f"the constructor of {name} takes arguments: {', '.join(wanted)}",
            where=name,
            fix=f"give them defaults, or write `made = {thing.__name__}(...)` into the file and name `made`",
        )
    made: Callable[..., Any] = thing()
    return made


def network(model: str, activation: object | None, name: str) -> torch.nn.Module:
    """A network of `zoo` with an activation at every place where it has one.

    Args:
        model: a key of `zoo.MODELS`.
        activation: as for `instance`; None for the network's own.

    Raises:
        InvalidArguments: as `instance`.
    """
    if activation is None:
        return zoo.MODELS[model]()
    first = instance(activation, name)
    if isinstance(activation, type):
        return zoo.MODELS[model](lambda: instance(activation, name))
    if isinstance(first, torch.nn.Module):
        return zoo.MODELS[model](lambda: copy.deepcopy(first))
    return zoo.MODELS[model](_module_class(first))


def _module_class(function: Callable[..., Any]) -> type[torch.nn.Module]:
    """A class of modules that call a function; its name is the function's, for the report."""

    def forward(self: torch.nn.Module, *args: Any) -> Any:
        return function(*args)

    return type(getattr(function, "__name__", "Function"), (torch.nn.Module,), {"forward": forward})
