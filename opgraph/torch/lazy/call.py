"""What a call of a torch function is to a lazy run: arithmetic that can wait, something that writes, or anything else.

Which dtype a call results in, and what autocast does to its operands, is torch's own answer: the same call on tensors
of one element, on the device and under the autocast that hold, once for each combination of dtypes and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from opgraph.runtime.bounded import Bounded
from opgraph.runtime.providers.torch_dtypes import NAMES
from opgraph.torch.lazy.node import Spec
from opgraph.torch.tracing.calls import Found, table
from opgraph.torch.tracing.expansions import CONVERSIONS
from opgraph.torch.writes import gives_memory, writes

#: Numbers that differ from call to call would mean a kernel for each; after this many a call is left to torch.
MAX_NUMBERS = 16
_MAX_KNOWN = 4096

#: Stands for a tensor among arguments.
TENSOR = object()
#: What a torch function is: a conversion, a question, a call that writes, now or later; the arithmetic is in `table()`.
CAST, READS, WRITES = "cast", "reads", "writes"

_CASTS: dict[Any, torch.dtype | None] = {
    torch.Tensor.to: None,
    torch.Tensor.type_as: None,
    **{getattr(torch.Tensor, name): dtype for name, dtype in CONVERSIONS.items()},
}


def _rpow(x: Any, other: Any) -> Any:
    return torch.pow(other, x)


def _rdiv(x: Any, other: Any) -> Any:
    return torch.reciprocal(x) * other  # as torch


def _rmod(x: Any, other: Any) -> Any:
    return torch.remainder(other, x)


_REFLECTED: dict[Any, Any] = {
    torch.Tensor.__rsub__: torch.rsub,
    torch.Tensor.__rpow__: _rpow,
    torch.Tensor.__rdiv__: _rdiv,
    torch.Tensor.__rmod__: _rmod,
}
_kinds: Bounded[Any, Found | str] = Bounded(_MAX_KNOWN)


def kind_of(func: Callable[..., Any]) -> Found | str:
    """What a torch function is: its entry in the table, or CAST, READS or WRITES."""
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = _classified(func)
    return kind


def _classified(func: Any) -> Found | str:
    if func in _CASTS:
        return CAST
    if func in _REFLECTED:
        return _reflected()[func]
    found = table().get(func)
    if found is not None and getattr(func, "__name__", "") != "prelu":  # whose weight does not broadcast as others do
        return found
    return WRITES if writes(func) or gives_memory(func) else READS


@lru_cache(maxsize=1)
def _reflected() -> dict[Any, Found]:
    parameters = (("input", None), ("other", None))
    any_call = next(iter(table().values())).call
    return {func: Found(any_call, None, parameters, functional, False) for func, functional in _REFLECTED.items()}


def cast_dtype(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that a call of a CAST function converts to; None where it does anything else as well."""
    known = _CASTS[func]
    if known is not None:
        return known if len(args) == 1 and not kwargs else None
    given = args[1] if len(args) == 2 and not kwargs else kwargs.get("dtype") if len(args) == len(kwargs) == 1 else None
    if isinstance(given, torch.dtype):
        return given
    if isinstance(given, torch.Tensor) and given.device == args[0].device:
        return given.dtype
    return None


def to_dtype(dtype: torch.dtype, source: torch.dtype) -> Spec | None:
    """The conversion; None where opgraph does not have one of the dtypes."""
    return _to_dtype(dtype, source) if dtype in NAMES and source in NAMES else None


@lru_cache(maxsize=256)
def _to_dtype(dtype: torch.dtype, source: torch.dtype) -> Spec:
    # One for each source, as kernels are found by their specs: what is converted may be what a kernel reads first.
    return Spec("to", torch.Tensor.to, ((True, None), (False, dtype)), (), dtype, None)


def in_place(spec: Spec, func: Callable[..., Any]) -> Spec | None:
    """The same call as it was made, in place; None where autocast converts its operands."""
    if spec.cast is not None:
        return None
    named = spec.named if func.__name__.endswith("_") else (*spec.named, ("inplace", False, True))
    return replace(spec, func=func, named=named)


class Specs:
    """The specs of a process, by what tells calls apart."""

    def __init__(self) -> None:
        self._known: Bounded[Hashable, Spec | str] = Bounded(_MAX_KNOWN)
        self._numbers: Bounded[Hashable, int] = Bounded(_MAX_KNOWN)

    def find(
        self,
        found: Found,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        marks: tuple[tuple[Any, ...], ...],
        device: torch.device,
    ) -> Spec | str:
        """The spec of a call, or why it cannot wait.

        Args:
            args, kwargs: with TENSOR in the place of each tensor.
            marks: of each argument in turn: (TENSOR, dtype, rank), or its type and value.
        """
        auto = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        names = tuple(kwargs)
        key = (func, marks, names, device.type, auto, torch.get_default_dtype())
        known = self._known.get(key)
        if known is None:
            general = (func, tuple([m[0] if m[0] in (float, int) else m for m in marks]), names, device.type, auto)
            self._numbers[general] = self._numbers.get(general, 0) + 1
            if self._numbers[general] > MAX_NUMBERS:
                return "its number changes from call to call"
            known = self._known[key] = _forecast(found, func, args, kwargs, marks, device)
        return known


def _forecast(
    found: Found,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    marks: tuple[tuple[Any, ...], ...],
    device: torch.device,
) -> Spec | str:
    tensors = [m for m in marks if m[0] is TENSOR]
    if any(dtype not in NAMES for _, dtype, _ in tensors):
        return "opgraph has no such dtype"
    places = tuple((a is TENSOR, None if a is TENSOR else a) for a in args)
    named = tuple((n, a is TENSOR, None if a is TENSOR else a) for n, a in kwargs.items())
    name = getattr(found.functional, "__name__", "")
    call = Spec(name, found.functional, places, named, torch.float32, None)
    rank = max(rank for _, _, rank in tensors)
    try:
        found.bind(args, kwargs)
        with _disable_current_modes(), torch.no_grad():
            samples = [torch.ones((1,) * rank, dtype=dtype, device=device) for _, dtype, rank in tensors]
            result = call(samples)
            with torch.autocast(device.type, enabled=False):
                plain = call(samples)
            if found.inplace:
                replace(call, func=func)(samples)  # which dtypes it writes into
    except Exception:  # torch will say it better, when the call itself runs
        return "torch runs it in another way"
    if type(result) is not torch.Tensor or result.dim() != rank or result.dtype not in NAMES:
        return "it is another overload"
    cast = result.dtype if result.dtype != plain.dtype else None
    return Spec(name, found.functional, places, named, result.dtype, cast)


SPECS = Specs()
