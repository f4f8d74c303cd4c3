"""PyTorch's ModuleInfo database: every module of torch.nn with its inputs, compared by the same judge as the ops.

A module's parameters and buffers are arguments of its calls. The judge compares their values after the call (running
statistics), differentiates by them, and computes the truth with them in float64.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from opinfo_calls import Call, mapped, seed, tensors_in
from opinfo_findings import Case, Sweep
from opinfo_judge import Judge
from opinfo_run import copied
from opinfo_verdict import Finding
from opinfo_ways import Program
from torch import nn

#: The database lists only the first two. The others are judged as well, for modules that eager torch computes in them.
MODULE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Loaded:
    """A module, or a program around it, that receives the module's tensors with each call.

    Args:
        call: the module itself, or a program around it.
        module: the module that the tensors are set in.
    """

    def __init__(self, call: Callable[..., Any], module: nn.Module) -> None:
        self.call = call
        self.module = module

    def __call__(self, state: dict[str, torch.Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Sets the module's tensors and returns the result of the call.

        Args:
            state: parameters and buffers by name.
        """
        for name, tensor in state.items():
            owner, _, own = name.rpartition(".")
            setattr(self.module.get_submodule(owner), own, tensor)
        return self.call(*args, **kwargs)


class ModuleSweep(Sweep):
    """Runs the modules of the database; see Sweep."""

    def findings(self, info: Any, dtypes: list[torch.dtype], checks: str = "fge") -> Iterator[Finding]:
        """Runs the calls of a module and yields the findings.

        Args:
            info: a ModuleInfo.
            checks: letters: forward (f), gradients (g), errors (e).
        """
        for dtype in dtypes:
            cases: list[tuple[int, Iterator[Case]]] = []
            if "f" in checks:
                cases.append((0, _cases(info, dtype, 0, self.most)))
            if "g" in checks:
                cases.append((1, _cases(info, dtype, 1, self.most)))
            if "e" in checks and dtype == torch.float32:
                cases.append((0, _wrong_cases(info, dtype)))
            for derivative, some in cases:
                for case in some:
                    self.calls += not case.amid
                    for way in self.ways:
                        yield from self._found(
                            info, dtype, way, derivative, self._captured(info, [case], derivative, way)
                        )

    def _capture(self, cases: list[Case], how: Callable[[nn.Module], Callable[..., Any]]) -> Callable[..., Any]:
        """As Sweep, except that the module's tensors are set outside the captured program."""
        (case,) = cases
        loaded = case.program
        assert isinstance(loaded, Loaded)
        module = copy.deepcopy(loaded.module)
        call = Loaded(how(Program(module, case.amid)), module)
        return lambda given: [call(*given[0][0], **given[0][1])]


def all_modules() -> list[Any]:
    """The database. (Importing it takes seconds.)"""
    from torch.testing._internal.common_modules import module_db

    torch.backends.__allow_nonbracketed_mutation_flag = True  # type: ignore[attr-defined]
    return list(module_db)


def _cases(info: Any, dtype: torch.dtype, derivative: int, most: int | None) -> Iterator[Case]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        seed()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=derivative > 0, training=training
            )
        for number, given in enumerate(itertools.islice(inputs, most)):
            if given.forward_input is None:
                continue
            source = f"{'training' if training else 'evaluation'} {number} {given.desc}".rstrip()
            for case in _both(info, given, dtype, derivative, training, source):
                # A dtype that the database does not list may be missing in eager torch itself.
                if case.judge.eager.error is None or dtype in info.dtypes:
                    yield case


def _wrong_cases(info: Any, dtype: torch.dtype) -> Iterator[Case]:
    """Calls that torch refuses, without modules that it refuses to construct."""
    if info.module_error_inputs_func is None:
        return
    from torch.testing._internal.common_modules import ModuleErrorEnum

    errors = info.module_error_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=False)
    for number, error in enumerate(errors):
        if error.error_on is ModuleErrorEnum.FORWARD_ERROR:
            yield from _both(info, error.module_error_input, dtype, 0, False, f"error {number}")


def _both(info: Any, given: Any, dtype: torch.dtype, derivative: int, training: bool, source: str) -> Iterator[Case]:
    """A call of a module, alone and amid arithmetic."""
    seed()
    module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).to(dtype).train(training)
    args, kwargs = given.forward_input.args, dict(given.forward_input.kwargs)
    if info.is_lazy:  # its first call creates its parameters and changes its class
        with torch.no_grad():
            module(*copied(args, lambda x: x, None), **copied(kwargs, lambda x: x, None))
    module.requires_grad_(derivative > 0)
    state = {name: tensor.detach() for name, tensor in module.named_buffers()}
    state.update(module.named_parameters())
    if not derivative:
        args, kwargs = mapped(torch.Tensor.detach, (args, kwargs))
    if derivative and not any(t.requires_grad for t in tensors_in((state, args, kwargs))):
        return
    call = Call("module", source, (state, *args), kwargs)
    for amid in (False, True):
        program: Any = Loaded(Program(module, amid), module)
        yield Case(call, amid, program, Judge(program, call, derivative))
