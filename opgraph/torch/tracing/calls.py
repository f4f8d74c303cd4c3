"""Which op, or composition of ops, a torch function means: the records' spellings by function object."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from opgraph.ir.opdef import OpDef, TorchCall, all_ops
from opgraph.runtime.providers.torch_internals import nn_functions
from opgraph.torch.tracing import trace_errors
from opgraph.torch.tracing.compositions import COMPOSITIONS
from opgraph.torch.tracing.proxy import OPERATORS

_SIGNATURE = re.compile(r"(?P<space>Tensor\.)?(?P<names>[\w|]+)\((?P<parameters>.*)\)")
_SPACES = (torch, torch.Tensor, torch.nn.functional, torch.special, nn_functions)
#: The default of a parameter that has none.
REQUIRED = object()
_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


@dataclass(frozen=True, slots=True)
class Found:
    """What a torch function means.

    Attributes:
        call: its spelling.
        record: the record that it is from; None for compositions.
        parameters: names and defaults.
        functional: the same function without the trailing underscore.
        inplace: whether it writes into its first argument.
    """

    call: TorchCall
    record: OpDef | None
    parameters: tuple[tuple[str, Any], ...]
    functional: Callable[..., Any]
    inplace: bool

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The values of the parameters.

        Raises:
            Unimplemented: this is another overload of the function.
        """
        names = [name for name, _ in self.parameters]
        bound = dict(zip(names, args, strict=False))
        if len(args) > len(names) or not kwargs.keys() <= set(names) - bound.keys():
            raise self.other_overload()
        bound.update(kwargs)
        for name, default in self.parameters:
            if name not in bound:
                if default is REQUIRED:
                    raise self.other_overload()
                bound[name] = default
        return bound

    def other_overload(self) -> Exception:
        """What is raised for a call that is not the pointwise one."""
        name = self.functional.__name__
        return trace_errors.unknown(
            name, f"only {self.call.signature} is pointwise", "call it so, or outside of the fused function"
        )

    def form(self, values: dict[str, Any], dtype: str, exact: bool) -> str:
        """What it means for these values; "" where opgraph has nothing."""
        if self.call.keeps_integers and dtype not in ("f64", "f32", "bf16", "f16"):
            return f"Identity({self.parameters[0][0]})"
        form = self.call.exact if exact and self.call.exact is not None else self.call.form
        if callable(form):
            return form({**values, "dtype": dtype, "torch": _VERSION})
        if form is not None:
            return form
        assert self.record is not None
        inputs = sum(not p.optional for p in self.record.inputs)
        return f"{self.record.kind}({', '.join(name for name, _ in self.parameters[:inputs])})"


@lru_cache(maxsize=1)
def table() -> dict[Any, Found]:
    """Every torch function that opgraph knows."""
    found: dict[Any, Found] = {}
    # What is said of a method alone counts before what is said of the function and the method.
    for record, call in sorted(_spellings(), key=lambda s: not s[1].signature.startswith("Tensor.")):
        for func, inplace, functional, parameters in _functions(call):
            found.setdefault(func, Found(call, record, parameters, functional, inplace))
    for name, func in OPERATORS.items():
        found[getattr(torch.Tensor, name)] = found[func]
    return found


def _spellings() -> Iterator[tuple[OpDef | None, TorchCall]]:
    for record in all_ops():
        yield from ((record, call) for call in record.torch_calls)
    yield from ((None, call) for call in COMPOSITIONS)


def _functions(call: TorchCall) -> Iterator[tuple[Any, bool, Any, tuple[tuple[str, Any], ...]]]:
    match = _SIGNATURE.fullmatch(call.signature)
    if match is None:
        raise ValueError(f"{call.signature!r} is no signature")
    parameters = tuple(_parameter(text) for text in match["parameters"].split(", "))
    for name in match["names"].split("|"):
        spaces = (torch.Tensor,) if match["space"] else _SPACES
        plain = [getattr(space, name) for space in spaces if hasattr(space, name)]
        if not plain:
            continue  # an older torch
        yield from ((func, False, plain[0], parameters) for func in plain)
        changing = [getattr(space, name + "_") for space in spaces if hasattr(space, name + "_")]
        yield from ((func, True, plain[0], parameters) for func in changing)


def _parameter(text: str) -> tuple[str, Any]:
    name, _, default = text.partition("=")
    return name, _literal(default) if default else REQUIRED


def _literal(text: str) -> Any:
    known = {"None": None, "True": True, "False": False}
    if text in known:
        return known[text]
    if text.startswith("'"):
        return text.strip("'")
    return int(text) if text.lstrip("-").isdigit() else float(text)


table()  # while torch's functions are torch's: somebody may put others in their places later
