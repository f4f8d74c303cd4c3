"""Random functions on tensors of several shapes and dtypes: `python tests/accuracy/random_functions.py --seeds 0:1000`.

A seed is a function of three tensors: pointwise ops, ops in place, views, fills, casts, questions about shapes, and
its own tensors that it reads and writes. It is loaded twice, and one of the two is fused. Calls use shapes that fit
and shapes that do not. Results, gradients, the function's own tensors and the types of errors must agree; they differ
if a plan serves shapes that it was not made for. With `--way module` the function is the forward of a module, which
Dynamo captures. Kernels run op by op.
"""

from __future__ import annotations

import argparse
import linecache
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # pytest's settings list it as well
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch/opinfo"))

import torch
from opinfo_interpreted import interpreted

import opgraph.torch as ogt
from opgraph.errors import InvalidShape, OpGraphError

_SHAPES = ((3,), (2, 3), (1, 3), (2, 1), (1,), (2, 1, 3), (0, 3), (2, 2, 3), (), (3, 3))
_DTYPES = (*(torch.float32,) * 6, torch.float64, torch.float16, torch.bfloat16)
#: The allowed difference of results; a stale value, or a plan for other shapes, gives a larger one.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
_CALLS = 10
#: Expressions of values `$`, with the weight of each kind of line; `#` is a number.
_EXPRESSIONS: tuple[tuple[float, tuple[str, ...]], ...] = (
    (3, ("$ + $", "$ * $", "$ - $", "torch.maximum($, $)", "$ * #", "# - $", "$ / ($.abs() + 1)",
         "torch.where($ > 0, $, $)", "torch.where($ > 0, $, #)", "torch.rsub($, $)", "($ == $) * $")),
    (2, ("$.exp().clamp(max=9)", "torch.sigmoid($)", "F.silu($)", "$.abs()", "F.leaky_relu($, 0.1)", "$.float()",
         "$.to(y.dtype)", "$.type_as($)", "$.double()", "torch.lerp($, $, 0.3)", "$.clamp($, None)", "$.long()",
         "torch.addcmul($, $, $, value=0.5)", "$.sign()", "$.round()", "$.pow(2)", "($ > 0).float()", "$ > $")),
    (2, ("$.expand_as($)", "($ * 2).expand_as($)", "torch.broadcast_to($ * 1, $.shape)", "($ + 1).expand($.shape)",
         "($ * 2).expand(2, *$.shape)", "torch.full_like($, #)", "torch.zeros_like($) + $", "torch.ones_like($)")),
    (1, ("x.unsqueeze(0)", "x.t()", "x[..., :1]", "x.chunk(3, -1)[0]", "y.flip(-1)", "($ * 2).flip(-1)", "x[0]",
         "($ * 2).roll(1, -1)", "x.reshape(-1)", "x.squeeze()", "z.transpose(0, -1)", "y.view(-1, 3)", "x.mT")),
    (1, ("$ * $.size(-1)", "$ * $.numel()", "$ / len($)", "$ + $.dim()", "($ if $.shape[-1] > 1 else $ * 3)",
         "($ if $.dtype == torch.float32 else $ + 1)", "($ if $.requires_grad else -$)", "($ if $ is $ else $ * 2)")),
    (1, ("$.detach()", "($ if S > 1 else $ * 2)", "($ if P[0] > 1 else $ + P)", "$ * S.exp()", "$ * (B * 2)[None]",
         "torch.stack((B, P)).sum(0) * $", "F.prelu($, P[:1])")),
    (2, ("$ + B * $.dim()", "$ * (S / $.size(-1))", "$ + torch.ones($.shape)", "$ + B.expand($.shape)",
         "$ * P.sum() * $.numel()", "$ + $.new_full($.shape, #)", "$ + (B if $.size(-1) > 1 else P)",
         "$ * B[:$.size(-1)]", "$ + torch.arange($.size(-1))", "torch.full((1,), float($.dim())) * $")),
)  # fmt: skip
#: The same without views, which are refused for computed values.
_FUSED = tuple((weight, several) for weight, several in _EXPRESSIONS if "x.t()" not in several)
#: Lines that write to one of the function's values, `@`.
_IN_PLACE = (
    "@ += $", "@ *= $", "@ -= @", "@.mul_(#)", "@.add_($, alpha=2)", "@.clamp_(min=0)", "@.masked_fill_($ > 0, #)",
    "@.sigmoid_()", "@.lerp_($, 0.5)", "F.relu(@, inplace=True)", "@.addcmul_($, $)",
)  # fmt: skip
#: Lines that write to the function's own tensors: a number, a row and a parameter. None writes through `.data`, because
#: eager torch's backward would read the new values.
_WRITES = (
    "S.mul_(1.5)", "B.add_(S)", "B[0] = 2.0", "S.fill_(0.5)", "B.copy_(B.flip(0))", "S.copy_(B[1])",
    "B.view(-1)[1:].mul_(2)", "torch.add(B, 1, out=B)", "with torch.no_grad(): P.mul_(0.9)",
)  # fmt: skip
_OWN = "S", "B", "P"
#: Wrong sizes are found when the kernel runs; the function may have raised another error before that.
_FOUND_LATE = "The size of tensor", "expanded size", "broadcast"
#: Errors that no backend of torch.compile raises: writes that overlap, and numbers written to truth values.
_NOT_RAISED = "single memory location", "can't be cast to the desired output type Bool"


class Around(torch.nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        """The function's results for the tensors."""
        return self.function(x, y, z)


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "function": ogt.fuse,
    "module": lambda function: ogt.fuse(Around(function)),
}


def text_of(rng: random.Random, *, is_planned: bool) -> str:
    """A function. It returns every value that it computes, because errors of unused values are not raised.

    Args:
        is_planned: True for a function that does not run at each call: it writes to none of its own tensors.
    """
    values, made, lines = ["x", "y", "z", *_OWN], [], []
    kinds = _FUSED if is_planned else _EXPRESSIONS

    def filled(text: str) -> str:
        for mark, words in (("$", values), ("#", ("0.5", "2", "-1.5", "3")), ("@", made)):
            while mark in text:
                text = text.replace(mark, rng.choice(words), 1)
        return text

    for number in range(rng.randint(2, 6)):
        name, kind = f"t{number}", rng.random()
        if kind < 0.12 and not is_planned:
            lines.append(rng.choice(_WRITES))
        elif kind < 0.3 and made:
            lines.append(filled(rng.choice(_IN_PLACE)))
        else:
            (several,) = rng.choices([e for _, e in kinds], [w for w, _ in kinds])
            under = "with torch.no_grad(): " if rng.random() < 0.06 and not is_planned else ""
            lines.append(f"{under}{name} = {filled(rng.choice(several))}")
            values.append(name)
            made.append(name)
    lines.append(f"return {', '.join(made) or 'x * 2'}")
    return "def f(x, y, z):\n" + "".join(f"    {line}\n" for line in lines)


def loaded(text: str, seed: int) -> dict[str, Any]:
    """The names defined by a file with the function and its own tensors."""
    name = f"<random function {seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    parameter = torch.nn.Parameter(torch.tensor([1.1, 0.5, -0.7]))
    defined = {"torch": torch, "F": torch.nn.functional, "S": torch.tensor(1.2), "B": torch.tensor([1.0, -2.0, 3.0])}
    defined["P"] = parameter
    exec(compile(text, name, "exec"), defined)
    return defined


def drawn(rng: random.Random) -> torch.Tensor:
    """An argument: contiguous, transposed, or expanded from one element."""
    shape = rng.choice(_SHAPES)
    made = torch.randn(shape).to(rng.choice(_DTYPES))
    if rng.random() < 0.15 and len(shape) > 1:
        made = made.transpose(0, -1).contiguous().transpose(0, -1)
    return made[:1].expand(shape) if rng.random() < 0.1 and shape and shape[0] else made


def unlike_calls(rng: random.Random) -> list[list[tuple[torch.Tensor, bool]]]:
    """The arguments of calls, of any shapes and dtypes, and whether each requires a gradient."""
    pool, calls = [drawn(rng) for _ in range(6)], []
    for _ in range(_CALLS):
        tensors = [rng.choice(pool) if rng.random() < 0.7 else drawn(rng) for _ in range(3)]
        if rng.random() < 0.1:
            tensors[1] = tensors[0]
        calls.append([(t, rng.random() < 0.4) for t in tensors])
    return calls


def fitting_calls(rng: random.Random) -> list[list[tuple[torch.Tensor, bool]]]:
    """As `unlike_calls`, in f32 and with shapes that fit: few shapes, in turns, so that plans are learned and used."""
    wants = [rng.random() < 0.4 for _ in range(3)]
    forms = rng.choices((lambda n: (n, 3), lambda n: (3,), lambda n: (1, 3), lambda n: (n, 1)), (7, 1, 1, 1), k=3)
    kinds = [[form(n) for form in forms] for n in rng.sample(range(1, 6), 3)]
    return [list(zip(map(torch.randn, rng.choice(kinds)), wants, strict=True)) for _ in range(_CALLS)]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call: its results and gradients, or an error in the call or in its backward pass."""

    results: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor | None, ...] = ()
    error: Exception | None = None
    in_backward: bool = False


def outcome(defined: dict[str, Any], call: Callable[..., Any], arguments: list[tuple[torch.Tensor, bool]]) -> Outcome:
    """Calls a function on copies of the arguments, some of which require a gradient, and runs backward."""
    given = [t.clone(memory_format=torch.preserve_format).requires_grad_(wants) for t, wants in arguments]
    defined["P"].grad = None
    try:
        made = call(*given)
    except Exception as error:
        return Outcome(error=error)
    results = made if isinstance(made, tuple) else (made,)
    try:
        sums = [r.to(torch.promote_types(r.dtype, torch.float32)).sum() for r in results if r.requires_grad]
        if sums:
            torch.autograd.backward(sums)
    except Exception as error:
        return Outcome(results, error=error, in_backward=True)
    return Outcome(results, tuple(t.grad for t in (*given, defined["P"])))


def difference(wanted: Outcome, found: Outcome, tolerance: float) -> str:
    """The difference between a fused call's outcome and the eager one's; "" if they agree."""
    if isinstance(found.error, OpGraphError) and not isinstance(found.error, InvalidShape):
        return ""  # an explicit refusal is correct
    if wanted.in_backward or found.in_backward:
        # When fused, a value that backward reads may be written in place: specs/torch.md.
        refused = wanted.in_backward and "inplace" in str(wanted.error)
        return (
            "" if refused or (wanted.in_backward and found.in_backward) else f"backward: {wanted.error} | {found.error}"
        )
    if wanted.error is not None or found.error is not None:
        is_other = found.error is not None and any(text in str(wanted.error) for text in _FOUND_LATE)
        is_same = is_other or type(wanted.error) is type(found.error)
        return "" if is_same else f"error: {wanted.error!r} | {found.error!r}"
    for what, slack in (("results", 1), ("gradients", 10)):
        for a, b in zip(getattr(wanted, what), getattr(found, what), strict=True):
            if not are_alike(a, b, tolerance * slack):
                return f"{what}: {a} | {b}"
    return ""


def are_alike(a: torch.Tensor | None, b: torch.Tensor | None, tolerance: float) -> bool:
    """True if tensors are equal up to a fraction of the largest element."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    a, b = a.detach().double(), b.detach().double()
    largest = a[a.isfinite()].abs().max().item() if a.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, largest), equal_nan=True)


def problem(seed: int, way: str = "function") -> str:
    """The difference between a fused function and the eager one in one of its calls, and its text; "" if they agree.

    Args:
        way: one of WAYS.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    is_planned = rng.random() < 0.5
    text = text_of(rng, is_planned=is_planned)
    eager, own = loaded(text, seed), loaded(text, seed)
    fused = WAYS[way](own["f"])
    calls = fitting_calls(rng) if is_planned else unlike_calls(rng)
    for number, arguments in enumerate(calls):
        tensors = [t for t, _ in arguments]
        if rng.random() < 0.3:
            name = rng.choice(_OWN)
            eager[name].data.copy_(torch.randn(eager[name].shape))
        for name in _OWN:  # a call that raised an error may have stopped at another line
            own[name].data.copy_(eager[name].data)
            if name != "P":  # values with gradients that were written left a history
                own[name].detach_()
                eager[name].detach_()
        with torch.set_grad_enabled(is_planned or rng.random() < 0.85), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted, found = outcome(eager, eager["f"], arguments), outcome(own, fused, arguments)
        tolerance = max(_TOLERANCE.get(t.dtype, 1e-5) for t in tensors)
        is_taken = way == "module" and any(text in str(wanted.error) for text in _NOT_RAISED)
        told = "" if is_taken else difference(wanted, found, tolerance)
        if not told and wanted.error is None and found.error is None:
            told = next((f"own tensor {n}" for n in _OWN if not are_alike(eager[n], own[n], 1e-5)), "")
        if told:
            shapes = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}{'*' * wants}" for t, wants in arguments)
            return f"seed {seed}, call {number} ({shapes}): {told}\n{text}"
    return ""


def problems(seeds: Iterable[int], way: str = "function") -> list[str]:
    """The problems of seeds."""
    return [found for seed in seeds if (found := problem(seed, way))]


def main() -> int:
    """Runs seeds; the exit status is 1 if one has a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:LAST")
    parser.add_argument("--way", choices=WAYS, default="function")
    args = parser.parse_args()
    first, last = map(int, args.seeds.split(":"))
    torch.set_num_threads(1)
    found = 0
    with interpreted(), torch._dynamo.config.patch(recompile_limit=64):
        for seed in range(first, last):
            torch._dynamo.reset()
            if told := problem(seed, args.way):
                found += 1
                print(told, flush=True)
    print(f"{last - first} functions, {found} with a problem")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
