"""fuse: what a function of torch ops does to data becomes one kernel forward and one backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from opgraph.errors import InvalidArguments
from opgraph.torch.fold import called_for_onnx, is_in_onnx_export
from opgraph.torch.fuse_module import fuse_module
from opgraph.torch.fused.op import FusedOp
from opgraph.torch.graph.backend import check_rounding
from opgraph.torch.graph.saved import Memory
from opgraph.torch.tracing.plan import Plan
from opgraph.torch.tracing.planning import make_plan
from opgraph.torch.tracing.proxy import proxies
from opgraph.torch.tracing.reads import NotKnown, OddArgument
from opgraph.torch.tracing.results import Output
from opgraph.torch.tracing.trace import Run, Tracer
from opgraph.torch.tracing.watch import Watch

if TYPE_CHECKING:
    from opgraph.torch.explain_report import FusionReport

#: Ways through one function that have plans; a function with more is run at each call.
MOST_PLANS = 8
#: Calls with arguments that no plan serves (lists of tensors, tensors of another class) before plans are given up.
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
    """Makes of a function of torch ops one that does its pointwise arithmetic in one kernel, its gradient in another.

    Args:
        fn: a function or method of pointwise torch ops; left out where this is a decorator with arguments. Or a
            module with any forward: it is changed in place (see `opgraph.torch.fuse_module`), and `unfuse` undoes it.
        rounding: "store": f16 and bf16 values inside are rounded once, at the end; "each": after each op, as eager
            torch does.
        dry_run: of a module: report what would be done, and change nothing.
        inputs: for the report: run the module once on these, as `explain` does; without them it is not run.

    Returns: the module, or the report on it, or the function. Of the function: tensor arguments of one dimension or
        more are data; tensors of no dimension, arguments too, stay in torch, with Python branches on them. Parameters,
        buffers and other tensors are used where they meet data. Gradients flow to all of them. `fused.why_rerun`
        tells why the Python function runs at each call, where it does ("" where it does not), `fused.tracer` leads to
        its graphs.

    Raises:
        InvalidArguments: neither a function nor a module; an unknown rounding; dry_run of a function.

    Raises (the result, when called):
        InvalidArguments: a branch on data, or arithmetic in place on an argument; the message names the line.
        Unimplemented, InvalidDataType: something that is not pointwise arithmetic; likewise.
    """
    if fn is None:
        return lambda target: fuse(target, rounding=rounding)
    check_rounding(rounding)
    if isinstance(fn, nn.Module):
        if dry_run:
            from opgraph.torch.explain import explain, foresee  # nobody else needs them

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
            f"an object of type {type(fn).__name__} cannot be fused", where="fuse", fix="pass a function of torch ops"
        )
    if dry_run:
        raise InvalidArguments(
            "dry_run tells of a module; nothing is known of a function before it is called", where="fuse",
            fix="use explain(fn, *inputs)",
        )  # fmt: skip
    return fuse_function(fn, lambda graph: FusedOp(graph, rounding=rounding), as_eager=rounding == "each")


def fuse_function(
    fn: Callable[..., Any], make_op: Callable[[Any], Callable[..., Any]], *, as_eager: bool = False
) -> Callable[..., Any]:
    """`fuse` of a function, with the choice of what runs its graphs.

    Args:
        make_op: graph -> `op(*tensors)`, which returns one tensor per output; asked once per graph.
        as_eager: see Tracer.
    """
    tracer = Tracer(fn, as_eager=as_eager)
    plans: list[Plan] = []
    odd_calls = 0

    @functools.wraps(fn)
    def fused(*args: Any, **kwargs: Any) -> Any:
        if _dynamo():
            return fn(*args, **kwargs)  # torch.compile sees the function as it was written
        for plan in plans:
            found = plan.check(args, kwargs)
            if found is not None and found[0] is not None:
                traced, tensors, kept, run = found
                if type(run) is tuple:
                    run = plan.run_of(traced, tensors, run)
                results = run(*tensors)
                outputs = traced.outputs
                if type(outputs) is Output:
                    return results[outputs.index] if type(results) is tuple else results
                return traced.result(results if type(results) is tuple else (results,), kept)
        return slow(args, kwargs)

    def slow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_in_onnx_export():
            return called_for_onnx(fn, args, kwargs)
        if next(proxies((*args, *kwargs.values())), None) is not None:
            return fn(*args, **kwargs)  # inside another fused function: part of its kernel
        run = opened(tracer(args, kwargs)) if fused.why_rerun else planned(args, kwargs)  # type: ignore[attr-defined]
        if run.traced is None:
            return run.kept[0]
        return run.traced.result(run.traced.op(*run.tensors), run.kept)

    def opened(run: Run) -> Run:
        if run.traced is not None and run.traced.op is None:
            run.traced.op = make_op(run.traced.graph)
        return run

    def planned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        nonlocal odd_calls
        watch = Watch()
        run = opened(tracer(args, kwargs, watch))
        if run.traced is None:
            return run
        if any(plan.learn(args, kwargs, run) for plan in plans):
            return run
        try:
            plan = make_plan(fn, args, kwargs, run, watch)
        except OddArgument as why:
            odd_calls += 1
            fused.why_rerun = str(why) if odd_calls > MOST_ODD_CALLS else ""  # type: ignore[attr-defined]
        except NotKnown as why:
            fused.why_rerun = str(why)  # type: ignore[attr-defined]
        else:
            plans.insert(0, plan)
            if len(plans) > MOST_PLANS:
                plans.clear()
                fused.why_rerun = f"it has more than {MOST_PLANS} ways through"  # type: ignore[attr-defined]
        return run

    fused.tracer = tracer  # type: ignore[attr-defined]
    fused.plans = plans  # type: ignore[attr-defined]
    fused.why_rerun = ""  # type: ignore[attr-defined]
    return fused
