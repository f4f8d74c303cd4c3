"""Random Python programs that change between their calls: `python tests/accuracy/random_programs.py --seeds 0:1000`.

A seed is a Python file: a function of pointwise torch ops that reads globals, closures, objects, modules, parameters
and all other sources in `program_sources.py`. It is loaded twice, and one of the two is fused. Between calls, lines
change what it reads, in both. Results, gradients, random numbers and all values that the function changed must agree,
which shows a plan that is used where it no longer applies. Kernels run op by op unless `--compiled` is given.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # pytest's settings list it as well
    for folder in ("support", "torch/opinfo"):
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))

import numpy as np
import torch
from opinfo_interpreted import interpreted
from program_sources import LAYERS, SOURCES

import opgraph.torch as ogt
from opgraph.errors import InvalidShape, OpGraphError

_NUMBERS = ("0.5", "2.0", "(-1.5)", "3", "1", "1.0", "0.25", "True", "(-0.0)", "0.0")
_IMPORTS = (
    "import collections, contextvars, dataclasses, enum, functools, math, os, random, types, typing\n"
    "import numpy as np\nimport torch\n"
)
_OUTER = ("torch.sigmoid", "torch.tanh", "torch.relu", "torch.nn.functional.silu", "torch.exp", "")
_SHAPES = ((2, 6), (3, 6), (4, 6), (6,), (2, 3, 6), (1, 6))
_CALLS = (
    *("plain",) * 6, "no_grad", "inference", "by name", "float64 by default", "autocast", "vmap", "jvp", "grad",
)  # fmt: skip
_MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
#: Tolerances that find the errors of a stale plan, not differences in the last places.
_RELATIVE, _SMALL = 1e-3, 1e-4
#: The factor on the tolerances for results under autocast.
_SLACK = 30.0
#: Seconds between two progress lines.
_EVERY = 60.0

WAYS: dict[str, Callable[[types.ModuleType], Callable[..., Any]]] = {
    "function": lambda program: ogt.fuse(program.f),
    "module": lambda program: ogt.fuse(program.Net()),
    "compile": lambda program: torch.compile(program.f, backend="opgraph"),
    "Dynamo alone": lambda program: torch.compile(program.f, backend="eager"),
    "helpers": lambda program: program.f,
}


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        setup: lines that make the values it reads.
        helpers: functions that `f` calls.
        body: lines of `f`.
        changes: lines, each of which may run between two calls.
    """

    setup: list[str]
    helpers: list[str]
    body: list[str]
    changes: list[str]

    @property
    def text(self) -> str:
        """The file."""
        lines = [*self.setup, *self.helpers, "def f(x, y=None, k=None):", *(f"    {line}" for line in self.body)]
        net = ["class Net(torch.nn.Module):", "    def forward(self, x, y=None, k=None): return f(x, y, k)"]
        return "\n".join([*lines, "    return x", *net, ""])

    def loaded(self, name: str, fuse: Callable[[Any], Any]) -> types.ModuleType:
        """The file as a module; `fuse` is applied to its fused functions."""
        made = types.ModuleType(name)
        sys.modules[name] = made  # data classes look up their module
        made.__dict__["FUSE"] = fuse
        exec(compile(_IMPORTS + self.text, f"<{name}>", "exec"), made.__dict__)
        return made


def drawn(rng: random.Random, *, fuses_helpers: bool = False) -> Program:
    """A program.

    Args:
        fuses_helpers: the functions that `f` calls are fused, and the values they read change between their calls.
    """
    program = Program([], [], [], [])
    names = (f"v{i}" for i in range(1000))
    for _ in range(rng.randint(1, 4)):
        sources = rng.choice((SOURCES, SOURCES, SOURCES, LAYERS))
        source = SOURCES["the call's sizes"] if rng.random() < 0.1 else sources[rng.choice(list(sources))]
        name = next(names)

        def filled(text: str, name: str = name) -> str:
            return re.sub(r"\$v", lambda _: rng.choice(_NUMBERS), text).replace("$n", name)

        if source.setup:
            program.setup.append(filled(source.setup).strip("\n"))
        program.changes.extend(filled(line) for line in source.changes)
        if source.statements:
            program.body.append(filled(rng.choice(source.statements)))
        if source.reads:
            value = filled(rng.choice(source.reads))
            program.body.extend(_using(value, rng, program, next(names), fuses_helpers))
        # In a transform of torch.func, exchanging the memory of a parameter crashes eager torch's process, and a new
        # parameter requires a gradient of the transform.
        left = r"\.data\b|\.(double|float)\(\)|Parameter\("
        inner = [line for line in program.changes if not re.search(left, line)]
        if fuses_helpers and inner and rng.random() < 0.5:
            program.body.append(f"exec({rng.choice(inner)!r}, globals())")
    if rng.random() < 0.3:
        program.body.append("if y is not None: x = x + y * 0.5")
    if rng.random() < 0.2:
        program.body.append("x = x * k if k is not None else x")
    return program


def _using(value: str, rng: random.Random, program: Program, name: str, fuses: bool) -> list[str]:
    """Lines of a function that read a value."""
    if fuses or rng.random() < 0.2:
        call = rng.choice((f"x * {value}", f"torch.sin(x) + {value}", f"torch.where(x > 0, x, x * {value})"))
        decorator = "@FUSE\n" if fuses else ""
        program.helpers.append(f"{decorator}def {name}(x, y, k): return {call}")
        program.changes.append(f"{name} = lambda x, y, k: x * {rng.choice(_NUMBERS)}")
        return [f"x = {name}(x, y, k)"]
    forms = [
        [f"x = {rng.choice(_OUTER)}(x {rng.choice('*+-')} {value})"],
        [f"for i in range(2): x = x * {value}"],
        [f"x = torch.where(x > 0, x, x * {value})"],
        [f"parts = [x * v for v in ({value}, 2.0)]", "x = parts[0] + parts[1]"],
        [f"x = x.mul({value}).add(1.0)"],
        [f"x = x * {value} if y is None else x * {value} + y"],
        [f"value = {value}", "x = x * value + value"],
        [f"value = {value}", "x = x * 2 if isinstance(value, (int, float)) and value > 1 else x + value"],
    ]
    return rng.choice(forms)


@dataclass(frozen=True)
class Call:
    """A call with new arrays, in one of the ways of `_CALLS`."""

    shape: tuple[int, ...]
    kind: str
    has_gradient: bool
    second: str
    k: Any
    form: str
    seed: int

    @classmethod
    def drawn(cls, rng: random.Random) -> Call:
        """A random call."""
        return cls(
            rng.choice(_SHAPES),
            rng.choice(("plain", "plain", "plain", "transposed", "float64", "parameter")),
            rng.random() < 0.5,
            rng.choice(("none", "none", "other", "same")),
            rng.choice((None, None, None, 2, 2.0, True, 0.5, 0)),
            rng.choice(_CALLS),
            rng.randrange(1000),
        )

    def _tensor(self, seed: int) -> torch.Tensor:
        made = torch.randn(*self.shape, generator=torch.Generator().manual_seed(seed))
        if self.kind == "transposed":
            made = made.transpose(0, -1).contiguous().transpose(0, -1)
        made = made.double() if self.kind == "float64" else made
        return torch.nn.Parameter(made) if self.kind == "parameter" else made.requires_grad_(self.has_gradient)

    def __call__(self, program: types.ModuleType, fn: Callable[..., Any]) -> dict[str, Any]:
        """The results and changes of a call, by name; "error": the exception that it raised."""
        for value in vars(program).values():
            if isinstance(value, torch.Tensor):
                value.grad = None
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        x = self._tensor(self.seed)
        y = {"none": None, "other": self._tensor(self.seed + 1), "same": x}[self.second]
        default = torch.get_default_dtype()
        try:
            if self.form == "float64 by default":
                torch.set_default_dtype(torch.float64)
            with _MODES.get(self.form, nullcontext)():
                result = self._result(fn, x, y)
            if isinstance(result, torch.Tensor) and result.requires_grad:
                result.backward(torch.linspace(-1, 1, result.numel(), dtype=result.dtype).reshape(result.shape))
        except Exception as error:
            return {"error": error}
        finally:
            torch.set_default_dtype(default)
        found = {"the result": result, "the gradient of x": x.grad, "the next number": torch.rand(())}
        return found | {f"the state of {name}": value for name, value in _state(program)}

    def _result(self, fn: Callable[..., Any], x: torch.Tensor, y: torch.Tensor | None) -> Any:
        if self.form == "by name":
            return fn(x=x, y=y, k=self.k)
        if self.form == "vmap":
            return torch.vmap(lambda x: fn(x, y, self.k))(torch.stack((x, x + 1)))
        if self.form == "jvp":
            second = None if y is None else y.detach()  # eager gives zeros by it if no tangent depends on it
            return torch.func.jvp(lambda x: fn(x, second, self.k), (x.detach(),), (torch.ones_like(x),))[1]
        if self.form == "grad":
            return torch.func.grad(lambda x: fn(x, y, self.k).sum())(x.detach())
        return fn(x, y, self.k)


def _state(program: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(program).items():
        if isinstance(value, (int, float, str, list, dict, tuple)) and not name.startswith("__"):
            yield name, re.sub(r" at 0x\w+", "", repr(value))
        elif isinstance(value, torch.Tensor):
            yield name, value.detach().clone()
            yield f"{name}.grad", value.grad


def differs(got: Any, want: Any, form: str) -> str:
    """The difference between two values from calls of a form; "" if they agree."""
    in_transform = form in ("jvp", "grad")  # eager's gradients are zeros where they do not depend on an input
    if in_transform and got is None and isinstance(want, torch.Tensor):
        got = torch.zeros_like(want)
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return "" if type(got) is type(want) and (got is want or got == want) else f"{got!r} instead of {want!r}"
    found, wanted = ({"dtype": t.dtype, "shape": t.shape, "is_inference": t.is_inference()} for t in (got, want))
    if not in_transform:
        found["requires_grad"], wanted["requires_grad"] = got.requires_grad, want.requires_grad
    for name, value in wanted.items():
        if found[name] != value:
            return f"{name} {found[name]} instead of {value}"
    a, b = got.detach().double(), want.detach().double()
    largest = float(b.nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
    slack = _SLACK if form == "autocast" else 1.0
    bound = slack * (_RELATIVE * min(largest, 1.0) + _SMALL)
    if torch.allclose(a, b, rtol=slack * _RELATIVE, atol=bound, equal_nan=True):
        return ""
    return f"{a.flatten()[:3].tolist()} instead of {b.flatten()[:3].tolist()}"


def problem(seed: int, way: str, counts: Counter[str] | None = None) -> str:
    """The difference between a program and its fused version; "" if there is none."""
    counts = Counter() if counts is None else counts
    rng = random.Random(seed)
    program = drawn(rng, fuses_helpers=way == "helpers")
    plain, fused = program.loaded("opgraph_plain", lambda fn: fn), program.loaded("opgraph_fused", ogt.fuse)
    fn = plain.Net() if way == "module" else plain.f
    made = WAYS[way](fused)
    calls = [Call.drawn(rng) for _ in range(3)]
    if rng.random() < 0.4:  # only shapes change, which a plan learns
        calls = [replace(calls[0], shape=call.shape) for call in calls]
    if "exec(" in program.text:  # parameters made in inference mode: eager torch refuses to save them
        calls = [replace(call, form="plain") if call.form == "inference" else call for call in calls]
    log: list[str] = []

    def told(what: str) -> str:
        return f"seed {seed}: {what}\nwhy_rerun: {getattr(made, 'why_rerun', '')}\n{program.text}\n" + "\n".join(log)

    for step in range(rng.randint(6, 12)):
        for line in rng.sample(program.changes, min(len(program.changes), rng.choice((0, 1, 1, 1, 2)) if step else 0)):
            log.append(line)
            for loaded in (plain, fused):
                _changed(line, loaded)
        call = rng.choice(calls)
        log.append(str(call))
        want, got = call(plain, fn), call(fused, made)
        counts["calls"] += 1
        refusal = got.get("error")
        if isinstance(refusal, OpGraphError) and not isinstance(refusal, InvalidShape):
            counts[f"refused, as in seed {seed}: {str(refusal).splitlines()[0]}"] += 1
            return ""  # it stopped early, so its changes differ from those of a whole call
        if "error" in want:
            counts["refused by Python or torch"] += 1
            same = type(refusal) is type(want["error"])
            return "" if same else told(f"{refusal!r} instead of {want['error']!r}")
        if refusal is not None:
            return told(f"{type(refusal).__name__}: {refusal}")
        for name in want:
            if why := differs(got.get(name), want[name], call.form):
                return told(f"{name}: {why}")
    return ""


def _changed(line: str, program: types.ModuleType) -> None:
    with suppress(Exception):  # in both programs alike: the line may use an attribute that another line replaced
        exec(line, program.__dict__)


def main() -> int:
    """The command; its exit status is 1 if a seed showed a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:300", metavar="A:B", help="from A up to, but not, B; A: without an end")
    parser.add_argument("--way", choices=WAYS, default="function", help="what is fused")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stops after so long")
    parser.add_argument("--compiled", action="store_true", help="kernels are compiled")
    given = parser.parse_args()
    begin, _, end = given.seeds.partition(":")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    start, ran, wrong = time.monotonic(), 0, 0
    told_at = start
    with nullcontext() if given.compiled else interpreted():
        for seed in range(int(begin), int(end or sys.maxsize)):
            now = time.monotonic()
            if now > start + 60 * given.minutes:
                break
            if now > told_at + _EVERY:
                told_at = now
                print(f"{ran} programs in {now - start:.0f} s, {wrong} wrong; next: --seeds {seed}:", flush=True)
            ran += 1
            if given.way in ("module", "compile", "Dynamo alone"):
                torch._dynamo.reset()
            if found := problem(seed, given.way, counts):
                if given.way in ("module", "compile") and problem(seed, "Dynamo alone"):
                    counts["wrong by Dynamo alone"] += 1
                    continue
                wrong += 1
                print(found, "-" * 80, sep="\n", flush=True)
    print(f"{ran} programs from seed {begin} in {time.monotonic() - start:.0f} s, {wrong} wrong")
    print("\n".join(f"{count:8} {what}" for what, count in counts.most_common(20)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
