"""The host's cost of a call at 1,024 elements, where the work itself takes less: microseconds, and Python calls."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import opgraph as og
from opgraph.bench.case import Case, make
from opgraph.bench.entries import ENTRIES
from opgraph.bench.peers.peer import Peer
from opgraph.bench.results import Figure
from opgraph.bench.suites.timed import Say
from opgraph.bench.timing import Call, in_turns, once

SIZE = 1024
#: Calls in one run: few, so that a busy machine interrupts few runs. A GPU's queue holds more, so that no call waits.
CALLS = 50
#: The maximum seconds for GPU calls without the driver.
_POSING = 3.0


class LaunchClock:
    """The host's time of a call; on a GPU, without waiting for the launched work."""

    def __init__(self, device: str) -> None:
        self._wait: Call | None = None
        if device == "cuda":
            import torch

            self._wait = torch.cuda.synchronize

    def repeats(self, seconds: float) -> int:
        """Always CALLS."""
        return CALLS

    def run(self, call: Call, repeats: int) -> float:
        """Seconds of one call."""
        if self._wait is not None:
            self._wait()
        found = once(call, repeats)
        if self._wait is not None:
            self._wait()
        return found


def measured(peers: Sequence[Peer], device: str, threads: int, budget: float, say: Say) -> list[Figure]:
    """Microseconds and calls of Python functions, of opgraph and of the available peers.

    Args:
        budget: seconds.
    """
    entry = next(e for e in ENTRIES if e.name == "swish")
    case = make(entry, "forward", "f32", SIZE, device, threads)
    ways = _ways(case)
    for peer in peers:
        say(peer.name)
        try:
            built = peer.build(case)
        except Exception:  # the suites of entries report why; the host's cost is measured only for peers that run
            continue
        ways[f"{peer.name}, {'new result' if built.allocates else 'into a buffer'}"] = built.call
    say("timing")
    for call in ways.values():
        call(), call()
    times = in_turns(ways, LaunchClock(device), budget)
    figures = []
    for name, call in ways.items():
        seconds = statistics.median(t for t in times[name] if t is not None)
        figures.append(Figure(suite="host", subject=name, column="us", value=seconds * 1e6, unit="us"))
        figures.append(Figure(suite="host", subject=name, column="Python calls", value=python_calls(call)))
    return figures if device == "cuda" else figures + _posing(min(budget / 4, _POSING), say)


def _posing(budget: float, say: Say) -> list[Figure]:
    """The cost of GPU calls, without a GPU and without launches: in a process whose CPU tensors pose as GPU tensors."""
    if importlib.util.find_spec("torch") is None:
        return []
    say("calls on a GPU, the driver left out")
    command = [sys.executable, "-m", "opgraph.bench.posing", str(budget)]
    found: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return [
        Figure(suite="host", subject=f"GPU without its driver: {name}", column="us", value=value, unit="us")
        for name, value in found.items()
    ]


def _ways(case: Case) -> dict[str, Call]:
    """Opgraph's ways to make a call, and those of a torch user."""
    f = og.compile(case.graph, device=case.device)
    x, out = case.arrays["x"], case.out
    found: dict[str, Call] = {
        "opgraph, bound": f.bind(x=x, out=out),
        "opgraph, f(x=x, out=out)": lambda: f(x=x, out=out),
        "opgraph, f(x=x)": lambda: f(x=x),
    }
    try:
        import torch

        import opgraph.torch as ogt
        from opgraph.bench.peers.torch_tensors import tensor
    except ImportError:
        return found
    t = tensor(x)
    leaf = t.detach().clone().requires_grad_()
    a = torch.ones((), device=leaf.device, requires_grad=True)
    silu = torch.nn.functional.silu

    @ogt.fuse
    def swish(x: Any) -> Any:
        return x * torch.sigmoid(x)

    @ogt.fuse
    def swish_alpha(x: Any, a: Any) -> Any:
        return x * torch.sigmoid(a * x)

    found |= {
        "F.silu": lambda: silu(t),
        "F.silu, needs grad": lambda: silu(leaf),
        "@ogt.fuse x*sigmoid(x)": lambda: swish(t),
        "@ogt.fuse x*sigmoid(x), needs grad": lambda: swish(leaf),
        "@ogt.fuse x*sigmoid(a*x), needs grad": lambda: swish_alpha(leaf, a),
        "eager x*sigmoid(a*x), needs grad": lambda: leaf * torch.sigmoid(a * leaf),
        "F.silu, forward and backward": _both(lambda: silu(leaf), leaf),
        "@ogt.fuse x*sigmoid(x), forward and backward": _both(lambda: swish(leaf), leaf),
    }
    return found


def _both(forward: Callable[[], Any], leaf: Any) -> Call:
    import torch

    d_y = torch.ones_like(leaf)
    return lambda: torch.autograd.grad(forward(), leaf, d_y)


def python_calls(call: Call) -> int:
    """The number of Python functions that a call runs, without a lambda that only wraps it."""
    count = 0

    def saw(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(saw)
    try:
        call()
    finally:
        sys.setprofile(before)
    wrapped = getattr(call, "__name__", "") == "<lambda>"
    return count - int(wrapped)
