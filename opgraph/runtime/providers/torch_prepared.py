"""Prepared calls: for tensors of one signature, a Python function of nothing but allocation, addresses and the launch.

A signature is what torch's own guards compare in one call into C++ (0.1 us for two tensors): the classes of tensors,
their dtypes, devices, sizes and strides, whether they require gradients, and what changes the way of torch's dispatcher
(autocast, inference mode, torch.func). It does not say whether gradients are recorded. The function is generated: what
loops over operands would cost is more than what they do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, MappingProxyType
from typing import Any, TypeAlias

import torch

from opgraph.runtime import huge_pages, memory_pool
from opgraph.runtime.cpu_kernel import HostKernel
from opgraph.runtime.kernel_sequence import KernelLaunch, KernelSequence
from opgraph.runtime.providers.torch import to_numpy
from opgraph.runtime.providers.torch_internals import TensorGuards, dispatch_modes, empty_cpu, forward_ad
from opgraph.runtime.runner import Runner

Tensors: TypeAlias = Sequence[torch.Tensor]
#: Runs on the tensors of a signature; gives a tensor where there is one result, else a tuple.
Run: TypeAlias = Callable[..., Any]
#: Whether tensors are of a signature.
Check: TypeAlias = Callable[..., bool]

#: Signatures that are compared one after the other before a call is looked up by a key of Python.
MAX_READY = 8


def is_plain() -> bool:
    """Whether nothing is going on that a signature does not tell of: a level of forward-mode gradients, a mode."""
    return forward_ad._current_level < 0 and not dispatch_modes()


#: The same as text, for generated functions, and the values that it names.
IS_PLAIN = "forward_ad._current_level < 0 and not modes()"
IS_PLAIN_VALUES: Mapping[str, Any] = MappingProxyType({"forward_ad": forward_ad, "modes": dispatch_modes})


def check_of(tensors: Tensors) -> Check | None:
    """What tells whether tensors are of the signature of these, one for each; None where torch has no guards.

    It takes whatever may stand in place of a tensor, but for nested tensors, of which torch's guards end the process
    (they ask for strides where nothing may be raised). Of one tensor given twice it says no.
    """
    if TensorGuards is None or len({id(t) for t in tensors}) < len(tensors):
        return None
    check: Check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
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
    exec(_compiled(f"def {name}({', '.join(parameters)}):\n{body}", name), names)
    made: Run = names[name]
    return made


@lru_cache(maxsize=1024)  # tensors of other sizes differ in the values alone
def _compiled(text: str, name: str) -> CodeType:
    return compile(text, f"<{name}>", "exec")


def tensor_names(count: int) -> tuple[str, ...]:
    """What the tensors of a call are called in generated functions."""
    return tuple(f"t{i}" for i in range(count))


def result_names(count: int) -> tuple[str, ...]:
    """What the results are called there."""
    return tuple(f"r{i}" for i in range(count))


def kernel_statements(
    runner: Runner,
    reads: Sequence[int],
    writes: Sequence[int],
    tensors: Tensors,
    outs: Tensors,
    names: Sequence[str],
    otherwise: Callable[[Tensors], Sequence[torch.Tensor]],
) -> Statements | None:
    """The statements of a partition that is a whole program; None where it is no kernel that can be prepared.

    Args:
        reads, writes: which of the tensors and results it reads and writes.
        tensors: an example; `names` are what they are called.
        outs: like the results.
        otherwise: runs the program on other tensors of the signature: on a GPU, those that a kernel for aligned memory
            does not serve.
    """
    results = result_names(len(outs))
    if isinstance(runner, HostKernel):
        return _on_host(runner, reads, writes, tensors, outs, names, results)
    if "opgraph.runtime.cuda_kernel" in sys.modules:
        from opgraph.runtime.cuda_kernel import CudaKernel  # needs CuPy
        from opgraph.runtime.providers.torch_cuda_prepared import on_device

        if isinstance(runner, CudaKernel):
            return on_device(runner, reads, writes, tensors, outs, names, results, otherwise)
    return None


def _on_host(
    kernel: HostKernel,
    reads: Sequence[int],
    writes: Sequence[int],
    tensors: Tensors,
    outs: Tensors,
    names: Sequence[str],
    results: tuple[str, ...],
) -> Statements:
    """One kernel on the CPU, by address."""
    plan = kernel.plan([to_numpy(tensors[i]) for i in reads], [to_numpy(outs[i]) for i in writes])
    lines: list[str] = []
    values: dict[str, Any] = {}
    for result, out in zip(results, outs, strict=True):
        line, more = _allocation(result, out)
        lines.append(line)
        values |= more
    if plan.size == 0:
        lines += [f"{result}.zero_()" for result in results]
        return Statements(tuple(lines), results, values)
    operands = [names[reads[i]] for i in kernel.reads] + [results[i] for i in writes]
    launch = KernelLaunch(plan, tuple((place, 0) for place in range(len(operands))))
    sequence = KernelSequence([launch], len(operands))
    addresses = ", ".join(f"{name}.data_ptr()" for name in operands)
    values["launch"] = sequence  # whose memory the packed call names
    if sequence.direct is not None:
        values["entry"], values["pack"] = sequence.direct
        lines.append(f"entry(pack({addresses}))")
    else:
        lines.append(f"launch({addresses})")
    return Statements(tuple(lines), results, values)


def _allocation(name: str, out: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """The statement that allocates a result on the CPU like this one, and the values that it names."""
    size, whole = out.nbytes, out.untyped_storage().nbytes()
    shape, strides, dtype = tuple(out.shape), out.stride(), out.dtype
    if size < huge_pages.LARGE:
        values = {"empty": empty_cpu, f"{name}_shape": shape, f"{name}_strides": strides, f"{name}_dtype": dtype}
        return f"{name} = empty({name}_shape, {name}_strides, {name}_dtype)", values
    if memory_pool.is_kept(size):
        return f"{name} = {name}_made()", {f"{name}_made": partial(of_spare_memory, whole, dtype, shape, strides)}

    def make_large() -> torch.Tensor:
        made = empty_cpu(shape, strides, dtype)
        huge_pages.advise(made.data_ptr(), size)
        return made

    return f"{name} = {name}_made()", {f"{name}_made": make_large}


def of_spare_memory(size: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A large result on the CPU, not yet written. Its storage, of that many bytes, cannot be resized."""
    try:
        memory = memory_pool.array(size)
    except OSError:  # no memory: torch says so in its words, or finds what was given back
        memory_pool.empty_cache()
        return torch.empty_strided(shape, strides, dtype=dtype)
    storage = torch.from_numpy(memory).untyped_storage()
    # Set, not viewed: a result that is a view of something must not be written in place.
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)
