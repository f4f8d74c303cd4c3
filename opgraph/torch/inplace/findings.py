"""Findings of the checker: texts for its observations, and checks of a custom Function's gradient."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from opgraph.runtime.providers.torch_internals import tree_iter
from opgraph.torch.inplace.observed_run import FunctionCall, Misread, Overwrite, Spoilt, Watch
from opgraph.torch.inplace.source_position import Position, raised_at

_CLONE = "write into a clone"


def _found(kind: str, at: Overwrite | Position | None, **text: Any) -> InplaceFinding:
    position = at.stack[0] if isinstance(at, Overwrite) and at.stack else at
    if not isinstance(position, Position):
        return InplaceFinding(kind=kind, file="?", line=0, code="(written outside torch's ops)", **text)
    return InplaceFinding(kind=kind, file=position.file, line=position.line, code=position.code, **text)


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _out_of_place(op: str) -> str:
    return op[:-1] if op.endswith("_") and not op.startswith("_") else op


def operand(misread: Misread) -> InplaceFinding:
    """The finding for an expression that reads a value that it overwrites, or one value under two names."""
    overwrite = misread.overwrite
    plain_op = _out_of_place(overwrite.op)
    if misread.aliased:
        what = f"{overwrite.op} overwrites a value that {misread.reader.where} reads under another name"
    else:
        what = f"{overwrite.op} overwrites a value that the same expression reads: it sees the new value in both places"
    return _found(
        "operand",
        overwrite,
        value=f"{_shape(overwrite.like)}, read at {misread.reader.where}: {misread.reader.code}",
        what=what,
        fix=f"use {plain_op} instead of {overwrite.op} here" if plain_op != overwrite.op else _CLONE,
    )


def saved(spoilt: Spoilt) -> InplaceFinding:
    """The finding for a value kept for backward that changed."""
    kept, overwrite = spoilt.kept, spoilt.overwrite
    maker = (
        f", kept for backward at {kept.stack[0].where}: {kept.stack[0].code}" if kept.stack else ", kept for backward"
    )
    if overwrite is not None and overwrite.in_backward:
        return _found(
            "backward",
            overwrite,
            value=_shape(kept.tensor) + maker,
            what="this backward overwrites a saved tensor: whoever else keeps it, and a second backward, get a wrong "
            "gradient",
            fix="allocate the gradient: torch.empty_like(saved), or clone what is saved",
        )
    how = "torch raises in backward" if spoilt.raises else "the gradient is wrong, and no error says so"
    name = overwrite.op if overwrite is not None else "something"
    plain_op = _out_of_place(name)
    if overwrite is None:
        fix = "do not write into this tensor's memory before backward"
    elif spoilt.raises:
        fix = f"use {plain_op} instead of {name} here, or write into a clone" if plain_op != name else _CLONE
    else:
        fix = f"use {plain_op} on the tensor itself, without .data or no_grad, or on a clone"
    return _found(
        "saved",
        overwrite,
        value=_shape(kept.tensor) + maker,
        what=f"{name} overwrites a value that backward needs: {how}",
        fix=fix,
        silent=not spoilt.raises,
    )


def hidden(misread: Misread) -> InplaceFinding:
    """The finding for a change that autograd does not see."""
    overwrite = misread.overwrite
    return _found(
        "hidden",
        overwrite,
        value=f"{_shape(overwrite.like)}, read at {misread.reader.where}: {misread.reader.code}",
        what=f"autograd does not see {overwrite.op} on a value that has a gradient: the gradient is that of the value "
        "before",
        fix=f"use {_out_of_place(overwrite.op)} on the tensor itself, without .data, .detach() or no_grad",
    )


#: Torch's errors for in-place ops in forward: on a leaf, on one of several views, on a view made without gradients.
_REFUSED = re.compile(r"modified inplace|in-?place operation")


def refused(error: RuntimeError) -> InplaceFinding | None:
    """The finding for an in-place op that torch refuses in forward; None if the error is another one."""
    if not _REFUSED.search(str(error)):
        return None
    return _found(
        "refused",
        raised_at(error),
        value="a value with a gradient",
        what=f"torch raises in forward: {error}",
        fix="use the op that is not in place, or write into a clone",
        silent=False,
    )


def functions(watch: Watch) -> Iterator[InplaceFinding]:
    """The findings for custom autograd.Functions that write into their arguments and are wrong."""
    for call in watch.calls.values():
        name = call.cls.__name__
        if overwrites_its_own_input(call):
            what = f"{name} writes into its input and keeps it: its backward gets the overwritten value"
            fix = "keep a clone taken before the write, or derive the gradient from the result"
        elif forgets_mark_dirty(call):
            what = f"{name} writes into its input and does not tell autograd"
            fix = "call ctx.mark_dirty(x) and return x, or write into a clone"
        else:
            continue
        yield _found("function", call.overwrite, value=_shape(call.overwrite.like), what=what, fix=fix)


def second_backward(watch: Watch, unequal: bool) -> Iterator[InplaceFinding]:
    """The finding for two backward passes that disagree, if no overwritten tensor explains it."""
    if not unequal or any(s.overwrite is not None and s.overwrite.in_backward for s in watch.spoilt):
        return
    writes = [o for found in watch.overwrites.values() for o in found if o.in_backward and o.stack]
    yield _found(
        "backward",
        min(writes, key=lambda o: o.number) if writes else None,
        value="what backward keeps between two passes",
        what="a second backward gives another gradient than the first",
        fix="do not write into what forward saved; allocate the gradient",
    )


def argument(name: str, overwrite: Overwrite | None) -> InplaceFinding:
    """The finding for an argument that changed."""
    return _found(
        "argument",
        overwrite,
        value=f"{name}, {_shape(overwrite.like)}" if overwrite is not None else name,
        what=f"{overwrite.op if overwrite is not None else 'something'} changes {name}, which the caller still holds",
        fix="work on a copy (x = x.clone()) or out of place; or, where that is meant, say may_change=",
    )


def distinct(findings: list[InplaceFinding]) -> tuple[InplaceFinding, ...]:
    """One finding per statement and kind, by line; a change reported as saved is not reported as hidden, too."""
    result: dict[tuple[str, str, int], InplaceFinding] = {}
    for finding in findings:
        place = (finding.file, finding.line)
        if finding.kind == "hidden" and ("saved", *place) in result:
            continue
        result.setdefault((finding.kind, *place), finding)
    return tuple(sorted(result.values(), key=lambda f: (f.file, f.line)))


@dataclass(frozen=True, slots=True, kw_only=True)
class InplaceFinding:
    """One mistake.

    Attributes:
        kind: "operand": an expression reads a value that it overwrites itself, or under two names. "saved": a value
            kept for backward was overwritten. "hidden": a value with a gradient was changed without autograd's
            knowledge. "function": a custom autograd.Function overwrites a value that its backward needs. "backward": a
            backward overwrites a value that a second one needs. "argument": an argument that the caller still holds
            changed. "refused": torch raises an error in forward.
        file, line, code: the statement that overwrites.
        value: the value that it changed, and the place where that value was made or kept.
        what: the mistake.
        fix: the code to write instead.
        silent: False if torch itself raises an error, in forward or in backward.
    """

    kind: str
    file: str
    line: int
    code: str
    value: str
    what: str
    fix: str
    silent: bool = True

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line}: {self.what}\n    {self.code}\n"
            f"  value: {self.value}\n  fix:   {self.fix}"
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class InplaceReport:
    """All mistakes of one run, in the order of the statements that make them."""

    findings: tuple[InplaceFinding, ...]

    @property
    def ok(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    def __iter__(self) -> Iterator[InplaceFinding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) if self.findings else "no in-place mistake was found"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"ok": self.ok, "findings": [asdict(f) for f in self.findings]}


#: Step of the central difference and the error allowed, by dtype: about eps**(1/3) and its square, with a margin.
_STEPS = {torch.float64: (1e-6, 1e-5), torch.float32: (5e-3, 2e-2)}


def overwrites_its_own_input(call: FunctionCall) -> bool:
    """True if the gradient is wrong, but would be right with the old values of the overwritten arguments.

    The reference is a central difference in a random direction, in float64 (float32 if the Function accepts nothing
    else). A Function whose gradient intentionally is not its derivative (a straight-through estimator) differs from the
    reference with both values, so it is not reported.
    """
    for dtype in _STEPS:
        try:
            return not _is_derivative(call, dtype, restore=False) and _is_derivative(call, dtype, restore=True)
        except Exception:  # any exception of a user's Function on this dtype
            continue
    return False


def forgets_mark_dirty(call: FunctionCall) -> bool:
    """True if an argument with a gradient is overwritten without a call of mark_dirty."""
    args = _given(call, [a.detach().clone().requires_grad_() for a in _differentiable(call)])
    history = {id(a): a.grad_fn for a in args if isinstance(a, torch.Tensor) and a.requires_grad}
    before = {id(a): a.detach().clone() for a in args if id(a) in history}
    try:
        call.cls.apply(*args)  # type: ignore[attr-defined]  # an autograd.Function
    except Exception:
        return False
    changed = [a for a in args if id(a) in before and not torch.equal(before[id(a)], a.detach())]
    return any(a.grad_fn is history[id(a)] for a in changed)


def _differentiable(call: FunctionCall) -> list[torch.Tensor]:
    return [a for a in call.args if isinstance(a, torch.Tensor) and a.requires_grad]


def _given(call: FunctionCall, leaves: Any, dtype: torch.dtype | None = None) -> list[Any]:
    """Fresh arguments: copies of `leaves` for the differentiable ones, of another float dtype for others."""
    waiting = iter(leaves)
    args: list[Any] = []
    for value in call.args:
        if not isinstance(value, torch.Tensor):
            args.append(value)
        elif value.requires_grad:
            args.append(next(waiting).clone())
        else:
            wide = value.dtype if dtype is None or not value.is_floating_point() else dtype
            args.append(value.to(wide, copy=True))
    return args


def _is_derivative(call: FunctionCall, dtype: torch.dtype, *, restore: bool) -> bool:
    """True if the gradient is the derivative; `restore`: arguments overwritten in forward are restored for backward."""

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args = _given(call, leaves, dtype)
        copies = [a.detach().clone() if isinstance(a, torch.Tensor) else None for a in args]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            result = call.cls.apply(*args)  # type: ignore[attr-defined]  # an autograd.Function
        made = tuple([t.clone() for t in tree_iter(result) if isinstance(t, torch.Tensor) and t.is_floating_point()])
        for arg, copy in zip(args, copies):
            if restore and copy is not None:
                arg.data.copy_(copy)
        return made

    leaves = [a.detach().to(dtype, copy=True).requires_grad_() for a in _differentiable(call)]
    step, allowed = _STEPS[dtype]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about float32: the step and the allowed error fit it
        return torch.autograd.gradcheck(
            function, leaves, eps=step, atol=allowed, rtol=allowed, nondet_tol=math.inf,
            raise_exception=False, check_undefined_grad=False, fast_mode=True,
        )  # fmt: skip
