"""fuse: what a function of torch ops does to data becomes one kernel forward and one backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import torch

from opgraph.errors import InvalidArguments, Unimplemented
from opgraph.torch.function import FusedOp
from opgraph.torch.plan import Plan, make_plan
from opgraph.torch.proxy import proxies
from opgraph.torch.reads import NotKnown
from opgraph.torch.results import Output
from opgraph.torch.trace import Run, Tracer
from opgraph.torch.watch import Watch

#: Ways through one function that have plans; a function with more is run at each call.
MOST_PLANS = 8

_dynamo = torch.compiler.is_dynamo_compiling


@overload
def fuse(fn: Callable[..., Any], *, rounding: str = "store") -> Callable[..., Any]: ...
@overload
def fuse(*, rounding: str = "store") -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def fuse(fn: Any = None, *, rounding: str = "store") -> Any:
    """Makes of a function of torch ops one that does its pointwise arithmetic in one kernel, its gradient in another.

    Args:
        fn: a function or method of pointwise torch ops; left out where this is a decorator with arguments.
        rounding: "store": f16 and bf16 values inside are rounded once, at the end; "each": after each op, as eager
            torch does.

    Returns: the function. Tensor arguments of one dimension or more are data; tensors of no dimension, arguments too,
        stay in torch, with Python branches on them. Parameters, buffers and other tensors are used where they meet
        data. Gradients flow to all of them. `fused.why_rerun` tells why the Python function runs at each call, where
        it does ("" where it does not), `fused.tracer` leads to its graphs.

    Raises (the result, when called):
        InvalidArguments: a branch on data, or arithmetic in place on an argument; the message names the line.
        Unimplemented, InvalidDataType: something that is not pointwise arithmetic; likewise.
    """
    if fn is None:
        return lambda target: fuse(target, rounding=rounding)
    if isinstance(fn, torch.nn.Module):
        raise Unimplemented("a module cannot be fused yet", where=f"fuse({type(fn).__name__})", fix="fuse its forward")
    if not callable(fn):
        raise InvalidArguments(
            f"a {type(fn).__name__} cannot be fused", where="fuse", fix="pass a function of torch ops"
        )
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

    @functools.wraps(fn)
    def fused(*args: Any, **kwargs: Any) -> Any:
        if _dynamo():
            return fn(*args, **kwargs)  # torch.compile sees the function as it was written
        for plan in plans:
            found = plan(args, kwargs)
            if found is not None:
                traced, tensors, kept = found
                outputs = traced.outputs
                results = traced.op(*tensors)
                return results[outputs.index] if type(outputs) is Output else traced.result(results, kept)
        return slow(args, kwargs)

    def slow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        watch = Watch()
        run = opened(tracer(args, kwargs, watch))
        if run.traced is None:
            return run
        if any((found := plan(args, kwargs)) is not None and found[0] is run.traced for plan in plans):
            return run  # only the shapes were new
        try:
            plan = make_plan(fn, args, kwargs, run, watch)
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
