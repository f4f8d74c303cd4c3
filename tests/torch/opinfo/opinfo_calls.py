"""Calls of PyTorch's OpInfo database: every op with its arguments, in each form that torch offers."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

#: The dtypes of the sweep. opgraph has no complex and no quantized dtypes.
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an op.

    Attributes:
        form: "call", "method", "operator", "in place", "in place operator" or "out"; "module" of a module.
        source: the source of the arguments, with their number in it.
        args, kwargs: the arguments; `kwargs` holds `out`.
        prepare: OpInfo's function that is applied to the output before it is differentiated.
    """

    form: str
    source: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prepare: Callable[[Any], Any] = lambda output: output


def all_ops() -> list[Any]:
    """The database. (Importing it takes seconds.)"""
    from torch.testing._internal import common_methods_invocations as database

    # Importing the database forbids the whole process to set torch.backends' flags.
    torch.backends.__allow_nonbracketed_mutation_flag = True  # type: ignore[attr-defined]
    # Ops that draw numbers set the seed inside the call, where Dynamo breaks the graph. `run` sets it before a call.
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return list(database.op_db)


def dtypes_of(op: Any) -> list[torch.dtype]:
    """The dtypes of `DTYPES` that the op takes."""
    known = op.supported_dtypes("cpu")
    return [dtype for dtype in DTYPES if dtype in known]


def form_of(op: Any, form: str) -> Callable[..., Any] | None:
    """The op's function in one of its forms; None where torch does not offer it."""
    found = {
        "call": op.op,
        "out": op.op if op.supports_out else None,
        "method": op.method_variant,
        "operator": op.operator_variant,
        "in place": op.inplace_variant,
        "in place operator": op.inplace_operator_variant,
    }[form]
    return found if callable(found) else None


#: Sources of inputs without gradients, and of those with gradients. "strided" inputs have gaps in memory.
FORWARD, GRADIENTS = ("sample", "reference", "strided"), ("sample", "strided")
#: Inputs without gaps whose first axis is the last one in memory.
TURNED = ("turned",)
#: Inputs with an axis expanded from one element, and channels-last images and volumes.
SPREAD = ("spread", "channels last")
#: Several inputs could require a gradient, and only one does: the first one, the last one.
PARTLY = ("first alone", "last alone")


def forward_calls(
    op: Any, dtype: torch.dtype, most: int | None = None, sources: tuple[str, ...] = FORWARD
) -> Iterator[Call]:
    """Calls without gradients: in all forms, on sample and reference inputs, contiguous and not.

    Args:
        most: the maximum number of inputs from each source; None for all.
    """
    for sample, source in _samples(op, dtype, most, sources):
        yield _call("call", source, sample)
        if source.startswith("reference"):
            continue
        for form in ("method", "operator", "in place", "in place operator"):
            if form_of(op, form) is not None and not (form.startswith("in place") and sample.broadcasts_input):
                yield _call(form, source, sample)
        if op.supports_out:
            given = _with_out(op, sample)
            if given is not None:
                yield dataclasses.replace(_call("out", source, sample), kwargs=given)


def gradient_calls(
    op: Any, dtype: torch.dtype, most: int | None = None, sources: tuple[str, ...] = GRADIENTS
) -> Iterator[Call]:
    """Calls whose results are differentiated."""
    if not op.supports_autograd or dtype not in op.supported_backward_dtypes("cpu"):
        return
    for sample, source in _samples(op, dtype, most, sources, requires_grad=True):
        yield _call("call", source, sample)
        if op.inplace_variant is not None and op.supports_inplace_autograd and not sample.broadcasts_input:
            yield _call("in place", source, sample)


def second_calls(op: Any, most: int | None = None) -> Iterator[Call]:
    """Calls in float64 whose gradients are differentiated."""
    if not op.supports_gradgrad or torch.float64 not in op.supported_backward_dtypes("cpu"):
        return
    for sample, source in _samples(op, torch.float64, most, ("sample",), requires_grad=True):
        yield _call("call", source, sample)


def wrong_calls(op: Any) -> Iterator[Call]:
    """Calls that torch refuses."""
    if op.error_inputs_func is not None:
        for index, error in enumerate(op.error_inputs("cpu")):
            yield _call("call", f"error {index}", error.sample_input)


def mapped(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A value with `function` applied to every tensor in it, also inside lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(function, v) for v in value))
    if type(value) in (list, tuple):
        return type(value)(mapped(function, v) for v in value)
    if type(value) is dict:
        return {name: mapped(function, v) for name, v in value.items()}
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, in order."""
    found: list[torch.Tensor] = []
    mapped(found.append, value)
    return found


def seed() -> None:
    """Sets all random seeds to 0. (`torch.manual_seed` records a stack trace for GPUs, which takes 10 ms.)"""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)


def distinct(calls: Iterable[Call]) -> list[Call]:
    """The calls without those that differ from an earlier one only in the values of tensors.

    Values are compared by the presence of NaN, infinite, zero and negative ones, and by the range of magnitudes.
    """
    found: dict[Any, Call] = {}
    for call in calls:
        found.setdefault((call.form, _signature(call.args), _signature(call.kwargs)), call)
    return list(found.values())


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type != "cpu":
            return value.dtype, value.device, value.layout, tuple(value.shape), value.requires_grad
        looks = value.dtype, tuple(value.shape), value.stride(), value.requires_grad, value.is_neg(), value.is_conj()
        return *looks, _range(value.detach())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *(_signature(v) for v in value)
    if isinstance(value, dict):
        return tuple((name, _signature(v)) for name, v in value.items())
    return type(value).__name__, repr(value)


def _range(tensor: torch.Tensor) -> tuple[Any, ...]:
    wide = tensor.resolve_neg().resolve_conj().to(torch.complex128 if tensor.is_complex() else torch.float64)
    x = np.asarray(wide.flatten())  # NumPy arrays have at most 64 dimensions
    size = np.abs(x)
    known = size[np.isfinite(size) & (size > 0)]
    powers = (int(np.log2(known.min())) // 8, int(np.log2(known.max())) // 8) if known.size else ()
    return bool(np.isnan(x).any()), bool(np.isinf(x).any()), bool((size == 0).any()), bool((x.real < 0).any()), powers


def _samples(
    op: Any, dtype: torch.dtype, most: int | None, sources: tuple[str, ...], requires_grad: bool = False
) -> Iterator[tuple[Any, str]]:
    for source in sources:
        if source == "reference" and op.reference_inputs_func is None:
            continue
        make = op.reference_inputs if source == "reference" else op.sample_inputs
        seed()
        try:
            made = make("cpu", dtype, requires_grad=requires_grad)
            if source in _LAYOUTS:
                takes = _LAYOUTS[source][0]
                made = (sample for sample in made if any(map(takes, _tensors_of(sample))))
            if source in PARTLY:
                made = (sample for sample in made if sum(t.requires_grad for t in _tensors_of(sample)) > 1)
            for index, sample in enumerate(itertools.islice(made, most)):
                strided = all(t.layout is torch.strided for t in _tensors_of(sample))
                if source == "strided" and strided:
                    sample = _as(sample, sample.noncontiguous(), requires_grad)
                elif source in _LAYOUTS:
                    sample = _as(sample, sample.transform(_LAYOUTS[source][1]), requires_grad)
                elif source in PARTLY:
                    sample = _alone(sample, -PARTLY.index(source))
                if strided or source not in ("strided", *_LAYOUTS):
                    yield sample, f"{source} {index}"
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
            return  # the database has no inputs of this dtype


def _tensors_of(sample: Any) -> list[torch.Tensor]:
    return tensors_in((sample.input, sample.args, sample.kwargs))


def _as(sample: Any, found: Any, requires_grad: bool) -> Any:
    """Another form of a sample. Its tensors require gradients where those of the sample do."""
    if requires_grad:
        for old, new in zip(_tensors_of(sample), _tensors_of(found), strict=True):
            new.requires_grad_(old.requires_grad)
    return found


def _alone(sample: Any, index: int) -> Any:
    """A sample in which only one of the tensors that require a gradient keeps it.

    Args:
        index: the index among these tensors.
    """
    kept = [t for t in _tensors_of(sample) if t.requires_grad][index]
    return sample.transform(lambda x: x.detach() if isinstance(x, torch.Tensor) and x is not kept else x)


def _turns(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and sum(size > 1 for size in tensor.shape) > 1


def _turned(value: Any) -> Any:
    """A tensor whose first axis is the last one in memory; anything else unchanged."""
    if not isinstance(value, torch.Tensor) or not _turns(value):
        return value
    first = next(axis for axis, size in enumerate(value.shape) if size > 1)
    return value.detach().movedim(first, -1).contiguous().movedim(-1, first)


def _spread(value: Any) -> Any:
    """A tensor expanded from its first element along the first axis; anything else unchanged."""
    if not isinstance(value, torch.Tensor) or not _turns(value):
        return value
    first = next(axis for axis, size in enumerate(value.shape) if size > 1)
    return value.detach().narrow(first, 0, 1).clone().expand(value.shape)


def _has_channels(tensor: torch.Tensor) -> bool:
    return _turns(tensor) and tensor.dim() in _CHANNELS_LAST


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _with_channels_last(value: Any) -> Any:
    """A channels-last tensor of images or volumes; anything else unchanged."""
    if not isinstance(value, torch.Tensor) or not _has_channels(value):
        return value
    return value.detach().clone(memory_format=_CHANNELS_LAST[value.dim()])


#: For each source: the tensors that get another layout, and the function that gives it to them.
_LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], bool], Callable[[Any], Any]]] = {
    "turned": (_turns, _turned),
    "spread": (_turns, _spread),
    "channels last": (_has_channels, _with_channels_last),
}


def _call(form: str, source: str, sample: Any) -> Call:
    return Call(form, source, (sample.input, *sample.args), dict(sample.kwargs), sample.output_process_fn_grad)


def _with_out(op: Any, sample: Any) -> dict[str, Any] | None:
    try:
        seed()
        made = op.op(sample.input, *sample.args, **sample.kwargs)
    except Exception:  # torch raises this again when the call itself is judged
        return None
    if not tensors_in(made):
        return None
    out = mapped(lambda t: torch.zeros_like(t.detach()), made)
    return {**sample.kwargs, "out": tuple(out) if isinstance(made, tuple) else out}
