"""fuse: compiles the operations of a torch function on data to one kernel forward and one backward."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from opgraph.errors import InvalidArguments
from opgraph.torch.export_folding import called_for_onnx, is_in_onnx_export
from opgraph.torch.fuse_module import fuse_module
from opgraph.torch.fused.op import FusedOp
from opgraph.torch.graph.backend import check_rounding
from opgraph.torch.graph.min_cut import Memory
from opgraph.torch.tracing.guard_discovery import NotKnown, OddArgument, Wrapper
from opgraph.torch.tracing.guarded_plan import Miss, Plan
from opgraph.torch.tracing.plan_builder import make_plan
from opgraph.torch.tracing.proxy import proxies
from opgraph.torch.tracing.tensor_calls import Watch
from opgraph.torch.tracing.trace import Run, Tracer

if TYPE_CHECKING:
    from opgraph.torch.explain import FusionReport

#: The number of paths through one function that have plans; a function with more is run at each call.
MOST_PLANS = 8
#: Calls with arguments that no plan supports (lists of tensors, tensors of another class) before plans are given up.
MOST_ODD_CALLS = 32

_dynamo = torch.compiler.is_dynamo_compiling


@overload
def fuse(
    fn: nn.Module, *, rounding: str = "store", memory: Memory = "least", dry_run: Literal[False] = False
) -> nn.Module: ...
@overload
def fuse(fn: nn.Module, *, dry_run: Literal[True], inputs: Sequence[Any] = ()) -> FusionReport: ...
@overload
def fuse(fn: Callable[..., Any], *, rounding: str = "store") -> Callable[..., Any]: ...
@overload
def fuse(*, rounding: str = "store") -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def fuse(
    fn: Any = None,
    *,
    rounding: str = "store",
    memory: Memory = "least",
    dry_run: bool = False,
    inputs: Sequence[Any] = (),
) -> Any:
    """Returns a function that does the pointwise arithmetic of `fn` in one kernel, and its gradient in another.

    Args:
        fn: a function or method of pointwise torch ops; left out if this is a decorator with arguments. Or a module
            with any forward: it is changed in place (see `opgraph.torch.fuse_module`), and `unfuse` undoes it.
        rounding: "store": f16 and bf16 values inside are rounded once, at the end; "each": after each op, as eager
            torch does.
        dry_run: for a module: report what would be done, and change nothing.
        inputs: for the report: run the module once on these, as `explain` does; without them it is not run.

    Returns: the module, or the report on it, or the function. For a function: tensor arguments of one dimension or
        more are data. 0-d tensors, arguments too, stay in torch, with Python branches on them. Parameters, buffers and
        other tensors are used where they are operands next to data. Gradients flow to all of them. `fused.why_rerun`
        is the reason why the Python function runs at each call ("" if it does not); `fused.tracer` leads to its graphs.

    Raises:
        InvalidArguments: neither a function nor a module; an unknown rounding; dry_run or memory of a function.

    Raises (the result, when called):
        InvalidArguments: a branch on data, or arithmetic in place on an argument; the message names the line.
        Unimplemented, InvalidDataType: something that is not pointwise arithmetic; the message names the line.
    """
    if fn is None:
        again: Any = fuse
        return lambda target: again(target, rounding=rounding, memory=memory, dry_run=dry_run, inputs=inputs)
    check_rounding(rounding)
    if isinstance(fn, nn.Module):
        if dry_run:
            from opgraph.torch.explain import explain, foresee  # imported late: only needed here

            return explain(fn, *inputs) if inputs else foresee(fn)
        return fuse_module(fn, rounding, memory)
    if isinstance(fn, type):
        raise InvalidArguments(
            f"{fn.__name__} is a class",
            where="fuse",
            fix="fuse its forward (@fuse above it), or an instance: fuse(model)",
        )
    if not callable(fn):
        raise InvalidArguments(
            f"an object of type {type(fn).__name__} cannot be fused",
            where="fuse",
            fix="pass a module or a function of torch ops",
        )
    if dry_run:
        raise InvalidArguments(
            "dry_run tells of a module; nothing is known of a function before it is called", where="fuse",
            fix="use explain(fn, *inputs)",
        )  # fmt: skip
    if memory != "least":
        raise InvalidArguments(
            f"memory={memory!r} is a choice for modules; a fused function keeps the least", where="fuse",
            fix="leave it out, or fuse the module that calls the function",
        )  # fmt: skip
    return FusedFunction(
        fn, lambda traced: FusedOp(traced.graph, rounding=rounding, layout=traced.layout), as_eager=rounding == "each"
    )


class FusedFunction(Wrapper):
    """A function whose arithmetic on data runs in one kernel; the result of `fuse` for a function.

    Args:
        fn: the function.
        make_op: Traced -> `op(*tensors)`, which returns one tensor per output of its graph; called once per graph.
        as_eager: see Tracer.

    Attributes:
        tracer: leads to its graphs.
        plans: replace runs of the function in calls that they cover.
        why_rerun: the reason why it is run at each call; "" if it is not.

    In the body of a class it is a method. It is pickled by its name, like a function. If that name refers to the
    original function, it is pickled as the original function's name and the rounding.
    """

    def __init__(
        self, fn: Callable[..., Any], make_op: Callable[[Any], Callable[..., Any]], *, as_eager: bool = False
    ) -> None:
        functools.update_wrapper(self, fn)
        self.__wrapped__ = fn
        self.tracer = Tracer(fn, as_eager=as_eager)
        self.plans: list[Plan] = []
        self.why_rerun = ""
        self._make_op = make_op
        self._as_eager = as_eager
        self._odd_calls = 0

    @property
    def rounding(self) -> str:
        """As `fuse` takes it."""
        return "each" if self._as_eager else "store"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function."""
        if _dynamo():
            return self.__wrapped__(*args, **kwargs)  # torch.compile traces the original function
        for plan in self.plans:
            found = plan.call(args, kwargs)
            if found is None:
                continue
            if type(found) is not Miss:
                return found
            if found.traced is not None:
                return plan.run(found.traced, found)
        return self._slow(args, kwargs)

    def planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], otherwise: type[Exception]) -> Any:
        """The result of a call that a plan covers, perhaps for other shapes.

        Raises:
            otherwise: no plan does; nothing has run.
        """
        for plan in self.plans:
            found = plan.call(args, kwargs)
            if found is None:
                continue
            if type(found) is not Miss:
                return found
            return self._slow(args, kwargs) if found.traced is None else plan.run(found.traced, found)
        raise otherwise

    def _slow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_in_onnx_export():
            return called_for_onnx(self.__wrapped__, args, kwargs)
        if next(proxies((*args, *kwargs.values())), None) is not None:
            return self.__wrapped__(*args, **kwargs)  # inside another fused function: part of its kernel
        run = self.opened(self.tracer(args, kwargs)) if self.why_rerun else self._planned(args, kwargs)
        if run.traced is None:
            return run.kept[0]
        return run.traced.result(run.traced.op(*run.tensors), run.kept)

    def opened(self, run: Run) -> Run:
        """The run, with the op of its graph."""
        if run.traced is not None and run.traced.op is None:
            run.traced.op = self._make_op(run.traced)
        return run

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        watch = Watch()
        run = self.opened(self.tracer(args, kwargs, watch))
        if run.traced is None:
            return run
        if any(plan.learn(args, kwargs, run) for plan in self.plans):
            return run
        try:
            plan = make_plan(self.__wrapped__, args, kwargs, run, watch)
        except OddArgument as why:
            self._odd_calls += 1
            self.why_rerun = str(why) if self._odd_calls > MOST_ODD_CALLS else ""
        except NotKnown as why:
            self.why_rerun = str(why)
        else:
            if any(known.takes_in(plan) for known in self.plans):
                return run
            self.plans.insert(0, plan)
            if len(self.plans) > MOST_PLANS:
                self.plans.clear()
                self.why_rerun = f"it has more than {MOST_PLANS} ways through"
        return run

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        found: Any = sys.modules.get(self.__module__)
        name = str(getattr(self, "__qualname__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        return _unpickled, (self.__wrapped__, self.rounding)

    def __copy__(self) -> FusedFunction:
        return self

    def __deepcopy__(self, memo: Any) -> FusedFunction:
        if isinstance(self.__wrapped__, MethodType):  # it is copied with the object that it is bound to
            return FusedFunction(copy.deepcopy(self.__wrapped__, memo), self._make_op, as_eager=self._as_eager)
        return self  # like a function

    def __repr__(self) -> str:
        return f"<fused {self.__wrapped__!r}>"


def _unpickled(fn: Callable[..., Any], rounding: str) -> Any:
    return fuse(fn, rounding=rounding)
