"""Runs a traced function by the reference, for tests that compare it with eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import opgraph as og
from opgraph.runtime.providers.torch import from_numpy, to_numpy
from opgraph.torch.tracing.trace import Run, Tracer


def evaluated(run: Run, dtype: str | None = None) -> Any:
    """The result of a traced call, each op rounded to its dtype (or all computed in `dtype`)."""
    if run.traced is None:
        return run.kept[0]
    feeds = dict(zip(run.traced.inputs, map(to_numpy, run.tensors), strict=True))
    made = og.evaluate(run.traced.graph, feeds, dtype=dtype)
    results = [from_numpy(np.array(r)) for r in (made.values() if isinstance(made, dict) else [made])]
    return run.traced.result(results, run.kept)


def traced(fn: Callable[..., Any], *args: Any, as_eager: bool = False) -> Any:
    """The result of `fn`, by its trace."""
    return evaluated(Tracer(fn, as_eager=as_eager)(args, {}))


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest relative error where both are numbers; inf if only one is, or for different infinities."""
    got, truth = got.double(), truth.double()
    same = (got == truth) | (got.isnan() & truth.isnan())
    if not (same | (got.isfinite() & truth.isfinite())).all():
        return float("inf")
    error = torch.where(same, torch.zeros_like(truth), (got - truth).abs() / truth.abs().clamp_min(1e-30))
    return float(error.max()) if error.numel() else 0.0
