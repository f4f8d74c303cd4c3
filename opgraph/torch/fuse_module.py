"""`fuse` for modules: the forward is compiled by torch.compile with opgraph's backend.

Only the instance's `forward` is wrapped: class, parameters, buffers and state_dict keys stay, and `unfuse` removes the
wrapper. Hooks, parametrizations, train() and eval(), deepcopy and pickle work as before. While other code traces or
transforms the model (an exporter, torch.compile around it, torch.func), its own forward runs.

A module that turns out to be one activation (`graph.single_activation`) runs as a fused function: Dynamo's guards and
AOTAutograd's wrappers take 30 us, several times as long as its kernels.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from threading import RLock, get_ident
from types import FrameType
from typing import Any, cast
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from opgraph.errors import InvalidArguments, OpGraphError
from opgraph.runtime.providers.torch_internals import MODULE_CALLERS, has_saved_tensors_hooks, is_transformed
from opgraph.torch.export_folding import called_for_onnx
from opgraph.torch.graph.backend import Captured, check_rounding, compiler, new_compiler, observed, on_run
from opgraph.torch.graph.dynamo_entry import CompiledMeanwhileError, graph_breaks
from opgraph.torch.graph.dynamo_entry import compiled as isolated
from opgraph.torch.graph.min_cut import Memory, check_memory
from opgraph.torch.graph.single_activation import NotAlone, Single, is_single
from opgraph.torch.graph.torch_internals import capture_errors, graph_break_reasons, is_wrapped
from opgraph.torch.tracing.guard_discovery import Wrapper
from opgraph.torch.tracing.trace_errors import users_level


class _IsSingle(Exception):  # noqa: N818 - it ends a call before its first graph runs, and is no error
    """The module that is called is one activation."""


_making = RLock()  # held while objects that threads share are made


class _Code:
    """The compiled code of a forward, for a module and for deep copies of it.

    Dynamo guards on what it reads of a module, and parameters are inputs of its graphs: for a copy that is like the
    module, nothing is compiled. If copies differ in so many ways that Dynamo's limit is reached, each has its own code.

    Args:
        backend: makes the backend for its graphs.
        owner: a reference to the forward of the module.

    Attributes:
        caller: a reference to the forward that was called last.
        is_full: True if Dynamo no longer compiles a function of it.
        singles: Dynamo's graphs of calls in which the module is one activation.
    """

    def __init__(self, backend: Callable[[], Callable[..., Any]], owner: ReferenceType[FusedForward]) -> None:
        self.caller = self.owner = owner
        self.is_full = False
        self.singles = WeakSet[GraphModule]()
        self._backend = backend

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The compiled function; torch's compilers are imported when it is first called."""
        with _making:  # another thread may have made it already, and compiled with it
            if "run" not in self.__dict__:
                self.__dict__["run"] = isolated(forward_of, self._backend(), self._failed, self._limited)
            return cast("Callable[..., Any]", self.__dict__["run"])

    def _failed(self, error: BaseException) -> bool:
        caller = self.caller()
        return caller is not None and caller._failed(error)

    def _limited(self, what: str) -> None:
        self.is_full = True
        caller = self.caller()
        if caller is not None and (caller._reference is self.owner or self.owner() is None):
            caller._limited(what)


class FusedForward(Wrapper):
    """A module's `forward`, compiled when it is first called.

    Args:
        module: the module of the forward.
        instead: the forward that the instance had before, if any (put there by another library).
        rounding, memory: as `fuse` takes them.

    Attributes:
        limits: the functions that Dynamo no longer compiles, because its limit of compilations is reached.
    """

    def __init__(
        self,
        module: nn.Module,
        instead: Callable[..., Any] | None = None,
        rounding: str = "store",
        memory: Memory = "least",
    ) -> None:
        self.module = module
        self.instead = instead
        self.rounding = rounding
        self.memory = memory
        self._compiled: _Code | None = None
        self._reference = ref(self)
        self._single: Single | None = None
        self._looks = True
        self._failure: str | None = None
        self._told = False
        self._limit: str | None = None
        self.limits: tuple[str, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module's own forward."""
        if is_transformed():  # part of the trace or transform around it
            if torch.compiler.is_compiling():  # no frame shows the caller
                return called_for_onnx(self.original, args, kwargs)
            called = self._called(sys._getframe(1))
            return called_for_onnx(partial(forward_of, called, self.instead), args, kwargs)
        return self._run(self._called(sys._getframe(1)), args, kwargs)

    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of the forward of a module that has this wrapper: `self.module`, or a copy of it."""
        code = self._compiled or self._first_code()
        if code.is_full and code.owner is not self._reference:
            code = self._compile()
        code.caller = self._reference
        single = self._single
        if single is not None and self._may_be_single(module):
            try:
                return single(*args, **kwargs)
            except NotAlone:
                pass  # nothing has run
            except OpGraphError:
                self._single = None
        self._failure = None
        try:
            if self._looks:
                result = self._first(code, module, args, kwargs)
            else:
                result = code.run(module, self.instead, *args, **kwargs)
        except capture_errors() as error:
            if not self._failed(error):
                raise error.inner_exception from None  # type: ignore[attr-defined]
            result = forward_of(module, self.instead, *args, **kwargs)
        except CompiledMeanwhileError:
            return self._run(module, args, kwargs)
        name = type(self.module).__name__
        if self._failure is not None and not self._told:
            self._told = True
            warnings.warn(
                f"{name} runs unfused: {self._failure}. `ogt.explain(model, *inputs)` says more.",
                stacklevel=users_level(),
            )
        if self._limit is not None:
            what, self._limit = self._limit, None
            warnings.warn(
                f"{name} runs unfused where it would have to be compiled again: {what}. Calls that were compiled "
                "before stay fused. Where each difference is needed, raise torch._dynamo.config.recompile_limit.",
                stacklevel=users_level(),
            )
        return result

    def _first(self, code: _Code, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Makes a call that may capture the model for the first time. If the call initializes lazy parameters, it runs
        as it was written: a capture would draw their random numbers twice."""
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            return forward_of(module, self.instead, *args, **kwargs)
        captured, has_run, is_alone = list[Captured](), set[bool](), False
        thread, before = get_ident(), len(graph_break_reasons())

        def note(graph: GraphModule) -> None:
            """Called when a graph begins to run; before the first one, nothing else of the call has run."""
            if get_ident() != thread:
                return
            is_first = not has_run and on_run[-1] is note and len(graph_break_reasons()) == before
            if is_first and self._failure is None and self._may_be_single(module):
                if is_single(module, captured):
                    code.singles.add(graph)
                if graph in code.singles:  # compiled for a module that this one is a copy of, perhaps
                    raise _IsSingle
            has_run.add(True)

        on_run.append(note)
        try:
            with observed(captured.append), graph_breaks() as breaks:
                result = code.run(module, self.instead, *args, **kwargs)
        except _IsSingle:
            is_alone = True
        finally:
            on_run.remove(note)
        if is_alone:  # if the function cannot run, the compiled graph does: nothing may end that run
            self._looks, self._single = False, Single(self.module, self.rounding)
            return self._run(module, args, kwargs)
        if not captured and not has_run and breaks:
            first = breaks[0]
            self._failure = self._failure or f"torch.compile captures nothing of it: {first.reason}, in {first.line}"
        if captured or has_run:
            self._looks = False
        return result

    def _may_be_single(self, module: nn.Module) -> bool:
        """True if a call may run the module as a function. Activation checkpointing compares the saved tensors of two
        calls, which must therefore run alike."""
        return self.instead is None and module is self.module and not has_saved_tensors_hooks()

    def _failed(self, error: BaseException) -> bool:
        """Notes that torch could not capture a part of a call; True if that part may run as it was written.
        (Errors of the user's program are raised there, by the line that causes them.)"""
        if isinstance(getattr(error, "inner_exception", None), OpGraphError):
            return False
        lines = str(error).splitlines()  # "backend='compile' raised:", and what it raised
        if not lines or not lines[0]:  # an assertion without a message
            lines = [type(error).__name__]
        self._failure = (
            f"torch.compile cannot capture it: {' '.join(lines[:2] if lines[0].endswith(':') else lines[:1])}"
        )
        return True

    def _limited(self, what: str) -> None:
        """Notes that Dynamo no longer compiles a function; the current call continues."""
        self._limit = None if self.limits else what
        self.limits = (*self.limits, what)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the original forward."""
        return forward_of(self.module, self.instead, *args, **kwargs)

    def _compile(self, make: Callable[..., Callable[..., Any]] = compiler) -> _Code:
        made = self._compiled = _Code(partial(make, self.memory, self.rounding), self._reference)
        return made

    def _first_code(self) -> _Code:
        with _making:
            return self._compiled or self._compile()

    def _called(self, caller: FrameType) -> nn.Module:
        """The module that is called. A shallow copy (`copy.copy`, a replica of DataParallel) has this same object in
        its __dict__, but its own parameters. Only the frame of Module.__call__ contains that copy."""
        found = caller.f_locals.get("self") if caller.f_code in MODULE_CALLERS else None
        is_copy = isinstance(found, nn.Module) and found.__dict__.get("forward") is self
        return found if is_copy and found is not None else self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        """The call with the module as its first argument, as in bound methods. `accelerate` wraps that function and
        binds it to the module again; a deep copy of the bound method belongs to the copied module."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_transformed():
                return called_for_onnx(partial(forward_of, module, self.instead), args, kwargs)
            return self._run(module, args, kwargs)

        if self.instead is None:
            forward.__signature__ = inspect.signature(type(self.module).forward)  # type: ignore[attr-defined]
        return forward

    @property
    def __wrapped__(self) -> Any:
        """The original forward, for callers that read its signature."""
        return self.instead if self.instead is not None else type(self.module).forward.__get__(self.module)

    @property
    def __code__(self) -> Any:
        """The code of the original forward: torch.export reads the names of arguments from it."""
        return getattr(self.__wrapped__, "__code__", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedForward:
        """The forward of a copied module; it shares the compiled code of this one, also code compiled later."""
        code = self._compiled or self._first_code()
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if not code.is_full:
            made._compiled = code
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reference=ref(self))

    def __getstate__(self) -> dict[str, Any]:
        """The state without compiled code."""
        return {
            **self.__dict__,
            "_compiled": None,
            "_reference": None,
            "_single": None,
            "_looks": True,
            "_failure": None,
            "_limit": None,
            "limits": (),
        }

    def __repr__(self) -> str:
        return f"<fused forward of {type(self.module).__name__}>"


def forward_of(module: nn.Module, instead: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Any:
    """The function that torch.compile captures: calls the forward that a fused module would have without `fuse`."""
    return type(module).forward(module, *args, **kwargs) if instead is None else instead(*args, **kwargs)


def fuse_module(model: nn.Module, rounding: str = "store", memory: Memory = "least") -> nn.Module:
    """Wraps the forward of a module; a module that is fused already keeps its wrapper if the choices are the same.

    Raises:
        InvalidArguments: an unknown rounding, or an unknown choice of memory; nothing is wrapped then.
    """
    check_rounding(rounding)
    check_memory(memory)
    forward = model.__dict__.get("forward")
    instead = forward.instead if isinstance(forward, FusedForward) else forward
    known = (forward.module, forward.rounding, forward.memory) if isinstance(forward, FusedForward) else ()
    if known != (model, rounding, memory):  # a shallow copy has the wrapper of another module
        model.__dict__["forward"] = FusedForward(model, instead, rounding, memory)
    return model


def unfuse(model: nn.Module) -> nn.Module:
    """Undoes `fuse` for a module and all modules in it.

    Raises:
        InvalidArguments: the model is no module.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArguments(
            f"an object of type {type(model).__name__} is no module", where="unfuse",
            fix="of a fused function, `fn.__wrapped__` is what it was written as",
        )  # fmt: skip
    for module, forward in _fused_forwards(model):
        _put_back(module, forward.instead)
    return model


def _put_back(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Restores the forward that an instance had before fusing; None: that of its class."""
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward


def is_compiled(module: nn.Module) -> bool:
    """True if a module's calls run compiled code: it is fused, or torch.compile has wrapped it."""
    return isinstance(module.__dict__.get("forward"), FusedForward) or is_wrapped(module)


@contextmanager
def compiled_apart(model: object) -> Iterator[None]:
    """Inside this context, fused modules in a model compile anew; afterwards their earlier code is restored."""
    forwards = _fused_forwards(model)
    held = [(forward._compiled, forward._single, forward._looks) for _, forward in forwards]
    for _, forward in forwards:
        forward._compile(new_compiler)
        forward._single, forward._looks = None, False
    try:
        yield
    finally:
        for (_, forward), before in zip(forwards, held, strict=True):
            forward._compiled, forward._single, forward._looks = before


@contextmanager
def fused_apart(model: nn.Module) -> Iterator[None]:
    """Inside this context, a module is fused, as it was before or as by `fuse`, and compiles anew."""
    before = model.__dict__.get("forward")
    fused = isinstance(before, FusedForward)
    if not fused:
        fuse_module(model)
    try:
        with compiled_apart(model):
            yield
    finally:
        if not fused:
            _put_back(model, before)


@contextmanager
def unfused(model: object) -> Iterator[None]:
    """Inside this context, a model runs as if no module in it were fused."""
    forwards = _fused_forwards(model)
    for module, _ in forwards:
        unfuse(module)
    try:
        yield
    finally:
        for module, forward in forwards:
            module.__dict__["forward"] = forward


def reached_limits(model: object) -> tuple[str, ...]:
    """The functions of fused modules in a model whose calls reached Dynamo's recompile limit."""
    return tuple(limit for _, forward in _fused_forwards(model) for limit in forward.limits)


def _fused_forwards(model: object) -> list[tuple[nn.Module, FusedForward]]:
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    return [(m, f) for m in modules if isinstance(f := m.__dict__.get("forward"), FusedForward)]
