"""Prepared calls: for tensors of one signature, a Python function of nothing but allocation, addresses and the launch.

A signature is what torch's own guards compare in one call into C++ (0.1 us for two tensors): the classes of tensors,
their dtypes, devices, sizes and strides, whether gradients are recorded, and everything that changes what torch's
dispatcher does (autocast, inference mode, torch.func, modes). The function is generated: what loops over operands would
cost is more than what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad

Tensors: TypeAlias = Sequence[torch.Tensor]
#: Runs on the tensors of a signature; gives a tensor where there is one result, else a tuple.
Run: TypeAlias = Callable[..., Any]
#: Whether tensors are of a signature.
Check: TypeAlias = Callable[..., bool]

#: Signatures that are compared one after the other before a call is looked up by a key of Python.
MAX_READY = 8

# torch's own guards, and what Inductor's programs allocate with, which parses no arguments.
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)
#: `empty_cpu(shape, strides, dtype)`: a new tensor on the CPU.
empty_cpu: Callable[..., torch.Tensor] = getattr(_guards, "_empty_strided_cpu", None) or (
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
)
#: The same on the current GPU.
empty_cuda: Callable[..., torch.Tensor] = getattr(_guards, "_empty_strided_cuda", None) or (
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
)
_modes = torch._C._len_torch_dispatch_stack


def is_plain() -> bool:
    """Whether nothing is going on that a signature does not tell of: a level of forward-mode gradients, a mode."""
    return forward_ad._current_level < 0 and not _modes()


#: The same as text, for generated functions, and the values that it names.
IS_PLAIN = "forward_ad._current_level < 0 and not modes()"
IS_PLAIN_VALUES: Mapping[str, Any] = MappingProxyType({"forward_ad": forward_ad, "modes": _modes})


def check_of(tensors: Tensors) -> Check | None:
    """What tells whether tensors are of the signature of these, one for each; None where torch has no guards.

    It takes whatever may stand in place of a tensor, but for nested tensors, of which torch's guards end the process
    (they ask for strides where nothing may be raised). Of one tensor given twice it says no.
    """
    if _TensorGuards is None or len({id(t) for t in tensors}) < len(tensors):
        return None
    check: Check = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@dataclass(frozen=True, slots=True)
class Statements:
    """The lines of a function that runs a program on tensors of a signature.

    Attributes:
        lines: Python statements.
        results: the names of the results.
        values: what else the lines name.
    """

    lines: tuple[str, ...]
    results: tuple[str, ...]
    values: Mapping[str, Any]

    def function(self, parameters: Sequence[str], returned: Sequence[str] | None = None) -> Run:
        """The function of these parameters.

        Args:
            returned: what it returns a tuple of; without it, the results: a single one as it is.
        """
        given = self.results if returned is None else returned
        text = given[0] if returned is None and len(given) == 1 else f"({''.join(f'{r}, ' for r in given)})"
        return defined("prepared", parameters, (*self.lines, f"return {text}"), self.values)


def defined(name: str, parameters: Sequence[str], lines: Sequence[str], values: Mapping[str, Any]) -> Run:
    """A Python function by its text."""
    body = "".join(f"    {line}\n" for line in lines)
    names = dict(values)
    exec(compile(f"def {name}({', '.join(parameters)}):\n{body}", f"<{name}>", "exec"), names)
    made: Run = names[name]
    return made
