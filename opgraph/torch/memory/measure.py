"""`saved_tensors`: measures the tensors that a model or a function keeps for backward, in one run."""

from __future__ import annotations

import logging
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import set_checkpoint_debug_enabled

from opgraph.errors import InvalidArguments, Unimplemented
from opgraph.runtime.providers.torch_dtypes import NAMES
from opgraph.runtime.providers.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    tensors_in,
    tree_iter,
    tree_map_only,
)
from opgraph.torch.fuse_module import compiled_apart
from opgraph.torch.graph.program_text import watched_by
from opgraph.torch.memory.recomputed import Run, recomputed_ops
from opgraph.torch.memory.report import COSTS, INPUT, MADE, OUTSIDE, WEIGHT, Kept, MemoryReport, Peak, totals_of
from opgraph.torch.memory.saved_recording import Attribute, Packed, Recorder
from opgraph.torch.memory.storage_trace import BACKWARD, Sample, Watch, existing_storages, storage_of
from opgraph.torch.tracing.trace_errors import LIBRARY


def saved_tensors(
    model_or_fn: Callable[..., Any],
    /,
    *inputs: Any,
    dry_run: bool = False,
    after: MemoryReport | None = None,
    **kwargs: Any,
) -> MemoryReport:
    """Measures the tensors kept for backward, one by one, and the memory over one forward and one backward pass.

    The model runs once in each direction. Afterwards its buffers, the gradients of its parameters and the state of
    the random number generators are as before.

    Args:
        model_or_fn: a module, or any function of tensors.
        inputs, kwargs: its arguments; tensors of any shape, dtype and device. If neither they nor the model's
            parameters require a gradient, every floating input is made to require one.
        dry_run: run on shapes alone: nothing large is allocated or computed, so that a batch may be larger than the
            memory. Results of parameters and scalars alone keep their values, and may control branches. Sizes that a
            library chooses only when it runs are unknown: the workspaces of recurrent layers, which `uncounted` of the
            report lists. Fused models are captured anew, and their programs run without kernels: memory is allocated
            and freed as in a real run.
        after: a report on the same model after a change, to be shown next to this one.

    Returns: the report; `print` shows it as tables, `.to_dict()` returns it as data, `.plot(path)` draws it.

    Raises:
        InvalidArguments: neither a module nor a function, or a module with lazy parameters that was not called yet.
        Unimplemented: in a dry run, the forward pass reads the value of a tensor that has none, or an input is a nested
            tensor; or it calls `torch.func.grad` and the like, which reject saved-tensor hooks.

    Source: `torch.autograd.graph.saved_tensors_hooks` for the kept tensors, a dispatch mode for the memory over time.
    """
    if not callable(model_or_fn):
        raise InvalidArguments(
            f"an object of type {type(model_or_fn).__name__} cannot be called",
            where="saved_tensors",
            fix="pass a module or a function, then its inputs",
        )
    return replace(measured(model_or_fn, inputs, kwargs, dry_run=dry_run)[0], after=after)


def measured(
    model_or_fn: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dry_run: bool = False,
    differentiates: bool = True,
) -> tuple[MemoryReport, list[Run]]:
    """The report of `saved_tensors`, and the runs of captured graphs.

    Args:
        differentiates: True if the inputs are made to require gradients where nothing else does.
    """
    label = getattr(model_or_fn, "__name__", type(model_or_fn).__name__)
    if dry_run and any(tensor.is_nested for tensor in tensors_in((inputs, kwargs))):
        raise Unimplemented(
            "a dry run knows shapes, not values, and those of a nested tensor say how long its rows are",
            where=label,
            fix=_REAL_RUN,
        )
    held = model_or_fn if isinstance(model_or_fn, torch.nn.Module) else torch.nn.Module()
    lazy = [name for name, tensor in (*held.named_parameters(), *held.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise InvalidArguments(
            f"lazy parameters have no shape before the first call: {', '.join(lazy)}",
            where=label,
            fix="call the model once, then measure it",
        )
    recorder = Recorder(model_or_fn, label, __file__)
    notes: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(set_checkpoint_debug_enabled(False))  # with it a region can run again once only
        stack.enter_context(_unchanged(model_or_fn, tensors_in((inputs, kwargs))))
        if dry_run:
            # Torch reads the .grad of every real tensor that is an operand next to a fake one, and warns about it.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            stack.enter_context(_quiet())
            stack.enter_context(compiled_apart(model_or_fn))
            fakes = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            inputs, kwargs = tree_map_only(torch.Tensor, fakes.from_tensor, (inputs, kwargs))
        parameters = list(model_or_fn.parameters()) if isinstance(model_or_fn, torch.nn.Module) else []
        force = differentiates and not any(t.requires_grad for t in parameters + tensors_in((inputs, kwargs)))
        if force:
            notes.append("nothing required a gradient: the floating inputs were made to")
        leaf = lru_cache(None)(partial(_leaf, force=force))  # one for a tensor that is given twice
        inputs, kwargs = tree_map_only(torch.Tensor, leaf, (inputs, kwargs))
        given = tensors_in((inputs, kwargs))
        roles = Roles(model_or_fn, given, existing_storages())
        gpu = None if dry_run else next((tensor.device for tensor in parameters + given if tensor.is_cuda), None)
        cuda_before = 0
        if gpu is not None:
            torch.cuda.reset_peak_memory_stats(gpu)
            cuda_before = torch.cuda.memory_allocated(gpu) - roles.input_bytes
        on_meta = any(tensor.is_meta for tensor in parameters + given)
        watch = Watch(roles.existing, recorder, dry_run=dry_run, meta=on_meta)
        watch.bytes = roles.input_bytes
        stack.enter_context(watch)
        stack.enter_context(watched_by(watch))
        with recorder.recording(watch), _with_plain_errors(dry_run, label):
            outputs = model_or_fn(*inputs, **kwargs)
        after_forward = watch.bytes
        with watch.paused():
            leaves = recorder.name_ops(outputs)
        kept, unexplained = kept_entries(recorder, roles, watch, outputs)
        watch.phase = BACKWARD
        gradients, problem = _backward(tensors_in(outputs), leaves)
        notes += problem
        after_backward = watch.bytes
        del gradients
        peak = max(watch.samples, key=lambda sample: sample.bytes, default=Sample("forward", "", "", watch.bytes))
        peak_told = Peak(
            bytes=peak.bytes, phase=peak.phase, module=peak.module, op=peak.op, after_forward=after_forward,
            after_backward=after_backward, unexplained=unexplained,
            cuda=None if gpu is None else torch.cuda.max_memory_allocated(gpu) - cuda_before,
        )  # fmt: skip
    uncounted = tuple(sorted(watch.uncounted))
    if uncounted:
        notes.append(f"on shapes alone the workspaces of {', '.join(uncounted)} are not known: they count nothing here")
    report = MemoryReport(
        subject=label, kept=kept, recomputed=recomputed_ops(watch.runs), totals=totals_of(kept), peak=peak_told,
        timeline=tuple(watch.samples), notes=tuple(notes), uncounted=uncounted,
    )  # fmt: skip
    return report, watch.runs


_REAL_RUN = "measure it on real tensors: saved_tensors(..., dry_run=False), `opgraph memory --run`"


def _backward(outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> tuple[object, list[str]]:
    """Runs the backward pass; returns the gradients, and notes for the user on what prevented them."""
    outputs = [output for output in outputs if output.requires_grad]
    if not leaves:
        return None, ["no output requires a gradient: nothing is kept for backward"]
    try:
        ones = [torch.ones_like(output) for output in outputs]
        return torch.autograd.grad(outputs, leaves, ones, allow_unused=True), []
    except (RuntimeError, NotImplementedError) as error:
        return None, [f"the backward pass failed, so the peak is that of what ran: {error}".splitlines()[0]]


def line_raising(error: BaseException) -> str:
    """The innermost line outside torch and opgraph that an exception passed, as `file:line: text`; else empty."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARY)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _leaf(tensor: torch.Tensor, force: bool) -> torch.Tensor:
    """A leaf with the same memory, detached from the graph that the caller's tensor may belong to."""
    able = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(tensor.requires_grad or (force and able))


@contextmanager
def _unchanged(model: object, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restores buffers and random number generators afterwards."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    named = [(module._buffers, dict(module._buffers)) for module in modules]
    buffers = list({buffer: None for module in modules for buffer in module.buffers(recurse=False)})
    saved = [(buffer, _unexpanded(buffer).detach().clone()) for buffer in buffers]
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    devices = sorted({tensor.device.index for tensor in (*parameters, *buffers, *inputs) if tensor.is_cuda})
    state_of_python, state_of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for own, before in named:  # the forward may have replaced a buffer by another tensor
                if [(name, id(b)) for name, b in own.items()] != [(name, id(b)) for name, b in before.items()]:
                    own.clear()
                    own.update(before)
            for buffer, copy in saved:
                # Through `data`: a graph of the caller that has saved the buffer must not find a newer version of it.
                _unexpanded(buffer.data).copy_(copy)
            random.setstate(state_of_python)
            np.random.set_state(state_of_numpy)


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """A view without the repeated elements of expanded axes, into which torch does not write."""
    if tensor.layout is torch.strided:
        for axis, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[axis] > 1:
                tensor = tensor.narrow(axis, 0, 1)
    return tensor


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the traceback that torch logs when an op rejects shapes; the raised error contains the same."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


@contextmanager
def _with_plain_errors(dry_run: bool, label: str) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if not dry_run:
            raise
        raise Unimplemented(
            f"a dry run knows shapes, not values, and {label} asks for one ({error.func})",
            where=line_raising(error) or label,
            fix=_REAL_RUN,
        ) from error
    except RuntimeError as error:
        if "don't yet support saved tensor hooks" not in str(error):
            raise
        raise Unimplemented(
            f"{label} calls torch.func, which refuses the saved-tensor hooks that measure what is kept",
            where=line_raising(error) or label,
            fix="use torch.autograd.grad(..., create_graph=True) in its place, or measure other modules one by one",
        ) from error


_DTYPE_NAMES = {**NAMES, torch.float8_e4m3fn: "f8_e4m3", torch.float8_e5m2: "f8_e5m2"}


class Roles:
    """The roles of storages: weights, inputs, and so on.

    Args:
        model: its parameters and buffers are weights.
        inputs: the tensors among its arguments.
        existing: key -> storage of everything that existed before the run.
    """

    def __init__(self, model: object, inputs: Sequence[torch.Tensor], existing: Mapping[int, object]) -> None:
        self.existing = existing
        self._named: dict[int, tuple[str, str]] = {}
        self.input_bytes = 0
        for position, tensor in enumerate(inputs):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in self._named:
                self._named[storage._cdata] = (INPUT, f"input {position}")
                self.input_bytes += storage.nbytes()
        if isinstance(model, torch.nn.Module):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                storage = storage_of(tensor)
                if storage is not None:
                    self._named[storage._cdata] = (WEIGHT, name)

    def of(self, key: int, watch: Watch) -> tuple[str, str]:
        """The role of a storage and its name."""
        if key in self._named:
            return self._named[key]
        if key in self.existing:
            return OUTSIDE, ""
        birth = watch.births.get(key)
        return MADE, "" if birth is None else f"{birth.module}: {birth.op}" if birth.module else birth.op


def kept_entries(recorder: Recorder, roles: Roles, watch: Watch, outputs: Any) -> tuple[tuple[Kept, ...], int]:
    """The entries, and the bytes that are alive but neither kept nor an output.

    The recorder drops the tensors that it holds, so that backward frees them as it would without the recorder.
    """
    found: list[Packed | Attribute] = [*recorder.kept(), *recorder.attributes]
    recorder.attributes.clear()
    numbers: dict[object, int] = {}
    entries = []
    for saved in found:
        tensor, place = saved.tensor, saved.place
        storage = storage_of(tensor)
        key = id(tensor) if storage is None else storage._cdata
        size = tensor.numel() * tensor.element_size()
        whole = size if storage is None else storage.nbytes()
        role, name = roles.of(key, watch)
        first = key not in numbers
        entries.append(
            Kept(
                module=place.module, module_class=place.module_class, call=place.call, op=saved.op, slot=saved.slot,
                shape=tuple(tensor.shape), dtype=_DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), bytes=size,
                storage=numbers.setdefault(key, len(numbers)), storage_bytes=whole, role=role, name=name,
                counted=whole if first and role in COSTS else 0, hooked=isinstance(saved, Packed),
                where=saved.line[0], code=saved.line[1],
            )
        )  # fmt: skip
    known = set(numbers)
    for value in tree_iter(outputs):
        storage = storage_of(value) if isinstance(value, torch.Tensor) else None
        if storage is not None:
            known.add(storage._cdata)
    return tuple(entries), sum(size for key, size in watch.alive().items() if key not in known)
