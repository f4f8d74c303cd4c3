"""`check_inplace`: finds in-place mistakes in a torch function that raise no error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from opgraph.errors import InvalidArguments
from opgraph.runtime.providers.torch_internals import tree_iter, tree_map_only
from opgraph.torch.autograd_function_hooks import functions_on_stack
from opgraph.torch.inplace import findings
from opgraph.torch.inplace.findings import InplaceReport
from opgraph.torch.inplace.observed_run import Overwrite, Watch, digest, memory_of, plain


def check_inplace(
    fn: Callable[..., Any], *inputs: Any, may_change: Collection[int] = (), **kwargs: Any
) -> InplaceReport:
    """Runs a function forward and backward twice and reports in-place ops that make its results wrong silently.

    It finds: an expression that reads a value which it overwrites (`x * torch.sigmoid_(x)` is sigmoid squared) or
    reads one value under two names after overwriting it; a value kept for backward and then changed, through `.data`,
    `.detach()`, under `no_grad` or by another backward; a change that autograd does not see; a custom
    autograd.Function that overwrites a value that its backward needs; a backward that overwrites a value that a second
    one needs; and a changed argument that the caller still holds. It also reports each write that torch itself
    refuses, in forward or in backward, with `silent=False`; after a refusal in forward nothing else is checked. Only
    code that the run executes is checked.

    Args:
        fn: a function of tensors, or a module. Buffers and parameters of a module are restored afterwards, and so is
            the random state of the CPU.
        inputs, kwargs: its arguments, of any shape and device; they are copied and never changed. Floating-point
            tensors get a gradient.
        may_change: positions of inputs that `fn` is meant to overwrite. A function whose name ends with "_", one that
            returns nothing, and a module with `inplace=True` may change all of them.

    Returns: the report; it has `report.ok`, iteration over findings, and `print(report)`.

    Raises:
        InvalidArguments: `fn` is not callable, or an argument is a nested, sparse or meta tensor.
        Any exception of `fn`.
    """
    if not callable(fn):
        raise InvalidArguments(
            f"a {type(fn).__name__} is no function", where="check_inplace", fix="pass a function or a module"
        )
    _check_watchable([*enumerate(inputs), *kwargs.items()])
    with _state_kept(fn), torch.random.fork_rng(devices=[]), _as_written():
        seed = torch.initial_seed()
        try:
            watch, changed, result = _watched(fn, inputs, kwargs, differentiable=True)
        except RuntimeError as error:
            refused = findings.refused(error)
            if refused is not None:
                return InplaceReport((refused,))
            # An op without a derivative (out=, an integer result kept) may refuse inputs that have a gradient.
            torch.manual_seed(seed)
            watch, changed, result = _watched(fn, inputs, kwargs, differentiable=False)
        outputs = [t for t in tree_iter(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        unequal = _backwards(watch, outputs)
    named_so = getattr(fn, "__name__", "").endswith("_") or getattr(fn, "inplace", False) is True
    allowed = set(range(len(inputs))) if named_so or result is None else set(may_change)
    found = [
        *(findings.operand(m) for m in watch.misreads),
        *(findings.saved(s) for s in watch.spoilt),
        *findings.functions(watch),
        *(findings.hidden(m) for m in watch.hidden_reads),
        *findings.second_backward(watch, unequal),
        *(findings.argument(name, o) for index, name, o in changed if index not in allowed),
    ]
    return InplaceReport(findings.distinct(found))


def _check_watchable(arguments: Iterable[tuple[int | str, Any]]) -> None:
    """Rejects tensors that have no memory of their own: no overwrite of them would be found."""
    for name, argument in arguments:
        for tensor in tree_iter(argument):
            if not isinstance(tensor, torch.Tensor) or (plain(tensor) and not tensor.is_nested):
                continue
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").replace("_", " ")
            kind = "meta" if tensor.is_meta else layout
            raise InvalidArguments(
                f"argument {name!r} is a {kind} tensor, whose memory cannot be watched",
                where="check_inplace",
                fix="pass a dense tensor, such as the values of a nested one, with numbers in it",
            )


# -- running ----------------------------------------------------------------------------------------------------------


def _watched(
    fn: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any], *, differentiable: bool
) -> tuple[Watch, list[tuple[int | None, str, Overwrite | None]], Any]:
    def own(tensor: torch.Tensor) -> torch.Tensor:
        real = tensor.is_floating_point() or tensor.is_complex()
        leaf = tensor.detach().clone().requires_grad_(real and (differentiable or tensor.requires_grad))
        # In-place ops reject leaves; inside a network the argument is no leaf.
        return leaf.clone() if leaf.requires_grad else leaf

    args, named = tree_map_only(torch.Tensor, own, (inputs, kwargs))
    given: list[tuple[int | None, str, torch.Tensor]] = [
        (i, f"argument {i}", t) for i, a in enumerate(args) for t in tree_iter(a) if plain(t)
    ]
    given += [(None, f"argument {k!r}", t) for k, a in named.items() for t in tree_iter(a) if plain(t)]
    before = [digest(t) for _, _, t in given]
    watch = Watch(__file__)
    with functions_on_stack(), watch, watch.kernels(), watch.hooks():
        result = fn(*args, **named)
    changed: list[tuple[int | None, str, Overwrite | None]] = []
    for (index, name, tensor), old in zip(given, before):
        if digest(tensor) != old:
            writes = watch.overwrites.get(memory_of(tensor))
            changed.append((index, name, writes[0] if writes else None))
    return watch, changed, result


def _backwards(watch: Watch, outputs: list[torch.Tensor]) -> bool:
    """Runs two backward passes over some results of a function; True if they disagree.

    Results whose graph was freed by a backward of the function's own are skipped.
    """
    leaves = _leaves(outputs)
    if not leaves:
        return False
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(t.shape, generator=random).to(t) for t in outputs]
    passes = []
    watch.in_backward = True
    noted = len(watch.spoilt)
    try:
        for _ in range(2):
            with watch:
                given = [w.clone() for w in weights]
                passes.append(torch.autograd.grad(outputs, leaves, given, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        del watch.spoilt[noted:]
        alone = [_backwards(watch, [t]) for t in outputs if len(outputs) > 1]  # all of them run
        return any(alone)
    return any(
        a is not None and b is not None and not torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
        for a, b in zip(*passes)
    )


def _leaves(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every leaf that some outputs depend on."""
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(waiting)
    found = [t for t in outputs if t.grad_fn is None]
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        waiting += new
    return found


def _as_written() -> contextlib.AbstractContextManager[Any]:
    """Inside this context, compiled and fused models run as they were written: the ops of their source are checked.
    (Without Dynamo, whose import takes a second, there are no such models.)"""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextlib.contextmanager
def _state_kept(fn: Any) -> Iterator[None]:
    """Restores parameters and buffers of a module."""
    if not isinstance(fn, torch.nn.Module):
        yield
        return
    named: list[tuple[Any, Any]] = [(own, dict(own)) for m in fn.modules() for own in (m._parameters, m._buffers)]
    held = [*fn.parameters(), *fn.buffers()]
    copies = [t.detach().clone() for t in held]
    grads = [t.grad for t in fn.parameters()]
    try:
        yield
    finally:
        for own, before in named:  # the forward may have replaced a buffer by another tensor
            if [(name, id(t)) for name, t in own.items()] != [(name, id(t)) for name, t in before.items()]:
                own.clear()
                own.update(before)
        with torch.no_grad():
            for tensor, copy in zip(held, copies):
                if digest(tensor) != digest(copy):
                    tensor.copy_(copy)
        for parameter, grad in zip(fn.parameters(), grads):
            parameter.grad = grad
