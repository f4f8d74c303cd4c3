"""fuse: a function of torch ops becomes one kernel forward and one backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from opgraph.torch.plan import Plan, make_plan
from opgraph.torch.proxy import proxies
from opgraph.torch.reads import NotKnown
from opgraph.torch.trace import Output, Run, Traced, Tracer
from opgraph.torch.watch import Watch

#: Ways through one function that have plans; beyond it is run at each call.
MOST_PLANS = 8


def fuse_function(fn: Callable[..., Any], run_graph: Callable[[Traced], Callable[..., Any]]) -> Callable[..., Any]:
    """A function that does what `fn` does, its arithmetic on data in one kernel.

    Args:
        fn: a function of torch ops, a method, or any callable.
        run_graph: makes what runs a graph: `op(*tensors) -> sequence of results`. Asked once per graph.

    Returns: the function; `fused.tracer` is its Tracer, `fused.plans` its plans, `fused.why_rerun` why it has none.
    """
    tracer = Tracer(fn)
    plans: list[Plan] = []

    @functools.wraps(fn)
    def fused(*args: Any, **kwargs: Any) -> Any:
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
        run = tracer(args, kwargs) if fused.why_rerun else planned(args, kwargs)  # type: ignore[attr-defined]
        if run.traced is None:
            return run.kept[0]
        if run.traced.op is None:
            run.traced.op = run_graph(run.traced)
        return run.traced.result(run.traced.op(*run.tensors), run.kept)

    def planned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        watch = Watch()
        run = tracer(args, kwargs, watch)
        if run.traced is None:
            return run
        if run.traced.op is None:
            run.traced.op = run_graph(run.traced)  # before there is a plan: plans find graphs with their op
        if any((found := plan(args, kwargs)) is not None and found[0] is run.traced for plan in plans):
            return run  # only the shapes were new
        try:
            plan = make_plan(fn, args, kwargs, run, watch, run.shapes_count)
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
