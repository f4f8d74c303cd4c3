"""The speed of training on the CPU: opgraph against torch in one process, interleaved, as ratios.

    python tests/benchmarks/training.py [--json FILE] [--quick]

NAF1, the trainable activation of fractional order that opgraph started from, forward and backward, against eager torch
and against torch.compile on a form whose scalar part was hoisted by hand; backward of swish into given buffers; and
the host cost of a call at 1,024 elements.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import opgraph as og
import opgraph.torch as ogt
from opgraph.bench.machine import fresh_process, machine
from opgraph.bench.timing import compare, once
from opgraph.torch.naf1 import gamma, with_order

LAMBDA, ALPHA = 1.0507, 1.67326


def hoisted(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The scalar part of NAF1, separately, so that torch.compile captures the rest as one graph."""
    scalars = [1 - order, 1 / gamma(2 - order)]
    scalars += [gamma(1 + order) / (gamma(torch.tensor(n + 1.0)) * gamma(1 - n + order)) * (-1) ** n for n in range(3)]
    return torch.stack(scalars)


def data_part(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """The part of NAF1 that is computed for every element."""
    positive, negative = torch.where(x > 0, x, 1.0), torch.where(x <= 0, x, 1.0)
    right = LAMBDA * torch.pow(positive, s[0]) * s[1]
    left = sum((1 - torch.exp(negative - n)) * s[2 + n] for n in range(3)) * (ALPHA * LAMBDA)
    return torch.where(x > 0, right, left)


def naf1(n: int, order: float, compiled: bool) -> dict[str, dict[str, float]]:
    """Forward and backward of n elements, gradients of x and of the order."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(0), requires_grad=True)
    d = torch.ones(n)
    module = with_order(order)
    fused = ogt.fuse(module.forward)

    def step(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(f(x), [x, module.frac_order], d)

    ours, eager = step(fused), step(module.forward)
    for mine, theirs in zip(ours(), eager()):  # type: ignore[call-overload]
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-3)
    found = {"torch eager": compare(ours, eager, rounds=7)}
    if compiled:
        whole = torch.compile(data_part)

        def by_hand(x: torch.Tensor) -> torch.Tensor:
            order = torch.sigmoid(module.frac_order) * 1.8 + 0.1
            return whole(x, hoisted(x, order))

        found["torch.compile, hoisted by hand"] = compare(ours, step(by_hand), rounds=15)
    return found


def swish_backward(n: int) -> dict[str, dict[str, float]]:
    """The gradient of swish into a given buffer."""
    rng = np.random.default_rng(0)
    x, d, out = (rng.standard_normal(n).astype(np.float32) for _ in range(3))
    g = og.Graph()
    t = g.input("x", shape=(None,))
    g.add_op("Multiply", t, g.add_op("Sigmoid", t), name="y")
    call = og.compile(og.gradient(g, "x")).bind(x=x, d_y=d, out=out)
    tx, td, tout = (torch.from_numpy(a) for a in (x, d, np.empty_like(x)))
    theirs = lambda: torch.ops.aten.silu_backward.grad_input(td, tx, grad_input=tout)  # noqa: E731
    call(), theirs()
    np.testing.assert_allclose(out, tout.numpy(), rtol=1e-5, atol=1e-6)
    return {"torch silu_backward": compare(call, theirs)}


def host() -> dict[str, float]:
    """Microseconds of a call of 1,024 elements that needs grad, and of F.silu; only forward, and with backward."""

    @ogt.fuse
    def swish(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(a * x)

    @ogt.fuse
    def silu(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)

    x, a, d = torch.randn(1024, requires_grad=True), torch.ones((), requires_grad=True), torch.ones(1024)
    forwards = {
        "F.silu": lambda: torch.nn.functional.silu(x),
        "fused x * sigmoid(x)": lambda: silu(x),
        "fused x * sigmoid(a * x)": lambda: swish(x, a),
        "eager x * sigmoid(a * x)": lambda: x * torch.sigmoid(a * x),
    }
    found = {}
    for name, call in forwards.items():
        call()
        found[f"{name}, us"] = statistics.median(once(call, 2000) for _ in range(15)) * 1e6
        wanted = [x, a] if "a *" in name else [x]
        both = lambda call=call, wanted=wanted: torch.autograd.grad(call(), wanted, d)  # noqa: E731
        both()
        found[f"{name}, with backward, us"] = statistics.median(once(both, 1000) for _ in range(15)) * 1e6
    return found


_FIRST = """
import time
import torch, opgraph.torch as ogt
from opgraph.torch.naf1 import with_order
module = with_order(0.9); x = torch.randn(1 << 16, requires_grad=True)
start = time.perf_counter()
ogt.fuse(module.forward)(x).sum().backward()
print(time.perf_counter() - start)
"""


def first_call() -> dict[str, float]:
    """Milliseconds of the first forward and backward of NAF1 in a new process: with an empty cache, and from disk."""
    code = _FIRST
    cold, warm = [], []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(fresh_process(code, cache)[0])
            warm.append(fresh_process(code, cache)[0])
    return {"cold_ms": statistics.median(cold), "from_disk_ms": statistics.median(warm)}


def main() -> None:
    """Runs everything and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file as well")
    parser.add_argument("--quick", action="store_true", help="small sizes, without torch.compile")
    options = parser.parse_args()
    results: dict[str, object] = {"machine": machine()}
    print("machine:", ", ".join(f"{k} {v}" for k, v in results["machine"].items()))  # type: ignore[attr-defined]
    print(f"\n{'case':<58}{'ours us':>12}{'peer us':>12}{'ratio':>8}  quartiles")
    size, sizes = (1 << 16, [1 << 16]) if options.quick else (8 << 20, [1 << 20, 32 << 20])
    cases: list[tuple[str, Callable[[], dict[str, dict[str, float]]]]] = [
        (f"NAF1 of order {order}, forward and backward, {size} f32", lambda o=order: naf1(size, o, not options.quick))
        for order in (0.9, 1.8)
    ]
    cases += [(f"swish backward, {n} f32", lambda n=n: swish_backward(n)) for n in sizes]
    for name, run in cases:
        results[name] = found = run()
        for peer, r in found.items():
            times = f"{r['ours_us']:>12.1f}{r['theirs_us']:>12.1f}"
            print(f"{name} / {peer:<30}{times}{r['ratio']:>8.3f}  {r['low']:.3f} to {r['high']:.3f}")
    for name, one in (("host", host), ("first call of NAF1", first_call)):
        results[name] = found_one = one()
        print(f"\n{name}: " + ", ".join(f"{k} {v:.1f}" for k, v in found_one.items()))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
