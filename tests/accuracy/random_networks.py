"""Random networks, fused and in eager torch: `python tests/accuracy/random_networks.py --seeds 0:200`.

A seed is a module: parameters, buffers, a forward of random lines (`network_lines.py`), each of which ran in eager
torch when it was drawn, and calls of it (`network_calls.py`). Results, gradients, parameters, buffers, written inputs,
strides, shared memory and random numbers of the fused module are compared with those of the same module in eager torch.
Most modules are in f64. In other dtypes and under autocast, two results may differ as much as rounding errors of each
op make them differ in eager torch (`network_rounding.py`). With --graphs it counts how often other batch sizes are
captured again, compared with `aot_eager`. Problems are printed without the lines and outputs that they do not need.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # pytest's settings list them as well
    for folder in ("support", "torch/opinfo"):
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))

import network_lines
import torch
from network_calls import CASES, CHANGES, LAYOUTS, Case, differs, inputs, more, run
from network_rounding import Moved, spread
from opinfo_interpreted import interpreted
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import opgraph.torch as ogt
from opgraph.torch.graph import peak_recomputation

#: The maximum size of a value; lines with larger ones are left out.
_MOST_ELEMENTS = 6000
#: Seconds between two progress lines.
_EVERY = 60.0
#: Runs of eager torch that measure the differences by rounding, and the factor by which a fused module's may be larger.
_RUNS, _SLACK = 6, 2


@dataclass
class Text:
    """The definition of a network.

    Attributes:
        image: True if its inputs `x` and `y` are images.
        lines: the lines of its forward.
        layers: name -> a module, as text.
        outputs: names of the returned values.
        form: the form of the return value, with the outputs in place of "{}".
        memory: the `memory` option of `ogt.fuse`.
        grads: which of `x` and `y` have gradients.
        same: "same" if `y` is `x`, "view" if it is a view of it; else "".
        dtype: the dtype of inputs and parameters.
        autocast: the dtype of autocast, or None.
        cases: the calls.
    """

    image: bool
    lines: list[str] = field(default_factory=list)
    layers: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=lambda: ["x"])
    form: str = "({},)"
    memory: str | float = "least"
    grads: tuple[bool, bool] = (True, False)
    same: str = ""
    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None
    cases: tuple[Case, ...] = CASES

    @property
    def rounding(self) -> float:
        """The relative difference that two results may have without further measurement."""
        if self.dtype is torch.float64:
            return 1e-7
        coarse = torch.bfloat16 if "bfloat16" in str(self) else self.autocast or self.dtype
        return 2 * torch.finfo(coarse).eps

    def __str__(self) -> str:
        returned = self.form.replace("{}", ", ".join(self.outputs))
        lines = "".join(f"    {line}\n" for line in [*self.lines, f"return {returned}"])
        return f"def forward(self, x, y, ids, more):\n{lines}"

    def settings(self) -> str:
        """All other settings, as text."""
        layers = {name: layer for name, layer in self.layers.items() if f"self.{name}" in f"{self}{self.layers}"}
        words = [f"memory={self.memory!r}", f"grads={self.grads}", str(self.dtype), f"y: {self.same or 'another'}"]
        words += [f"autocast={self.autocast}"] if self.autocast else []
        return f"{layers}\n{', '.join(words)}\n" + "\n".join(f"  {case}" for case in self.cases)


class Network(nn.Module):
    """A module.

    Args:
        text: the definition of its forward.
        seed: the seed of its parameters.
    """

    def __init__(self, text: Text, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.calls = 0
        self.scale: torch.Tensor
        self.steps: torch.Tensor
        self.register_buffer("scale", torch.tensor([0.7]))
        self.register_buffer("steps", torch.tensor(0))
        self.weight = nn.Parameter(torch.tensor(0.8))
        self.table = nn.Parameter(torch.randn(7, 8))
        for name, layer in text.layers.items():
            setattr(self, name, eval(layer, _NAMES, {"self": self}))
        self.to(text.dtype)
        self._text = str(text)
        self._compile()

    def _compile(self) -> None:
        names: dict[str, Any] = dict(_NAMES)
        exec(compile(self._text, "<network>", "exec"), names)
        self._forward = names["forward"]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_forward"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compile()

    def forward(self, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor, more: dict[str, Any]) -> Any:
        return self._forward(self, x, y, ids, more)


class Doubled(torch.autograd.Function):
    """A function with a custom backward that is not its derivative."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a)
        return a * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (a,) = ctx.saved_tensors
        return grad * a.sigmoid()


def tied(module: Any, other: Any) -> Any:
    """A module that shares the weight of another one."""
    module.weight = other.weight
    return module


_NAMES = {"torch": torch, "F": functional, "nn": nn, "checkpoint": checkpoint, "Doubled": Doubled, "tied": tied}
#: Dtypes of modules, and of autocast around their calls.
_DTYPES = (
    *((torch.float64, None),) * 6,
    *((torch.float32, None),) * 2,
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
)


def drawn(seed: int, longest: int = 24) -> Text:
    """The network of a seed."""
    rng = random.Random(seed)
    text = Text(image=rng.random() < 0.5, same=rng.choice((*("",) * 20, "same", "view")))
    text.memory = rng.choice(("least", "least", "least", "fast", 0.5, 0.1))
    text.grads = rng.choice(((True, False), (True, False), (True, True), (False, False)))
    text.form = rng.choice(("({},)", "({},)", "[{}]", "{'made': ({},), 'more': (None, 2, 'word')}"))
    text.dtype, text.autocast = rng.choice(_DTYPES)
    text.cases = tuple(_case(rng, case) for case in (CASES[0], *rng.sample(CASES, 4)))
    model = Network(text, seed)
    x, y, ids = inputs(seed, 3, text.image, text.dtype)
    x, y = map(LAYOUTS[text.cases[0].layout], (x, y))
    values: dict[str, Any] = {"x": x, "y": x if text.same else y}
    for _ in range(rng.randint(3, longest)):
        line = _line(rng, values, ids, model, text)
        if line is not None:
            text.lines.append(line)
    names = [n for n in values if n not in "xy"] or ["x"]
    unread = [n for n in names if not re.search(rf"\b{n}\b(?! =)", " ".join(text.lines))]
    more = rng.sample(names, min(len(names), rng.choice((0, 0, 1, 2))))
    text.outputs = list(dict.fromkeys([names[-1], *unread[-3:], *more]))
    if rng.random() < 0.1:
        text.outputs.append(rng.choice(("x", "y", "x[:, 0]")))
    return text


def _case(rng: random.Random, case: Case) -> Case:
    """A case, perhaps with another layout or another change of the model."""
    layout = rng.choice(tuple(LAYOUTS)) if rng.random() < 0.3 else case.layout
    change = rng.choice(tuple(CHANGES)) if rng.random() < 0.25 else case.change
    return replace(case, layout=layout, change=change)


def _line(rng: random.Random, values: dict[str, Any], ids: torch.Tensor, model: Network, network: Text) -> str | None:
    """A new line, which has run on the values; None if it failed."""
    names, number = list(values), len(network.lines)
    a = names[-1] if rng.random() < 0.5 else rng.choice(names[-4:]) if rng.random() < 0.7 else rng.choice(names)
    value = values[a]
    kind = rng.random()
    target = f"v{number}"
    if kind < 0.22:
        text = rng.choice(network_lines.POINTWISE)
    elif kind < 0.36:
        text = rng.choice(network_lines.BINARY)
    elif kind < 0.51:
        text = rng.choice(network_lines.AXIS)
    elif kind < 0.61:
        text = rng.choice(network_lines.WHOLE if value.dim() != 4 or rng.random() < 0.5 else network_lines.IMAGE)
    elif kind < 0.73:
        text = _layer(rng, value, model, network)
    elif kind < 0.82:
        text, target = rng.choice(network_lines.WRITES), ""
    elif kind < 0.87:
        text, target = rng.choice(network_lines.PARTS), f"{target}, w{number}"
    elif kind < 0.93:
        text = rng.choice(network_lines.INDEXED)
    elif kind < 0.95:
        text = rng.choice(network_lines.MORE)
    else:
        text = _with_layer(rng, rng.choice(network_lines.OTHERS), model, network)
    axis = rng.randrange(value.dim()) if value.dim() else 0
    near = [n for n in names if values[n].shape == value.shape]
    b = rng.choice(near if rng.random() < 0.7 else names)
    axis_text = str(axis if rng.random() < 0.5 or not value.dim() else axis - value.dim())
    words = {
        "a": a,
        "b": b,
        "s": repr(rng.choice((0.5, -0.3, 2.0, 1.5))),
        "d": axis_text,
        "n": f"{a}.shape[{axis_text}]",
    }
    text = _with_words(text, words)
    line = f"{target} = {text}" if target else text
    if target and rng.random() < 0.05:
        line = f"with {rng.choice(network_lines.CONTEXTS)}: {line}"
    copies = {n: v.clone() for n, v in values.items()}  # restored after a write that raised, or made NaN
    local = {**_NAMES, "self": model, "ids": ids, "more": more(False, network.dtype), **values}
    try:
        with torch.no_grad():
            exec(line, local)
            model.calls = 0
        made = {name: local[name] for name in (target or a).split(", ")}
        for found in made.values():
            if not 0 < found.numel() <= _MOST_ELEMENTS or not bool((found.abs() < 1e4).all()):
                raise ValueError("no value for further lines")
    except Exception:
        values.update(copies)
        return None
    values.update(made)
    return line


def _layer(rng: random.Random, value: torch.Tensor, model: Network, network: Text) -> str:
    """A call of a new module; "" if none fits the value."""
    lines = network_lines
    choices = lines.LAYERS_IMAGE if value.dim() == 4 and rng.random() < 0.8 else lines.LAYERS
    c, n = value.shape[1] if value.dim() > 1 else 1, value.shape[-1] if value.dim() else 1
    layer = rng.choice(choices).format(c=c, n=n)
    name = f"layer{len(network.lines)}"
    alike = [other for other, text in network.layers.items() if text == layer and "parametriz" not in text]
    if alike and isinstance(getattr(getattr(model, alike[0]), "weight", None), nn.Parameter):
        layer = f"tied({layer}, self.{alike[0]})"
    try:
        torch.manual_seed(len(network.lines))
        setattr(model, name, eval(layer, _NAMES, {"self": model}).to(network.dtype))
    except (ValueError, RuntimeError, AssertionError):
        return ""
    network.layers[name] = layer
    if "Multihead" in layer:
        return f"self.{name}(a, a, a)[0]"
    return f"self.{name}(a)[0]" if "GRU" in layer else f"self.{name}(a)"


def _with_layer(rng: random.Random, text: str, model: Network, network: Text) -> str:
    """A template with a module for LAYER; in a checkpoint one without buffers, which eager torch updates twice."""
    if "LAYER" not in text:
        return text
    names = [
        n for n in network.layers if "checkpoint" not in text or not any(True for _ in getattr(model, n).buffers())
    ]
    return text.replace("LAYER", rng.choice(names)) if names else ""


def _with_words(text: str, words: dict[str, str]) -> str:
    """A template with words in place of its letters."""
    return re.sub(r"(?<![\w.'])([absdn])(?![\w'(])(?!=)", lambda found: words[found[1]], text)


def problems(text: Text, seed: int) -> Iterator[str]:
    """The differences from eager torch; none if eager torch itself raises an error."""
    torch._dynamo.reset()
    eager = Network(text, seed)
    fused = ogt.fuse(copy.deepcopy(eager), memory=text.memory)
    for number, case in enumerate(text.cases):
        try:
            eager = CHANGES[case.change](eager)
            if case.offloaded:  # with saved tensors moved, no error shows that values were overwritten
                run(copy.deepcopy(eager).train(case.training), text, seed, replace(case, offloaded=False))
            expected = run(eager.train(case.training), text, seed, case)
        except Exception:
            with suppress(Exception):
                fused = ogt.fuse(copy.deepcopy(eager), memory=text.memory)
                continue
            return  # a model that an error left in a state that cannot be copied
        fused = CHANGES[case.change](fused)
        try:
            got = run(fused.train(case.training), text, seed, case)
        except Exception as error:
            yield f"{case}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return
        wrong = [name for name in expected if differs(got.get(name), expected[name], text)]
        if not wrong:
            continue
        apart, compiled = _rounded(text, seed, number), _compiled(text, seed, number)
        reasons = {name: differs(got.get(name), expected[name], text, _SLACK * apart[name]) for name in wrong}
        shown = [name for name, why in reasons.items() if why]
        own = [n for n in shown if n in compiled and not differs(got.get(n), compiled[n], text, _SLACK * apart[n])]
        shown = [name for name in shown if not (name in own and name.startswith("strides"))]
        for name in shown:
            yield f"{case}: {name}: {reasons[name]}{' (so by aot_eager)' if name in own else ''}"
        if shown:
            return


#: Sizes of axis 0: the second one makes it a symbol, and later ones need no new graph.
_BATCHES = (3, 5, 7, 9)


def recaptures(text: Text, seed: int) -> Iterator[str]:
    """A line if calls with other batch sizes are captured again where `aot_eager` captures nothing; nothing if eager
    torch raises an error."""
    cases = [Case(batch, training=True, grads=True) for batch in _BATCHES]
    found = []
    for backend in ("eager", "aot_eager", "opgraph"):
        torch._dynamo.reset()
        counted = torch._dynamo.utils.counters["stats"]
        before, model, graphs = counted["unique_graphs"], Network(text, seed).train(), []
        called: Any = model if backend == "eager" else torch.compile(model, backend=backend)
        for case in cases:
            try:
                run(called, text, seed, case)
            except Exception as error:
                if backend == "opgraph":
                    yield f"{case}: {type(error).__name__}: {error}"
                return
            graphs.append(counted["unique_graphs"] - before)
        found.append(graphs)
    _, plain, ours = found
    if ours[-1] > plain[-1]:
        yield f"graphs captured after batches of {_BATCHES}: {ours}, by aot_eager {plain}"


def _compiled(text: Text, seed: int, number: int) -> dict[str, Any]:
    """The effects of a call through torch.compile's backend `aot_eager`, which compiles nothing; empty where it fails.

    Args:
        number: the number of the case; the network is first called as in the cases before it.
    """
    model: Any = Network(text, seed)
    found: dict[str, Any] = {}
    for case in text.cases[: number + 1]:
        found = {}
        with suppress(Exception):
            model = CHANGES[case.change](model)
            compiled = torch.compile(model.train(case.training), backend="aot_eager")
            found = run(compiled, text, seed, case)
    return {name.replace("_orig_mod.", ""): value for name, value in found.items()}


def _rounded(text: Text, seed: int, number: int) -> dict[str, float]:
    """The differences that rounding errors cause in a call's entries in eager torch; infinite where a jump is near.

    Args:
        number: the number of the case; the network is first called as in the cases before it.
    """
    found: list[dict[str, Any]] = []
    for step in range(_RUNS + 1):
        model: Any = Network(text, seed)
        for case in text.cases[: number + 1]:
            last: dict[str, Any] = {}
            with suppress(Exception), Moved(step) if step else nullcontext():
                model = CHANGES[case.change](model)
                last = run(model.train(case.training), text, seed, case)
        found += [last] if last else []
    return spread(found)


def shrunk(text: Text, seed: int, check: Callable[[Text, int], Iterator[str]] = problems) -> Text:
    """The network with only the outputs, cases and lines that a problem of a check needs."""

    def shows(smaller: Text) -> bool:
        try:
            return next(check(smaller, seed), None) is not None
        except Exception:
            return False  # a line reads a value of a removed one

    for name in text.outputs:
        smaller = replace(text, outputs=[n for n in text.outputs if n != name])
        if smaller.outputs and shows(smaller):
            text = smaller
    for case in reversed(text.cases):
        smaller = replace(text, cases=tuple(other for other in text.cases if other is not case))
        if smaller.cases and shows(smaller):
            text = smaller
    for line in reversed(text.lines):
        smaller = replace(text, lines=[other for other in text.lines if other is not line])
        if shows(smaller):
            text = smaller
    return text


def main() -> int:
    """The command; its exit status is 1 if a seed showed a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", metavar="A:B", help="from A up to, but not, B; A: without an end")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stops after so long")
    parser.add_argument("--no-compiler", action="store_true", help="kernels run op by op")
    parser.add_argument("--recompute", action="store_true", help="over the peak values of any size are computed again")
    parser.add_argument("--graphs", action="store_true", help="counts what other batch sizes capture, and no more")
    given = parser.parse_args()
    check = recaptures if given.graphs else problems
    if given.recompute:
        peak_recomputation.SMALLEST = 1
    torch.set_num_threads(1)
    begin, _, end = given.seeds.partition(":")
    first, last = int(begin), int(end or sys.maxsize)
    warnings.simplefilter("ignore")
    start, ran, wrong = time.monotonic(), 0, 0
    told_at = start
    with interpreted() if given.no_compiler else nullcontext():
        for seed in range(first, last):
            now = time.monotonic()
            if now > start + 60 * given.minutes:
                break
            if now > told_at + _EVERY:
                told_at = now
                print(
                    f"{ran} networks in {now - start:.0f} s, {wrong} with problems; next: --seeds {seed}:", flush=True
                )
            ran += 1
            text = drawn(seed)
            if next(check(text, seed), None) is not None:
                wrong += 1
                text = shrunk(text, seed, check)
                print(f"seed {seed}:", *check(text, seed), sep="\n  ")
                print(f"{text}{text.settings()}", flush=True)
    print(f"{ran} networks from seed {first} in {time.monotonic() - start:.0f} s: {wrong} with problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
